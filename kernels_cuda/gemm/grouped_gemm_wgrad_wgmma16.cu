// Grouped GEMM of 16-bit operands on Hopper's tensor cores (sm_90a), weight gradient. Empty for other
// architectures.
#ifndef KIND
#define KIND BF16  // of operands, or F16
#endif
#include "wgmma16_pipeline.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Of the two rows that a thread holds, 8 apart, the upper one: adjacent lanes exchange halves of two blocks
// of eight columns, so that each holds four consecutive values. (With stores of two values wgrad was 0.6 to
// 1.7 % slower.)
template <int WIDTH>
__device__ __forceinline__ void join_columns(float (&d)[128]) {
  const bool odd = threadIdx.x % 2;
#pragma unroll
  for (u32 j = 0; j < WIDTH / 8; j += 2) {
    float* two = d + 4 * j;  // of block j; elements 4 and 5 are of block j + 1
    const float x = __shfl_xor_sync(0xffffffffu, odd ? two[0] : two[4], 1);
    const float y = __shfl_xor_sync(0xffffffffu, odd ? two[1] : two[5], 1);
    if (odd) two[0] = two[4], two[1] = two[5];
    two[4] = x, two[5] = y;
  }
}

// Stores (ADD: accumulates) such a row directly to memory; predicated on `columns` unless ALL.
template <int WIDTH, bool ADD, bool ALL>
__device__ __forceinline__ void store_row(float* to, int columns, const float (&d)[128]) {
  const bool odd = threadIdx.x % 2;
#pragma unroll
  for (u32 j = 0; j < WIDTH / 8; j += 2) {
    const float* two = d + 4 * j;
    if (!ALL && 8 * (int)j >= columns) continue;
    const float4 four =
        odd ? make_float4(two[4], two[5], two[0], two[1]) : make_float4(two[0], two[1], two[4], two[5]);
    if (ADD)
      add_floats(to + 8 * j, four);
    else
      *(float4*)(to + 8 * j) = four;
  }
}
// `to` and `columns` refer to this thread's first value of the row.
template <int WIDTH, bool ADD>
__device__ __forceinline__ void store_row(float* to, int columns, float (&d)[128], bool in_range) {
  join_columns<WIDTH>(d);
  const int shift = threadIdx.x % 2 ? 8 - 2 : 0;
  to += shift, columns -= shift;
  if (!in_range) return;
  if (columns > WIDTH - 16)  // the compiler turns each predicate into a branch
    store_row<WIDTH, ADD, true>(to, columns, d);
  else
    store_row<WIDTH, ADD, false>(to, columns, d);
}
// Epilogue of a warpgroup's float32 accumulators: its threads store the upper rows directly, and while these
// stores are in flight, the lower rows go to shared memory for the store warps.
template <int WIDTH, bool ADD>
__device__ __forceinline__ void hand_over_wide(const Shared& s, float (&d)[128], u32 group, float* upper,
                                               bool in_range, int columns, u32& phase) {
  store_row<WIDTH, ADD>(upper, columns, d, in_range);
  const u32 t = kept(threadIdx.x), lane = t % 32;
  const At to = wait_for_buffer(s, group, phase) + (t % 128 / 32 * 8 + lane / 4) * WIDE_PITCH + lane % 4 * 8;
  phase ^= 1u;
#pragma unroll
  for (u32 j = 0; j < WIDTH / 8; ++j) store2_at(to + 32 * j, make_float2(d[4 * j + 2], d[4 * j + 3]));
  hand_over(s, group);
}

// Adds the bfloat16 values in memory to a warpgroup's accumulators, predicated on `rows` and `columns`.
__device__ __forceinline__ void add_stored_values(float (&d)[128], const u16* from, i64 pitch, int rows,
                                                  int columns) {
#pragma unroll
  for (u32 low = 0; low < 2; ++low, from += 8 * pitch) {
    u32 two[COLUMNS / 8];  // all loads are issued before the first use
#pragma unroll
    for (u32 j = 0; j < COLUMNS / 8; ++j)
      two[j] = 8 * (int)low < rows && 8 * (int)j < columns ? *(const u32*)(from + 8 * j) : 0u;
#pragma unroll
    for (u32 j = 0; j < COLUMNS / 8; ++j) {
      d[4 * j + 2 * low] += bf16_to_float((u16)two[j]);
      d[4 * j + 2 * low + 1] += bf16_to_float((u16)(two[j] >> 16));
    }
    products_seen(d);  // otherwise the compiler issues both rows' loads together, and spills
  }
}

// out[e, n, k] = sum over the rows r of expert e of dy[r, n] x[r, k], or += if accumulating.
// Arguments: dy [rows, width], x [rows, depth]; out float32 or bfloat16 [experts, width, depth].
// Requires: width and depth multiples of 8; any offsets.
// Launch: one persistent thread block of 384 per SM, a multiple of CLUSTER in total.
extern "C" __global__ void __launch_bounds__(384, 1) __cluster_dims__(CLUSTER, 1, 1)
    grouped_gemm_wgrad_tiles_16(const __grid_constant__ TensorMap dy_map,
                                const __grid_constant__ TensorMap x_map, const int* offsets, i64 experts,
                                i64 rows, i64 width, i64 depth, i64 accumulate, i64 out_kind, void* out,
                                int* counter) {
  pdl_wait();
  DYNAMIC_SHARED_TILES(memory);
  const u32 t = threadIdx.x, lane = t % 32;
  const u32 group = __shfl_sync(0xffffffffu, t / 128, 0);
  // one thread of the cluster claims its tiles
  int taken = t / 32 == CONSUMER_THREADS / 32 && elected() && cluster_rank() == 0 ? atomicAdd(counter, 1) : 0;
  const Shared s = begin(memory, offsets, (int)experts, rows, [](int) { return 0; });
  const int high = (int)((width + ROWS - 1) / ROWS), wide = (int)((depth + COLUMNS - 1) / COLUMNS);
  const int units = units_of(high, wide);
  Work work((int)experts * units);
  Order order;
  Turn turn;
  u32 phase = 0;  // parity of the staged tile
  auto steps_of = [&](int expert) {
    return (max(s.offsets[expert + 1] - s.offsets[expert], 0) + STEP - 1) / STEP;
  };
  if (group == 2) {
    fewer_registers<56>();
    const u32 warp = __shfl_sync(0xffffffffu, t / 32 % 4, 0);
    if (warp == 0) {
      const u32 rank = cluster_rank();
      const bool leads = elected(), takes = leads && rank == 0;
      auto pass_on = [&](u32 ahead) {
        const int unit = work.unit(taken), e = unit / units;
        const Location at = find_tiles(unit - e * units, high, wide, HEIGHT / CLUSTER);
        order.pass_on(s, ahead, [&](u32 block) -> WorkTile {
          return {taken, e, at.row_of(block) * ROWS,
                  at.column_of(block) * COLUMNS + work.half(taken) * (COLUMNS / 2) + at.below};
        });
      };
      if (leads) {
        prefetch_map(&dy_map);
        prefetch_map(&x_map);
        order.expect(s, 0);
      }
      if (takes) pass_on(0);
      for (WorkTile tile; (tile = order.tile(s)).number < work.all; order.done(s)) {
        if (!leads) continue;
        order.expect(s, 1);
        if (takes) taken = atomicAdd(counter, 1);  // its latency is hidden by the first K-steps' loads
        const int steps = steps_of(tile.expert), column = tile.column() < depth ? tile.column() : -1;
        for (int k = 0;; ++k, turn.next()) {
          if (takes && k == min(steps, STAGES)) pass_on(1);
          if (k == steps) break;
          const int along = s.offsets[tile.expert] + k * STEP;
          fetch_step<true, true>(s, turn, &dy_map, &x_map, rank, tile.below(), work.halves(tile.number),
                                 along, along, tile.row, column);
        }
      }
    } else if (warp >= 2) {
      for (WorkTile tile; (tile = order.tile(s)).number < work.all; order.done(s)) {
        if (accumulate && steps_of(tile.expert) == 0) continue;
        const i64 at = (tile.expert * width + tile.row) * depth + tile.column();
        const int columns = (int)depth - tile.column();
        const int most = (int)work.halves(tile.number) * (COLUMNS / 2);
#pragma unroll 1
        for (u32 part = 0; part < PARTS; ++part) {
          const int left = (int)width - tile.row - 64 * (int)part;
          if (out_kind == F32) {  // of each 16 rows the lower 8
            const int row = (int)t % WRITERS / 8 * 16 + 8 + (int)t % 8;
            float* to = (float*)out + at + (64 * part + row) * depth;
            write_wide_rows(
                s, part, row < left ? 32 : 0, 4 * columns, 4 * most, [&](int) { return to; }, accumulate,
                phase);
          } else {
            write_rows(s, part, left, 2 * columns, 2 * most, (u8*)((u16*)out + at + 64 * part * depth),
                       2 * depth, phase);
          }
        }
      }
    }
  } else {
    more_registers<224>();
    for (WorkTile tile; (tile = order.tile(s)).number < work.all; order.done(s)) {
      const int steps = uniform(steps_of(tile.expert));
      if (accumulate && steps == 0) continue;
      float d[128];
      const int rows_of_expert = s.offsets[tile.expert + 1] - s.offsets[tile.expert];
      const int last = uniform(rows_of_expert - (steps - 1) * STEP);
      const bool whole = work.halves(tile.number) == 2;
      if (whole)
        multiply<COLUMNS, true, true>(s, turn, group, steps, last, d);
      else
        multiply<COLUMNS / 2, true, true>(s, turn, group, steps, last, d);
      auto hand_over_tile = [&] {
        if (whole)
          hand_over_16<COLUMNS, BF16>(s, d, group, phase);
        else
          hand_over_16<COLUMNS / 2, BF16>(s, d, group, phase);
      };
      if (out_kind == BF16 && !accumulate) {
        hand_over_tile();
        continue;
      }
      tile = order.again(s);  // read again, to keep registers free during the main loop
      // accumulator i is in row `row` (+ 8 if i & 2) and column `column` + i / 4 * 8
      const int row = tile.row + (int)(t / 32 * 16 + lane / 4), column = tile.column() + (int)(lane % 4 * 2);
      const int high_left = (int)width - row, wide_left = (int)depth - column;
      const i64 at = (tile.expert * width + row) * depth + column;
      float* to = (float*)out + at;
      if (out_kind != F32) {
        add_stored_values(d, (const u16*)out + at, depth, high_left,
                          min(wide_left, whole ? COLUMNS : COLUMNS / 2));
        hand_over_tile();
      } else if (whole && accumulate) {
        hand_over_wide<COLUMNS, true>(s, d, group, to, high_left > 0, wide_left, phase);
      } else if (whole) {
        hand_over_wide<COLUMNS, false>(s, d, group, to, high_left > 0, wide_left, phase);
      } else if (accumulate) {
        hand_over_wide<COLUMNS / 2, true>(s, d, group, to, high_left > 0, wide_left, phase);
      } else {
        hand_over_wide<COLUMNS / 2, false>(s, d, group, to, high_left > 0, wide_left, phase);
      }
    }
  }
  end();
}
#endif
