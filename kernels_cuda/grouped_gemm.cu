// Grouped GEMM without tensor cores: one thread per output value, float32 partial sums of 128 values promoted
// to the accumulator. Used for float32 and float64, and by the tests as the baseline of the tensor core
// kernels.
#include "common.cuh"

__device__ __forceinline__ i64 expert_of(i64 row, const int* offsets, i64 experts, i64 rows) {
  for (i64 e = 0; e < experts; ++e)
    if (row >= clamped(offsets[e], rows) && row < clamped(offsets[e + 1], rows)) return e;
  return -1;
}

// out[row, n] = sum over k of x[row, k] * w[e, n, k] (or w[e, k, n]), plus bias[e, n] unless bias is null,
// which is float64 for float64 and otherwise float32; zeros for rows of no expert. x: row-wise codes with
// scales[row * row_stride + block * column_stride], or a plain array; w likewise.
extern "C" __global__ void grouped_gemm(const void* x, const float* x_scales, i64 row_stride,
                                        i64 column_stride, i64 x_fmt, const void* w, const float* w_scales,
                                        i64 w_fmt, const int* offsets, i64 experts, i64 rows, i64 width,
                                        i64 depth, i64 quantized, i64 kind, i64 transpose_w, i64 out_kind,
                                        const void* bias, void* out) {
  pdl_wait();
  const i64 n = (i64)blockIdx.y * blockDim.x + threadIdx.x, row = blockIdx.x;
  if (n >= width) return;
  const i64 e = expert_of(row, offsets, experts, rows);
  float total = 0.f;
  double wide = 0.0;
  const i64 n_blocks = (width + 127) / 128, k_blocks = (depth + 127) / 128;
  for (i64 b = 0; e >= 0 && b < k_blocks; ++b) {
    float part = 0.f;
    const i64 end = (b + 1) * 128 < depth ? (b + 1) * 128 : depth;
    for (i64 k = b * 128; k < end; ++k) {
      const i64 wi = transpose_w ? (e * depth + k) * width + n : (e * width + n) * depth + k;
      if (quantized)
        part += decode(((const u8*)x)[row * depth + k], (int)x_fmt) * decode(((const u8*)w)[wi], (int)w_fmt);
      else if (kind == F64)
        wide += ((const double*)x)[row * depth + k] * ((const double*)w)[wi];
      else
        part += load(x, row * depth + k, (int)kind) * load(w, wi, (int)kind);
    }
    if (quantized)
      part = part * x_scales[row * row_stride + b * column_stride] *
             w_scales[(e * n_blocks + n / 128) * k_blocks + b];
    total += part;
  }
  const bool in_wide = kind == F64 && !quantized;
  if (bias && e >= 0) {
    if (in_wide)
      wide += ((const double*)bias)[e * width + n];
    else
      total += ((const float*)bias)[e * width + n];
  }
  store(out, row * width + n, (int)out_kind, in_wide ? wide : (double)total);
}

// out[row] = bias[e] of the row's expert, zeros for rows of no expert. Grid (rows, width / 128).
extern "C" __global__ void fill_rows(const float* bias, const int* offsets, i64 experts, i64 rows, i64 width,
                                     i64 out_kind, void* out) {
  pdl_wait();
  const i64 n = (i64)blockIdx.y * blockDim.x + threadIdx.x, row = blockIdx.x;
  if (n >= width) return;
  const i64 e = expert_of(row, offsets, experts, rows);
  store(out, row * width + n, (int)out_kind, e < 0 ? 0.f : bias[e * width + n]);
}

// out[e, n, k] = sum over expert e's rows m of dy[m, n] * x[m, k], or += if accumulating. Column-wise codes
// [N, rows] and [K, rows] with scales [block, N] and [block, K] or (by_blocks) [N / 128, blocks] and [K /
// 128, blocks]; or plain arrays. `known`: number of blocks with scales; blocks beyond it give NaN, as do
// experts that begin inside a 128 x 128 block. pitch: rows of out from an expert to the next. Grid (E * N,
// K / 128).
extern "C" __global__ void grouped_gemm_wgrad(const void* dy, const float* dy_scales, i64 dy_fmt,
                                              const void* x, const float* x_scales, i64 x_fmt, i64 known,
                                              const int* offsets, i64 rows, i64 width, i64 depth,
                                              i64 quantized, i64 by_blocks, i64 kind, i64 pitch,
                                              i64 accumulate, i64 out_kind, void* out) {
  pdl_wait();
  const i64 e = blockIdx.x / width, n = blockIdx.x % width;
  const i64 k = (i64)blockIdx.y * blockDim.x + threadIdx.x;
  if (k >= depth) return;
  i64 block = 0;  // scale blocks of all earlier experts
  for (i64 i = 0; i < e; ++i)
    block += (clamped(offsets[i + 1], rows) - clamped(offsets[i], rows) + 127) / 128;
  const i64 lo = clamped(offsets[e], rows), hi = clamped(offsets[e + 1], rows);
  float total = 0.f;
  double wide = 0.0;
  for (i64 m = lo; m < hi; m += 128, ++block) {
    float part = 0.f;
    for (i64 r = m; r < hi && r < m + 128; ++r) {
      if (quantized)
        part += decode(((const u8*)dy)[n * rows + r], (int)dy_fmt) *
                decode(((const u8*)x)[k * rows + r], (int)x_fmt);
      else if (kind == F64)
        wide += ((const double*)dy)[r * width + n] * ((const double*)x)[r * depth + k];
      else
        part += load(dy, r * width + n, (int)kind) * load(x, r * depth + k, (int)kind);
    }
    if (by_blocks) {
      const i64 blocks = (rows + 127) / 128;
      part = lo % 128 ? __uint_as_float(0x7fc00000u)
                      : part * dy_scales[n / 128 * blocks + m / 128] * x_scales[k / 128 * blocks + m / 128];
    } else if (quantized) {
      part = block < known ? part * dy_scales[block * width + n] * x_scales[block * depth + k]
                           : __uint_as_float(0x7fc00000u);
    }
    total += part;
  }
  const i64 at = (e * pitch + n) * depth + k;
  double result = kind == F64 && !quantized ? wide : (double)total;
  if (accumulate) result += load_wide(out, at, (int)out_kind);
  store(out, at, (int)out_kind, result);
}
