// Tiles of 128 rows by 128 columns that are written transposed: where their rows lie, and the way through
// shared memory that makes whole lines of the result.
//
// A block is 8 warps; warp w has chunk w, 16 successive rows; lane l has columns 4 l to 4 l + 3.
#pragma once
#include "fp8.cuh"

#define TILE 128
#define CHUNK_ROWS 16
#define CHUNKS 8

// Strip `s` of all experts' strips laid end to end: its first row and how many it has. Every thread of the
// block takes part; E offsets are read by E threads at once, which hides behind other blocks' work (a table
// of strips made beforehand would be a launch of 3 us).
__device__ __forceinline__ void find_strips(const int* offsets, int experts, i64 rows, int height,
                                            int first_strip, int strips, int* base, int* count, int* sums) {
  const int t = threadIdx.x, lane = t % 32, warp = t / 32;
  if (t < strips) base[t] = count[t] = 0;
  if (!offsets) {
    __syncthreads();
    if (t < strips) {
      const i64 lo = (i64)(first_strip + t) * height;
      base[t] = (int)lo;
      count[t] = (int)clamped(rows - lo, height);
    }
    __syncthreads();
    return;
  }
  int before = 0;  // strips of the experts of earlier rounds
  for (int e0 = 0; e0 < experts; e0 += blockDim.x) {
    const int e = e0 + t;
    int lo = 0, hi = 0;
    if (e < experts) {
      lo = (int)clamped(offsets[e], rows);
      hi = (int)clamped(offsets[e + 1], rows);
    }
    const int mine = hi > lo ? (hi - lo + height - 1) / height : 0;
    int total = mine;
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, total, step);
      if (lane >= step) total += other;
    }
    if (lane == 31) sums[warp] = total;
    __syncthreads();
    int all = 0;
    for (int w = 0; w < (int)blockDim.x / 32; ++w) {
      if (w < warp) total += sums[w];
      all += sums[w];
    }
    const int begin = before + total - mine;
    for (int q = 0; q < strips; ++q) {
      const int s = first_strip + q - begin;
      if (s >= 0 && s < mine) {
        base[q] = lo + s * height;
        count[q] = hi - base[q] < height ? hi - base[q] : height;
      }
    }
    before += all;
    __syncthreads();
  }
  __syncthreads();
}

// Sixteen rows of four columns, as codes, to the transposed result through shared memory [TILE columns][TILE
// rows]. Chunks of 16 bytes are swizzled so that neither side has bank conflicts.
__device__ __forceinline__ void stage_column(u8* stage, int column, int chunk, uint4 codes) {
  *(uint4*)(stage + column * TILE + ((chunk ^ (column / 4 & 7)) * CHUNK_ROWS)) = codes;
}

// out [columns, rows]: each column's segment of the tile, eight lanes a segment, so that whole lines go out.
// A lane has chunk lane % 8 of each: `count` rows from `base` on.
__device__ __forceinline__ void write_columns(const u8* stage, int base, int count, i64 first_column,
                                              i64 columns, i64 rows, u8* out) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, chunk = lane % 8;
  for (int c = warp * 16 + lane / 8; c < warp * 16 + 16; c += 4) {
    const i64 column = first_column + c;
    if (column >= columns || count <= 0) continue;
    const uint4 codes = *(const uint4*)(stage + c * TILE + ((chunk ^ (c / 4 & 7)) * CHUNK_ROWS));
    u8* to = out + column * rows + base;
    if (count == CHUNK_ROWS && (((size_t)out | rows | base) & 15) == 0) {
      __stcs((uint4*)to, codes);
    } else {
      const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
      for (int i = 0; i < count; ++i) to[i] = (u8)(words[i / 4] >> (8 * (i % 4)));
    }
  }
}
