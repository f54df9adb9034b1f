// Tiles of 128 rows by 128 columns that are written transposed: where their rows lie, and the way through
// shared memory that makes whole lines of the result.
//
// A block is 8 warps; warp w has chunk w, 16 successive rows; lane l has columns 4 l to 4 l + 3.
#pragma once
#include "fp8.cuh"

#define TILE 128
#define CHUNK_ROWS 16
#define CHUNKS 8
#define ACROSS 4  // tiles of a strip that a block makes, one after the other; as in quantize.py
#define GROUP 16  // rows of tiles that are worked on at a time

// The tiles of a block: GROUP rows of tiles, then the next ACROSS columns of tiles; so what is read, or
// written, at a time lies together.
struct Tiles {
  int row, first, end;
};

__device__ __forceinline__ Tiles tiles_of_block(i64 columns) {
  const int all = (int)((columns + TILE - 1) / TILE), across = (all + ACROSS - 1) / ACROSS;
  const int down = gridDim.x / across, group = blockIdx.x / (GROUP * across);
  const int in_group = down - group * GROUP < GROUP ? down - group * GROUP : GROUP;
  const int rest = blockIdx.x - group * GROUP * across, first = rest / in_group * ACROSS;
  return {group * GROUP + rest % in_group, first, first + ACROSS < all ? first + ACROSS : all};
}

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

// Where a column's 16 rows of a chunk lie in shared memory [TILE columns][TILE rows]: pieces of 16 bytes are
// swizzled so that neither side has bank conflicts. The columns of a lane, four in a row, lie TILE apart.
__device__ __forceinline__ u8* staged(u8* stage, int column, int chunk) {
  return stage + column * TILE + ((chunk ^ (column / 4 & 7)) * CHUNK_ROWS);
}

// out [columns, rows]: each column's segment of the tile, eight lanes a segment, so that whole lines go out.
// A lane has chunk lane % 8 of each: `count` rows from `base` on. columns is a multiple of 16.
__device__ __forceinline__ void write_columns(u8* stage, int base, int count, i64 first_column, i64 columns,
                                              i64 rows, u8* out) {
  const u32 lane = threadIdx.x % 32, first = threadIdx.x / 32 * 16 + lane / 8;
  if (count <= 0 || first_column + threadIdx.x / 32 * 16 >= columns) return;
  const bool whole = count == CHUNK_ROWS && (((size_t)out | rows | base) & 15) == 0;
  u8* to = out + (first_column + first) * rows + base;
#pragma unroll
  for (int i = 0; i < 4; ++i, to += 4 * rows) {
    const u8* codes = staged(stage, first + 4 * i, lane % 8);
    if (whole) {
      __stcs((uint4*)to, *(const uint4*)codes);
    } else {
#pragma unroll 1
      for (int r = 0; r < count; ++r) to[r] = codes[r];
    }
  }
}

// A tile on its way to shared memory, [TILE rows][TILE * SIZE bytes]; rows that are null stay as they are.
template <int SIZE>
__device__ __forceinline__ void fetch_tile(u8* in, const u8* const* row_at, i64 offset) {
  const u32 vectors = TILE * SIZE / 16, t = threadIdx.x;  // a thread has one column of vectors
  in += t * 16;
  offset += t % vectors * 16;
#pragma unroll
  for (u32 k = 0; k < TILE * vectors / 256; ++k) {
    const u8* row = row_at[t / vectors + 256 / vectors * k];
    if (row) copy_async16(in + 256 * 16 * k, row + offset, true);
  }
}

// Where the rows of a block's tiles begin; null for those that are not there, or not before `last`. Their
// places in shared memory, of row_size bytes each in `tables` arrays of them, are zeros from now on.
__device__ __forceinline__ void find_rows(const void* x, i64 row_bytes, i64 last, int height,
                                          const int* first_row, const int* row_count, const u8** row_at,
                                          u8* in, int row_size, int tables) {
  const int t = threadIdx.x;
  if (t < TILE) {
    const int q = t / height, i = t % height, row = first_row[q] + i;
    row_at[t] = i < row_count[q] && row < last ? (const u8*)x + row * row_bytes : 0;
  }
  __syncthreads();
  for (int i = t * 16; i < tables * TILE * row_size; i += 256 * 16)
    if (!row_at[i / row_size % TILE]) *(uint4*)(in + i) = make_uint4(0, 0, 0, 0);
}

struct __align__(16) TileShared {
  u32 largest[CHUNKS][TILE];
  float row_factors[TILE], factors[4][TILE];
};

// A tile that is quantised both ways from one read. v: this warp's chunk, four columns a lane, zeros where
// there is no row. Row-wise blocks go to row_codes [rows, columns] and row_scales (null: not wanted),
// column-wise ones, of the strips before `used`, to codes [columns, rows] and scales [strips, columns].
__device__ __forceinline__ void quantize_tile(float (&v)[CHUNK_ROWS][4], Rule rule, const int* first_row,
                                              const int* row_count, i64 first_strip, i64 used, i64 strips,
                                              i64 first_column, i64 columns, i64 rows, u8* row_codes,
                                              void* row_scales, u8* codes, void* scales, u8* stage,
                                              TileShared& s) {
  const u32 t = threadIdx.x, lane = t % 32, warp = t / 32;
  const int mx = rule.mx;
  const int q = mx ? warp / 2 : 0, inside = (mx ? warp % 2 : warp) * CHUNK_ROWS;
  float scale;
  u8 exponent;
  if (row_codes) {
    const int base = first_row[q] + inside, count = (int)clamped(row_count[q] - inside, CHUNK_ROWS);
    const i64 blocks = columns / (mx ? 32 : TILE);
    u8* to = row_codes + base * columns + first_column + 4 * lane;
    const u32 width = (u32)columns;
    u32 mine = 0;
#pragma unroll
    for (int i = 0; i < CHUNK_ROWS; ++i) {
      u32 top = 0;
#pragma unroll
      for (int c = 0; c < 4; ++c) top = max(top, __float_as_uint(v[i][c]) & 0x7fffffffu);
      if (mx) {
        top = max(top, __shfl_xor_sync(0xffffffffu, top, 4));
        top = max(top, __shfl_xor_sync(0xffffffffu, top, 2));
        top = max(top, __shfl_xor_sync(0xffffffffu, top, 1));
        const float factor = block_scale(top, rule, &scale, &exponent);
        if (i >= count) continue;
        *(u32*)(to + (u32)(i * width)) =
            encode4(v[i][0] * factor, v[i][1] * factor, v[i][2] * factor, v[i][3] * factor, rule.fmt);
        if (lane % 8 == 0) ((u8*)row_scales)[(base + i) * blocks + (first_column + 4 * lane) / 32] = exponent;
      } else {
        top = __reduce_max_sync(0xffffffffu, top);
        if (lane == i) mine = top;
      }
    }
    if (!mx) {  // a lane makes the scale of a row
      const float factor = block_scale(mine, rule, &scale, &exponent);
      if (lane < CHUNK_ROWS) s.row_factors[warp * CHUNK_ROWS + lane] = factor;
      if (lane < count) ((float*)row_scales)[(base + lane) * blocks + first_column / TILE] = scale;
      __syncwarp();
#pragma unroll
      for (int i = 0; i < CHUNK_ROWS; ++i) {
        const float f = s.row_factors[warp * CHUNK_ROWS + i];
        if (i < count)
          *(u32*)(to + (u32)(i * width)) =
              encode4(v[i][0] * f, v[i][1] * f, v[i][2] * f, v[i][3] * f, rule.fmt);
      }
    }
  }
  if (!codes) return;
  u32 top[4] = {0u, 0u, 0u, 0u};
#pragma unroll
  for (int i = 0; i < CHUNK_ROWS; ++i)
#pragma unroll
    for (int c = 0; c < 4; ++c) top[c] = max(top[c], __float_as_uint(v[i][c]) & 0x7fffffffu);
  *(uint4*)&s.largest[warp][4 * lane] = make_uint4(top[0], top[1], top[2], top[3]);
  __syncthreads();
  const u32 parts = mx ? 4 : 1, chunks = CHUNKS / parts;
  for (u32 k = t; k < parts * TILE; k += 256) {  // a thread makes the scale of a column
    const u32 part = k / TILE, c = k % TILE;
    const i64 strip = first_strip + part;
    u32 largest = 0;
    for (u32 j = 0; j < chunks; ++j) largest = max(largest, s.largest[part * chunks + j][c]);
    s.factors[part][c] = block_scale(largest, rule, &scale, &exponent);
    if (strip >= strips) continue;
    const bool there = row_count[part] > 0 && strip < used;
    if (mx)
      ((u8*)scales)[strip * columns + first_column + c] = there ? exponent : 0;
    else
      ((float*)scales)[strip * columns + first_column + c] = there ? scale : 0.f;
  }
  __syncthreads();
  const float4 factor = *(const float4*)&s.factors[q][4 * lane];
  const float by[4] = {factor.x, factor.y, factor.z, factor.w};
  u8* my_stage = staged(stage, 4 * lane, warp);
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    u32 words[4];
#pragma unroll
    for (int k = 0; k < 4; ++k)
      words[k] = encode4(v[4 * k][c] * by[c], v[4 * k + 1][c] * by[c], v[4 * k + 2][c] * by[c],
                         v[4 * k + 3][c] * by[c], rule.fmt);
    *(uint4*)(my_stage + c * TILE) = make_uint4(words[0], words[1], words[2], words[3]);
  }
  __syncthreads();
  const int r = mx ? lane % 8 / 2 : 0, from = (mx ? lane % 2 : lane % 8) * CHUNK_ROWS;
  const int wanted = first_strip + r < used ? (int)clamped(row_count[r] - from, CHUNK_ROWS) : 0;
  write_columns(stage, first_row[r] + from, wanted, first_column, columns, rows, codes);
}

// Four numbers as they lie in shared memory.
template <int FROM>
__device__ __forceinline__ void four_of(const u8* p, float* v) {
  if (FROM == F32) {
    const float4 w = *(const float4*)p;
    v[0] = w.x, v[1] = w.y, v[2] = w.z, v[3] = w.w;
  } else {
    const uint2 w = *(const uint2*)p;
    const u32 halves[4] = {w.x & 0xffffu, w.x >> 16, w.y & 0xffffu, w.y >> 16};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      v[i] = FROM == BF16 ? bf16_to_float((u16)halves[i]) : f16_to_float((u16)halves[i]);
  }
}
