// Rows of the first operand of an FP8 grouped GEMM on Hopper's tensor cores (sm_90a), gathered from anywhere
// in a matrix, so that permuted rows need not be written and read back. On top of wgmma_pipeline.cuh; empty
// for other architectures.
//
// A fourth warpgroup copies them with cp.async, 16 bytes per lane; TMA loads only adjacent rows, and one TMA
// copy per row takes 60 cycles. 16,384 tokens of 2048 columns, 8 of 128 experts, 1536 columns: permute and
// GEMM 893 us, the GEMM of permuted rows 791 us, this one 808 us; gathered by one warp it takes 1375 us. A
// copy reads its address registers only when it leaves the queue after the tensor cores' accesses to shared
// memory. So each lane has eight addresses of its own, which it increments every four K-steps: with addresses
// computed for each copy, which the compiler kept in two registers, 876 us.
//
// cp.async writes through the generic proxy, wgmma reads through the async proxy: a relaying warp waits for
// the copies of a K-step, executes the fence between them, and arrives for the consumers.
#pragma once
#include "wgmma_pipeline.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Called by one of the four gathering warps for a tile: 32 of its rows, or none of them if not `used`.
// source(i): row of x [rows, depth] that is row i of the tile, or -1 for zeros. scales(k): copies scales of
// K-step k.
template <class Source, class Scales>
__device__ __forceinline__ void gather_tile(const Shared& s, Turn& turn, u32 warp, bool used, const u8* x,
                                            i64 depth, const Source& source, const Scales& scales) {
  // a lane's piece of 16 bytes, and its first row; the others are four apart
  const u32 piece = threadIdx.x % 8, row = threadIdx.x % 32 / 8;
  const At first = at_of(s.operands) + (32 * warp + row) * STEP_BYTES;
  const u32 even = (piece ^ row) * 16, odd = (piece ^ row ^ 4) * 16;  // swizzled
  const u8* from[8];
  u32 valid = 0;
#pragma unroll
  for (u32 i = 0; i < 8; ++i) {
    const int token = source(32 * warp + row + 4 * i);
    from[i] = x + max(token, 0) * depth + piece * 16;
    valid |= (u32)(token >= 0) << i;
  }
  const bool all_valid = !__any_sync(0xffffffffu, valid != 0xffu);
  const int steps = (int)((depth + STEP - 1) / STEP);
#pragma unroll 1
  for (int k = 0; k < steps; k += 4) {
#pragma unroll
    for (int j = 0; j < 4 && k + j < steps; ++j, turn.next()) {
      barrier_wait(&s.empty[turn.stage], turn.phase ^ 1u);
      const i64 left = depth - (i64)(k + j) * STEP;
      auto copy = [&](u32 rows) {
#pragma unroll
        for (u32 i = 0; i < 8; ++i)
          copy_async16_at(first + turn.stage * STAGE_BYTES + 4 * i * STEP_BYTES + (i % 2 ? odd : even),
                          from[i] + j * STEP, rows >> i & 1u);
      };
      if (used && all_valid && left >= STEP)
        copy(0xffu);
      else if (used)
        copy(piece * 16 < left ? valid : 0u);
      scales(k + j);
      barrier_arrive_copied(&s.gathered[turn.stage]);
    }
#pragma unroll
    for (u32 i = 0; i < 8; ++i) from[i] += 4 * STEP;
  }
}

// The relaying warp: publishes gathered rows and scales to the async proxy.
__device__ __forceinline__ void relay(const Shared& s, Order& order, Turn& turn, const Work& work,
                                      int steps) {
  for (; order.tile(s).number < work.all; order.done(s))
    for (int k = 0; k < steps; ++k, turn.next()) {
      barrier_wait(&s.gathered[turn.stage], turn.phase);
      fence_async();
      __syncwarp();
      if (threadIdx.x % 32 == 0) barrier_arrive_here(&s.full[turn.stage]);
    }
}
#endif
