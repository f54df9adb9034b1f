// Grouped GEMM of FP8 operands on Hopper's tensor cores (sm_90a), weight gradient. Empty for other
// architectures.
#ifndef A_FMT
#define A_FMT 0   // of dy
#define B_FMT 0   // of x
#define BLOCKS 0  // 1: operands have one scale per 128 x 128 codes
#endif
#define HALF_TILES 0  // K is an expert's rows, and tiles of out are never short
#include "wgmma_pipeline.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Producer warp: copies a K-step of both operands without TMA, for experts whose first row is not a multiple
// of 16. Codes from `along` on, of rows of `rows` codes, in the layout that TMA would write.
__device__ __forceinline__ void copy_codes(u8* to, const u8* a, int a_row, i64 a_rows, const u8* b, int b_row,
                                           i64 b_rows, int along, i64 rows) {
#pragma unroll 1
  for (u32 i = threadIdx.x % 32; i < (ROWS + COLUMNS) * (STEP / 4); i += 32) {
    const u32 r = i / (STEP / 4), c = i % (STEP / 4) * 4;
    const i64 row = r < ROWS ? a_row + (int)r : b_row + (int)(r - ROWS);
    const u8* from = (r < ROWS ? a : b) + row * rows + along;
    u32 word = 0;
    for (u32 k = 0; k < 4; ++k)
      if (row < (r < ROWS ? a_rows : b_rows) && along + c + k < rows) word |= (u32)from[c + k] << (8 * k);
    *(u32*)(to + r * STEP + ((c / 16 ^ r % 8) * 16) + c % 16) = word;
  }
  fence_async();
  __syncwarp();
}

// NaN, loaded in place of missing scales.
__device__ __align__(16) const u32 NO_SCALES[4] = {0x7fc00000u, 0x7fc00000u, 0x7fc00000u, 0x7fc00000u};

// out[e, n, k] = sum over the rows r of expert e of dy[r, n] x[r, k], or += if accumulating.
// Arguments: dy column-wise codes [width, rows], dy_scales [blocks, width]; x [depth, rows], x_scales
//   [blocks, depth], where blocks of 128 rows restart at each expert and `known` of them have scales; out
//   float32 or bfloat16 [experts, width, depth], an expert's rows `pitch` rows after the last one's. BLOCKS:
//   dy_scales [ceil(width / 128), ceil(rows / 128)], x_scales likewise; experts with rows whose first is not
//   a multiple of 128 give NaN; `real`: each expert's number of rows without padding, or null. Padding is
//   zeros; groups of 32 rows of it are not multiplied.
// Requires: rows a multiple of 16, width of 4, depth of 8; any offsets. Experts whose first row is not a
//   multiple of 16 are slow; multiples of 128 are fastest.
// Launch: one persistent thread block of 384 per SM, a multiple of CLUSTER in total.
// Design: with scales per column, promotion takes two instructions per accumulator and loads from shared
//   memory; with block scales it takes one: 1316 and 1291 TFLOP/s instead of 1081 and 1050.
extern "C" __global__ void __launch_bounds__(384, 1) __cluster_dims__(CLUSTER, 1, 1)
    grouped_gemm_wgrad_tiles(const __grid_constant__ TensorMap dy_map,
                             const __grid_constant__ TensorMap x_map, const u8* dy, const u8* x,
                             const float* dy_scales, const float* x_scales, i64 known, const int* offsets,
                             const int* real, i64 experts, i64 rows, i64 width, i64 depth, i64 pitch,
                             i64 accumulate, i64 out_kind, void* out, int* counter) {
  pdl_wait();
  DYNAMIC_SHARED_TILES(memory);
  const u32 t = threadIdx.x, lane = t % 32;
  const u32 group = __shfl_sync(0xffffffffu, t / 128, 0);
  // one thread of the cluster claims its tiles
  int taken = t / 32 == CONSUMER_THREADS / 32 && elected() && cluster_rank() == 0 ? atomicAdd(counter, 1) : 0;
  // an expert's units: its wgmma along K, or its blocks of 128 rows, which number the scales
  const Shared s = begin(
      memory, offsets, (int)experts, rows,
      [](int count) { return BLOCKS ? (count + 31) / 32 : blocks_of_128(count); }, BLOCKS ? real : nullptr);
  const int high = (int)((width + ROWS - 1) / ROWS), wide = (int)((depth + COLUMNS - 1) / COLUMNS);
  const int units = units_of(high, wide);
  Work work((int)experts * units);
  Order order;
  Turn turn;
  u32 phase = 0;  // parity of the staged tile
  auto find_unit = [&](int number, int* e) {
    const int unit = work.unit(number);
    *e = unit / units;
    return find_tiles(unit - *e * units, high, wide, HEIGHT / CLUSTER);
  };
  auto tile_of = [&](int number, int e, const Location& at, u32 block) -> WorkTile {
    return {number, e, at.row_of(block) * ROWS + work.half(number) * (ROWS / 2),
            at.column_of(block) * COLUMNS + at.below};
  };
  // With one scale per column, each warp locates its tile by itself: publishing a tile's location spills
  // registers of the producer warps, which then have 24.
  auto pass_on = [&](u32 ahead) {
    int e = 0;
    Location at{0, 0, false};
    if (BLOCKS && taken < work.all) at = find_unit(taken, &e);
    order.pass_on(s, ahead, [&](u32 block) { return tile_of(taken, e, at, block); });
  };
  auto find = [&](const WorkTile& published) -> WorkTile {
    if (BLOCKS) return published;
    int e;
    const Location at = find_unit(published.number, &e);
    return tile_of(published.number, e, at, cluster_rank());
  };
  auto units_of_expert = [&](int expert) { return s.first[expert + 1] - s.first[expert]; };
  auto steps_of = [&](int expert) {
    return BLOCKS ? (units_of_expert(expert) + STEP / 32 - 1) / (STEP / 32) : units_of_expert(expert);
  };
  if (group == 2) {
    fewer_registers<BLOCKS ? 56 : 24>();
    const u32 warp = __shfl_sync(0xffffffffu, t / 32 % 4, 0);
    if (warp == 0) {
      const u32 rank = cluster_rank();
      const bool leads = elected(), takes = leads && rank == 0;
      if (leads) {
        prefetch_map(&dy_map);
        prefetch_map(&x_map);
        order.expect(s, 0);
      }
      if (takes) pass_on(0);
      for (WorkTile tile; (tile = find(order.tile(s))).number < work.all; order.done(s)) {
        if (!leads) continue;
        order.expect(s, 1);
        if (takes) taken = atomicAdd(counter, 1);  // its latency is hidden by the first K-steps' loads
        const int steps = steps_of(tile.expert), first = s.offsets[tile.expert];
        for (int k = 0;; ++k, turn.next()) {
          if (takes && k == min(steps, STAGES)) pass_on(1);
          if (k == steps) break;
          if (first % 16 == 0) {
            fetch_codes(s, turn, &dy_map, &x_map, rank, tile.below(), work.halves(tile.number),
                        first + k * STEP, tile.row, tile.column() < depth ? tile.column() : -1);
          } else {  // warp 1 copies the codes, and must not run a full pass of the stages ahead of this one
            barrier_wait(&s.empty[turn.stage], turn.phase ^ 1u);
            barrier_arrive_here(&s.full[turn.stage]);
          }
        }
      }
    } else if (warp == 1) {
      for (WorkTile tile; (tile = find(order.tile(s))).number < work.all; order.done(s)) {
        const int e = tile.expert, steps = steps_of(e), first_row = tile.row, first_column = tile.column();
        const int row = first_row + 4 * (int)lane, column = first_column + 4 * (int)lane;
        const float* from = dy_scales + s.first[e] * width + row;
        const float* x_from = x_scales + s.first[e] * depth + column;
        if (BLOCKS) {  // lane 0: dy's scale; lanes 1 and 2: x's
          const int block = min(first_column / 128 + (int)lane, blocks_of_128((int)depth)) - 1;
          from = lane == 0 ? dy_scales + first_row / 128 * (i64)blocks_of_128((int)rows)
                           : x_scales + block * (i64)blocks_of_128((int)rows);
          from += s.offsets[e] / 128;
          if (s.offsets[e] % 128) from = (const float*)NO_SCALES;
        }
        // distance to the next block's scales
        const i64 scale_stride = !BLOCKS ? width : s.offsets[e] % 128 ? 0 : 1;
        for (int k = 0; k < steps; ++k, turn.next(), from += scale_stride, x_from += depth) {
          float* to = s.scales + turn.stage * STAGE_SCALES + (BLOCKS ? 1 : 4) * lane;
          barrier_wait(&s.empty[turn.stage], turn.phase ^ 1u);
          if (BLOCKS) {
            if (lane < 3) copy_async4(to, from, true);
          } else {
            const bool has_scales = s.first[e] + k < known;
            copy_async16(to, has_scales ? (const void*)from : NO_SCALES, row < width);
#pragma unroll
            for (int i = 0; i < 2; ++i)
              copy_async16(to + ROWS + 128 * i, has_scales ? (const void*)(x_from + 128 * i) : NO_SCALES,
                           column + 128 * i < depth);
          }
          if (s.offsets[e] % 16) {
            copy_codes(s.operands + turn.stage * STAGE_BYTES, dy, first_row, width, x, first_column, depth,
                       s.offsets[e] + k * STEP, rows);
            copy_async_commit();
            copy_async_wait<0>();
            barrier_arrive_here(&s.full[turn.stage]);
          } else {
            barrier_arrive_copied(&s.full[turn.stage]);
          }
        }
      }
    } else {
      for (WorkTile tile; (tile = find(order.tile(s))).number < work.all; order.done(s)) {
        const bool none = accumulate && steps_of(tile.expert) == 0;
        const i64 at = (tile.expert * pitch + tile.row) * depth + tile.column();
        const int count = none ? 0 : min((int)width - tile.row, (int)work.halves(tile.number) * 64);
        const int columns = (int)depth - tile.column();
        if (out_kind == F32)  // the upper half; the consumers store the lower half themselves
          write_wide_rows(
              s, 0, count, 4 * columns, 4 * COLUMNS,
              [&](int row) { return (u8*)((float*)out + at) + row * (4 * depth); }, accumulate, phase);
        else
          write_rows(s, 0, count, 2 * columns, 2 * COLUMNS, (u8*)((u16*)out + at), 2 * depth, phase);
      }
    }
  } else {
    more_registers<BLOCKS ? 224 : 240>();
    const u32 my_row = t % 128 / 32 * 16 + lane / 4, my_column = group * 128 + lane % 4 * 2;
    float sums[2][64] = {};
    float2 columns[16];  // column scales, loaded with the upper half and reused for the lower
    struct Scales {
      float upper, lower;  // scales of rows my_row and my_row + 8
      At of_columns;       // scales of column pairs, 32 bytes apart
    };
    auto scales_of = [&](u32 half, At scales) {
      const At of_rows = scales + 4 * (64 * half + my_row);
      const Scales by{load_at(of_rows), load_at(of_rows + 32), scales + 4 * (ROWS + my_column)};
      if (half == 0)
#pragma unroll
        for (u32 j = 0; j < AHEAD; ++j) columns[j] = load2_at(by.of_columns + 32 * j);
      return by;
    };
    auto promote = [&](u32 half, const float (&d)[64], const Scales& by, bool) {
#pragma unroll
      for (u32 j = 0; j < 16; ++j) {
        const float2 c = columns[j];
        float* sum = sums[half] + 4 * j;
        sum[0] = __fmaf_rn(d[4 * j], by.upper * c.x, sum[0]);
        sum[1] = __fmaf_rn(d[4 * j + 1], by.upper * c.y, sum[1]);
        sum[2] = __fmaf_rn(d[4 * j + 2], by.lower * c.x, sum[2]);
        sum[3] = __fmaf_rn(d[4 * j + 3], by.lower * c.y, sum[3]);
        if (half == 0 && j + AHEAD < 16) columns[j + AHEAD] = load2_at(by.of_columns + 32 * (j + AHEAD));
      }
    };
    auto scale_of = [&](u32, At scales) { return load_at(scales) * load_at(scales + 4 * (1 + group)); };
    auto promote_all = [&](u32 half, const float (&d)[64], float by, bool first) {
#pragma unroll
      for (u32 i = 0; i < 64; ++i) sums[half][i] = __fmaf_rn(d[i], by, first ? 0.f : sums[half][i]);
    };
    // Stores or hands over sums in float32, or added to existing values, for which it needs their address.
    auto store_located = [&](const WorkTile& tile) {
      if (accumulate && steps_of(tile.expert) == 0) {  // nothing to add
        barrier_wait(s.written, order.turn & 1u ^ 1u);
        __syncwarp();
        if (lane < ARRIVING) barrier_arrive_here(s.made);
        return;
      }
      // accumulator i of a half is in row `row` + 64 half (+ 8 if i & 2) and column `column` + i / 4 * 8
      const int row = tile.row + (int)my_row, column = tile.column() + (int)my_column;
      const int high_left = (int)width - row, wide_left = (int)depth - column;
      const i64 at = (tile.expert * pitch + row) * depth + column;
      if (out_kind == F32) {
        // The lower half first: its stores are in flight while the upper half is written to shared memory.
        // The opposite order took 3 % longer, both halves by direct stores 2 %.
        if (work.halves(tile.number) == 2) {
          float* lower = (float*)out + at + 64 * depth;
          if (accumulate)
            store_sums<true>(lower, depth, high_left - 64, wide_left, sums[1]);
          else
            store_sums<false>(lower, depth, high_left - 64, wide_left, sums[1]);
        }
        barrier_wait(s.written, order.turn & 1u ^ 1u);
        float* to = (float*)(s.tile + my_row * WIDE_PITCH) + my_column;
#pragma unroll
        for (u32 j = 0; j < 16; ++j) {
          *(float2*)(to + 8 * j) = make_float2(sums[0][4 * j], sums[0][4 * j + 1]);
          *(float2*)(to + 8 * j + 8 * WIDE_PITCH / 4) = make_float2(sums[0][4 * j + 2], sums[0][4 * j + 3]);
        }
        hand_over(s, 0);
        return;
      }
#pragma unroll
      for (u32 half = 0; half < 2; ++half) {
        u32 two[32];  // all loads are issued before the first use: 960 instead of 720 TFLOP/s
#pragma unroll
        for (u32 i = 0; i < 32; ++i) {
          const int row_offset = (int)(64 * half + i % 2 * 8), column_offset = (int)(i / 2 * 8);
          const bool in_range = row_offset < high_left && column_offset < wide_left;
          two[i] = in_range ? *(const u32*)((const u16*)out + at + row_offset * depth + column_offset) : 0u;
        }
#pragma unroll
        for (u32 i = 0; i < 32; ++i) {
          sums[half][2 * i] += bf16_to_float((u16)two[i]);
          sums[half][2 * i + 1] += bf16_to_float((u16)(two[i] >> 16));
        }
      }
      hand_over(s, sums, group, order.turn & 1u);
    };
    for (WorkTile tile; (tile = find(order.tile(s))).number < work.all; order.done(s)) {
      const int steps = uniform(steps_of(tile.expert));
      const u32 halves = work.halves(tile.number);
      const int rows_of_expert = s.offsets[tile.expert + 1] - s.offsets[tile.expert];
      const int codes = uniform(rows_of_expert - (steps - 1) * STEP);
      const int products = BLOCKS ? uniform(units_of_expert(tile.expert)) - (steps - 1) * (STEP / 32)
                                  : (min(codes, STEP) + 31) / 32;
      const LastStep last{(u32)products, codes};
      auto clear = [&] {
#pragma unroll
        for (u32 i = 0; i < 64; ++i) sums[0][i] = sums[1][i] = 0.f;
      };
      if (!BLOCKS) {
        clear();
        multiply<false, true, false>(s, turn, group, halves, steps, last, scales_of, promote, Nothing{});
      } else if (steps <= last.partial(steps)) {
        clear();  // under a condition of its own a select per accumulator and tile: 2 to 3 % of time
        multiply<false, false, false>(s, turn, group, halves, steps, last, scale_of, promote_all, Nothing{});
      } else if (halves == 2) {
        multiply<false, false, true>(s, turn, group, 2, steps, last, scale_of, promote_all, Nothing{});
      } else {
        multiply<false, false, true>(s, turn, group, 1, steps, last, scale_of, promote_all, Nothing{});
      }
      // The tile is found again, to keep registers free during the main loop, and only if needed: its address
      // takes 500 cycles.
      if (out_kind == BF16 && !accumulate)
        hand_over(s, sums, group, order.turn & 1u);
      else
        store_located(find(order.again(s)));
    }
  }
  end();
}
#endif
