// SwiGLU and its backward in float32 (float64 for float64), step for step as fp8moe/reference/swiglu.py.
//
// swiglu_quantize_rows_* and swiglu_quantize_backward_rows_* are the fast path: activation and row-wise
// quantise in one read and one write. Their sigmoid is float32, by the hardware's exponential; the
// reference's is float64 rounded once. quick_sigmoid says how far apart they can be. The kernels behind them
// take float64's way and, for quantised results, go through a float32 buffer and quantize.cu.
#include "fp8.cuh"

struct Element {
  float a, b, s;
  bool a_free, b_free;
};

__device__ __forceinline__ Element element(float a, float b, float clamp, float alpha, float offset) {
  Element e;
  e.a_free = !(a > clamp);
  e.b_free = !(fabsf(b) > clamp);
  if (a > clamp) a = clamp;
  if (b > clamp) b = clamp;
  if (b < -clamp) b = -clamp;
  if (offset != 0.f) b += offset;
  e.a = a;
  e.b = b;
  e.s = (float)(1.0 / (1.0 + exp(-(double)(alpha * a))));
  return e;
}

// y [rows, width] of h [rows, 2 * width]; rows behind *last (when given) are zeros. One block a row.
extern "C" __global__ void swiglu_forward(const void* h, i64 kind, const void* probs, i64 probs_kind,
                                          const int* last, float clamp, float alpha, float offset, i64 width,
                                          i64 out_kind, void* y) {
  const i64 row = blockIdx.x;
  const bool real = !last || row < *last;
  for (i64 i = threadIdx.x; i < width; i += blockDim.x) {
    if (kind == F64) {
      const double* in = (const double*)h + row * 2 * width;
      double a = in[i], b = in[width + i];
      if (a > clamp) a = clamp;
      if (b > clamp) b = clamp;
      if (b < -clamp) b = -clamp;
      double value = a / (1.0 + exp(-(double)alpha * a)) * (b + offset);
      if (probs) value *= load_wide(probs, row, (int)probs_kind);
      store(y, row * width + i, (int)out_kind, value);
      continue;
    }
    float value = 0.f;
    if (real) {
      const Element e = element(load(h, row * 2 * width + i, (int)kind),
                                load(h, row * 2 * width + width + i, (int)kind), clamp, alpha, offset);
      value = e.a * e.s * e.b;
      if (probs) value *= load(probs, row, (int)probs_kind);
    }
    store(y, row * width + i, (int)out_kind, value);
  }
}

// dh [rows, 2 * width] and dprobs [rows], the sum in float64 in a fixed order. One block (256 threads) a row.
extern "C" __global__ void swiglu_backward(const void* grad, const void* h, i64 kind, const void* probs,
                                           i64 probs_kind, const int* last, float clamp, float alpha,
                                           float offset, i64 width, i64 out_kind, void* dh, i64 dprobs_kind,
                                           void* dprobs) {
  __shared__ double partial[256];
  const i64 row = blockIdx.x;
  const bool real = !last || row < *last;
  double sum = 0.0;
  for (i64 i = threadIdx.x; i < width; i += blockDim.x) {
    double da = 0.0, db = 0.0;
    const i64 at = row * 2 * width + i;
    if (kind == F64) {
      double a = ((const double*)h)[at], b = ((const double*)h)[at + width];
      const double g = ((const double*)grad)[row * width + i];
      const bool a_free = !(a > clamp), b_free = !(fabs(b) > clamp);
      if (a > clamp) a = clamp;
      if (b > clamp) b = clamp;
      if (b < -clamp) b = -clamp;
      b += offset;
      const double s = 1.0 / (1.0 + exp(-(double)alpha * a));
      const double scaled = probs ? g * load_wide(probs, row, (int)probs_kind) : g;
      da = a_free ? scaled * b * (s + alpha * a * s * (1.0 - s)) : 0.0;
      db = b_free ? scaled * a * s : 0.0;
      sum += g * a * s * b;
    } else if (real) {
      const Element e = element(load(h, at, (int)kind), load(h, at + width, (int)kind), clamp, alpha, offset);
      float scaled = load(grad, row * width + i, (int)kind);
      const float g = e.a * e.s;
      sum += (double)(scaled * g * e.b);
      if (probs) scaled *= load(probs, row, (int)probs_kind);
      da = e.a_free ? scaled * e.b * (e.s + alpha * g * (1.f - e.s)) : 0.f;
      db = e.b_free ? scaled * g : 0.f;
    }
    store(dh, at, (int)out_kind, da);
    store(dh, at + width, (int)out_kind, db);
  }
  sum = block_reduce(sum, partial, [](double a, double b) { return a + b; });
  if (dprobs && threadIdx.x == 0) store(dprobs, row, (int)dprobs_kind, sum);
}

// 1 / (1 + exp(-x)), within 2^-21.5 of itself: the exponential's argument -x log2(e) is held in two floats
// (their sum errs by 2^-40), ex2.approx errs by 2 ulp = 2^-22, the rest of the argument enters by 1 + r ln 2
// (an ulp), and the reciprocal, one Newton step behind rcp.approx, by an ulp. Below -80 floats run out:
// float64, once in a blue moon, NaN as well.
__device__ __forceinline__ float quick_sigmoid(float x) {
  if (!(x > -80.f)) return (float)(1.0 / (1.0 + exp(-(double)x)));
  const float log2e = 1.44269502f, rest = 1.92596299e-8f;  // their sum is log2(e)
  const float whole = x * -log2e;
  const float left = __fmaf_rn(x, -rest, __fmaf_rn(x, -log2e, -whole));
  float power, reciprocal;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(whole));
  const float d = 1.f + __fmaf_rn(power, left * 0.693147182f, power);
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(d));
  return __fmaf_rn(reciprocal, __fmaf_rn(-d, reciprocal, 1.f), reciprocal);
}

struct Activation {
  float clamp, alpha, offset;
};

__device__ __forceinline__ Element quick_element(float a, float b, Activation act) {
  Element e;
  e.a_free = !(a > act.clamp);
  e.b_free = !(fabsf(b) > act.clamp);
  if (a > act.clamp) a = act.clamp;
  if (b > act.clamp) b = act.clamp;
  if (b < -act.clamp) b = -act.clamp;
  if (act.offset != 0.f) b += act.offset;
  e.a = a;
  e.b = b;
  e.s = quick_sigmoid(act.alpha * a);
  return e;
}

#define FORWARD_EIGHTS 2

// What: y = a * sigmoid(alpha a) * b * prob, quantised by blocks of 128 (mx: 32) of a row; zeros behind
// *last. Shapes: h [rows, 2 width] = (a | b), width a multiple of the block; codes [rows, width], scales
// [rows, width /
//   block].
// Bytes: h read once, codes and scales written once.
// Launch: blocks of 256 threads, a thread FORWARD_EIGHTS times eight values of a and of b.
template <int KIND>
__device__ __forceinline__ void swiglu_quantize_rows(const void* h, const void* probs, int probs_kind,
                                                     const int* last, Activation act, u32 rows, u32 eighths,
                                                     Rule rule, u8* codes, void* scales) {
  const i64 all = (i64)rows * eighths, first = (i64)blockIdx.x * (FORWARD_EIGHTS * blockDim.x) + threadIdx.x;
  const i64 real = last ? *last : rows;
  Eight<KIND> a[FORWARD_EIGHTS], b[FORWARD_EIGHTS];
  i64 row[FORWARD_EIGHTS];
#pragma unroll
  for (int u = 0; u < FORWARD_EIGHTS; ++u) {
    const i64 eighth = first + u * blockDim.x;
    row[u] = all <= 0xffffffffll ? (u32)eighth / eighths : eighth / eighths;
    if (eighth < all && row[u] < real) {
      const i64 at = row[u] * 2 * eighths + (eighth - row[u] * eighths);
      a[u] = load_eight<KIND>(h, at);
      b[u] = load_eight<KIND>(h, at + eighths);
    }
  }
#pragma unroll
  for (int u = 0; u < FORWARD_EIGHTS; ++u) {
    const i64 eighth = first + u * blockDim.x;
    float y[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
    if (eighth < all && row[u] < real) {
      float av[8], bv[8];
      floats<KIND>(a[u], av);
      floats<KIND>(b[u], bv);
      const float prob = probs ? load(probs, row[u], probs_kind) : 1.f;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const Element e = quick_element(av[i], bv[i], act);
        y[i] = e.a * e.s * e.b;
        if (probs) y[i] *= prob;
      }
    }
    write_block(y, rule, eighth, eighth / (rule.mx ? 4 : 16), eighth < all, codes, scales);
  }
}

// What: dh = (da | db), each half quantised by its own blocks, and dprobs; zeros behind *last.
// Shapes: grad [rows, width], h and dh [rows, 2 width], dprobs [rows] float32 or null.
// Bytes: grad and h read once, codes and scales written once.
// Launch: a warp a row; the sum for dprobs is float64 over groups of eight products, in a fixed order.
template <int KIND>
__device__ __forceinline__ void swiglu_quantize_backward_rows(const void* grad, const void* h,
                                                              const void* probs, int probs_kind,
                                                              const int* last, Activation act, i64 rows,
                                                              i64 eighths, Rule rule, u8* codes, void* scales,
                                                              float* dprobs) {
  const i64 row = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (row >= rows) return;
  const bool real = !last || row < *last;
  const float prob = probs && real ? load(probs, row, probs_kind) : 1.f;
  double sum = 0.0;
  for (i64 first = 0; first < eighths; first += 32) {
    const i64 i8 = first + lane;
    const bool inside = i8 < eighths;
    float da[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f}, db[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
    if (inside && real) {
      const Eight<KIND> av = load_eight<KIND>(h, row * 2 * eighths + i8);
      const Eight<KIND> bv = load_eight<KIND>(h, row * 2 * eighths + eighths + i8);
      const Eight<KIND> gv = load_eight<KIND>(grad, row * eighths + i8);
      float a[8], b[8], g[8], part = 0.f;
      floats<KIND>(av, a);
      floats<KIND>(bv, b);
      floats<KIND>(gv, g);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const Element e = quick_element(a[i], b[i], act);
        const float gate = e.a * e.s;
        part += g[i] * gate * e.b;
        const float scaled = probs ? g[i] * prob : g[i];
        da[i] = e.a_free ? scaled * e.b * (e.s + act.alpha * gate * (1.f - e.s)) : 0.f;
        db[i] = e.b_free ? scaled * gate : 0.f;
      }
      sum += (double)part;
    }
    const i64 at = row * 2 * eighths + i8;
    write_block(da, rule, at, at / (rule.mx ? 4 : 16), inside, codes, scales);
    write_block(db, rule, at + eighths, (at + eighths) / (rule.mx ? 4 : 16), inside, codes, scales);
  }
  if (!dprobs) return;
  for (int step = 16; step > 0; step /= 2) sum += __shfl_down_sync(0xffffffffu, sum, step);
  if (lane == 0) dprobs[row] = (float)sum;
}

#define SWIGLU_ROWS(SUFFIX, KIND)                                                                          \
  extern "C" __global__ void __launch_bounds__(256) swiglu_quantize_rows_##SUFFIX(                         \
      const void* h, const void* probs, i64 probs_kind, const int* last, float clamp, float alpha,         \
      float offset, i64 rows, i64 eighths, i64 fmt, i64 mx, u8* codes, void* scales) {                     \
    const Activation act = {clamp, alpha, offset};                                                         \
    const Rule rule = {(int)fmt, 1, (int)mx, 0.f};                                                         \
    swiglu_quantize_rows<KIND>(h, probs, (int)probs_kind, last, act, (u32)rows, (u32)eighths, rule, codes, \
                               scales);                                                                    \
  }                                                                                                        \
  extern "C" __global__ void __launch_bounds__(128) swiglu_quantize_backward_rows_##SUFFIX(                \
      const void* grad, const void* h, const void* probs, i64 probs_kind, const int* last, float clamp,    \
      float alpha, float offset, i64 rows, i64 eighths, i64 fmt, i64 mx, u8* codes, void* scales,          \
      float* dprobs) {                                                                                     \
    const Activation act = {clamp, alpha, offset};                                                         \
    const Rule rule = {(int)fmt, 1, (int)mx, 0.f};                                                         \
    swiglu_quantize_backward_rows<KIND>(grad, h, probs, (int)probs_kind, last, act, rows, eighths, rule,   \
                                        codes, scales, dprobs);                                            \
  }
SWIGLU_ROWS(bfloat16, BF16)
SWIGLU_ROWS(float16, F16)
SWIGLU_ROWS(float32, F32)
