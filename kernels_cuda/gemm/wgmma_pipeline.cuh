// The pipeline of the FP8 grouped GEMMs on Hopper's tensor cores (sm_90a), on top of wgmma_tiles.cuh. Empty
// for other architectures.
//
// Each of the two consumer warpgroups computes all 128 rows of a tile by its own 128 columns, 64 rows at a
// time: wgmma accumulates one K-step of 128, then the warpgroup multiplies the result by the scales and
// promotes it to float32 accumulators in registers. A second producer warp loads the scales. The last tiles
// are split into two of 64 rows.
#pragma once
#define STAGES 3
#define STAGE_SCALES (ROWS + COLUMNS)
#ifndef GATHER
#define GATHER 0  // 1: rows of a are gathered by a fourth warpgroup (wgmma_gather.cuh)
#endif
#ifndef BIAS
#define BIAS 0  // 1: a bias of the expert is added to the forward's result
#endif
// arrivals: the TMA thread's expect_tx, and the 32 lanes of the scale warp or the thread that relays
#define FULL_ARRIVALS (1 + (GATHER ? 1 : 32))
#define PRODUCER_WARPS (GATHER ? 8 : 4)
#ifndef HALF_TILES
#define HALF_TILES 1
#endif
#define PARTS 1
#define BUFFERS 1
#define TILE_BYTES 67584  // 128 rows at PITCH, or 64 at WIDE_PITCH
#include "wgmma_tiles.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define STEP 128
#define FOUR_SCALES (4 * (ROWS + COLUMNS / 128))  // forward: scales of four K-steps, a row's four adjacent
#define AHEAD 3                                   // column pairs whose scales wgrad prefetches

static_assert(2 * FOUR_SCALES <= STAGES * STAGE_SCALES && STAGES <= 5,
              "two groups of four K-steps' scales must fit");

// Forward: offset of a K-step's scales. The scales of four K-steps are loaded together, once the K-step
// STAGES before the first has been released, and replace those of the eighth to fifth K-step before it.
__device__ __forceinline__ u32 scales_of_four(const Turn& turn) {
  return turn.step / 4 % 2 * FOUR_SCALES + turn.step % 4;
}

// One thread: loads a K-step of both operands, at byte `along` of rows `a_row` and `b_row`: `halves` halves
// of a's tile, unless it is gathered; of b nothing if the tile has no columns (b_row < 0).
__device__ __forceinline__ void fetch_codes(const Shared& s, const Turn& turn, const TensorMap* a,
                                            const TensorMap* b, u32 rank, bool below, u32 halves, int along,
                                            int a_row, int b_row) {
  u8* to = s.operands + turn.stage * STAGE_BYTES;
  u64* barrier = &s.full[turn.stage];
  barrier_wait(&s.empty[turn.stage], turn.phase ^ 1u);
  barrier_expect(barrier, (GATHER ? 0 : halves * (A_BYTES / 2)) + (b_row < 0 ? 0 : B_BYTES));
  const bool a_shared = CLUSTER > 1 && !below, b_shared = CLUSTER > 1 && below;
#pragma unroll
  for (u32 part = 0; part < 2; ++part) {
    if (!GATHER && part < halves && (!a_shared || part == rank))
      tile_load(to + part * (A_BYTES / 2), a, along, a_row + (int)part * (ROWS / 2), barrier,
                a_shared ? 3 : 1);
    if (b_row >= 0 && (!b_shared || part == rank))
      tile_load(to + A_BYTES + part * (B_BYTES / 2), b, along, b_row + (int)part * (COLUMNS / 2), barrier,
                b_shared ? 3 : 1);
  }
}

// Called by a warp of the forward: copies scales of K-step `k`, asynchronously; of `together` K-steps, 1, 2
// or 4, if it is a multiple of that. `from`: scales of the tile's row `row`, this lane's first; it copies
// COUNT rows, 32 apart, zeros for those whose bit in `valid` is 0. of_columns: scales of this lane's block of
// columns, or null.
template <int COUNT>
__device__ __forceinline__ void copy_scales(const Shared& s, const Turn& turn, int k, int together, u32 row,
                                            const float* from, i64 row_stride, i64 column_stride, u32 valid,
                                            const float* of_columns) {
  float* to = s.scales + scales_of_four(turn);
  auto copy = [&](void (*by)(void*, const void*, bool)) {
#pragma unroll
    for (u32 i = 0; i < COUNT; ++i)
      by(to + 4 * row + 128 * i, from + 32 * i * row_stride + k * column_stride, valid >> i & 1u);
    if (of_columns) by(to + 4 * (ROWS + threadIdx.x % 32), of_columns + k, true);
  };
  if (together == 4) {
    if (k % 4 == 0) copy(copy_async16);
  } else if (together == 2) {
    if (k % 2 == 0) copy(copy_async8);
  } else {
    copy(copy_async4);
  }
}

// Zeroes each row's codes from `left` on in a K-step: they belong to the next expert.
__device__ __forceinline__ void clear_behind(u8* codes, int left) {
  named_wait(1, CONSUMER_THREADS);
#pragma unroll 1
  for (u32 row = threadIdx.x; row < ROWS + COLUMNS; row += CONSUMER_THREADS)
#pragma unroll 1
    for (u32 c = (u32)left; c < STEP; ++c) codes[row * STEP + ((c / 16 ^ row % 8) * 16) + c % 16] = 0;
  fence_async();
  named_wait(1, CONSUMER_THREADS);
}

// A consumer warpgroup's loop over K-steps: step() for each, which ends with turn.next(). UNROLL: STAGES at a
// time, so that addresses in shared memory are immediates: the forward takes 1 to 4 % less time.
template <bool UNROLL, class Step>
__device__ __forceinline__ void loop_over_steps(Turn& turn, int steps, const Step& step) {
#pragma unroll 1
  for (int k = 0; k < steps;) {
    if (UNROLL && turn.stage == 0 && k + STAGES <= steps) {
      turn.stage = 0;  // tells the compiler the stages below
#pragma unroll
      for (int i = 0; i < STAGES; ++i) step();
      k += STAGES;
    } else {
      step(), ++k;
    }
  }
}

// What of a tile's last K-step is multiplied: the first `products` of its four wgmma, and of every row the
// first `codes`; the codes behind them belong to the next expert.
struct LastStep {
  u32 products = STEP / 32;
  int codes = STEP;
  __device__ __forceinline__ bool partial(int steps) const {
    return steps > 0 && (products < STEP / 32 || codes < STEP);
  }
};

// For multiply: nothing to do while the products of a tile's first K-step are in flight.
struct Nothing {
  __device__ __forceinline__ void in_flight(u32) const {}
  __device__ __forceinline__ void after() const {}
};

// Main loop of a consumer warpgroup: `steps` K-steps of a tile, or of its upper half only; `last`: what of
// the last one is multiplied. scales_of(half, at) returns a thread's scales; promote(half, d, scales, first)
// adds d, 64 rows of the tile, to its accumulators, or overwrites them (first). `at`: the K-step's scales,
// FOUR K-steps' interleaved or each K-step's own. LATE: promote reads some scales itself, with the upper
// half. FIRST: there is a complete K-step, and the first one overwrites the accumulators; otherwise the
// caller has cleared them. beside: in_flight(half) is called while the products of that half of the first
// K-step are in flight, and must not branch; after() once they are complete. (Alternating the warpgroups,
// one promoting during the other's wgmma, is 5 % slower than leaving them unsynchronised.)
template <bool FOUR, bool LATE, bool FIRST, class ScalesOf, class Promote, class Beside>
__device__ __forceinline__ void multiply(const Shared& s, Turn& turn, u32 group, u32 halves, int steps,
                                         const LastStep& last, const ScalesOf& scales_of,
                                         const Promote& promote, const Beside& beside) {
  const At codes = uniform(at_of(s.operands)), scales = codes + STAGES * STAGE_BYTES;
  const At full = scales + STAGES * STAGE_SCALES * 4 + TILE_BYTES;
  const At empty = kept(at_of_block(s.empty, threadIdx.x % 32 % CLUSTER));
  const Tile first_a = tile_at(codes), first_b = tile_at(codes + A_BYTES + group * (128 * STEP));
  bool ready = false;
  auto step = [&](bool first, bool partial) {
    const At scales_here = scales + 4 * (FOUR ? scales_of_four(turn) : turn.stage * STAGE_SCALES);
    const At used = empty + turn.stage * 8;
    if (!ready) barrier_wait_at(full + turn.stage * 8, turn.phase);
    if (partial && last.codes < STEP) clear_behind(s.operands + turn.stage * STAGE_BYTES, last.codes);
    const Tile here = turn.stage * (STAGE_BYTES / 16), a = first_a + here, b = first_b + here;
    turn.next();
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
      if (half >= halves) continue;
      const bool end = half + 1 == halves;
      float d[64];
      products_begin();
#pragma unroll
      for (u32 i = 0; i < STEP / 32; ++i)
        if (!partial || i == 0 || i < last.products)
          product<A_FMT, B_FMT>(d, a + half * (A_BYTES / 32) + 2 * i, b + 2 * i, i > 0);
      products_commit();
      // overlaps with the wgmma in flight
      auto by = scales_of(half, scales_here);
      if (first) beside.in_flight(half);
      if (end) ready = barrier_ready_at(full + turn.stage * 8, turn.phase);
      products_wait<0>();
      products_seen(d);
      auto release_stage = [&] {  // releases the stage to all thread blocks of the cluster
        __syncwarp();
        if (ARRIVING == 1 && threadIdx.x % 32 < CLUSTER) barrier_arrive_at(used);
        for (u32 block = 0; ARRIVING > 1 && block < CLUSTER; ++block)
          barrier_arrive_at(at_of_block(s.empty, block) + (used - empty));
      };
      const bool all_read = !LATE || half == 1;
      if (end && all_read) release_stage();
      if (first && end) beside.after();
      promote(half, d, by, first);
      if (end && !all_read) release_stage();
    }
  };
  // The first step has code of its own, which overwrites the accumulators: clearing them between two tiles
  // took 1 to 3 % of the time. So has a partial last step: tests between the wgmma of every step would be
  // executed in each.
  const bool partial = last.partial(steps);
  if (FIRST) step(true, false);
  loop_over_steps<!LATE>(turn, steps - FIRST - partial, [&] { step(false, false); });
  if (partial) step(false, true);
}

// Stores (ADD: accumulates) 64 rows of a consumer warpgroup's accumulators directly to memory; predicated on
// rows and columns unless ALL.
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
  if (rows > 8 && columns > 120)  // the compiler turns each predicate into a branch
    store_sums<ADD, true>(to, pitch, rows, columns, sums);
  else
    store_sums<ADD, false>(to, pitch, rows, columns, sums);
}

// A finished tile, on its way from a consumer warpgroup's accumulators to the store warps, as bfloat16.
struct Finished {
  const Shared& s;
  const float (&sums)[2][64];
  At to;  // this lane's address in a block of 16 rows and 16 columns: its row, and one half of the columns

  // Waits until the staging buffer is free. parity: of the number of tiles handed over before.
  __device__ __forceinline__ Finished(const Shared& s, const float (&sums)[2][64], u32 group, u32 parity)
      : s(s), sums(sums) {
    // recomputed here instead of occupying a register during the main loop
    const u32 t = kept(threadIdx.x), lane = t % 32;
    to = at_of(s.tile) + (t % 128 / 32 * 16 + lane % 16) * PITCH + group * 256 + lane / 16 * 16;
    barrier_wait(s.written, parity ^ 1u);
  }
  __device__ __forceinline__ void stage(u32 half) const {
#pragma unroll
    for (u32 j = 0; j < 16; j += 2) {
      const float* d = sums[half] + 4 * j;
      store_matrices_at(to + 64 * half * PITCH + 16 * j, to_bf16x2(d[0], d[1]), to_bf16x2(d[2], d[3]),
                        to_bf16x2(d[4], d[5]), to_bf16x2(d[6], d[7]));
    }
  }
};

// For multiply: with BIAS, reads a thread's values of bias [experts, width] for its columns, 8 j and the
// next, while the products of a tile's first K-step are in flight; promote begins with them.
struct ReadBias {
  float2 (&own)[16];
  const Shared& s;
  const Order& order;
  const float* bias;
  i64 width;
  u32 group;
  __device__ __forceinline__ void in_flight(u32) const {
    if (!BIAS) return;
    // The tile is read again: the compiler moves loads from an address that it knows earlier before the
    // staging of the last tile, and spills 57 registers.
    const WorkTile tile = order.again(s);
    const int first = tile.column() + (int)group * 128, last = (int)width - 8;  // vectors of eight columns
    const float* from = bias + tile.expert * width + threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < 16; ++j) own[j] = __ldg((const float2*)(from + min(first + 8 * j, last)));
  }
  __device__ __forceinline__ void after() const {}
};

// For multiply: hands over the tile before, if there is one, while the products of the next one's first
// K-step are in flight.
template <u32 HALVES>
struct HandOver {
  Finished tile;
  bool any;
  ReadBias bias;
  __device__ __forceinline__ void in_flight(u32 half) const {
    tile.stage(half);
    if (HALVES == 1) tile.stage(1);
    bias.in_flight(half);
  }
  __device__ __forceinline__ void after() const {
    if (any) hand_over(tile.s, 0);
  }
};

// Hands a consumer warpgroup's accumulators, as bfloat16, to the store warps. parity: of the number of tiles
// handed over before.
__device__ __forceinline__ void hand_over(const Shared& s, const float (&sums)[2][64], u32 group,
                                          u32 parity) {
  const Finished tile(s, sums, group, parity);
  tile.stage(0);
  tile.stage(1);
  hand_over(s, 0);
}
#endif
