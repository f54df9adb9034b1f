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
// pitch: rows of out from an expert to the next.
// Requires: nothing of shapes and offsets. Operand rows or experts that are not 16-byte aligned are read
//   value by value.
// Launch: one thread block of THREADS per tile: experts * ceil(width / ROWS) * ceil(depth / COLUMNS).
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    grouped_gemm_wgrad_mma(const void* dy, const float* dy_scales, const void* x, const float* x_scales,
                           i64 known, const int* offsets, i64 experts, i64 rows, i64 width, i64 depth,
                           i64 pitch, i64 accumulate, i64 out_kind, void* out) {
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
  // in shared memory, as the main loop needs all registers
  __shared__ i64 tile[3];
  if (threadIdx.x == 0)
    tile[0] = (e * pitch + row) * depth + column, tile[1] = width - row, tile[2] = depth - column;
  const int steps = (int)blocks_of(hi - lo, STEP);
  Sums sums;
  clear(sums);
#ifdef KIND
  Operand<true, ROWS> a(dy, width, row, width, lo, hi);
  Operand<true, COLUMNS> b(x, depth, column, depth, lo, hi);
  multiply<true, true>(memory, a, b, steps, sums, [](int, Sums&) {}, [](int, Sums&) {});
#else
  Operand<false, ROWS> a(dy, rows, row, width, lo, hi);
  Operand<false, COLUMNS> b(x, rows, column, depth, lo, hi);
#if BLOCKS
  const i64 blocks = blocks_of(rows, 128);
  const i64 own_block = min((column + Part().first_column) / 128, blocks_of(depth, 128) - 1);
  // odd lanes load dy's scales, even ones x's
  const float* from = threadIdx.x % 2 ? dy_scales + row / 128 * blocks : x_scales + own_block * blocks;
  from += lo / 128;
  float own;
  multiply_scaled<false, false>(
      memory, a, b, steps, sums, [&](int k) { own = from[k]; },
      [&](StepScales<false, false>::Values& scale) {
        scale[0] = own * __shfl_xor_sync(0xffffffffu, own, 1);
      });
  if (clamped(offsets[e], rows) % 128 && steps > 0) fill(sums, __uint_as_float(0x7fc00000u));
#else
  __shared__ i64 blocks_before;
  if (threadIdx.x < 32) {
    i64 first;
    find_expert(offsets, e, rows, (i64)1 << 62, &first, [](i64 count) { return blocks_of(count, 128); });
    if (threadIdx.x == 0) blocks_before = first;
  }
  __syncthreads();
  const i64 first = blocks_before;
  // lines past the end read the last one's scale
  const int last_row = (int)min(width - row, (i64)ROWS) - 1;
  const int last_column = (int)min(depth - column, (i64)COLUMNS) - 1;
  typedef StepScales<true, true> Of;
  Of::Values loaded;
  bool has_scales;
  multiply_scaled<true, true>(
      memory, a, b, steps, sums,
      [&](int k) {
        has_scales = first + k < known;
        const i64 block = has_scales ? first + k : 0;
        const float *of_rows = dy_scales + block * width + row,
                    *of_columns = x_scales + block * depth + column;
        Of::load_rows(loaded, [&](int i) { return of_rows[min(i, last_row)]; });
        Of::load_columns(loaded, [&](int i) { return of_columns[min(i, last_column)]; });
      },
      [&](Of::Values& scales) {
#pragma unroll
        for (int i = 0; i < Of::COUNT; ++i)
          scales[i] = has_scales || i >= Of::OF_ROWS ? loaded[i] : __uint_as_float(0x7fc00000u);
      });
#endif
#endif
  store_tile(sums, memory, out, (int)out_kind, tile[0], depth, tile[1], tile[2], accumulate);
}
