// mbarriers and TMA bulk copies between global and shared memory (sm_90 and later). One instruction copies a
// whole row asynchronously. Sizes and addresses must be multiples of 16 bytes.
#pragma once
#include "common.cuh"

#if __CUDA_ARCH__ >= 900
// A phase completes after `arrivals` arrivals and once all expected transaction bytes have arrived.
__device__ __forceinline__ void barrier_init(u64* barrier, u32 arrivals = 1) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives once and adds `bytes` to the expected transaction count of the current phase; any number of loads
// may deliver them.
__device__ __forceinline__ void barrier_expect(u64* barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void bulk_load(void* to, const void* from, u32 bytes, u64* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

__device__ __forceinline__ void barrier_wait_at(At barrier, u32 parity) {
  u32 done = 0;
  while (!done)
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
}
__device__ __forceinline__ void barrier_wait(u64* barrier, u32 parity = 0) {  // parity 0: the first phase
  barrier_wait_at(shared_address(barrier), parity);
}

// L2 cache policy for stores whose data is not read again soon.
__device__ __forceinline__ u64 evict_first() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void bulk_store(void* to, const void* from, u32 bytes, u64 policy) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(to),
               "r"(shared_address(from)), "r"(bytes), "l"(policy)
               : "memory");
}

__device__ __forceinline__ void bulk_store(void* to, const void* from, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(from)), "r"(bytes)
               : "memory");
}

// Adds float32 values from shared memory to global memory; each addition rounds once.
__device__ __forceinline__ void bulk_add_floats(void* to, const void* from, u32 bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(from)), "r"(bytes)
               : "memory");
}

// Waits until the bulk stores have read shared memory, which must happen before the thread block exits.
__device__ __forceinline__ void bulk_finish() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Makes generic-proxy stores to shared memory visible to TMA (the async proxy).
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
#endif
