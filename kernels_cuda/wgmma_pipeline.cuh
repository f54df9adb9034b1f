// The pipeline of the grouped GEMMs of FP8 operands on Hopper's tensor cores (sm_90a); elsewhere it is empty.
//
// Both kernels are the same machine, the one of wgmma_tiles.cuh. Of a tile each of the two warpgroups
// multiplies all 128 rows by its own 128 columns, 64 rows at a time: the tensor cores sum the products of one
// step of 128 along the contraction, then the warpgroup scales them and adds them to float32 sums in
// registers. One more warp fetches the scales. The last tiles are made as two of 64 rows.
#pragma once
#define STAGES 3
#define STAGE_SCALES (ROWS + COLUMNS)
#define FETCHING (1 + 32)  // who announces the codes; the warp that fetches scales
#define SERVING 4
#ifndef HALF_TILES
#define HALF_TILES 1
#endif
#define PARTS 1
#define BUFFERS 1
#define TILE_BYTES 67584  // 128 rows PITCH apart, or 64 WIDE_PITCH apart
#include "wgmma_tiles.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define STEP 128
#define FOUR_SCALES (4 * (ROWS + COLUMNS / 128))  // forward: of four steps, four of a row side by side
#define AHEAD 3                                   // pairs of columns whose scales wgrad has fetched ahead

static_assert(2 * FOUR_SCALES <= STAGES * STAGE_SCALES && STAGES <= 5, "four steps' scales, twice");

// Forward: where a step's scales are, the first of a row's four being at 0. Four steps' are fetched when the
// step STAGES before the first is done with, over those of eight to five steps before it.
__device__ __forceinline__ u32 scales_of_four(const Turn& turn) {
  return turn.step / 4 % 2 * FOUR_SCALES + turn.step % 4;
}

// One warp: a step's codes of both operands, at byte `along` of rows `a_row` and `b_row`; of a's tile, so
// many `halves`; of b's nothing, when there are no columns (b_row < 0).
__device__ __forceinline__ void fetch_codes(const Shared& s, const Turn& turn, const TensorMap* a,
                                            const TensorMap* b, bool leads, u32 rank, bool below, u32 halves,
                                            int along, int a_row, int b_row) {
  u8* to = s.operands + turn.stage * STAGE_BYTES;
  u64* barrier = &s.full[turn.stage];
  if (!leads) return;  // a lane that waited and did not arrive could fall a round of stages behind
  barrier_wait(&s.empty[turn.stage], turn.phase ^ 1u);
  barrier_expect(barrier, halves * (A_BYTES / 2) + (b_row < 0 ? 0 : B_BYTES));
  const bool a_shared = CLUSTER > 1 && !below, b_shared = CLUSTER > 1 && below;
#pragma unroll
  for (u32 part = 0; part < 2; ++part) {
    if (part < halves && (!a_shared || part == rank))
      tile_load(to + part * (A_BYTES / 2), a, along, a_row + (int)part * (ROWS / 2), barrier,
                a_shared ? 3 : 1);
    if (b_row >= 0 && (!b_shared || part == rank))
      tile_load(to + A_BYTES + part * (B_BYTES / 2), b, along, b_row + (int)part * (COLUMNS / 2), barrier,
                b_shared ? 3 : 1);
  }
}

// Zeros past the `left` first codes of every row of a step: they belong to the next expert.
__device__ __forceinline__ void clear_behind(u8* codes, int left) {
  named_wait(1, MULTIPLIERS);
#pragma unroll 1
  for (u32 row = threadIdx.x; row < ROWS + COLUMNS; row += MULTIPLIERS)
#pragma unroll 1
    for (u32 c = (u32)left; c < STEP; ++c) codes[row * STEP + ((c / 16 ^ row % 8) * 16) + c % 16] = 0;
  fence_async();
  named_wait(1, MULTIPLIERS);
}

// A multiplying warpgroup's products of a tile, or of its upper half alone, `steps` of them, the last with
// only the `last` first codes of every row. scales_of(half, at) are those that a thread needs, promote(half,
// d, scales) adds d, 64 rows of the tile, to its sums; `at` is where the step's scales lie: FOUR steps' of a
// row side by side, or each step's with its codes. LATE: promote reads some of them, with the upper half.
// (That the warpgroups take turns, one scaling while the other's products run, is 5 % slower than as it
// comes.)
template <bool FOUR, bool LATE, class ScalesOf, class Promote>
__device__ __forceinline__ void multiply(const Shared& s, Turn& turn, u32 group, u32 halves, int steps,
                                         int last, const ScalesOf& scales_of, const Promote& promote) {
  const At codes = uniform(at_of(s.operands)), scales = codes + STAGES * STAGE_BYTES;
  const At full = scales + STAGES * STAGE_SCALES * 4 + TILE_BYTES;
  const At empty = kept(at_of_block(s.empty, threadIdx.x % 32 % CLUSTER));
  bool ready = false;
#pragma unroll 1
  for (int k = 0; k < steps; ++k) {
    const At here = codes + turn.stage * STAGE_BYTES;
    const At scales_here = scales + 4 * (FOUR ? scales_of_four(turn) : turn.stage * STAGE_SCALES);
    const At used = empty + turn.stage * 8;
    if (!ready) barrier_wait_at(full + turn.stage * 8, turn.phase);
    if (last < STEP && k + 1 == steps) clear_behind(s.operands + turn.stage * STAGE_BYTES, last);
    turn.next();
    const Tile a = tile_at(here), b = tile_at(here + A_BYTES + group * (128 * STEP));
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
      if (half >= halves) continue;
      const bool end = half + 1 == halves;
      float d[64];
      products_begin();
#pragma unroll
      for (u32 i = 0; i < STEP / 32; ++i)
        product<A_FMT, B_FMT>(d, a + half * (A_BYTES / 32) + 2 * i, b + 2 * i, i > 0);
      products_commit();
      // meanwhile
      auto by = scales_of(half, scales_here);
      if (end) ready = barrier_ready_at(full + turn.stage * 8, turn.phase);
      products_wait<0>();
      products_seen(d);
      auto give_back = [&] {  // all blocks of the cluster may have this stage's memory again
        __syncwarp();
        if (ARRIVING == 1 && threadIdx.x % 32 < CLUSTER) barrier_arrive_at(used);
        for (u32 block = 0; ARRIVING > 1 && block < CLUSTER; ++block)
          barrier_arrive_at(at_of_block(s.empty, block) + (used - empty));
      };
      const bool all_read = !LATE || half == 1;
      if (end && all_read) give_back();
      promote(half, d, by);
      if (end && !all_read) give_back();
    }
  }
}

// 64 rows of a multiplying warpgroup's sums straight to memory, or (ADD) added to what is there; ALL, or as
// far as there are rows and columns.
template <bool ADD, bool ALL>
__device__ __forceinline__ void store_sums(float* to, i64 pitch, int rows, int columns,
                                           const float (&sums)[64]) {
#pragma unroll
  for (u32 low = 0; low < 2; ++low, to += 8 * pitch) {
#pragma unroll
    for (u32 j = 0; j < 16; ++j) {
      const float2 two = make_float2(sums[4 * j + 2 * low], sums[4 * j + 2 * low + 1]);
      if (!ALL && (8 * (int)low >= rows || 8 * (int)j >= columns)) continue;
      if (ADD)
        add_floats(to + 8 * j, two);
      else
        *(float2*)(to + 8 * j) = two;
    }
  }
}
template <bool ADD>
__device__ __forceinline__ void store_sums(float* to, i64 pitch, int rows, int columns,
                                           const float (&sums)[64]) {
  if (rows > 8 && columns > 120)  // the compiler makes a branch of each condition
    store_sums<ADD, true>(to, pitch, rows, columns, sums);
  else
    store_sums<ADD, false>(to, pitch, rows, columns, sums);
}

// A multiplying warpgroup's sums, as bfloat16, to where the writers find them.
__device__ __forceinline__ void hand_over(const Shared& s, const float (&sums)[2][64], u32 group,
                                          u32& phase) {
  // made here, and not kept in a register while the products are made
  const u32 t = kept(threadIdx.x), lane = t % 32;
  // of 16 rows and 16 columns; this lane's row of them, and half of the columns
  const At to = at_of(s.tile) + (t % 128 / 32 * 16 + lane % 16) * PITCH + group * 256 + lane / 16 * 16;
  barrier_wait(s.written, phase ^ 1u);
  phase ^= 1u;
#pragma unroll
  for (u32 half = 0; half < 2; ++half)
#pragma unroll
    for (u32 j = 0; j < 16; j += 2) {
      const float* d = sums[half] + 4 * j;
      store_matrices_at(to + 64 * half * PITCH + 16 * j, to_bf16x2(d[0], d[1]), to_bf16x2(d[2], d[3]),
                        to_bf16x2(d[4], d[5]), to_bf16x2(d[6], d[7]));
    }
  fence_async();
  __syncwarp();
  if (lane < ARRIVING) barrier_arrive_here(s.made);
}
#endif
