// Scaling-aware transpose: codes move by whole powers of two; the rule is in fp8moe/reference/transpose.py.
//
// First form: right and plain. One thread a column of a strip of 128 (or 32) rows; two reads of the codes,
// strided writes.
#include "common.cuh"

#define ZERO_SCALE -10000
#define NAN_SCALE 10000

__device__ __forceinline__ int row_exponent(const void* scales, i64 at, int mx) {
  if (mx) {
    const int code = ((const u8*)scales)[at];
    return code == 255 ? NAN_SCALE : code - 127;
  }
  const float scale = ((const float*)scales)[at];
  return scale == 0.f ? ZERO_SCALE : ilogbf(scale);
}

// The smallest power of two that a block holding this value (at scale 1) would be given.
__device__ __forceinline__ int needed_exponent(float value, int fmt, int mx) {
  const u32 a = __float_as_uint(value) & 0x7fffffffu;
  if (a == 0u) return ZERO_SCALE;
  if (a >= 0x7f800000u) return NAN_SCALE;
  const int exponent = (int)(a >> 23) - 127 - (fmt == 0 ? 8 : 15);
  if (mx) return exponent;                          // floor(log2 v) - emax
  return exponent + ((a & 0x7fffffu) > 0x600000u);  // ceil(log2(v / max)), max = 1.75 * 2^emax
}

// codes [rows, columns], scales [rows, ceil(columns / width)] -> out [columns, rows], out_scales [strips,
// columns]. Grid (strips, columns / 128). `source`: token of each row (-1: zeros), or null for the row
// itself.
extern "C" __global__ void scaling_aware_transpose(const u8* codes, const void* scales, const int* source,
                                                   const int* strips, i64 rows, i64 columns, i64 width,
                                                   i64 fmt, i64 mx, i64 tile, u8* out, void* out_scales) {
  const i64 strip = blockIdx.x, c = (i64)blockIdx.y * blockDim.x + threadIdx.x;
  const i64 lo = strips[2 * strip], hi = strips[2 * strip + 1], blocks = (columns + width - 1) / width;
  const bool inside = c < columns;
  int target = ZERO_SCALE;
  bool any_nan = false;
  for (i64 r = lo; r < hi; ++r) {
    const i64 from = source ? source[r] : r;
    int code = 0, e = ZERO_SCALE;
    if (inside && from >= 0) {
      code = codes[from * columns + c];
      e = row_exponent(scales, from * blocks + c / width, (int)mx);
    }
    if (tile) {
      // a row counts when any of its codes in this tile is not zero
      const u32 lanes = width == 32 ? 32 : blockDim.x;
      bool occupied = (code & 0x7f) != 0;
      if (lanes == 32)
        occupied = __any_sync(0xffffffffu, occupied);
      else
        occupied = __syncthreads_or(occupied);
      if (occupied && e != ZERO_SCALE) target = max(target, e);
    } else {
      const int n = needed_exponent(decode(code, (int)fmt), (int)fmt, (int)mx);
      if (e == NAN_SCALE || n == NAN_SCALE) any_nan = true;
      if (n != ZERO_SCALE && n != NAN_SCALE && e != ZERO_SCALE && e != NAN_SCALE) target = max(target, e + n);
    }
  }
  if (target == ZERO_SCALE || target == NAN_SCALE || any_nan) target = 0;
  target = max(target, mx ? -127 : -126);
  if (!inside) return;
  for (i64 r = lo; r < hi; ++r) {
    const i64 from = source ? source[r] : r;
    float value = 0.f;
    if (from >= 0) {
      const int e = row_exponent(scales, from * blocks + c / width, (int)mx);
      value = decode(codes[from * columns + c], (int)fmt);
      if (e == NAN_SCALE)
        value = __uint_as_float(0x7fc00000u);
      else if (e == ZERO_SCALE)
        value *= 0.f;
      else  // past 40 powers of two nothing is left, or everything saturates
        value *= __uint_as_float((u32)(127 + min(max(e - target, -40), 40)) << 23);
    }
    out[c * rows + r] = encode(value, (int)fmt);
  }
  const i64 at = strip * columns + c;
  if (mx)
    ((u8*)out_scales)[at] = hi > lo ? (u8)(target + 127) : 0;
  else
    ((float*)out_scales)[at] = hi > lo ? __uint_as_float((u32)(target + 127) << 23) : 0.f;
}

// Set *flag when a scale is no power of two (0 is fine). One thread a scale.
extern "C" __global__ void check_pow2(const float* scales, i64 count, int* flag) {
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const u32 u = __float_as_uint(scales[i]);
  const bool subnormal_pow2 = u < 0x800000u && (u & (u - 1u)) == 0u;
  const bool normal_pow2 = u >= 0x800000u && u < 0x7f800000u && (u & 0x7fffffu) == 0u;
  if (!subnormal_pow2 && !normal_pow2) *flag = 1;
}
