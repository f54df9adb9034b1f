// Grouped GEMM by mma.sync, weight gradient: bfloat16, float16 and FP8 on every tensor core from sm_80 on.
#if !defined KIND && !defined A_FMT
#define A_FMT 0   // of dy
#define B_FMT 0   // of x
#define BLOCKS 0  // 1: operands have one scale per 128 x 128 codes
#endif
// Rows of tiles processed together. 32,768 x 4096 x 7168 with 8 experts in bfloat16 on an H200: 431 TFLOP/s,
// with 8 rows 421; tiles of 128 x 128 with two thread blocks per SM 429 and 416.
#define HEIGHT 16
#include "mma_pipeline.cuh"

// out[e, n, k] = sum over the rows r of expert e of dy[r, n] x[r, k], or += if accumulating.
// Arguments: dy [rows, width] and x [rows, depth] of KIND; or column-wise codes [width, rows] and [depth,
//   rows] with scales [blocks, width] and [blocks, depth], where blocks of 128 rows restart at each expert
//   and `known` of them have scales (the others give NaN); or (BLOCKS) scales [ceil(width / 128), ceil(rows /
//   128)] and [ceil(depth / 128), ...], where experts whose first row is not a multiple of 128 give NaN. out
//   [experts, width, depth] of any dtype.
// Requires: nothing of shapes and offsets. Operand rows or experts that are not 16-byte aligned are read
//   value by value.
// Launch: one thread block of THREADS per tile: experts * ceil(width / ROWS) * ceil(depth / COLUMNS).
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    grouped_gemm_wgrad_mma(const void* dy, const float* dy_scales, const void* x, const float* x_scales,
                           i64 known, const int* offsets, i64 experts, i64 rows, i64 width, i64 depth,
                           i64 accumulate, i64 out_kind, void* out) {
  pdl_wait();
  DYNAMIC_SHARED(memory);
  const i64 high = blocks_of(width, ROWS), wide = blocks_of(depth, COLUMNS);
  const i64 e = blockIdx.x / (high * wide);
  const i64 lo = clamped(offsets[e], rows), hi = max(clamped(offsets[e + 1], rows), lo);
  i64 row, column;
  find_tile(blockIdx.x - e * (high * wide), high, wide, &row, &column);
  row *= ROWS;
  column *= COLUMNS;
  if (accumulate && lo == hi) return;
  const int steps = (int)blocks_of(hi - lo, STEP);
  Sums sums;
  clear(sums);
#ifdef KIND
  Operand<true, ROWS> a(dy, width, row, width, lo, hi);
  Operand<true, COLUMNS> b(x, depth, column, depth, lo, hi);
  multiply<true, true>(memory, a, b, steps, sums, [](int) {}, [](int, Sums&) {});
#else
  Operand<false, ROWS> a(dy, rows, row, width, lo, hi);
  Operand<false, COLUMNS> b(x, rows, column, depth, lo, hi);
  const Part part;
  Sums d;
  clear(d);
#if BLOCKS
  const i64 blocks = blocks_of(rows, 128);
  const float *of_rows = dy_scales + row / 128 * blocks + lo / 128,
              *of_columns = x_scales + column / 128 * blocks + lo / 128;
  float scale;
  multiply<false, false>(
      memory, a, b, steps, d,
      [&](int k) { scale = lo % 128 ? __uint_as_float(0x7fc00000u) : of_rows[k] * of_columns[k]; },
      [&](int, Sums& d) {
#pragma unroll
        for (int i = 0; i < ROW_TILES; ++i)
#pragma unroll
          for (int j = 0; j < COLUMN_TILES; ++j)
#pragma unroll
            for (int v = 0; v < 4; ++v) sums[i][j][v] = __fmaf_rn(d[i][j][v], scale, sums[i][j][v]);
        clear(d);
      });
#else
  __shared__ i64 blocks_before;
  if (threadIdx.x < 32) {
    i64 first;
    find_expert(offsets, e, rows, (i64)1 << 62, &first, [](i64 count) { return blocks_of(count, 128); });
    if (threadIdx.x == 0) blocks_before = first;
  }
  __syncthreads();
  const i64 first = blocks_before;
  // columns past the end read the last column's scale
  const int last_row = (int)min(width - row, (i64)ROWS) - 1;
  const int last_column = (int)min(depth - column, (i64)COLUMNS) - 1;
  RowScales of_rows;
  float own_column;
  // the column whose scale this lane loads
  const int of_lane = min(
      part.first_column + (int)threadIdx.x % 4 * 2 + (int)threadIdx.x / 8 % 4 * 8 + (int)threadIdx.x / 4 % 2,
      last_column);
  static_assert(WARP_COLUMNS == 32, "a scale per lane");
  multiply<false, false>(
      memory, a, b, steps, d,
      [&](int k) {
        const bool has_scales = first + k < known;
        const i64 block = has_scales ? first + k : 0;
        const float* rows_from = dy_scales + block * width + row;
        of_rows.fetch(part, [&](int i) {
          const float scale = rows_from[min(i, last_row)];
          return has_scales ? scale : __uint_as_float(0x7fc00000u);
        });
        own_column = x_scales[block * depth + column + of_lane];
      },
      [&](int, Sums& d) {
        float of_columns[COLUMN_TILES][2];
#pragma unroll
        for (int j = 0; j < 2 * COLUMN_TILES; ++j)
          of_columns[j / 2][j % 2] = of_lane_at<3>(own_column, 4 * j);
#pragma unroll
        for (int i = 0; i < ROW_TILES; ++i) {
          const float of_row[2] = {of_rows.of(2 * i), of_rows.of(2 * i + 1)};
#pragma unroll
          for (int j = 0; j < COLUMN_TILES; ++j)
#pragma unroll
            for (int v = 0; v < 4; ++v)
              sums[i][j][v] = __fmaf_rn(d[i][j][v], of_row[v / 2] * of_columns[j][v % 2], sums[i][j][v]);
        }
        clear(d);
      });
#endif
#endif
  store_tile(sums, memory, out, (int)out_kind, (e * width + row) * depth + column, depth, width - row,
             depth - column, accumulate);
}
