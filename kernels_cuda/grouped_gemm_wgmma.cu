// Grouped GEMM of FP8 operands on Hopper's tensor cores (sm_90a), forward and data gradient; elsewhere this
// file is empty.
#ifndef A_FMT
#define A_FMT 0  // of x
#define B_FMT 0  // of w
#endif
#ifndef ACTIVATED
#define ACTIVATED 0
#endif
#if ACTIVATED
#define KIND BF16  // of h
#define FMT 0      // of a: e4m3
#define MX 0
#define BARE 1
#define TILE_TARGET 1  // one scale a tile
#include "swiglu.cuh"
#undef __noinline__
#define __noinline__ __forceinline__
#include "transpose_tile.cuh"
#ifndef WRITERS
#define WRITERS 128  // a warpgroup of their own
#endif
#define SERVING (2 + WRITERS / 32)
#endif
#include "wgmma_pipeline.cuh"
// All warpgroups have, for a thread together, what they are launched with: 504 of three, 512 of four.
#ifndef SERVED_REGISTERS
#define SERVED_REGISTERS (WRITERS == 128 ? 24 : ACTIVATED ? 88 : 56)
#define WRITER_REGISTERS 72
#define MULTIPLIED_REGISTERS (ACTIVATED ? 208 : 224)
#endif
#define THREADS (MULTIPLIERS + (WRITERS == 128 ? 256 : 128))

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#if ACTIVATED
#define APART (int)(width / 2)  // rows of w from a tile's gates to its up-projections
#define TILE_STEP (COLUMNS / 2)

// What becomes of h, a tile of which has 128 of its gates beside 128 of its up-projections.
struct Activated {
  const void* probs;
  i64 probs_kind;
  u8* row_codes;    // [rows, width / 2]
  u32* row_scales;  // [rows, width / 256]
  u8* codes;        // [width / 2, rows], or null
  float* scales;    // [width / 256, rows / 128]
};

// Two warps: a tile of h, activated, quantised row-wise, and these codes transposed, as swiglu_transpose.cu
// makes them. The codes lie where rows of h lay that both warps have read: behind the first barrier rows 0 to
// 7, behind the second 0 to 31.
__device__ __forceinline__ void activate_tile(const Shared& s, const Activated& to, u16* h, i64 rows,
                                              i64 width, int first_row, int count, int first_column) {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32 % (WRITERS / 32), j = lane % 8,
            quarter = lane / 8;
  int* exponents = (int*)s.tile;
  u8* made = s.tile + 512;
  const i64 across = width / 256, block = first_column / 128;
  float probs[128 / WRITERS];  // of this warp's rows 32 i + lane, in the order of its steps
  auto row_of = [&](u32 step, u32 q) {
    return step * (WRITERS / 8) + warp / 2 * 8 + warp % 2 * 2 + q / 2 + q % 2 * 4;
  };
#pragma unroll
  for (u32 i = 0; i < 128 / WRITERS; ++i) {
    const u32 row = row_of(8 * i + lane / 4, lane % 4);
    probs[i] = 1.f;
    if (to.probs && (int)row < count) probs[i] = load(to.probs, first_row + row, (int)to.probs_kind);
  }
#pragma unroll 1
  for (u32 step = 0; step < ROWS / (WRITERS / 8); ++step) {
    const u32 row = row_of(step, quarter);
    const u8* from = s.tile + row * PITCH + j * 16;
    Eight<BF16> a[2], b[2];
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      a[u].words[0] = *(const uint4*)(from + u * 128);
      b[u].words[0] = *(const uint4*)(from + 256 + u * 128);
    }
    const bool real = (int)row < count;
    if (h && real) {
      u16* at = h + (first_row + row) * width + first_column + j * 8;
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        *(uint4*)(at + u * 64) = a[u].words[0];
        *(uint4*)(at + u * 64 + width / 2) = b[u].words[0];
      }
    }
    const float prob =
        __shfl_sync(0xffffffffu, step < 8 ? probs[0] : probs[128 / WRITERS - 1], step % 8 * 4 + quarter);
    float y[2][8];
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      Gates g;
      floats<BF16>(a[u], g.a);
      floats<BF16>(b[u], g.b);
      gates(g, {0.f, 1.f, 0.f});
#pragma unroll
      for (int i = 0; i < 8; ++i) y[u][i] = g.a[i] * g.s[i] * g.b[i];
    }
    if (step == 0 || step == 3) named_wait(2, WRITERS);
    const Rule rule = {FMT, 1, 0, 0.f};
    u8* out = to.row_codes + (first_row + row) * (width / 2) + first_column + j * 8;
    u8* in = made + row * 128 + j % 2 * 8;
    const u32 scale = encode_products(y[0], y[1], prob, rule, [&](uint2 a, uint2 b) {
      *(uint2*)(in + ((j / 2 ^ row % 8) * 16)) = a;
      *(uint2*)(in + ((4 + j / 2 ^ row % 8) * 16)) = b;
      if (!real) return;
      __stcs((uint2*)out, a);
      __stcs((uint2*)(out + 64), b);
    });
    if (j == 0) {
      if (real) to.row_scales[(first_row + row) * across + block] = scale;
      exponents[exponent_at(row)] = exponent_of(scale, 0, 0);
    }
  }
  if (!to.codes) return;
  named_wait(2, WRITERS);
  Tile tile;
  tile.base[0] = first_row, tile.count[0] = count, tile.row = first_row / 128, tile.column = (int)block;
  const Results results = {rows, width / 2, rows / 128, to.codes, to.scales, true};
  Spread spread = NO_SPREAD;
#pragma unroll
  for (u32 i = 0; i < 4; ++i) spread.add(exponents[lane + 32 * i]);
  spread.of_warp();
#pragma unroll 1
  for (u32 piece = warp; piece < 8; piece += WRITERS / 32)
    transpose_piece(tile, piece, made, exponents, spread, results);
}
#else
struct Activated {};
#define APART (COLUMNS / 2)
#define TILE_STEP COLUMNS
#endif

__device__ __forceinline__ void make_tiles(const TensorMap* x_map, const TensorMap* w_map,
                                           const float* x_scales, i64 row_stride, i64 column_stride,
                                           const float* w_scales, const int* offsets, i64 experts, i64 rows,
                                           i64 width, i64 depth, u16* out, int* counter,
                                           const Activated& activated) {
  pdl_wait();
  DYNAMIC_SHARED_TILES(memory);
  const u32 t = threadIdx.x, lane = t % 32;
  const u32 group = __shfl_sync(0xffffffffu, t / 128, 0);  // so that the compiler knows it is a warp's
  const u32 rank = CLUSTER > 1 ? cluster_rank() : 0;
  const bool leads = elected();                                         // of its warp
  const bool takes = leads && rank == 0 && t / 32 == MULTIPLIERS / 32;  // the cluster's tiles
  int taken = takes ? atomicAdd(counter, 1) : 0;
  const int steps = (int)((depth + STEP - 1) / STEP), column_blocks = (int)((width + 127) / 128);
  const int wide = (int)((width + COLUMNS - 1) / COLUMNS);
  const Shared s = begin(memory, offsets, (int)experts, rows,
                         [&](int count) { return units_of(blocks_of_128(count), wide); });
  const int height = max(IN_L2 / (CLUSTER * ROWS) / (int)depth, 1);
  Work work(s.first[experts], !ACTIVATED);
  Order order;
  Turn turn;
  u32 phase = 0;  // of the tile in shared memory
  int e, first_row, last_row, first_column;
  bool below;
  auto find = [&](int tile) {
    work.take(tile);
    e = last_at_most(s.first, (int)experts, work.unit);
    const int high = blocks_of_128(s.offsets[e + 1] - s.offsets[e]);
    below = find_tile(work.unit - s.first[e], high, wide, height, rank, &first_row, &first_column);
    first_row = s.offsets[e] + first_row * ROWS + (int)work.first;
    last_row = s.offsets[e + 1];
    first_column *= TILE_STEP;
  };
  auto write = [&] {
    // rows of no expert
    const i64 vectors = width / 8, head = s.offsets[0] * vectors, tail = s.offsets[experts] * vectors;
    for (i64 i = blockIdx.x * WRITERS + t % WRITERS; i < head + rows * vectors - tail;
         i += gridDim.x * WRITERS)
#if ACTIVATED
      if (out)
#endif
        ((uint4*)out)[i < head ? i : i - head + tail] = make_uint4(0u, 0u, 0u, 0u);
#if ACTIVATED
    const i64 blocks = width / 256, first = s.offsets[0], last = s.offsets[experts];
    for (i64 i = blockIdx.x * WRITERS + t % WRITERS; i < (first + rows - last) * blocks;
         i += gridDim.x * WRITERS) {
      const i64 row = i / blocks < first ? i / blocks : i / blocks - first + last, column = i % blocks;
      uint4* to = (uint4*)(activated.row_codes + row * (width / 2) + column * 128);
#pragma unroll
      for (int k = 0; k < 8; ++k) to[k] = make_uint4(0u, 0u, 0u, 0u);
      activated.row_scales[row * blocks + column] = 0x3f800000u;
      if (activated.codes && row % 128 == 0) activated.scales[column * (rows / 128) + row / 128] = 0.f;
    }
#endif
    for (int tile; (tile = order.tile(s)) < work.all; order.done(s)) {
      find(tile);
#if ACTIVATED
      barrier_wait(s.made, phase);
      phase ^= 1u;
      if (first_column < width / 2) {
        const int count = min(last_row - first_row, ROWS);
        activate_tile(s, activated, out, rows, width, first_row, count, first_column);
      }
      __syncwarp();
      if (lane < ARRIVING) barrier_arrive_here(s.written);
#else
      write_rows(s, 0, min(last_row - first_row, (int)work.halves * 64), 2 * ((int)width - first_column),
                 2 * COLUMNS, (u8*)(out + first_row * width + first_column), 2 * width, phase);
#endif
    }
  };
  if (group == 2) {
    fewer_registers<SERVED_REGISTERS>();
    const u32 warp = __shfl_sync(0xffffffffu, t / 32 % 4, 0);
    // 4 bytes of a row at a time cost 2 to 5 % of the products
    const bool by_four = column_stride == 1 && (row_stride | steps) % 4 == 0 &&
                         (((size_t)x_scales | (size_t)w_scales) & 15) == 0;
    if (warp == 0) {
      if (leads) {
        prefetch_map(x_map);
        prefetch_map(w_map);
        order.expect(s, 0);
      }
      if (takes) order.pass_on(s, 0, taken);
      for (int tile; (tile = order.tile(s)) < work.all; order.done(s)) {
        if (leads) order.expect(s, 1);
        if (takes) taken = atomicAdd(counter, 1);  // it is there long before the end of the tile
        find(tile);
        e = uniform(e), first_row = uniform(first_row), first_column = uniform(first_column);
        const int pass_at = PASS_EARLY ? max(steps - PASS_EARLY, 0) : -1;
        const bool there = first_column < (ACTIVATED ? APART : (int)width);
        for (int k = 0; k < steps; ++k, turn.next()) {
          fetch_codes(s, turn, x_map, w_map, leads, rank, below, work.halves, k * STEP, first_row,
                      there ? e * (int)width + first_column : -1, APART);
          if (PASS_EARLY && takes && k == pass_at) order.pass_on(s, 1, taken);
        }
        if (!PASS_EARLY && takes) order.pass_on(s, 1, taken);
      }
    } else if (warp == 1) {
      for (int tile; (tile = order.tile(s)) < work.all; order.done(s)) {
        find(tile);
        const float* from = x_scales + (first_row + (i64)lane) * row_stride;
        const int block = min(first_column / 128 + (int)lane * (APART / 128), column_blocks - 1);
        const float* w_from = w_scales + (e * (i64)column_blocks + block) * steps;
        for (int k = 0; k < steps; ++k, turn.next()) {
          float* to = s.scales + scales_of_four(turn) + 4 * lane;
          barrier_wait(&s.empty[turn.stage], turn.phase ^ 1u);
          if (!by_four) {
#pragma unroll
            for (int i = 0; i < 4; ++i)
              copy_async4(to + 128 * i, from + 32 * i * row_stride + k * column_stride,
                          first_row + (int)lane + 32 * i < rows);
            if (lane < 2) copy_async4(to + 4 * ROWS, w_from + k, true);
          } else if (k % 4 == 0) {
#pragma unroll
            for (int i = 0; i < 4; ++i)
              copy_async16(to + 128 * i, from + 32 * i * row_stride + k,
                           first_row + (int)lane + 32 * i < rows);
            if (lane < 2) copy_async16(to + 4 * ROWS, w_from + k, true);
          }
          barrier_arrive_copied(&s.full[turn.stage]);
        }
      }
    } else if (WRITERS == 64) {
      write();
    }
  } else if (WRITERS == 128 && group == 3) {
    fewer_registers<WRITER_REGISTERS>();
    write();
  } else {
    more_registers<MULTIPLIED_REGISTERS>();
    const u32 my_row = t % 128 / 32 * 16 + lane / 4;
    float sums[2][64];
    auto scales_of = [&](u32 half, At scales) {  // of the row and of that 8 below it
      const float of_columns = load_at(scales + 16 * (ROWS + group));
      const At of_rows = scales + 16 * (64 * half + my_row);
      return make_float2(load_at(of_rows) * of_columns, load_at(of_rows + 128) * of_columns);
    };
    auto promote = [&](u32 half, const float (&d)[64], float2 by) {
#pragma unroll
      for (u32 i = 0; i < 64; ++i) sums[half][i] = __fmaf_rn(d[i], i & 2 ? by.y : by.x, sums[half][i]);
    };
    bool ready = false;
#if LOOK_EARLY
    int tile = order.tile(s);
    order.done(s);
    while (tile < work.all) {
#else
    for (int tile; (tile = order.tile(s)) < work.all; order.done(s)) {
#endif
#pragma unroll
      for (int i = 0; i < 64; ++i) sums[0][i] = sums[1][i] = 0.f;
      work.take(tile);
      if (ACTIVATED || work.halves == 2)
        multiply<true, false>(s, turn, ready, group, 2, steps, STEP, scales_of, promote);
      else
        multiply<true, false>(s, turn, ready, group, 1, steps, STEP, scales_of, promote);
#if LOOK_EARLY
      const Order::Look next = order.look(s);
#endif
      hand_over(s, sums, group, phase);
#if LOOK_EARLY
      tile = order.tile(s, next);
      order.done(s);
#endif
    }
  }
  end();
}

#if ACTIVATED
// What: h as below, h [rows, width] or null, and a of it as swiglu_quantize_transpose makes it.
extern "C" __global__ void __launch_bounds__(THREADS, 1) __cluster_dims__(CLUSTER, 1, 1)
    grouped_gemm_swiglu_tiles(const __grid_constant__ TensorMap x_map,
                              const __grid_constant__ TensorMap w_map, const float* x_scales, i64 row_stride,
                              i64 column_stride, const float* w_scales, const int* offsets, i64 experts,
                              i64 rows, i64 width, i64 depth, u16* h, const void* probs, i64 probs_kind,
                              u8* row_codes, u32* row_scales, u8* codes, float* scales, int* counter) {
  make_tiles(&x_map, &w_map, x_scales, row_stride, column_stride, w_scales, offsets, experts, rows, width,
             depth, h, counter, {probs, probs_kind, row_codes, row_scales, codes, scales});
}
#else
// What: out[r, n] = sum over k of x[r, k] w[e, n, k], e the expert of row r; zeros where r has none.
//   x row-wise codes [rows, depth], x_scales[r * row_stride + block * column_stride]; w codes [experts *
//   width, depth], w_scales [experts, ceil(width / 128), ceil(depth / 128)]; out bfloat16 [rows, width].
// Shapes: width a multiple of 8, depth of 16; any offsets.
// Launch: a block of 384 threads a multiprocessor, a multiple of CLUSTER.
extern "C" __global__ void __launch_bounds__(THREADS, 1) __cluster_dims__(CLUSTER, 1, 1)
    grouped_gemm_tiles(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map,
                       const float* x_scales, i64 row_stride, i64 column_stride, const float* w_scales,
                       const int* offsets, i64 experts, i64 rows, i64 width, i64 depth, u16* out,
                       int* counter) {
  make_tiles(&x_map, &w_map, x_scales, row_stride, column_stride, w_scales, offsets, experts, rows, width,
             depth, out, counter, {});
}
#endif
#endif
