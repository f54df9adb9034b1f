// The order in which blocks make tiles of 128 rows by 128 columns, and where a tile's rows lie: strips of
// experts' rows, their table in shared memory, and whose turn it is.
#pragma once
#include "fp8.cuh"

#define TILE 128
#define CHUNK_ROWS 8
#define CHUNKS 16
#define TILE_THREADS (32 * CHUNKS)
// Blocks on a multiprocessor, whose shared memory holds no second one on sm_89 and sm_120.
#define TILE_BLOCKS (__CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200 ? 2 : 1)

// As many blocks as fit at once make tiles in turn, one column of tiles after the other, from above to below:
// what is written at a time lies together, and lines that two tiles share are whole before they leave L2. If
// they have many, a block takes its next one when it is free, so that none falls behind. A row of tiles is a
// strip of 128 rows, or four of 32, and no strip crosses an expert: strips are numbered through all experts.

struct __align__(16) Place {  // of a tile
  int base[4], count[4];      // of its strips: the first row, and how many
  int row, column;            // in tiles; row -1: there is none
};

// What a block knows of all strips. The table, in shared memory, has for each expert its first strip, its
// first row, and the row past its last.
struct Strips {
  const int* offsets;
  const int* table;
  int ranges, height, total;  // how many strips there are
  i64 rows;
};

#define PLACES 4  // that a block keeps

// Whether it is the last of a line: in the order of the tiles the line is done with, then.
template <class T>
__device__ __forceinline__ bool ends_line(const T* p) {
  return (size_t)p % 128 == 128 - sizeof(T);
}

// How many strips, of so many rows each, the rows from `lo` to `hi` make.
__device__ __forceinline__ int strips_between(int lo, int hi, int height) {
  return hi > lo ? (hi - lo + height - 1) / height : 0;
}

// Fill the table; the whole block takes part, E offsets are read at once (a table made beforehand would be a
// launch of 3 us), by 256 threads of it. The rows past the last expert, and before the first, come after
// all others, as if they were two more; *used, in shared memory, is where their strips begin.
__device__ __forceinline__ Strips find_strips(const int* offsets, i64 experts, i64 rows, int height,
                                              int* table, int* used) {
  __shared__ int sums[8];
  const int t = threadIdx.x, lane = t % 32, warp = t / 32;
  const int ranges = offsets ? (int)experts + 2 : 0;
  if (t == 0) *used = 0x7fffffff;
  int before = 0;  // strips of the experts of earlier rounds
  for (int e0 = 0; e0 < ranges; e0 += 256) {
    const int e = t < 256 ? e0 + t : ranges;
    int lo = 0, hi = 0;
    if (e < ranges) {
      lo = e <= experts ? (int)clamped(offsets[e], rows) : 0;
      hi = (int)(e < experts    ? clamped(offsets[e + 1], rows)
                 : e == experts ? rows
                                : clamped(offsets[0], rows));
    }
    const int own_strips = strips_between(lo, hi, height);
    int total = sum_up_to_here(own_strips);
    if (lane == 31 && warp < 8) sums[warp] = total;
    __syncthreads();
    for (int w = 0; w < 8; ++w) {
      if (w < warp) total += sums[w];
    }
    if (e < ranges) {
      table[e] = before + total - own_strips;
      table[ranges + e] = lo;
      table[2 * ranges + e] = max(lo, hi);
      if (e == experts) *used = before + total - own_strips;
    }
    for (int w = 0; w < 8; ++w) before += sums[w];
    __syncthreads();
  }
  __syncthreads();
  if (!offsets) before = (int)((rows + height - 1) / height);
  return {offsets, table, ranges, height, before, rows};
}

// By a whole warp: how many of the strips' experts begin at or before this one is counted, not searched for;
// that is a chain of one load, not of one for every halving.
__device__ __forceinline__ void find_strip(const Strips& s, int strip, int* base, int* count) {
  int first = strip * s.height, end = (int)s.rows;
  if (s.offsets) {
    int e = -1;  // its expert
    for (int e0 = 0; e0 < s.ranges; e0 += 32) {
      const int range = e0 + threadIdx.x % 32;
      e += __popc(__ballot_sync(0xffffffffu, range < s.ranges && s.table[range] <= strip));
    }
    first = e < 0 ? 0 : s.table[s.ranges + e] + (strip - s.table[e]) * s.height;
    end = e < 0 ? 0 : s.table[2 * s.ranges + e];
  }
  *base = min(first, (int)s.rows);
  *count = (int)clamped((i64)end - first, s.height);
}

// A block's tiles, by turn: which it makes, and where they lie. `taken`: how many have been taken beyond the
// first two of each block, 0 from the launch before this one; null: the turns are fixed. `by_rows`: one row
// of tiles after another, where rows of codes and their scales are written as well, so that neighbours in
// them are written at about the same time (48,128 x 7168 both ways: 384 to 371 us); else one column after
// another (16,384 x 7168 column-wise: 88 us for 91).
struct Turns {
  Strips strips;
  Place* places;  // [PLACES] in shared memory
  int* taken;
  bool by_rows;
  u32 down, across, claim;  // in tiles; warp 7, lane 0: the next tile that was taken

  __device__ __forceinline__ Turns(const Strips& s, i64 columns, Place* p, int* t, bool rows_first)
      : strips(s),
        places(p),
        taken(t),
        by_rows(rows_first),
        down((s.total + TILE / s.height - 1) / (TILE / s.height)),
        across((u32)((columns + TILE - 1) / TILE)) {}
  __device__ __forceinline__ Place& place(u32 turn) const { return places[turn % PLACES]; }
  __device__ __forceinline__ bool has(u32 turn) const { return place(turn).row >= 0; }

  // Warp 7 looks up where the tile of a turn lies, turn by turn.
  __device__ __forceinline__ void find(u32 turn) {
    u32 tile = blockIdx.x + turn * gridDim.x;
    if (taken && turn > 1) {
      tile = __shfl_sync(0xffffffffu, claim, 0);
      take();
    }
    const bool leads = threadIdx.x % 32 == 0;
    Place& p = place(turn);
    if (tile >= down * across) {
      if (leads) p.row = -1;
      return;
    }
    const u32 length = by_rows ? across : down, line = tile / length, inside = tile - line * length;
    const u32 row = by_rows ? line : inside, column = by_rows ? inside : line;
    for (u32 q = 0; q < TILE / strips.height; ++q) {
      int base, count;
      find_strip(strips, (int)(row * (TILE / strips.height) + q), &base, &count);
      if (leads) p.base[q] = base, p.count[q] = count;
    }
    if (leads) p.row = (int)row, p.column = (int)column;
  }

  __device__ __forceinline__ void take() {
    if (taken && threadIdx.x % 32 == 0) claim = 2 * gridDim.x + atomicAdd(taken, 1);
  }

  // Before the first turn, by the whole block: its rows are looked up, and its tile is fetched.
  template <class Look, class Fetch>
  __device__ __forceinline__ void start(Look& look, Fetch& fetch) {
    if (threadIdx.x / 32 == 7) {
      find(0);
      find(1);
    }
    __syncthreads();
    look(0);
    __syncthreads();
    fetch(0);
    if (threadIdx.x / 32 == 7) {
      pdl_wait();
      take();
    }
  }

  // At the top of every turn, by the whole block: after the next barrier it is known what comes next but
  // one.
  __device__ __forceinline__ void begin(u32 turn) {
    if (threadIdx.x / 32 == 7) find(turn + 2);
  }

  // Row `t` of a tile, or -1.
  __device__ __forceinline__ int row(u32 turn, u32 t) const {
    const Place& p = place(turn);
    const u32 q = t / strips.height, inside = t % strips.height;
    return (int)inside < p.count[q] ? p.base[q] + (int)inside : -1;
  }
};

// The scales of strips that there is room for, and no tile.
__device__ __forceinline__ void clear_scales(const Turns& turns, i64 strips, i64 columns, int size,
                                             void* scales) {
  const i64 first = (i64)turns.down * (TILE / turns.strips.height) * columns * size / 4;
  const i64 end = strips * columns * size / 4, step = (i64)gridDim.x * blockDim.x;
  for (i64 i = first + (i64)blockIdx.x * blockDim.x + threadIdx.x; i < end; i += step) ((u32*)scales)[i] = 0u;
}
