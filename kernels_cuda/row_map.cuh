// Access to a row map, and to the rows that no entry maps to. The map is not validated beforehand: an entry
// that names a slot, expert, column or row out of range is ignored.
#pragma once
#include "common.cuh"

__device__ __forceinline__ int count_of(const int* entries_of_token, i64 places) {
  return (int)clamped(entries_of_token[2 * places], places);
}

// Destination row of entry j, or -1.
__device__ __forceinline__ i64 row_of(const int* entries_of_token, const int* pad_offsets, i64 places, i64 j,
                                      i64 experts, i64 rows) {
  const int expert = entries_of_token[places + j], compact = entries_of_token[j];
  if ((u32)expert >= (u32)experts || compact < 0) return -1;
  const i64 row = (i64)compact + pad_offsets[expert];
  return row >= 0 && row < rows ? row : -1;
}

// Column of a [tokens, columns] array for entry j of a token, or -1.
__device__ __forceinline__ int column_of(const int* entries_of_token, const int* slots, i64 token, i64 places,
                                         i64 j, i64 columns) {
  const int column = slots ? slots[token * places + j] : entries_of_token[places + j];
  return (u32)column < (u32)columns ? column : -1;
}

// Number of rows without a token: the experts' padding and the tail.
__device__ __forceinline__ i64 unmapped_rows(const int* tokens_per_expert, const int* pad_offsets,
                                             const int* expert_offsets, i64 experts, i64 rows, i64* padding) {
  const i64 end = experts ? expert_offsets[experts] : 0;
  // real rows = compact start of the last expert + its rows
  const i64 last = experts - 1;
  const i64 real = experts ? expert_offsets[last] - pad_offsets[last] + tokens_per_expert[last] : 0;
  *padding = end - real;
  return clamped(*padding + (rows > end ? rows - end : 0), rows);
}

// The i-th row without a token. pad_offsets are the prefix sums of padding, so a binary search finds the
// expert.
__device__ __forceinline__ i64 unmapped_row(i64 i, i64 padding, const int* tokens_per_expert,
                                            const int* pad_offsets, const int* expert_offsets, i64 experts) {
  if (i >= padding) return (experts ? expert_offsets[experts] : 0) + i - padding;
  const i64 lo = last_at_most(pad_offsets, experts, i);
  return (i64)expert_offsets[lo] + tokens_per_expert[lo] + i - pad_offsets[lo];
}
