// The parts of CUDA C++ that the kernels use, on a CPU: one cluster of blocks after another, with threads
// that run one at a time (schedule.h).
#pragma once
#ifndef ONLY_NAMES  // of kernels, in preprocessed text
#include "schedule.h"
#endif

#ifndef __CUDA_ARCH__
#define __CUDA_ARCH__ 900
#define __CUDA_ARCH_FEAT_SM90_ALL
#endif
#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static

#define CALLER Line line = Line::current()

inline void __syncthreads(CALLER) { wait_for_block(line); }
inline void __syncwarp(CALLER) { wait_for_warp(line); }

// The values of all lanes of this warp. There are two buffers, so that late lanes can still read the previous
// call's values.
template <class T>
const T* warp_values(const T& value, const Line& line) {
  static T all[2][LARGEST_CLUSTER * 32][32];
  static unsigned calls[LARGEST_CLUSTER * 32][32];
  const unsigned warp = warp_of_cluster(), lane = threadIdx.x % 32, turn = calls[warp][lane]++ % 2;
  all[turn][warp][lane] = value;
  __syncwarp(line);
  return all[turn][warp];
}
// f of the values of all lanes of the warp.
template <class T, class F>
auto of_lanes(T value, F f, const Line& line) {
  const T* all = warp_values(value, line);
  return f([&](int lane) { return all[lane & 31]; });
}
template <class T>
T of_lane(T value, int lane, const Line& line) {
  return warp_values(value, line)[lane & 31];
}
template <class T>
T __shfl_sync(unsigned, T v, int lane, CALLER) {
  return of_lane(v, lane, line);
}
template <class T>
T __shfl_sync(unsigned, T v, int lane, int width, CALLER) {
  return of_lane(v, threadIdx.x % 32 / width * width + lane % width, line);
}
template <class T>
T __shfl_up_sync(unsigned, T v, int step, CALLER) {
  const int lane = threadIdx.x % 32;
  return of_lane(v, lane >= step ? lane - step : lane, line);
}
template <class T>
T __shfl_down_sync(unsigned, T v, int step, CALLER) {
  const int lane = threadIdx.x % 32;
  return of_lane(v, lane + step < 32 ? lane + step : lane, line);
}
template <class T>
T __shfl_xor_sync(unsigned, T v, int mask, CALLER) {
  return of_lane(v, (int)(threadIdx.x % 32) ^ mask, line);
}
template <class T>
T __reduce_max_sync(unsigned, T v, CALLER) {
  return of_lanes(
      v,
      [=](auto given) {
        T top = v;
        for (int i = 0; i < 32; ++i) top = std::max(top, given(i));
        return top;
      },
      line);
}
template <class T>
T __reduce_min_sync(unsigned, T v, CALLER) {
  return of_lanes(
      v,
      [=](auto given) {
        T low = v;
        for (int i = 0; i < 32; ++i) low = std::min(low, given(i));
        return low;
      },
      line);
}
inline unsigned __ballot_sync(unsigned, bool p, CALLER) {
  return of_lanes((int)p,
                  [](auto given) {
                    unsigned all = 0;
                    for (int i = 0; i < 32; ++i) all |= (unsigned)given(i) << i;
                    return all;
                  },
                  line);
}
inline bool __any_sync(unsigned mask, bool p, CALLER) { return __ballot_sync(mask, p, line) != 0; }
inline int __syncthreads_or(int p, CALLER) {
  static int any;
  __syncthreads(line);
  if (threadIdx.x == 0) any = 0;
  __syncthreads(line);
  if (p) any = 1;
  __syncthreads(line);
  return any;
}
inline int __clz(unsigned v) { return v ? __builtin_clz(v) : 32; }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const unsigned long long bytes = a | (unsigned long long)b << 32;
  unsigned out = 0;
  for (int i = 0; i < 4; ++i) out |= (unsigned)(bytes >> (8 * (selector >> (4 * i) & 7u)) & 0xffu) << (8 * i);
  return out;
}
inline int __ffs(unsigned v) { return __builtin_ffs((int)v); }

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
inline uint2 make_uint2(unsigned a, unsigned b) { return {a, b}; }
inline uint4 make_uint4(unsigned a, unsigned b, unsigned c, unsigned d) { return {a, b, c, d}; }
inline int4 make_int4(int a, int b, int c, int d) { return {a, b, c, d}; }
inline float2 make_float2(float a, float b) { return {a, b}; }
inline float4 make_float4(float a, float b, float c, float d) { return {a, b, c, d}; }
template <class T>
T __ldg(const T* p) {
  return *p;
}
template <class T>
void __stcs(T* p, T v) {
  *p = v;
}
inline unsigned __float_as_uint(float f) {
  unsigned u;
  memcpy(&u, &f, 4);
  return u;
}
inline float __uint_as_float(unsigned u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}
inline double __longlong_as_double(long long u) {
  double f;
  memcpy(&f, &u, 8);
  return f;
}
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
using ::fmaxf;
using ::rintf;
using std::exp;
using std::fabs;
using std::max;
using std::min;

inline int atomicMax(int* p, int v) {
  const int before = *p;
  *p = std::max(before, v);
  return before;
}
inline unsigned atomicOr(unsigned* p, unsigned v) {
  const unsigned before = *p;
  *p |= v;
  return before;
}
inline int atomicAdd(int* p, int v) {
  const int before = *p;
  *p += v;
  return before;
}
