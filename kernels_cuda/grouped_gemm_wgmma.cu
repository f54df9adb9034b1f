// Grouped GEMM of FP8 operands on Hopper's tensor cores (sm_90a); elsewhere this file is empty.
//
// Both kernels are the same machine. A block makes tiles of 128 x 256 of the result. Its third warpgroup
// fetches: one thread the codes of both operands by the copy engine, 128 steps of the contraction at a time,
// one warp their scales; STAGES such fetches are on their way at once. The other two warpgroups multiply,
// each all 128 rows by its own 128 columns, 64 rows at a time: four products of 32 codes, summed in the
// tensor cores, then scaled and added to float32 sums in registers. While one of them scales, the other's
// products run.
//
// CLUSTER blocks that work side by side on the same rows share them: each fetches its part for all.
#include "wgmma.cuh"

#ifndef A_FMT
#define A_FMT 0  // of x, or of dy
#define B_FMT 0  // of w, or of x
#define CLUSTER 2
#endif

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define ROWS 128
#define COLUMNS 256
#define STEP 128
#define STAGES 4
#define A_BYTES (ROWS * STEP)
#define STAGE_BYTES ((ROWS + COLUMNS) * STEP)
#define STAGE_SCALES (ROWS + COLUMNS)
#define HEIGHT 16  // rows of tiles that are worked on at a time, so that their operands stay in L2
#define MULTIPLIERS 256

struct Shared {
  u8* codes;      // [STAGES][STAGE_BYTES]: rows of the first operand, then of the second
  float* scales;  // [STAGES][STAGE_SCALES]
  int* offsets;   // [experts + 1]
  int* first;     // [experts + 1]: how many blocks of 128 rows all experts before have
};

struct Turn {  // of the stages
  u32 stage = 0, phase = 0;
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, phase ^= 1u;
  }
};

// The whole block: where things are in shared memory, the experts' table, the barriers.
__device__ __forceinline__ Shared begin(u8* memory, const int* offsets, int experts, i64 rows, u64* full,
                                        u64* empty) {
  const u32 t = threadIdx.x, lane = t % 32;
  Shared s;
  s.codes = memory;
  s.scales = (float*)(memory + STAGES * STAGE_BYTES);
  s.offsets = (int*)(s.scales + STAGES * STAGE_SCALES);
  s.first = s.offsets + experts + 1;
  if (t == 0)
    for (u32 i = 0; i < STAGES; ++i) {
      barrier_init(&full[i], 1 + 32);  // who announces the codes; the warp that fetches scales
      barrier_init(&empty[i], CLUSTER * MULTIPLIERS / 32);
    }
  for (int e = (int)t; e <= experts; e += (int)blockDim.x) s.offsets[e] = (int)clamped(offsets[e], rows);
  __syncthreads();
  if (t < 32) {
    int before = 0;
    for (int e0 = 0; e0 <= experts; e0 += 32) {
      const int e = e0 + (int)lane, count = e < experts ? s.offsets[e + 1] - s.offsets[e] : 0;
      const int mine = count > 0 ? (count + 127) / 128 : 0;
      int total = mine;
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, total, step);
        if ((int)lane >= step) total += other;
      }
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

// Tile `rest` of a matrix of tiles `high` x `wide`: HEIGHT rows of it at a time, column by column.
__device__ __forceinline__ void find_tile(int rest, int high, int wide, int* row, int* column) {
  const int group = rest / (HEIGHT * wide), height = min(high - group * HEIGHT, HEIGHT);
  rest -= group * HEIGHT * wide;
  *row = group * HEIGHT + rest % height;
  *column = rest / height;
}

// One thread: a step's codes of both operands, at byte `along` of rows `a_row` and `b_row`.
__device__ __forceinline__ void fetch_codes(const Shared& s, const TensorMap* a, const TensorMap* b,
                                            const Turn& turn, u32 rank, int along, int a_row, int b_row,
                                            u64* full, u64* empty) {
  u8* to = s.codes + turn.stage * STAGE_BYTES;
  u64* barrier = &full[turn.stage];
  barrier_wait(&empty[turn.stage], turn.phase ^ 1u);
  barrier_expect(barrier, STAGE_BYTES);
  for (u32 part = 0; part < 2; ++part)
    if (CLUSTER == 1 || part == rank)
      tile_load(to + part * (A_BYTES / 2), a, along, a_row + (int)part * (ROWS / 2), barrier,
                CLUSTER == 1 ? 1 : 3);
  tile_load(to + A_BYTES, b, along, b_row, barrier, 1);
}

// One warp: all blocks of the cluster may have this stage's memory again.
__device__ __forceinline__ void release(u64* empty, u32 stage) {
  __syncwarp();
  if (threadIdx.x % 32 < CLUSTER) barrier_arrive(&empty[stage], threadIdx.x % 32);
}

// One warpgroup: 64 rows by 128 columns over one step.
__device__ __forceinline__ void multiply(float (&d)[64], Tile a, Tile b) {
  products_begin();
#pragma unroll
  for (u32 k = 0; k < STEP / 32; ++k) product<A_FMT, B_FMT>(d, a + 2 * k, b + 2 * k, k > 0);
  products_commit();
  products_wait<0>();
}

// Four words in each of four lanes, transposed: lane q has word q of all four.
__device__ __forceinline__ void transpose_words(u32 (&w)[4]) {
  const u32 lane = threadIdx.x;
#pragma unroll
  for (u32 bit = 1; bit < 4; bit *= 2) {
    const bool upper = lane & bit;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const u32 got = __shfl_xor_sync(0xffffffffu, upper ? w[i] : w[i | bit], (int)bit);
      if (upper)
        w[i] = got;
      else
        w[i | bit] = got;
    }
  }
}

// What: out[r, n] = sum over k of x[r, k] w[e, n, k], e the expert of row r; zeros where r has none.
//   x row-wise codes [rows, depth], x_scales[r * row_stride + block * column_stride]; w codes [experts *
//   width, depth], w_scales [experts, ceil(width / 128), ceil(depth / 128)]; out bfloat16 [rows, width].
// Shapes: width a multiple of 8, depth of 16; any offsets.
// Launch: a block of 384 threads a multiprocessor, CLUSTER a multiple of them.
extern "C" __global__ void __launch_bounds__(384, 1) __cluster_dims__(CLUSTER, 1, 1)
    grouped_gemm_tiles(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map,
                       const float* x_scales, i64 row_stride, i64 column_stride, const float* w_scales,
                       const int* offsets, i64 experts, i64 rows, i64 width, i64 depth, u16* out) {
  DYNAMIC_SHARED_TILES(memory);
  __shared__ u64 full[STAGES], empty[STAGES];
  const u32 t = threadIdx.x, lane = t % 32, group = t / 128, rank = CLUSTER > 1 ? cluster_rank() : 0;
  const Shared s = begin(memory, offsets, (int)experts, rows, full, empty);
  const int steps = (int)((depth + STEP - 1) / STEP), column_blocks = (int)((width + 127) / 128);
  const int wide = (int)((width + COLUMNS * CLUSTER - 1) / (COLUMNS * CLUSTER));
  const int total = s.first[experts] * wide, stride = (int)gridDim.x / CLUSTER;
  Turn turn;
  int e, first_row, last_row, first_column;
  auto find = [&](int tile) {
    e = last_at_most(s.first, (int)experts, tile / wide);
    int row, column;
    find_tile(tile - s.first[e] * wide, s.first[e + 1] - s.first[e], wide, &row, &column);
    first_row = s.offsets[e] + row * ROWS;
    last_row = s.offsets[e + 1];
    first_column = (column * CLUSTER + (int)rank) * COLUMNS;
  };
  if (group == 2) {
    fewer_registers<40>();
    const u32 warp = t / 32 % 4;
    if (warp == 0 && lane == 0) {
      prefetch_map(&x_map);
      prefetch_map(&w_map);
      for (int tile = (int)blockIdx.x / CLUSTER; tile < total; tile += stride) {
        find(tile);
        for (int k = 0; k < steps; ++k, turn.next())
          fetch_codes(s, &x_map, &w_map, turn, rank, k * STEP, first_row, e * (int)width + first_column, full,
                      empty);
      }
    } else if (warp == 1) {
      for (int tile = (int)blockIdx.x / CLUSTER; tile < total; tile += stride) {
        find(tile);
        const float* from = x_scales + (first_row + (i64)lane) * row_stride;
        const int block = min(first_column / 128 + (int)lane, column_blocks - 1);
        const float* w_from = w_scales + (e * (i64)column_blocks + block) * steps;
        for (int k = 0; k < steps; ++k, turn.next()) {
          float* to = s.scales + turn.stage * STAGE_SCALES;
          barrier_wait(&empty[turn.stage], turn.phase ^ 1u);
#pragma unroll
          for (int i = 0; i < 4; ++i)
            copy_async4(to + lane + 32 * i, from + 32 * i * row_stride + k * column_stride,
                        first_row + (int)lane + 32 * i < rows);
          if (lane < 2) copy_async4(to + ROWS + lane, w_from + k, true);
          barrier_arrive_copied(&full[turn.stage]);
        }
      }
    } else if (warp > 1) {  // rows of no expert
      const i64 vectors = width / 8, head = s.offsets[0] * vectors, tail = s.offsets[experts] * vectors;
      for (i64 i = blockIdx.x * 64 + t % 64; i < head + rows * vectors - tail; i += gridDim.x * 64)
        ((uint4*)out)[i < head ? i : i - head + tail] = make_uint4(0u, 0u, 0u, 0u);
    }
  } else {
    more_registers<232>();
    const u32 my_row = t % 128 / 32 * 16 + lane / 4;
    float sums[2][64];
    for (int tile = (int)blockIdx.x / CLUSTER; tile < total; tile += stride) {
      find(tile);
#pragma unroll
      for (int i = 0; i < 64; ++i) sums[0][i] = sums[1][i] = 0.f;
#pragma unroll 1
      for (int k = 0; k < steps; ++k, turn.next()) {
        barrier_wait(&full[turn.stage], turn.phase);
        const float* scales = s.scales + turn.stage * STAGE_SCALES;
        const u8* codes = s.codes + turn.stage * STAGE_BYTES;
        const float of_columns = scales[ROWS + group];
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
          const float upper = scales[64 * half + my_row] * of_columns;
          const float lower = scales[64 * half + my_row + 8] * of_columns;
          float d[64];
          multiply(d, tile_of(codes + half * (A_BYTES / 2)), tile_of(codes + A_BYTES + group * (128 * STEP)));
          if (half) release(empty, turn.stage);
#pragma unroll
          for (u32 i = 0; i < 64; ++i) sums[half][i] = __fmaf_rn(d[i], i & 2 ? lower : upper, sums[half][i]);
        }
      }
#pragma unroll
      for (u32 half = 0; half < 2; ++half)
#pragma unroll
        for (u32 low = 0; low < 2; ++low) {
          const int row = first_row + (int)(64 * half + my_row + 8 * low);
          const int column = first_column + (int)(group * 128 + lane % 4 * 8);
          u16* to = out + row * width + column;
#pragma unroll
          for (u32 j = 0; j < 4; ++j) {
            u32 w[4];
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
              const float* two = &sums[half][4 * (4 * j + i) + 2 * low];
              w[i] = pack_bf16(two[0], two[1]);
            }
            transpose_words(w);
            if (row < last_row && column + 32 * (int)j < width)
              *(uint4*)(to + 32 * j) = make_uint4(w[0], w[1], w[2], w[3]);
          }
        }
    }
  }
  end();
}

// Zeros past the `left` first codes of every row of a stage: they belong to the next expert.
__device__ __forceinline__ void clear_behind(u8* codes, int left) {
  named_wait(1, MULTIPLIERS);
#pragma unroll 1
  for (u32 row = threadIdx.x; row < ROWS + COLUMNS; row += MULTIPLIERS)
#pragma unroll 1
    for (u32 c = (u32)left; c < STEP; ++c) codes[row * STEP + ((c / 16 ^ row % 8) * 16) + c % 16] = 0;
  fence_async();
  named_wait(1, MULTIPLIERS);
}

// What: out[e, n, k] (+)= sum over the rows r of expert e of dy[r, n] x[r, k].
//   dy column-wise codes [width, rows], dy_scales [blocks, width]; x [depth, rows], x_scales [blocks, depth];
//   blocks of 128 rows, anew with every expert; out float32 or bfloat16 [experts, width, depth].
// Shapes: rows a multiple of 16, width and depth of 16; any offsets, experts in multiples of 128 rows
// fastest. Launch: a block of 384 threads a multiprocessor, CLUSTER a multiple of them.
extern "C" __global__ void __launch_bounds__(384, 1) __cluster_dims__(CLUSTER, 1, 1)
    grouped_gemm_wgrad_tiles(const __grid_constant__ TensorMap dy_map,
                             const __grid_constant__ TensorMap x_map, const float* dy_scales,
                             const float* x_scales, const int* offsets, i64 experts, i64 rows, i64 width,
                             i64 depth, i64 accumulate, i64 out_kind, void* out) {
  DYNAMIC_SHARED_TILES(memory);
  __shared__ u64 full[STAGES], empty[STAGES];
  const u32 t = threadIdx.x, lane = t % 32, group = t / 128, rank = CLUSTER > 1 ? cluster_rank() : 0;
  const Shared s = begin(memory, offsets, (int)experts, rows, full, empty);
  const int stride = (int)gridDim.x / CLUSTER;
  Turn turn;
  int e, first_row, first_column, steps;
  __shared__ volatile int matrix[3];  // of tiles, an expert's, and all; here they take no registers
  if (t == 0) {
    matrix[0] = (int)((width + ROWS - 1) / ROWS);
    matrix[1] = (int)((depth + COLUMNS * CLUSTER - 1) / (COLUMNS * CLUSTER));
    matrix[2] = (int)experts * matrix[0] * matrix[1];
  }
  __syncthreads();
  auto find = [&](int tile) {
    const int high = matrix[0], wide = matrix[1];
    e = tile / (high * wide);
    find_tile(tile - e * (high * wide), high, wide, &first_row, &first_column);
    first_row *= ROWS;
    first_column = (first_column * CLUSTER + (int)rank) * COLUMNS;
    steps = s.first[e + 1] - s.first[e];
  };
  if (group == 2) {
    fewer_registers<40>();
    const u32 warp = t / 32 % 4;
    if (warp == 0 && lane == 0) {
      prefetch_map(&dy_map);
      prefetch_map(&x_map);
      for (int tile = (int)blockIdx.x / CLUSTER; tile < matrix[2]; tile += stride) {
        find(tile);
        for (int k = 0; k < steps; ++k, turn.next())
          fetch_codes(s, &dy_map, &x_map, turn, rank, s.offsets[e] + k * STEP, first_row, first_column, full,
                      empty);
      }
    } else if (warp == 1) {
      for (int tile = (int)blockIdx.x / CLUSTER; tile < matrix[2]; tile += stride) {
        find(tile);
        const float* from = dy_scales + s.first[e] * width + first_row;
        const float* x_from = x_scales + s.first[e] * depth + first_column;
        for (int k = 0; k < steps; ++k, turn.next(), from += width, x_from += depth) {
          float* to = s.scales + turn.stage * STAGE_SCALES;
          barrier_wait(&empty[turn.stage], turn.phase ^ 1u);
          copy_async16(to + 4 * lane, from + 4 * lane, first_row + 4 * (int)lane < width);
#pragma unroll
          for (u32 at = 4 * lane; at < COLUMNS; at += 128)
            copy_async16(to + ROWS + at, x_from + at, first_column + (int)at < depth);
          barrier_arrive_copied(&full[turn.stage]);
        }
      }
    }
  } else {
    more_registers<232>();
    const u32 my_row = t % 128 / 32 * 16 + lane / 4;
    float sums[2][64];
    for (int tile = (int)blockIdx.x / CLUSTER; tile < matrix[2]; tile += stride) {
      find(tile);
#pragma unroll
      for (int i = 0; i < 64; ++i) sums[0][i] = sums[1][i] = 0.f;
#pragma unroll 1
      for (int k = 0; k < steps; ++k, turn.next()) {
        barrier_wait(&full[turn.stage], turn.phase);
        u8* codes = s.codes + turn.stage * STAGE_BYTES;
        const int left = s.offsets[e + 1] - s.offsets[e] - k * STEP;
        if (left < STEP) clear_behind(codes, left);
        const float* scales = s.scales + turn.stage * STAGE_SCALES;
        const float* of_columns = scales + ROWS + group * 128 + lane % 4 * 2;
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
          const float upper = scales[64 * half + my_row], lower = scales[64 * half + my_row + 8];
          float d[64];
          multiply(d, tile_of(codes + half * (A_BYTES / 2)), tile_of(codes + A_BYTES + group * (128 * STEP)));
#pragma unroll
          for (u32 j = 0; j < 16; ++j) {
            if (j % 4 == 0) loads_stay_behind();
            const float2 by = *(const float2*)(of_columns + 8 * j);
            sums[half][4 * j] = __fmaf_rn(d[4 * j] * by.x, upper, sums[half][4 * j]);
            sums[half][4 * j + 1] = __fmaf_rn(d[4 * j + 1] * by.y, upper, sums[half][4 * j + 1]);
            sums[half][4 * j + 2] = __fmaf_rn(d[4 * j + 2] * by.x, lower, sums[half][4 * j + 2]);
            sums[half][4 * j + 3] = __fmaf_rn(d[4 * j + 3] * by.y, lower, sums[half][4 * j + 3]);
          }
        }
        release(empty, turn.stage);
      }
      if (accumulate && steps == 0) continue;
      const int column = first_column + (int)(group * 128 + lane % 4 * 2);
#pragma unroll
      for (u32 half = 0; half < 2; ++half)
#pragma unroll
        for (u32 low = 0; low < 2; ++low) {
          const int row = first_row + (int)(64 * half + my_row + 8 * low);
          if (row >= width) continue;
          const i64 at = (e * width + row) * depth + column;
          float* wide_out = (float*)out + at;
          u32* narrow_out = (u32*)((u16*)out + at);
#pragma unroll
          for (u32 j0 = 0; j0 < 16; j0 += 4) {  // four loads at once
            float2 old[4];
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
              old[j] = make_float2(0.f, 0.f);
              if (!accumulate || column + 8 * (int)(j0 + j) >= depth) continue;
              if (out_kind == F32) {
                old[j] = *(const float2*)(wide_out + 8 * (j0 + j));
              } else {
                const u32 two = narrow_out[4 * (j0 + j)];
                old[j] = make_float2(bf16_to_float((u16)two), bf16_to_float((u16)(two >> 16)));
              }
            }
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
              if (column + 8 * (int)(j0 + j) >= depth) continue;
              const float* two = &sums[half][4 * (j0 + j) + 2 * low];
              const float a = old[j].x + two[0], b = old[j].y + two[1];
              if (out_kind == F32)
                *(float2*)(wide_out + 8 * (j0 + j)) = make_float2(a, b);
              else
                narrow_out[4 * (j0 + j)] = pack_bf16(a, b);
            }
          }
        }
    }
  }
  end();
}
#endif
