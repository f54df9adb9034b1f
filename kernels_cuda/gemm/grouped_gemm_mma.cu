// Grouped GEMM by mma.sync, forward and data gradient: bfloat16, float16 and FP8 on every tensor core from
// sm_80 on.
#if !defined KIND && !defined A_FMT
#define A_FMT 0  // of x
#define B_FMT 0  // of w
#endif
#ifndef TRANSPOSED
#define TRANSPOSED 0  // 1: w is [experts, depth, width]; 16-bit formats only
#endif
#include "mma_pipeline.cuh"
#ifdef KIND
#define OUT_KIND KIND
#else
#define OUT_KIND BF16
#endif

// out[r, n] = sum over k of x[r, k] w[e, n, k], where e is the expert of row r; zeros for rows of no expert.
// Arguments: x [rows, depth], w [experts, width, depth] and out [rows, width] of KIND; or FP8: x codes with
//   x_scales[r * row_stride + block * column_stride], w codes with w_scales [experts, ceil(width / 128),
//   ceil(depth / 128)], out bfloat16. bias [experts, width], added to the sums, or null.
// Requires: nothing of shapes and offsets. Operand rows that are not 16-byte aligned are read value by value.
// Launch: one thread block of THREADS per tile, for the largest possible number of tiles: ceil(rows / ROWS) +
//   experts rows of tiles by ceil(width / COLUMNS).
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    grouped_gemm_mma(const void* x, const float* x_scales, i64 row_stride, i64 column_stride, const void* w,
                     const float* w_scales, const int* offsets, i64 experts, i64 rows, i64 width, i64 depth,
                     u16* out, const float* bias) {
  pdl_wait();
  DYNAMIC_SHARED(memory);
  __shared__ i64 located[2];
  const i64 wide = blocks_of(width, COLUMNS);
  if (threadIdx.x < 32) {
    i64 before;
    const i64 e = find_expert(offsets, experts, rows, blockIdx.x, &before,
                              [&](i64 count) { return blocks_of(count, ROWS) * wide; });
    if (threadIdx.x == 0) located[0] = e, located[1] = before;
  }
  // rows of no expert
  const i64 head = clamped(offsets[0], rows) * width, tail = clamped(offsets[experts], rows) * width;
  const bool eight = width % 8 == 0 && ((size_t)out & 15) == 0;
  const i64 size = eight ? 8 : 1, count = (head + rows * width - tail) / size;
  for (i64 i = blockIdx.x * (i64)THREADS + threadIdx.x; i < count; i += gridDim.x * (i64)THREADS) {
    const i64 at = i * size < head ? i * size : i * size - head + tail;
    if (eight)
      *(uint4*)(out + at) = make_uint4(0u, 0u, 0u, 0u);
    else
      out[at] = 0;
  }
  __syncthreads();
  const i64 e = located[0];
  if (e == experts) return;
  const i64 lo = clamped(offsets[e], rows), hi = clamped(offsets[e + 1], rows);
  i64 row, column;
  find_tile(blockIdx.x - located[1], blocks_of(hi - lo, ROWS), wide, &row, &column);
  row = lo + row * ROWS;
  column *= COLUMNS;
  Operand<false, ROWS> a(x, depth, row, hi, 0, depth);
  Operand<TRANSPOSED, COLUMNS> b((const u8*)w + e * width * depth * OPERAND_BYTES, TRANSPOSED ? width : depth,
                                 column, width, 0, depth);
  const int steps = (int)blocks_of(depth, STEP);
  // in shared memory, as the main loop needs all registers
  __shared__ i64 tile[3];
  if (threadIdx.x == 0) tile[0] = row * width + column, tile[1] = hi - row, tile[2] = width - column;
  Sums sums;
  clear(sums);
#ifdef KIND
  multiply<false, TRANSPOSED>(memory, a, b, steps, sums, [](int, Sums&) {}, [](int, Sums&) {});
#else
  const i64 column_blocks = blocks_of(width, 128);
  const i64 own_block = min((column + Part().first_column) / 128, column_blocks - 1);
  const float* of_columns = w_scales + (e * column_blocks + own_block) * steps;
  const float* of_rows = x_scales + row * row_stride;
  // rows past the end read the last row's scale
  const int last = (int)min(hi - row, (i64)ROWS) - 1, stride = (int)row_stride;
  typedef StepScales<true, false> Of;
  Of::Values loaded;
  float of_all;
  multiply_scaled<true, false>(
      memory, a, b, steps, sums,
      [&](int k) {
        of_all = of_columns[k];
        const float* from = of_rows + k * column_stride;
        Of::load_rows(loaded, [&](int i) { return from[min(i, last) * stride]; });
      },
      [&](Of::Values& scales) {
#pragma unroll
        for (int i = 0; i < Of::COUNT; ++i) scales[i] = loaded[i] * of_all;
      });
#endif
  const float* own = bias ? bias + e * width + width - tile[2] : nullptr;
  store_tile(sums, memory, out, OUT_KIND, tile[0], width, tile[1], tile[2], false, own);
}
