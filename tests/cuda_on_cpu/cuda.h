// CUDA C++ on a CPU, as far as the kernels use it: block after block, the threads of a block by turns. One
// runs until it waits for others; who is next of those that can go on is chosen at random, so that what a
// barrier is missing for is found sooner or later, and a barrier that not all reach is found at once.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <queue>
#include <random>
#include <vector>

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

struct Index {
  unsigned x = 0, y = 0, z = 0;
};
static Index threadIdx, blockIdx, blockDim, gridDim;

#define STACK (128 << 10)  // bytes

struct Copy {  // of bytes, or zeros, on its way
  void* to;
  const void* from;
  unsigned bytes;
  bool there;
  void operator()() const { there ? memcpy(to, from, bytes) : memset(to, 0, bytes); }
};
struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[STACK]};
  bool done;
  // What TMA has yet to do for it: copies by the group (the last is not yet one), and what they
  // write to memory.
  std::vector<std::vector<Copy>> copies;
  std::vector<std::function<void()>> writes;
};
static std::vector<Thread> threads_of_block;
static ucontext_t between_turns;
static std::function<void()> kernel_of_all;
static unsigned looked_in_vain;
static std::mt19937 lot{std::random_device{}()};

// Who can go on, and who is first: in every other block chosen at random each time, in the others by ranks,
// those of a warp together, so that some warps are as far behind as barriers let them. Who looks in vain
// comes last.
struct Runnable {
  bool by_rank;
  std::vector<unsigned> ranks;
  unsigned long long last;
  std::priority_queue<std::pair<unsigned long long, unsigned>> who;
  void begin(unsigned threads) {
    by_rank = lot() % 2, last = 1ull << 32, who = {};
    ranks.resize(threads);
    unsigned of_warp = 0;
    for (unsigned t = 0; t < threads; ++t) {
      if (t % 32 == 0) of_warp = lot();
      ranks[t] = of_warp >> 8 << 8 | lot() % 256;
    }
  }
  void add(unsigned t) { who.push({(1ull << 32) + (by_rank ? ranks[t] : lot()), t}); }
  void add_last(unsigned t) { who.push({--last, t}); }
  unsigned next() {
    const unsigned t = who.top().second;
    who.pop();
    return t;
  }
};
static Runnable runnable;

static std::map<const void*, std::vector<std::function<void()>>> awaited;  // by the barrier that it is for
inline Thread& this_thread() { return threads_of_block[threadIdx.x]; }

inline void give_up(const char* why) {
  fprintf(stderr, "block (%u, %u): thread %u %s\n", blockIdx.x, blockIdx.y, threadIdx.x, why);
  abort();
}

// What TMA does, at once or as late as it may: between them lies all that it could do.
template <class All, class Work>
void sooner_or_later(All& later, const Work& work) {
  if (lot() % 2)
    work();
  else
    later.push_back(work);
}

// Let others go on; `runnable` says whether and when this one may.
inline void end_turn() { swapcontext(&this_thread().context, &between_turns); }

struct Meeting {  // of so many threads, again and again
  unsigned members;
  std::vector<unsigned> there;
  void leave_if_all() {
    if (there.size() < members) return;
    for (unsigned t : there) runnable.add(t);
    there.clear();
  }
  void wait() {
    there.push_back(threadIdx.x);
    leave_if_all();
    end_turn();
  }
  void quit() {
    --members;
    leave_if_all();
  }
};
static Meeting of_block;
static std::vector<Meeting> of_warp;
static std::map<unsigned, Meeting> named;  // by name and count
static unsigned long long exchanged[32][32];

inline void __syncthreads() { of_block.wait(); }
inline void __syncwarp() { of_warp[threadIdx.x / 32].wait(); }

// For who looks again and again; that nothing comes of it for so long is no accident.
inline void let_others() {
  if (++looked_in_vain > 1000000) give_up("waits for ever");
  runnable.add_last(threadIdx.x);
  end_turn();
}

// f of what all lanes of the warp give.
template <class T, class F>
auto of_lanes(T value, F f) {
  unsigned long long (&all)[32] = exchanged[threadIdx.x / 32];
  unsigned long long bits = 0;
  memcpy(&bits, &value, sizeof(T));
  all[threadIdx.x % 32] = bits;
  __syncwarp();
  const auto found = f([&](int lane) {
    T theirs;
    memcpy(&theirs, &all[lane & 31], sizeof(T));
    return theirs;
  });
  __syncwarp();
  return found;
}
template <class T>
T of_lane(T value, int lane) {
  return of_lanes(value, [=](auto given) { return given(lane); });
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
  return of_lanes(v, [=](auto given) {
    T top = v;
    for (int i = 0; i < 32; ++i) top = std::max(top, given(i));
    return top;
  });
}
template <class T>
T __reduce_min_sync(unsigned, T v) {
  return of_lanes(v, [=](auto given) {
    T low = v;
    for (int i = 0; i < 32; ++i) low = std::min(low, given(i));
    return low;
  });
}
inline unsigned __ballot_sync(unsigned, bool p) {
  return of_lanes((int)p, [](auto given) {
    unsigned all = 0;
    for (int i = 0; i < 32; ++i) all |= (unsigned)given(i) << i;
    return all;
  });
}
inline bool __any_sync(unsigned mask, bool p) { return __ballot_sync(mask, p) != 0; }
inline int __syncthreads_or(int p) {
  static int any;
  __syncthreads();
  if (threadIdx.x == 0) any = 0;
  __syncthreads();
  if (p) any = 1;
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

inline void run_thread() {
  kernel_of_all();
  if (!this_thread().writes.empty()) give_up("ends before what it writes has been read");
  this_thread().done = true;
  of_warp[threadIdx.x / 32].quit();
  of_block.quit();
  setcontext(&between_turns);
}

inline void run_block(unsigned threads) {
  of_block = {threads, {}};
  of_warp.clear();
  named.clear();
  awaited.clear();
  looked_in_vain = 0;
  runnable.begin(threads);
  for (unsigned first = 0; first < threads; first += 32)
    of_warp.push_back({std::min(32u, threads - first), {}});
  for (unsigned t = 0; t < threads; ++t) {
    Thread& thread = threads_of_block[t];
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.get();
    thread.context.uc_stack.ss_size = STACK;
    makecontext(&thread.context, run_thread, 0);
    thread.done = false;
    thread.copies.assign(1, {});
    runnable.add(t);
  }
  while (!runnable.who.empty()) {
    threadIdx = {runnable.next(), 0, 0};
    swapcontext(&between_turns, &this_thread().context);
  }
  for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x)
    if (!this_thread().done) give_up("waits for ever");
}

template <class Kernel>
void run_grid(unsigned blocks, unsigned blocks_y, unsigned threads, Kernel kernel) {
  gridDim = {blocks, blocks_y, 1};
  blockDim = {threads, 1, 1};
  if (threads_of_block.size() < threads) threads_of_block.resize(threads);
  kernel_of_all = kernel;
  for (unsigned y = 0; y < blocks_y; ++y)
    for (unsigned x = 0; x < blocks; ++x) {
      blockIdx = {x, y, 0};
      run_block(threads);
    }
}
