// The 128x4 blocked layout of MXFP8 scales that tcgen05, cuBLAS and CUTLASS read: tiles of 128 rows of an
// operand by 4 scale blocks along K, 512 bytes each, in row-major order of tiles. NumPy version:
// fp8moe/reference/layout.py.
#pragma once
#include "common.cuh"

#ifndef BLOCKED
#define BLOCKED 0  // 0: MXFP8 kernels write compact scales
#endif

// Offset of scale (outer, inner) within its tile.
__device__ __forceinline__ u32 place_in_tile(u32 outer, u32 inner) {
  return outer % 32 * 16 + outer % 128 / 32 * 4 + inner % 4;
}

// Offset of scale (outer, inner) with `across` tiles per row of tiles.
__device__ __forceinline__ i64 place_in_blocked(i64 outer, i64 inner, i64 across) {
  return (outer / 128 * across + inner / 4) * 512 + place_in_tile((u32)(outer % 128), (u32)(inner % 4));
}

// Up to 128 rows of the logical matrix whose scales form one row of tiles. index: its number across all
// experts.
struct ScaleTile {
  int index, start, across;           // start: index of the expert's first one; across: the expert's count
  int first_row, first_strip, count;  // count: rows, 0 if none; strips of 32 rows are numbered across experts
  // Number of the scale tile (this, column) if rows are K and there are `columns` tiles of 128 columns.
  __device__ __forceinline__ i64 number(i64 columns, i64 column) const {
    return start * columns + column * across + (index - start);
  }
};

// Called by a whole warp. capacity: number of scale tiles allocated; later ones are cut off.
__device__ __forceinline__ ScaleTile find_scale_tile(const int* offsets, int experts, int rows, int index,
                                                     int capacity) {
  auto parts = [](int count, int height) { return (count + height - 1) / height; };
  if (!offsets) {
    const int first = min(index * 128, rows);
    return {index, 0, parts(rows, 128), first, index * 4, min(rows - first, 128)};
  }
  int tiles_before = 0, strips_before = 0;
#pragma unroll 1
  for (int e0 = 0; e0 < experts; e0 += 32) {
    const int e = e0 + (int)(threadIdx.x % 32);
    const int lo = (int)clamped(offsets[min(e, experts)], rows);
    const int hi = (int)clamped(offsets[min(e + 1, experts)], rows), size = max(hi - lo, 0);
    const int tiles = parts(size, 128), strips = parts(size, 32);
    const int tiles_here = tiles_before + sum_up_to_here(tiles);
    const int strips_here = strips_before + sum_up_to_here(strips);
    const int start = tiles_here - tiles, inside = index - start;
    const u32 inside_tiles = __ballot_sync(0xffffffffu, inside >= 0 && inside < tiles);
    if (inside_tiles) {
      const int lane = __ffs(inside_tiles) - 1;
      const ScaleTile own_tile = {index,
                                  start,
                                  min(tiles, capacity - start),
                                  lo + inside * 128,
                                  strips_here - strips + inside * 4,
                                  min(size - inside * 128, 128)};
      return {index,
              __shfl_sync(0xffffffffu, own_tile.start, lane),
              __shfl_sync(0xffffffffu, own_tile.across, lane),
              __shfl_sync(0xffffffffu, own_tile.first_row, lane),
              __shfl_sync(0xffffffffu, own_tile.first_strip, lane),
              __shfl_sync(0xffffffffu, own_tile.count, lane)};
    }
    tiles_before = __shfl_sync(0xffffffffu, tiles_here, 31);
    strips_before = __shfl_sync(0xffffffffu, strips_here, 31);
  }
  return {index, index, 1, rows, strips_before, 0};
}
