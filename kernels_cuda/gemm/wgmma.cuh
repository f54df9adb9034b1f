// Hopper (sm_90a): tensor maps, TMA tile loads, mbarriers across a thread block cluster, and wgmma products
// of 64 rows by 128 or 256 columns per warpgroup.
#pragma once
#include "bulk.cuh"

// A CUtensorMap of a matrix [rows, bytes per row]. A box arrives with its rows 128 bytes apart and the
// 128-byte swizzle, the layout that `product` requires.
struct __align__(64) TensorMap {
  u64 words[16];
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
__device__ __forceinline__ void cluster_wait() {  // all threads of the cluster
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// The same shared memory address in another thread block of the cluster.
__device__ __forceinline__ At at_of_block(const void* p, u32 block) {
  At remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(p)), "r"(block));
  return remote;
}
// Non-blocking test of a phase (try_wait may suspend the thread).
__device__ __forceinline__ bool barrier_ready_at(At barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done;
}

// Arrives once on a barrier of this or another thread block of the cluster. (Not .release.cluster, which
// would wait for all memory accesses of this thread: the other thread block may overwrite only data that has
// already been read.)
__device__ __forceinline__ void barrier_arrive_at(At barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_arrive_here(u64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Arrives once after all earlier copy_async of this thread have completed.
__device__ __forceinline__ void barrier_arrive_copied(u64* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// TMA load of the box at byte x of row y, zero-filled outside the matrix. `blocks`: multicast mask; each
// selected thread block receives the box at the same address and its barrier counts the transaction bytes.
__device__ __forceinline__ void tile_load(void* to, const TensorMap* map, int x, int y, u64* barrier,
                                          u16 blocks) {
  if (blocks == 1)
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], "
        "[%2];" ::"r"(shared_address(to)),
        "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y)
        : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], "
        "[%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(to)),
        "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "h"(blocks)
        : "memory");
}

// Elects one lane of the warp; the compiler then emits no loop over lanes for single-lane instructions.
__device__ __forceinline__ bool elected() {
  u32 this_one;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(this_one));
  return this_one;
}

// Stores 16 bytes to shared memory of a thread block of the cluster and counts them as transaction bytes on
// that block's barrier.
__device__ __forceinline__ void store_counted_at(At to, int4 v, At barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.s32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
      "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void prefetch_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Matrix descriptor of a tile of rows of 128 bytes, 1024-byte aligned, for `product`; + 2 advances 32 bytes
// along K. (Low word: address / 16, and a leading dimension offset of 1, which swizzled K-major layouts
// ignore. High word, TILE_LAYOUT: groups of eight rows 1024 bytes apart, 128-byte swizzle.)
typedef u32 Tile;
#define TILE_LAYOUT "0x40000040"

__device__ __forceinline__ Tile tile_at(At at) { return at >> 4 | 1u << 16; }

// Sets the register count per thread of this warpgroup; an increase waits until other warpgroups have
// released enough.
template <int COUNT>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most the last LEFT wgmma groups are in flight.
template <int LEFT>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// Follows products_wait: keeps the compiler from moving accesses to the accumulators above it.
template <int COUNT>
__device__ __forceinline__ void products_seen(float (&d)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Named barrier `name` of the thread block, for `count` threads.
__device__ __forceinline__ void named_wait(u32 name, u32 count) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(count) : "memory");
}

// Stores four 8 x 8 matrices of 16-bit values to shared memory: lane 8 m + r passes the address of row r of
// matrix m; each lane provides values 2 (lane % 4) and 2 (lane % 4) + 1 of row lane / 4 of all four.
__device__ __forceinline__ void store_matrices_at(At at, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

__device__ __forceinline__ void store2_at(At at, float2 v) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(v.x), "f"(v.y) : "memory");
}

__device__ __forceinline__ void add_floats(float* to, float4 v) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(v.x), "f"(v.y), "f"(v.z),
               "f"(v.w)
               : "memory");
}
// Atomic addition to global memory; each addition rounds once.
__device__ __forceinline__ void add_floats(float* to, float2 v) {
  asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(v.x), "f"(v.y) : "memory");
}

// Accumulator registers, in the instruction text and as operands.
#define TEXT_64                                                                      \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define TEXT_128                                                                                 \
  TEXT_64                                                                                        \
  ", "                                                                                           \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "             \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "             \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define SUMS_8(i)                                                                             \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define SUMS_32(i) SUMS_8(i), SUMS_8(i + 8), SUMS_8(i + 16), SUMS_8(i + 24)
#define SUMS_64 SUMS_32(0), SUMS_32(32)
#define SUMS_128 SUMS_64, SUMS_32(64), SUMS_32(96)
// Operands after the accumulators: descriptors a and b, and the scale-d predicate `add`, by operand number.
#define PRODUCT_TEXT(shape, a_type, b_type, sums, a, b, add, transposed)                                  \
  "{ .reg .pred p; .reg .b64 a, b; setp.ne.b32 p, " add                                                   \
  ", 0;\n"                                                                                                \
  "mov.b64 a, {" a ", " TILE_LAYOUT "}; mov.b64 b, {" b ", " TILE_LAYOUT                                  \
  "};\n"                                                                                                  \
  "wgmma.mma_async.sync.aligned." shape ".f32." a_type "." b_type " {" sums "}, a, b, p, 1, 1" transposed \
  "; }"

#define PRODUCT(a_type, b_type)                                                             \
  asm volatile(PRODUCT_TEXT("m64n128k32", a_type, b_type, TEXT_64, "%64", "%65", "%66", "") \
               : SUMS_64                                                                    \
               : "r"(a), "r"(b), "r"((int)add))

// d = a b^T, or d += a b^T (add), over 32 FP8 codes of K: 64 rows of a, 128 rows of b. Thread t of the
// warpgroup holds, of rows t / 32 * 16 + t % 32 / 4 and that + 8, columns 8 j + 2 (t % 4) and the next: d[4
// j], d[4 j + 1] and d[4 j + 2], d[4 j + 3]. Asynchronous: valid after products_wait.
template <int A, int B>
__device__ __forceinline__ void product(float (&d)[64], Tile a, Tile b, bool add) {
  if (A == 0 && B == 0) PRODUCT("e4m3", "e4m3");
  if (A == 0 && B == 1) PRODUCT("e4m3", "e5m2");
  if (A == 1 && B == 0) PRODUCT("e5m2", "e4m3");
  if (A == 1 && B == 1) PRODUCT("e5m2", "e5m2");
}

// Matrix descriptor of an MN-major 16-bit operand: pieces of 64 K-rows of 64 values, 128 bytes, 1024-byte
// aligned. The next 64 columns are in the next piece, 8192 bytes later (the descriptor's leading dimension
// offset, between adjacent swizzle atoms; its stride is 1024 bytes, to the next eight K-rows). + 128 advances
// 16 K-rows. In a cluster, address bits above the low 24 hold the block's rank and would corrupt the leading
// dimension: they are masked.
#define PIECE_BYTES 8192
__device__ __forceinline__ Tile tile_mn_major_at(At at) {
  return (at >> 4 & 0x3fffu) | PIECE_BYTES / 16 << 16;
}

#define PRODUCT_16(type, a_mn, b_mn)                                                                       \
  if constexpr (WIDTH == 256)                                                                              \
    asm volatile(                                                                                          \
        PRODUCT_TEXT("m64n256k16", type, type, TEXT_128, "%128", "%129", "%130", ", " a_mn ", " b_mn)      \
        : SUMS_128                                                                                         \
        : "r"(a), "r"(b), "r"((int)add));                                                                  \
  else                                                                                                     \
    asm volatile(PRODUCT_TEXT("m64n128k16", type, type, TEXT_64, "%64", "%65", "%66", ", " a_mn ", " b_mn) \
                 : SUMS_64                                                                                 \
                 : "r"(a), "r"(b), "r"((int)add))

// d = a b^T, or d += a b^T (add), over 16 values of K, of TYPE BF16 or F16: 64 rows of a by WIDTH rows of b,
// 128 or 256. Accumulators as above; with 128 columns the first 64 registers. A_MN, B_MN: the operand is
// MN-major.
template <int WIDTH, int TYPE, bool A_MN, bool B_MN>
__device__ __forceinline__ void product_16(float (&d)[128], Tile a, Tile b, bool add) {
  static_assert(B_MN || !A_MN, "no kernel needs an MN-major first operand alone");
  if constexpr (TYPE == F16) {
    if constexpr (A_MN)
      PRODUCT_16("f16", "1", "1");
    else if constexpr (B_MN)
      PRODUCT_16("f16", "0", "1");
    else
      PRODUCT_16("f16", "0", "0");
  } else {
    if constexpr (A_MN)
      PRODUCT_16("bf16", "1", "1");
    else if constexpr (B_MN)
      PRODUCT_16("bf16", "0", "1");
    else
      PRODUCT_16("bf16", "0", "0");
  }
}
#endif
