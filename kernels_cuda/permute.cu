// Moving rows, and summing each token's rows.
//
// permute_rows is the fast path: one launch for rows, scales, probabilities and padding. merge_bf16 and
// merge_bf16_backward are the fast sums. The kernels behind them serve every other dtype, width and map, by
// way of an int32 source index for every output row.
#include "bulk.cuh"

// ---- entries of a row map. Its values are not looked at before: what names a place, an expert, a column or
// a row that is not there is no entry.

__device__ __forceinline__ int count_of(const int* mine, i64 places) {
  return (int)clamped(mine[2 * places], places);
}

// Destination row of place j, or -1.
__device__ __forceinline__ i64 row_of(const int* mine, const int* pad_offsets, i64 places, i64 j, i64 experts,
                                      i64 rows) {
  const int expert = mine[places + j], compact = mine[j];
  if ((u32)expert >= (u32)experts || compact < 0) return -1;
  const i64 row = (i64)compact + pad_offsets[expert];
  return row >= 0 && row < rows ? row : -1;
}

// Column of a [tokens, columns] array that belongs to place j of a token's map, or -1.
__device__ __forceinline__ int column_of(const int* mine, const int* slots, i64 token, i64 places, i64 j,
                                         i64 columns) {
  const int column = slots ? slots[token * places + j] : mine[places + j];
  return (u32)column < (u32)columns ? column : -1;
}

// Number of rows that no token goes to: the experts' padding and the tail.
__device__ __forceinline__ i64 unmapped_rows(const int* tokens_per_expert, const int* pad_offsets,
                                             const int* expert_offsets, i64 experts, i64 rows, i64* padding) {
  const i64 end = experts ? expert_offsets[experts] : 0;
  // real rows = compact start of the last expert + its rows
  const i64 last = experts - 1;
  const i64 real = experts ? expert_offsets[last] - pad_offsets[last] + tokens_per_expert[last] : 0;
  *padding = end - real;
  return clamped(*padding + (rows > end ? rows - end : 0), rows);
}

// The i-th of them: pad_offsets are the running sums of padding, so a binary search finds the expert.
__device__ __forceinline__ i64 unmapped_row(i64 i, i64 padding, const int* tokens_per_expert,
                                            const int* pad_offsets, const int* expert_offsets, i64 experts) {
  if (i >= padding) return (experts ? expert_offsets[experts] : 0) + i - padding;
  const i64 lo = last_at_most(pad_offsets, experts, i);
  return (i64)expert_offsets[lo] + tokens_per_expert[lo] + i - pad_offsets[lo];
}

#define LONG_PIECE 12000  // bytes; as in permute.py

// What: out[destination] = x[token] for each of a token's destinations, its scale row and probability with
// it;
//   zeros in every row no token goes to, if `fill`.
// Shapes: x [tokens, row_bytes], scales [tokens, scale_bytes], probs [tokens, prob_columns]; rows are
// multiples of
//   16 bytes (probs apart). A row travels in `pieces` of `piece_bytes`.
// Bytes: every token read once, every output row written once.
// Launch: one warp a piece of a token; zeros + piece_bytes + scale_bytes + 16 bytes of shared memory. Each
// warp
//   also writes its share of the rows of zeros, while its load is under way, so that these writes are spread
//   evenly over the run; from `zeros` bytes of shared memory, or with ordinary stores where there are none.
// Why: one bulk load and one bulk store a destination keep the most bytes in flight for the fewest
//   instructions. What is written leaves L2 first: 135.3 us against 136.7 (68.8 and 70.4 for FP8).
extern "C" __global__ void __launch_bounds__(32, 16)
    permute_rows(const u8* x, i64 row_bytes, i64 piece_bytes, i64 pieces, const u8* scales, i64 scale_bytes,
                 const u8* probs, i64 prob_size, i64 prob_columns, const int* row_id_map, const int* slots,
                 const int* pad_offsets, const int* tokens_per_expert, const int* expert_offsets, i64 width,
                 i64 experts, i64 rows, i64 fill, i64 zeros, u8* out, u8* out_scales, u8* out_probs) {
  after_earlier();
  DYNAMIC_SHARED(shared);
  u8* data = shared + zeros;
  const i64 lane = threadIdx.x, unit = blockIdx.x, token = unit / pieces, piece = unit % pieces;
  const i64 begin = piece * piece_bytes;
  const u32 bytes = (u32)(row_bytes - begin < piece_bytes ? row_bytes - begin : piece_bytes);
  const bool leads = piece == 0;
  const int* mine = row_id_map + token * (2 * width + 1);
  const int count = count_of(mine, width);
#if __CUDA_ARCH__ >= 900
  const u64 policy = evict_first();
  // A long piece goes out in four parts: 192.9 to 191.3 us for bfloat16, A=128 (in two 191.9, in seven
  // 191.5), and 145.0 to 144.2, A=16. FP8's, half as long, would be slower by one to two per cent.
  const u32 at_once = bytes >= LONG_PIECE ? (bytes / 4 + 15u) & ~15u : bytes;
  u64* barrier = (u64*)(data + piece_bytes + scale_bytes);
  if (lane == 0 && count > 0) {
    barrier_init(barrier);
    barrier_expect(barrier, bytes + (leads ? (u32)scale_bytes : 0u));
    bulk_load(data, x + token * row_bytes + begin, bytes, barrier);
    if (leads && scales)
      bulk_load(data + piece_bytes, scales + token * scale_bytes, (u32)scale_bytes, barrier);
  }
#endif
  if (fill) {
    i64 padding;
    const i64 blank = unmapped_rows(tokens_per_expert, pad_offsets, expert_offsets, experts, rows, &padding);
#if __CUDA_ARCH__ >= 900
    if (unit < blank && zeros) {
      for (i64 i = lane; i < zeros / 16; i += 32) ((uint4*)shared)[i] = make_uint4(0, 0, 0, 0);
      __syncwarp();
      fence_async();
    }
#endif
    for (i64 i = unit; i < blank; i += gridDim.x) {
      const i64 row = unmapped_row(i, padding, tokens_per_expert, pad_offsets, expert_offsets, experts);
      if (row < 0 || row >= rows) continue;
#if __CUDA_ARCH__ >= 900
      for (i64 at = lane * zeros; zeros && at < row_bytes; at += 32 * zeros)
        bulk_store(out + row * row_bytes + at, shared, (u32)(row_bytes - at < zeros ? row_bytes - at : zeros),
                   policy);
#endif
      const uint4 zero = make_uint4(0, 0, 0, 0);
      for (i64 at = lane * 16; !zeros && at < row_bytes; at += 512)
        __stcs((uint4*)(out + row * row_bytes + at), zero);
      for (i64 at = lane * 16; scales && at < scale_bytes; at += 512)
        __stcs((uint4*)(out_scales + row * scale_bytes + at), zero);
      for (i64 b = lane; probs && b < prob_size; b += 32) out_probs[row * prob_size + b] = 0;
    }
  }
  __syncwarp();
  for (i64 j0 = 0; j0 < count; j0 += 32) {
    const i64 j = j0 + lane;
    i64 row = rows;
    if (j < count) {
      row = row_of(mine, pad_offsets, width, j, experts, rows);
      if (leads && probs && row >= 0) {
        const int column = column_of(mine, slots, token, width, j, prob_columns);
        const i64 from = token * prob_columns + column;
        for (i64 b = 0; b < prob_size; ++b)
          out_probs[row * prob_size + b] = column < 0 ? 0 : probs[from * prob_size + b];
      }
    }
#if __CUDA_ARCH__ >= 900
    if (j0 == 0) barrier_wait(barrier);
    if (row >= 0 && row < rows) {
      u8* to = out + row * row_bytes + begin;
      for (u32 at = 0; at < bytes; at += at_once)
        bulk_store(to + at, data + at, min(bytes - at, at_once), policy);
      if (leads && scales)
        bulk_store(out_scales + row * scale_bytes, data + piece_bytes, (u32)scale_bytes, policy);
    }
#else
    for (i64 k = 0; k < 32 && j0 + k < count; ++k) {
      const i64 to = __shfl_sync(0xffffffffu, row, (int)k);
      if (to < 0 || to >= rows) continue;
      for (i64 at = lane * 16; at < bytes; at += 512)
        *(uint4*)(out + to * row_bytes + begin + at) = *(const uint4*)(x + token * row_bytes + begin + at);
      for (i64 at = lane * 16; leads && scales && at < scale_bytes; at += 512)
        *(uint4*)(out_scales + to * scale_bytes + at) = *(const uint4*)(scales + token * scale_bytes + at);
    }
#endif
  }
#if __CUDA_ARCH__ >= 900
  bulk_finish();
#endif
}

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

// out[token, column] = grad[row] for each of a token's rows, zero in its other columns: a token's share of
// the gradient of probabilities that travelled with the rows. `grad` null: only the zeros.
__device__ __noinline__ void token_probs(const u8* grad, i64 size, const int* mine, const int* slots,
                                         const int* pad_offsets, i64 token, i64 places, i64 columns,
                                         i64 experts, i64 rows, u8* out) {
  const int count = count_of(mine, places);
  for (i64 c = threadIdx.x; c < columns; c += blockDim.x) {
    i64 row = -1;
    for (int j = 0; j < count; ++j)
      if (column_of(mine, slots, token, places, j, columns) == c)
        row = row_of(mine, pad_offsets, places, j, experts, rows);
    if (row >= 0 && !grad) continue;
    for (i64 b = 0; b < size; ++b) out[(token * columns + c) * size + b] = row < 0 ? 0 : grad[row * size + b];
  }
}

#define MERGE_PLACES 64  // destinations a token kept in shared memory at a time

// What: out[t] = sum over t's rows, each times its probability if given, in the map's order, in float32;
//   with grad_probs (permute's backward) also each row's to its token's column of out_probs.
// Shapes: x [rows, width] bfloat16, width a multiple of 8; out [tokens, width].
// Bytes: every mapped row read once, every token written once.
// Launch: blocks of 128 threads, one a token and `share` of its vectors; a thread has eight 16-byte loads in
// flight.
// merge_bf16_and_probs is the one with grad_probs, apart so that unpermute keeps the registers of its own
// loop.
template <bool PROBS>
__device__ __forceinline__ void merge(const uint4* x, const int* row_id_map, const int* slots,
                                      const int* pad_offsets, const void* probs, i64 probs_kind, i64 columns,
                                      i64 places, i64 experts, i64 rows, i64 vectors, i64 share, uint4* out,
                                      const u8* grad_probs, i64 grad_size, u8* out_probs) {
  __shared__ i64 from[MERGE_PLACES];
  __shared__ int column[PROBS ? MERGE_PLACES : 1];
  __shared__ float weight[MERGE_PLACES];
  const i64 token = blockIdx.x;
  const int* mine = row_id_map + token * (2 * places + 1);
  const int count = count_of(mine, places);
  const i64 begin = blockIdx.y * share, end = begin + share < vectors ? begin + share : vectors;
  for (i64 first = begin; first < end; first += blockDim.x) {
    const i64 at = first + threadIdx.x;
    float total[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
    for (int j0 = 0; j0 < count; j0 += MERGE_PLACES) {
      const int here = count - j0 < MERGE_PLACES ? count - j0 : MERGE_PLACES;
      if (first == begin || count > MERGE_PLACES) {
        __syncthreads();
        for (int j = threadIdx.x; j < here; j += blockDim.x) {
          from[j] = row_of(mine, pad_offsets, places, j0 + j, experts, rows);
          if (!PROBS && !probs) continue;
          const int c = column_of(mine, slots, token, places, j0 + j, columns);
          if (PROBS) column[j] = c;
          if (probs) weight[j] = c < 0 ? 0.f : load(probs, token * columns + c, (int)probs_kind);
        }
        __syncthreads();
      }
      if (at >= end) continue;
      for (int j = 0; j < here; j += 8) {
        uint4 v[8];
#pragma unroll
        for (int u = 0; u < 8; ++u)
          if (j + u < here && from[j + u] >= 0) v[u] = load_streaming(x + from[j + u] * vectors + at);
#pragma unroll
        for (int u = 0; u < 8; ++u)
          if (j + u < here && from[j + u] >= 0) add(total, v[u], probs ? weight[j + u] : 1.f, probs != 0);
      }
    }
    let_later_begin();
    if (at < end)
      __stcs(out + token * vectors + at,
             make_uint4(to_bf16x2(total[0], total[1]), to_bf16x2(total[2], total[3]),
                        to_bf16x2(total[4], total[5]), to_bf16x2(total[6], total[7])));
  }
  if (!PROBS || blockIdx.y > 0) return;
  if (count > MERGE_PLACES) {
    token_probs(grad_probs, grad_size, mine, slots, pad_offsets, token, places, columns, experts, rows,
                out_probs);
    return;
  }
  for (i64 c = threadIdx.x; c < columns; c += blockDim.x) {  // the rows are known by now
    i64 row = -1;
    for (int j = 0; j < count; ++j)
      if (column[j] == c) row = from[j];
    for (i64 b = 0; b < grad_size; ++b)
      out_probs[(token * columns + c) * grad_size + b] = row < 0 ? 0 : grad_probs[row * grad_size + b];
  }
}

extern "C" __global__ void __launch_bounds__(128)
    merge_bf16(const uint4* x, const int* row_id_map, const int* slots, const int* pad_offsets,
               const void* probs, i64 probs_kind, i64 columns, i64 places, i64 experts, i64 rows, i64 vectors,
               i64 share, uint4* out) {
  after_earlier();
  merge<false>(x, row_id_map, slots, pad_offsets, probs, probs_kind, columns, places, experts, rows, vectors,
               share, out, 0, 0, 0);
}

extern "C" __global__ void __launch_bounds__(128)
    merge_bf16_and_probs(const uint4* x, const int* row_id_map, const int* slots, const int* pad_offsets,
                         const void* probs, i64 probs_kind, i64 columns, i64 places, i64 experts, i64 rows,
                         i64 vectors, i64 share, uint4* out, const u8* grad_probs, i64 grad_size,
                         u8* out_probs) {
  after_earlier();
  merge<true>(x, row_id_map, slots, pad_offsets, probs, probs_kind, columns, places, experts, rows, vectors,
              share, out, grad_probs, grad_size, out_probs);
}

#define BACKWARD_VECTORS 4  // 16-byte vectors of x, and of grad, that a lane has in flight

// What: grad_x[row] = grad[t] * prob and grad_probs[t, column] = grad[t] . x[row], for each of t's rows;
// zeros in the
//   rows no token goes to. The dot product: float32 over 32 values, float64 beyond, in a fixed order.
// Bytes: grad read once (and again from L1), x read once, grad_x written once.
// Launch: `fillers` blocks for the rows of zeros, then one block (128 threads) a token, one warp a row of it,
// so that
//   no row waits for another's sum. A warp looks up all its rows before it reads the first: three dependent
//   loads once, not once a row.
extern "C" __global__ void __launch_bounds__(256, 4)
    merge_bf16_backward(const uint4* grad, const uint4* x, const int* row_id_map, const int* slots,
                        const int* pad_offsets, const int* tokens_per_expert, const int* expert_offsets,
                        const void* probs, i64 probs_kind, i64 columns, i64 places, i64 experts, i64 rows,
                        i64 vectors, i64 fillers, uint4* grad_x, void* grad_probs) {
  after_earlier();
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
  const int* mine = row_id_map + token * (2 * places + 1);
  const int count = count_of(mine, places);
  const uint4* g = grad + token * vectors;
  if (count < columns)  // zeros in the columns that are not this token's
    token_probs(0,
                probs_kind == F64   ? 8
                : probs_kind == F32 ? 4
                                    : 2,
                mine, slots, pad_offsets, token, places, columns, experts, rows, (u8*)grad_probs);
  int my_row = -1, my_column = 0;
  float my_weight = 0.f;
  for (int j = threadIdx.x / 32, turn = 0; j < count; j += warps, ++turn) {
    if (turn % 32 == 0) {
      const i64 place = j + lane * warps;
      if (place < count) {
        my_row = (int)row_of(mine, pad_offsets, places, place, experts, rows);
        my_column = column_of(mine, slots, token, places, place, columns);
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
        b[u] = at < vectors ? load_streaming(x + row * vectors + at) : make_uint4(0, 0, 0, 0);
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
    let_later_begin();
    for (int step = 16; step > 0; step /= 2) sum += __shfl_down_sync(0xffffffffu, sum, step);
    if (lane == 0) store(grad_probs, entry, (int)probs_kind, sum);
  }
}

// Row map to sources: for every destination row its token and the column of its probability.
// One thread an entry. `source` and `column` are -1 where no token goes.
extern "C" __global__ void row_sources(const int* row_id_map, const int* slots, const int* pad_offsets,
                                       i64 tokens, i64 width, i64 columns, i64 experts, i64 rows, int* source,
                                       int* column) {
  after_earlier();
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= tokens * width) return;
  const i64 token = i / width, place = i % width;
  const int* mine = row_id_map + token * (2 * width + 1);
  if (place >= mine[2 * width]) return;
  const i64 row = row_of(mine, pad_offsets, width, place, experts, rows);
  if (row < 0) return;
  source[row] = (int)token;
  column[row] = column_of(mine, slots, token, width, place, columns);
}

// out[row] = x[source[row]], `width` bytes each; zeros where source is -1, if `fill`. One block a row.
extern "C" __global__ void gather_rows(const u8* x, const int* source, i64 width, i64 fill, u8* out) {
  after_earlier();
  const i64 row = blockIdx.x;
  const i64 from = source[row];
  if (from < 0 && !fill) return;
  const u8* in = x + from * width;
  u8* to = out + row * width;
  if ((((size_t)x | (size_t)out | (size_t)width) & 15) == 0) {
    const uint4 zero = make_uint4(0, 0, 0, 0);
    for (i64 i = threadIdx.x; i < width / 16; i += blockDim.x)
      ((uint4*)to)[i] = from < 0 ? zero : ((const uint4*)in)[i];
  } else {
    for (i64 i = threadIdx.x; i < width; i += blockDim.x) to[i] = from < 0 ? 0 : in[i];
  }
}

// out[row] = probs[source[row], column[row]], `size` bytes each. One thread a row.
extern "C" __global__ void gather_probs(const u8* probs, const int* source, const int* column, i64 columns,
                                        i64 rows, i64 size, i64 fill, u8* out) {
  after_earlier();
  const i64 row = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows || (source[row] < 0 && !fill)) return;
  const bool has = source[row] >= 0 && column[row] >= 0;
  for (i64 b = 0; b < size; ++b)
    out[row * size + b] = has ? probs[(source[row] * columns + column[row]) * size + b] : 0;
}

// out[t] = sum over t's rows of row * prob, in the map's order, in float32 (float64 for float64).
// One block a token.
extern "C" __global__ void merge_rows(const void* x, const void* scales, i64 kind, i64 fmt, i64 layout,
                                      const int* row_id_map, const int* slots, const int* pad_offsets,
                                      const void* probs, i64 probs_kind, i64 columns, i64 places, i64 experts,
                                      i64 rows, i64 width, i64 out_kind, void* out, const u8* grad_probs,
                                      i64 grad_size, u8* out_probs) {
  after_earlier();
  const i64 token = blockIdx.x;
  const int* mine = row_id_map + token * (2 * places + 1);
  const int count = count_of(mine, places);
  if (grad_probs)
    token_probs(grad_probs, grad_size, mine, slots, pad_offsets, token, places, columns, experts, rows,
                out_probs);
  for (i64 i = threadIdx.x; i < width; i += blockDim.x) {
    float total = 0.f;
    double wide = 0.0;
    for (int j = 0; j < count; ++j) {
      const i64 row = row_of(mine, pad_offsets, places, j, experts, rows);
      if (row < 0) continue;
      const double value = row_value(x, scales, row, i, width, (int)kind, (int)fmt, (int)layout);
      double weight = 1.0;
      if (probs) {
        const int column = column_of(mine, slots, token, places, j, columns);
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
// fixed order. Both start as zeros. One block a destination row, 256 threads.
extern "C" __global__ void merge_rows_backward(const void* grad, const void* x, i64 kind, const int* source,
                                               const int* column, const void* probs, i64 probs_kind,
                                               i64 columns, i64 width, void* grad_x, void* grad_probs) {
  after_earlier();
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

// ---- chunks of rows in another order

#define CHUNK_THREADS 256

// Where the rows of the result come from: chunk i of it (ascending `key`) is rows [from, from + rows) of the
// input, or zeros where from is -1. All in shared memory, [chunks].
struct Chunks {
  int *key, *rows, *from;
};

__device__ __forceinline__ i64 int_at(const void* p, i64 i, i64 wide) {
  return wide ? ((const i64*)p)[i] : (i64)((const int*)p)[i];
}

// Sum over the threads before this one.
__device__ __forceinline__ i64 sum_before(i64 value, i64* sums) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  i64 total = sum_up_to_here(value);
  if (lane == 31) sums[warp] = total;
  __syncthreads();
  for (int w = 0; w < warp; ++w) total += sums[w];
  __syncthreads();
  return total - value;
}

// A count of rows, up to the next multiple.
__device__ __forceinline__ i64 padded(i64 rows, i64 align) {
  return align == 1 ? rows : (i64)((u32)(rows + align - 1) / (u32)align) * align;
}

// Fill `c`, a thread a run of chunks. The forward's result has its chunks in `order`, each group of them
// padded; the backward's has them as `sizes` names them, `rows_before` rows in all, and nothing starts past
// those. Every block does this for itself.
// Scratch: start [chunks + 1], which [chunks], sums [warps].
__device__ __noinline__ void find_chunks(const void* sizes, const void* order, i64 wide_sizes, i64 wide_order,
                                         int chunks, i64 align, int per_group, i64 rows_before, bool backward,
                                         Chunks c, int* start, int* which, i64* sums, int* group_offsets) {
  for (int i = threadIdx.x; i < chunks; i += blockDim.x) {
    const i64 size = int_at(sizes, i, wide_sizes), named = order ? int_at(order, i, wide_order) : i;
    start[i + 1] = (int)clamped(size, rows_before);
    which[i] = named >= 0 && named < chunks ? (int)named : -1;
    if (backward) c.from[i] = -1;
  }
  if (threadIdx.x == 0) start[0] = 0;
  __syncthreads();
  const int each = (chunks + blockDim.x - 1) / blockDim.x, begin = threadIdx.x * each;
  const int end = begin + each < chunks ? begin + each : chunks;
  i64 total = 0;
  for (int i = begin; i < end; ++i) total += start[i + 1];
  total = sum_before(total, sums);
  for (int i = begin; i < end; ++i) {
    total += start[i + 1];
    start[i + 1] = (int)clamped(total, rows_before);
  }
  __syncthreads();
  const int groups = chunks / per_group, share = (groups + blockDim.x - 1) / blockDim.x;
  const int first = threadIdx.x * share, last = first + share < groups ? first + share : groups;
  i64 target = 0;
  for (int g = first; g < last; ++g) {
    i64 rows = 0;
    for (int j = g * per_group; j < (g + 1) * per_group; ++j)
      if (which[j] >= 0) rows += start[which[j] + 1] - start[which[j]];
    target += padded(rows, align);
  }
  target = sum_before(target, sums);
  if (group_offsets && threadIdx.x == 0) group_offsets[0] = 0;
  for (int g = first; g < last; ++g) {
    i64 at = target;
    for (int j = g * per_group; j < (g + 1) * per_group; ++j) {
      const int i = which[j], rows = i >= 0 ? start[i + 1] - start[i] : 0;
      if (!backward) {
        c.key[j] = (int)at;
        c.rows[j] = rows;
        c.from[j] = i >= 0 ? start[i] : 0;
      } else if (i >= 0) {
        atomicMax(c.from + i, (int)at);  // an order that names a chunk twice: its last place
      }
      at += rows;
    }
    target += padded(at - target, align);
    if (group_offsets) group_offsets[g + 1] = (int)target;
  }
  for (int i = threadIdx.x; backward && i < chunks; i += blockDim.x) {
    c.key[i] = start[i];
    c.rows[i] = start[i + 1] - start[i];
  }
  __syncthreads();
}

// Row of the input that becomes `row`, or -1. Only the last chunk that starts at or before it can hold it:
// empty ones hold nothing, and end where they start.
__device__ __forceinline__ i64 source_of(i64 row, Chunks c, int chunks, i64 rows_in) {
  const int lo = last_at_most(c.key, chunks, row);
  if (!chunks || c.from[lo] < 0) return -1;
  const i64 inside = row - c.key[lo], from = c.from[lo] + inside;
  return inside >= 0 && inside < c.rows[lo] && from < rows_in ? from : -1;
}

// Shared memory: sums i64 [CHUNK_THREADS / 32] | start [chunks + 1], then key, rows, from, which [chunks].
__device__ __forceinline__ Chunks chunks_in(u8* shared, i64 chunks, i64** sums, int** start) {
  *sums = (i64*)shared;
  *start = (int*)(shared + CHUNK_THREADS / 4);
  Chunks c;
  c.key = *start + chunks + 1;
  c.rows = c.key + chunks;
  c.from = c.rows + chunks;
  return c;
}

// Source of every output row, -1 where there is none, and its probability. One thread a row. Rows past the
// chunks are their own source, if `keep_rest`; they are the same on both sides then.
extern "C" __global__ void chunk_sources(const void* sizes, const void* order, i64 wide_sizes, i64 wide_order,
                                         i64 chunks, i64 align, i64 per_group, i64 keep_rest, i64 backward,
                                         i64 rows_in, i64 rows, const u8* probs, i64 prob_size, int* source,
                                         u8* out_probs, int* group_offsets) {
  after_earlier();
  let_later_begin();
  DYNAMIC_SHARED(shared);
  i64* sums;
  int* start;
  const Chunks c = chunks_in(shared, chunks, &sums, &start);
  find_chunks(sizes, order, wide_sizes, wide_order, chunks, align, per_group, backward ? rows : rows_in,
              backward != 0, c, start, c.from + chunks, sums, blockIdx.x == 0 ? group_offsets : 0);
  const i64 row = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  const bool rest = keep_rest && row >= start[chunks];
  const i64 from = !rest ? source_of(row, c, chunks, rows_in) : row < rows_in ? row : -1;
  source[row] = (int)from;
  for (i64 b = 0; probs && b < prob_size; ++b)
    out_probs[row * prob_size + b] = from < 0 ? 0 : probs[from * prob_size + b];
}

// What: out[row] = x[source[row]], scales with it, zeros where source is -1.
// Shapes: x [., row_bytes], scales [., scale_bytes], all multiples of 16; out [rows, row_bytes].
// Bytes: every row read once and written once.
// Launch: one warp a unit, `together` rows (up to 32) or one of the `pieces` of a long row; a unit and 16
//   bytes of shared memory. Behind the launch that writes `source`.
// Why: blocks that end, and not as many as fit at once with several buffers each: the hardware starts blocks
//   in order, so that what is read and written at a time lies together, where blocks that stay drift apart. A
//   plain copy by blocks that stay takes 187 us, by blocks that end 171 (345 MiB).
extern "C" __global__ void __launch_bounds__(32)
    move_rows(const u8* x, i64 row_bytes, i64 piece_bytes, i64 pieces, i64 together, const u8* scales,
              i64 scale_bytes, const int* source, i64 rows, u8* out, u8* out_scales) {
  DYNAMIC_SHARED(shared);
  const int lane = threadIdx.x;
  const u32 unit = blockIdx.x;
  const i64 begin = pieces > 1 ? unit % (u32)pieces * piece_bytes : 0;
  const i64 row = pieces > 1 ? unit / (u32)pieces : unit * together + lane;  // a lane's
  const bool takes_part = lane < together && row < rows;
  const u32 bytes = (u32)(row_bytes - begin < piece_bytes ? row_bytes - begin : piece_bytes);
  const u32 beside = begin == 0 && scales ? (u32)scale_bytes : 0u;
  after_earlier();
  const int from = takes_part ? source[row] : -1;
#if __CUDA_ARCH__ >= 900
  // rows that follow each other here and there are copied at once, by the lane of the first
  const int before = __shfl_up_sync(0xffffffffu, from, 1);
  const bool starts = from >= 0 && (lane == 0 || before < 0 || from != before + 1);
  const u32 ends = __ballot_sync(0xffffffffu, starts || from < 0);
  const u32 found = __popc(__ballot_sync(0xffffffffu, from >= 0));
  const u32 later = lane < 31 ? ends >> (lane + 1) : 0u;
  const u32 run = starts ? (u32)(later ? __ffs(later) : 32 - lane) : 0u;
  u8 *data = shared + lane * piece_bytes, *scale = shared + together * piece_bytes + lane * scale_bytes;
  u64* barrier = (u64*)(shared + together * (piece_bytes + scale_bytes));
  if (lane == 0) {
    barrier_init(barrier);
    barrier_expect(barrier, found * (bytes + beside));
  }
  __syncwarp();
  if (run) {
    bulk_load(data, x + from * row_bytes + begin, run * bytes, barrier);
    if (beside) bulk_load(scale, scales + from * scale_bytes, run * beside, barrier);
  }
  u32 left = __ballot_sync(0xffffffffu, takes_part && from < 0);
#else
  u32 left = __ballot_sync(0xffffffffu, takes_part);
#endif
  for (; left; left &= left - 1) {  // rows of zeros; before sm_90 all rows
    const int which = __ffs(left) - 1;
    const i64 to = __shfl_sync(0xffffffffu, row, which), in = __shfl_sync(0xffffffffu, from, which);
    const uint4 zero = make_uint4(0, 0, 0, 0);
    for (i64 at = lane * 16; at < bytes; at += 512)
      *(uint4*)(out + to * row_bytes + begin + at) =
          in < 0 ? zero : *(const uint4*)(x + in * row_bytes + begin + at);
    for (i64 at = lane * 16; at < beside; at += 512)
      *(uint4*)(out_scales + to * scale_bytes + at) =
          in < 0 ? zero : *(const uint4*)(scales + in * scale_bytes + at);
  }
#if __CUDA_ARCH__ >= 900
  barrier_wait(barrier);
  if (run) {
    const u64 policy = evict_first();
    bulk_store(out + row * row_bytes + begin, data, run * bytes, policy);
    if (beside) bulk_store(out_scales + row * scale_bytes, scale, run * beside, policy);
  }
  bulk_finish();
#endif
}
