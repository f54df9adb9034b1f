// Tile scheduling for kernels that process tiles of 128 rows by 128 columns: the order of the tiles, the
// mapping of tile rows to strips of an expert's rows, and each thread block's sequence of tiles.
#pragma once
#include "fp8.cuh"

#define TILE 128
#define CHUNK_ROWS 8
#define CHUNKS 16
#define TILE_THREADS (32 * CHUNKS)
// Resident thread blocks per SM; shared memory of sm_89 and sm_120 holds only one.
#define TILE_BLOCKS (__CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200 ? 2 : 1)

// Persistent thread blocks process the tiles column of tiles by column of tiles, top to bottom. Concurrent
// writes are then close to each other, and cache lines shared by two tiles are complete before L2 evicts
// them. With many tiles per block, a block claims its next tile dynamically, so that none falls behind. A row
// of tiles is one strip of 128 rows or four strips of 32. Strips never cross an expert boundary and are
// numbered across experts.

struct __align__(16) Place {  // location of a tile
  int base[4], count[4];      // per strip: first row, number of rows
  int row, column;            // in units of tiles; row -1: no tile
};

// Strip numbering. The table in shared memory holds for each expert: its first strip, its first row, its last
// row + 1.
struct Strips {
  const int* offsets;
  const int* table;
  int ranges, height, total;  // height: rows of a strip; total: number of strips
  i64 rows;
};

#define PLACES 4  // ring of tile locations per thread block

// Whether *p is the last element of its cache line; in tile order, the line is then complete.
template <class T>
__device__ __forceinline__ bool ends_line(const T* p) {
  return (size_t)p % 128 == 128 - sizeof(T);
}

// Number of strips of `height` rows that cover rows lo to hi.
__device__ __forceinline__ int strips_between(int lo, int hi, int height) {
  return hi > lo ? (hi - lo + height - 1) / height : 0;
}

// Fills the table; called by the whole thread block, of which 256 threads read the offsets in parallel. (A
// separate kernel for the table would cost a launch of 3 us.) The rows behind the last expert and before the
// first count as two more experts at the end; *used, in shared memory, is their first strip.
__device__ __forceinline__ Strips find_strips(const int* offsets, i64 experts, i64 rows, int height,
                                              int* table, int* used) {
  __shared__ int sums[8];
  const int t = threadIdx.x, lane = t % 32, warp = t / 32;
  const int ranges = offsets ? (int)experts + 2 : 0;
  if (t == 0) *used = 0x7fffffff;
  int before = 0;  // strips of the experts of earlier iterations
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

// Rows of a strip; called by a whole warp. Its expert is found by counting the experts that start at or
// before it: one dependent load instead of one per step of a binary search.
__device__ __forceinline__ void find_strip(const Strips& s, int strip, int* base, int* count) {
  int first = strip * s.height, end = (int)s.rows;
  if (s.offsets) {
    int e = -1;  // expert of the strip
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

// A thread block's sequence of tiles. `taken`: global counter of the tiles claimed beyond each block's first
// two, zeroed by the previous launch; null: static schedule. `by_rows`: row-major tile order, for kernels
// that also write row-wise codes and scales, so that adjacent ones are written at about the same time (48,128
// x 7168 in both directions: 384 to 371 us); otherwise column-major (16,384 x 7168 column-wise: 88 instead of
// 91 us).
struct Turns {
  Strips strips;
  Place* places;  // [PLACES] in shared memory
  int* taken;
  bool by_rows;
  u32 down, across, claim;  // in tiles; claim: the next claimed tile, in lane 0 of warp 7

  __device__ __forceinline__ Turns(const Strips& s, i64 columns, Place* p, int* t, bool rows_first)
      : strips(s),
        places(p),
        taken(t),
        by_rows(rows_first),
        down((s.total + TILE / s.height - 1) / (TILE / s.height)),
        across((u32)((columns + TILE - 1) / TILE)) {}
  __device__ __forceinline__ Place& place(u32 turn) const { return places[turn % PLACES]; }
  __device__ __forceinline__ bool has(u32 turn) const { return place(turn).row >= 0; }

  // Warp 7 locates the tile of a turn; called once per turn, in order.
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

  // Before turn 0, called by the whole thread block: locates its rows and fetches its tile.
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

  // At the start of each turn, called by the whole thread block: locates the tile of turn + 2, which the next
  // barrier publishes.
  __device__ __forceinline__ void begin(u32 turn) {
    if (threadIdx.x / 32 == 7) find(turn + 2);
  }

  // Row `t` of the tile, or -1.
  __device__ __forceinline__ int row(u32 turn, u32 t) const {
    const Place& p = place(turn);
    const u32 q = t / strips.height, inside = t % strips.height;
    return (int)inside < p.count[q] ? p.base[q] + (int)inside : -1;
  }
};

// Zeroes the scales of allocated strips that have no tile.
__device__ __forceinline__ void clear_scales(const Turns& turns, i64 strips, i64 columns, int size,
                                             void* scales) {
  const i64 first = (i64)turns.down * (TILE / turns.strips.height) * columns * size / 4;
  const i64 end = strips * columns * size / 4, step = (i64)gridDim.x * blockDim.x;
  for (i64 i = first + (i64)blockIdx.x * blockDim.x + threadIdx.x; i < end; i += step) ((u32*)scales)[i] = 0u;
}
