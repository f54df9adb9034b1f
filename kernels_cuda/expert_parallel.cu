// Messages between ranks: packs rows of several arrays side by side (quantising them on the way), unpacks
// them, and sorts expert ids by rank.
#include "fp8.cuh"
#include "row_map.cuh"

#ifndef KIND
#define KIND BF16  // input of quantize_messages
#define FMT 0      // output of quantize_messages: e4m3
#endif

// ---- destinations of messages: each rank's window, which may be memory of another GPU

#define MOST_PEERS 8
#ifndef PEERS
#define PEERS MOST_PEERS  // maximum number of windows
#endif

struct Windows {        // windows in rank order; unused ones start past all rows
  i64 stride;           // bytes per message
  const int* map;       // a plan's row_id_map whose experts are ranks; null: row r goes to slot r
  i64 slots_per_token;  // slots per token in the map
  u8* to[MOST_PEERS];
  i64 first[MOST_PEERS];  // first slot of each window

  __device__ __forceinline__ u8* at(i64 place) const {
    int rank = 0;
#pragma unroll 1
    while (rank + 1 < PEERS && place >= first[rank + 1]) ++rank;
    return to[rank] + (place - first[rank]) * stride;
  }
  // Calls visit(address) for each of the row's destinations.
  template <class Visit>
  __device__ __forceinline__ void each(i64 row, const Visit& visit) const {
    const int* places = map + row * (2 * slots_per_token + 1);
    const int count = map ? places[2 * slots_per_token] : 1;
#pragma unroll 1
    for (int i = 0; i < count; ++i) visit(at(map ? places[i] : row));
  }
};

// The windows in shared memory: sixteen addresses and offsets exceed the register budget.
#define SHARED_WINDOWS(windows)                                                   \
  __shared__ Windows windows;                                                     \
  if (threadIdx.x == 0)                                                           \
    windows = {stride,                                                            \
               map,                                                               \
               slots_per_token,                                                   \
               {to0, to1, to2, to3, to4, to5, to6, to7},                          \
               {first0, first1, first2, first3, first4, first5, first6, first7}}; \
  __syncthreads()

// ---- messages

// Copies `bytes` of one row; called by a warp.
__device__ __forceinline__ void copy_row(const u8* from, u8* to, u32 bytes) {
  const u32 lane = threadIdx.x % 32;
  if ((((size_t)from | (size_t)to | bytes) & 15) == 0) {
    u32 at = lane * 16;
    for (; at + 3 * 512 < bytes; at += 4 * 512) {
      uint4 v[4];
#pragma unroll
      for (int u = 0; u < 4; ++u) v[u] = *(const uint4*)(from + at + 512 * u);
#pragma unroll
      for (int u = 0; u < 4; ++u) *(uint4*)(to + at + 512 * u) = v[u];
    }
    for (; at < bytes; at += 512) *(uint4*)(to + at) = *(const uint4*)(from + at);
  } else if ((((size_t)from | (size_t)to | bytes) & 3) == 0) {
    for (u32 at = lane * 4; at < bytes; at += 128) *(u32*)(to + at) = *(const u32*)(from + at);
  } else {
    for (u32 at = lane; at < bytes; at += 32) to[at] = from[at];
  }
}

// Zeroes one row; called by a warp.
__device__ __forceinline__ void zero_row(u8* to, u32 bytes) {
  const u32 lane = threadIdx.x % 32;
  if ((((size_t)to | bytes) & 15) == 0) {
    for (u32 at = lane * 16; at < bytes; at += 512) *(uint4*)(to + at) = make_uint4(0, 0, 0, 0);
  } else {
    for (u32 at = lane; at < bytes; at += 32) to[at] = 0;
  }
}

// Up to four arrays with their bytes per row. In shared memory, like the windows.
struct Parts {
  u8* at[4];
  i64 bytes[4];

  // Calls visit(part of the row, its bytes, its offset in the message).
  template <class Visit>
  __device__ __forceinline__ void each(i64 row, const Visit& visit) const {
    u32 before = 0;
#pragma unroll 1
    for (int i = 0; i < 4 && at[i]; ++i) {
      visit(at[i] + row * bytes[i], (u32)bytes[i], before);
      before += ((u32)bytes[i] + 15u) & ~15u;
    }
  }
};

// Packs each row of up to four arrays [rows, bytes each] into a message: the parts side by side, each at a
// multiple of 16 bytes and zero-padded, written to every destination of its Windows.
// Traffic: every part is read and written once per destination of its row.
// Launch: one warp per row, eight rows per thread block.
extern "C" __global__ void __launch_bounds__(256, 4)
    pack_rows(u8* a, i64 a_bytes, u8* b, i64 b_bytes, u8* c, i64 c_bytes, u8* d, i64 d_bytes, i64 rows,
              i64 stride, const int* map, i64 slots_per_token, u8* to0, i64 first0, u8* to1, i64 first1,
              u8* to2, i64 first2, u8* to3, i64 first3, u8* to4, i64 first4, u8* to5, i64 first5, u8* to6,
              i64 first6, u8* to7, i64 first7) {
  pdl_wait();
  __shared__ Parts parts;
  if (threadIdx.x == 0) parts = {{a, b, c, d}, {a_bytes, b_bytes, c_bytes, d_bytes}};
  SHARED_WINDOWS(windows);
  const i64 row = (i64)blockIdx.x * 8 + threadIdx.x / 32;
  if (row >= rows) return;
  windows.each(row, [&](u8* message) {
    parts.each(row, [&](u8* part, u32 bytes, u32 before) {
      const u32 lane = threadIdx.x % 32, room = (bytes + 15u) & ~15u;
      copy_row(part, message + before, bytes);
      if (bytes + lane < room) message[before + bytes + lane] = 0;
    });
  });
}

struct Blocks {  // scale blocks of the rows
  const Windows& windows;
  u32 across;      // scale blocks per row
  u32 first;       // the warp's first block; one division per warp
  u32 row, place;  // row of `first`, and its position in that row

  // Calls visit(address, position in the row) for each message of a block's row.
  template <class Visit>
  __device__ __forceinline__ void each(u32 block, const Visit& visit) const {
    u32 block_row = row, position = place + (block - first);
    while (position >= across) position -= across, ++block_row;
    windows.each(block_row, [&](u8* message) { visit(message, position); });
  }
};

// quantize_rows with blocks of 128 and power-of-two scales, written to messages: a row's codes, then its
// scales, to every destination of its Windows.
// Requires: x [rows, columns], columns a multiple of 128; fewer than 2^32 blocks.
// Traffic: every value is read once; every code and scale is written once per destination of its row.
// Launch: like quantize_rows.
extern "C" __global__ void __launch_bounds__(64)
    quantize_messages(const void* x, i64 vectors, i64 blocks, i64 stride, const int* map, i64 slots_per_token,
                      u8* to0, i64 first0, u8* to1, i64 first1, u8* to2, i64 first2, u8* to3, i64 first3,
                      u8* to4, i64 first4, u8* to5, i64 first5, u8* to6, i64 first6, u8* to7, i64 first7) {
  pdl_wait();
  SHARED_WINDOWS(windows);
  const u32 across = (u32)blocks, first = blockIdx.x * 16 + threadIdx.x / 32 * 8;
  const Blocks of = {windows, across, first, first / across, first % across};
  quantize_warp<KIND>(
      x, vectors, {FMT, 1, 0, 0.f},
      [&](i64 at, uint2 a, uint2 b) {
        of.each((u32)(at / 16), [&](u8* message, u32 place) {
          uint2* to = (uint2*)message + place * 16 + (u32)at % 16;
          to[0] = a;
          to[8] = b;
        });
      },
      [&](i64 block, u32 scale) {
        of.each((u32)block, [&](u8* message, u32 place) { ((u32*)(message + across * 128))[place] = scale; });
      });
}

// Unpacks messages [rows, stride] into the arrays, and zeroes their rows from `rows` to `size`.
// Launch: one warp per row, eight rows per thread block.
extern "C" __global__ void __launch_bounds__(256)
    unpack_rows(u8* a, i64 a_bytes, u8* b, i64 b_bytes, u8* c, i64 c_bytes, u8* d, i64 d_bytes, i64 rows,
                i64 stride, const u8* messages, i64 size) {
  pdl_wait();
  __shared__ Parts parts;
  if (threadIdx.x == 0) parts = {{a, b, c, d}, {a_bytes, b_bytes, c_bytes, d_bytes}};
  __syncthreads();
  const i64 row = (i64)blockIdx.x * 8 + threadIdx.x / 32;
  if (row >= size) return;
  if (row < rows)
    parts.each(row, [&](u8* part, u32 bytes, u32 before) {
      copy_row(messages + row * stride + before, part, bytes);
    });
  else
    parts.each(row, [](u8* part, u32 bytes, u32) { zero_row(part, bytes); });
}

__device__ __forceinline__ i64 load_id(const void* ids, i64 at, i64 size) {
  return size == 8 ? ((const i64*)ids)[at] : ((const int*)ids)[at];
}

// mask [tokens, ranks]: whether a token has an expert on a rank. entries [ranks], zeroed beforehand: number
// of expert choices per rank. One thread per token, whole warps.
extern "C" __global__ void rank_mask(const void* ids, i64 id_size, i64 tokens, i64 k, i64 experts, i64 ranks,
                                     u8* mask, int* entries) {
  pdl_wait();
  const i64 token = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  for (i64 r = 0; r < ranks; ++r) {
    int count = 0;
    for (i64 j = 0; token < tokens && j < k; ++j) {
      const i64 id = load_id(ids, token * k + j, id_size) - r * experts;
      count += id >= 0 && id < experts;
    }
    if (token < tokens) mask[token * ranks + r] = count > 0;
    for (int step = 16; step > 0; step /= 2) count += __shfl_xor_sync(0xffffffffu, count, step);
    // integer sum: the order does not matter
    if (threadIdx.x % 32 == 0 && count) atomicAdd(entries + r, count);
  }
}

// out = ids - first if in [0, experts), else -1. One thread per id.
extern "C" __global__ void local_ids(const void* ids, i64 id_size, i64 count, i64 first, i64 experts,
                                     int* out) {
  pdl_wait();
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const i64 id = load_id(ids, i, id_size) - first;
  out[i] = id >= 0 && id < experts ? (int)id : -1;
}

// Rewrites a plan whose experts are ranks so that every rank has exactly `capacity` rows and no padding.
// Entries beyond the capacity leave the map and are added to the overflow.
// Arguments: maps [tokens, 2 width + 1]; the others as in a plan of `ranks` experts.
// Launch: one thread per token, at least one thread block; 4 bytes of shared memory per rank. The first warp
//   of every thread block computes each rank's first compact row, which saves a second launch.
extern "C" __global__ void __launch_bounds__(256)
    limit_rows(const int* row_id_map, const int* counts, const int* offsets, const int* overflow, i64 tokens,
               i64 width, i64 ranks, i64 capacity, int* out_map, int* out_counts, int* out_padded,
               int* out_pad_offsets, int* out_offsets, int* out_overflow) {
  pdl_wait();
  DYNAMIC_SHARED(shared);
  int* starts = (int*)shared;
  if (threadIdx.x < 32) {
    const int lane = threadIdx.x;
    int before = 0, dropped = 0;
    for (i64 base = 0; base < ranks; base += 32) {
      const i64 rank = base + lane;
      const int count = rank < ranks ? counts[rank] : 0, kept = (int)min((i64)count, capacity);
      int sum = kept;  // inclusive prefix sum over ranks
      for (int step = 1; step < 32; step *= 2) {
        const int lower = __shfl_up_sync(0xffffffffu, sum, step);
        if (lane >= step) sum += lower;
      }
      dropped += count - kept;
      if (rank < ranks) {
        starts[rank] = before + sum - kept;
        if (blockIdx.x == 0) {
          out_counts[rank] = kept;
          out_padded[rank] = (int)capacity;
          out_pad_offsets[rank] = (int)(rank * capacity) - starts[rank];
          out_offsets[rank] = (int)(rank * capacity);
        }
      }
      before += __shfl_sync(0xffffffffu, sum, 31);
    }
    for (int step = 16; step > 0; step /= 2) dropped += __shfl_xor_sync(0xffffffffu, dropped, step);
    if (blockIdx.x == 0 && lane == 0) {
      out_offsets[ranks] = (int)(ranks * capacity);
      *out_overflow = *overflow + dropped;
    }
  }
  __syncthreads();
  const i64 token = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (token >= tokens) return;
  const int* entries_of_token = row_id_map + token * (2 * width + 1);
  int* out = out_map + token * (2 * width + 1);
  const int count = count_of(entries_of_token, width);
  i64 kept = 0;
  for (int j = 0; j < count; ++j) {
    const int rank = entries_of_token[width + j];
    if ((u32)rank >= (u32)ranks) continue;
    const int place = entries_of_token[j] - offsets[rank];
    if (place < 0 || place >= capacity) continue;
    out[kept] = starts[rank] + place;
    out[width + kept++] = rank;
  }
  out[2 * width] = (int)kept;
  for (; kept < width; ++kept) out[kept] = out[width + kept] = -1;
}
