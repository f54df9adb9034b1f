// Builds a plan from a row map, for callers that have the map only.
#include "row_map.cuh"

// out[token] = row_id_map[token], and counts[expert] += 1 for each of the token's entries.
// Arguments: row_id_map and out [tokens, 2 * experts + 1]; counts [experts], zeroed beforehand.
// Traffic: the map is read and written once; most of it is empty entries.
// Launch: one warp per token, eight per thread block. Empty entries are not counted: with 4096 tokens and 8
//   of 256 experts, 31 of 32 entries are empty, and adding them to one counter took a millisecond.
extern "C" __global__ void copy_row_map(const int* row_id_map, i64 tokens, i64 experts, int* counts,
                                        int* out) {
  pdl_wait();
  const i64 lane = threadIdx.x % 32, token = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (token >= tokens) return;
  const i64 width = 2 * experts + 1;
  const int* entries_of_token = row_id_map + token * width;
  int* to = out + token * width;
  const int count = count_of(entries_of_token, experts);
  for (i64 j = lane; j < count; j += 32) {
    const int expert = entries_of_token[experts + j];
    if ((u32)expert < (u32)experts) atomicAdd(counts + expert, 1);  // integer sum: the order does not matter
  }
  for (i64 first = lane; first < width; first += 8 * 32) {
    int v[8];
#pragma unroll
    for (int u = 0; u < 8; ++u)
      if (first + 32 * u < width) v[u] = entries_of_token[first + 32 * u];
#pragma unroll
    for (int u = 0; u < 8; ++u)
      if (first + 32 * u < width) to[first + 32 * u] = v[u];
  }
}

// out[j * tokens + token] = row, where `order` lists entry token * places + j at `row`; -1 if the entry's id
// is negative or row >= rows.
// Arguments: order [tokens * places], a permutation of the entries; ids [tokens, places]; int64 if wide.
// Launch: one thread per row.
extern "C" __global__ void index_map_of_order(const void* order, const void* ids, i64 wide_order,
                                              i64 wide_ids, i64 tokens, i64 places, i64 rows, int* out) {
  pdl_wait();
  const i64 row = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= tokens * places) return;
  const i64 entry = int_at(order, row, wide_order);
  if (entry < 0 || entry >= tokens * places) return;
  const bool takes = row < rows && int_at(ids, entry, wide_ids) >= 0;
  out[entry % places * tokens + entry / places] = takes ? (int)row : -1;
}

// From an index map: each token's rows in descending order as entries of expert 0, and the original entry of
// each; counts[0] += number of entries.
// Arguments: index_map [places * tokens], entry j of a token at j * tokens + token; row_id_map [tokens, 2 *
//   places + 1]; slots [tokens, places]; counts [1], zeroed beforehand.
// Launch: one thread per entry, adjacent threads on adjacent tokens; each ranks its entry among those of its
//   token, which are in L1.
extern "C" __global__ void sort_index_map(const int* index_map, i64 tokens, i64 places, int* counts,
                                          int* row_id_map, int* slots) {
  pdl_wait();
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  const bool valid = i < tokens * places;
  const i64 token = valid ? i % tokens : 0, slot = valid ? i / tokens : 0;
  const int row = valid ? index_map[i] : -1;
  if (valid) {
    i64 place = 0, count = 0;
    for (i64 j = 0; j < places; ++j) {
      const int other = index_map[j * tokens + token];
      if (other >= 0) ++count;
      if (other >= 0 ? row < 0 || other > row || (other == row && j < slot) : row < 0 && j < slot) ++place;
    }
    int* entries_of_token = row_id_map + token * (2 * places + 1);
    entries_of_token[place] = row < 0 ? -1 : row;
    entries_of_token[places + place] = row < 0 ? -1 : 0;
    if (slot == 0) entries_of_token[2 * places] = (int)count;
    slots[token * places + place] = row < 0 ? -1 : (int)slot;
  }
  const int entries = __popc(__ballot_sync(0xffffffffu, row >= 0));
  if (threadIdx.x % 32 == 0 && entries) atomicAdd(counts, entries);  // integer sum: the order does not matter
}

// Exclusive prefix sums of the padded expert counts: each expert's first row, then the end of the last.
// Arguments: counts, pad_offsets (null: zeros), padded_counts and out_pad_offsets [experts]; expert_offsets
//   [experts + 1]; overflow [1], set to zero.
// Launch: one thread block, a contiguous range of experts per thread.
extern "C" __global__ void offsets_of_counts(const int* counts, const int* pad_offsets, i64 experts,
                                             int* padded_counts, int* out_pad_offsets, int* expert_offsets,
                                             int* overflow) {
  pdl_wait();
  __shared__ i64 sums[32];
  const i64 each = (experts + blockDim.x - 1) / blockDim.x, begin = threadIdx.x * each;
  const i64 end = begin + each < experts ? begin + each : experts;
  i64 total = 0;
  for (i64 e = begin; e < end; ++e) total += counts[e];
  total = sum_before(total, sums);
  for (i64 e = begin; e < end; ++e) {
    const int padding = pad_offsets ? pad_offsets[e] : 0;
    padded_counts[e] = counts[e];
    out_pad_offsets[e] = padding;
    expert_offsets[e] = (int)(total + padding);
    total += counts[e];
    if (e == experts - 1) expert_offsets[experts] = (int)(total + padding);
  }
  if (threadIdx.x > 0) return;
  overflow[0] = 0;
  if (experts == 0) expert_offsets[0] = 0;
}
