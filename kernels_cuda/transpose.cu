// Scaling-aware transpose: codes change by whole powers of two; fp8moe/reference/transpose.py defines the
// rule.
//
// scaling_aware_transpose is the fast path for columns in multiples of 16; scaling_aware_transpose_plain
// serves the rest, one thread per column.
#include "transpose_tile.cuh"

// Zeroes one row of 128x128 block scales where no expert has rows; called by the whole thread block.
__device__ __forceinline__ void clear_blocks(const int* offsets, i64 experts, i64 rows, i64 strips,
                                             float* scales) {
  if (!offsets) return;
  const i64 first = clamped(offsets[0], rows), end = clamped(offsets[experts], rows);
  for (i64 b = threadIdx.x; b < strips; b += blockDim.x)
    if (b * TILE < first || b * TILE >= end) scales[b] = 0.f;
}

// Locates a tile's strips from `strip` on; called by a whole warp. Strips are numbered across experts and
// never cross one; missing strips have count 0. Each lane examines EACH experts per iteration: four instead
// of one take permute_transpose with 256 experts from 157 to 146 us.
template <int EACH>
__device__ __forceinline__ void find_tile(const int* offsets, int experts, int rows, int strip, Tile* tile) {
  const int height = TILE / PARTS, lane = threadIdx.x % 32;
#pragma unroll
  for (int p = 0; p < PARTS; ++p) tile->base[p] = tile->count[p] = 0;
  int before = 0;  // strips of the experts of earlier iterations
#pragma unroll 1
  for (int e0 = 0; e0 < experts && tile->count[PARTS - 1] == 0; e0 += 32 * EACH) {
    int at[EACH + 1], strips[EACH], own = 0;
#pragma unroll
    for (int i = 0; i <= EACH; ++i) at[i] = (int)clamped(offsets[min(e0 + lane * EACH + i, experts)], rows);
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      strips[i] = strips_between(at[i], at[i + 1], height);
      own += strips[i];
    }
    const int behind = before + sum_up_to_here(own);
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
      int k = strip + p - (behind - own), base = 0, count = 0;
#pragma unroll
      for (int i = 0; i < EACH; ++i) {
        if (k >= 0 && k < strips[i]) base = at[i] + k * height, count = min(at[i + 1] - base, height);
        k -= strips[i];
      }
      const u32 lanes_with_rows = __ballot_sync(0xffffffffu, count > 0);
      if (lanes_with_rows == 0) continue;
      tile->base[p] = __shfl_sync(0xffffffffu, base, __ffs(lanes_with_rows) - 1);
      tile->count[p] = __shfl_sync(0xffffffffu, count, __ffs(lanes_with_rows) - 1);
    }
    before = __shfl_sync(0xffffffffu, behind, 31);
  }
}

// The same for a tile of the 128x4 blocked layout, whose rows belong to one expert.
__device__ __forceinline__ void find_tile(const ScaleTile& of, Tile* tile) {
#pragma unroll
  for (int p = 0; p < PARTS; ++p) {
    tile->base[p] = of.first_row + p * 32;
    tile->count[p] = max(min(of.count - p * 32, 32), 0);
  }
}

// The same without experts.
__device__ __forceinline__ void find_tile(int rows, int strip, Tile* tile) {
  const int height = TILE / PARTS;
#pragma unroll
  for (int p = 0; p < PARTS; ++p) {
    tile->base[p] = min((strip + p) * height, rows);
    tile->count[p] = min(rows - tile->base[p], height);
  }
}

// Requantises the codes of q [rows, columns] with power-of-two `scales` to column-wise blocks: out [columns,
// rows], out_scales [strips, columns], or (blocks) [columns / 128, strips], one per tile, if all experts
// begin at multiples of 128. With `source` [rows], row r is row source[r] of q, or zeros (-1). BLOCKED:
// scales in 128x4 tiles; `strips` counts four per tile.
// Requires: columns a multiple of 16, for mx of 128; blocks of 128, or 32 (mx).
// Traffic: every code is read once and written once.
// Launch: grid (strips / PARTS, columns / 128); blocks start in this order, so that concurrent accesses are
//   close together.
// Design: one tile per small thread block, with little work before its loads: many blocks are resident per
//   SM, in different phases. (6,528 x 7168 and 12,544 x 5120: 28.3 and 37.0 us; twice the threads and half
//   the blocks: 28.8 and 38.7; persistent blocks with a prefetched tile: 29.6 and 38.7.) A warp processes
//   whole columns, two pieces of 16: amax takes shuffles only, stores cover whole lines, and the only barrier
//   is the one after the tile's arrival.
// Method: f16 pairs. First pass: each value times 2^(e - E), where e is its row's scale exponent and E the
//   tile's largest, exact within SPREAD; a column's amax determines its target. Second pass: the result times
//   2^(E - target), rounded once; where f16 loses bits, below 2^-14, e4m3 is zero, and e5m2 is exact. Rows of
//   zeros do not affect E. Larger spreads take the slow path by columns. TILE_TARGET: E is the target of
//   every column, and the first pass suffices.
extern "C" __global__ void __launch_bounds__(TILE, RESIDENT)
    scaling_aware_transpose(const u8* codes, const void* scales, const int* source, const int* offsets,
                            i64 experts, i64 rows, i64 columns, i64 strips, i64 blocks, u8* out,
                            void* out_scales) {
  pdl_wait();
  __shared__ __align__(1024) u8 in[TILE * TILE];
  __shared__ __align__(16) int exponents[PARTS][TILE];
  __shared__ Spread spreads[4];
  __shared__ int row_of[TILE];  // row of the codes, by `source`; -1: none
  const u32 t = threadIdx.x, lane = t % 32, warp = t / 32;
  Tile tile;
  tile.row = (int)blockIdx.x, tile.column = (int)blockIdx.y;
#if BLOCKED
  const ScaleTile scale_tile = find_scale_tile(offsets, (int)experts, (int)rows, tile.row, (int)gridDim.x);
  out_scales = (u8*)out_scales + scale_tile.number(gridDim.y, tile.column) * 512;
  find_tile(scale_tile, &tile);
#else
  if (!offsets)
    find_tile((int)rows, tile.row * PARTS, &tile);
  else if (experts <= 32)
    find_tile<1>(offsets, (int)experts, (int)rows, tile.row * PARTS, &tile);
  else
    find_tile<4>(offsets, (int)experts, (int)rows, tile.row * PARTS, &tile);
#endif
  if (TILE_TARGET && !MX && blocks && tile.row == 0)
    clear_blocks(offsets, experts, rows, strips, (float*)out_scales + blockIdx.y * strips);
  if (tile.count[0] <= 0) {  // a strip that is allocated but not used
#if BLOCKED
    ((u32*)out_scales)[t] = 0u;
#else
    const i64 first = (i64)tile.row * PARTS, column = blockIdx.y * TILE + t;
    for (i64 p = first; p < first + PARTS && p < strips && !blocks && column < columns; ++p)
      if (MX)
        ((u8*)out_scales)[p * columns + column] = 0;
      else
        ((float*)out_scales)[p * columns + column] = 0.f;
#endif
    return;
  }
  const u32 row_words = (u32)((columns + TILE - 1) / TILE), height = TILE / PARTS;
  const int inside = (int)(t % height);
  int row = inside < of_strip(tile.count, t / height) ? of_strip(tile.base, t / height) + inside : -1;
  {
    const u32 column = blockIdx.y * TILE + t % 8 * 16, wide = (u32)columns;
    u8* into = in + t / 8 * TILE + (t ^ t / 8) % 8 * 16;
    const u8* from = codes + column;
    if (source) {
      row_of[t] = row = row >= 0 ? source[row] : -1;
      __syncthreads();
#pragma unroll
      for (u32 k = 0; k < 8; ++k) {
        const int source_row = row_of[t / 8 + 16 * k];
        copy_async16(into + k * (16 * TILE), from + (u64)(u32)source_row * wide,
                     source_row >= 0 && column < wide);
      }
    } else {  // no barrier, and no address depends on a load
#pragma unroll
      for (u32 k = 0; k < 8; ++k) {
        const u32 q = 16 * k / height, r = t / 8 + 16 * k - q * height;
        copy_async16(into + k * (16 * TILE), from + (u64)(u32)(tile.base[q] + (int)r) * wide,
                     (int)r < tile.count[q] && column < wide);
      }
    }
    copy_async_commit();
  }
  u32 word = 0u;  // scales of this thread's row
  if (row >= 0) {
    const u32* at = (const u32*)scales + (u64)(u32)row * row_words + blockIdx.y;
    word = load_kept(at, blockIdx.y + 1 == row_words || ends_line(at));
  }
  Spread spread = NO_SPREAD;
#pragma unroll
  for (int p = 0; p < PARTS; ++p) {
    const int e = row >= 0 ? exponent_of(word, p, MX) : ZERO_SCALE;
    exponents[p][exponent_at(t)] = e;
    spread.add(e);
  }
  spread.of_warp();
  if (lane == 0) spreads[warp] = spread;
  copy_async_wait<0>();
  pdl_launch_dependents();
  __syncthreads();
  for (int k = 0; k < 4; ++k) {
    spread.low = min(spread.low, spreads[k].low);
    spread.high = max(spread.high, spreads[k].high);
  }
  const Results to = {rows, columns, strips, out, out_scales, blocks != 0};
#pragma unroll 1
  for (u32 piece = warp; piece < TILE / 16; piece += 4)
    transpose_piece(tile, piece, in, exponents[0], spread, to);
}

// codes [rows, columns], scales [rows, ceil(columns / width)] -> out [columns, rows], out_scales [strips,
// columns], or (blocks; width is 128) [columns / 128, strips], of which blocks without rows are not written.
// Grid (strips, columns / 128). `source`: token of each row (-1: zeros), or null for the row itself.
extern "C" __global__ void scaling_aware_transpose_plain(const u8* codes, const void* scales,
                                                         const int* source, const int* strips, i64 rows,
                                                         i64 columns, i64 width, i64 fmt, i64 mx, i64 tile,
                                                         i64 blocks, u8* out, void* out_scales) {
  pdl_wait();
  const i64 strip = blockIdx.x, c = (i64)blockIdx.y * blockDim.x + threadIdx.x;
  const i64 lo = strips[2 * strip], hi = strips[2 * strip + 1];
  const i64 across = (columns + width - 1) / width;
  const bool inside = c < columns;
  int target = ZERO_SCALE;
  bool any_nan = false;
  for (i64 r = lo; r < hi; ++r) {
    const i64 from = source ? source[r] : r;
    int code = 0, e = ZERO_SCALE;
    if (inside && from >= 0) {
      code = codes[from * columns + c];
      e = exponent_of(scale_word(scales, from * across + c / width, (int)mx), 0, (int)mx);
    }
    if (tile) {
      // a row counts if it has a non-zero code in this tile
      const u32 lanes = width == 32 ? 32 : blockDim.x;
      bool occupied = (code & 0x7f) != 0;
      if (lanes == 32)
        occupied = __any_sync(0xffffffffu, occupied);
      else
        occupied = __syncthreads_or(occupied);
      if (occupied && e != ZERO_SCALE) target = max(target, e);
    } else {
      const int n = needed_exponent(decode(code, (int)fmt), (int)fmt, (int)mx);
      if (e == NAN_SCALE || n == NAN_TARGET) any_nan = true;
      if (n != NO_TARGET && n != NAN_TARGET && e != ZERO_SCALE && e != NAN_SCALE) target = max(target, e + n);
    }
  }
  target = final_target(any_nan ? NAN_TARGET : target, (int)mx);
  if (!inside) return;
  for (i64 r = lo; r < hi; ++r) {
    const i64 from = source ? source[r] : r;
    float value = 0.f;
    if (from >= 0) {
      const int e = exponent_of(scale_word(scales, from * across + c / width, (int)mx), 0, (int)mx);
      value = moved_value(decode(codes[from * columns + c], (int)fmt), e, target);
    }
    out[c * rows + r] = encode(value, (int)fmt);
  }
  const i64 at = strip * columns + c;
  if (blocks) {
    if (threadIdx.x == 0 && hi > lo)
      ((float*)out_scales)[blockIdx.y * (i64)gridDim.x + lo / TILE] = power_of_two(target);
  } else if (mx)
    ((u8*)out_scales)[at] = hi > lo ? (u8)(target + 127) : 0;
  else
    ((float*)out_scales)[at] = hi > lo ? power_of_two(target) : 0.f;
}
