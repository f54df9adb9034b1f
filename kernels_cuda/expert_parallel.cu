// Rows of several arrays side by side, for one message, and apart again; expert ids by rank.
#include "common.cuh"

// `bytes` of one row, by a warp.
__device__ __forceinline__ void copy_row(const u8* from, u8* to, u32 bytes) {
  const u32 lane = threadIdx.x % 32;
  if ((((size_t)from | (size_t)to | bytes) & 15) == 0) {
    u32 at = lane * 16;
    for (; at + 3 * 512 < bytes; at += 4 * 512) {
      uint4 v[4];
#pragma unroll
      for (int u = 0; u < 4; ++u) v[u] = __ldcs((const uint4*)(from + at + 512 * u));
#pragma unroll
      for (int u = 0; u < 4; ++u) *(uint4*)(to + at + 512 * u) = v[u];
    }
    for (; at < bytes; at += 512) *(uint4*)(to + at) = __ldcs((const uint4*)(from + at));
  } else if ((((size_t)from | (size_t)to | bytes) & 3) == 0) {
    for (u32 at = lane * 4; at < bytes; at += 128) *(u32*)(to + at) = *(const u32*)(from + at);
  } else {
    for (u32 at = lane; at < bytes; at += 32) to[at] = from[at];
  }
}

// What: packed [rows, stride] from up to four arrays [rows, bytes each], each part from a multiple of 16 on
//   and zeros behind it; with `apart` the arrays from packed.
// Bytes: everything read once and written once.
// Launch: a warp a row, eight rows a block.
extern "C" __global__ void __launch_bounds__(256)
    pack_rows(u8* a, i64 a_bytes, u8* b, i64 b_bytes, u8* c, i64 c_bytes, u8* d, i64 d_bytes, i64 rows,
              i64 stride, i64 apart, u8* packed) {
  after_earlier();
  const i64 row = (i64)blockIdx.x * 8 + threadIdx.x / 32;
  if (row >= rows) return;
  u8* const parts[4] = {a, b, c, d};
  const u32 sizes[4] = {(u32)a_bytes, (u32)b_bytes, (u32)c_bytes, (u32)d_bytes};
  u8* at = packed + row * stride;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (!parts[i]) continue;
    u8* part = parts[i] + row * sizes[i];
    const u32 lane = threadIdx.x % 32, room = (sizes[i] + 15u) & ~15u;
    if (apart) {
      copy_row(at, part, sizes[i]);
    } else {
      copy_row(part, at, sizes[i]);
      if (sizes[i] + lane < room) at[sizes[i] + lane] = 0;
    }
    at += room;
  }
}

__device__ __forceinline__ i64 load_id(const void* ids, i64 at, i64 size) {
  return size == 8 ? ((const i64*)ids)[at] : ((const int*)ids)[at];
}

// mask [tokens, ranks]: whether a token has an expert on a rank; entries [ranks], zeros before: how many
// there are. One thread a token, whole warps.
extern "C" __global__ void rank_mask(const void* ids, i64 id_size, i64 tokens, i64 k, i64 experts, i64 ranks,
                                     u8* mask, int* entries) {
  after_earlier();
  const i64 token = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  for (i64 r = 0; r < ranks; ++r) {
    int count = 0;
    for (i64 j = 0; token < tokens && j < k; ++j) {
      const i64 id = load_id(ids, token * k + j, id_size) - r * experts;
      count += id >= 0 && id < experts;
    }
    if (token < tokens) mask[token * ranks + r] = count > 0;
    for (int step = 16; step > 0; step /= 2) count += __shfl_xor_sync(0xffffffffu, count, step);
    if (threadIdx.x % 32 == 0 && count) atomicAdd(entries + r, count);  // integers: in any order the same
  }
}

// out = ids - first where that is one of `experts`, else -1. One thread an id.
extern "C" __global__ void local_ids(const void* ids, i64 id_size, i64 count, i64 first, i64 experts,
                                     int* out) {
  after_earlier();
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const i64 id = load_id(ids, i, id_size) - first;
  out[i] = id >= 0 && id < experts ? (int)id : -1;
}
