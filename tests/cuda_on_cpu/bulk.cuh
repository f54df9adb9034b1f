// What kernels_cuda/bulk.cuh does, in C++: what comes in arrives at once or when somebody waits for its
// barrier, which counts its bytes, and what goes out is read at once or when its thread waits for that.
#pragma once
#include "common.cuh"

struct Barrier {  // in the eight bytes of an mbarrier
  int pending;    // bytes announced that have not come
  u8 arrivals, left, phase, unused;
};

inline void settle(Barrier* b) {
  if (b->left == 0 && b->pending == 0) b->left = b->arrivals, b->phase ^= 1, looked_in_vain = 0;
}
inline void barrier_init(u64* barrier, u32 arrivals = 1) {
  *(Barrier*)barrier = {0, (u8)arrivals, (u8)arrivals, 0, 0};
}
inline void barrier_expect(u64* barrier, u32 bytes) {
  Barrier* b = (Barrier*)barrier;
  b->pending += (int)bytes;
  b->left--;
  settle(b);
}
inline void bytes_came(u64* barrier, u32 bytes) {
  ((Barrier*)barrier)->pending -= (int)bytes;
  settle((Barrier*)barrier);
}
inline void bulk_load(void* to, const void* from, u32 bytes, u64* barrier) {
  if (((size_t)to | (size_t)from | bytes) & 15) abort();  // TMA would
  sooner_or_later(awaited[barrier], [=] {
    memcpy(to, from, bytes);
    bytes_came(barrier, bytes);
  });
}
inline void barrier_wait(u64* barrier, u32 parity = 0) {
  while ((u32)((Barrier*)barrier)->phase == parity) {
    auto& coming = awaited[barrier];
    if (coming.empty()) {
      let_others();
      continue;
    }
    const auto arrive = coming.front();
    coming.erase(coming.begin());
    arrive();
  }
}
inline void bulk_store(void* to, const void* from, u32 bytes, u64 = 0) {
  if (((size_t)to | (size_t)from | bytes) & 15) abort();
  sooner_or_later(this_thread().writes, [=] { memcpy(to, from, bytes); });
}
inline void bulk_add_floats(void* to, const void* from, u32 bytes) {
  if (((size_t)to | (size_t)from | bytes) & 15) abort();
  sooner_or_later(this_thread().writes, [=] {
    for (u32 i = 0; i < bytes / 4; ++i) ((float*)to)[i] += ((const float*)from)[i];
  });
}
inline u64 evict_first() { return 0; }
inline void bulk_finish() {
  for (const auto& write : this_thread().writes) write();
  this_thread().writes.clear();
}
inline void fence_async() {}
