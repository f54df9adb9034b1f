// FP8 conversions: hardware instructions on sm_89 and later, the integer steps of common.cuh elsewhere. Both
// saturate, round to nearest even and encode every NaN as 0x7f.
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

// Decodes four codes to four f16 values, which is exact for every FP8 value.
__device__ __forceinline__ void decode4(u32 codes, int fmt, u32* low, u32* high) {
#if __CUDA_ARCH__ >= 890
  if (fmt == 0)
    halves_of_e4m3x4(codes, low, high);
  else
    halves_of_e5m2x4(codes, low, high);
#else
  *low = __byte_perm(codes, 0u, 0x1404), *high = __byte_perm(codes, 0u, 0x3424);
  if (fmt == 1) return;  // an e5m2 code is the upper byte of its f16 value
  // e4m3: shift right by one bit, then correct the exponent bias (7 against 15) by a factor of 256
  auto half = [](u32 upper) {
    return halves_times((upper & 0x80008000u) | (upper >> 1 & 0x3f803f80u), 0x5c005c00u);  // * 256
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

__device__ __forceinline__ float power_of_two(int exponent) {  // exponent of a normal float
  return __uint_as_float((u32)(exponent + 127) << 23);
}

// ---- block scales

struct Rule {
  // up: round scales up to powers of two; otherwise mx rounds them down, FP32 scales are not rounded
  int fmt, up, mx;
  float eps;
  bool nan_for_infinity;  // in encode_products: infinities have the NaN code, not the format's largest number
};

// Added to the bits of a float, this carries into the exponent if the significand exceeds 1.75, that of the
// format maxima 448 and 57344.
#define ABOVE_LIMIT 0x1fffffu

// Returns the factor that values are multiplied by; sets *scale (float32) or *exponent_code (E8M0). amax:
// bits of the block's largest magnitude. Follows fp8moe/reference/quantize.py step by step.
__device__ __forceinline__ float block_scale(u32 amax, Rule rule, float* scale, u8* exponent_code) {
  if (amax <= 0x7f800000u) amax = max(amax, __float_as_uint(rule.eps));
  const bool degenerate = amax == 0u || amax >= 0x7f800000u;
  const int emax = rule.fmt == 0 ? 8 : 15;
  if (rule.mx) {
    // amax / max is a subnormal float here: one bit of amax above 2^-127 is rounded away
    const u32 above = rule.up ? ABOVE_LIMIT - (amax < (u32)(emax + 1) << 23) : 0u;
    int code = max((int)((amax + above) >> 23) - emax, 0);
    if (rule.up && amax == 0x7f800000u) code = 254;
    const u32 factor = max((u32)(254 - code) << 23, 1u << 22);  // 2^-127 for code 254
    const bool nan = amax > 0x7f800000u;
    *exponent_code = (u8)(nan ? 255 : code);
    return __uint_as_float(!nan ? factor : rule.up ? amax : 0u);
  }
  if (rule.up) {
    // floor of log2(448 / amax) or log2(57344 / amax)
    int up = emax + 127 - (int)((amax + ABOVE_LIMIT) >> 23);
    up = degenerate ? 0 : min(up, 126);  // keeps scales normal: >= 2^-126
    *scale = power_of_two(-up);
    return power_of_two(up);
  }
  *scale = 1.f;
  if (!degenerate)
    *scale = fmaxf(__fdiv_rn(__uint_as_float(amax), rule.fmt == 0 ? 448.f : 57344.f), 0x1p-126f);
  return __fdiv_rn(1.f, *scale);
}

// ---- vectors of eight values

template <int FROM>
struct Eight {  // raw bits, as in memory
  uint4 words[FROM == F32 ? 2 : 1];
};

// Ordinary loads: streaming ones (ld.cs, evict first), or ones that are not kept in L1, take 2 to 8 % longer
// (docs/experiments/quantize.md).
template <int FROM>
__device__ __forceinline__ Eight<FROM> load_eight(const void* p, i64 eighth) {
  Eight<FROM> v;
  const uint4* in = (const uint4*)p + eighth * (FROM == F32 ? 2 : 1);
  v.words[0] = in[0];
  if (FROM == F32) v.words[FROM == F32] = in[1];
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
__device__ __forceinline__ Eight<TO> eight(const float* x) {  // rounded to nearest even
  Eight<TO> v;
  u32* const w = (u32*)&v;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (TO == F32)
      w[i] = __float_as_uint(x[i]);
    else if (i % 2 == 0)
      w[i / 2] =
          TO == BF16 ? to_bf16x2(x[i], x[i + 1]) : float_to_f16(x[i]) | (u32)float_to_f16(x[i + 1]) << 16;
  }
  return v;
}

template <int TO>
__device__ __forceinline__ void store_eight(void* p, i64 eighth, const Eight<TO>& v) {
  uint4* out = (uint4*)p + eighth * (TO == F32 ? 2 : 1);
  __stcs(out, v.words[0]);
  if (TO == F32) __stcs(out + 1, v.words[TO == F32]);
}

template <int TO>
__device__ __forceinline__ void store_eight(void* p, i64 eighth, const float* x) {
  store_eight<TO>(p, eighth, eight<TO>(x));
}

__device__ __forceinline__ u32 largest_of(const float* x) {
  float top = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) top = larger_or_nan(top, fabsf(x[i]));
  return __float_as_uint(top);  // as bits, a NaN compares greater than infinity
}

__device__ __forceinline__ uint2 encode_eight(const float* x, float factor, int fmt) {
  return make_uint2(encode4(x[0] * factor, x[1] * factor, x[2] * factor, x[3] * factor, fmt),
                    encode4(x[4] * factor, x[5] * factor, x[6] * factor, x[7] * factor, fmt));
}

// ---- row-wise quantisation, one warp per group of blocks
//
// Each lane holds sixteen values: vectors `at` and `at + lanes` of eight each. The lanes of a scale block (8
// for 128 values, 2 for 32) then access whole cache lines, and its amax takes three (one) shuffles.

__device__ __forceinline__ int lanes_of(int mx) { return mx ? 2 : 8; }

// The lane's first vector, given the warp's first; its second one is lanes_of(mx) vectors later.
__device__ __forceinline__ i64 vector_of(i64 first, int lane, int mx) {
  return mx ? first + lane / 2 * 4 + lane % 2 : first + lane / 8 * 16 + lane % 8;
}

// The block's largest magnitude, returned to all of its lanes.
__device__ __forceinline__ u32 largest_of_block(const float* x, const float* y, Rule rule) {
  u32 top = max(largest_of(x), largest_of(y));
  if (!rule.mx) {
    top = max(top, __shfl_xor_sync(0xffffffffu, top, 4));
    top = max(top, __shfl_xor_sync(0xffffffffu, top, 2));
  }
  return max(top, __shfl_xor_sync(0xffffffffu, top, 1));
}

// Quantises one scale block, called by all of its lanes; put(a, b) receives the codes of the lane's two
// vectors. Returns the scale's float32 bits (mx: the E8M0 code).
template <class Put>
__device__ __forceinline__ u32 encode_block(const float* x, const float* y, Rule rule, const Put& put) {
  float scale;
  u8 exponent;
  const float factor = block_scale(largest_of_block(x, y, rule), rule, &scale, &exponent);
  put(encode_eight(x, factor, rule.fmt), encode_eight(y, factor, rule.fmt));
  return rule.mx ? exponent : __float_as_uint(scale);
}

// encode_block for the values multiplied by `by`, one factor for the whole block. Scales are powers of two,
// so (x * by) * factor equals x * (by * factor) unless by * factor is not a normal float.
template <class Put>
__device__ __forceinline__ u32 encode_products(float* x, float* y, float by, Rule rule, const Put& put) {
  float scale;
  u8 exponent;
  if (rule.mx && fabsf(by) == __uint_as_float(0x7f800000u)) {  // its products with zeros are NaN
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] *= by, y[i] *= by;
    by = 1.f;
  }
  // amax of the products is the product of amax: rounding is monotonic
  const float top = __uint_as_float(largest_of_block(x, y, rule)) * fabsf(by);
  if (rule.nan_for_infinity && __float_as_uint(top) >= 0x7f800000u) {
#pragma unroll
    for (int i = 0; i < 8; ++i)  // 0 x is NaN for an infinity; else 0 of x's sign, which leaves -0 as it is
      x[i] = __fmaf_rn(x[i], 0.f, x[i]), y[i] = __fmaf_rn(y[i], 0.f, y[i]);
  }
  const float factor = block_scale(__float_as_uint(top), rule, &scale, &exponent);
  float both = factor * by;
  const bool overflows = rule.mx && top == __uint_as_float(0x7f800000u);  // `both` may still be normal
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

// Called by all lanes of the scale block that holds `vector`, for contiguous blocks; one lane writes.
__device__ __forceinline__ void store_block_scale(void* scales, i64 vector, u32 scale, int mx) {
  if (threadIdx.x % lanes_of(mx) == 0) store_scale(scales, vector / (mx ? 4 : 16), scale, mx);
}

// encode_products for contiguous blocks: writes the lane's codes to vectors `vector` and `vector` +
// lanes_of(mx), predicated on `whole`. Streaming stores (evict first in L2): SwiGLU reaches 94.1 against 92.7
// % of the bandwidth limit; quantise alone 94.4 against 95.4 %.
__device__ __forceinline__ u32 write_products(float* x, float* y, float by, Rule rule, i64 vector, bool whole,
                                              u8* codes) {
  uint2* to = (uint2*)codes + vector;
  return encode_products(x, y, by, rule, [&](uint2 a, uint2 b) {
    if (!whole) return;
    __stcs(to, a);
    __stcs(to + lanes_of(rule.mx), b);
  });
}

#define PAIRS 2  // vector pairs of vectors (16 bytes each; float32: 32) in flight per thread of quantize_warp

// Quantises 4 * PAIRS scale blocks per warp (mx: 16 * PAIRS). put(at, a, b) receives each lane's codes of
// vectors `at` and `at` + lanes_of(mx); put_scale(block, scale) receives each scale once. Lanes exchange
// scales by shuffles so that a warp stores them as one 32-byte sector (quantize_rows: 256.9 to 252.8 us).
template <int FROM, class Put, class PutScale>
__device__ __forceinline__ void quantize_warp(const void* x, i64 vectors, Rule rule, const Put& put,
                                              const PutScale& put_scale) {
  const int lane = threadIdx.x % 32, lanes = lanes_of(rule.mx);
  // first vector of the warp
  const i64 first = ((i64)blockIdx.x * blockDim.x + threadIdx.x - lane) * (2 * PAIRS);
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
  const int apart = 32 / lanes;  // scale blocks per warp and pair
  // the block whose scale this lane stores
  const i64 block = first / (rule.mx ? 4 : 16) + lane % (PAIRS * apart);
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
    const u32 scale_of_block = __shfl_sync(0xffffffffu, own_scale, lane % apart * lanes);
    if (lane / apart == u) scale = scale_of_block;
  }
  if (lane < PAIRS * apart && block < vectors / (rule.mx ? 4 : 16)) put_scale(block, scale);
}
