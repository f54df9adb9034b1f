// Grouped GEMM of FP8 operands on Hopper's tensor cores (sm_90a), forward and data gradient. Empty for other
// architectures.
#ifndef A_FMT
#define A_FMT 0  // of x
#define B_FMT 0  // of w
#endif
#include "wgmma_gather.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// out[r, n] = sum over k of x[r, k] w[e, n, k], where e is the expert of row r; zeros for rows of no expert.
// Arguments: x row-wise codes [rows, depth], x_scales[r * row_stride + block * column_stride]; w codes
//   [experts * width, depth], w_scales [experts, ceil(width / 128), ceil(depth / 128)]; out bfloat16 [rows,
//   width]; real [experts]: rows of an expert without padding, or null for all. Padding rows of x must be
//   zeros; those of out become zeros.
// With BIAS, `bias` [experts, width] is added: the accumulators begin with it. Padding rows of out become it,
//   or zeros.
// With GATHER, x has `tokens` rows: out[r, n] = sum over k of x[sources[r], k] w[e, n, k], and zeros for rows
//   whose source is outside x. x_map is not used, and `codes` are x's; without, the last three are not.
// Requires: width a multiple of 8, depth of 16; any offsets.
// Launch: one persistent thread block of 384 per SM (GATHER: of 512), a multiple of CLUSTER in total.
extern "C" __global__ void __launch_bounds__(GATHER ? 512 : 384, 1) __cluster_dims__(CLUSTER, 1, 1)
    grouped_gemm_tiles(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map,
                       const float* x_scales, i64 row_stride, i64 column_stride, const float* w_scales,
                       const int* offsets, i64 experts, i64 rows, i64 width, i64 depth, u16* out,
                       const int* real, const float* bias, const u8* codes, i64 tokens, const int* sources,
                       int* counter) {
  pdl_wait();
  DYNAMIC_SHARED_TILES(memory);
  const u32 t = threadIdx.x, lane = t % 32;
  const u32 group = __shfl_sync(0xffffffffu, t / 128, 0);  // makes it warp-uniform for the compiler
  // one thread of the cluster claims its tiles
  int taken = t / 32 == CONSUMER_THREADS / 32 && elected() && cluster_rank() == 0 ? atomicAdd(counter, 1) : 0;
  const int steps = (int)((depth + STEP - 1) / STEP), column_blocks = (int)((width + 127) / 128);
  const int wide = (int)((width + COLUMNS - 1) / COLUMNS);
  const Shared s = begin(
      memory, offsets, (int)experts, rows, [&](int count) { return units_of(blocks_of_128(count), wide); },
      real);
  Work work(s.first[experts]);
  Order order;
  Turn turn;
  u32 phase = 0;  // parity of the staged tile
  // scales of so many K-steps are copied together: 4-byte copies cost 2 to 5 % of the throughput
  const size_t addresses = (size_t)x_scales | (size_t)w_scales, strides = (size_t)row_stride | (size_t)steps;
  const int together = column_stride != 1                        ? 1
                       : strides % 4 == 0 && addresses % 16 == 0 ? 4
                       : strides % 2 == 0 && addresses % 8 == 0  ? 2
                                                                 : 1;
  auto column_scales = [&](u32 block, int expert) {
    return w_scales + (expert * (i64)column_blocks + min((int)block, column_blocks - 1)) * steps;
  };
  if (group == 2) {
    fewer_registers<GATHER ? 48 : 56>();
    const u32 warp = __shfl_sync(0xffffffffu, t / 32 % 4, 0);
    if (warp == 0) {
      const u32 rank = cluster_rank();
      const bool leads = elected(), takes = leads && rank == 0;
      const int height = max(IN_L2 / (CLUSTER * ROWS) / (int)depth, 1);
      auto pass_on = [&](u32 ahead) {
        int e = ahead == 0 ? 0 : order.expert(s);
        const Location at = find_rows(s, work, taken, (int)experts, wide, height, &e);
        order.pass_on(s, ahead, [&](u32 block) -> WorkTile {
          const int row = s.offsets[e] + at.row_of(block) * ROWS;
          const bool half = taken < work.whole && s.half[e] && row + ROWS >= s.offsets[e + 1];
          return {half ? ~taken : taken, e, row + work.half(taken) * (ROWS / 2),
                  at.column_of(block) * COLUMNS + at.below};
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
        const int w_row = tile.column() < width ? tile.expert * (int)width + tile.column() : -1;
        for (int k = 0;; ++k, turn.next()) {
          if (takes && k == min(steps, STAGES)) pass_on(1);
          if (k == steps) break;
          fetch_codes(s, turn, &x_map, &w_map, rank, tile.below(), work.halves(tile.number), k * STEP,
                      tile.row, w_row);
        }
      }
    } else if (GATHER && warp == 1) {
      relay(s, order, turn, work, steps);
    } else if (warp == 1) {
      for (WorkTile tile; (tile = order.tile(s)).number < work.all; order.done(s)) {
        const i64 first_row = tile.row + (i64)lane;
        const float* from = x_scales + first_row * row_stride;
        const float* of_columns = lane < 2 ? column_scales(tile.column() / 128 + lane, tile.expert) : nullptr;
        u32 valid = 0;
#pragma unroll
        for (u32 i = 0; i < 4; ++i) valid |= (u32)(first_row + 32 * i < rows) << i;
        for (int k = 0; k < steps; ++k, turn.next()) {
          barrier_wait(&s.empty[turn.stage], turn.phase ^ 1u);
          copy_scales<4>(s, turn, k, together, lane, from, row_stride, column_stride, valid, of_columns);
          barrier_arrive_copied(&s.full[turn.stage]);
        }
      }
    } else {
      // rows of no expert
      const i64 vectors = width / 8, head = s.offsets[0] * vectors, tail = s.offsets[experts] * vectors;
      for (i64 i = blockIdx.x * WRITERS + t % WRITERS; i < head + rows * vectors - tail;
           i += gridDim.x * WRITERS)
        ((uint4*)out)[i < head ? i : i - head + tail] = make_uint4(0u, 0u, 0u, 0u);
      for (WorkTile tile; (tile = order.tile(s)).number < work.all; order.done(s)) {
        u16* to = out + tile.row * width + tile.column();
        const int count = min(s.offsets[tile.expert + 1] - tile.row, ROWS);
        const int left = min((int)width - tile.column(), COLUMNS), halves = (int)work.halves(tile.number);
        write_rows(s, 0, min(count, halves * 64), 2 * left, 2 * COLUMNS, (u8*)to, 2 * width, phase);
        if (tile.number < 0 && left > 0)  // padding rows
          for (int i = (int)t % WRITERS; i < (count - 64) * (left / 8); i += WRITERS)
            *(uint4*)(to + (64 + i / (left / 8)) * width + i % (left / 8) * 8) = make_uint4(0u, 0u, 0u, 0u);
      }
    }
  } else if (GATHER && group == 3) {
    fewer_registers<48>();
    const u32 warp = __shfl_sync(0xffffffffu, t / 32 % 4, 0), row = 32 * warp + lane;
    for (WorkTile tile; (tile = order.tile(s)).number < work.all; order.done(s)) {
      auto source = [&](u32 inside) {
        const i64 at = tile.row + (i64)inside;
        const int token = at < rows ? sources[at] : -1;
        return (u64)(i64)token < (u64)tokens ? token : -1;
      };
      const int token = source(row);
      const float* from = x_scales + max(token, 0) * row_stride;
      const float* of_columns = row < 2 ? column_scales(tile.column() / 128 + row, tile.expert) : nullptr;
      gather_tile(s, turn, warp, warp < 2 * work.halves(tile.number), codes, depth, source, [&](int k) {
        copy_scales<1>(s, turn, k, together, row, from, row_stride, column_stride, token >= 0, of_columns);
      });
    }
  } else {
    more_registers<GATHER ? 208 : 224>();
    const u32 my_row = t % 128 / 32 * 16 + lane / 4;
    float sums[2][64] = {};
    float2 own_bias[16];
    auto scales_of = [&](u32 half, At scales) {  // scales of rows my_row and my_row + 8
      const float of_columns = load_at(scales + 16 * (ROWS + group));
      const At of_rows = scales + 16 * (64 * half + my_row);
      return make_float2(load_at(of_rows) * of_columns, load_at(of_rows + 128) * of_columns);
    };
    auto promote = [&](u32 half, const float (&d)[64], float2 by, bool first) {
#pragma unroll
      for (u32 i = 0; i < 64; ++i) {
        const float begin = BIAS ? i & 1 ? own_bias[i / 4].y : own_bias[i / 4].x : 0.f;
        sums[half][i] = __fmaf_rn(d[i], i & 2 ? by.y : by.x, first ? begin : sums[half][i]);
      }
    };
    for (WorkTile tile = order.tile(s); tile.number < work.all;) {
      const bool whole = work.halves(tile.number) == 2;
      const u32 parity = order.turn & 1u;
      const ReadBias read = {own_bias, s, order, bias, width, group};
      if (GATHER) {  // handed over during the next tile: 3 to 7 % less time; not gathered up to 3 % more
        const bool any = order.turn != 0;
        const Finished previous(s, sums, group, any ? parity ^ 1u : 0u);
        if (whole)
          multiply<true, false, true>(s, turn, group, 2, steps, LastStep{}, scales_of, promote,
                                      HandOver<2>{previous, any, read});
        else
          multiply<true, false, true>(s, turn, group, 1, steps, LastStep{}, scales_of, promote,
                                      HandOver<1>{previous, any, read});
      } else {
        if (whole)
          multiply<true, false, true>(s, turn, group, 2, steps, LastStep{}, scales_of, promote, read);
        else
          multiply<true, false, true>(s, turn, group, 1, steps, LastStep{}, scales_of, promote, read);
      }
      order.done(s);
      tile = order.tile(s);  // before the hand-over, which hides the latency
      if (!GATHER) hand_over(s, sums, group, parity);
    }
    if (GATHER && order.turn != 0) hand_over(s, sums, group, order.turn & 1u ^ 1u);
  }
  end();
}
#endif
