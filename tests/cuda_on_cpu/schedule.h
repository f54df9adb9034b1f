// What kernels and the .cuh files here see of the scheduler, which is schedule.cpp: compiled once, while this
// is precompiled for hundreds of variants of kernels.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <source_location>
#include <string>
#include <vector>

#define SHARED_MEMORY (256 << 10)    // bytes of dynamic shared memory, at least as much as any GPU has
#define SHARED_MEMORY_END (4 << 10)  // bytes after it, which must not be written
#define LARGEST_CLUSTER 2

typedef std::source_location Line;

struct Index {
  unsigned x = 0, y = 0, z = 0;
};
extern Index threadIdx, blockIdx, blockDim, gridDim;

struct Copy {  // a pending copy of bytes, or of zeros
  void* to;
  const void* from;
  unsigned bytes;
  bool has_source;
  void operator()() const { has_source ? memcpy(to, from, bytes) : memset(to, 0, bytes); }
};
struct Pending {                                             // operations of a thread
  std::vector<std::vector<Copy>> copies;                     // by group; the last one is not yet committed
  std::vector<std::vector<std::function<void()>>> products;  // likewise
  std::vector<std::function<void()>> writes;                 // TMA's, to memory
};
extern unsigned current, threads_of_block, blocks_of_cluster;
extern unsigned elected_lane;
extern unsigned char dynamic_shared[LARGEST_CLUSTER][SHARED_MEMORY + SHARED_MEMORY_END];
// Shared memory as TMA and the tensor cores see it: with ordinary stores only after a fence (of any thread of
// the block).
extern unsigned char async_memory[LARGEST_CLUSTER][SHARED_MEMORY + SHARED_MEMORY_END];
extern bool
    stores_need_fences;  // else TMA and the tensor cores see ordinary stores immediately, as the hardware may

Pending& this_thread();
bool& after_pdl_wait();  // of this thread
inline unsigned rank_of_block() { return current / threads_of_block; }
inline unsigned warp_of_cluster() {
  return rank_of_block() * ((threads_of_block + 31) / 32) + threadIdx.x / 32;
}

// Aborts the launch; does not return to a thread that calls it.
void give_up_at(const std::string& why, const Line& line);

// ---- turns
void end_turn_perhaps();
void reached_line(unsigned line);  // where a thread may be delayed
bool runs_at_once();               // whether an operation that is begun now runs now

// ---- barriers of threads
void wait_for_block(const Line& line);
void wait_for_warp(const Line& line);
void wait_for_cluster(const Line& line);
void wait_for_named(unsigned name, unsigned count, const Line& line);

// ---- operations of TMA and cp.async, which complete on mbarriers
void begin_operation(const std::function<void()>& work);
void poison_destination(void* to, size_t bytes);  // of a copy, which must not be read before it is complete
template <class T>
T* async_view(T* p) {
  const size_t at = (const unsigned char*)p - dynamic_shared[0];
  return stores_need_fences && at < sizeof(dynamic_shared) ? (T*)(async_memory[0] + at) : p;
}
void written_by_async(const void* p, size_t bytes);  // bytes written by TMA are visible to everyone
void publish_stores();

// Runs an operation now, or adds it to those that run at the latest when their thread waits for them.
template <class All, class Work>
void run_or_defer(All& later, const Work& work) {
  if (runs_at_once())
    work();
  else
    later.push_back(work);
}

// ---- mbarriers
void init_barrier(void* at, unsigned count, const Line& line);
int phase_now(const void* at, const Line& line);  // of an mbarrier of a block that is running
void arrive(void* at, int bytes, const Line& line);
// `phase`: the phase in which the copy was started.
void complete_bytes(void* at, int bytes, int phase, const Line& line);
void wait_for_phase(void* at, unsigned parity, const Line& line);
bool phase_is_complete(void* at, unsigned parity, const Line& line);

// Null, or why the launch was aborted.
const char* run_grid(unsigned seed, unsigned cluster, unsigned blocks, unsigned blocks_y, unsigned threads,
                     unsigned shared, const std::function<void()>& kernel);
