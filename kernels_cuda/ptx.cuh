// Wrappers of PTX instructions without a C++ intrinsic. All inline PTX is in this file, bulk.cuh, mma.cuh and
// wgmma.cuh; the tests replace these headers to run the kernels on a CPU.
#pragma once

#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) u8 name[]
#define DYNAMIC_SHARED_TILES(name) \
  extern __shared__ __align__(1024) u8 name[]  // the 128-byte swizzle repeats every 1024 bytes

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// 32-bit addresses in shared memory. From generic pointers the compiler recomputes them, four instructions
// per access.
typedef u32 At;
__device__ __forceinline__ At at_of(const void* p) { return shared_address(p); }
// An opaque copy, so that the compiler keeps the address in a register instead of recomputing it.
__device__ __forceinline__ At kept(At at) {
  At same;
  asm volatile("mov.u32 %0, %1;" : "=r"(same) : "r"(at));
  return same;
}

template <class T>
__device__ __forceinline__ T* kept(T* p) {
  T* same;
  asm volatile("mov.u64 %0, %1;" : "=l"(same) : "l"(p));
  return same;
}

__device__ __forceinline__ float load_at(At at) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(at) : "memory");
  return x;
}
__device__ __forceinline__ float2 load2_at(At at) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(at) : "memory");
  return x;
}
__device__ __forceinline__ uint2 load_words_at(At at) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ int4 load_ints_at(At at) {
  int4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(at)
               : "memory");
  return v;
}

// Stores at OFFSET bytes after an address, which is part of the instruction.
template <int OFFSET>
__device__ __forceinline__ void store_words_at(At at, uint2 v) {
  asm volatile("st.shared.v2.u32 [%0 + %1], {%2, %3};" ::"r"(at), "n"(OFFSET), "r"(v.x), "r"(v.y) : "memory");
}

// Shuffle: reads from lane PLACE, except that the lane-number bits set in KEPT stay this lane's own.
template <int PLACE, int KEPT>
__device__ __forceinline__ u32 of_lane_near(u32 v) {
  u32 received;
  asm volatile("shfl.sync.idx.b32 %0, %1, %2, %3, 0xffffffff;"
               : "=r"(received)
               : "r"(v), "n"(PLACE), "n"(KEPT << 8 | 31));
  return received;
}

// First statement of every kernel. With programmatic dependent launch (launch.py: launch_loaded) thread
// blocks may start while the previous launch's last blocks still run; this waits until all previous launches
// have completed and their writes are visible.
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Allows the next launch to start once all thread blocks have called this or exited. Short kernels call it at
// the beginning, long ones after their last loads: at the beginning of long kernels the next launch's blocks
// take their resources (three transposes took 2 to 9 % longer). Before its own pdl_wait the next kernel may
// only read what this kernel could read, so this call follows pdl_wait.
__device__ __forceinline__ void pdl_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ float f16_to_float(u16 bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}

__device__ __forceinline__ u16 float_to_f16(float x) {
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}

__device__ __forceinline__ u32 to_f16x2(float a, float b) {  // `a` in the low half
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(b), "f"(a));
  return pair;
}

// Two values as bfloat16, `a` in the low half: round to nearest even, NaN becomes 0x7fff. float_to_bf16 gives
// the same for the NaN of arithmetic, in six instructions per value.
__device__ __forceinline__ u32 to_bf16x2(float a, float b) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(b), "f"(a));
  return pair;
}

#if __CUDA_ARCH__ >= 890
// FP8: saturating, round to nearest even, NaN becomes 0x7f; `a` in the low byte.
__device__ __forceinline__ u32 to_e4m3x2(float a, float b) {
  u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(b), "f"(a));
  return pair;
}

__device__ __forceinline__ u32 to_e5m2x2(float a, float b) {
  u16 pair;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(b), "f"(a));
  return pair;
}

__device__ __forceinline__ void halves_of_e4m3x4(u32 codes, u32* low, u32* high) {
  asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e4m3x2 %0, a; cvt.rn.f16x2.e4m3x2 %1, b; }"
      : "=r"(*low), "=r"(*high)
      : "r"(codes));
}

__device__ __forceinline__ void halves_of_e5m2x4(u32 codes, u32* low, u32* high) {
  asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e5m2x2 %0, a; cvt.rn.f16x2.e5m2x2 %1, b; }"
      : "=r"(*low), "=r"(*high)
      : "r"(codes));
}

__device__ __forceinline__ u32 halves_to_e4m3x2(u32 halves) {
  u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(pair) : "r"(halves));
  return pair;
}

__device__ __forceinline__ u32 halves_to_e5m2x2(u32 halves) {
  u16 pair;
  asm("cvt.rn.satfinite.e5m2x2.f16x2 %0, %1;" : "=h"(pair) : "r"(halves));
  return pair;
}
#endif

// Product of two f16 pairs, each packed in a 32-bit word.
__device__ __forceinline__ u32 halves_times(u32 a, u32 b) {
  u32 c;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
}

// max(a, |b|) of f16 pairs; NaN propagates.
__device__ __forceinline__ u32 larger_halves(u32 a, u32 b) {
  u32 c;
  asm("{ .reg .b32 m; abs.f16x2 m, %2; max.NaN.f16x2 %0, %1, m; }" : "=r"(c) : "r"(a), "r"(b));
  return c;
}

// max(|a|, |b|) of f16 pairs; NaN propagates.
__device__ __forceinline__ u32 larger_magnitudes(u32 a, u32 b) {
  u32 c;
  asm("{ .reg .b32 m, n; abs.f16x2 m, %1; abs.f16x2 n, %2; max.NaN.f16x2 %0, m, n; }"
      : "=r"(c)
      : "r"(a), "r"(b));
  return c;
}

// max(a, b) of pairs of 16-bit unsigned integers.
__device__ __forceinline__ u32 larger_u16s(u32 a, u32 b) {
#if __CUDA_ARCH__ >= 900
  u32 c;
  asm("max.u16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
#else
  const u32 high = (a > b ? a : b) & 0xffff0000u;
  return high | ((a & 0xffffu) > (b & 0xffffu) ? a & 0xffffu : b & 0xffffu);
#endif
}

__device__ __forceinline__ float larger_or_nan(float a, float b) {
  float c;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}

// Asynchronous copy of 16 bytes from global to shared memory; writes zeros if `valid` is false.
__device__ __forceinline__ void copy_async16_at(At to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void copy_async16(void* to, const void* from, bool valid) {
  copy_async16_at(at_of(to), from, valid);
}

// The same for 8 and for 4 bytes.
__device__ __forceinline__ void copy_async8(void* to, const void* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"((u32)__cvta_generic_to_shared(to)),
               "l"(from), "r"(valid ? 8 : 0)
               : "memory");
}
__device__ __forceinline__ void copy_async4(void* to, const void* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"((u32)__cvta_generic_to_shared(to)),
               "l"(from), "r"(valid ? 4 : 0)
               : "memory");
}

__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int LEFT>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// Error at most 2 ulp; subnormals are flushed to zero.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Error at most 1 ulp; subnormals are flushed to zero.
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Access to part of a cache line whose other parts are accessed soon: evict_last keeps the line in L2 while
// streamed data is evicted; with `last` it is evict_first. (The policy applies to a whole warp, hence two
// instructions.)
#define POLICY(kind) "{ .reg .b64 p; createpolicy.fractional.L2::" kind ".b64 p, 1.0; "
#define KEPT(last, access, ...)                                      \
  if (last)                                                          \
    asm volatile(POLICY("evict_first") access ", p; }" __VA_ARGS__); \
  else                                                               \
    asm volatile(POLICY("evict_last") access ", p; }" __VA_ARGS__)
__device__ __forceinline__ u32 load_kept(const u32* p, bool last) {
  u32 v;
  KEPT(last, "ld.global.L2::cache_hint.u32 %0, [%1]", : "=r"(v) : "l"(p));
  return v;
}
__device__ __forceinline__ void store_kept(float* p, float v, bool last) {
  KEPT(last, "st.global.L2::cache_hint.f32 [%0], %1", ::"l"(p), "f"(v) : "memory");
}
