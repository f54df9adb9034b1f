// Grouped GEMM of 16-bit operands on Hopper's tensor cores (sm_90a), forward and data gradient. Empty for
// other architectures.
#ifndef KIND
#define KIND BF16     // of operands and result, or F16
#define TRANSPOSED 0  // 1: w is [experts, depth, width]
#define ADDEND 0      // 1: the result is added to another array, of bfloat16
#endif
#include "wgmma16_pipeline.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// out[r, n] = sum over k of x[r, k] w[e, n, k] (or w[e, k, n]), where e is the expert of row r; zeros for
// rows of no expert. ADDEND: addend[r, n] + that sum, rounded once. bias [experts, width], float32, of the
// row's expert is added before rounding; null: none.
// Arguments: x [rows, depth]; w [experts * width, depth] or (TRANSPOSED) [experts * depth, width]; out [rows,
//   width] of x's dtype; offsets null: one expert has all rows; addend [rows, width], with ADDEND.
// Requires: width and depth multiples of 8; any offsets.
// Launch: one persistent thread block of 384 per SM, a multiple of CLUSTER in total.
extern "C" __global__ void __launch_bounds__(384, 1) __cluster_dims__(CLUSTER, 1, 1)
    grouped_gemm_tiles_16(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map,
                          const int* offsets, i64 experts, i64 rows, i64 width, i64 depth, u16* out,
                          const u16* addend, const float* bias, int* counter) {
  pdl_wait();
  DYNAMIC_SHARED_TILES(memory);
  const u32 t = threadIdx.x;
  const u32 group = __shfl_sync(0xffffffffu, t / 128, 0);  // makes it warp-uniform for the compiler
  // one thread of the cluster claims its tiles
  int taken = t / 32 == CONSUMER_THREADS / 32 && elected() && cluster_rank() == 0 ? atomicAdd(counter, 1) : 0;
  const int steps = (int)((depth + STEP - 1) / STEP);
  const int wide = (int)((width + COLUMNS - 1) / COLUMNS);
  const Shared s = begin(memory, offsets, (int)experts, rows,
                         [&](int count) { return units_of(blocks_of_128(count), wide); });
  Work work(s.first[experts]);
  Order order;
  Turn turn;
  u32 phase = 0;  // parity of the staged tile
  if (group == 2) {
    fewer_registers<56>();
    const u32 warp = __shfl_sync(0xffffffffu, t / 32 % 4, 0);
    if (warp == 0) {
      const u32 rank = cluster_rank();
      const bool leads = elected(), takes = leads && rank == 0;
      // with an addend, which is read once, all columns of its rows at about the same time: 0 to 5 % faster
      const int height = ADDEND ? 1 : max(IN_L2 / (CLUSTER * ROWS) / (int)(2 * depth), 1);
      auto pass_on = [&](u32 ahead) {
        int e = ahead == 0 ? 0 : order.expert(s);
        const Location at = find_rows(s, work, taken, (int)experts, wide, height, &e);
        order.pass_on(s, ahead, [&](u32 block) -> WorkTile {
          return {taken, e, s.offsets[e] + at.row_of(block) * ROWS,
                  at.column_of(block) * COLUMNS + work.half(taken) * (COLUMNS / 2) + at.below};
        });
      };
      if (leads) {
        prefetch_map(&x_map);
        prefetch_map(&w_map);
        order.expect(s, 0);
      }
      if (takes) pass_on(0);
      for (WorkTile tile; (tile = order.tile(s)).number < work.all; order.done(s)) {
        if (!leads) continue;
        order.expect(s, 1);
        if (takes) taken = atomicAdd(counter, 1);  // its latency is hidden by the first K-steps' loads
        const int w_line = tile.column() >= width ? -1
                           : TRANSPOSED           ? tile.column()
                                                  : tile.expert * (int)width + tile.column();
        const int w_along = TRANSPOSED ? tile.expert * (int)depth : 0;
        for (int k = 0;; ++k, turn.next()) {
          if (takes && k == min(steps, STAGES)) pass_on(1);
          if (k == steps) break;
          fetch_step<false, TRANSPOSED>(s, turn, &x_map, &w_map, rank, tile.below(), work.halves(tile.number),
                                        k * STEP, w_along + k * STEP, tile.row, w_line);
        }
      }
    } else if (warp >= 2) {
      // rows of no expert
      const i64 vectors = width / 8, head = s.offsets[0] * vectors, tail = s.offsets[experts] * vectors;
      for (i64 i = blockIdx.x * WRITERS + t % WRITERS; i < head + rows * vectors - tail;
           i += gridDim.x * WRITERS)
        ((uint4*)out)[i < head ? i : i - head + tail] = make_uint4(0u, 0u, 0u, 0u);
      for (WorkTile tile; (tile = order.tile(s)).number < work.all; order.done(s)) {
        const int last_row = s.offsets[tile.expert + 1];
#pragma unroll 1
        for (u32 part = 0; ADDEND && part < PARTS; ++part)
          load_rows(s, part, last_row - tile.row - 64 * (int)part, 2 * ((int)width - tile.column()),
                    (int)work.halves(tile.number) * COLUMNS,
                    (const u8*)(addend + (tile.row + 64 * part) * width + tile.column()), 2 * width);
#pragma unroll 1
        for (u32 part = 0; part < PARTS; ++part)
          write_rows(s, part, last_row - tile.row - 64 * (int)part, 2 * ((int)width - tile.column()),
                     (int)work.halves(tile.number) * COLUMNS,
                     (u8*)(out + (tile.row + 64 * part) * width + tile.column()), 2 * width, phase);
      }
    }
  } else {
    more_registers<224>();
    const int last = (int)depth - (steps - 1) * STEP;
    for (WorkTile tile; (tile = order.tile(s)).number < work.all; order.done(s)) {
      float d[128];
      const float* own = bias ? bias + tile.expert * width + tile.column() + t % 4 * 2 : nullptr;
      const int last_column = (int)width - 8 - tile.column();
      if (work.halves(tile.number) == 2) {
        multiply<256, false, TRANSPOSED>(s, turn, group, steps, last, d);
        hand_over_16<256, KIND>(s, d, group, phase, own, last_column);
      } else {
        multiply<128, false, TRANSPOSED>(s, turn, group, steps, last, d);
        hand_over_16<128, KIND>(s, d, group, phase, own, last_column);
      }
    }
  }
  end();
}
#endif
