// Reorders chunks of rows and adds or removes padding: sort_chunks, pad and unpad.
#include "bulk.cuh"

#define CHUNK_THREADS 256

// Source of the result's rows: chunk i of the result (ascending `key`) is rows [from, from + rows) of the
// input, or zeros if from is -1. All [chunks], in shared memory.
struct Chunks {
  int *key, *rows, *from;
};

// A row count rounded up to a multiple of `align`.
__device__ __forceinline__ i64 padded(i64 rows, i64 align) {
  return align == 1 ? rows : (i64)((u32)(rows + align - 1) / (u32)align) * align;
}

// Fills `c`, a contiguous range of chunks per thread; every thread block computes it. Forward: the result has
// its chunks in `order`, and every group of them is padded. Backward: the result has them as in `sizes`,
// `rows_before` rows in total, and no chunk starts past those. Scratch: start [chunks + 1], which [chunks],
// sums [warps].
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
        atomicMax(c.from + i, (int)at);  // a chunk repeated in `order` uses its last position
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

// Input row of output row `row`, or -1. Only the last chunk that starts at or before it can contain it: empty
// chunks end where they start.
__device__ __forceinline__ i64 source_of(i64 row, Chunks c, int chunks, i64 rows_in) {
  const int lo = last_at_most(c.key, chunks, row);
  if (!chunks || c.from[lo] < 0) return -1;
  const i64 inside = row - c.key[lo], from = c.from[lo] + inside;
  return inside >= 0 && inside < c.rows[lo] && from < rows_in ? from : -1;
}

// Layout of shared memory: sums i64 [CHUNK_THREADS / 32] | start [chunks + 1], then key, rows, from, which
// [chunks].
__device__ __forceinline__ Chunks chunks_in(u8* shared, i64 chunks, i64** sums, int** start) {
  *sums = (i64*)shared;
  *start = (int*)(shared + CHUNK_THREADS / 4);
  Chunks c;
  c.key = *start + chunks + 1;
  c.rows = c.key + chunks;
  c.from = c.rows + chunks;
  return c;
}

// Source row of every output row (-1: none) and its probability. One thread per row. With `keep_rest`, rows
// past the chunks map to themselves; input and output then have equally many.
extern "C" __global__ void sort_chunks_sources(const void* sizes, const void* order, i64 wide_sizes,
                                               i64 wide_order, i64 chunks, i64 align, i64 per_group,
                                               i64 keep_rest, i64 backward, i64 rows_in, i64 rows,
                                               const u8* probs, i64 prob_size, int* source, u8* out_probs,
                                               int* group_offsets) {
  pdl_wait();
  pdl_launch_dependents();
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

// out[row] = x[source[row]], likewise scales; zeros where source is -1.
// Arguments: x [., row_bytes], scales [., scale_bytes], out [rows, row_bytes].
// Requires: row_bytes and scale_bytes are multiples of 16.
// Traffic: every row is read once and written once.
// Launch: one warp per unit: `together` rows (up to 32) or one of the `pieces` of a long row; shared memory
//   for a unit and 16 bytes. Runs after the launch that writes `source`.
// Design: short-lived thread blocks instead of persistent ones with several buffers. The hardware starts
//   blocks in order, so concurrent accesses stay close together, while persistent blocks drift apart. A plain
//   copy of 345 MiB takes 171 us, with persistent blocks 187 us.
extern "C" __global__ void __launch_bounds__(32)
    sort_chunks_rows(const u8* x, i64 row_bytes, i64 piece_bytes, i64 pieces, i64 together, const u8* scales,
                     i64 scale_bytes, const int* source, i64 rows, u8* out, u8* out_scales) {
  DYNAMIC_SHARED(shared);
  const int lane = threadIdx.x;
  const u32 unit = blockIdx.x;
  const i64 begin = pieces > 1 ? unit % (u32)pieces * piece_bytes : 0;
  const i64 row = pieces > 1 ? unit / (u32)pieces : unit * together + lane;  // the row of this lane
  const bool takes_part = lane < together && row < rows;
  const u32 bytes = (u32)(row_bytes - begin < piece_bytes ? row_bytes - begin : piece_bytes);
  const u32 scale_row_bytes = begin == 0 && scales ? (u32)scale_bytes : 0u;
  pdl_wait();
  const int from = takes_part ? source[row] : -1;
#if __CUDA_ARCH__ >= 900
  // consecutive rows with consecutive sources are copied together, by the lane of the first
  const int before = __shfl_up_sync(0xffffffffu, from, 1);
  const bool starts = from >= 0 && (lane == 0 || before < 0 || from != before + 1);
  const u32 ends = __ballot_sync(0xffffffffu, starts || from < 0);
  const u32 arriving = __popc(__ballot_sync(0xffffffffu, from >= 0));
  const u32 later = lane < 31 ? ends >> (lane + 1) : 0u;
  const u32 run = starts ? (u32)(later ? __ffs(later) : 32 - lane) : 0u;
  u8 *data = shared + lane * piece_bytes, *scale = shared + together * piece_bytes + lane * scale_bytes;
  u64* barrier = (u64*)(shared + together * (piece_bytes + scale_bytes));
  if (lane == 0) {
    barrier_init(barrier);
    barrier_expect(barrier, arriving * (bytes + scale_row_bytes));
  }
  __syncwarp();
  if (run) {
    bulk_load(data, x + from * row_bytes + begin, run * bytes, barrier);
    if (scale_row_bytes) bulk_load(scale, scales + from * scale_bytes, run * scale_row_bytes, barrier);
  }
  u32 left = __ballot_sync(0xffffffffu, takes_part && from < 0);
#else
  u32 left = __ballot_sync(0xffffffffu, takes_part);
#endif
  for (; left; left &= left - 1) {  // zero rows; before sm_90 all rows
    const int which = __ffs(left) - 1;
    const i64 to = __shfl_sync(0xffffffffu, row, which), in = __shfl_sync(0xffffffffu, from, which);
    const uint4 zero = make_uint4(0, 0, 0, 0);
    for (i64 at = lane * 16; at < bytes; at += 512)
      *(uint4*)(out + to * row_bytes + begin + at) =
          in < 0 ? zero : *(const uint4*)(x + in * row_bytes + begin + at);
    for (i64 at = lane * 16; at < scale_row_bytes; at += 512)
      *(uint4*)(out_scales + to * scale_bytes + at) =
          in < 0 ? zero : *(const uint4*)(scales + in * scale_bytes + at);
  }
#if __CUDA_ARCH__ >= 900
  barrier_wait(barrier);
  if (run) {
    const u64 policy = evict_first();
    bulk_store(out + row * row_bytes + begin, data, run * bytes, policy);
    if (scale_row_bytes) bulk_store(out_scales + row * scale_bytes, scale, run * scale_row_bytes, policy);
  }
  bulk_finish();
#endif
}
