// Moving rows: a source index for every output row, then one copy; or the sum of each token's rows.
//
// First form: right and plain, several small launches, an int32 source index of 4 bytes a row in between.
// Bytes moved: each output row written once, its source read once (through L2 for a token's k copies).
#include "common.cuh"

// Row map to sources: for every destination row its token and the column of its probability.
// One thread an entry. `source` and `column` are -1 where no token goes.
extern "C" __global__ void row_sources(const int* row_id_map, const int* slots, const int* pad_offsets,
                                       i64 tokens, i64 width, i64 rows, int* source, int* column) {
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= tokens * width) return;
  const i64 token = i / width, place = i % width;
  const int* mine = row_id_map + token * (2 * width + 1);
  if (place >= mine[2 * width]) return;
  const int expert = mine[width + place];
  const i64 row = (i64)mine[place] + pad_offsets[expert];
  if (row < 0 || row >= rows) return;
  source[row] = (int)token;
  column[row] = slots ? slots[token * width + place] : expert;
}

// out[row] = x[source[row]], `width` bytes each; zeros where source is -1, if `fill`. One block a row.
extern "C" __global__ void gather_rows(const u8* x, const int* source, i64 width, i64 fill, u8* out) {
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
  const i64 row = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows || (source[row] < 0 && !fill)) return;
  for (i64 b = 0; b < size; ++b)
    out[row * size + b] = source[row] < 0 ? 0 : probs[(source[row] * columns + column[row]) * size + b];
}

// The way back: out[source[row], column[row]] = grad[row]; out starts as zeros. One thread a row.
extern "C" __global__ void scatter_probs(const u8* grad, const int* source, const int* column, i64 columns,
                                         i64 rows, i64 size, u8* out) {
  const i64 row = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows || source[row] < 0) return;
  for (i64 b = 0; b < size; ++b) out[(source[row] * columns + column[row]) * size + b] = grad[row * size + b];
}

// out[t] = sum over t's rows of row * prob, in the map's order, in float32 (float64 for float64).
// One block a token.
extern "C" __global__ void merge_rows(const void* x, const void* scales, i64 kind, i64 fmt, i64 layout,
                                      const int* row_id_map, const int* slots, const int* pad_offsets,
                                      const void* probs, i64 probs_kind, i64 columns, i64 places, i64 rows,
                                      i64 width, i64 out_kind, void* out) {
  const i64 token = blockIdx.x;
  const int* mine = row_id_map + token * (2 * places + 1);
  const int count = mine[2 * places];
  for (i64 i = threadIdx.x; i < width; i += blockDim.x) {
    float total = 0.f;
    double wide = 0.0;
    for (int j = 0; j < count; ++j) {
      const int expert = mine[places + j];
      const i64 row = (i64)mine[j] + pad_offsets[expert];
      if (row < 0 || row >= rows) continue;
      const double value = row_value(x, scales, row, i, width, (int)kind, (int)fmt, (int)layout);
      double weight = 1.0;
      if (probs) {
        const i64 column = slots ? slots[token * places + j] : expert;
        weight = load_wide(probs, token * columns + column, (int)probs_kind);
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
  __shared__ double partial[256];
  const i64 row = blockIdx.x, token = source[row];
  if (token < 0) return;
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

// Where each chunk starts before and after sorting; groups of chunks are padded. One thread: C is small.
// segments: int64 [3, C]: start before, start after, rows, in the order of the result.
extern "C" __global__ void chunk_segments(const void* sizes, const void* order, i64 wide_sizes,
                                          i64 wide_order, i64 chunks, i64 align, i64 per_group, i64 rows_in,
                                          i64* starts, i64* segments, int* group_offsets) {
  i64 total = 0;
  for (i64 c = 0; c < chunks; ++c) {
    starts[c] = total;
    const i64 size = wide_sizes ? ((const i64*)sizes)[c] : ((const int*)sizes)[c];
    total = clamped(total + (size > 0 ? size : 0), rows_in);
  }
  starts[chunks] = total;
  i64 target = 0, group_start = 0;
  if (group_offsets) group_offsets[0] = 0;
  for (i64 j = 0; j < chunks; ++j) {
    const i64 c = !order ? j : (wide_order ? ((const i64*)order)[j] : ((const int*)order)[j]);
    const bool known = c >= 0 && c < chunks;
    const i64 rows = known ? starts[c + 1] - starts[c] : 0;
    segments[j] = known ? starts[c] : 0;
    segments[chunks + j] = target;
    segments[2 * chunks + j] = rows;
    target += rows;
    if ((j + 1) % per_group == 0) {
      target = group_start + (target - group_start + align - 1) / align * align;
      group_start = target;
      if (group_offsets) group_offsets[(j + 1) / per_group] = (int)target;
    }
  }
}

// Source of every output row from the segments; `backward` swaps before and after. One thread a row.
extern "C" __global__ void segment_sources(const i64* segments, i64 chunks, i64 backward, i64 rows_in,
                                           i64 rows_out, int* source) {
  const i64 row = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows_out) return;
  const i64* from = segments + (backward ? chunks : 0);
  const i64* to = segments + (backward ? 0 : chunks);
  i64 found = -1;
  for (i64 j = 0; j < chunks && found < 0; ++j) {
    const i64 inside = row - to[j];
    if (inside >= 0 && inside < segments[2 * chunks + j]) found = from[j] + inside;
  }
  source[row] = found < rows_in ? (int)found : -1;
}
