// Quantisation and dequantisation by blocks, step by step as in fp8moe/reference/quantize.py.
//
// Fast paths with one read of the input: quantize_rows for row-wise blocks of 128 or 32, quantize_tiles for
// column-wise blocks or both, quantize_weights for (128, 128) blocks. The other kernels serve every other
// block and width with two reads (one for amax, one to encode) and one write.
#include "tile_quantize.cuh"
#include "weight_block.cuh"

#ifndef KIND
#define KIND BF16  // input of quantize_rows and quantize_tiles
#define FMT 0      // output: e4m3
#define MX 0       // scale blocks of 128
#endif

// Row-wise blocks of 128 values, or 32 (mx): codes and scales.
// Arguments: x [rows, columns]; scales [rows, columns / block], or gemm_ready: block b of row r at b * ready
//   + r; or BLOCKED: rows of `ready` 128x4 tiles, stored byte by byte (48,128 x 7168 float16: 288 instead of
//   256 us).
// Requires: columns a multiple of 128, or 32 (mx).
// Traffic: every value is read once, every code and scale is written once.
// Launch: thread blocks of 64, PAIRS times sixteen values per thread. (94 % of the bandwidth limit; 256
//   threads: 91 %, because more warps wait at the end of a thread block.)
// Design: all accesses cover whole cache lines; no shared memory and no barrier.
extern "C" __global__ void __launch_bounds__(64)
    quantize_rows(const void* x, i64 vectors, i64 blocks, i64 up, float eps, i64 ready, u8* codes,
                  void* scales) {
  pdl_wait();
  const Rule rule = {FMT, (int)up, MX, eps};
  uint2* const to = (uint2*)codes;
  quantize_warp<KIND>(
      x, vectors, rule, [&](i64 at, uint2 a, uint2 b) { to[at] = a, to[at + lanes_of(MX)] = b; },
      [&](i64 block, u32 scale) {
        if (BLOCKED)
          ((u8*)scales)[place_in_blocked(block / blocks, block % blocks, ready)] = (u8)scale;
        else
          store_scale(scales, ready ? block % blocks * ready + block / blocks : block, scale, MX);
      });
}

// Column-wise blocks of 128 rows, or 32 (mx), and optionally the row-wise blocks from the same read.
// Arguments: x [rows, columns]; outputs as in tile_quantize.cuh: quantize_tile.
// Requires: columns a multiple of 128.
// Traffic: every value is read once, every code and scale is written once.
// Launch: persistent thread blocks of 512; shared memory for one tile of codes, one of values, and the table
//   of strips. The next tile's load is in flight while the current one, in registers, is quantised.
extern "C" __global__ void __launch_bounds__(TILE_THREADS, KIND == F32 ? 1 : TILE_BLOCKS)
    quantize_tiles(const void* x, i64 rows, i64 columns, const int* offsets, i64 experts, i64 strips, i64 up,
                   float eps, int* taken, u8* row_codes, void* row_scales, u8* codes, void* scales) {
  if (!taken) pdl_wait();
  const int size = KIND == F32 ? 4 : 2;
  DYNAMIC_SHARED(shared);  // output tile | input tile | table of strips
  u8 *stage = shared, *in = shared + TILE * TILE;
  __shared__ TileShared tile_shared;
  __shared__ Place places[PLACES];
  __shared__ int used;
  const u32 t = threadIdx.x;
  const Rule rule = {FMT, (int)up, MX, eps};
  const Strips strips_of =
      find_strips(offsets, experts, rows, MX ? 32 : TILE, (int*)(in + TILE * TILE * size), &used);
  Turns turns(strips_of, columns, places, taken, row_codes != 0);
  auto look = [](u32) {};
  auto fetch = [&](u32 turn) {
    if (turns.has(turn))
      fetch_tile<size, MX>(in, turns.place(turn), rows,
                           (const u8*)x + turns.place(turn).column * (TILE * size), (u32)columns * size);
    copy_async_commit();
  };
  turns.start(look, fetch);
  clear_scales(turns, strips, columns, MX ? 1 : 4, scales);
  const u8* own_values = in + (t / 32 * CHUNK_ROWS * TILE + t % 32 * 4) * size;
#pragma unroll 1
  for (u32 turn = 0; turns.has(turn); ++turn) {
    turns.begin(turn);
    copy_async_wait<0>();
    __syncthreads();  // the tile has arrived
    typename ChunkOf<KIND>::Type v;
#pragma unroll
    for (int r = 0; r < CHUNK_ROWS; ++r) v.load(r, own_values + r * (TILE * size));
    __syncthreads();  // the tile is in registers, and the previous output tile has been written
    fetch(turn + 1);
    quantize_tile(v, rule, turns.place(turn), used, strips, columns, rows, row_codes, row_scales, codes,
                  scales, stage, tile_shared);
  }
}

// ---- (128, 128) blocks of weights, and their transpose, from one read

// five thread blocks per SM spill 8 bytes on sm_86
#define WEIGHT_BLOCKS (KIND == F32 ? 3 : __CUDA_ARCH__ == 860 ? 4 : 5)

// (128, 128) blocks: codes and scales, and those of the transposed matrices; either, with its scales, may be
// null.
// Arguments: x [matrices, rows, columns]; codes, at the first row and column of x within [matrices, out_rows,
//   out_columns]; transposed likewise within [matrices, out_columns, out_rows]; scales within [matrices,
//   out_rows / 128, out_columns / 128], transposed_scales within [matrices, out_columns / 128, out_rows /
//   128].
// Requires: rows, columns, out_rows and out_columns are multiples of 128.
// Traffic: every value is read once, every code is written once per orientation.
// Launch: one thread block of 256 per (128, 128) block, grid (blocks of a matrix, matrices).
// Design: values stay in registers between amax and encoding, hence one read and one kernel. Each thread
//   holds 8 x 8 values: rows are stored from registers in whole lines of 128 bytes, columns through 16 KB of
//   swizzled shared memory without bank conflicts, also in lines of 128 bytes. Streaming stores: 32 x 4096 x
//   7168 bfloat16 969 us, ordinary ones 1005. The order of the blocks makes no difference.
extern "C" __global__ void __launch_bounds__(WEIGHT_THREADS, WEIGHT_BLOCKS)
    quantize_weights(const void* x, i64 rows, i64 columns, i64 out_rows, i64 out_columns, i64 up, float eps,
                     u8* codes, float* scales, u8* transposed, float* transposed_scales) {
  pdl_wait();
  __shared__ __align__(128) u8 stage[TILE * TILE];  // [columns][rows]
  const u32 t = threadIdx.x;
  const u32 across = (u32)(columns / TILE);
  const u32 block_row = blockIdx.x / across, block_column = blockIdx.x - block_row * across;
  const u32 chunk = t / 16, eighth = t % 16;  // this thread's rows and columns, in units of eight
  const i64 matrix = blockIdx.y, first_row = (i64)block_row * TILE, first_column = (i64)block_column * TILE;
  const i64 from = (matrix * rows + first_row + 8 * chunk) * columns + first_column + 8 * eighth;
  Eight<KIND> v[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = load_eight<KIND>(x, (from + i * columns) / 8);
  pdl_launch_dependents();
  float scale;
  const Rule rule = {FMT, (int)up, 0, eps};
  const float factor = factor_of_block<KIND>(v, rule, &scale);
  if (t == 0) {
    const i64 out_across = out_columns / TILE, out_down = out_rows / TILE;
    if (codes) scales[(matrix * out_down + block_row) * out_across + block_column] = scale;
    if (transposed) transposed_scales[(matrix * out_across + block_column) * out_down + block_row] = scale;
  }
  uint2 code[8];
  u8* to = codes + (matrix * out_rows + first_row + 8 * chunk) * out_columns + first_column + 8 * eighth;
#pragma unroll
  for (int i = 0; i < 8; ++i, to += out_columns) {
    float row[8];
    floats<KIND>(v[i], row);
    code[i] = encode_eight(row, factor, FMT);
    if (codes) __stcs((uint2*)to, code[i]);
  }
  if (!transposed) return;
  stage_columns(stage, code);
#pragma unroll
  for (u32 step = 0; step < 4; ++step)
    __stcs((uint4*)(transposed + (matrix * out_columns + first_column + column_of_step(step)) * out_rows +
                    first_row + 16 * (t % 8)),
           staged_rows(stage, step));
}

// float32 with three thread blocks per SM spills 36 bytes on sm_80
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define PART_BLOCKS (KIND == F32 ? 2 : 3)
#else
#define PART_BLOCKS 3
#endif

// quantize_weights for a part of the result of any size, with strided input that may be smaller than the
// part: the rest of the part gets codes of zero. Slower: within a step of 128 experts of 2048 x 768 bfloat16
// 647 us for both weights instead of 623.
// Arguments: x [matrices, real_rows, real_columns] with strides x_matrix and x_row in elements, `aligned` if
//   rows and groups of eight are 16-byte aligned; the part [matrices, part_rows, part_columns] starts at
//   (first_row, first_column) of codes [matrices, rows, columns]. Outputs as above, either may be null.
// Requires: the part's start and size are multiples of 128.
// Launch: one thread block of 256 per (128, 128) block, grid (blocks of a part, matrices).
extern "C" __global__ void __launch_bounds__(WEIGHT_THREADS, PART_BLOCKS)
    quantize_weights_part(const void* x, i64 aligned, i64 x_matrix, i64 x_row, i64 real_rows,
                          i64 real_columns, i64 first_row, i64 first_column, i64 part_rows, i64 part_columns,
                          i64 rows, i64 columns, i64 up, float eps, u8* codes, float* scales, u8* transposed,
                          float* transposed_scales) {
  pdl_wait();
  __shared__ __align__(128) u8 stage[TILE * TILE];  // [columns][rows]
  const u32 t = threadIdx.x, part_across = (u32)((part_columns + TILE - 1) / TILE);
  const u32 block_row = blockIdx.x / part_across, block_column = blockIdx.x - block_row * part_across;
  const i64 matrix = blockIdx.y, row = (i64)block_row * TILE + t / 16 * 8,
            column = (i64)block_column * TILE + t % 16 * 8;  // the thread's first column within the part
  Eight<KIND> v[8];
#pragma unroll
  for (int i = 0; i < 8; ++i)
    v[i] = load_some<KIND>(x, matrix * x_matrix + (row + i) * x_row + column,
                           row + i < real_rows ? real_columns - column : 0, aligned);
  pdl_launch_dependents();
  const Rule rule = {FMT, (int)up, 0, eps};
  const i64 down = (i64)block_row * TILE, right = (i64)block_column * TILE;
  const BlockPlace place = {matrix,
                            rows,
                            columns,
                            first_row + down,
                            first_column + right,
                            part_of_block(part_rows - down),
                            part_of_block(part_columns - right)};
  write_block<KIND>(v, rule, place, stage, codes, scales, transposed, transposed_scales);
}

// The other orientation of (128, 128) blocks: bytes of codes, and scales, transposed.
// Arguments: codes [matrices, rows, columns], scales [matrices, rows / 128, columns / 128], rounded up; out
//   and out_scales with the last two dimensions swapped. Any sizes and addresses; those that are no multiples
//   of 16 are moved byte by byte.
// Traffic: every code is read once and written once.
// Launch: one thread block of 256 per (128, 128) block, grid (blocks of a matrix, matrices).
// Design: that of quantize_weights after its encoding: lines of 128 bytes are read and written.
extern "C" __global__ void __launch_bounds__(WEIGHT_THREADS, 6)
    transpose_codes(const u8* codes, const float* scales, i64 rows, i64 columns, u8* out, float* out_scales) {
  pdl_wait();
  __shared__ __align__(128) u8 stage[TILE * TILE];  // [columns][rows]
  const u32 t = threadIdx.x;
  const u32 across = (u32)((columns + TILE - 1) / TILE), down = (u32)((rows + TILE - 1) / TILE);
  const u32 block_row = blockIdx.x / across, block_column = blockIdx.x - block_row * across;
  const i64 matrix = blockIdx.y, first_row = (i64)block_row * TILE, first_column = (i64)block_column * TILE;
  const i64 row = first_row + t / 16 * 8, column = first_column + t % 16 * 8;
  const u8* from = codes + (matrix * rows + row) * columns + column;
  uint2 code[8];
#pragma unroll
  for (int i = 0; i < 8; ++i, from += columns)
    code[i] = load_codes(from, row + i < rows ? columns - column : 0);
  if (t == 0)
    out_scales[(matrix * across + block_column) * down + block_row] =
        scales[(matrix * down + block_row) * across + block_column];
  pdl_launch_dependents();
  stage_columns(stage, code);
#pragma unroll
  for (u32 step = 0; step < 4; ++step) {
    const i64 to_row = first_column + column_of_step(step), to_column = first_row + 16 * (t % 8);
    store_some<16>(out + (matrix * columns + to_row) * rows + to_column, staged_rows(stage, step),
                   to_row < columns ? rows - to_column : 0);
  }
}

// Zeroes the tile counter of a following dynamic schedule (tile_order.cuh: Turns).
extern "C" __global__ void no_tiles_taken(int* taken) {
  pdl_wait();
  pdl_launch_dependents();
  *taken = 0;
}

// First and last + 1 row of every strip, int32 [S, 2]; (0, 0) past the last one. Strips never cross a matrix
// (`lead` of them, `rows` each) or, with offsets, an expert. One thread.
extern "C" __global__ void make_strips(const int* offsets, i64 experts, i64 lead, i64 rows, i64 height,
                                       i64 capacity, int* strips) {
  pdl_wait();
  i64 s = 0;
  const i64 ranges = offsets ? experts : lead;
  for (i64 e = 0; e < ranges; ++e) {
    const i64 lo = offsets ? clamped(offsets[e], rows) : e * rows;
    const i64 hi = offsets ? clamped(offsets[e + 1], rows) : (e + 1) * rows;
    for (i64 r = lo; r < hi && s < capacity; r += height, ++s) {
      strips[2 * s] = (int)r;
      strips[2 * s + 1] = (int)(r + height < hi ? r + height : hi);
    }
  }
  for (; s < capacity; ++s) strips[2 * s] = strips[2 * s + 1] = 0;
}

// Blocks of `width` >= 32 columns: one thread block (128 threads) per block, grid (strips, column blocks).
// Scales at strip * row_stride + block * column_stride.
extern "C" __global__ void quantize_blocks(const void* x, i64 kind, const int* strips, i64 columns, i64 width,
                                           i64 fmt, i64 up, i64 mx, float eps, i64 row_stride,
                                           i64 column_stride, u8* codes, void* scales) {
  pdl_wait();
  __shared__ u32 largest[128];
  const i64 strip = blockIdx.x, block = blockIdx.y;
  const i64 lo = strips[2 * strip], hi = strips[2 * strip + 1];
  const i64 begin = block * width, end = begin + width < columns ? begin + width : columns;
  u32 top = 0;
  for (i64 r = lo; r < hi; ++r)
    for (i64 c = begin + threadIdx.x; c < end; c += blockDim.x)
      top = max(top, __float_as_uint(load(x, r * columns + c, (int)kind)) & 0x7fffffffu);
  top = block_reduce(top, largest, [](u32 a, u32 b) { return a > b ? a : b; });
  float scale;
  u8 exponent;
  const Rule rule = {(int)fmt, (int)up, (int)mx, eps};
  const float factor = block_scale(top, rule, &scale, &exponent);
  for (i64 r = lo; r < hi; ++r)
    for (i64 c = begin + threadIdx.x; c < end; c += blockDim.x)
      codes[r * columns + c] = encode(load(x, r * columns + c, (int)kind) * factor, (int)fmt);
  if (threadIdx.x == 0 && hi > lo) {
    const i64 at = strip * row_stride + block * column_stride;
    if (mx)
      ((u8*)scales)[at] = exponent;
    else
      ((float*)scales)[at] = scale;
  }
}

// Blocks one column wide, stored transposed: one thread per column, grid (strips, columns / 128). codes
// [columns, rows], scales [strip, columns]; scales of empty strips are zeros.
extern "C" __global__ void quantize_columns(const void* x, i64 kind, const int* strips, i64 rows, i64 columns,
                                            i64 fmt, i64 up, i64 mx, float eps, u8* codes, void* scales) {
  pdl_wait();
  const i64 strip = blockIdx.x, c = (i64)blockIdx.y * blockDim.x + threadIdx.x;
  if (c >= columns) return;
  const i64 lo = strips[2 * strip], hi = strips[2 * strip + 1];
  u32 top = 0;
  for (i64 r = lo; r < hi; ++r)
    top = max(top, __float_as_uint(load(x, r * columns + c, (int)kind)) & 0x7fffffffu);
  float scale = 0.f;
  u8 exponent = 0;
  if (hi > lo) {
    const Rule rule = {(int)fmt, (int)up, (int)mx, eps};
    const float factor = block_scale(top, rule, &scale, &exponent);
    for (i64 r = lo; r < hi; ++r)
      codes[c * rows + r] = encode(load(x, r * columns + c, (int)kind) * factor, (int)fmt);
  }
  if (mx)
    ((u8*)scales)[strip * columns + c] = exponent;
  else
    ((float*)scales)[strip * columns + c] = scale;
}

// Dequantises row-wise blocks: code * scale, as KIND: BF16 or F32.
// Arguments: codes [rows, columns], columns a multiple of 16; scale b of row r at r * row_stride + b *
//   column_stride.
// Traffic: every code is read once, every value is written once.
// Launch: sixteen codes per thread.
extern "C" __global__ void __launch_bounds__(256)
    dequantize_rows(const u8* codes, const void* scales, i64 vectors, i64 of_row, i64 row_stride,
                    i64 column_stride, void* out) {
  pdl_wait();
  const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= vectors) return;
  const u32 row = i / (u32)of_row, at = i - row * (u32)of_row;
  const i64 place = row * row_stride + at / (MX ? 2 : 8) * column_stride;
  const float scale = MX ? e8m0_to_float(((const u8*)scales)[place]) : ((const float*)scales)[place];
  const uint4 v = ((const uint4*)codes)[i];
  const u32 fours[4] = {v.x, v.y, v.z, v.w};
  float x[16];
#pragma unroll
  for (int k = 0; k < 16; ++k) {
    u32 pairs[2];
    decode4(fours[k / 4], FMT, &pairs[0], &pairs[1]);
    const float value = f16_to_float((u16)(pairs[k / 2 % 2] >> (k % 2 * 16)));
    x[k] = (value != value ? __uint_as_float(0x7fc00000u) : value) * scale;
  }
  if (KIND == F32) {
#pragma unroll
    for (int k = 0; k < 16; k += 4)
      ((float4*)out)[4 * (i64)i + k / 4] = make_float4(x[k], x[k + 1], x[k + 2], x[k + 3]);
    return;
  }
  u32 words[8];  // the hardware conversion takes 281.8 instead of 273.4 us
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    words[k] = float_to_bf16(x[2 * k]) | (u32)float_to_bf16(x[2 * k + 1]) << 16;
  }
  ((uint4*)out)[2 * (i64)i] = make_uint4(words[0], words[1], words[2], words[3]);
  ((uint4*)out)[2 * (i64)i + 1] = make_uint4(words[4], words[5], words[6], words[7]);
}

// Dequantises row-wise (compact or gemm_ready) tensors and (128, 128) blocks in either orientation: the code
// of (r, c) of matrix m is at m * rows * columns + r * code_rows + c * code_columns. One thread per value.
extern "C" __global__ void dequantize_blocks(const u8* codes, const void* scales, i64 count, i64 rows,
                                             i64 columns, i64 block_rows, i64 block_columns, i64 code_rows,
                                             i64 code_columns, i64 row_stride, i64 column_stride,
                                             i64 matrix_stride, i64 fmt, i64 scale_kind, i64 out_kind,
                                             void* out) {
  pdl_wait();
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const i64 matrix = i / (rows * columns), r = i / columns % rows, c = i % columns;
  const i64 at = matrix * matrix_stride + r / block_rows * row_stride + c / block_columns * column_stride;
  float scale, value;
  if (scale_kind == 0) scale = ((const float*)scales)[at];
  if (scale_kind == 1) scale = e8m0_to_float(((const u8*)scales)[at]);
  if (scale_kind == 2) scale = decode(((const u8*)scales)[at], 0);
  if (fmt == 2)
    value = decode((i & 1) ? codes[i / 2] >> 4 : codes[i / 2] & 15, 2);
  else
    value = decode(codes[matrix * rows * columns + r * code_rows + c * code_columns], (int)fmt);
  store(out, i, (int)out_kind, value * scale);
}

// Dequantises column-wise tensors to [rows, columns]; out must be zeroed beforehand. `known`: number of
// strips with scales; the others give NaN. Grid (strips, columns / 128).
extern "C" __global__ void dequantize_columns(const u8* codes, const void* scales, i64 known,
                                              const int* strips, i64 rows, i64 columns, i64 fmt, i64 mx,
                                              i64 out_kind, void* out) {
  pdl_wait();
  const i64 strip = blockIdx.x, c = (i64)blockIdx.y * blockDim.x + threadIdx.x;
  if (c >= columns) return;
  const i64 at = strip * columns + c;
  float scale = __uint_as_float(0x7fc00000u);
  if (strip < known) scale = mx ? e8m0_to_float(((const u8*)scales)[at]) : ((const float*)scales)[at];
  for (i64 r = strips[2 * strip]; r < strips[2 * strip + 1]; ++r)
    store(out, r * columns + c, (int)out_kind, decode(codes[c * rows + r], (int)fmt) * scale);
}
