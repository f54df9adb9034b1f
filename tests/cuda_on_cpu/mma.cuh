// kernels_cuda/gemm/mma.cuh in C++: the lanes of a warp exchange their operands, and each computes its own
// part of the product.
#pragma once
#include "fp8.cuh"

inline void copy_async_or_zero(At to, const void* from, bool copied, CALLER) {
  if ((to | (u64)from) & 15) give_up_at("copies from or to an address that is no multiple of 16 bytes", line);
  copy_async({(void*)to, copied ? from : nullptr, 16, copied});
}
template <int KEPT>
float of_lane_at(float v, u32 place, CALLER) {
  return of_lane(v, (threadIdx.x & KEPT) | (place & ~KEPT), line);
}
inline float reciprocal(float x) { return 1.f / x; }
inline void store_words_at(At at, uint4 v) { *(uint4*)at = v; }

inline void load_matrices_at(At at, u32 (&v)[4], CALLER) {
  const At* rows = warp_values(at, line);
  const u32 lane = threadIdx.x % 32;
  for (u32 m = 0; m < 4; ++m) v[m] = ((const u32*)rows[8 * m + lane / 4])[lane % 4];
}
inline void load_transposed_at(At at, u32 (&v)[4], CALLER) {
  const At* rows = warp_values(at, line);
  const u32 lane = threadIdx.x % 32;
  for (u32 m = 0; m < 4; ++m) {
    const u16 first = ((const u16*)rows[8 * m + lane % 4 * 2])[lane / 4];
    v[m] = first | (u32)((const u16*)rows[8 * m + lane % 4 * 2 + 1])[lane / 4] << 16;
  }
}

struct Operands {
  u32 a[4], b[2];
};

// With `count` values per 32-bit word: value(word, i, whether it is an operand b).
template <class Value>
void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, u32 count, const Value& value, CALLER) {
  const Operands* all = warp_values(Operands{{a[0], a[1], a[2], a[3]}, {b0, b1}}, line);
  const u32 lane = threadIdx.x % 32;
  for (u32 v = 0; v < 4; ++v)
    for (u32 q = 0; q < 4; ++q)
      for (u32 far = 0; far < 2; ++far)
        for (u32 i = 0; i < count; ++i)
          d[v] += value(all[lane / 4 * 4 + q].a[v / 2 + 2 * far], i, false) *
                  value(all[(lane % 4 * 2 + v % 2) * 4 + q].b[far], i, true);
}
inline void mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  mma(d, a, b0, b1, 2, [](u32 w, u32 i, bool) { return bf16_to_float((u16)(w >> (16 * i))); });
}
inline void mma_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  mma(d, a, b0, b1, 2, [](u32 w, u32 i, bool) { return f16_to_float((u16)(w >> (16 * i))); });
}

#define MULTIPLIES_CODES (__CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)
template <int A, int B>
void mma_codes(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  mma(d, a, b0, b1, 4, [](u32 w, u32 i, bool of_b) { return decode(w >> (8 * i) & 0xffu, of_b ? B : A); });
}
