// kernels_cuda/bulk.cuh in C++; schedule.h decides when copies run.
#pragma once
#include "common.cuh"

inline void barrier_init(u64* barrier, u32 arrivals = 1, CALLER) { init_barrier(barrier, arrivals, line); }
inline void barrier_expect(u64* barrier, u32 bytes, CALLER) {
  arrive(barrier, (int)bytes, line);
  reached_line(line.line());
  end_turn_perhaps();
}
// A copy of `bytes` bytes to `to`, executed by `work` and counted by an mbarrier.
template <class Work>
void counted_copy(void* to, u32 bytes, u64* barrier, const Line& line, const Work& work) {
  const int phase = phase_now(barrier, line);
  poison_destination(to, bytes);
  written_by_async(to, bytes);
  begin_operation([=] {
    work();
    written_by_async(to, bytes);
    complete_bytes(barrier, (int)bytes, phase, line);
  });
}
inline void check_multiples_of_16(const void* to, const void* from, u32 bytes, const Line& line) {
  if (((size_t)to | (size_t)from | bytes) & 15)
    give_up_at("copies a size or address that is no multiple of 16 bytes", line);
}
inline void bulk_load(void* to, const void* from, u32 bytes, u64* barrier, CALLER) {
  check_multiples_of_16(to, from, bytes, line);
  counted_copy(to, bytes, barrier, line, [=] { memcpy(to, from, bytes); });
  end_turn_perhaps();
}
inline void barrier_wait(u64* barrier, u32 parity = 0, CALLER) { wait_for_phase(barrier, parity, line); }
inline void bulk_store(void* to, const void* from, u32 bytes, u64 = 0, CALLER) {
  check_multiples_of_16(to, from, bytes, line);
  run_or_defer(this_thread().writes, [=] { memcpy(to, async_view(from), bytes); });
}
inline void bulk_add_floats(void* to, const void* from, u32 bytes, CALLER) {
  check_multiples_of_16(to, from, bytes, line);
  run_or_defer(this_thread().writes, [=] {
    const float* values = (const float*)async_view(from);
    for (u32 i = 0; i < bytes / 4; ++i) ((float*)to)[i] += values[i];
  });
}
inline u64 evict_first() { return 0; }
inline void bulk_finish() {
  end_turn_perhaps();
  for (const auto& write : this_thread().writes) write();
  this_thread().writes.clear();
}
inline void fence_async() { publish_stores(); }
