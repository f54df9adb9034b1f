// SwiGLU and its backward in float32 (float64 for float64), step for step as fp8moe/reference/swiglu.py; the
// sigmoid in float64, rounded once.
//
// First form: right and plain. The quantised operations go through a float32 buffer and quantize.cu.
#include "common.cuh"

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
