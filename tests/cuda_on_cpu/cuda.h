// CUDA C++ on a CPU, as far as the kernels use it: a thread for every thread of a block, block after block.
#pragma once
#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#define __CUDA_ARCH__ 900
#define __CUDA_ARCH_FEAT_SM90_ALL
#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static

struct Index {
  unsigned x = 0, y = 0, z = 0;
};
static thread_local Index threadIdx, blockIdx;
static Index blockDim, gridDim;
static std::unique_ptr<std::barrier<>> of_block;
static std::vector<std::unique_ptr<std::barrier<>>> of_warp;
static unsigned long long exchanged[32][32];

inline void __syncthreads() { of_block->arrive_and_wait(); }
inline void __syncwarp() { of_warp[threadIdx.x / 32]->arrive_and_wait(); }

template <class T>
T of_lane(T value, int lane) {
  const int warp = threadIdx.x / 32;
  unsigned long long bits = 0;
  memcpy(&bits, &value, sizeof(T));
  exchanged[warp][threadIdx.x % 32] = bits;
  __syncwarp();
  bits = exchanged[warp][lane & 31];
  __syncwarp();
  memcpy(&value, &bits, sizeof(T));
  return value;
}
template <class T>
T __shfl_sync(unsigned, T v, int lane) {
  return of_lane(v, lane);
}
template <class T>
T __shfl_up_sync(unsigned, T v, int step) {
  const int lane = threadIdx.x % 32;
  return of_lane(v, lane >= step ? lane - step : lane);
}
template <class T>
T __shfl_down_sync(unsigned, T v, int step) {
  const int lane = threadIdx.x % 32;
  return of_lane(v, lane + step < 32 ? lane + step : lane);
}
template <class T>
T __shfl_xor_sync(unsigned, T v, int mask) {
  return of_lane(v, (int)(threadIdx.x % 32) ^ mask);
}
template <class T>
T __reduce_max_sync(unsigned, T v) {
  T top = v;
  for (int i = 0; i < 32; ++i) top = std::max(top, of_lane(v, i));
  return top;
}
template <class T>
T __reduce_min_sync(unsigned, T v) {
  T low = v;
  for (int i = 0; i < 32; ++i) low = std::min(low, of_lane(v, i));
  return low;
}
inline unsigned __ballot_sync(unsigned, bool p) {
  unsigned all = 0;
  for (int i = 0; i < 32; ++i) all |= (unsigned)of_lane((int)p, i) << i;
  return all;
}
inline bool __any_sync(unsigned mask, bool p) { return __ballot_sync(mask, p) != 0; }
inline int __syncthreads_or(int p) {
  static int any;
  __syncthreads();
  if (threadIdx.x == 0) any = 0;
  __syncthreads();
  if (p) __atomic_store_n(&any, 1, __ATOMIC_SEQ_CST);
  __syncthreads();
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

struct uint2 {
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
inline float2 make_float2(float a, float b) { return {a, b}; }
inline float4 make_float4(float a, float b, float c, float d) { return {a, b, c, d}; }
template <class T>
T __ldcs(const T* p) {
  return *p;
}
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
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
using ::fmaxf;
using ::rintf;
using std::exp;
using std::fabs;
using std::max;
using std::min;

static std::mutex at_once;
inline int atomicMax(int* p, int v) {
  std::lock_guard<std::mutex> hold(at_once);
  const int before = *p;
  *p = std::max(before, v);
  return before;
}

inline unsigned atomicOr(unsigned* p, unsigned v) { return __atomic_fetch_or(p, v, __ATOMIC_SEQ_CST); }
inline int atomicAdd(int* p, int v) { return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST); }

// The blocks one after the other; their threads are made once, which takes longer than a small block.
template <class Kernel>
void run_grid(unsigned blocks, unsigned blocks_y, unsigned threads, Kernel kernel) {
  gridDim = {blocks, blocks_y, 1};
  blockDim = {threads, 1, 1};
  auto begin = [=]() noexcept {
    of_block = std::make_unique<std::barrier<>>(threads);
    of_warp.clear();
    for (unsigned w = 0; w < (threads + 31) / 32; ++w)
      of_warp.push_back(std::make_unique<std::barrier<>>(std::min(32u, threads - 32 * w)));
  };
  std::barrier between(threads, begin);
  begin();
  std::vector<std::thread> all;
  for (unsigned t = 0; t < threads; ++t)
    all.emplace_back([=, &between] {
      threadIdx = {t, 0, 0};
      for (unsigned y = 0; y < blocks_y; ++y)
        for (unsigned x = 0; x < blocks; ++x) {
          blockIdx = {x, y, 0};
          kernel();
          of_warp[t / 32]->arrive_and_drop();
          of_block->arrive_and_drop();
          between.arrive_and_wait();
        }
    });
  for (auto& t : all) t.join();
}
