// FP8 conversions by hardware where there are such (sm_89 and later), by common.cuh's integer steps
// elsewhere; both saturate, round to nearest even and write every NaN as 0x7f.
#pragma once
#include "common.cuh"

// Two codes, `a` in the low byte.
__device__ __forceinline__ u32 encode2(float a, float b, int fmt) {
#if __CUDA_ARCH__ >= 890
  return fmt == 0 ? to_e4m3x2(a, b) : to_e5m2x2(a, b);
#else
  return encode(a, fmt) | (u32)encode(b, fmt) << 8;
#endif
}

__device__ __forceinline__ u32 encode4(float a, float b, float c, float d, int fmt) {
  return encode2(a, b, fmt) | encode2(c, d, fmt) << 16;
}

// The values of four codes, as halves, which every FP8 value is, and back.
__device__ __forceinline__ void decode4(u32 codes, int fmt, u32* low, u32* high) {
#if __CUDA_ARCH__ >= 890
  if (fmt == 0)
    halves_of_e4m3x4(codes, low, high);
  else
    halves_of_e5m2x4(codes, low, high);
#else
  *low = __byte_perm(codes, 0u, 0x1404), *high = __byte_perm(codes, 0u, 0x3424);
  if (fmt == 1) return;  // an e5m2 code is the upper byte of its half
  // an e4m3 code is so, too, one place lower, but for the exponents' biases, 7 and 15
  auto half = [](u32 upper) {
    return halves_times((upper & 0x80008000u) | (upper >> 1 & 0x3f803f80u), 0x5c005c00u);  // times 256
  };
  *low = half(*low), *high = half(*high);
  const u32 nan = ((codes & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
  if (nan == 0u) return;
  *low |= (nan & 0x80u ? 0x7fffu : 0u) | (nan & 0x8000u ? 0x7fff0000u : 0u);
  *high |= (nan & 0x800000u ? 0x7fffu : 0u) | (nan & 0x80000000u ? 0x7fff0000u : 0u);
#endif
}

__device__ __forceinline__ u32 encode2_halves(u32 halves, int fmt) {
#if __CUDA_ARCH__ >= 890
  return fmt == 0 ? halves_to_e4m3x2(halves) : halves_to_e5m2x2(halves);
#else
  return encode(f16_to_float((u16)halves), fmt) | (u32)encode(f16_to_float((u16)(halves >> 16)), fmt) << 8;
#endif
}

__device__ __forceinline__ float power_of_two(int exponent) {  // of a normal float
  return __uint_as_float((u32)(exponent + 127) << 23);
}

// ---- the scale of a block

struct Rule {
  int fmt, up, mx;  // up: scales are rounded up to powers of two; else down to them (mx), or not
  float eps;
};

// Added to the bits of a float this carries into the exponent where it is above 1.75 times a power of two, as
// 448 and 57344 are.
#define ABOVE_LIMIT 0x1fffffu

// Factor to multiply by; *scale is the float32 scale, *exponent_code the E8M0 one. `amax` as its bits. The
// rule is in fp8moe/reference/quantize.py, step for step.
__device__ __forceinline__ float block_scale(u32 amax, Rule rule, float* scale, u8* exponent_code) {
  if (amax <= 0x7f800000u) amax = max(amax, __float_as_uint(rule.eps));
  const bool degenerate = amax == 0u || amax >= 0x7f800000u;
  const int emax = rule.fmt == 0 ? 8 : 15, exponent = (int)(amax >> 23) - 127;
  if (rule.mx) {
    // the quotient amax / max is a subnormal float there: one bit of amax above 2^-127 is rounded away
    const u32 above = rule.up ? ABOVE_LIMIT - (amax < (u32)(emax + 1) << 23) : 0u;
    int code = max((int)((amax + above) >> 23) - emax, 0);
    if (amax >= 0x7f800000u) code = amax == 0x7f800000u ? 254 : 127;
    *exponent_code = (u8)code;
    return __uint_as_float(max((u32)(254 - code) << 23, 1u << 22));  // 2^-127 for infinity
  }
  if (rule.up) {
    // the exponent of 448 / amax (57344 / amax), rounded down
    int up = emax + 127 - (int)((amax + ABOVE_LIMIT) >> 23);
    up = degenerate ? 0 : min(up, 126);  // scales stay normal: 2^-126
    *scale = power_of_two(-up);
    return power_of_two(up);
  }
  float factor = 1.f;
  if (!degenerate) {
    const u32 inv = __float_as_uint(__fdiv_rn(rule.fmt == 0 ? 448.f : 57344.f, __uint_as_float(amax)));
    factor = __uint_as_float(min(inv, 253u << 23));
  }
  *scale = __fdiv_rn(1.f, factor);
  return factor;
}

// ---- eight numbers at a time

template <int FROM>
struct Eight {  // as they lie in memory
  uint4 words[FROM == F32 ? 2 : 1];
};

template <int FROM>
__device__ __forceinline__ Eight<FROM> load_eight(const void* p, i64 eighth) {
  Eight<FROM> v;
  const uint4* in = (const uint4*)p + eighth * (FROM == F32 ? 2 : 1);
  v.words[0] = __ldcs(in);
  if (FROM == F32) v.words[FROM == F32] = __ldcs(in + 1);
  return v;
}

template <int FROM>
__device__ __forceinline__ void floats(const Eight<FROM>& v, float* x) {
  const u32* w = (const u32*)&v;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (FROM == F32)
      x[i] = __uint_as_float(w[i]);
    else if (FROM == BF16)
      x[i] = __uint_as_float(i & 1 ? w[i / 2] & 0xffff0000u : w[i / 2] << 16);
    else
      x[i] = f16_to_float((u16)(w[i / 2] >> (16 * (i & 1))));
  }
}

template <int TO>
__device__ __forceinline__ void store_eight(void* p, i64 eighth, const float* x) {
  uint4* out = (uint4*)p + eighth * (TO == F32 ? 2 : 1);
  u32 w[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (TO == F32)
      w[i] = __float_as_uint(x[i]);
    else if (i % 2 == 0)
      w[i / 2] =
          TO == BF16 ? to_bf16x2(x[i], x[i + 1]) : float_to_f16(x[i]) | (u32)float_to_f16(x[i + 1]) << 16;
  }
  __stcs(out, make_uint4(w[0], w[1], w[2], w[3]));
  if (TO == F32) __stcs(out + 1, make_uint4(w[4], w[5], w[6], w[7]));
}

__device__ __forceinline__ u32 largest_of(const float* x) {
  float top = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) top = larger_or_nan(top, fabsf(x[i]));
  return __float_as_uint(top);  // a NaN is above infinity, as bits
}

__device__ __forceinline__ uint2 encode_eight(const float* x, float factor, int fmt) {
  return make_uint2(encode4(x[0] * factor, x[1] * factor, x[2] * factor, x[3] * factor, fmt),
                    encode4(x[4] * factor, x[5] * factor, x[6] * factor, x[7] * factor, fmt));
}

// ---- row-wise blocks by warps
//
// Sixteen values a lane: vectors `at` and `at + lanes` of eight each, so that the lanes of a block (8 of 128
// values, 2 of 32) read and write whole lines, and its largest is three (one) shuffles away.

__device__ __forceinline__ int lanes_of(int mx) { return mx ? 2 : 8; }

// The lane's first vector, when the warp's first is `first`; the second is lanes_of(mx) further on.
__device__ __forceinline__ i64 vector_of(i64 first, int lane, int mx) {
  return mx ? first + lane / 2 * 4 + lane % 2 : first + lane / 8 * 16 + lane % 8;
}

// The largest magnitude of a block, for all of its lanes.
__device__ __forceinline__ u32 largest_of_block(const float* x, const float* y, Rule rule) {
  u32 top = max(largest_of(x), largest_of(y));
  if (!rule.mx) {
    top = max(top, __shfl_xor_sync(0xffffffffu, top, 4));
    top = max(top, __shfl_xor_sync(0xffffffffu, top, 2));
  }
  return max(top, __shfl_xor_sync(0xffffffffu, top, 1));
}

// Quantise them, all lanes of a block together; put(a, b) gets the codes of the lane's two vectors. Returns
// the block's scale, as bits (mx: its E8M0 code).
template <class Put>
__device__ __forceinline__ u32 encode_block(const float* x, const float* y, Rule rule, const Put& put) {
  float scale;
  u8 exponent;
  const float factor = block_scale(largest_of_block(x, y, rule), rule, &scale, &exponent);
  put(encode_eight(x, factor, rule.fmt), encode_eight(y, factor, rule.fmt));
  return rule.mx ? exponent : __float_as_uint(scale);
}

// The same, of their products with `by`, which is the block's, and whose scale is a power of two: so a
// product times the factor is a value times both, unless those together are no normal float.
template <class Put>
__device__ __forceinline__ u32 encode_products(float* x, float* y, float by, Rule rule, const Put& put) {
  float scale;
  u8 exponent;
  // the largest product is that of the largest value: rounding keeps order
  const float top = __uint_as_float(largest_of_block(x, y, rule)) * fabsf(by);
  const float factor = block_scale(__float_as_uint(top), rule, &scale, &exponent);
  float both = factor * by;
  const bool overflows = rule.mx && top == __uint_as_float(0x7f800000u);  // `both` may be normal then, too
  if (overflows || !(fabsf(both) >= 0x1p-126f && fabsf(both) <= 0x1p127f)) {
    both = factor;
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] *= by, y[i] *= by;
  }
  put(encode_eight(x, both, rule.fmt), encode_eight(y, both, rule.fmt));
  return rule.mx ? exponent : __float_as_uint(scale);
}

__device__ __forceinline__ void store_scale(void* scales, i64 at, u32 scale, int mx) {
  if (mx)
    ((u8*)scales)[at] = (u8)scale;
  else
    ((u32*)scales)[at] = scale;
}

// By all lanes of a block that holds `vector`, where blocks lie one after the other: one writes.
__device__ __forceinline__ void store_block_scale(void* scales, i64 vector, u32 scale, int mx) {
  if (threadIdx.x % lanes_of(mx) == 0) store_scale(scales, vector / (mx ? 4 : 16), scale, mx);
}

// encode_products where blocks lie one after the other: a lane's codes are vectors `vector` and lanes_of(mx)
// further on, if `whole`. They leave L2 first (SwiGLU 94.1 against 92.7 % of the limit; quantise by
// itself 94.4 against 95.4).
__device__ __forceinline__ u32 write_products(float* x, float* y, float by, Rule rule, i64 vector, bool whole,
                                              u8* codes) {
  uint2* to = (uint2*)codes + vector;
  return encode_products(x, y, by, rule, [&](uint2 a, uint2 b) {
    if (!whole) return;
    __stcs(to, a);
    __stcs(to + lanes_of(rule.mx), b);
  });
}

#define PAIRS 2  // of vectors (16 bytes; float32: 32) that a thread of quantize_warp has in flight

// A warp's blocks: 4 * PAIRS, or 16 * PAIRS (mx). put(at, a, b) gets each lane's codes, of
// vectors `at` and lanes_of(mx) further on, put_scale(block, scale) of each block its scale: lanes pass
// scales on, so that a warp writes them at once, a sector of 32 bytes (256.9 to 252.8 us for quantize_rows).
template <int FROM, class Put, class PutScale>
__device__ __forceinline__ void quantize_warp(const void* x, i64 vectors, Rule rule, const Put& put,
                                              const PutScale& put_scale) {
  const int lane = threadIdx.x % 32, lanes = lanes_of(rule.mx);
  const i64 first = ((i64)blockIdx.x * blockDim.x + threadIdx.x - lane) * (2 * PAIRS);  // the warp's
  Eight<FROM> a[PAIRS], b[PAIRS];
#pragma unroll
  for (int u = 0; u < PAIRS; ++u) {
    const i64 at = vector_of(first + 64 * u, lane, rule.mx);
    if (at + lanes < vectors) {
      a[u] = load_eight<FROM>(x, at);
      b[u] = load_eight<FROM>(x, at + lanes);
    }
  }
  pdl_launch_dependents();
  const int apart = 32 / lanes;                                           // blocks of a warp at a time
  const i64 block = first / (rule.mx ? 4 : 16) + lane % (PAIRS * apart);  // whose scale the lane puts
  u32 scale = 0;
#pragma unroll
  for (int u = 0; u < PAIRS; ++u) {
    const i64 at = vector_of(first + 64 * u, lane, rule.mx);
    float v[8], w[8];
    floats<FROM>(a[u], v);
    floats<FROM>(b[u], w);
    const u32 own_scale = encode_block(v, w, rule, [&](uint2 a, uint2 b) {
      if (at + lanes < vectors) put(at, a, b);
    });
    const u32 theirs = __shfl_sync(0xffffffffu, own_scale, lane % apart * lanes);
    if (lane / apart == u) scale = theirs;
  }
  if (lane < PAIRS * apart && block < vectors / (rule.mx ? 4 : 16)) put_scale(block, scale);
}
