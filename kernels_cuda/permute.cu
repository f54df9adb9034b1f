// Moving each token's row to where its experts read it.
//
// permute_rows is the fast path: one launch for rows, scales, probabilities and padding. The kernels after it
// serve every other dtype, width and map, by way of an int32 source index for every output row.
#include "bulk.cuh"
#include "row_map.cuh"
#include "scale_layout.cuh"

#define LONG_PIECE 12000  // bytes; as in permute.py

#if BLOCKED
// Lane by lane, words of four of a row's scales to where the row's tiles have them; null: zeros. (4096 x 7168
// to 8 experts each: 101 us in place of 71 with compact scales, whose conversion takes 64 more.)
__device__ __forceinline__ void write_blocked_scales(const u8* scales, i64 row, i64 scale_bytes,
                                                     u8* out_scales) {
  for (i64 w = threadIdx.x; w < scale_bytes / 4; w += 32)
    *(u32*)(out_scales + place_in_blocked(row, 4 * w, scale_bytes / 4)) =
        scales ? ((const u32*)scales)[w] : 0u;
}
#endif

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
  pdl_wait();
  DYNAMIC_SHARED(shared);
  u8* data = shared + zeros;
  const i64 lane = threadIdx.x, unit = blockIdx.x, token = unit / pieces, piece = unit % pieces;
  const i64 begin = piece * piece_bytes;
  const u32 bytes = (u32)(row_bytes - begin < piece_bytes ? row_bytes - begin : piece_bytes);
  const bool leads = piece == 0;
  const int* entries_of_token = row_id_map + token * (2 * width + 1);
  const int count = count_of(entries_of_token, width);
#if __CUDA_ARCH__ >= 900
  const u64 policy = evict_first();
  // A long piece goes out in four parts: 192.9 to 191.3 us for bfloat16, A=128 (in two 191.9, in seven
  // 191.5), and 145.0 to 144.2, A=16. FP8's, half as long, would be slower by one to two per cent.
  const u32 at_once = bytes >= LONG_PIECE ? (bytes / 4 + 15u) & ~15u : bytes;
  u64* barrier = (u64*)(data + piece_bytes + scale_bytes);
  if (lane == 0 && count > 0) {
    barrier_init(barrier);
    barrier_expect(barrier, bytes + (leads && !BLOCKED ? (u32)scale_bytes : 0u));
    bulk_load(data, x + token * row_bytes + begin, bytes, barrier);
    if (leads && scales && !BLOCKED)
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
      const bool by_stores = !zeros;
#else
      const bool by_stores = true;
#endif
      const uint4 zero = make_uint4(0, 0, 0, 0);
      for (i64 at = lane * 16; by_stores && at < row_bytes; at += 512)
        __stcs((uint4*)(out + row * row_bytes + at), zero);
#if BLOCKED
      write_blocked_scales(nullptr, row, scale_bytes, out_scales);
#else
      for (i64 at = lane * 16; scales && at < scale_bytes; at += 512)
        __stcs((uint4*)(out_scales + row * scale_bytes + at), zero);
#endif
      for (i64 b = lane; probs && b < prob_size; b += 32) out_probs[row * prob_size + b] = 0;
    }
  }
  __syncwarp();
  for (i64 j0 = 0; j0 < count; j0 += 32) {
    const i64 j = j0 + lane;
    i64 row = rows;
    if (j < count) {
      row = row_of(entries_of_token, pad_offsets, width, j, experts, rows);
      if (leads && probs && row >= 0) {
        const int column = column_of(entries_of_token, slots, token, width, j, prob_columns);
        const i64 from = token * prob_columns + column;
        for (i64 b = 0; b < prob_size; ++b)
          out_probs[row * prob_size + b] = column < 0 ? 0 : probs[from * prob_size + b];
      }
    }
#if BLOCKED
    for (i64 k = 0; leads && k < 32 && j0 + k < count; ++k) {
      const i64 to = __shfl_sync(0xffffffffu, row, (int)k);
      if (to >= 0 && to < rows)
        write_blocked_scales(scales + token * scale_bytes, to, scale_bytes, out_scales);
    }
#endif
#if __CUDA_ARCH__ >= 900
    if (j0 == 0) barrier_wait(barrier);
    if (row >= 0 && row < rows) {
      u8* to = out + row * row_bytes + begin;
      for (u32 at = 0; at < bytes; at += at_once)
        bulk_store(to + at, data + at, min(bytes - at, at_once), policy);
      if (leads && scales && !BLOCKED)
        bulk_store(out_scales + row * scale_bytes, data + piece_bytes, (u32)scale_bytes, policy);
    }
#else
    for (i64 k = 0; k < 32 && j0 + k < count; ++k) {
      const i64 to = __shfl_sync(0xffffffffu, row, (int)k);
      if (to < 0 || to >= rows) continue;
      for (i64 at = lane * 16; at < bytes; at += 512)
        *(uint4*)(out + to * row_bytes + begin + at) = *(const uint4*)(x + token * row_bytes + begin + at);
      for (i64 at = lane * 16; leads && scales && !BLOCKED && at < scale_bytes; at += 512)
        *(uint4*)(out_scales + to * scale_bytes + at) = *(const uint4*)(scales + token * scale_bytes + at);
    }
#endif
  }
#if __CUDA_ARCH__ >= 900
  bulk_finish();
#endif
}

// What: zeros in the rows of `out` that belong to probabilities of 0.
// Bytes: the map's entries and their probabilities; of `out` those rows alone.
// Launch: one warp a token, eight a block, after what moved the rows: none of its own in the kernel that
// moves
//   them, where few ask for it.
extern "C" __global__ void zero_unweighted_rows(const int* row_id_map, const int* slots,
                                                const int* pad_offsets, const void* probs, i64 probs_kind,
                                                i64 columns, i64 tokens, i64 places, i64 experts, i64 rows,
                                                i64 width, u8* out) {
  pdl_wait();
  const i64 lane = threadIdx.x % 32, token = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (token >= tokens) return;
  const int* entries_of_token = row_id_map + token * (2 * places + 1);
  const int count = count_of(entries_of_token, places);
  const bool whole = (((size_t)out | (size_t)width) & 15) == 0;
  for (i64 j0 = 0; j0 < count; j0 += 32) {
    const i64 j = j0 + lane;
    i64 row = -1;
    if (j < count) {
      const int column = column_of(entries_of_token, slots, token, places, j, columns);
      if (column >= 0 && load_wide(probs, token * columns + column, (int)probs_kind) == 0.0)
        row = row_of(entries_of_token, pad_offsets, places, j, experts, rows);
    }
    for (int k = 0; k < 32; ++k) {
      const i64 to = __shfl_sync(0xffffffffu, row, k);
      if (to < 0) continue;
      u8* start = out + to * width;
      if (whole)
        for (i64 at = lane * 16; at < width; at += 512) *(uint4*)(start + at) = make_uint4(0, 0, 0, 0);
      else
        for (i64 at = lane; at < width; at += 32) start[at] = 0;
    }
  }
}

// Row map to sources: for every destination row its token and the column of its probability.
// One thread an entry. `source` and `column` are -1 where no token goes.
extern "C" __global__ void row_sources(const int* row_id_map, const int* slots, const int* pad_offsets,
                                       i64 tokens, i64 width, i64 columns, i64 experts, i64 rows, int* source,
                                       int* column) {
  pdl_wait();
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= tokens * width) return;
  const i64 token = i / width, place = i % width;
  const int* entries_of_token = row_id_map + token * (2 * width + 1);
  if (place >= entries_of_token[2 * width]) return;
  const i64 row = row_of(entries_of_token, pad_offsets, width, place, experts, rows);
  if (row < 0) return;
  source[row] = (int)token;
  column[row] = column_of(entries_of_token, slots, token, width, place, columns);
}

// out[row] = x[source[row]], `width` bytes each; zeros where source is -1, if `fill`. One block a row.
extern "C" __global__ void gather_rows(const u8* x, const int* source, i64 width, i64 fill, u8* out) {
  pdl_wait();
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
  pdl_wait();
  const i64 row = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows || (source[row] < 0 && !fill)) return;
  const bool has = source[row] >= 0 && column[row] >= 0;
  for (i64 b = 0; b < size; ++b)
    out[row * size + b] = has ? probs[(source[row] * columns + column[row]) * size + b] : 0;
}
