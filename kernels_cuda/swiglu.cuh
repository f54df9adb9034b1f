// The activations: one element in float64 as in the reference, and a fast version for eight elements.
#pragma once
#include "fp8.cuh"

#define SILU 0
#define GELU 1
#define GELU_TANH 2
#define RELU2 3  // max(a, 0)^2
#ifndef ACT
#define ACT SILU
#endif
#ifndef GATED
#define GATED 1  // 0: h is a, and b is 1
#endif
#define HALVES (GATED ? 2 : 1)  // halves of each row of h and dh

#ifndef KIND
#define KIND BF16  // input of the fast path
#define FMT 0      // output of the fast path: e4m3
#define MX 0       // scale blocks of 128
#define BARE 1     // alpha 1, no clamp, no offset
#endif

#define LINE 1.5957691216057308   // 2 sqrt(2 / pi)
#define CUBE 0.07135481627260025  // LINE * 0.044715
#define HALF_ROOT 0.7071067811865476
#define ROOT_PI 2.5066282746310002  // sqrt(2 pi)

// z, where the gate's weight is s = sigmoid(z).
__device__ __forceinline__ float exponent(float a, float alpha) {
  if (ACT != GELU_TANH) return alpha * a;
  return a * ((float)LINE + (float)CUBE * (a * a));
}

// a * ds/da, where gate = a * s.
__device__ __forceinline__ float slope(float a, float gate, float s, float alpha) {
  if (ACT == RELU2) return s;
  if (ACT == GELU) return (float)((double)a * exp(-0.5 * (double)a * (double)a) / ROOT_PI);
  if (ACT == GELU_TANH) alpha = (float)LINE + (float)(3 * CUBE) * (a * a);
  return alpha * gate * (1.f - s);
}

__device__ __forceinline__ double wide_weight(double a, double alpha) {
  if (ACT == RELU2) return a;
  if (ACT == GELU) return 0.5 * erfc(-a * HALF_ROOT);
  return 1.0 / (1.0 + exp(-(ACT == GELU_TANH ? a * (LINE + CUBE * (a * a)) : alpha * a)));
}

__device__ __forceinline__ double wide_slope(double a, double s, double alpha) {
  if (ACT == RELU2) return s;
  if (ACT == GELU) return a * exp(-0.5 * a * a) / ROOT_PI;
  return (ACT == GELU_TANH ? LINE + 3 * CUBE * (a * a) : alpha) * a * s * (1.0 - s);
}

struct Element {
  float a, b, s;
  bool a_free, b_free;
};

__device__ __forceinline__ Element element(float a, float b, float clamp, float alpha, float offset) {
  Element e;
  if (ACT == RELU2) {
    e.a = e.s = a < 0.f ? 0.f : a;
    e.b = b;
    e.a_free = e.b_free = true;
    return e;
  }
  e.a_free = !(a > clamp);
  e.b_free = !(fabsf(b) > clamp);
  if (a > clamp) a = clamp;
  if (b > clamp) b = clamp;
  if (b < -clamp) b = -clamp;
  if (offset != 0.f) b += offset;
  e.a = a;
  e.b = b;
  e.s = ACT == GELU ? (float)erfc(-(double)a * HALF_ROOT) * 0.5f
                    : (float)(1.0 / (1.0 + exp(-(double)exponent(a, alpha))));
  return e;
}

#define LOG2E 1.44269502f  // log2(e) = LOG2E + LOG2E_REST
#define LOG2E_REST 1.92596299e-8f
#define LN2 0.693147182f

// 1 / (1 + exp(-x)) for |x| < FAR, relative error 2^-21 + |x| 2^-28.4, at most 2^-20.4. exp(-x) = 2^w (1 + r)
// with w = -x log2(e) rounded and r = -x - w ln 2 in one FMA, where ln 2 has relative error 2^-28.4.
// ex2.approx contributes 2 ulp = 2^-22, 1 + r and the sum 2^-24 each, rcp.approx 1 ulp.
__device__ __forceinline__ float quick_sigmoid(float x) {
  const float whole = x * -LOG2E, left = __fmaf_rn(whole, -LN2, -x);
  const float power = exp2_approx(whole);
  return reciprocal_approx(1.f + __fmaf_rn(power, left, power));
}

#define FAR 80.f  // from here on the sum rounds to 1 or exp leaves float's range; also NaN

// The sigmoid for |x| >= FAR: 1, or e^x within relative 2^-21 or absolute 2^-150. The power of two is split
// into two factors so that the last product rounds to a subnormal.
__device__ __forceinline__ float far_sigmoid(float x) {
  if (!(x < 0.f)) return x > 0.f ? 1.f : x;
  x = fmaxf(x, -120.f);  // the result is 0 from -104 on
  const float whole = x * LOG2E, left = __fmaf_rn(x, LOG2E_REST, __fmaf_rn(x, LOG2E, -whole)),
              n = rintf(whole);
  const float power = exp2_approx(whole - n);
  const int half = (int)n / 2;
  return __fmaf_rn(power, left * LN2, power) * power_of_two(half) * power_of_two((int)n - half);
}

// The normal distribution function Phi(x). erfcf has at most 4 ulp error (CUDA math API, single precision);
// rounding its argument contributes a relative |x|^2 2^-24, which is 2^-20 where the result still matters
// beside a rounding step at 448.
__device__ __forceinline__ float quick_normal(float x) { return 0.5f * erfcf(-(float)HALF_ROOT * x); }

__device__ __forceinline__ float quick_slope(float a, float gate, float s) {
  if (ACT == RELU2) return s;
  if (ACT == GELU) return a * (exp2_approx(a * a * (-0.5f * LOG2E)) * (float)(1 / ROOT_PI));
  return slope(a, gate, s, 1.f);
}

struct Activation {
  float clamp, alpha, offset;
};

// The same of values of any kind, from the bits of float64.
struct WideActivation {
  double clamp, alpha, offset;
  __device__ __forceinline__ WideActivation(i64 clamp_bits, i64 alpha_bits, i64 offset_bits)
      : clamp(__longlong_as_double(clamp_bits)),
        alpha(__longlong_as_double(alpha_bits)),
        offset(__longlong_as_double(offset_bits)) {}
};

// Eight elements: a and b after clamp and offset, s = sigmoid(alpha a), and which of them were not clamped.
struct Gates {
  float a[8], b[8], s[8];
  u32 free;  // bit i: a[i] not clamped; bit 8 + i: b[i]
};

// Returns whether quick_sigmoid covers all eight.
__device__ __forceinline__ bool quick_gates(Gates& g, Activation act) {
  g.free = 0xffffu;
  if (!GATED) {
#pragma unroll
    for (int i = 0; i < 8; ++i) g.b[i] = 1.f;
  }
  if (ACT == RELU2) {
#pragma unroll
    for (int i = 0; i < 8; ++i) g.a[i] = g.s[i] = g.a[i] < 0.f ? 0.f : g.a[i];
    return true;
  }
  if (GATED && !BARE) {  // without a gate there is no clamp and no offset
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (g.a[i] > act.clamp) g.free &= ~(1u << i), g.a[i] = act.clamp;
      if (fabsf(g.b[i]) > act.clamp) g.free &= ~(256u << i);
      if (g.b[i] > act.clamp) g.b[i] = act.clamp;
      if (g.b[i] < -act.clamp) g.b[i] = -act.clamp;
      if (act.offset != 0.f) g.b[i] += act.offset;
    }
  }
  bool near = true;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (ACT == GELU) {
      g.s[i] = quick_normal(g.a[i]);
      continue;
    }
    const float x = BARE && ACT == SILU ? g.a[i] : exponent(g.a[i], act.alpha);
    near = near && fabsf(x) < FAR;
    g.s[i] = quick_sigmoid(x);
  }
  return near;
}

// far: whether any of the eight may be outside of quick_sigmoid's range, where `TESTED`.
template <bool TESTED = false>
__device__ __forceinline__ void gates(Gates& g, Activation act, bool far = false) {
  const bool near = quick_gates(g, act);
  if (TESTED ? !far : near) return;
#pragma unroll
  for (int i = 0; i < 8; ++i) {  // very rare
    const float x = exponent(g.a[i], act.alpha);
    if (!(fabsf(x) < FAR)) g.s[i] = far_sigmoid(x);
  }
}

// Eight values as e4m3 codes, and the scale of their block.
struct Coded {
  uint2 codes;
  float scale;
};
__device__ __forceinline__ void floats(const Coded& v, float* x) {
  u32 pairs[4];  // f16
  decode4(v.codes.x, 0, pairs, pairs + 1);
  decode4(v.codes.y, 0, pairs + 2, pairs + 3);
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = f16_to_float((u16)(pairs[i / 2] >> (16 * (i & 1)))) * v.scale;
}

// Whether the sigmoid's range is tested by pairs of 16-bit values: 9 instructions for sixteen instead of 16.
template <int FROM>
constexpr bool BY_PAIRS = FROM != F32 && BARE && ACT == SILU;

// Whether any value of a and b may have a magnitude of FAR or more, for BY_PAIRS. bfloat16 is compared as
// f16: magnitudes are in the same order, and f16's NaN, which are bfloat16 from 2^121 on, remain above the
// limit.
template <int FROM>
__device__ __forceinline__ bool any_far(const Eight<FROM>& a, const Eight<FROM>& b) {
  const uint4 v = a.words[0], w = b.words[0];
  u32 top = larger_magnitudes(v.x, v.y);
  top = larger_halves(larger_halves(top, v.z), v.w);
  top = larger_halves(top, larger_magnitudes(w.x, w.y));
  top = larger_halves(larger_halves(top, w.z), w.w);
  const u32 limit = FROM == BF16 ? 0x42a0u : 0x5500u;  // FAR
  return (top + (0x8000u - limit) * 0x10001u) & 0x80008000u;
}

// Gradients of eight elements with respect to a and b of h, before the multiplication by the row's
// probability. Returns their contribution to the probability's gradient. up: gradients of y. far: see gates.
// y: the forward's values before the same multiplication, or null.
template <bool TESTED = false, class Values, int FROM>
__device__ __forceinline__ float eight_gradients(const Values& a, const Values& b, const Eight<FROM>& up,
                                                 Activation act, float* da, float* db, bool far = false,
                                                 float* y = 0) {
  Gates g;
  float grads[8], part = 0.f;
  floats(a, g.a);
  if (HALVES == 2) floats(b, g.b);
  floats(up, grads);
  gates<TESTED>(g, act, far);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float gate = g.a[i] * g.s[i], of_gate = grads[i] * g.b[i];
    part = __fmaf_rn(of_gate, gate, part);
    if (y) y[i] = gate * g.b[i];
    if (ACT == SILU)
      da[i] = of_gate * __fmaf_rn(BARE ? gate : act.alpha * gate, 1.f - g.s[i], g.s[i]);
    else
      da[i] = of_gate * (g.s[i] + quick_slope(g.a[i], gate, g.s[i]));
    db[i] = grads[i] * gate;
    if (GATED && !BARE && !(g.free >> i & 1u)) da[i] = 0.f;
    if (GATED && !BARE && !(g.free >> (8 + i) & 1u)) db[i] = 0.f;
  }
  return part;
}
