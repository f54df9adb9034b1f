// (128, 128) blocks of weights in registers: their scale, codes, and codes transposed. WEIGHT_THREADS threads
// hold 8 x 8 values each: rows 8 * (t / 16) on, columns 8 * (t % 16) on.
#pragma once
#include "fp8.cuh"
#include "tile_order.cuh"

// The largest magnitude of eight values as an order-preserving integer, NaN largest; magnitude_bits converts
// it to float bits.
template <int FROM>
__device__ __forceinline__ u32 largest_magnitude(const Eight<FROM>& v) {
  const u32* w = (const u32*)&v;
  u32 top = 0;
#pragma unroll
  for (int i = 0; i < (FROM == F32 ? 8 : 4); ++i)
    top = FROM == F32 ? max(top, w[i] & 0x7fffffffu) : larger_u16s(top, w[i] & 0x7fff7fffu);
  return FROM == F32 ? top : max(top & 0xffff0000u, top << 16);
}
template <int FROM>
__device__ __forceinline__ u32 magnitude_bits(u32 top) {
  return FROM == F16 ? __float_as_uint(f16_to_float((u16)(top >> 16))) : top;
}

// Transposes a 4 x 4 matrix of bytes.
__device__ __forceinline__ void transpose_bytes(u32 a, u32 b, u32 c, u32 d, u32 (&columns)[4]) {
  const u32 ab = __byte_perm(a, b, 0x5140), cd = __byte_perm(c, d, 0x5140);
  const u32 ab_high = __byte_perm(a, b, 0x7362), cd_high = __byte_perm(c, d, 0x7362);
  columns[0] = __byte_perm(ab, cd, 0x5410), columns[1] = __byte_perm(ab, cd, 0x7632);
  columns[2] = __byte_perm(ab_high, cd_high, 0x5410), columns[3] = __byte_perm(ab_high, cd_high, 0x7632);
}

#define WEIGHT_THREADS 256

// Factor and scale of a block of which each thread holds 8 x 8 values; called by all threads.
template <int FROM>
__device__ __forceinline__ float factor_of_block(const Eight<FROM> (&v)[8], const Rule& rule, float* scale) {
  __shared__ u32 largest[WEIGHT_THREADS / 32];
  u32 top = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) top = max(top, largest_magnitude<FROM>(v[i]));
  top = __reduce_max_sync(0xffffffffu, top);
  if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = top;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < WEIGHT_THREADS / 32; ++w) top = max(top, largest[w]);
  u8 unused;
  return block_scale(magnitude_bits<FROM>(top), rule, scale, &unused);
}

// Stores a block's codes, eight rows of eight per thread, to shared memory [columns][rows]: 8 x 8 bytes are
// transposed in registers; row chunk t / 16 of column c is stored at chunk ^ c / 8 % 16. Called by all
// threads.
__device__ __forceinline__ void stage_columns(u8* stage, const uint2 (&code)[8]) {
  const u32 chunk = threadIdx.x / 16, eighth = threadIdx.x % 16;
  u8* const to = stage + 8 * eighth * TILE + (chunk ^ eighth) * 8;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    u32 low[4], high[4];
#define WORD(i) (half ? code[i].y : code[i].x)
    transpose_bytes(WORD(0), WORD(1), WORD(2), WORD(3), low);
    transpose_bytes(WORD(4), WORD(5), WORD(6), WORD(7), high);
#undef WORD
#pragma unroll
    for (int c = 0; c < 4; ++c) *(uint2*)(to + (4 * half + c) * TILE) = make_uint2(low[c], high[c]);
  }
  __syncthreads();
}

// The column that a thread reads back in each of four steps; its sixteen rows start at 16 * (threadIdx.x %
// 8).
__device__ __forceinline__ u32 column_of_step(u32 step) {
  return 16 * (threadIdx.x / 32) + 4 * step + threadIdx.x % 32 / 8;
}
__device__ __forceinline__ uint4 staged_rows(const u8* stage, u32 step) {
  const u32 swizzle = 2 * (threadIdx.x / 32) + step / 2;
  const uint4 v =
      *(const uint4*)(stage + column_of_step(step) * TILE + ((2 * (threadIdx.x % 8) ^ swizzle) & 14u) * 8);
  // an odd swizzle index swaps the two chunks
  return step / 2 ? make_uint4(v.z, v.w, v.x, v.y) : v;
}

// Loads eight values from element `at` of x on, predicated on `count`; zeros for the others.
template <int FROM>
__device__ __forceinline__ Eight<FROM> load_some(const void* x, i64 at, i64 count, bool aligned) {
  if (aligned && count >= 8) return load_eight<FROM>(x, at / 8);
  Eight<FROM> v;
  u32* const words = (u32*)&v;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (FROM == F32)
      words[i] = i < count ? ((const u32*)x)[at + i] : 0u;
    else {
      const u32 bits = i < count ? ((const u16*)x)[at + i] : 0u;
      words[i / 2] = i % 2 ? words[i / 2] | bits << 16 : bits;
    }
  }
  return v;
}

// Loads eight codes from an address of any alignment; zeros in place of those past the first `count`.
__device__ __forceinline__ uint2 load_codes(const u8* from, i64 count) {
  if (count >= 8 && (size_t)from % 8 == 0) return *(const uint2*)from;
  u32 words[2] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (i < count) words[i / 4] |= (u32)from[i] << (8 * (i % 4));
  return make_uint2(words[0], words[1]);
}

// Stores the first `count` of N bytes to an address of any alignment.
template <int N, class Words>
__device__ __forceinline__ void store_some(u8* to, const Words& words, i64 count) {
  if (count >= N && (size_t)to % N == 0) {
    __stcs((Words*)to, words);
    return;
  }
#pragma unroll
  for (int i = 0; i < N; ++i)
    if (i < count) to[i] = (u8)(((const u32*)&words)[i / 4] >> (8 * (i % 4)));
}

__device__ __forceinline__ int part_of_block(i64 left) { return (int)min(left, (i64)TILE); }

// Where a block lies: codes [matrices, rows, columns], its first row and column in them, multiples of 128,
// and how many rows and columns from these on are to be written.
struct BlockPlace {
  i64 matrix, rows, columns, row, column;
  int rows_left, columns_left;
};

// Writes a block's codes, eight rows of eight per thread, and its scale, and those of the transposed
// matrices; either may be null. stage: TILE * TILE bytes of shared memory. Called by all threads.
__device__ __forceinline__ void write_codes(const uint2 (&code)[8], float scale, const BlockPlace& at,
                                            u8* stage, u8* codes, float* scales, u8* transposed,
                                            float* transposed_scales) {
  const int t = threadIdx.x, row = t / 16 * 8, column = t % 16 * 8;
  const i64 across = (at.columns + TILE - 1) / TILE, down = (at.rows + TILE - 1) / TILE;
  if (t == 0) {
    if (codes) scales[(at.matrix * down + at.row / TILE) * across + at.column / TILE] = scale;
    if (transposed) transposed_scales[(at.matrix * across + at.column / TILE) * down + at.row / TILE] = scale;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    u8* to = codes + (at.matrix * at.rows + at.row + row + i) * at.columns + at.column + column;
    store_some<8>(to, code[i], codes && row + i < at.rows_left ? at.columns_left - column : 0);
  }
  if (!transposed) return;
  stage_columns(stage, code);
#pragma unroll
  for (u32 step = 0; step < 4; ++step) {
    const int of_block = column_of_step(step), from = 16 * (t % 8);
    u8* to = transposed + (at.matrix * at.columns + at.column + of_block) * at.rows + at.row + from;
    store_some<16>(to, staged_rows(stage, step), of_block < at.columns_left ? at.rows_left - from : 0);
  }
}

// Quantises a block, and writes it.
template <int FROM>
__device__ __forceinline__ void write_block(const Eight<FROM> (&v)[8], const Rule& rule, const BlockPlace& at,
                                            u8* stage, u8* codes, float* scales, u8* transposed,
                                            float* transposed_scales) {
  float scale;
  const float factor = factor_of_block<FROM>(v, rule, &scale);
  uint2 code[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float values[8];
    floats<FROM>(v[i], values);
    code[i] = encode_eight(values, factor, rule.fmt);
  }
  write_codes(code, scale, at, stage, codes, scales, transposed, transposed_scales);
}
