// Tiles of 128 rows by 128 columns that are quantised and written transposed, staged through shared memory so
// that the result is written in whole cache lines. (transpose.cu has its own version: these tiles hold more
// and take longer, and would slow it down, see docs/experiments/.)
//
// A thread block is 16 warps; warp w owns chunk w, 8 consecutive rows; lane l owns columns 4 l to 4 l + 3.
#pragma once
#include "scale_layout.cuh"
#include "tile_order.cuh"

// Address of a column's 8 rows of a chunk in shared memory [TILE columns][TILE rows]. An 8-byte swizzle
// avoids bank conflicts between lanes, whose columns lie 4 * TILE bytes apart.
__device__ __forceinline__ u8* staged(u8* stage, int column, int chunk) {
  return stage + column * TILE + ((chunk ^ (column / 4 & 15)) * CHUNK_ROWS);
}

// Writes a tile's columns to out [columns, rows], eight lanes per column segment, so that whole cache lines
// are written. A lane stores chunks 2 (lane % 8) and 2 (lane % 8) + 1: `count` rows starting at `base`.
// columns must be a multiple of 16.
__device__ __forceinline__ void write_columns(u8* stage, int base, int count, i64 first_column, i64 columns,
                                              i64 rows, u8* out) {
  const u32 lane = threadIdx.x % 32, first = threadIdx.x / 32 * 8 + lane / 8;
  if (count <= 0 || first_column + threadIdx.x / 32 * 8 >= columns) return;
  u8* to = out + (first_column + first) * rows + base;
  const bool whole = count == 2 * CHUNK_ROWS && (((size_t)out | rows | base) & 15) == 0;
#pragma unroll
  for (int i = 0; i < 2; ++i, to += 4 * rows) {
    const int column = first + 4 * i;
    const uint2 low = *(const uint2*)staged(stage, column, lane % 8 * 2);
    const uint2 high = *(const uint2*)staged(stage, column, lane % 8 * 2 + 1);
    if (whole) {
      __stcs((uint4*)to, make_uint4(low.x, low.y, high.x, high.y));
    } else {
#pragma unroll 1
      for (int r = 0; r < count; ++r) {
        const u32 word = r < 4 ? low.x : r < 8 ? low.y : r < 12 ? high.x : high.y;
        to[r] = (u8)(word >> (r % 4 * 8));
      }
    }
  }
}

// Asynchronous copy of a tile to shared memory [TILE rows][TILE * SIZE bytes]; zeros for missing rows and
// rows >= `last`. x: the tile's first column.
template <int SIZE, bool MXFP8>
__device__ __forceinline__ void fetch_tile(u8* in, const Place& place, i64 last, const u8* x, u32 row_bytes) {
  const u32 vectors = TILE * SIZE / 16, t = threadIdx.x;  // each thread copies one column of 16-byte vectors
  const u32 step = TILE_THREADS / vectors, first = t / vectors;
  // loaded once: the compiler would reload them after each copy
  const int4 bases = *(const int4*)place.base, counts = *(const int4*)place.count;
  const int base[4] = {bases.x, bases.y, bases.z, bases.w}, end = (int)last;
  const int count[4] = {counts.x, counts.y, counts.z, counts.w};
  in += t * 16;
  x += t % vectors * 16;
#pragma unroll
  for (u32 k = 0; k < TILE / step; ++k) {
    const u32 q = MXFP8 ? step * k / 32 : 0;
    const int inside = (int)(first + step * k - 32 * q), row = base[q] + inside;
    copy_async16(in + TILE_THREADS * 16 * k, x + (u64)(u32)row * row_bytes, inside < count[q] && row < end);
  }
}

// Strip of the tile that contains a chunk; it starts 32 * this after the tile's first row.
__device__ __forceinline__ int strip_of_chunk(int chunk, int mx) { return mx ? chunk * CHUNK_ROWS / 32 : 0; }

struct __align__(16) TileShared {
  u32 largest[CHUNKS][TILE];  // amax of each column of a chunk, as float bits
  float row_factors[TILE], factors[4][TILE];
};

// Converts four values from shared memory to float.
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

// A warp's chunk of a tile, four columns per lane, zeros for missing rows. top_of_row: amax of the lane's
// part of a row as an order-preserving integer, which float_bits converts to float bits.
struct FloatChunk {
  float v[CHUNK_ROWS][4];
  __device__ __forceinline__ void load(int i, const u8* p) { four_of<F32>(p, v[i]); }
  __device__ __forceinline__ void row(int i, float (&x)[4]) const {
#pragma unroll
    for (int c = 0; c < 4; ++c) x[c] = v[i][c];
  }
  __device__ __forceinline__ u32 top_of_row(int i) const {
    return __float_as_uint(larger_or_nan(larger_or_nan(fabsf(v[i][0]), fabsf(v[i][1])),
                                         larger_or_nan(fabsf(v[i][2]), fabsf(v[i][3]))));
  }
  static __device__ __forceinline__ u32 float_bits(u32 top) { return top; }
  __device__ __forceinline__ float4 tops_of_columns() const {
    float top[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int i = 0; i < CHUNK_ROWS; ++i)
#pragma unroll
      for (int c = 0; c < 4; ++c) top[c] = larger_or_nan(top[c], fabsf(v[i][c]));
    return make_float4(top[0], top[1], top[2], top[3]);
  }
};

// The same for 16-bit formats; magnitudes are compared as integers, two per instruction.
template <int FROM>
struct PairChunk {
  uint2 v[CHUNK_ROWS];
  __device__ __forceinline__ void load(int i, const u8* p) { v[i] = *(const uint2*)p; }
  __device__ __forceinline__ void row(int i, float (&x)[4]) const { four_of<FROM>((const u8*)&v[i], x); }
  __device__ __forceinline__ uint2 sizes(int i) const {
    return make_uint2(v[i].x & 0x7fff7fffu, v[i].y & 0x7fff7fffu);
  }
  __device__ __forceinline__ u32 top_of_row(int i) const {
    const u32 both = larger_u16s(sizes(i).x, sizes(i).y);
    return max(both, both << 16);
  }
  static __device__ __forceinline__ u32 float_bits(u32 top) {
    return FROM == BF16 ? top & 0xffff0000u : __float_as_uint(f16_to_float((u16)(top >> 16)));
  }
  __device__ __forceinline__ float4 tops_of_columns() const {
    uint2 top = sizes(0);
#pragma unroll
    for (int i = 1; i < CHUNK_ROWS; ++i) {
      const uint2 next = sizes(i);
      top = make_uint2(larger_u16s(top.x, next.x), larger_u16s(top.y, next.y));
    }
    float x[4];
    four_of<FROM>((const u8*)&top, x);
    return make_float4(x[0], x[1], x[2], x[3]);
  }
};

// Chunk type for input format FROM.
template <int FROM>
struct ChunkOf {
  typedef PairChunk<FROM> Type;
};
template <>
struct ChunkOf<F32> {
  typedef FloatChunk Type;
};

// Quantises a tile row-wise and column-wise from one read. v: this warp's chunk. Row-wise: row_codes [rows,
// columns] and row_scales, skipped if null. Column-wise: codes [columns, rows] and scales [strips, columns],
// for the strips before `used`. BLOCKED: both scales in 128x4 tiles, without experts.
template <class Chunk>
__device__ __forceinline__ void quantize_tile(const Chunk& v, Rule rule, const Place& place, i64 used,
                                              i64 strips, i64 columns, i64 rows, u8* row_codes,
                                              void* row_scales, u8* codes, void* scales, u8* stage,
                                              TileShared& s) {
  const u32 t = threadIdx.x, lane = t % 32, warp = t / 32;
  const int mx = rule.mx;
  const i64 first_column = (i64)place.column * TILE, first_strip = (i64)place.row * (mx ? 4 : 1);
  const int q = strip_of_chunk(warp, mx), inside = warp * CHUNK_ROWS - 32 * q;
  float scale;
  u8 exponent;
  if (row_codes) {
    const int base = place.base[q] + inside, count = (int)clamped(place.count[q] - inside, CHUNK_ROWS);
    const i64 blocks = columns / (mx ? 32 : TILE);
    u8* to = row_codes + base * columns + first_column + 4 * lane;
    u32 own_top = 0;
#pragma unroll
    for (int i = 0; i < CHUNK_ROWS; ++i) {
      u32 top = v.top_of_row(i);
      if (mx) {
        top = max(top, __shfl_xor_sync(0xffffffffu, top, 4));
        top = max(top, __shfl_xor_sync(0xffffffffu, top, 2));
        top = max(top, __shfl_xor_sync(0xffffffffu, top, 1));
        const float f = block_scale(v.float_bits(top), rule, &scale, &exponent);
        float x[4];
        v.row(i, x);
        const u32 four = encode4(x[0] * f, x[1] * f, x[2] * f, x[3] * f, rule.fmt);
        if (i < count) *(u32*)to = four;
        to += columns;
#if BLOCKED
        const i64 at = place_in_blocked(base + i, (first_column + 4 * lane) / 32, columns / TILE);
        if (i < count && lane % 8 == 0) ((u8*)row_scales)[at] = exponent;
#else
        u8* at = (u8*)row_scales + (base + i) * blocks + (first_column + 4 * lane) / 32;
        // keeping it in L2: 95 instead of 92 us (12,496 x 5120)
        if (i < count && lane % 8 == 0) *at = exponent;
#endif
      } else {
        top = __reduce_max_sync(0xffffffffu, top);
        if (lane == i) own_top = top;
      }
    }
    if (!mx) {  // one lane computes the scale of one row
      float* factors = s.row_factors + warp * CHUNK_ROWS;
      const float factor = block_scale(v.float_bits(own_top), rule, &scale, &exponent);
      if (lane < CHUNK_ROWS) factors[lane] = factor;
      float* at = (float*)row_scales + (base + lane) * blocks + first_column / TILE;
      if (lane < count) store_kept(at, scale, first_column + TILE >= columns || ends_line(at));
      __syncwarp();
      const float4 near = *(const float4*)factors, far = *(const float4*)(factors + 4);
      const float by[CHUNK_ROWS] = {near.x, near.y, near.z, near.w, far.x, far.y, far.z, far.w};
#pragma unroll
      for (int i = 0; i < CHUNK_ROWS; ++i) {
        // not predicated on `count`: if it were, addresses would be recomputed for each row
        float x[4];
        v.row(i, x);
        const u32 four = encode4(x[0] * by[i], x[1] * by[i], x[2] * by[i], x[3] * by[i], rule.fmt);
        if (i < count) *(u32*)to = four;
        to += columns;
      }
    }
  }
  if (!codes) return;
  *(float4*)&s.largest[warp][4 * lane] = v.tops_of_columns();
  __syncthreads();
  const u32 parts = mx ? 4 : 1, chunks = CHUNKS / parts;
  for (u32 k = t; k < parts * TILE; k += TILE_THREADS) {  // one thread computes the scale of one column
    const u32 part = k / TILE, c = k % TILE;
    const i64 strip = first_strip + part;
    u32 largest = 0;
    for (u32 j = 0; j < chunks; ++j) largest = max(largest, s.largest[part * chunks + j][c]);
    s.factors[part][c] = block_scale(largest, rule, &scale, &exponent);
    if (strip >= strips) continue;
    const bool has_rows = place.count[part] > 0 && strip < used;
    if (BLOCKED)
      ((u8*)scales)[(place.column * (strips / 4) + place.row) * 512 + place_in_tile(c, part)] =
          has_rows ? exponent : 0;
    else if (mx)
      ((u8*)scales)[strip * columns + first_column + c] = has_rows ? exponent : 0;
    else
      ((float*)scales)[strip * columns + first_column + c] = has_rows ? scale : 0.f;
  }
  __syncthreads();
  const float4 factor = *(const float4*)&s.factors[q][4 * lane];
  const float by[4] = {factor.x, factor.y, factor.z, factor.w};
  u8* my_stage = staged(stage, 4 * lane, warp);
  u32 words[2][4];
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    float x[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) v.row(4 * k + i, x[i]);
#pragma unroll
    for (int c = 0; c < 4; ++c)
      words[k][c] = encode4(x[0][c] * by[c], x[1][c] * by[c], x[2][c] * by[c], x[3][c] * by[c], rule.fmt);
  }
#pragma unroll
  for (int c = 0; c < 4; ++c) *(uint2*)(my_stage + c * TILE) = make_uint2(words[0][c], words[1][c]);
  __syncthreads();
  const int r = mx ? lane % 8 / 2 : 0, from = (mx ? lane % 2 : lane % 8) * (2 * CHUNK_ROWS);
  const int wanted = first_strip + r < used ? (int)clamped(place.count[r] - from, 2 * CHUNK_ROWS) : 0;
  write_columns(stage, place.base[r] + from, wanted, first_column, columns, rows, codes);
}
