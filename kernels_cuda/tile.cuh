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
// of strips made beforehand would be a launch of 3 us). With `used` the rows behind the last expert, and
// before the first, come after all others, as if they were two more; *used is where their strips begin.
__device__ __forceinline__ void find_strips(const int* offsets, int experts, i64 rows, int height,
                                            int first_strip, int strips, int* base, int* count, int* sums,
                                            int* used = 0) {
  const int t = threadIdx.x, lane = t % 32, warp = t / 32;
  if (t < strips) base[t] = count[t] = 0;
  if (used && t == 0) *used = 0x7fffffff;
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
  const int ranges = experts + (used ? 2 : 0);
  for (int e0 = 0; e0 < ranges; e0 += blockDim.x) {
    const int e = e0 + t;
    int lo = 0, hi = 0;
    if (e < ranges) {
      lo = e <= experts ? (int)clamped(offsets[e], rows) : 0;
      hi = (int)(e < experts    ? clamped(offsets[e + 1], rows)
                 : e == experts ? rows
                                : clamped(offsets[0], rows));
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
    if (used && e == experts) *used = begin;
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

// A tile that is quantised both ways from one read. v: this warp's chunk, four columns a lane, zeros where
// there is no row. Row-wise blocks go to row_codes [rows, columns] and row_scales (null: not wanted),
// column-wise ones, of the strips before `used`, to codes [columns, rows] and scales [strips, columns].
__device__ __forceinline__ void quantize_tile(float (&v)[CHUNK_ROWS][4], Rule rule, const int* first_row,
                                              const int* row_count, i64 first_strip, i64 used, i64 strips,
                                              i64 first_column, i64 columns, i64 rows, u8* row_codes,
                                              void* row_scales, u8* codes, void* scales, u8* stage,
                                              u32 (*largest)[TILE]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, mx = rule.mx;
  const int q = mx ? warp / 2 : 0, inside = (mx ? warp % 2 : warp) * CHUNK_ROWS;
  const int base = first_row[q] + inside, count = (int)clamped(row_count[q] - inside, CHUNK_ROWS);
  const i64 column = first_column + 4 * lane, blocks = columns / (mx ? 32 : TILE);
  float scale;
  u8 exponent;
  if (row_codes) {
#pragma unroll
    for (int i = 0; i < CHUNK_ROWS; ++i) {
      u32 top = 0;
#pragma unroll
      for (int c = 0; c < 4; ++c) top = max(top, __float_as_uint(v[i][c]) & 0x7fffffffu);
      if (mx) {
        top = max(top, __shfl_xor_sync(0xffffffffu, top, 4));
        top = max(top, __shfl_xor_sync(0xffffffffu, top, 2));
        top = max(top, __shfl_xor_sync(0xffffffffu, top, 1));
      } else {
        top = __reduce_max_sync(0xffffffffu, top);
      }
      const float factor = block_scale(top, rule, &scale, &exponent);
      if (i >= count || column >= columns) continue;
      const i64 row = base + i;
      *(u32*)(row_codes + row * columns + column) =
          encode4(v[i][0] * factor, v[i][1] * factor, v[i][2] * factor, v[i][3] * factor, rule.fmt);
      if (lane % (mx ? 8 : 32)) continue;
      if (mx)
        ((u8*)row_scales)[row * blocks + column / 32] = exponent;
      else
        ((float*)row_scales)[row * blocks + column / TILE] = scale;
    }
  }
  if (!codes) return;
  u32 top[4] = {0u, 0u, 0u, 0u};
#pragma unroll
  for (int i = 0; i < CHUNK_ROWS; ++i)
#pragma unroll
    for (int c = 0; c < 4; ++c) top[c] = max(top[c], __float_as_uint(v[i][c]) & 0x7fffffffu);
  *(uint4*)&largest[warp][4 * lane] = make_uint4(top[0], top[1], top[2], top[3]);
  __syncthreads();
  const int first_chunk = mx ? warp / 2 * 2 : 0, chunks = mx ? 2 : CHUNKS;
  for (int j = first_chunk; j < first_chunk + chunks; ++j) {
    const uint4 other = *(const uint4*)&largest[j][4 * lane];
    top[0] = max(top[0], other.x);
    top[1] = max(top[1], other.y);
    top[2] = max(top[2], other.z);
    top[3] = max(top[3], other.w);
  }
  const i64 strip = first_strip + q;
  const bool writes = warp % (mx ? 2 : 8) == 0 && column < columns && strip < strips;
  const bool there = row_count[q] > 0 && strip < used;
  float factor[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    factor[c] = block_scale(top[c], rule, &scale, &exponent);
    if (!writes) continue;
    if (mx)
      ((u8*)scales)[strip * columns + column + c] = there ? exponent : 0;
    else
      ((float*)scales)[strip * columns + column + c] = there ? scale : 0.f;
  }
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    u32 words[4];
#pragma unroll
    for (int k = 0; k < 4; ++k)
      words[k] = encode4(v[4 * k][c] * factor[c], v[4 * k + 1][c] * factor[c], v[4 * k + 2][c] * factor[c],
                         v[4 * k + 3][c] * factor[c], rule.fmt);
    stage_column(stage, 4 * lane + c, warp, make_uint4(words[0], words[1], words[2], words[3]));
  }
  __syncthreads();
  const int r = mx ? lane % 8 / 2 : 0, from = (mx ? lane % 2 : lane % 8) * CHUNK_ROWS;
  const int wanted = first_strip + r < used ? (int)clamped(row_count[r] - from, CHUNK_ROWS) : 0;
  write_columns(stage, first_row[r] + from, wanted, first_column, columns, rows, codes);
}

// Four numbers as they lie in memory.
template <int FROM>
__device__ __forceinline__ void load_four(const void* p, i64 at, float* v) {
  if (FROM == F32) {
    const float4 w = __ldcs((const float4*)((const float*)p + at));
    v[0] = w.x, v[1] = w.y, v[2] = w.z, v[3] = w.w;
  } else {
    const uint2 w = __ldcs((const uint2*)((const u16*)p + at));
    const u32 halves[4] = {w.x & 0xffffu, w.x >> 16, w.y & 0xffffu, w.y >> 16};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      v[i] = FROM == BF16 ? bf16_to_float((u16)halves[i]) : f16_to_float((u16)halves[i]);
  }
}
