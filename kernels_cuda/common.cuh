// Types, number formats and reductions shared by all kernels. Kernel arguments pass integers as 64-bit
// values.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

#include "ptx.cuh"

// ---- number formats selected by `kind`; the launchers hold the same table
enum Kind { BF16 = 0, F16 = 1, F32 = 2, F64 = 3 };

__device__ __forceinline__ float bf16_to_float(u16 bits) { return __uint_as_float((u32)bits << 16); }

__device__ __forceinline__ u16 float_to_bf16(float x) {  // round to nearest even; a NaN stays a NaN
  u32 u = __float_as_uint(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return (u16)((u >> 16) | 0x40u);
  return (u16)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

__device__ __forceinline__ float load(const void* p, i64 i, int kind) {
  if (kind == BF16) return bf16_to_float(((const u16*)p)[i]);
  if (kind == F16) return f16_to_float(((const u16*)p)[i]);
  if (kind == F32) return ((const float*)p)[i];
  return (float)((const double*)p)[i];
}

__device__ __forceinline__ double load_wide(const void* p, i64 i, int kind) {
  return kind == F64 ? ((const double*)p)[i] : (double)load(p, i, kind);
}

__device__ __forceinline__ void store(void* p, i64 i, int kind, double x) {
  if (kind == BF16) ((u16*)p)[i] = float_to_bf16((float)x);
  if (kind == F16) ((u16*)p)[i] = float_to_f16((float)x);
  if (kind == F32) ((float*)p)[i] = (float)x;
  if (kind == F64) ((double*)p)[i] = x;
}

// ---- FP8 decoded from its bit fields; fmt 0 is e4m3 (fn), 1 is e5m2, 2 is e2m1 (decode only)
__device__ __forceinline__ float decode(u32 code, int fmt) {
  if (fmt == 2) {
    const float magnitude[8] = {0.f, .5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f};
    return (code & 8u) ? -magnitude[code & 7u] : magnitude[code & 7u];
  }
  const int mantissa_bits = fmt == 0 ? 3 : 2, bias = fmt == 0 ? 7 : 15;
  const u32 magnitude = code & 0x7fu, sign = (code & 0x80u) << 24;
  if (fmt == 0 ? magnitude == 0x7fu : magnitude > 0x7cu) return __uint_as_float(0x7fc00000u);
  if (fmt == 1 && magnitude == 0x7cu) return __uint_as_float(sign | 0x7f800000u);
  const u32 exponent = magnitude >> mantissa_bits, mantissa = magnitude & ((1u << mantissa_bits) - 1u);
  const float step = __uint_as_float((u32)(127 + 1 - bias - mantissa_bits) << 23);  // the smallest subnormal
  if (exponent == 0) return sign ? -(mantissa * step) : mantissa * step;
  return __uint_as_float(sign | ((exponent + 127 - bias) << 23) | (mantissa << (23 - mantissa_bits)));
}

// Saturates, rounds to nearest even, encodes every NaN as 0x7f: the same integer steps as
// fp8moe/reference/quantize.py.
__device__ __forceinline__ u8 encode(float x, int fmt) {
  const u32 mantissa_bits = fmt == 0 ? 3u : 2u, bias = fmt == 0 ? 7u : 15u, drop = 23u - mantissa_bits;
  const u32 limit = fmt == 0 ? 0x43e00000u : 0x47600000u;  // 448, 57344
  const u32 u = __float_as_uint(x), a = min(u & 0x7fffffffu, limit);
  if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7f;
  u32 code;
  // subnormal: the float addition rounds to a multiple of the smallest subnormal
  if (a < ((128u - bias) << 23)) {
    const float magic = __uint_as_float((127u + 23u - (bias - 1u + mantissa_bits)) << 23);
    code = __float_as_uint(__uint_as_float(a) + magic) - __float_as_uint(magic);
  } else {
    code = ((a + ((1u << (drop - 1u)) - 1u) + ((a >> drop) & 1u)) >> drop) - ((127u - bias) << mantissa_bits);
  }
  return (u8)(code | ((u >> 24) & 0x80u));
}

__device__ __forceinline__ float e8m0_to_float(u32 code) {
  if (code == 255u) return __uint_as_float(0x7fc00000u);
  return code == 0u ? __uint_as_float(0x00400000u) : __uint_as_float(code << 23);
}

// ---- scale layouts of a QuantTensor; the launchers hold the same table
enum Scales { PLAIN = 0, ROW128 = 1, ROW32 = 2, ROW16 = 3, TENSOR = 4 };

// Element i of a row, dequantised from a row-wise tensor with compact scales or read from a plain array.
__device__ __forceinline__ double row_value(const void* data, const void* scales, i64 row, i64 i, i64 width,
                                            int kind, int fmt, int layout) {
  if (layout == PLAIN) return load_wide(data, row * width + i, kind);
  const u8* codes = (const u8*)data;
  if (layout == ROW16) {
    const u8 pair = codes[row * (width / 2) + i / 2];
    const float scale = decode(((const u8*)scales)[row * ((width + 15) / 16) + i / 16], 0);
    return decode((i & 1) ? pair >> 4 : pair & 15, 2) * scale;
  }
  const float value = decode(codes[row * width + i], fmt);
  if (layout == TENSOR) return value * ((const float*)scales)[0];
  if (layout == ROW128) return value * ((const float*)scales)[row * ((width + 127) / 128) + i / 128];
  return value * e8m0_to_float(((const u8*)scales)[row * ((width + 31) / 32) + i / 32]);
}

// ---- integer arrays of the caller: int64 if `wide`, else int32
__device__ __forceinline__ i64 int_at(const void* p, i64 i, i64 wide) {
  return wide ? ((const i64*)p)[i] : (i64)((const int*)p)[i];
}

// ---- reductions over a thread block whose size is a power of two, in a fixed order
template <typename T, typename Op>
__device__ __forceinline__ T block_reduce(T value, T* shared, Op op) {
  shared[threadIdx.x] = value;
  __syncthreads();
  for (int step = blockDim.x / 2; step > 0; step /= 2) {
    if (threadIdx.x < step) shared[threadIdx.x] = op(shared[threadIdx.x], shared[threadIdx.x + step]);
    __syncthreads();
  }
  const T result = shared[0];
  __syncthreads();
  return result;
}

// Inclusive prefix sum over the lanes of a warp.
template <class T>
__device__ __forceinline__ T sum_up_to_here(T value) {
  for (int step = 1; step < 32; step *= 2) {
    const T other = __shfl_up_sync(0xffffffffu, value, step);
    if ((int)(threadIdx.x % 32) >= step) value += other;
  }
  return value;
}

// Exclusive prefix sum over the threads of a thread block. sums: shared memory, one entry per warp.
__device__ __forceinline__ i64 sum_before(i64 value, i64* sums) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  i64 total = sum_up_to_here(value);
  if (lane == 31) sums[warp] = total;
  __syncthreads();
  for (int w = 0; w < warp; ++w) total += sums[w];
  __syncthreads();
  return total - value;
}

// Index of the last of `count` ascending keys that is <= value, or 0 if there is none.
template <class Index, class Value>
__device__ __forceinline__ Index last_at_most(const int* keys, Index count, Value value) {
  Index lo = 0, hi = count;
  while (hi - lo > 1) {
    const Index middle = (lo + hi) / 2;
    if (keys[middle] <= value)
      lo = middle;
    else
      hi = middle;
  }
  return lo;
}

// ---- expert offsets, clamped to the rows of the tensor
__device__ __forceinline__ i64 clamped(i64 offset, i64 rows) {
  return offset < 0 ? 0 : (offset > rows ? rows : offset);
}
