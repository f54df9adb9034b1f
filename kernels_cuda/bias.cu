// The bias of the experts' second GEMM, added to a token's merged row, and the gradient of the probabilities
// that it is multiplied by; the gradient of the first GEMM's bias, which that GEMM adds.
//
// add_biases_bf16 and add_biases_bf16_backward are the fast paths; add_biases_rows and
// add_biases_rows_backward serve every other dtype and width. An id that is no expert's adds nothing.
#include "fp8.cuh"

#define VECTORS 2           // 16-byte vectors of a row per thread, at a time
#define EXPERTS 4           // experts whose biases are in flight at a time
#define PLACES 64           // experts of a token held in shared memory at a time
#define MOST_THREADS 256    // per block
#define BACKWARD_VECTORS 4  // 16-byte vectors of a gradient, and of a bias, in flight per lane

// The expert of an entry of ids, or -1.
__device__ __forceinline__ int expert_at(const void* ids, i64 ids_wide, i64 entry, i64 experts) {
  const i64 id = int_at(ids, entry, ids_wide);
  return id >= 0 && id < experts ? (int)id : -1;
}

__device__ __forceinline__ void values_of(uint4 v, float* x) {
  const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = bf16_to_float((u16)words[i]);
    x[2 * i + 1] = bf16_to_float((u16)(words[i] >> 16));
  }
}

// out[t] = y[t] + sum over j of probs[t, j] * bias[ids[t, j]], by fused multiply-adds in float32 in the order
// of j, then y, rounded once.
// Arguments: y [tokens, 8 * pitch], of which the first columns are read; bias [experts, width];
//   out [tokens, width]; width = 8 * vectors; ids_wide: whether ids are int64.
// Traffic: y is read once and out written once; biases come from L1 and L2 (184 KB for 32 experts of 2880
//   columns).
// Launch: one thread block per token, two of its vectors per thread; two 16-byte loads of y and eight of
//   biases in flight per thread. The token's ids and probabilities are read while its loads of y are in
//   flight.
// Time, 8192 x 2880, top-4, on an H200: 54 us; a copy of y takes 24. L2 delivers 188 MB of biases. Slices of
//   all biases in shared memory took 44 us, and their backward 55 instead of 30.
extern "C" __global__ void __launch_bounds__(MOST_THREADS, 3)
    add_biases_bf16(const uint4* y, i64 pitch, const uint4* bias, const void* ids, i64 ids_wide,
                    const void* probs, i64 probs_kind, i64 experts, i64 k, i64 vectors, uint4* out) {
  pdl_wait();
  __shared__ int expert[PLACES];
  __shared__ float weight[PLACES];
  const i64 token = blockIdx.x, stride = blockDim.x;
  for (i64 begin = 0; begin < vectors; begin += VECTORS * stride) {
    const i64 first = begin + threadIdx.x;
    uint4 row[VECTORS];
    float total[VECTORS][8] = {};
#pragma unroll
    for (int v = 0; v < VECTORS; ++v)
      if (first + v * stride < vectors) row[v] = y[token * pitch + first + v * stride];
    for (i64 j0 = 0; j0 < k; j0 += PLACES) {
      const int here = k - j0 < PLACES ? k - j0 : PLACES;
      if (begin == 0 || k > PLACES) {
        __syncthreads();
        for (int j = threadIdx.x; j < here; j += stride) {
          const i64 entry = token * k + j0 + j;
          expert[j] = expert_at(ids, ids_wide, entry, experts);
          weight[j] = load(probs, entry, (int)probs_kind);
        }
        __syncthreads();
      }
      for (int j = 0; j < here; j += EXPERTS) {
        uint4 b[EXPERTS][VECTORS];
#pragma unroll
        for (int u = 0; u < EXPERTS; ++u)
#pragma unroll
          for (int v = 0; v < VECTORS; ++v)
            if (j + u < here && expert[j + u] >= 0 && first + v * stride < vectors)
              b[u][v] = __ldg(bias + expert[j + u] * vectors + first + v * stride);
#pragma unroll
        for (int u = 0; u < EXPERTS; ++u)
#pragma unroll
          for (int v = 0; v < VECTORS; ++v) {
            if (j + u >= here || expert[j + u] < 0) continue;
            float x[8];
            values_of(b[u][v], x);
#pragma unroll
            for (int i = 0; i < 8; ++i) total[v][i] = __fmaf_rn(weight[j + u], x[i], total[v][i]);
          }
      }
    }
    pdl_launch_dependents();
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
      if (first + v * stride >= vectors) continue;
      float x[8];
      values_of(row[v], x);
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = total[v][i] + x[i];
      __stcs(out + token * vectors + first + v * stride,
             make_uint4(to_bf16x2(x[0], x[1]), to_bf16x2(x[2], x[3]), to_bf16x2(x[4], x[5]),
                        to_bf16x2(x[6], x[7])));
    }
  }
}

// grad_probs[t, j] = grad[t] . bias[ids[t, j]], zero if the id is no expert's: float32 over 32 values,
// float64 beyond, in a fixed order.
// Traffic: grad is read once (repeated reads hit L1), biases come from L1 and L2.
// Launch: one thread block per token, one warp per expert of it, eight 16-byte loads in flight per lane.
// Time, 8192 x 2880, top-4, on an H200: 30 us; 47 MB at 4 TB/s would take 12.
extern "C" __global__ void __launch_bounds__(MOST_THREADS, 4)
    add_biases_bf16_backward(const uint4* grad, const uint4* bias, const void* ids, i64 ids_wide, i64 experts,
                             i64 k, i64 vectors, i64 probs_kind, void* grad_probs) {
  pdl_wait();
  const i64 token = blockIdx.x, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const uint4* g = grad + token * vectors;
  const uint4 none = make_uint4(0, 0, 0, 0);
  for (i64 j = threadIdx.x / 32; j < k; j += warps) {
    const i64 entry = token * k + j, expert = expert_at(ids, ids_wide, entry, experts);
    double sum = 0.0;
    for (i64 first = lane; expert >= 0 && first < vectors; first += 32 * BACKWARD_VECTORS) {
      uint4 a[BACKWARD_VECTORS], b[BACKWARD_VECTORS];
#pragma unroll
      for (int u = 0; u < BACKWARD_VECTORS; ++u) {
        const i64 at = first + 32 * u;
        a[u] = at < vectors ? __ldg(g + at) : none;
        b[u] = at < vectors ? __ldg(bias + expert * vectors + at) : none;
      }
      float dot = 0.f;
#pragma unroll
      for (int u = 0; u < BACKWARD_VECTORS; ++u) {
        float x[8], w[8];
        values_of(a[u], x);
        values_of(b[u], w);
#pragma unroll
        for (int i = 0; i < 8; ++i) dot += x[i] * w[i];
      }
      sum += (double)dot;
    }
    pdl_launch_dependents();
    for (int step = 16; step > 0; step /= 2) sum += __shfl_down_sync(0xffffffffu, sum, step);
    if (lane == 0) store(grad_probs, entry, (int)probs_kind, (double)(float)sum);
  }
}

// As add_biases_bf16, for any dtypes and widths; float64 is summed in float64, each product and sum rounded.
// One thread block per token.
extern "C" __global__ void add_biases_rows(const void* y, i64 pitch, const void* bias, i64 kind,
                                           i64 bias_kind, const void* ids, i64 ids_wide, const void* probs,
                                           i64 probs_kind, i64 experts, i64 k, i64 width, void* out) {
  pdl_wait();
  const i64 token = blockIdx.x;
  for (i64 i = threadIdx.x; i < width; i += blockDim.x) {
    float total = 0.f;
    double wide = 0.0;
    for (i64 j = 0; j < k; ++j) {
      const i64 entry = token * k + j, expert = expert_at(ids, ids_wide, entry, experts);
      if (expert < 0) continue;
      const i64 at = expert * width + i;
      if (kind == F64)
        wide += load_wide(probs, entry, (int)probs_kind) * load_wide(bias, at, (int)bias_kind);
      else
        total = __fmaf_rn(load(probs, entry, (int)probs_kind), load(bias, at, (int)bias_kind), total);
    }
    const i64 from = token * pitch + i;
    store(out, token * width + i, (int)kind,
          kind == F64 ? wide + load_wide(y, from, F64) : (double)(total + load(y, from, (int)kind)));
  }
}

// As add_biases_bf16_backward, for any dtypes and widths, summed in float64. One thread block of 256 per
// token.
extern "C" __global__ void add_biases_rows_backward(const void* grad, const void* bias, i64 kind,
                                                    i64 bias_kind, const void* ids, i64 ids_wide, i64 experts,
                                                    i64 k, i64 width, i64 probs_kind, void* grad_probs) {
  pdl_wait();
  __shared__ double partial[256];
  const i64 token = blockIdx.x;
  for (i64 j = 0; j < k; ++j) {
    const i64 entry = token * k + j, expert = expert_at(ids, ids_wide, entry, experts);
    double sum = 0.0;
    for (i64 i = threadIdx.x; expert >= 0 && i < width; i += blockDim.x) {
      const i64 at = expert * width + i;
      const double b = kind == F64 ? load_wide(bias, at, (int)bias_kind) : load(bias, at, (int)bias_kind);
      sum += load_wide(grad, token * width + i, (int)kind) * b;
    }
    sum = block_reduce(sum, partial, [](double a, double b) { return a + b; });
    if (threadIdx.x == 0) store(grad_probs, entry, (int)probs_kind, kind == F64 ? sum : (double)(float)sum);
  }
}

// ---- sums over each expert's rows, in two steps: over chunks of at most 128 rows of one expert, then over
// the chunks of an expert. The first chunk of expert e is number offsets[e] / 128 + e: no two experts share
// one. If all offsets are multiples of 128 (`aligned`), it is number offsets[e] / 128, as of the tiles of
// swiglu_transpose.cu.

#define CHUNK 128
#define SUM_THREADS 128
#define IN_FLIGHT 8  // rows whose loads are in flight per thread

struct Chunks {
  const int* offsets;
  i64 experts, rows, aligned;
  __device__ __forceinline__ i64 row(i64 e) const { return clamped(offsets[e], rows); }
  __device__ __forceinline__ i64 first(i64 e) const { return row(e) / CHUNK + (aligned ? 0 : e); }
  // The last expert whose first chunk is at most this one; those before it without rows may have the same.
  __device__ __forceinline__ i64 expert_of(i64 chunk) const {
    i64 lo = 0, hi = experts;
    while (hi - lo > 1) {
      const i64 middle = (lo + hi) / 2;
      (first(middle) <= chunk ? lo : hi) = middle;
    }
    return lo;
  }
};

template <int FROM>
__device__ __forceinline__ void sum_vectors(const void* x, i64 lo, i64 hi, i64 vectors, i64 vector,
                                            float* sums) {
  float total[8] = {};
  for (i64 row = lo; row < hi; row += IN_FLIGHT) {
    Eight<FROM> v[IN_FLIGHT];
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i)
      if (row + i < hi) v[i] = load_eight<FROM>(x, (row + i) * vectors + vector);
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) {
      if (row + i >= hi) continue;
      float values[8];
      floats<FROM>(v[i], values);
#pragma unroll
      for (int c = 0; c < 8; ++c) total[c] += values[c];
    }
  }
#pragma unroll
  for (int c = 0; c < 8; ++c) sums[8 * vector + c] = total[c];
}

// sums [chunks, width] of x [rows, width]: of each chunk that an expert has, row by row, in float32 (float64
// for float64). by_vectors: x is 16-byte aligned, and width a multiple of 8; not for float64. Traffic: x is
// read once. Launch: a thread block per chunk and SUM_THREADS vectors (or columns).
extern "C" __global__ void __launch_bounds__(SUM_THREADS)
    chunk_sums(const void* x, i64 kind, const int* offsets, i64 experts, i64 rows, i64 aligned, i64 width,
               i64 by_vectors, void* sums) {
  pdl_wait();
  const Chunks chunks = {offsets, experts, rows, aligned};
  const i64 at = (i64)blockIdx.y * SUM_THREADS + threadIdx.x, chunk = blockIdx.x;
  const i64 e = chunks.expert_of(chunk), lo = chunks.row(e) + (chunk - chunks.first(e)) * CHUNK;
  const i64 hi = min(lo + CHUNK, chunks.row(e + 1));
  if (lo >= hi || chunk < chunks.first(e) || at >= (by_vectors ? width / 8 : width)) return;
  if (by_vectors) {
    float* to = (float*)sums + chunk * width;
    if (kind == BF16) sum_vectors<BF16>(x, lo, hi, width / 8, at, to);
    if (kind == F16) sum_vectors<F16>(x, lo, hi, width / 8, at, to);
    if (kind == F32) sum_vectors<F32>(x, lo, hi, width / 8, at, to);
    return;
  }
  float total = 0.f;
  double wide = 0.0;
  for (i64 row = lo; row < hi; ++row) {
    if (kind == F64)
      wide += ((const double*)x)[row * width + at];
    else
      total += load(x, row * width + at, (int)kind);
  }
  store(sums, chunk * width + at, kind == F64 ? F64 : F32, kind == F64 ? wide : (double)total);
}

// out [experts, width]: sums of the experts' chunks, in float64 and in order, rounded once; added to out if
// `accumulate`. kind: of sums and out. Grid (experts, width / 256).
extern "C" __global__ void expert_sums(const void* sums, i64 kind, const int* offsets, i64 experts, i64 rows,
                                       i64 aligned, i64 width, i64 accumulate, void* out) {
  pdl_wait();
  const Chunks chunks = {offsets, experts, rows, aligned};
  const i64 at = (i64)blockIdx.y * blockDim.x + threadIdx.x, e = blockIdx.x;
  if (at >= width) return;
  const i64 first = chunks.first(e), all = rows / CHUNK + (aligned ? 0 : experts);
  // an offset that is no multiple of CHUNK, although all should be, names no chunk
  const i64 count = min((chunks.row(e + 1) - chunks.row(e) + CHUNK - 1) / CHUNK, all - first);
  double total = accumulate ? load_wide(out, e * width + at, (int)kind) : 0.0;
#pragma unroll 8
  for (i64 i = 0; i < count; ++i)
    total += kind == F64 ? ((const double*)sums)[(first + i) * width + at]
                         : (double)((const float*)sums)[(first + i) * width + at];
  store(out, e * width + at, (int)kind, total);
}
