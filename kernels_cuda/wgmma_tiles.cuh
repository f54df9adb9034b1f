// What the grouped GEMMs on Hopper's tensor cores (sm_90a) share, whatever their operands: the order of the
// tiles, the stages of shared memory and the writing of finished tiles. Elsewhere it is empty.
//
// A block makes tiles of 128 x 256 of the result, one after the other. Two warpgroups multiply. The third
// warpgroup serves them: one thread fetches steps of both operands by TMA, some steps ahead, and two warps
// write finished tiles, from shared memory, while the next ones are made.
//
// Which tiles a cluster makes is not known beforehand: a tile ahead it takes the next one, from a counter in
// memory that is zero when the kernel starts. So a kernel on another stream that holds some multiprocessors
// costs their share of the time: with a fixed share of the tiles for each cluster the shares of those that
// cannot start came after all others, at 1.7 times the time.
//
// CLUSTER blocks work on tiles below each other and share the columns' operand: each fetches its part for
// all, a fifth less from L2 than side by side; what is short is power, and 2 % of the time went with it. In
// an expert's last row of tiles, if it has no pair, they work side by side and share the rows' operand. The
// last tiles, if they are for no more than half of the clusters, are made as two halves.
//
// The pipelines of FP8 and of 16 bits define before they include it: STAGES, steps that are fetched or used
// at a time; STAGE_SCALES, floats beside each; FETCHING, arrivals that fill a stage; SERVING warps beside
// those that multiply; HALF_TILES, whether the experts' last tiles may be; PARTS of a tile that are handed
// over by themselves; TILE_BYTES, where they wait to be written, in so many BUFFERS.
#pragma once
#include "wgmma.cuh"

#ifndef CLUSTER
#define CLUSTER 2
#endif

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define ROWS 128
#define COLUMNS 256
#define STEP_BYTES 128
#define A_BYTES (ROWS * STEP_BYTES)
#define B_BYTES (COLUMNS * STEP_BYTES)
#define STAGE_BYTES (A_BYTES + B_BYTES)
#define PITCH 528        // bytes from row to row of 256 values of 16 bits that wait to be written, and of
#define WIDE_PITCH 1056  // 32 bits: neither side has bank conflicts
// Rows of tiles that are worked on at a time, so that their operands stay in L2: wgrad; the forward, in
// bytes. With 16 everywhere 7168 x 2048 and x 3072 took 1.4 and 0.8 % longer.
#ifndef HEIGHT
#define HEIGHT 16
#endif
#ifndef IN_L2
#define IN_L2 (15 << 20)
#endif
#define TURNS 4  // of a cluster, that may be known at a time
#define MULTIPLIERS 256
#define WRITERS 64
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
  u8* operands;                        // [STAGES][STAGE_BYTES]: rows of the first, then of the second
  float* scales;                       // [STAGES][STAGE_SCALES]
  u8* tile;                            // [TILE_BYTES]
  int* offsets;                        // [experts + 1]
  int* first;                          // [experts + 1]: how many `units` all experts before have
  u8* half;                            // [experts], of HALF_TILES: whether the last tile has 64 rows at most
  u64 *full, *empty, *made, *written;  // barriers: [STAGES] of the stages, [PARTS] of the tile
  u64 *known, *seen;                   // barriers: [TURNS]
  int* turns;                          // [TURNS]: the tile that is made then
};

struct Turn {  // of the stages
  u32 stage = 0, phase = 0, step = 0;
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, phase ^= 1u;
    ++step;
  }
};

// The whole block: where things are in shared memory, the experts' table, the barriers. units(rows) of an
// expert with so many rows; real: how many of them are no padding, or null for all.
template <class Units>
__device__ __forceinline__ Shared begin(u8* memory, const int* offsets, int experts, i64 rows,
                                        const Units& units, const int* real = nullptr) {
  const u32 t = threadIdx.x, lane = t % 32;
  Shared s;
  s.operands = memory;
  s.scales = (float*)(memory + STAGES * STAGE_BYTES);
  s.tile = (u8*)(s.scales + STAGES * STAGE_SCALES);
  s.full = (u64*)(s.tile + TILE_BYTES);
  s.empty = s.full + STAGES, s.made = s.empty + STAGES, s.written = s.made + PARTS;
  s.known = s.written + PARTS, s.seen = s.known + TURNS;
  s.turns = (int*)(s.seen + TURNS);
  s.offsets = (int*)(s.turns + TURNS);
  s.first = s.offsets + experts + 1;
  s.half = (u8*)(s.first + experts + 1);
  if (t == 0) {
    for (u32 i = 0; i < STAGES; ++i) {
      barrier_init(&s.full[i], FETCHING);
      barrier_init(&s.empty[i], CLUSTER * MULTIPLIERS / 32 * ARRIVING);
    }
    for (u32 i = 0; i < PARTS; ++i) {
      barrier_init(&s.made[i], MULTIPLIERS / PARTS / 32 * ARRIVING);
      barrier_init(&s.written[i], WRITERS / 32 * ARRIVING);
    }
    for (u32 i = 0; i < TURNS; ++i) {
      barrier_init(&s.known[i]);
      barrier_init(&s.seen[i], CLUSTER * (MULTIPLIERS / 32 + SERVING) * ARRIVING);
    }
  }
  for (int e = (int)t; e <= experts; e += (int)blockDim.x) s.offsets[e] = (int)clamped(offsets[e], rows);
  __syncthreads();
  for (int e = (int)t; HALF_TILES && e < experts; e += (int)blockDim.x) {
    const int count = s.offsets[e + 1] - s.offsets[e], some = real ? min(real[e], count) : count;
    s.half[e] = some <= count - (count - 1) % ROWS - 1 + ROWS / 2;
  }
  if (t < 32) {
    int before = 0;
    for (int e0 = 0; e0 <= experts; e0 += 32) {
      const int e = e0 + (int)lane, count = e < experts ? s.offsets[e + 1] - s.offsets[e] : 0;
      const int own_units = units(max(count, 0));
      const int total = sum_up_to_here(own_units);
      if (e <= experts) s.first[e] = before + total - own_units;
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

// A cluster's tiles, turn by turn: all warps of its blocks read which it is at this turn, and then are done
// with it. The warp of the first block that fetches takes the numbers, and passes them on to both blocks
// ahead.
struct Order {
  u32 turn = 0;

  // By a warp: the tile of this turn, as soon as it is known; again, until done.
  __device__ __forceinline__ int tile(const Shared& s) const {
    barrier_wait(&s.known[turn % TURNS], turn / TURNS % 2);
    return again(s);
  }
  __device__ __forceinline__ int again(const Shared& s) const { return uniform(s.turns[turn % TURNS]); }
  __device__ __forceinline__ void done(const Shared& s) {
    __syncwarp();
    if (threadIdx.x % 32 < ARRIVING) barrier_arrive_at(at_of_block(&s.seen[turn % TURNS], 0));
    ++turn;
  }

  // One thread of each block: the turn `ahead` turns further on will be passed on.
  __device__ __forceinline__ void expect(const Shared& s, u32 ahead) const {
    barrier_expect(&s.known[(turn + ahead) % TURNS], 4);
  }
  // One thread of the first block: what tile(s) returns to a block at that turn.
  template <class TileOf>
  __device__ __forceinline__ void pass_on(const Shared& s, u32 ahead, const TileOf& tile_of) const {
    const u32 then = turn + ahead, slot = then % TURNS;
    barrier_wait(&s.seen[slot], then / TURNS % 2 ^ 1u);
    for (u32 block = 0; block < CLUSTER; ++block)
      store_counted_at(at_of_block(&s.turns[slot], block), (u32)tile_of(block),
                       at_of_block(&s.known[slot], block));
  }
};

// What the clusters make, one after the other: CLUSTER tiles at a time, of all of them. The last are made by
// halves, if so each cluster has one at most. A tile of which only the upper half is to be made has its
// number inverted: it is negative.
struct Work {
  int whole, all, unit = 0;
  u32 first = 0, halves = 2;  // of the unit at hand: which row of its tiles is its first, how often 64 it has
  __device__ __forceinline__ Work(int units) {
    const int stride = (int)gridDim.x / CLUSTER, rest = units % stride;
    whole = uniform(units - (2 * rest <= stride ? rest : 0));
    all = uniform(2 * units - whole);
  }
  __device__ __forceinline__ void take(int tile) {
    const int turn = tile < 0 ? ~tile : tile, beyond = turn - whole;
    unit = beyond < 0 ? turn : whole + beyond / 2;
    first = beyond < 0 ? 0 : (u32)beyond % 2 * 64;
    halves = beyond < 0 && tile >= 0 ? 2 : 1;
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

// Two warps: a part of a finished tile of 16-bit values, up to `count` rows of `bytes` bytes, at most `most`,
// from shared memory to rows `pitch` bytes apart, by TMA.
__device__ __forceinline__ void write_rows(const Shared& s, u32 part, int count, int bytes, int most, u8* to,
                                           i64 pitch, u32& phase) {
  const u8* from = s.tile + part % BUFFERS * (TILE_BYTES / BUFFERS);
  barrier_wait(&s.made[part], phase);
  if (part + 1 == PARTS) phase ^= 1u;
  if (bytes > 0)
    for (int row = (int)threadIdx.x % WRITERS; row < min(count, ROWS / PARTS); row += WRITERS)
      bulk_store(to + row * pitch, from + row * PITCH, (u32)min(bytes, most));
  bulk_finish();
  __syncwarp();
  if (threadIdx.x % 32 < ARRIVING) barrier_arrive_here(&s.written[part]);
}

// The same of half as many rows of float32, or (add) added to what is there; `to_row(row)` is where a row
// goes.
template <class ToRow>
__device__ __forceinline__ void write_wide_rows(const Shared& s, u32 part, int count, int bytes, int most,
                                                const ToRow& to_row, bool add, u32& phase) {
  const int row = (int)threadIdx.x % WRITERS;
  const u8* from = s.tile + part % BUFFERS * (TILE_BYTES / BUFFERS) + row * WIDE_PITCH;
  barrier_wait(&s.made[part], phase);
  if (part + 1 == PARTS) phase ^= 1u;
  if (row < count && bytes > 0) {
    if (add)
      bulk_add_floats(to_row(row), from, (u32)min(bytes, most));
    else
      bulk_store(to_row(row), from, (u32)min(bytes, most));
  }
  bulk_finish();
  __syncwarp();
  if (threadIdx.x % 32 < ARRIVING) barrier_arrive_here(&s.written[part]);
}
#endif
