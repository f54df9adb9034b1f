// The pipeline of the grouped GEMMs of bfloat16 or float16 operands (KIND) on Hopper's tensor cores (sm_90a);
// elsewhere it is empty.
//
// Both kernels are the same machine, the one of wgmma_tiles.cuh. Each of the two warpgroups makes 64 rows of
// a tile by all of its columns, in float32 sums that stay in its registers: while it waits for a step's
// products, or hands its finished rows over, those of the other one are made. (Not to wait until the next
// step's are issued was no faster, and with three stages 2 % slower.) The last tiles are made as two of 128
// columns.
//
// A stage holds a step of 64 of the contraction in pieces of 8192 bytes: 64 rows of 128 bytes, swizzled as
// TMA and the tensor cores do it; two pieces of the first operand, four of the second. A piece has 64 rows of
// the operand by the step (K-major), or the step's 64 rows by 64 columns of the operand (MN-major).
#pragma once
#ifndef STAGES
#define STAGES 4
#endif
#define STAGE_SCALES 0
#define FETCHING 1
#define SERVING 3
#define HALF_TILES 0
#define PARTS 2
// Where finished rows wait: one buffer for both warpgroups, in turn, or (STAGES 3) one each
#define BUFFERS (STAGES == 3 ? 2 : 1)
#define PART_BYTES 33792  // 64 rows PITCH apart, or 32 WIDE_PITCH apart
#define TILE_BYTES (BUFFERS * PART_BYTES)
#include "wgmma_tiles.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define STEP 64  // of the contraction

// An operand as TMA fetches it: `line` is the row of its first value, or (MN) the column.
template <bool MN>
__device__ __forceinline__ void fetch_piece(u8* to, const TensorMap* map, int line, int along, u64* barrier,
                                            u16 blocks) {
  if (MN)
    tile_load(to, map, 2 * line, along, barrier, blocks);
  else
    tile_load(to, map, 2 * along, line, barrier, blocks);
}

// One warp: a step of both operands, from `a_along` and `b_along` of the contraction on; of b's columns
// only so many `halves`, or none (b_line < 0).
template <bool A_MN, bool B_MN>
__device__ __forceinline__ void fetch_step(const Shared& s, const Turn& turn, const TensorMap* a,
                                           const TensorMap* b, bool leads, u32 rank, bool below, u32 halves,
                                           int a_along, int b_along, int a_line, int b_line) {
  u8* to = s.operands + turn.stage * STAGE_BYTES;
  u64* barrier = &s.full[turn.stage];
  if (!leads) return;  // a lane that waited and did not arrive could fall a round of stages behind
  barrier_wait(&s.empty[turn.stage], turn.phase ^ 1u);
  barrier_expect(barrier, A_BYTES + (b_line < 0 ? 0 : halves * (B_BYTES / 2)));
  const bool a_shared = CLUSTER > 1 && !below, b_shared = CLUSTER > 1 && below;
#pragma unroll
  for (u32 piece = 0; piece < A_BYTES / PIECE_BYTES; ++piece)
    if (!a_shared || piece == rank)
      fetch_piece<A_MN>(to + piece * PIECE_BYTES, a, a_line + (int)piece * 64, a_along, barrier,
                        a_shared ? 3 : 1);
#pragma unroll
  for (u32 piece = 0; piece < B_BYTES / PIECE_BYTES; ++piece)
    if (b_line >= 0 && piece < 2 * halves && (!b_shared || piece % 2 == rank))
      fetch_piece<B_MN>(to + A_BYTES + piece * PIECE_BYTES, b, b_line + (int)piece * 64, b_along, barrier,
                        b_shared ? 3 : 1);
}

// Zeros in the rows of a step from `left` on, of pieces `first` and up: they belong to the next expert, and
// might be NaN.
__device__ __forceinline__ void clear_rows(u8* operands, int left, u32 first) {
#pragma unroll 1
  for (u32 i = first * 512 + threadIdx.x; i < STAGE_BYTES / 16; i += MULTIPLIERS)
    if ((int)(i / 8 % 64) >= left) ((uint4*)operands)[i] = make_uint4(0u, 0u, 0u, 0u);
  fence_async();
  named_wait(1, MULTIPLIERS);
}

// A warpgroup's 64 rows of a tile of WIDTH columns: the products of so many steps; of the last
// only the `last` first values of the contraction count, and what MN-major operands have beyond is cleared.
template <int WIDTH, bool A_MN, bool B_MN>
__device__ __forceinline__ void multiply(const Shared& s, Turn& turn, u32 group, int steps, int last,
                                         float (&d)[128]) {
  const At operands = uniform(at_of(s.operands));
  const At full = operands + STAGES * STAGE_BYTES + TILE_BYTES;
  const At empty = kept(at_of_block(s.empty, threadIdx.x % 32 % CLUSTER));
  bool ready = false;
#pragma unroll
  for (u32 i = 0; i < 128; ++i) d[i] = 0.f;
#pragma unroll 1
  for (int k = 0; k < steps; ++k) {
    const At here = operands + turn.stage * STAGE_BYTES;
    const u32 stage = turn.stage;
    if (!ready) barrier_wait_at(full + stage * 8, turn.phase);
    if (B_MN && last < STEP && k + 1 == steps)
      clear_rows(s.operands + stage * STAGE_BYTES, last, A_MN ? 0 : A_BYTES / PIECE_BYTES);
    turn.next();
    const At a_at = here + group * PIECE_BYTES, b_at = here + A_BYTES;
    const Tile a = A_MN ? tile_mn_major_at(a_at) : tile_at(a_at);
    const Tile b = B_MN ? tile_mn_major_at(b_at) : tile_at(b_at);
    products_begin();
#pragma unroll
    for (u32 i = 0; i < STEP / 16; ++i)
      product_16<WIDTH, KIND, A_MN, B_MN>(d, a + (A_MN ? 128 : 2) * i, b + (B_MN ? 128 : 2) * i);
    products_commit();
    ready = barrier_ready_at(full + turn.stage * 8, turn.phase);
    products_wait<0>();
    // all blocks of the cluster may have this stage's memory again
    __syncwarp();
    if (ARRIVING == 1 && threadIdx.x % 32 < CLUSTER) barrier_arrive_at(empty + stage * 8);
    for (u32 block = 0; ARRIVING > 1 && block < CLUSTER; ++block)
      barrier_arrive_at(at_of_block(s.empty, block) + stage * 8);
  }
  products_seen(d);
}

// Waits until this warpgroup may put its rows into shared memory; `to` is where.
__device__ __forceinline__ At wait_for_buffer(const Shared& s, u32 group, u32 phase) {
  const bool own = BUFFERS == 2;
  barrier_wait(&s.written[own ? group : group ^ 1u], own || group == 0 ? phase ^ 1u : phase);
  return at_of(s.tile) + (own ? group * PART_BYTES : 0);
}

__device__ __forceinline__ void hand_over(const Shared& s, u32 group) {
  fence_async();
  __syncwarp();
  if (threadIdx.x % 32 < ARRIVING) barrier_arrive_here(&s.made[group]);
}

// A warpgroup's sums as 16-bit values, of TYPE BF16 or F16, to where the writers find them.
template <int WIDTH, int TYPE>
__device__ __forceinline__ void hand_over_16(const Shared& s, const float (&d)[128], u32 group, u32& phase) {
  // made here, and not kept in a register while the products are made
  const u32 t = kept(threadIdx.x), lane = t % 32;
  auto two = [&](u32 i) { return TYPE == F16 ? to_f16x2(d[i], d[i + 1]) : to_bf16x2(d[i], d[i + 1]); };
  // of 16 rows and 16 columns; this lane's row of them, and half of the columns
  const At to = wait_for_buffer(s, group, phase) + (t % 128 / 32 * 16 + lane % 16) * PITCH + lane / 16 * 16;
  phase ^= 1u;
#pragma unroll
  for (u32 j = 0; j < WIDTH / 8; j += 2)
    store_matrices_at(to + 16 * j, two(4 * j), two(4 * j + 2), two(4 * j + 4), two(4 * j + 6));
  hand_over(s, group);
}
#endif
