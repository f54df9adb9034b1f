// Permutes each token's row to the rows of its experts.
//
// permute_rows is the fast path: one launch for rows, scales, probabilities and padding. The other kernels
// serve every other dtype, width and map with an int32 source index per output row.
#include "bulk.cuh"
#include "row_map.cuh"
#include "scale_layout.cuh"

#define LONG_PIECE 12000  // bytes; must match permute.py

#if BLOCKED
// Writes words of four of a row's scales to the row's 128x4 tiles, one word per lane; null: zeros. (4096 x
// 7168, 8 experts per token: 101 us; with compact scales 71 us, plus 64 us for their conversion.)
__device__ __forceinline__ void write_blocked_scales(const u8* scales, i64 row, i64 scale_bytes,
                                                     u8* out_scales) {
  for (i64 w = threadIdx.x; w < scale_bytes / 4; w += 32)
    *(u32*)(out_scales + place_in_blocked(row, 4 * w, scale_bytes / 4)) =
        scales ? ((const u32*)scales)[w] : 0u;
}
#endif

// out[destination] = x[token] for each of a token's destinations, likewise its scales and probability; with
// `fill`, zeros in every row without a token.
// Arguments: x [tokens, row_bytes], scales [tokens, scale_bytes], probs [tokens, prob_columns]. A row is
//   moved in `pieces` of `piece_bytes`.
// Requires: rows and scale rows are multiples of 16 bytes.
// Traffic: every token is read once, every output row is written once.
// Launch: one warp per piece of a token; zeros + piece_bytes + scale_bytes + 16 bytes of shared memory. Each
//   warp also writes its share of the zero rows while its load is in flight, which spreads these writes over
//   the run; they come from `zeros` bytes of shared memory, or are ordinary stores if that is 0.
// Design: one bulk load, and one bulk store per destination, keep the most bytes in flight with the fewest
//   instructions. An evict-first policy on the stores: 135.3 instead of 136.7 us (FP8: 68.8 instead of 70.4).
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
  // A long piece is stored in four parts: 192.9 to 191.3 us for bfloat16, A=128 (two parts 191.9, seven
  // 191.5), and 145.0 to 144.2, A=16. FP8 rows are half as long and would be 1 to 2 % slower.
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

// Zeroes the rows of `out` whose probability is 0.
// Traffic: the map's entries and their probabilities; of `out` those rows only.
// Launch: one warp per token, eight per thread block, after the kernel that moved the rows. It is a separate
//   kernel because few callers need it.
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

// Converts a row map to sources: for every destination row its token and, if `column` is not null, the column
// of its probability, -1 if there is none. One thread per entry.
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
  if (column) column[row] = column_of(entries_of_token, slots, token, width, place, columns);
}

// out[row] = x[source[row]], `width` bytes each; with `fill`, zeros where source is -1. One thread block per
// row.
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

// out[row] = probs[source[row], column[row]], `size` bytes each. One thread per row.
extern "C" __global__ void gather_probs(const u8* probs, const int* source, const int* column, i64 columns,
                                        i64 rows, i64 size, i64 fill, u8* out) {
  pdl_wait();
  const i64 row = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows || (source[row] < 0 && !fill)) return;
  const bool has = source[row] >= 0 && column[row] >= 0;
  for (i64 b = 0; b < size; ++b)
    out[row * size + b] = has ? probs[(source[row] * columns + column[row]) * size + b] : 0;
}
