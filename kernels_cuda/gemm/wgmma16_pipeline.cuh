// The pipeline of the grouped GEMMs of bfloat16 or float16 operands (KIND) on Hopper's tensor cores (sm_90a),
// on top of wgmma_tiles.cuh. Empty for other architectures.
//
// Each of the two consumer warpgroups computes 64 rows of a tile by all of its columns, accumulating in
// registers: while one waits for its wgmma or runs its epilogue, the other's wgmma run. (Keeping one K-step's
// wgmma in flight across the issue of the next was no faster, and with three stages 2 % slower.) The last
// tiles are split into two of 128 columns.
//
// A stage holds a K-step of 64 in pieces of 8192 bytes: 64 rows of 128 bytes with the 128-byte swizzle; two
// pieces of the first operand, four of the second. A piece is 64 operand rows by the K-step (K-major), or 64
// K-rows by 64 columns of the operand (MN-major).
#pragma once
#ifndef STAGES
#define STAGES 4
#endif
#define STAGE_SCALES 0
#define FULL_ARRIVALS 1
#define PRODUCER_WARPS 3
#define HALF_TILES 0
#define PARTS 2
// Staging buffers of finished rows: one for both warpgroups, used in turn, or (STAGES 3) one each
#define BUFFERS (STAGES == 3 ? 2 : 1)
#define PART_BYTES 33792  // 64 rows at PITCH, or 32 at WIDE_PITCH
#define TILE_BYTES (BUFFERS * PART_BYTES)
#if ADDEND
#include "mma.cuh"
#endif
#include "wgmma_tiles.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define STEP 64  // of K

// TMA load of one piece; `line`: its first operand row, or (MN) column.
template <bool MN>
__device__ __forceinline__ void fetch_piece(u8* to, const TensorMap* map, int line, int along, u64* barrier,
                                            u16 blocks) {
  if (MN)
    tile_load(to, map, 2 * line, along, barrier, blocks);
  else
    tile_load(to, map, 2 * along, line, barrier, blocks);
}

// One thread: loads a K-step of both operands from `a_along` and `b_along` of K on; of b's columns
// `halves` halves, or none (b_line < 0).
template <bool A_MN, bool B_MN>
__device__ __forceinline__ void fetch_step(const Shared& s, const Turn& turn, const TensorMap* a,
                                           const TensorMap* b, u32 rank, bool below, u32 halves, int a_along,
                                           int b_along, int a_line, int b_line) {
  u8* to = s.operands + turn.stage * STAGE_BYTES;
  u64* barrier = &s.full[turn.stage];
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

// Zeroes the K-rows of a step from `left` on, in pieces `first` and up: they belong to the next expert and
// may be NaN.
__device__ __forceinline__ void clear_rows(u8* operands, int left, u32 first) {
#pragma unroll 1
  for (u32 i = first * 512 + threadIdx.x; i < STAGE_BYTES / 16; i += CONSUMER_THREADS)
    if ((int)(i / 8 % 64) >= left) ((uint4*)operands)[i] = make_uint4(0u, 0u, 0u, 0u);
  fence_async();
  named_wait(1, CONSUMER_THREADS);
}

// Main loop of a consumer warpgroup: 64 rows of a tile of WIDTH columns over `steps` K-steps. Of the last one
// only the first `last` values count; MN-major operands are zeroed beyond.
template <int WIDTH, bool A_MN, bool B_MN>
__device__ __forceinline__ void multiply(const Shared& s, Turn& turn, u32 group, int steps, int last,
                                         float (&d)[128]) {
  const At operands = uniform(at_of(s.operands));
  const At full = operands + STAGES * STAGE_BYTES + TILE_BYTES;
  const At empty = kept(at_of_block(s.empty, threadIdx.x % 32 % CLUSTER));
  bool ready = false;
  // The first product overwrites the accumulators. In the weight gradient there may be none, and the compiler
  // serialises the products if only then the accumulators are cleared.
  const bool clears = A_MN;
#pragma unroll
  for (u32 i = 0; clears && i < 128; ++i) d[i] = 0.f;
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
      product_16<WIDTH, KIND, A_MN, B_MN>(d, a + (A_MN ? 128 : 2) * i, b + (B_MN ? 128 : 2) * i,
                                          clears || i > 0 || k > 0);
    products_commit();
    ready = barrier_ready_at(full + turn.stage * 8, turn.phase);
    products_wait<0>();
    // releases the stage to all thread blocks of the cluster
    __syncwarp();
    if (ARRIVING == 1 && threadIdx.x % 32 < CLUSTER) barrier_arrive_at(empty + stage * 8);
    for (u32 block = 0; ARRIVING > 1 && block < CLUSTER; ++block)
      barrier_arrive_at(at_of_block(s.empty, block) + stage * 8);
  }
  products_seen(d);
}

// Waits until this warpgroup may write its rows to the staging buffer, and returns its address.
__device__ __forceinline__ At wait_for_buffer(const Shared& s, u32 group, u32 phase) {
  const bool own = BUFFERS == 2;
  barrier_wait(&s.written[own ? group : group ^ 1u], own || group == 0 ? phase ^ 1u : phase);
  return at_of(s.tile) + (own ? group * PART_BYTES : 0);
}

// Hands a warpgroup's accumulators, as 16-bit values of TYPE BF16 or F16, to the store warps. ADDEND: adds
// the bfloat16 values that these have loaded to the same place. bias: null, or added: of this thread's first
// column; the vector of eight columns at `last` from there is the last one of the matrix.
template <int WIDTH, int TYPE>
__device__ __forceinline__ void hand_over_16(const Shared& s, float (&d)[128], u32 group, u32& phase,
                                             const float* bias = nullptr, int last = 0) {
  if (bias) {
#pragma unroll
    for (int j = 0; j < WIDTH / 8; ++j) {
      const float2 two = __ldg((const float2*)(bias + min(8 * j, last)));
      d[4 * j] += two.x, d[4 * j + 1] += two.y, d[4 * j + 2] += two.x, d[4 * j + 3] += two.y;
    }
  }
  // recomputed here instead of occupying a register during the main loop
  const u32 t = kept(threadIdx.x), lane = t % 32;
  auto two = [&](u32 i) { return TYPE == F16 ? to_f16x2(d[i], d[i + 1]) : to_bf16x2(d[i], d[i + 1]); };
  // this lane's address in a block of 16 rows and 16 columns: its row, and one half of the columns
  const At to = wait_for_buffer(s, group, phase) + (t % 128 / 32 * 16 + lane % 16) * PITCH + lane / 16 * 16;
  if (ADDEND) barrier_wait(&s.added[group], phase);
#pragma unroll
  for (u32 j = 0; j < WIDTH / 8; j += 2) {
#if ADDEND
    u32 pairs[4];
    load_matrices_at(to + 16 * j, pairs);
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      d[4 * j + 2 * i] += __uint_as_float(pairs[i] << 16);
      d[4 * j + 2 * i + 1] += __uint_as_float(pairs[i] & 0xffff0000u);
    }
#endif
    store_matrices_at(to + 16 * j, two(4 * j), two(4 * j + 2), two(4 * j + 4), two(4 * j + 6));
  }
  phase ^= 1u;
  hand_over(s, group);
}
#endif
