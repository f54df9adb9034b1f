// FP8 codes of published weights, as the grouped GEMMs read them: (128, 128) blocks, in both orientations.
#include "weight_block.cuh"

// The block of a thread block, within a part of codes [matrices, rows, columns].
__device__ __forceinline__ BlockPlace block_of_part(i64 matrix, i64 first_row, i64 first_column,
                                                    i64 part_rows, i64 part_columns, i64 rows, i64 columns,
                                                    i64* down, i64* right) {
  const u32 across = (u32)((part_columns + TILE - 1) / TILE);
  const u32 block_row = blockIdx.x / across;
  *down = (i64)block_row * TILE, *right = (i64)(blockIdx.x - block_row * across) * TILE;
  return {matrix + blockIdx.y,
          rows,
          columns,
          first_row + *down,
          first_column + *right,
          part_of_block(part_rows - *down),
          part_of_block(part_columns - *right)};
}

// Codes and scales of blocks, copied to a part of the result, in one or both orientations. The part's rows
// and columns past the source get codes of zero, its blocks without any source a scale of 1.
// Arguments: codes, at the first of [matrices, real_rows, real_columns], with strides from_matrix and
//   from_row; scales of float32 (scale_kind 0), bfloat16 (1) or E8M0 (2), that of block (r, c) of matrix m at
//   m * scale_matrix + r * scale_row + c * scale_column. The part [matrices, part_rows, part_columns] starts
//   at (matrix, first_row, first_column) of out [.., rows, columns], transposed [.., columns, rows] and their
//   scales; either, with its scales, may be null.
// Requires: first_row and first_column are multiples of 128. Any other sizes and addresses.
// Traffic: every code is read once, and written once per orientation.
// Launch: one thread block of 256 per (128, 128) block, grid (blocks of a part, matrices).
extern "C" __global__ void __launch_bounds__(WEIGHT_THREADS)
    place_tiles(const u8* codes, i64 from_matrix, i64 from_row, const void* scales, i64 scale_kind,
                i64 scale_matrix, i64 scale_row, i64 scale_column, i64 real_rows, i64 real_columns,
                i64 matrix, i64 first_row, i64 first_column, i64 part_rows, i64 part_columns, i64 rows,
                i64 columns, u8* out, float* out_scales, u8* transposed, float* transposed_scales) {
  pdl_wait();
  __shared__ __align__(128) u8 stage[TILE * TILE];  // [columns][rows]
  i64 down, right;
  const BlockPlace place =
      block_of_part(matrix, first_row, first_column, part_rows, part_columns, rows, columns, &down, &right);
  const i64 row = down + threadIdx.x / 16 * 8, column = right + threadIdx.x % 16 * 8;
  const u8* from = codes + blockIdx.y * from_matrix + row * from_row + column;
  uint2 code[8];
#pragma unroll
  for (int i = 0; i < 8; ++i, from += from_row)
    code[i] = load_codes(from, row + i < real_rows ? real_columns - column : 0);
  float scale = 1.f;
  if (down < real_rows && right < real_columns) {
    const i64 at = blockIdx.y * scale_matrix + down / TILE * scale_row + right / TILE * scale_column;
    if (scale_kind == 0) scale = ((const float*)scales)[at];
    if (scale_kind == 1) scale = __uint_as_float((u32)((const u16*)scales)[at] << 16);
    if (scale_kind == 2) scale = e8m0_to_float(((const u8*)scales)[at]);
  }
  pdl_launch_dependents();
  write_codes(code, scale, place, stage, out, out_scales, transposed, transposed_scales);
}

// Eight e2m1 codes from an address of any alignment; zeros if `count` is not positive.
__device__ __forceinline__ u32 load_nibbles(const u8* from, i64 count) {
  if (count <= 0) return 0;
  if ((size_t)from % 4 == 0) return *(const u32*)from;
  return from[0] | (u32)from[1] << 8 | (u32)from[2] << 16 | (u32)from[3] << 24;
}

#define ROOM 6    // 6 * 2^6 = 384, the largest e2m1 value times this, is an e4m3 value
#define EXACT -5  // .5 * 2^-5 = 2^-6, the smallest e2m1 value times this, is e4m3's smallest normal value

// e4m3 codes of eight e2m1 codes times 2^shift, from EXACT to ROOM, or of zeros times anything: between
// normal values a power of two adds to the exponent, so a table of the eight magnitudes' codes replaces
// conversions.
__device__ __forceinline__ uint2 shifted_codes(u32 word, int shift) {
  const u32 low = 0x3c383000u + (u32)shift * 0x08080800u;   // 0, .5, 1, 1.5: the first is zero
  const u32 high = 0x4c484440u + (u32)shift * 0x08080808u;  // 2, 3, 4, 6
  const u32 magnitudes = word & 0x77777777u, signs = word >> 3 & 0x11111111u;
  return make_uint2(__byte_perm(low, high, magnitudes & 0xffffu) | __byte_perm(0x8000u, 0u, signs & 0xffffu),
                    __byte_perm(low, high, magnitudes >> 16) | __byte_perm(0x8000u, 0u, signs >> 16));
}

// MXFP4 to e4m3 codes with one scale per (128, 128) block, in one or both orientations. The block's scale is
// 2^-6 times the largest scale of its 32s that are not all zero, at least 2^-126, and 1 for a block of zeros.
// So values of scales up to 2^14 apart are exact, .5 * 2^(6 - 14) is e4m3's smallest value; the others are
// rounded to nearest even and counted. A scale of NaN (255) makes codes of NaN.
// Arguments: nibbles, at the first of [matrices, real_rows, real_columns / 2], with strides in bytes; scales
//   E8M0, with strides; rounded int32 [.., of matrix `matrix` on]. The part as in place_tiles.
// Requires: real_columns a multiple of 32; first_row and first_column of 128.
// Traffic: every code is read once, and written once per orientation.
// Launch: one thread block of 256 per (128, 128) block, grid (blocks of a part, matrices).
extern "C" __global__ void __launch_bounds__(WEIGHT_THREADS)
    place_mxfp4(const u8* nibbles, i64 from_matrix, i64 from_row, const u8* scales, i64 scale_matrix,
                i64 scale_row, i64 real_rows, i64 real_columns, int* rounded, i64 matrix, i64 first_row,
                i64 first_column, i64 part_rows, i64 part_columns, i64 rows, i64 columns, u8* out,
                float* out_scales, u8* transposed, float* transposed_scales) {
  pdl_wait();
  __shared__ __align__(128) u8 stage[TILE * TILE];  // [columns][rows]
  __shared__ int largest[WEIGHT_THREADS], counts[WEIGHT_THREADS];
  i64 down, right;
  const BlockPlace place =
      block_of_part(matrix, first_row, first_column, part_rows, part_columns, rows, columns, &down, &right);
  const i64 row = down + threadIdx.x / 16 * 8, column = right + threadIdx.x % 16 * 8;
  u32 word[8];
  int exponent[8], top = -1;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const i64 left = row + i < real_rows ? real_columns - column : 0;
    word[i] = load_nibbles(nibbles + blockIdx.y * from_matrix + (row + i) * from_row + column / 2, left);
    exponent[i] = left > 0 ? scales[blockIdx.y * scale_matrix + (row + i) * scale_row + column / 32] : 0;
    if ((word[i] & 0x77777777u) != 0u && exponent[i] < 255) top = max(top, exponent[i]);
  }
  top = block_reduce(top, largest, [](int a, int b) { return max(a, b); });
  const int base = top < 0 ? 127 : max(top - ROOM, 1);
  pdl_launch_dependents();
  int count = 0;
  uint2 code[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int shift = exponent[i] - base;
    if (exponent[i] < 255 && (shift >= EXACT || (word[i] & 0x77777777u) == 0u)) {
      code[i] = shifted_codes(word[i], shift);
      continue;
    }
    // far below the smallest code every value is rounded to zero
    const float factor = exponent[i] == 255 ? __uint_as_float(0x7fc00000u) : power_of_two(max(shift, -100));
    u32 words[2] = {};
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const float value = decode(word[i] >> (4 * k) & 15u, 2) * factor;
      const u32 byte = encode(value, 0);
      count += value == value && decode(byte, 0) != value;
      words[k / 4] |= byte << (8 * (k % 4));
    }
    code[i] = make_uint2(words[0], words[1]);
  }
  count = block_reduce(count, counts, [](int a, int b) { return a + b; });
  if (threadIdx.x == 0 && count) atomicAdd(rounded + matrix + blockIdx.y, count);  // in any order
  write_codes(code, power_of_two(base - 127), place, stage, out, out_scales, transposed, transposed_scales);
}
