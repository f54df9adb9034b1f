// Scaling-aware transpose: codes change by whole powers of two; fp8moe/reference/transpose.py defines the
// rule.
//
// scaling_aware_transpose is the fast path for columns in multiples of 16; scaling_aware_transpose_plain
// serves the rest, one thread per column.
#include "transpose_tile.cuh"

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

// The same for blocks, with experts that begin at multiples of 128.
__device__ __forceinline__ void find_block(const int* offsets, i64 experts, int rows, int strip, Tile* tile) {
  const int base = strip * TILE, begin = offsets ? offsets[0] : 0, end = offsets ? offsets[experts] : rows;
  tile->base[0] = base;
  tile->count[0] = base < begin ? 0 : min(min(max(end, 0), rows) - base, TILE);
}

// Locates a tile that is not BLOCKED.
__device__ __forceinline__ void find_tile(const int* offsets, i64 experts, i64 rows, bool blocks,
                                          Tile* tile) {
  if (TILE_TARGET && !MX && blocks)
    find_block(offsets, experts, (int)rows, tile->row, tile);
  else if (!offsets)
    find_tile((int)rows, tile->row * PARTS, tile);
  else if (experts <= 32)
    find_tile<1>(offsets, (int)experts, (int)rows, tile->row * PARTS, tile);
  else
    find_tile<4>(offsets, (int)experts, (int)rows, tile->row * PARTS, tile);
}

// Zeroes the scales of strips that are allocated but not used.
__device__ __forceinline__ void clear_scales(const Tile& tile, const Results& to, bool blocks) {
  const u32 t = threadIdx.x;
#if BLOCKED
  ((u32*)to.scales)[t] = 0u;
#else
  if (TILE_TARGET && !MX && blocks) {
    if (t == 0) ((float*)to.scales)[(u32)tile.column * (u32)to.strips + tile.row] = 0.f;
    return;
  }
  const i64 first = (i64)tile.row * PARTS, column = tile.column * TILE + (int)t;
  for (i64 p = first; p < first + PARTS && p < to.strips && column < to.columns; ++p)
    if (MX)
      ((u8*)to.scales)[p * to.columns + column] = 0;
    else
      ((float*)to.scales)[p * to.columns + column] = 0.f;
#endif
}

// The rows of the codes that are rows `inside` to `inside` + 7 of the tile, or -1; `inside` is a multiple of
// eight.
__device__ __forceinline__ void find_rows(const Tile& tile, const int* source, u32 inside, int (&rows)[8]) {
  const u32 q = inside / (TILE / PARTS), within = inside % (TILE / PARTS);
  const int first = of_strip(tile.base, q) + (int)within, left = of_strip(tile.count, q) - (int)within;
  const int* from = source + first;
  if (source && left >= 8 && (size_t)from % 16 == 0) {
    const int4 near = ((const int4*)from)[0], far = ((const int4*)from)[1];
    rows[0] = near.x, rows[1] = near.y, rows[2] = near.z, rows[3] = near.w;
    rows[4] = far.x, rows[5] = far.y, rows[6] = far.z, rows[7] = far.w;
    return;
  }
#pragma unroll
  for (int k = 0; k < 8; ++k) rows[k] = k >= left ? -1 : source ? from[k] : first + k;
}

// Starts to copy a tile's codes, zeros for missing rows and columns; called by the whole thread block.
// Returns the row of the codes that is row threadIdx.x of the tile, or -1.
//
// A thread copies 16 columns of eight consecutive rows, whose sources are two vectors: three instructions per
// copy, and no barrier between the sources and the copies.
__device__ __forceinline__ int copy_tile(const Tile& tile, const u8* codes, const int* source, i64 columns,
                                         u8* to) {
  const u32 t = threadIdx.x, inside = t / 8 * 8, column = tile.column * TILE + t % 8 * 16;
  const u32 pitch = kept((u32)columns);
  const u8* from = kept(codes + column);
  const At at = kept(at_of(to) + place_of(inside, t % 8));
  int rows[8];
  find_rows(tile, source, inside, rows);
#pragma unroll
  for (u32 k = 0; k < 8; ++k)
    copy_async16_at(at + k * TILE, from + (u64)(u32)rows[k] * pitch, rows[k] >= 0 && column < pitch);
  copy_async_commit();
#pragma unroll
  for (u32 half = 4; half > 0; half /= 2)
#pragma unroll
    for (u32 k = 0; k < half; ++k) rows[k] = t & half ? rows[k + half] : rows[k];
  return rows[0];
}

// Scales of row `row` of the codes in this tile's columns, 0 for row -1. Rows in order are read once, but a
// sector of scales by eight tiles; gathered rows are read several times anyway.
__device__ __forceinline__ u32 load_scales(const void* scales, int row, u32 columns, bool gathered) {
  if (row < 0) return 0u;
  const u32 row_words = (columns + TILE - 1) / TILE;
  const u32* at = (const u32*)scales + ((u32)row * row_words + blockIdx.y);
  return gathered ? *at : load_kept(at, blockIdx.y + 1 == row_words || ends_line(at));
}

#if TILE_TARGET && !MX
// The largest of a tile's keys; called by the whole thread block.
__device__ __forceinline__ int largest_of_tile(int key, int (&tops)[4]) {
  key = __reduce_max_sync(0xffffffffu, key);
  if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = key;
  __syncthreads();
  const int4 v = *(const int4*)tops;
  return max(max(v.x, v.y), max(v.z, v.w));
}

__device__ __forceinline__ bool any_nonzero(const u8* row) {
  u32 seen = 0;
#pragma unroll 1
  for (u32 c = 0; c < TILE; c += 16) {
    const uint4 v = *(const uint4*)(row + c);
    seen |= v.x | v.y | v.z | v.w;
  }
  return (seen & 0x7f7f7f7fu) != 0;
}

// Writes the factors of the tile's rows and returns the exponent of its scale, the largest of a row that has
// non-zero codes; called by the whole thread block, whose thread t has the scale exponent e of row t. The
// tile's codes have arrived when this returns.
//
// A key is a row's exponent and, below, its place. The row of the largest exponent usually has non-zero
// codes, which one read of a warp shows; otherwise each thread examines its row.
__device__ __forceinline__ int set_factors(int e, Scaled* made, int (&tops)[4]) {
  const u32 t = threadIdx.x, place = t * TILE;
  auto set = [&](int top) {
    const int target = final_target(top >> 16, MX);
    made->set_factors(t, e, target);
    return target;
  };
  const int key = e * 65536 + (int)place, top = largest_of_tile(key, tops), target = set(top);
  copy_async_wait<0>();
  pdl_launch_dependents();
  __syncthreads();
  const u32 of_top = *(const u32*)(made->codes + (top & 0xffff) + t % 32 * 4);
  if (__any_sync(0xffffffffu, of_top & 0x7f7f7f7fu)) return target;
  const bool filled = any_nonzero(made->codes + place);
  const int smaller = set(largest_of_tile(filled ? key : ZERO_SCALE * 65536, tops));
  __syncthreads();
  return smaller;
}

// Stores the tile's scale: once per column, or (blocks) once.
__device__ __forceinline__ void store_scale(const Results& to, const Tile& tile, float scale, bool blocks) {
  const u32 t = threadIdx.x, column = tile.column * TILE + t;
  float* const scales = (float*)to.scales;
  if (blocks) {
    if (t == 0) scales[(u32)tile.column * (u32)to.strips + tile.row] = scale;
  } else if (column < to.columns && tile.row < to.strips) {
    scales[tile.row * to.columns + column] = scale;
  }
}

// Writes the tile transposed; called by the whole thread block.
__device__ __forceinline__ void write_tile(const Tile& tile, const Scaled& made, const Results& to) {
  const u32 column = tile.column * TILE, pitch = kept((u32)to.rows);
  const Lane lane(threadIdx.x / 32);
  u8* const out = to.codes + (u64)(column + lane.column) * pitch + (tile.base[0] + (int)lane.first_row);
  const int left = tile.count[0] - (int)lane.first_row;
  const bool whole = (((size_t)out | pitch) & 7) == 0;
#pragma unroll
  for (u32 c = 0; c < TILE; c += TILE / 2)
    if (column + lane.column + c < (u32)to.columns)
      write_columns(made, lane, c, left, whole, out + (u64)pitch * c, pitch);
}
#endif

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
//   is the one after the tile's arrival; TILE_TARGET has another one for the scales, which arrive earlier.
//   Within a training step, where the clock is a quarter lower, rows in L2 are limited by instructions: with
//   TILE_TARGET 3.8 per code, of which 2.2 convert and write it. 7.6 before each row's factor was computed
//   once, one row proved the largest scale, and blocks were found by two offsets: 130 to 112 us there for
//   131,072 rows of 2048 columns, 111 to 105 alone.
// Method: f16 pairs. First pass: each value times 2^(e - E), where e is its row's scale exponent and E the
//   tile's largest, exact within SPREAD; a column's amax determines its target. Second pass: the result times
//   2^(E - target), rounded once; where f16 loses bits, below 2^-14, e4m3 is zero, and e5m2 is exact. Rows of
//   zeros do not affect E. Larger spreads take the slow path by columns. TILE_TARGET: E is the target of
//   every column, and one pass suffices for any spread; mx takes the slow path.
extern "C" __global__ void __launch_bounds__(TILE, RESIDENT)
    scaling_aware_transpose(const u8* codes, const void* scales, const int* source, const int* offsets,
                            i64 experts, i64 rows, i64 columns, i64 strips, i64 blocks, u8* out,
                            void* out_scales) {
  pdl_wait();
  const u32 t = threadIdx.x, warp = t / 32;
  Tile tile;
  tile.row = (int)blockIdx.x, tile.column = (int)blockIdx.y;
#if BLOCKED
  const ScaleTile scale_tile = find_scale_tile(offsets, (int)experts, (int)rows, tile.row, (int)gridDim.x);
  out_scales = (u8*)out_scales + scale_tile.number(gridDim.y, tile.column) * 512;
  find_tile(scale_tile, &tile);
#else
  find_tile(offsets, experts, rows, blocks != 0, &tile);
#endif
  const Results to = {rows, columns, strips, out, out_scales};
  if (tile.count[0] <= 0) {
    clear_scales(tile, to, blocks != 0);
    return;
  }
#if TILE_TARGET && !MX
  __shared__ Scaled made;
  __shared__ __align__(16) int tops[4];
  const int row = copy_tile(tile, codes, source, columns, made.codes);
  const u32 word = load_scales(scales, row, (u32)columns, source != nullptr);
  const int target = set_factors(exponent_of(word, 0, MX), &made, tops);
  store_scale(to, tile, power_of_two(target), blocks != 0);
  write_tile(tile, made, to);
#else
  __shared__ __align__(128) u8 in[TILE * TILE];
  __shared__ __align__(16) int exponents[PARTS][TILE];
  __shared__ Spread spreads[4];
  const int row = copy_tile(tile, codes, source, columns, in);
  const u32 word = load_scales(scales, row, (u32)columns, source != nullptr);
  Spread spread = NO_SPREAD;
#pragma unroll
  for (int p = 0; p < PARTS; ++p) {
    const int e = row >= 0 ? exponent_of(word, p, MX) : ZERO_SCALE;
    exponents[p][t] = e;
    spread.add(e);
  }
  spread.of_warp();
  if (t % 32 == 0) spreads[warp] = spread;
  copy_async_wait<0>();
  pdl_launch_dependents();
  __syncthreads();
  for (int k = 0; k < 4; ++k) {
    spread.low = min(spread.low, spreads[k].low);
    spread.high = max(spread.high, spreads[k].high);
  }
#pragma unroll 1
  for (u32 piece = warp; piece < TILE / 16; piece += 4)
    transpose_piece(tile, piece, in, exponents[0], spread, to);
#endif
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
      bool occupied = (code & 0x7f) != 0 || e == NAN_SCALE;
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
    int e = ZERO_SCALE;
    if (from >= 0) {
      e = exponent_of(scale_word(scales, from * across + c / width, (int)mx), 0, (int)mx);
      value = decode(codes[from * columns + c], (int)fmt);
    }
    out[c * rows + r] = encode(moved_value(value, e, target, (int)mx), (int)fmt);
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
