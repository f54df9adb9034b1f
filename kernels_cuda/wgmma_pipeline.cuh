// The pipeline of the grouped GEMMs of FP8 operands on Hopper's tensor cores (sm_90a); elsewhere it is empty.
//
// Both kernels are the same machine. A block makes tiles of 128 x 256 of the result, one after the other. Two
// warpgroups multiply, each all 128 rows by its own 128 columns, 64 rows at a time: the tensor cores sum the
// products of one step of 128 along the contraction, then the warpgroup scales them and adds them to float32
// sums in registers. The third warpgroup serves them: one thread fetches the codes of both operands by
// TMA, some steps ahead, one warp their scales, and two warps write finished tiles, from shared
// memory, while the next ones are made.
//
// CLUSTER blocks work on tiles below each other and share the columns' operand: each fetches its part for
// all, a fifth less from L2 than side by side; what is short is power, and 2 % of the time went with it. In
// an expert's last row of tiles, if it has no pair, they work side by side and share the rows' operand. The
// last tiles, if they are for no more than half of the clusters, are made as two of 64 rows.
#pragma once
#include "wgmma.cuh"

#ifndef CLUSTER
#define CLUSTER 2
#endif

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define ROWS 128
#define COLUMNS 256
#define STEP 128
#define STAGES 3  // steps that are fetched or used at a time
#define A_BYTES (ROWS * STEP)
#define B_BYTES (COLUMNS * STEP)
#define STAGE_BYTES (A_BYTES + B_BYTES)
#define STAGE_SCALES (ROWS + COLUMNS)
#define FOUR_SCALES (4 * (ROWS + COLUMNS / 128))  // forward: of four steps, four of a row side by side
#define TILE_BYTES 67584  // where a tile waits to be written: 128 rows 528 bytes apart, or 64 1056 apart,
#define PITCH 528         // so that neither side has bank conflicts
#define WIDE_PITCH 1056
// Rows of tiles that are worked on at a time, so that their operands stay in L2: wgrad; the forward, in
// bytes. With 16 everywhere 7168 x 2048 and x 3072 took 1.4 and 0.8 % longer.
#define HEIGHT 16
#define IN_L2 (15 << 20)
#define MULTIPLIERS 256
#define WRITERS 64
#define AHEAD 3  // pairs of columns whose scales wgrad has fetched ahead
#ifndef ARRIVING
#define ARRIVING 1  // lanes that arrive at a barrier for a warp; racecheck knows of no warp behind a lane: 32
#endif

// A value that all lanes have, so that the compiler knows it and computes with it in uniform registers, where
// the products have their operands' addresses from: else it moves them there in front of each one. The bounds
// of loops around it have to be known so as well.
template <class T>
__device__ __forceinline__ T uniform(T value) {
  return __shfl_sync(0xffffffffu, value, 0);
}

struct Shared {
  u8* codes;                           // [STAGES][STAGE_BYTES]: rows of the first operand, then of the second
  float* scales;                       // [STAGES][STAGE_SCALES]; forward: [2][FOUR_SCALES]
  u8* tile;                            // [TILE_BYTES]
  int* offsets;                        // [experts + 1]
  int* first;                          // [experts + 1]: how many `units` all experts before have
  u64 *full, *empty, *made, *written;  // barriers: [STAGES] of the stages, one of the tile
};

static_assert(2 * FOUR_SCALES <= STAGES * STAGE_SCALES && STAGES <= 5, "four steps' scales, twice");

struct Turn {  // of the stages
  u32 stage = 0, phase = 0, step = 0;
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, phase ^= 1u;
    ++step;
  }
  // Forward: where the step's scales are, the first of a row's four being at 0. Four steps' are fetched when
  // the step STAGES before the first is done with, over those of eight to five steps before it.
  __device__ __forceinline__ u32 scales() const { return step / 4 % 2 * FOUR_SCALES + step % 4; }
};

// The whole block: where things are in shared memory, the experts' table, the barriers. units(rows) of an
// expert with so many rows.
template <class Units>
__device__ __forceinline__ Shared begin(u8* memory, const int* offsets, int experts, i64 rows,
                                        const Units& units) {
  const u32 t = threadIdx.x, lane = t % 32;
  Shared s;
  s.codes = memory;
  s.scales = (float*)(memory + STAGES * STAGE_BYTES);
  s.tile = (u8*)(s.scales + STAGES * STAGE_SCALES);
  s.full = (u64*)(s.tile + TILE_BYTES);
  s.empty = s.full + STAGES, s.made = s.empty + STAGES, s.written = s.made + 1;
  s.offsets = (int*)(s.written + 1);
  s.first = s.offsets + experts + 1;
  if (t == 0) {
    for (u32 i = 0; i < STAGES; ++i) {
      barrier_init(&s.full[i], 1 + 32);  // who announces the codes; the warp that fetches scales
      barrier_init(&s.empty[i], CLUSTER * MULTIPLIERS / 32 * ARRIVING);
    }
    barrier_init(s.made, MULTIPLIERS / 32 * ARRIVING);
    barrier_init(s.written, WRITERS / 32 * ARRIVING);
  }
  for (int e = (int)t; e <= experts; e += (int)blockDim.x) s.offsets[e] = (int)clamped(offsets[e], rows);
  __syncthreads();
  if (t < 32) {
    int before = 0;
    for (int e0 = 0; e0 <= experts; e0 += 32) {
      const int e = e0 + (int)lane, count = e < experts ? s.offsets[e + 1] - s.offsets[e] : 0;
      const int mine = units(max(count, 0));
      const int total = sum_up_to_here(mine);
      if (e <= experts) s.first[e] = before + total - mine;
      before += __shfl_sync(0xffffffffu, total, 31);
    }
  }
  if (CLUSTER > 1)
    cluster_wait();
  else
    __syncthreads();
  return s;
}

// Nobody leaves while another block may still write to its memory.
__device__ __forceinline__ void end() {
  if (CLUSTER > 1) cluster_wait();
}

__device__ __forceinline__ int blocks_of_128(int rows) { return (rows + 127) / 128; }

// What the clusters make, one after the other: CLUSTER tiles at a time, of all of them. The last are made by
// halves, if so each cluster has one at most.
struct Work {
  int whole, all, unit = 0;
  u32 first = 0, halves = 2;  // of the unit at hand: which row of its tiles is its first, how often 64 it has
  __device__ __forceinline__ Work(int units) {
    const int stride = (int)gridDim.x / CLUSTER, rest = units % stride;
    whole = uniform(units - (2 * rest <= stride ? rest : 0));
    all = uniform(2 * units - whole);
  }
  __device__ __forceinline__ void take(int turn) {
    const int beyond = turn - whole;
    unit = beyond < 0 ? turn : whole + beyond / 2;
    first = beyond < 0 ? 0 : (u32)beyond % 2 * 64;
    halves = beyond < 0 ? 2 : 1;
  }
};

// The units of a matrix of tiles `high` x `wide`: below each other, and side by side in the rows that are
// left.
__device__ __forceinline__ int across(int wide) { return (wide + CLUSTER - 1) / CLUSTER; }
__device__ __forceinline__ int units_of(int high, int wide) {
  return high / CLUSTER * wide + high % CLUSTER * across(wide);
}

// Where tile `rank` of unit `rest` of such a matrix is: `height` rows of units at a time, column by column.
// Returns whether the unit's tiles are below each other.
__device__ __forceinline__ bool find_tile(int rest, int high, int wide, int height, u32 rank, int* row,
                                          int* column) {
  const int below = high / CLUSTER, group = rest / (height * wide);
  if (rest >= below * wide) {
    rest -= below * wide;
    *row = below * CLUSTER + rest / across(wide);
    *column = rest % across(wide) * CLUSTER + (int)rank;
    return false;
  }
  const int first = group * height;
  rest -= first * wide;
  height = min(below - first, height);
  *row = (first + rest % height) * CLUSTER + (int)rank;
  *column = rest / height;
  return true;
}

// One thread: a step's codes of both operands, at byte `along` of rows `a_row` and `b_row`; of a's tile, so
// many `halves`; of b's nothing, when there are no columns (b_row < 0).
__device__ __forceinline__ void fetch_codes(const Shared& s, const Turn& turn, const TensorMap* a,
                                            const TensorMap* b, u32 rank, bool below, u32 halves, int along,
                                            int a_row, int b_row) {
  u8* to = s.codes + turn.stage * STAGE_BYTES;
  u64* barrier = &s.full[turn.stage];
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
  const At codes = uniform(at_of(s.codes)), scales = codes + STAGES * STAGE_BYTES;
  const At full = scales + STAGES * STAGE_SCALES * 4 + TILE_BYTES;
  const At empty = kept(at_of_block(s.empty, threadIdx.x % 32 % CLUSTER));
  bool ready = false;
#pragma unroll 1
  for (int k = 0; k < steps; ++k) {
    const At here = codes + turn.stage * STAGE_BYTES;
    const At scales_here = scales + 4 * (FOUR ? turn.scales() : turn.stage * STAGE_SCALES);
    const At used = empty + turn.stage * 8;
    if (!ready) barrier_wait_at(full + turn.stage * 8, turn.phase);
    if (last < STEP && k + 1 == steps) clear_behind(s.codes + turn.stage * STAGE_BYTES, last);
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

// Two warps: a finished tile of bfloat16, up to `count` rows of `bytes` bytes, from shared memory to rows
// `pitch` bytes apart, by TMA.
__device__ __forceinline__ void write_tile(const Shared& s, int count, int bytes, u8* to, i64 pitch,
                                           u32& phase) {
  barrier_wait(s.made, phase);
  phase ^= 1u;
  if (bytes > 0)
    for (int row = (int)threadIdx.x % WRITERS; row < min(count, ROWS); row += WRITERS)
      bulk_store(to + row * pitch, s.tile + row * PITCH, (u32)min(bytes, 2 * COLUMNS));
  bulk_finish();
  __syncwarp();
  if (threadIdx.x % 32 < ARRIVING) barrier_arrive_here(s.written);
}

// The same of the upper half of a tile of float32, or (add) added to what is there.
__device__ __forceinline__ void write_wide_tile(const Shared& s, int count, int bytes, u8* to, i64 pitch,
                                                bool add, u32& phase) {
  const int row = (int)threadIdx.x % WRITERS;
  const u8* from = s.tile + row * WIDE_PITCH;
  barrier_wait(s.made, phase);
  phase ^= 1u;
  if (row < count && bytes > 0) {
    if (add)
      bulk_add_floats(to + row * pitch, from, (u32)min(bytes, 4 * COLUMNS));
    else
      bulk_store(to + row * pitch, from, (u32)min(bytes, 4 * COLUMNS));
  }
  bulk_finish();
  __syncwarp();
  if (threadIdx.x % 32 < ARRIVING) barrier_arrive_here(s.written);
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
