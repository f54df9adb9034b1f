// Grouped GEMM of FP8 operands on Hopper's tensor cores (sm_90a); elsewhere this file is empty.
//
// Both kernels are the same machine. A block makes tiles of 128 x 256 of the result, one after the other. Two
// warpgroups multiply, each all 128 rows by its own 128 columns, 64 rows at a time: the tensor cores sum the
// products of one step of 128 along the contraction, then the warpgroup scales them and adds them to float32
// sums in registers. The third warpgroup serves them: one thread fetches the codes of both operands by
// TMA, some steps ahead, one warp their scales, and two warps write finished tiles, from shared
// memory, while the next ones are made.
//
// CLUSTER blocks work on tiles below each other and share the columns' operand: each fetches its part for
// all, a fifth less from L2 than side by side; what is short is power, and 2 % of the time went with it. In
// an expert's last row of tiles, if it has no pair, they work side by side and share the rows' operand. The
// last tiles, if they are for no more than half of the clusters, are made as two of 64 rows.
#include "wgmma.cuh"

#ifndef A_FMT
#define A_FMT 0   // of x, or of dy
#define B_FMT 0   // of w, or of x
#define BLOCKS 0  // 1: only wgrad, of operands with one scale for 128 x 128 codes
#endif
#ifndef CLUSTER
#define CLUSTER 2
#endif

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define ROWS 128
#define COLUMNS 256
#define STEP 128
#define STAGES 3  // steps that are fetched or used at a time
#define A_BYTES (ROWS * STEP)
#define B_BYTES (COLUMNS * STEP)
#define STAGE_BYTES (A_BYTES + B_BYTES)
#define STAGE_SCALES (ROWS + COLUMNS)
#define FOUR_SCALES (4 * (ROWS + COLUMNS / 128))  // forward: of four steps, four of a row side by side
#define TILE_BYTES 67584  // where a tile waits to be written: 128 rows 528 bytes apart, or 64 1056 apart,
#define PITCH 528         // so that neither side has bank conflicts
#define WIDE_PITCH 1056
// Rows of tiles that are worked on at a time, so that their operands stay in L2: wgrad; the forward, in
// bytes. With 16 everywhere 7168 x 2048 and x 3072 took 1.4 and 0.8 % longer.
#define HEIGHT 16
#define IN_L2 (15 << 20)
#define MULTIPLIERS 256
#define WRITERS 64
#define AHEAD 3  // pairs of columns whose scales wgrad has fetched ahead
#ifndef ARRIVING
#define ARRIVING 1  // lanes that arrive at a barrier for a warp; racecheck knows of no warp behind a lane: 32
#endif

// A value that all lanes have, so that the compiler knows it and computes with it in uniform registers, where
// the products have their operands' addresses from: else it moves them there in front of each one. The bounds
// of loops around it have to be known so as well.
template <class T>
__device__ __forceinline__ T uniform(T value) {
  return __shfl_sync(0xffffffffu, value, 0);
}

struct Shared {
  u8* codes;                           // [STAGES][STAGE_BYTES]: rows of the first operand, then of the second
  float* scales;                       // [STAGES][STAGE_SCALES]; forward: [2][FOUR_SCALES]
  u8* tile;                            // [TILE_BYTES]
  int* offsets;                        // [experts + 1]
  int* first;                          // [experts + 1]: how many `units` all experts before have
  u64 *full, *empty, *made, *written;  // barriers: [STAGES] of the stages, one of the tile
};

static_assert(2 * FOUR_SCALES <= STAGES * STAGE_SCALES && STAGES <= 5, "four steps' scales, twice");

struct Turn {  // of the stages
  u32 stage = 0, phase = 0, step = 0;
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, phase ^= 1u;
    ++step;
  }
  // Forward: where the step's scales are, the first of a row's four being at 0. Four steps' are fetched when
  // the step STAGES before the first is done with, over those of eight to five steps before it.
  __device__ __forceinline__ u32 scales() const { return step / 4 % 2 * FOUR_SCALES + step % 4; }
};

// The whole block: where things are in shared memory, the experts' table, the barriers. units(rows) of an
// expert with so many rows.
template <class Units>
__device__ __forceinline__ Shared begin(u8* memory, const int* offsets, int experts, i64 rows,
                                        const Units& units) {
  const u32 t = threadIdx.x, lane = t % 32;
  Shared s;
  s.codes = memory;
  s.scales = (float*)(memory + STAGES * STAGE_BYTES);
  s.tile = (u8*)(s.scales + STAGES * STAGE_SCALES);
  s.full = (u64*)(s.tile + TILE_BYTES);
  s.empty = s.full + STAGES, s.made = s.empty + STAGES, s.written = s.made + 1;
  s.offsets = (int*)(s.written + 1);
  s.first = s.offsets + experts + 1;
  if (t == 0) {
    for (u32 i = 0; i < STAGES; ++i) {
      barrier_init(&s.full[i], 1 + 32);  // who announces the codes; the warp that fetches scales
      barrier_init(&s.empty[i], CLUSTER * MULTIPLIERS / 32 * ARRIVING);
    }
    barrier_init(s.made, MULTIPLIERS / 32 * ARRIVING);
    barrier_init(s.written, WRITERS / 32 * ARRIVING);
  }
  for (int e = (int)t; e <= experts; e += (int)blockDim.x) s.offsets[e] = (int)clamped(offsets[e], rows);
  __syncthreads();
  if (t < 32) {
    int before = 0;
    for (int e0 = 0; e0 <= experts; e0 += 32) {
      const int e = e0 + (int)lane, count = e < experts ? s.offsets[e + 1] - s.offsets[e] : 0;
      const int mine = units(max(count, 0));
      const int total = sum_up_to_here(mine);
      if (e <= experts) s.first[e] = before + total - mine;
      before += __shfl_sync(0xffffffffu, total, 31);
    }
  }
  if (CLUSTER > 1)
    cluster_wait();
  else
    __syncthreads();
  return s;
}

// Nobody leaves while another block may still write to its memory.
__device__ __forceinline__ void end() {
  if (CLUSTER > 1) cluster_wait();
}

__device__ __forceinline__ int blocks_of_128(int rows) { return (rows + 127) / 128; }

// What the clusters make, one after the other: CLUSTER tiles at a time, of all of them. The last are made by
// halves, if so each cluster has one at most.
struct Work {
  int whole, all, unit = 0;
  u32 first = 0, halves = 2;  // of the unit at hand: which row of its tiles is its first, how often 64 it has
  __device__ __forceinline__ Work(int units) {
    const int stride = (int)gridDim.x / CLUSTER, rest = units % stride;
    whole = uniform(units - (2 * rest <= stride ? rest : 0));
    all = uniform(2 * units - whole);
  }
  __device__ __forceinline__ void take(int turn) {
    const int beyond = turn - whole;
    unit = beyond < 0 ? turn : whole + beyond / 2;
    first = beyond < 0 ? 0 : (u32)beyond % 2 * 64;
    halves = beyond < 0 ? 2 : 1;
  }
};

// The units of a matrix of tiles `high` x `wide`: below each other, and side by side in the rows that are
// left.
__device__ __forceinline__ int across(int wide) { return (wide + CLUSTER - 1) / CLUSTER; }
__device__ __forceinline__ int units_of(int high, int wide) {
  return high / CLUSTER * wide + high % CLUSTER * across(wide);
}

// Where tile `rank` of unit `rest` of such a matrix is: `height` rows of units at a time, column by column.
// Returns whether the unit's tiles are below each other.
__device__ __forceinline__ bool find_tile(int rest, int high, int wide, int height, u32 rank, int* row,
                                          int* column) {
  const int below = high / CLUSTER, group = rest / (height * wide);
  if (rest >= below * wide) {
    rest -= below * wide;
    *row = below * CLUSTER + rest / across(wide);
    *column = rest % across(wide) * CLUSTER + (int)rank;
    return false;
  }
  const int first = group * height;
  rest -= first * wide;
  height = min(below - first, height);
  *row = (first + rest % height) * CLUSTER + (int)rank;
  *column = rest / height;
  return true;
}

// One thread: a step's codes of both operands, at byte `along` of rows `a_row` and `b_row`; of a's tile, so
// many `halves`; of b's nothing, when there are no columns (b_row < 0).
__device__ __forceinline__ void fetch_codes(const Shared& s, const Turn& turn, const TensorMap* a,
                                            const TensorMap* b, u32 rank, bool below, u32 halves, int along,
                                            int a_row, int b_row) {
  u8* to = s.codes + turn.stage * STAGE_BYTES;
  u64* barrier = &s.full[turn.stage];
  barrier_wait(&s.empty[turn.stage], turn.phase ^ 1u);
  barrier_expect(barrier, halves * (A_BYTES / 2) + (b_row < 0 ? 0 : B_BYTES));
  const bool a_shared = CLUSTER > 1 && !below, b_shared = CLUSTER > 1 && below;
#pragma unroll
  for (u32 part = 0; part < 2; ++part) {
    if (part < halves && (!a_shared || part == rank))
      tile_load(to + part * (A_BYTES / 2), a, along, a_row + (int)part * (ROWS / 2), barrier,
                a_shared ? 3 : 1);
    if (b_row >= 0 && (!b_shared || part == rank))
      tile_load(to + A_BYTES + part * (B_BYTES / 2), b, along, b_row + (int)part * (COLUMNS / 2), barrier,
                b_shared ? 3 : 1);
  }
}

// Zeros past the `left` first codes of every row of a step: they belong to the next expert.
__device__ __forceinline__ void clear_behind(u8* codes, int left) {
  named_wait(1, MULTIPLIERS);
#pragma unroll 1
  for (u32 row = threadIdx.x; row < ROWS + COLUMNS; row += MULTIPLIERS)
#pragma unroll 1
    for (u32 c = (u32)left; c < STEP; ++c) codes[row * STEP + ((c / 16 ^ row % 8) * 16) + c % 16] = 0;
  fence_async();
  named_wait(1, MULTIPLIERS);
}

// A multiplying warpgroup's products of a tile, or of its upper half alone, `steps` of them, the last with
// only the `last` first codes of every row. scales_of(half, at) are those that a thread needs, promote(half,
// d, scales) adds d, 64 rows of the tile, to its sums; `at` is where the step's scales lie: FOUR steps' of a
// row side by side, or each step's with its codes. LATE: promote reads some of them, with the upper half.
// (That the warpgroups take turns, one scaling while the other's products run, is 5 % slower than as it
// comes.)
template <bool FOUR, bool LATE, class ScalesOf, class Promote>
__device__ __forceinline__ void multiply(const Shared& s, Turn& turn, u32 group, u32 halves, int steps,
                                         int last, const ScalesOf& scales_of, const Promote& promote) {
  const At codes = uniform(at_of(s.codes)), scales = codes + STAGES * STAGE_BYTES;
  const At full = scales + STAGES * STAGE_SCALES * 4 + TILE_BYTES;
  const At empty = kept(at_of_block(s.empty, threadIdx.x % 32 % CLUSTER));
  bool ready = false;
#pragma unroll 1
  for (int k = 0; k < steps; ++k) {
    const At here = codes + turn.stage * STAGE_BYTES;
    const At scales_here = scales + 4 * (FOUR ? turn.scales() : turn.stage * STAGE_SCALES);
    const At used = empty + turn.stage * 8;
    if (!ready) barrier_wait_at(full + turn.stage * 8, turn.phase);
    if (last < STEP && k + 1 == steps) clear_behind(s.codes + turn.stage * STAGE_BYTES, last);
    turn.next();
    const Tile a = tile_at(here), b = tile_at(here + A_BYTES + group * (128 * STEP));
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
      if (half >= halves) continue;
      const bool end = half + 1 == halves;
      float d[64];
      products_begin();
#pragma unroll
      for (u32 i = 0; i < STEP / 32; ++i)
        product<A_FMT, B_FMT>(d, a + half * (A_BYTES / 32) + 2 * i, b + 2 * i, i > 0);
      products_commit();
      // meanwhile
      auto by = scales_of(half, scales_here);
      if (end) ready = barrier_ready_at(full + turn.stage * 8, turn.phase);
      products_wait<0>();
      products_seen(d);
      auto give_back = [&] {  // all blocks of the cluster may have this stage's memory again
        __syncwarp();
        if (ARRIVING == 1 && threadIdx.x % 32 < CLUSTER) barrier_arrive_at(used);
        for (u32 block = 0; ARRIVING > 1 && block < CLUSTER; ++block)
          barrier_arrive_at(at_of_block(s.empty, block) + (used - empty));
      };
      const bool all_read = !LATE || half == 1;
      if (end && all_read) give_back();
      promote(half, d, by);
      if (end && !all_read) give_back();
    }
  }
}

// Two warps: a finished tile of bfloat16, up to `count` rows of `bytes` bytes, from shared memory to rows
// `pitch` bytes apart, by TMA.
__device__ __forceinline__ void write_tile(const Shared& s, int count, int bytes, u8* to, i64 pitch,
                                           u32& phase) {
  barrier_wait(s.made, phase);
  phase ^= 1u;
  if (bytes > 0)
    for (int row = (int)threadIdx.x % WRITERS; row < min(count, ROWS); row += WRITERS)
      bulk_store(to + row * pitch, s.tile + row * PITCH, (u32)min(bytes, 2 * COLUMNS));
  bulk_finish();
  __syncwarp();
  if (threadIdx.x % 32 < ARRIVING) barrier_arrive_here(s.written);
}

// The same of the upper half of a tile of float32, or (add) added to what is there.
__device__ __forceinline__ void write_wide_tile(const Shared& s, int count, int bytes, u8* to, i64 pitch,
                                                bool add, u32& phase) {
  const int row = (int)threadIdx.x % WRITERS;
  const u8* from = s.tile + row * WIDE_PITCH;
  barrier_wait(s.made, phase);
  phase ^= 1u;
  if (row < count && bytes > 0) {
    if (add)
      bulk_add_floats(to + row * pitch, from, (u32)min(bytes, 4 * COLUMNS));
    else
      bulk_store(to + row * pitch, from, (u32)min(bytes, 4 * COLUMNS));
  }
  bulk_finish();
  __syncwarp();
  if (threadIdx.x % 32 < ARRIVING) barrier_arrive_here(s.written);
}

// 64 rows of a multiplying warpgroup's sums straight to memory, or (ADD) added to what is there; ALL, or as
// far as there are rows and columns.
template <bool ADD, bool ALL>
__device__ __forceinline__ void store_sums(float* to, i64 pitch, int rows, int columns,
                                           const float (&sums)[64]) {
#pragma unroll
  for (u32 low = 0; low < 2; ++low, to += 8 * pitch) {
#pragma unroll
    for (u32 j = 0; j < 16; ++j) {
      const float2 two = make_float2(sums[4 * j + 2 * low], sums[4 * j + 2 * low + 1]);
      if (!ALL && (8 * (int)low >= rows || 8 * (int)j >= columns)) continue;
      if (ADD)
        add_floats(to + 8 * j, two);
      else
        *(float2*)(to + 8 * j) = two;
    }
  }
}
template <bool ADD>
__device__ __forceinline__ void store_sums(float* to, i64 pitch, int rows, int columns,
                                           const float (&sums)[64]) {
  if (rows > 8 && columns > 120)  // the compiler makes a branch of each condition
    store_sums<ADD, true>(to, pitch, rows, columns, sums);
  else
    store_sums<ADD, false>(to, pitch, rows, columns, sums);
}

// A multiplying warpgroup's sums, as bfloat16, to where the writers find them.
__device__ __forceinline__ void hand_over(const Shared& s, const float (&sums)[2][64], u32 group,
                                          u32& phase) {
  // made here, and not kept in a register while the products are made
  const u32 t = kept(threadIdx.x), lane = t % 32;
  // of 16 rows and 16 columns; this lane's row of them, and half of the columns
  const At to = at_of(s.tile) + (t % 128 / 32 * 16 + lane % 16) * PITCH + group * 256 + lane / 16 * 16;
  barrier_wait(s.written, phase ^ 1u);
  phase ^= 1u;
#pragma unroll
  for (u32 half = 0; half < 2; ++half)
#pragma unroll
    for (u32 j = 0; j < 16; j += 2) {
      const float* d = sums[half] + 4 * j;
      store_matrices_at(to + 64 * half * PITCH + 16 * j, to_bf16x2(d[0], d[1]), to_bf16x2(d[2], d[3]),
                        to_bf16x2(d[4], d[5]), to_bf16x2(d[6], d[7]));
    }
  fence_async();
  __syncwarp();
  if (lane < ARRIVING) barrier_arrive_here(s.made);
}

#if !BLOCKS
// What: out[r, n] = sum over k of x[r, k] w[e, n, k], e the expert of row r; zeros where r has none.
//   x row-wise codes [rows, depth], x_scales[r * row_stride + block * column_stride]; w codes [experts *
//   width, depth], w_scales [experts, ceil(width / 128), ceil(depth / 128)]; out bfloat16 [rows, width].
// Shapes: width a multiple of 8, depth of 16; any offsets.
// Launch: a block of 384 threads a multiprocessor, a multiple of CLUSTER.
extern "C" __global__ void __launch_bounds__(384, 1) __cluster_dims__(CLUSTER, 1, 1)
    grouped_gemm_tiles(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map,
                       const float* x_scales, i64 row_stride, i64 column_stride, const float* w_scales,
                       const int* offsets, i64 experts, i64 rows, i64 width, i64 depth, u16* out) {
  pdl_wait();
  DYNAMIC_SHARED_TILES(memory);
  const u32 t = threadIdx.x, lane = t % 32;
  const u32 group = __shfl_sync(0xffffffffu, t / 128, 0);  // so that the compiler knows it is a warp's
  const u32 rank = CLUSTER > 1 ? cluster_rank() : 0;
  const int steps = (int)((depth + STEP - 1) / STEP), column_blocks = (int)((width + 127) / 128);
  const int wide = (int)((width + COLUMNS - 1) / COLUMNS), stride = (int)gridDim.x / CLUSTER;
  const Shared s = begin(memory, offsets, (int)experts, rows,
                         [&](int count) { return units_of(blocks_of_128(count), wide); });
  const int height = max(IN_L2 / (CLUSTER * ROWS) / (int)depth, 1);
  Work work(s.first[experts]);
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
    first_column *= COLUMNS;
  };
  if (group == 2) {
    fewer_registers<56>();
    const u32 warp = __shfl_sync(0xffffffffu, t / 32 % 4, 0);
    // 4 bytes of a row at a time cost 2 to 5 % of the products
    const bool by_four = column_stride == 1 && (row_stride | steps) % 4 == 0 &&
                         (((size_t)x_scales | (size_t)w_scales) & 15) == 0;
    if (warp == 0) {
      if (lane == 0) {
        prefetch_map(&x_map);
        prefetch_map(&w_map);
        for (int tile = (int)blockIdx.x / CLUSTER; tile < work.all; tile += stride) {
          find(tile);
          for (int k = 0; k < steps; ++k, turn.next())
            fetch_codes(s, turn, &x_map, &w_map, rank, below, work.halves, k * STEP, first_row,
                        first_column < width ? e * (int)width + first_column : -1);
        }
      }
    } else if (warp == 1) {
      for (int tile = (int)blockIdx.x / CLUSTER; tile < work.all; tile += stride) {
        find(tile);
        const float* from = x_scales + (first_row + (i64)lane) * row_stride;
        const int block = min(first_column / 128 + (int)lane, column_blocks - 1);
        const float* w_from = w_scales + (e * (i64)column_blocks + block) * steps;
        for (int k = 0; k < steps; ++k, turn.next()) {
          float* to = s.scales + turn.scales() + 4 * lane;
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
    } else {
      // rows of no expert
      const i64 vectors = width / 8, head = s.offsets[0] * vectors, tail = s.offsets[experts] * vectors;
      for (i64 i = blockIdx.x * WRITERS + t % WRITERS; i < head + rows * vectors - tail;
           i += gridDim.x * WRITERS)
        ((uint4*)out)[i < head ? i : i - head + tail] = make_uint4(0u, 0u, 0u, 0u);
      for (int tile = (int)blockIdx.x / CLUSTER; tile < work.all; tile += stride) {
        find(tile);
        write_tile(s, min(last_row - first_row, (int)work.halves * 64), 2 * ((int)width - first_column),
                   (u8*)(out + first_row * width + first_column), 2 * width, phase);
      }
    }
  } else {
    more_registers<224>();
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
    for (int tile = (int)blockIdx.x / CLUSTER; tile < work.all; tile += stride) {
#pragma unroll
      for (int i = 0; i < 64; ++i) sums[0][i] = sums[1][i] = 0.f;
      work.take(tile);
      if (work.halves == 2)
        multiply<true, false>(s, turn, group, 2, steps, STEP, scales_of, promote);
      else
        multiply<true, false>(s, turn, group, 1, steps, STEP, scales_of, promote);
      hand_over(s, sums, group, phase);
    }
  }
  end();
}
#endif

// One warp: a step's codes of both operands where the experts' rows begin at no multiple of 16, and the copy
// engine does not take them. `along` of `rows` codes, row by row, to where it would have put them.
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

// In place of scales that are not there: NaN.
__device__ __align__(16) const u32 NO_SCALES[4] = {0x7fc00000u, 0x7fc00000u, 0x7fc00000u, 0x7fc00000u};

// What: out[e, n, k] (+)= sum over the rows r of expert e of dy[r, n] x[r, k].
//   dy column-wise codes [width, rows], dy_scales [blocks, width]; x [depth, rows], x_scales [blocks, depth];
//   blocks of 128 rows, anew with every expert, of which `known` have scales; out float32 or bfloat16
//   [experts, width, depth]. BLOCKS: dy_scales [ceil(width / 128), ceil(rows / 128)] and x_scales likewise,
//   and experts begin at multiples of 128 rows. Those of columns take two instructions a sum, and loads
//   beside the products; these one, and made 1316 and 1291 TFLOP/s where those made 1081 and 1050.
// Shapes: rows a multiple of 16, width of 4, depth of 8; any offsets. Experts that begin at no multiple of 16
//   rows are slow, and multiples of 128 rows fastest.
// Launch: a block of 384 threads a multiprocessor, a multiple of CLUSTER.
extern "C" __global__ void __launch_bounds__(384, 1) __cluster_dims__(CLUSTER, 1, 1)
    grouped_gemm_wgrad_tiles(const __grid_constant__ TensorMap dy_map,
                             const __grid_constant__ TensorMap x_map, const u8* dy, const u8* x,
                             const float* dy_scales, const float* x_scales, i64 known, const int* offsets,
                             i64 experts, i64 rows, i64 width, i64 depth, i64 accumulate, i64 out_kind,
                             void* out) {
  pdl_wait();
  DYNAMIC_SHARED_TILES(memory);
  const u32 t = threadIdx.x, lane = t % 32;
  const u32 group = __shfl_sync(0xffffffffu, t / 128, 0);
  const u32 rank = CLUSTER > 1 ? cluster_rank() : 0;
  const Shared s = begin(memory, offsets, (int)experts, rows, [](int count) { return blocks_of_128(count); });
  const int high = (int)((width + ROWS - 1) / ROWS), wide = (int)((depth + COLUMNS - 1) / COLUMNS);
  const int units = units_of(high, wide), stride = (int)gridDim.x / CLUSTER;
  Work work((int)experts * units);
  Turn turn;
  u32 phase = 0;  // of the tile in shared memory
  int e, first_row, first_column, steps;
  bool below;
  auto find = [&](int tile) {
    work.take(tile);
    e = work.unit / units;
    below = find_tile(work.unit - e * units, high, wide, HEIGHT / CLUSTER, rank, &first_row, &first_column);
    first_row = first_row * ROWS + (int)work.first;
    first_column *= COLUMNS;
    steps = s.first[e + 1] - s.first[e];
  };
  if (group == 2) {
    fewer_registers<BLOCKS ? 56 : 24>();
    const u32 warp = __shfl_sync(0xffffffffu, t / 32 % 4, 0);
    if (warp == 0) {
      if (lane == 0) {
        prefetch_map(&dy_map);
        prefetch_map(&x_map);
        for (int tile = (int)blockIdx.x / CLUSTER; tile < work.all; tile += stride) {
          find(tile);
          for (int k = 0; k < steps; ++k, turn.next())
            if (s.offsets[e] % 16 == 0)
              fetch_codes(s, turn, &dy_map, &x_map, rank, below, work.halves, s.offsets[e] + k * STEP,
                          first_row, first_column < depth ? first_column : -1);
        }
      }
    } else if (warp == 1) {
      for (int tile = (int)blockIdx.x / CLUSTER; tile < work.all; tile += stride) {
        find(tile);
        const int row = first_row + 4 * (int)lane, column = first_column + 4 * (int)lane;
        const float* from = dy_scales + s.first[e] * width + row;
        const float* x_from = x_scales + s.first[e] * depth + column;
        if (BLOCKS) {  // lane 0: of dy; 1 and 2: of x
          const int block = min(first_column / 128 + (int)lane, blocks_of_128((int)depth)) - 1;
          from = lane == 0 ? dy_scales + first_row / 128 * (i64)blocks_of_128((int)rows)
                           : x_scales + block * (i64)blocks_of_128((int)rows);
          from += s.offsets[e] / 128;
        }
        for (int k = 0; k < steps; ++k, turn.next(), from += BLOCKS ? 1 : width, x_from += depth) {
          float* to = s.scales + turn.stage * STAGE_SCALES + (BLOCKS ? 1 : 4) * lane;
          barrier_wait(&s.empty[turn.stage], turn.phase ^ 1u);
          if (s.offsets[e] % 16) {
            copy_codes(s.codes + turn.stage * STAGE_BYTES, dy, first_row, width, x, first_column, depth,
                       s.offsets[e] + k * STEP, rows);
            if (lane == 0) barrier_arrive_here(&s.full[turn.stage]);
          }
          if (BLOCKS) {
            if (lane < 3) copy_async4(to, from, true);
          } else {
            const bool some = s.first[e] + k < known;
            copy_async16(to, some ? (const void*)from : NO_SCALES, row < width);
#pragma unroll
            for (int i = 0; i < 2; ++i)
              copy_async16(to + ROWS + 128 * i, some ? (const void*)(x_from + 128 * i) : NO_SCALES,
                           column + 128 * i < depth);
          }
          barrier_arrive_copied(&s.full[turn.stage]);
        }
      }
    } else {
      for (int tile = (int)blockIdx.x / CLUSTER; tile < work.all; tile += stride) {
        find(tile);
        if (accumulate && steps == 0) continue;
        const i64 at = (e * width + first_row) * depth + first_column;
        const int count = min((int)width - first_row, (int)work.halves * 64);
        const int columns = (int)depth - first_column;
        if (out_kind == F32)  // the upper half; the other goes by itself
          write_wide_tile(s, count, 4 * columns, (u8*)((float*)out + at), 4 * depth, accumulate, phase);
        else
          write_tile(s, count, 2 * columns, (u8*)((u16*)out + at), 2 * depth, phase);
      }
    }
  } else {
    more_registers<BLOCKS ? 224 : 240>();
    const u32 my_row = t % 128 / 32 * 16 + lane / 4, my_column = group * 128 + lane % 4 * 2;
    float sums[2][64];
    float2 columns[16];  // their scales, read with the upper half and kept for the lower
    struct Scales {
      float upper, lower;  // of the row and of that 8 below it
      At of_columns;       // of two columns each, 32 bytes apart
    };
    auto scales_of = [&](u32 half, At scales) {
      const At of_rows = scales + 4 * (64 * half + my_row);
      const Scales by{load_at(of_rows), load_at(of_rows + 32), scales + 4 * (ROWS + my_column)};
      if (half == 0)
#pragma unroll
        for (u32 j = 0; j < AHEAD; ++j) columns[j] = load2_at(by.of_columns + 32 * j);
      return by;
    };
    auto promote = [&](u32 half, const float (&d)[64], const Scales& by) {
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
    auto promote_all = [&](u32 half, const float (&d)[64], float by) {
#pragma unroll
      for (u32 i = 0; i < 64; ++i) sums[half][i] = __fmaf_rn(d[i], by, sums[half][i]);
    };
    for (int tile = (int)blockIdx.x / CLUSTER; tile < work.all; tile += stride) {
      find(tile);
#pragma unroll
      for (int i = 0; i < 64; ++i) sums[0][i] = sums[1][i] = 0.f;
      const int count = uniform(steps), last = uniform(s.offsets[e + 1] - s.offsets[e] - (steps - 1) * STEP);
      if (BLOCKS)
        multiply<false, false>(s, turn, group, work.halves, count, last, scale_of, promote_all);
      else
        multiply<false, true>(s, turn, group, work.halves, count, last, scales_of, promote);
      find(tile);  // again, so that nothing of it takes registers meanwhile
      if (accumulate && steps == 0) continue;
      // value i of a half is in row `row` + 64 half, 8 below it with i & 2, and column `column` + i / 4 * 8
      const int row = first_row + (int)my_row, column = first_column + (int)my_column;
      const int high_left = (int)width - row, wide_left = (int)depth - column;
      const i64 at = (e * width + row) * depth + column;
      if (out_kind == F32) {
        // The lower half first: its stores are on their way while the upper half is put into shared memory.
        // The other way round took 3 % longer, both halves this way 2 %.
        if (work.halves == 2) {
          float* lower = (float*)out + at + 64 * depth;
          if (accumulate)
            store_sums<true>(lower, depth, high_left - 64, wide_left, sums[1]);
          else
            store_sums<false>(lower, depth, high_left - 64, wide_left, sums[1]);
        }
        barrier_wait(s.written, phase ^ 1u);
        phase ^= 1u;
        float* to = (float*)(s.tile + my_row * WIDE_PITCH) + my_column;
#pragma unroll
        for (u32 j = 0; j < 16; ++j) {
          *(float2*)(to + 8 * j) = make_float2(sums[0][4 * j], sums[0][4 * j + 1]);
          *(float2*)(to + 8 * j + 8 * WIDE_PITCH / 4) = make_float2(sums[0][4 * j + 2], sums[0][4 * j + 3]);
        }
        fence_async();
        __syncwarp();
        if (lane < ARRIVING) barrier_arrive_here(s.made);
      } else {
        if (accumulate)
#pragma unroll
          for (u32 half = 0; half < 2; ++half) {
            u32 two[32];  // all are asked for before one is used: 960 TFLOP/s, else 720
#pragma unroll
            for (u32 i = 0; i < 32; ++i) {
              const int further = (int)(64 * half + i % 2 * 8), beside = (int)(i / 2 * 8);
              const bool there = further < high_left && beside < wide_left;
              two[i] = there ? *(const u32*)((const u16*)out + at + further * depth + beside) : 0u;
            }
#pragma unroll
            for (u32 i = 0; i < 32; ++i) {
              sums[half][2 * i] += bf16_to_float((u16)two[i]);
              sums[half][2 * i + 1] += bf16_to_float((u16)(two[i] >> 16));
            }
          }
        hand_over(s, sums, group, phase);
      }
    }
  }
  end();
}
#endif
