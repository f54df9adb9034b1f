// The bias of the experts' second GEMM, added to a token's merged row, and the gradient of the probabilities
// that it is multiplied by; the gradient of the first GEMM's bias, which that GEMM adds.
//
// add_biases_bf16 and dot_biases_bf16 are the fast paths; add_biases_rows and add_biases_rows_backward serve
// every other dtype and width. An id that is no expert's adds nothing.
#include "fp8.cuh"

#define SLICE_LANES 16  // 16-byte vectors of y of a thread block's slice of columns
#define SLICE_THREADS 256
#define TOKENS (SLICE_THREADS / SLICE_LANES)  // at a time
#define TOKENS_IN_FLIGHT 2                    // whose loads a thread has in flight

// The expert of an entry of ids, or -1.
__device__ __forceinline__ int expert_at(const void* ids, i64 ids_wide, i64 entry, i64 experts) {
  const i64 id = int_at(ids, entry, ids_wide);
  return id >= 0 && id < experts ? (int)id : -1;
}

// A slice of columns of all biases, of KIND BF16 or F32, in shared memory: biases of 8192 rows of 2880,
// top-4, are 188 MB, which took L2 twice as long as memory takes for y and the result. Eight values of a lane
// are in words of 16 bytes, each word of all lanes together.
template <int KIND>
struct Slice {
  static constexpr int WORDS = KIND == F32 ? 2 : 1;
  uint4* words;
  int vector, lane;
  bool whole;  // whether this lane has columns
  __device__ __forceinline__ Slice(u8* memory, const void* bias, i64 experts, i64 vectors)
      : words((uint4*)memory),
        vector((int)(blockIdx.x * SLICE_LANES + threadIdx.x % SLICE_LANES)),
        lane((int)threadIdx.x % SLICE_LANES),
        whole(vector < vectors) {
    for (i64 e = threadIdx.x / SLICE_LANES; e < experts && whole; e += TOKENS) {
      const Eight<KIND> v = load_eight<KIND>(bias, e * vectors + vector);
#pragma unroll
      for (int w = 0; w < WORDS; ++w) words[(e * WORDS + w) * SLICE_LANES + lane] = v.words[w];
    }
    __syncthreads();
  }
  __device__ __forceinline__ void read(int expert, float* x) const {
    Eight<KIND> v;
#pragma unroll
    for (int w = 0; w < WORDS; ++w) v.words[w] = words[(expert * WORDS + w) * SLICE_LANES + lane];
    floats<KIND>(v, x);
  }
};

// The tokens of a thread, TOKENS_IN_FLIGHT at a time and TOKENS apart.
struct Tokens {
  i64 token, all;
  __device__ __forceinline__ Tokens(i64 all)
      : token((i64)blockIdx.y * (TOKENS * TOKENS_IN_FLIGHT) + threadIdx.x / SLICE_LANES), all(all) {}
  __device__ __forceinline__ bool any() const { return token - threadIdx.x / SLICE_LANES < all; }
  __device__ __forceinline__ void next() { token += (i64)gridDim.y * (TOKENS * TOKENS_IN_FLIGHT); }
  __device__ __forceinline__ bool has(int u) const { return token + u * TOKENS < all; }
};

template <int KIND>
__device__ __forceinline__ void add_slices(u8* memory, const uint4* y, const void* bias, const void* ids,
                                           i64 ids_wide, const void* probs, int probs_kind, i64 experts,
                                           i64 k, i64 tokens, i64 vectors, uint4* out) {
  const Slice<KIND> slice(memory, bias, experts, vectors);
  for (Tokens here(tokens); here.any(); here.next()) {
    const i64 at = here.token * vectors + slice.vector, step = TOKENS * vectors;
    uint4 rows[TOKENS_IN_FLIGHT];
    float totals[TOKENS_IN_FLIGHT][8] = {};
#pragma unroll
    for (int u = 0; u < TOKENS_IN_FLIGHT; ++u)
      if (slice.whole && here.has(u)) rows[u] = y[at + u * step];
    for (i64 j0 = 0; j0 < k; j0 += SLICE_LANES) {
      int own[TOKENS_IN_FLIGHT];
      float weights[TOKENS_IN_FLIGHT];
#pragma unroll
      for (int u = 0; u < TOKENS_IN_FLIGHT; ++u) {
        const i64 entry = (here.token + u * TOKENS) * k + j0 + slice.lane;
        const bool any = here.has(u) && j0 + slice.lane < k;
        own[u] = any ? expert_at(ids, ids_wide, entry, experts) : -1;
        weights[u] = any ? load(probs, entry, probs_kind) : 0.f;
      }
      const int count = (int)min(k - j0, (i64)SLICE_LANES);
#pragma unroll 1
      for (int j = 0; j < count; ++j)
#pragma unroll
        for (int u = 0; u < TOKENS_IN_FLIGHT; ++u) {
          const int expert = __shfl_sync(0xffffffffu, own[u], j, SLICE_LANES);
          const float weight = __shfl_sync(0xffffffffu, weights[u], j, SLICE_LANES);
          if (expert < 0 || !slice.whole) continue;
          float x[8];
          slice.read(expert, x);
#pragma unroll
          for (int i = 0; i < 8; ++i) totals[u][i] = __fmaf_rn(weight, x[i], totals[u][i]);
        }
    }
#pragma unroll
    for (int u = 0; u < TOKENS_IN_FLIGHT; ++u) {
      if (!slice.whole || !here.has(u)) continue;
      Eight<BF16> row;
      row.words[0] = rows[u];
      float x[8];
      floats<BF16>(row, x);
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = totals[u][i] + x[i];
      store_eight<BF16>(out, at + u * step, x);
    }
  }
}

// out[t] = y[t] + sum over j of probs[t, j] * bias[ids[t, j]], by fused multiply-adds in float32 in the order
// of j, then y, rounded once.
// Arguments: y and out [tokens, width] of bfloat16; bias [experts, width] of bfloat16 or float32; width = 8 *
//   vectors; ids_wide: whether ids are int64.
// Traffic: y is read once and out written once, in pieces of 256 bytes; a thread block reads its slice of the
//   biases once, and for each of its tokens the ids and probabilities.
// Launch: a grid of slices by groups of tokens; shared memory for a slice of all biases.
// Time: not measured yet. Predicted for 8192 x 2880, top-4: 26 us, 94 MB at 4 TB/s; with biases from L2 it
// was
//   54.
extern "C" __global__ void __launch_bounds__(SLICE_THREADS, 4)
    add_biases_bf16(const uint4* y, const void* bias, i64 bias_kind, const void* ids, i64 ids_wide,
                    const void* probs, i64 probs_kind, i64 experts, i64 k, i64 tokens, i64 vectors,
                    uint4* out) {
  pdl_wait();
  DYNAMIC_SHARED(memory);
  if (bias_kind == F32)
    add_slices<F32>(memory, y, bias, ids, ids_wide, probs, (int)probs_kind, experts, k, tokens, vectors, out);
  else
    add_slices<BF16>(memory, y, bias, ids, ids_wide, probs, (int)probs_kind, experts, k, tokens, vectors,
                     out);
}

template <int KIND>
__device__ __forceinline__ void dot_slices(u8* memory, const uint4* grad, const void* bias, const void* ids,
                                           i64 ids_wide, i64 experts, i64 k, i64 tokens, i64 vectors,
                                           float* partial) {
  const Slice<KIND> slice(memory, bias, experts, vectors);
  for (Tokens here(tokens); here.any(); here.next()) {
    const i64 at = here.token * vectors + slice.vector, step = TOKENS * vectors;
    float rows[TOKENS_IN_FLIGHT][8] = {};
#pragma unroll
    for (int u = 0; u < TOKENS_IN_FLIGHT; ++u)
      if (slice.whole && here.has(u)) floats<BF16>(load_eight<BF16>(grad, at + u * step), rows[u]);
    for (i64 j0 = 0; j0 < k; j0 += SLICE_LANES) {
      const int count = (int)min(k - j0, (i64)SLICE_LANES);
#pragma unroll
      for (int u = 0; u < TOKENS_IN_FLIGHT; ++u) {
        const i64 entry = (here.token + u * TOKENS) * k + j0 + slice.lane;
        const bool any = here.has(u) && slice.lane < count;
        const int own = any ? expert_at(ids, ids_wide, entry, experts) : -1;
        float result = 0.f;
#pragma unroll 1
        for (int j = 0; j < count; ++j) {
          const int expert = __shfl_sync(0xffffffffu, own, j, SLICE_LANES);
          float dot = 0.f;
          if (expert >= 0 && slice.whole) {
            float x[8];
            slice.read(expert, x);
#pragma unroll
            for (int i = 0; i < 8; ++i) dot = __fmaf_rn(rows[u][i], x[i], dot);
          }
#pragma unroll
          for (int apart = SLICE_LANES / 2; apart > 0; apart /= 2)
            dot += __shfl_xor_sync(0xffffffffu, dot, apart);
          if (slice.lane == j) result = dot;
        }
        if (any) partial[blockIdx.x * (tokens * k) + entry] = result;
      }
    }
  }
}

// partial [slices, tokens, k]: grad[t] . bias[ids[t, j]] over the columns of each slice, zero if the id is no
// expert's, in float32 and in a fixed order.
// Arguments, launch: as of add_biases_bf16.
// Time: not measured yet. Predicted for 8192 x 2880, top-4: 16 us with sum_slices; with biases from L2 it
// was 30.
extern "C" __global__ void __launch_bounds__(SLICE_THREADS, 4)
    dot_biases_bf16(const uint4* grad, const void* bias, i64 bias_kind, const void* ids, i64 ids_wide,
                    i64 experts, i64 k, i64 tokens, i64 vectors, float* partial) {
  pdl_wait();
  DYNAMIC_SHARED(memory);
  if (bias_kind == F32)
    dot_slices<F32>(memory, grad, bias, ids, ids_wide, experts, k, tokens, vectors, partial);
  else
    dot_slices<BF16>(memory, grad, bias, ids, ids_wide, experts, k, tokens, vectors, partial);
}

// grad_probs [entries]: sums over slices of partial [slices, entries], in float64 and in their order.
extern "C" __global__ void sum_slices(const float* partial, i64 slices, i64 entries, i64 probs_kind,
                                      void* grad_probs) {
  pdl_wait();
  const i64 entry = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (entry >= entries) return;
  double sum = 0.0;
#pragma unroll 8
  for (i64 slice = 0; slice < slices; ++slice) sum += (double)partial[slice * entries + entry];
  store(grad_probs, entry, (int)probs_kind, (double)(float)sum);
}

// As add_biases_bf16, for any dtypes and widths; float64 is summed in float64, each product and sum rounded.
// One thread block per token.
extern "C" __global__ void add_biases_rows(const void* y, const void* bias, i64 kind, i64 bias_kind,
                                           const void* ids, i64 ids_wide, const void* probs, i64 probs_kind,
                                           i64 experts, i64 k, i64 width, void* out) {
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
    const i64 from = token * width + i;
    store(out, from, (int)kind,
          kind == F64 ? wide + load_wide(y, from, F64) : (double)(total + load(y, from, (int)kind)));
  }
}

// grad_probs[t, j] = grad[t] . bias[ids[t, j]], for any dtypes and widths, summed in float64. One thread
// block of 256 per token.
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
  const i64 first = chunks.first(e), count = (chunks.row(e + 1) - chunks.row(e) + CHUNK - 1) / CHUNK;
  double total = accumulate ? load_wide(out, e * width + at, (int)kind) : 0.0;
#pragma unroll 8
  for (i64 i = 0; i < count; ++i)
    total += kind == F64 ? ((const double*)sums)[(first + i) * width + at]
                         : (double)((const float*)sums)[(first + i) * width + at];
  store(out, e * width + at, (int)kind, total);
}
