// Tensor cores of sm_80 and later, a warp at a time: matrices from shared memory to registers (ldmatrix),
// products of 16 x 8 (mma.sync), and copies to shared memory that may be shorter than 16 bytes.
#pragma once
#include "fp8.cuh"

// The first `bytes` (0 to 16) of 16 bytes to shared memory without passing through registers, zeros for the
// others. Both addresses are multiples of 16; what lies behind the first `bytes` is not read.
__device__ __forceinline__ void copy_async_part(At to, const void* from, u32 bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void store_words_at(At at, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

// Four matrices of 8 x 8 16-bit values: lane 8 m + r has the address of row r of matrix m, and gets of all
// four matrices the values 2 (lane % 4) and the next of row lane / 4.
__device__ __forceinline__ void load_matrices_at(At at, u32 (&v)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(at)
               : "memory");
}

// The same of the transposed matrices: of column lane / 4, rows 2 (lane % 4) and the next.
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

// d += a b over 16 values of the contraction. With g = lane / 4 and q = lane % 4, a lane has of a, 16 rows:
// a[0] row g, values 2 q and the next; a[1] row g + 8; a[2] and a[3] the same rows, values 2 q + 8 and the
// next; of b, 8 columns: b0 column g, values 2 q and the next, b1 those 8 further on; of d: rows g (d[0],
// d[1]) and g + 8 (d[2], d[3]), columns 2 q and the next.
__device__ __forceinline__ void mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  MMA("m16n8k16", "bf16.bf16");
}
__device__ __forceinline__ void mma_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  MMA("m16n8k16", "f16.f16");
}

// sm_89 and sm_12x multiply FP8. For sm_90 and sm_10x the compiler would make this of conversions to halves,
// anew for every product.
#define MULTIPLIES_CODES (__CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)

#if MULTIPLIES_CODES
// The same over 32 codes: a[0] has codes 4 q to 4 q + 3, a[2] those 16 further on; b0 and b1 likewise.
template <int A, int B>
__device__ __forceinline__ void mma_codes(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if (A == 0 && B == 0) MMA("m16n8k32", "e4m3.e4m3");
  if (A == 0 && B == 1) MMA("m16n8k32", "e4m3.e5m2");
  if (A == 1 && B == 0) MMA("m16n8k32", "e5m2.e4m3");
  if (A == 1 && B == 1) MMA("m16n8k32", "e5m2.e5m2");
}
#endif
