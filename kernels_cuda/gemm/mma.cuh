// Warp-level tensor core instructions of sm_80 and later: ldmatrix (shared memory to registers), mma.sync (16
// x 8 products), and asynchronous copies of up to 16 bytes.
#pragma once
#include "fp8.cuh"

// Asynchronous copy of 16 bytes to shared memory, or of zeros, without reading the source. Both addresses
// must be multiples of 16.
__device__ __forceinline__ void copy_async_or_zero(At to, const void* from, bool copied) {
  asm volatile(
      "{ .reg .pred zero; setp.eq.u32 zero, %2, 0;"
      " cp.async.cg.shared.global.L2::128B [%0], [%1], 16, zero; }" ::"r"(to),
      "l"(from), "r"((u32)copied)
      : "memory");
}

// The value of the lane whose number has the bits KEPT of the own lane's and the others of `place`.
template <int KEPT>
__device__ __forceinline__ float of_lane_at(float v, u32 place) {
  float other;
  asm volatile("shfl.sync.idx.b32 %0, %1, %2, %3, 0xffffffff;"
               : "=f"(other)
               : "f"(v), "r"(place), "n"(KEPT << 8 | 31));
  return other;
}

__device__ __forceinline__ void store_words_at(At at, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

// Loads four 8 x 8 matrices of 16-bit values. Lane 8 m + r passes the address of row r of matrix m; every
// lane receives, from row lane / 4 of each matrix, values 2 (lane % 4) and 2 (lane % 4) + 1.
__device__ __forceinline__ void load_matrices_at(At at, u32 (&v)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(at)
               : "memory");
}

// The same with the matrices transposed: column lane / 4, rows 2 (lane % 4) and 2 (lane % 4) + 1.
__device__ __forceinline__ void load_transposed_at(At at, u32 (&v)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(at)
               : "memory");
}

#define MMA(shape, types)                                                             \
  asm volatile("mma.sync.aligned." shape ".row.col.f32." types                        \
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                       \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))

// d += a b over 16 values of K. With g = lane / 4 and q = lane % 4, a lane holds of the 16 rows of a: a[0]
// row g, k = 2 q, 2 q + 1; a[1] row g + 8, same k; a[2], a[3] the same rows, k = 2 q + 8, 2 q + 9; of the 8
// columns of b: b0 column g, k = 2 q, 2 q + 1; b1 k = 2 q + 8, 2 q + 9; of d: rows g (d[0], d[1]) and g + 8
// (d[2], d[3]), columns 2 q and 2 q + 1.
__device__ __forceinline__ void mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  MMA("m16n8k16", "bf16.bf16");
}
__device__ __forceinline__ void mma_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  MMA("m16n8k16", "f16.f16");
}

// 1 / x with a relative error of 2^-23, exact for powers of two; infinite for subnormals.
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// sm_89 and sm_12x have FP8 mma.sync. For sm_90 and sm_10x the compiler would emulate it and convert the
// operands to f16 again for every product.
#define MULTIPLIES_CODES (__CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)

#if MULTIPLIES_CODES
// The same over 32 FP8 codes of K: a[0] holds k = 4 q to 4 q + 3, a[2] k = 4 q + 16 to 4 q + 19; b0 and b1
// likewise.
template <int A, int B>
__device__ __forceinline__ void mma_codes(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if (A == 0 && B == 0) MMA("m16n8k32", "e4m3.e4m3");
  if (A == 0 && B == 1) MMA("m16n8k32", "e4m3.e5m2");
  if (A == 1 && B == 0) MMA("m16n8k32", "e5m2.e4m3");
  if (A == 1 && B == 1) MMA("m16n8k32", "e5m2.e5m2");
}
#endif
