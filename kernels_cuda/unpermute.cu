// Sums each token's expert rows, and the gradient of that sum.
//
// unpermute_bf16 and unpermute_bf16_backward are the fast paths; unpermute_rows and unpermute_rows_backward
// serve every other dtype, width and map.
#include "bulk.cuh"
#include "row_map.cuh"

__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ void add(float* total, uint4 v, float w, bool weighted) {
  const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    total[2 * i] += weighted ? low(words[i]) * w : low(words[i]);
    total[2 * i + 1] += weighted ? high(words[i]) * w : high(words[i]);
  }
}

// out[token, column] = grad[row] for each of a token's rows, zero in its other columns: a token's gradient of
// the probabilities that were permuted with the rows. `grad` null: zeros only.
__device__ __noinline__ void token_probs(const u8* grad, i64 size, const int* entries_of_token,
                                         const int* slots, const int* pad_offsets, i64 token, i64 places,
                                         i64 columns, i64 experts, i64 rows, u8* out) {
  const int count = count_of(entries_of_token, places);
  for (i64 c = threadIdx.x; c < columns; c += blockDim.x) {
    i64 row = -1;
    for (int j = 0; j < count; ++j)
      if (column_of(entries_of_token, slots, token, places, j, columns) == c)
        row = row_of(entries_of_token, pad_offsets, places, j, experts, rows);
    if (row >= 0 && !grad) continue;
    for (i64 b = 0; b < size; ++b) out[(token * columns + c) * size + b] = row < 0 ? 0 : grad[row * size + b];
  }
}

#define UNPERMUTE_PLACES 64  // destinations of a token held in shared memory at a time

// out[t] = sum over t's rows, each times its probability if given, in map order, in float32; with grad_probs
// (permute's backward) also out_probs[t, column] = grad_probs[row].
// Arguments: x [rows, width] bfloat16; out [tokens, width].
// Requires: width a multiple of 8.
// Traffic: every mapped row is read once, every token is written once.
// Launch: thread blocks of 128, `shares` consecutive ones per token, two of its vectors per thread; eight
//   16-byte loads in flight per thread.
// Design: ordinary loads: with loads that are not kept in L1 7168 columns take 130.3 us instead of 124.7, and
//   2048 columns 31.6 instead of 30.3. A token's blocks are consecutive, so that a row is read at about the
//   same time: 124.7 to 123.0 us. unpermute_bf16_and_probs is a separate kernel with grad_probs, so that
//   unpermute's loop keeps its register count. Nine blocks per multiprocessor are 56 registers per thread, as
//   before that order; without the bound NVRTC 13.5 takes 72, or spills.
template <bool PROBS>
__device__ __forceinline__ void unpermute(const uint4* x, const int* row_id_map, const int* slots,
                                          const int* pad_offsets, const void* probs, i64 probs_kind,
                                          i64 columns, i64 places, i64 experts, i64 rows, i64 vectors,
                                          i64 shares, uint4* out, const u8* grad_probs, i64 grad_size,
                                          u8* out_probs) {
  __shared__ i64 from[UNPERMUTE_PLACES];
  __shared__ int column[PROBS ? UNPERMUTE_PLACES : 1];
  __shared__ float weight[UNPERMUTE_PLACES];
  const u32 token_of_block = blockIdx.x / (u32)shares, part = blockIdx.x - token_of_block * (u32)shares;
  const i64 token = token_of_block, share = 2 * blockDim.x;
  const int* entries_of_token = row_id_map + token * (2 * places + 1);
  const int count = count_of(entries_of_token, places);
  const i64 begin = part * share, end = begin + share < vectors ? begin + share : vectors;
  for (i64 first = begin; first < end; first += blockDim.x) {
    const i64 at = first + threadIdx.x;
    float total[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
    for (int j0 = 0; j0 == 0 || j0 < count; j0 += UNPERMUTE_PLACES) {
      if (first == begin || count > UNPERMUTE_PLACES) {
        __syncthreads();
        const int j = threadIdx.x;
        // not `j < here`, so that the map's loads do not wait for the count's: with probabilities 33.0 to
        // 32.1 us (4096 tokens, 2048 columns)
        if (j < UNPERMUTE_PLACES && j0 + j < places) {
          from[j] = row_of(entries_of_token, pad_offsets, places, j0 + j, experts, rows);
          if (PROBS || probs) {
            const int c = column_of(entries_of_token, slots, token, places, j0 + j, columns);
            if (PROBS) column[j] = c;
            if (probs) weight[j] = c < 0 ? 0.f : load(probs, token * columns + c, (int)probs_kind);
          }
        }
        __syncthreads();
      }
      const int here = count - j0 < UNPERMUTE_PLACES ? count - j0 : UNPERMUTE_PLACES;
      if (at >= end) continue;
      for (int j = 0; j < here; j += 8) {
        uint4 v[8];
#pragma unroll
        for (int u = 0; u < 8; ++u)
          if (j + u < here && from[j + u] >= 0) v[u] = x[from[j + u] * vectors + at];
#pragma unroll
        for (int u = 0; u < 8; ++u)
          if (j + u < here && from[j + u] >= 0) add(total, v[u], probs ? weight[j + u] : 1.f, probs != 0);
      }
    }
    pdl_launch_dependents();
    if (at < end)
      __stcs(out + token * vectors + at,
             make_uint4(to_bf16x2(total[0], total[1]), to_bf16x2(total[2], total[3]),
                        to_bf16x2(total[4], total[5]), to_bf16x2(total[6], total[7])));
  }
  if (!PROBS || part > 0) return;
  if (count > UNPERMUTE_PLACES) {
    token_probs(grad_probs, grad_size, entries_of_token, slots, pad_offsets, token, places, columns, experts,
                rows, out_probs);
    return;
  }
  for (i64 c = threadIdx.x; c < columns; c += blockDim.x) {  // all rows are known here
    i64 row = -1;
    for (int j = 0; j < count; ++j)
      if (column[j] == c) row = from[j];
    for (i64 b = 0; b < grad_size; ++b)
      out_probs[(token * columns + c) * grad_size + b] = row < 0 ? 0 : grad_probs[row * grad_size + b];
  }
}

extern "C" __global__ void __launch_bounds__(128, 9)
    unpermute_bf16(const uint4* x, const int* row_id_map, const int* slots, const int* pad_offsets,
                   const void* probs, i64 probs_kind, i64 columns, i64 places, i64 experts, i64 rows,
                   i64 vectors, i64 shares, uint4* out) {
  pdl_wait();
  unpermute<false>(x, row_id_map, slots, pad_offsets, probs, probs_kind, columns, places, experts, rows,
                   vectors, shares, out, 0, 0, 0);
}

extern "C" __global__ void __launch_bounds__(128, 9)
    unpermute_bf16_and_probs(const uint4* x, const int* row_id_map, const int* slots, const int* pad_offsets,
                             const void* probs, i64 probs_kind, i64 columns, i64 places, i64 experts,
                             i64 rows, i64 vectors, i64 shares, uint4* out, const u8* grad_probs,
                             i64 grad_size, u8* out_probs) {
  pdl_wait();
  unpermute<true>(x, row_id_map, slots, pad_offsets, probs, probs_kind, columns, places, experts, rows,
                  vectors, shares, out, grad_probs, grad_size, out_probs);
}

#define BACKWARD_VECTORS 4  // 16-byte vectors of x, and of grad, in flight per lane

// grad_x[row] = grad[t] * prob and grad_probs[t, column] = grad[t] . x[row], for each of t's rows; zeros in
// rows without a token. The dot product: float32 over 32 values, float64 beyond, in a fixed order.
// Traffic: grad is read once (repeated reads hit L1), x is read once, grad_x is written once.
// Launch: `fillers` thread blocks for the zero rows, then one thread block (128 threads) per token, one warp
//   per row of it, so that no row waits for another row's reduction. A warp looks up all its rows before it
//   reads the first: three dependent loads per token instead of per row.
extern "C" __global__ void __launch_bounds__(256, 4)
    unpermute_bf16_backward(const uint4* grad, const uint4* x, const int* row_id_map, const int* slots,
                            const int* pad_offsets, const int* tokens_per_expert, const int* expert_offsets,
                            const void* probs, i64 probs_kind, i64 columns, i64 places, i64 experts, i64 rows,
                            i64 vectors, i64 fillers, uint4* grad_x, void* grad_probs) {
  pdl_wait();
  if (blockIdx.x < fillers) {
    i64 padding;
    const i64 count = unmapped_rows(tokens_per_expert, pad_offsets, expert_offsets, experts, rows, &padding);
    for (i64 i = blockIdx.x; i < count; i += fillers) {
      const i64 row = unmapped_row(i, padding, tokens_per_expert, pad_offsets, expert_offsets, experts);
      if (row < 0 || row >= rows) continue;
      for (i64 at = threadIdx.x; at < vectors; at += blockDim.x)
        __stcs(grad_x + row * vectors + at, make_uint4(0, 0, 0, 0));
    }
    return;
  }
  const i64 token = blockIdx.x - fillers, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const int* entries_of_token = row_id_map + token * (2 * places + 1);
  const int count = count_of(entries_of_token, places);
  const uint4* g = grad + token * vectors;
  if (count < columns)  // zeros in the token's other columns
    token_probs(0,
                probs_kind == F64   ? 8
                : probs_kind == F32 ? 4
                                    : 2,
                entries_of_token, slots, pad_offsets, token, places, columns, experts, rows, (u8*)grad_probs);
  int my_row = -1, my_column = 0;
  float my_weight = 0.f;
  for (int j = threadIdx.x / 32, turn = 0; j < count; j += warps, ++turn) {
    if (turn % 32 == 0) {
      const i64 place = j + lane * warps;
      if (place < count) {
        my_row = (int)row_of(entries_of_token, pad_offsets, places, place, experts, rows);
        my_column = column_of(entries_of_token, slots, token, places, place, columns);
        if (my_column >= 0) my_weight = load(probs, token * columns + my_column, (int)probs_kind);
      }
    }
    const i64 row = __shfl_sync(0xffffffffu, my_row, turn % 32);
    const int column = __shfl_sync(0xffffffffu, my_column, turn % 32);
    const i64 entry = token * columns + column;
    const float w = __shfl_sync(0xffffffffu, my_weight, turn % 32);
    if (column < 0) continue;
    if (row < 0) {
      if (lane == 0) store(grad_probs, entry, (int)probs_kind, 0.0);
      continue;
    }
    double sum = 0.0;
    for (i64 first = lane; first < vectors; first += 32 * BACKWARD_VECTORS) {
      uint4 a[BACKWARD_VECTORS], b[BACKWARD_VECTORS];
#pragma unroll
      for (int u = 0; u < BACKWARD_VECTORS; ++u) {
        const i64 at = first + 32 * u;
        b[u] = at < vectors ? x[row * vectors + at] : make_uint4(0, 0, 0, 0);
        a[u] = at < vectors ? __ldg(g + at) : make_uint4(0, 0, 0, 0);
      }
      float dot = 0.f;
#pragma unroll
      for (int u = 0; u < BACKWARD_VECTORS; ++u) {
        const i64 at = first + 32 * u;
        const u32 gw[4] = {a[u].x, a[u].y, a[u].z, a[u].w}, xw[4] = {b[u].x, b[u].y, b[u].z, b[u].w};
        u32 product[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          product[i] = to_bf16x2(low(gw[i]) * w, high(gw[i]) * w);
          dot += low(gw[i]) * low(xw[i]);
          dot += high(gw[i]) * high(xw[i]);
        }
        if (at < vectors)
          __stcs(grad_x + row * vectors + at, make_uint4(product[0], product[1], product[2], product[3]));
      }
      sum += (double)dot;
    }
    pdl_launch_dependents();
    for (int step = 16; step > 0; step /= 2) sum += __shfl_down_sync(0xffffffffu, sum, step);
    if (lane == 0) store(grad_probs, entry, (int)probs_kind, sum);
  }
}

// out[t] = sum over t's rows of row * prob, in map order, in float32 (float64 for float64). One thread block
// per token.
extern "C" __global__ void unpermute_rows(const void* x, const void* scales, i64 kind, i64 fmt, i64 layout,
                                          const int* row_id_map, const int* slots, const int* pad_offsets,
                                          const void* probs, i64 probs_kind, i64 columns, i64 places,
                                          i64 experts, i64 rows, i64 width, i64 out_kind, void* out,
                                          const u8* grad_probs, i64 grad_size, u8* out_probs) {
  pdl_wait();
  const i64 token = blockIdx.x;
  const int* entries_of_token = row_id_map + token * (2 * places + 1);
  const int count = count_of(entries_of_token, places);
  if (grad_probs)
    token_probs(grad_probs, grad_size, entries_of_token, slots, pad_offsets, token, places, columns, experts,
                rows, out_probs);
  for (i64 i = threadIdx.x; i < width; i += blockDim.x) {
    float total = 0.f;
    double wide = 0.0;
    for (int j = 0; j < count; ++j) {
      const i64 row = row_of(entries_of_token, pad_offsets, places, j, experts, rows);
      if (row < 0) continue;
      const double value = row_value(x, scales, row, i, width, (int)kind, (int)fmt, (int)layout);
      double weight = 1.0;
      if (probs) {
        const int column = column_of(entries_of_token, slots, token, places, j, columns);
        weight = column < 0 ? 0.0 : load_wide(probs, token * columns + column, (int)probs_kind);
      }
      if (out_kind == F64)
        wide += value * weight;
      else
        total += (float)value * (float)weight;
    }
    store(out, token * width + i, (int)out_kind, out_kind == F64 ? wide : (double)total);
  }
}

// grad_x[row] = grad[token] * prob; grad_probs[token, column] = grad[token] . x[row], summed in float64 in a
// fixed order. Both must be zeroed beforehand. One thread block of 256 per destination row.
extern "C" __global__ void unpermute_rows_backward(const void* grad, const void* x, i64 kind,
                                                   const int* source, const int* column, const void* probs,
                                                   i64 probs_kind, i64 columns, i64 width, void* grad_x,
                                                   void* grad_probs) {
  pdl_wait();
  __shared__ double partial[256];
  const i64 row = blockIdx.x, token = source[row];
  if (token < 0 || column[row] < 0) return;
  const i64 entry = token * columns + column[row];
  const double weight = load_wide(probs, entry, (int)probs_kind);
  double sum = 0.0;
  for (i64 i = threadIdx.x; i < width; i += blockDim.x) {
    const double g = load_wide(grad, token * width + i, (int)kind);
    const double product = kind == F64 ? g * weight : (double)((float)g * (float)weight);
    store(grad_x, row * width + i, (int)kind, product);
    sum += g * load_wide(x, row * width + i, (int)kind);
  }
  sum = block_reduce(sum, partial, [](double a, double b) { return a + b; });
  if (threadIdx.x == 0) store(grad_probs, entry, (int)probs_kind, sum);
}
