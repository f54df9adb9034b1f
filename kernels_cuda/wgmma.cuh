// Tensor cores and tiled copies of Hopper (sm_90a): tensor maps, barriers between blocks of a cluster, and
// matrix products of 64 rows by 128 columns that a warpgroup, four warps, makes together.
#pragma once
#include "bulk.cuh"

// cuTensorMapEncodeTiled's, of a matrix of codes [rows, bytes a row]; a box of it comes with its rows 128
// bytes apart and their 16-byte pieces swizzled, as `product` wants them.
struct __align__(64) TensorMap {
  u64 words[16];
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
__device__ __forceinline__ void cluster_wait() {  // for all threads of all blocks of the cluster
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// An address in shared memory of another block of the cluster, where the same things lie.
__device__ __forceinline__ At at_of_block(const void* p, u32 block) {
  At there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(p)), "r"(block));
  return there;
}
// A look that never waits, as try_wait may.
__device__ __forceinline__ bool barrier_ready_at(At barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done;
}

// One arrival, here or at a barrier of another block. (With the scope of a cluster it would wait for all this
// thread's memory accesses; what it lets the other block overwrite has been read.)
__device__ __forceinline__ void barrier_arrive_at(At barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_arrive_here(u64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// One arrival, when this thread's copy_async so far are done.
__device__ __forceinline__ void barrier_arrive_copied(u64* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// The box at byte x of row y; what lies outside of the matrix is zeros. `blocks`: a bit for each block of the
// cluster that gets it, at the same address, and whose barrier counts its bytes.
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

__device__ __forceinline__ void prefetch_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// A tile of rows of 128 bytes, at a multiple of 1024 bytes, as `product` takes it; 32 bytes further along the
// rows: + 2. (The lower half of PTX's matrix descriptor: address / 16, and 1 for the leading dimension, which
// the swizzle makes no use of. The upper half says that groups of eight rows lie 1024 bytes apart, and the
// swizzle of 128 bytes.)
typedef u32 Tile;
#define TILE_LAYOUT "0x40000040"

__device__ __forceinline__ Tile tile_at(At at) { return at >> 4 | 1u << 16; }

// Registers of a thread of this warpgroup from here on; those that others give away are there to be had.
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
// Until all but the last LEFT groups are done.
template <int LEFT>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// Behind products_wait: until here the compiler may not touch these.
__device__ __forceinline__ void products_seen(float (&d)[64]) {
#pragma unroll
  for (int i = 0; i < 64; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Barrier `name` of the block, for `count` threads.
__device__ __forceinline__ void named_wait(u32 name, u32 count) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(count) : "memory");
}

// Four matrices of 8 x 8 halves to shared memory: lane 8 m + r has the address of row r of matrix m, and each
// lane the halves 2 (lane % 4) and the next of row lane / 4 of all four.
__device__ __forceinline__ void store_matrices_at(At at, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

// Added to what is there: a rounding each.
__device__ __forceinline__ void add_floats(float* to, float2 v) {
  asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(v.x), "f"(v.y) : "memory");
}

#define PRODUCT(a_type, b_type)                                                                         \
  asm volatile(                                                                                         \
      "{ .reg .pred p; .reg .b64 a, b; setp.ne.b32 p, %66, 0;\n"                                        \
      "mov.b64 a, {%64, " TILE_LAYOUT "}; mov.b64 b, {%65, " TILE_LAYOUT                                \
      "};\n"                                                                                            \
      "wgmma.mma_async.sync.aligned.m64n128k32.f32." a_type "." b_type                                  \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                        \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "               \
      "a, b, p, 1, 1; }"                                                                                \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),        \
        "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),      \
        "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),      \
        "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),      \
        "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]),      \
        "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]),      \
        "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),      \
        "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])       \
      : "r"(a), "r"(b), "r"((int)add))

// d (+)= a b^T over 32 codes of each row: 64 rows of a, 128 of b. Thread t of the warpgroup has, of row
// t / 32 * 16 + t % 32 / 4 and of the row 8 below it, columns 8 j + 2 (t % 4) and the next:
// d[4 j], d[4 j + 1] and d[4 j + 2], d[4 j + 3]. The products are there after products_wait.
template <int A, int B>
__device__ __forceinline__ void product(float (&d)[64], Tile a, Tile b, bool add) {
  if (A == 0 && B == 0) PRODUCT("e4m3", "e4m3");
  if (A == 0 && B == 1) PRODUCT("e4m3", "e5m2");
  if (A == 1 && B == 0) PRODUCT("e5m2", "e4m3");
  if (A == 1 && B == 1) PRODUCT("e5m2", "e5m2");
}
#endif
