// Grouped GEMM of 16-bit operands on Hopper's tensor cores (sm_90a), forward and data gradient; elsewhere
// this file is empty.
#ifndef KIND
#define KIND BF16     // of operands and result, or F16
#define TRANSPOSED 0  // 1: w is [experts, depth, width]
#endif
#include "wgmma16_pipeline.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// What: out[r, n] = sum over k of x[r, k] w[e, n, k] (or w[e, k, n]), e the expert of row r; zeros where r
//   has none.
//   x [rows, depth]; w [experts * width, depth] or [experts * depth, width]; out [rows, width], of x's dtype;
//   real [experts], or null for all: how many rows of an expert are no padding. Padding is zeros in x, and so
//   it is in out.
// Shapes: width and depth multiples of 8; any offsets.
// Launch: a block of 384 threads a multiprocessor, a multiple of CLUSTER.
extern "C" __global__ void __launch_bounds__(384, 1) __cluster_dims__(CLUSTER, 1, 1)
    grouped_gemm_tiles_16(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map,
                          const int* offsets, i64 experts, i64 rows, i64 width, i64 depth, u16* out,
                          const int* real, int* counter) {
  pdl_wait();
  DYNAMIC_SHARED_TILES(memory);
  const u32 t = threadIdx.x;
  const u32 group = __shfl_sync(0xffffffffu, t / 128, 0);  // so that the compiler knows it is a warp's
  const u32 rank = CLUSTER > 1 ? cluster_rank() : 0;
  const bool leads = elected();                                         // of its warp
  const bool takes = leads && rank == 0 && t / 32 == MULTIPLIERS / 32;  // the cluster's tiles
  int taken = takes ? atomicAdd(counter, 1) : 0;
  const int steps = (int)((depth + STEP - 1) / STEP);
  const int wide = (int)((width + COLUMNS - 1) / COLUMNS);
  const Shared s = begin(memory, offsets, (int)experts, rows,
                         [&](int count) { return units_of(blocks_of_128(count), wide); });
  Work work(s.first[experts]);
  Order order;
  Turn turn;
  u32 phase = 0;  // of the tile in shared memory
  if (group == 2) {
    fewer_registers<56>();
    const int height = max(IN_L2 / (CLUSTER * ROWS) / (int)(2 * depth), 1);
    int e, first_row, last_row, first_column;
    bool below, last_of_expert;
    auto find = [&](int tile, u32 rank) {
      work.take(tile);
      e = last_at_most(s.first, (int)experts, work.unit);
      const int high = blocks_of_128(s.offsets[e + 1] - s.offsets[e]);
      below = find_tile(work.unit - s.first[e], high, wide, height, rank, &first_row, &first_column);
      last_of_expert = first_row + 1 == high;
      first_row = s.offsets[e] + first_row * ROWS;
      last_row = s.offsets[e + 1];
      first_column = first_column * COLUMNS + 2 * (int)work.first;
    };
    auto tile_of = [&](u32 block) {  // of a block of the cluster, as `work` takes it
      if (taken >= work.whole) return taken;
      find(taken, block);
      return last_of_expert && last_is_half(s, real, e) ? ~taken : taken;
    };
    const u32 warp = __shfl_sync(0xffffffffu, t / 32 % 4, 0);
    if (warp == 0) {
      if (leads) {
        prefetch_map(&x_map);
        prefetch_map(&w_map);
        order.expect(s, 0);
      }
      if (takes) order.pass_on(s, 0, tile_of);
      for (int tile; (tile = order.tile(s)) < work.all; order.done(s)) {
        if (leads) order.expect(s, 1);
        if (takes) taken = atomicAdd(counter, 1);  // it is there long before the end of the tile
        find(tile, rank);
        e = uniform(e), first_row = uniform(first_row), first_column = uniform(first_column);
        const int w_line = first_column >= width ? -1
                           : TRANSPOSED          ? first_column
                                                 : e * (int)width + first_column;
        const int w_along = TRANSPOSED ? e * (int)depth : 0;
        for (int k = 0; k < steps; ++k, turn.next()) {
          fetch_step<false, TRANSPOSED>(s, turn, &x_map, &w_map, leads, rank, below, tile < 0 ? 1 : 2,
                                        tile < 0 ? 2 : work.halves, k * STEP, w_along + k * STEP, first_row,
                                        w_line);
        }
        if (takes) order.pass_on(s, 1, tile_of);
      }
    } else if (warp >= 2) {
      // rows of no expert
      const i64 vectors = width / 8, head = s.offsets[0] * vectors, tail = s.offsets[experts] * vectors;
      for (i64 i = blockIdx.x * WRITERS + t % WRITERS; i < head + rows * vectors - tail;
           i += gridDim.x * WRITERS)
        ((uint4*)out)[i < head ? i : i - head + tail] = make_uint4(0u, 0u, 0u, 0u);
      for (int tile; (tile = order.tile(s)) < work.all; order.done(s)) {
        find(tile, rank);
        u16* to = out + first_row * width + first_column;
        const int count = min(last_row - first_row, ROWS), left = (int)width - first_column;
        // of a half tile the parts lie side by side
        const int down = tile < 0 ? 0 : 64, aside = tile < 0 ? COLUMNS / 2 : 0;
#pragma unroll 1
        for (int part = 0; part < PARTS; ++part)
          write_rows(s, part, count - part * down, 2 * (left - part * aside), (int)work.halves * COLUMNS,
                     (u8*)(to + part * (down * width + aside)), 2 * width, phase);
        if (tile < 0 && left > 0) write_zeros(to, width, 64, count, min(left, COLUMNS));  // padding
      }
    }
  } else {
    more_registers<224>();
    const int last = (int)depth - (steps - 1) * STEP;
    for (int tile; (tile = order.tile(s)) < work.all; order.done(s)) {
      float d[128];
      work.take(tile);
      if (work.halves == 2) {
        multiply<256, false, TRANSPOSED>(s, turn, group, 0, steps, last, d);
        hand_over_16<256, KIND>(s, d, group, phase);
      } else {
        multiply<128, false, TRANSPOSED>(s, turn, tile < 0 ? 0 : group, tile < 0 ? 2 * group : 0, steps, last,
                                         d);
        hand_over_16<128, KIND>(s, d, group, phase);
      }
    }
  }
  end();
}
#endif
