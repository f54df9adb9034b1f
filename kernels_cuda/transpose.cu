// Scaling-aware transpose: codes move by whole powers of two; the rule is in fp8moe/reference/transpose.py.
//
// scaling_aware_transpose is the fast path, for columns in multiples of 16; scaling_aware_transpose_plain
// serves the rest, one thread a column.
#include "tile.cuh"

#ifndef FMT
#define FMT 0  // what scaling_aware_transpose is compiled for: e4m3
#define MX 0   // blocks of 128
#endif

#define ZERO_SCALE -10000
#define NAN_SCALE 10000
#define NO_TARGET -20000
#define NAN_TARGET 20000

// Halves hold every multiple of 2^-24 of up to 11 bits below 2^16. The values of e4m3 codes are multiples of
// 2^-9 up to 448 and may be raised by 2^7; those of e5m2 are multiples of 2^-16 up to 57344. So a tile's
// values, each at the scale of its row relative to the largest, are exact as halves as long as the scales lie
// within SPREAD powers of two, and so are the rows' factors, normal halves.
#define PARTS (MX ? 4 : 1)  // blocks of rows in a tile, and of columns in a row of it
#define RAISED (FMT == 0 ? 7 : 0)
#define SPREAD (FMT == 0 ? 21 : 8)

// The smallest power of two that a block holding this value (at scale 1) would be given. Blocks of 32:
// floor(log2 v) - emax; of 128: ceil(log2(v / max)), max = 1.75 * 2^emax. No half is a subnormal float.
__device__ __forceinline__ int needed_exponent(float value, int fmt, int mx) {
  const u32 a = __float_as_uint(value) & 0x7fffffffu;
  const int exponent = (int)((a + (mx ? 0u : 0x1fffffu)) >> 23) - 127 - (fmt == 0 ? 8 : 15);
  return a == 0u ? NO_TARGET : a >= 0x7f800000u ? NAN_TARGET : exponent;
}

__device__ __forceinline__ int final_target(int target, int mx) {
  if (target <= ZERO_SCALE || target >= NAN_SCALE) target = 0;  // nothing but zeros, or a NaN
  return max(target, mx ? -127 : -126);
}

// Value of a code of exponent e, as seen from a block of exponent `target`. Past 40 powers of two nothing is
// left, or everything saturates.
__device__ __forceinline__ float moved_value(float value, int e, int target) {
  if (e == NAN_SCALE) return __uint_as_float(0x7fc00000u);
  if (e == ZERO_SCALE) return value * 0.f;
  return value * power_of_two(min(max(e - target, -40), 40));
}

// Exponent of a row's scale; `word` is a float32, or (mx) four E8M0 codes of which `part` is meant. A row
// that is not there has the word 0: scale 0 (mx: 2^-127, and codes of zero).
__device__ __forceinline__ int exponent_of(u32 word, int part, int mx) {
  if (mx) {
    const int code = word >> (8 * part) & 0xffu;
    return code == 255 ? NAN_SCALE : code - 127;
  }
  const int normal = (int)(word >> 23 & 0xffu) - 127, subnormal = -118 - __clz(word);
  return word == 0u ? ZERO_SCALE : word < 0x800000u ? subnormal : normal;
}

// The word of one scale: a float32, or (mx) an E8M0 code.
__device__ __forceinline__ u32 scale_word(const void* scales, i64 at, int mx) {
  return mx ? ((const u8*)scales)[at] : ((const u32*)scales)[at];
}

// A lane's four rows of 16 columns, column by column and value by value: for scales far apart, and (`filled`,
// the rows that count) for the target "tile". at: of the first column's scale; -1: it is not kept.
__device__ __noinline__ void by_columns(const u8* mine, const short* row_exponents, const u32* filled,
                                        u32 part, int count, u8* to, i64 rows, i64 at, bool some_rows,
                                        void* out_scales) {
  const int fmt = FMT, mx = MX;
#pragma unroll 1
  for (int c = 0; c < 16; ++c, to += rows) {
    float v[4];
    int target = NO_TARGET;
    for (int k = 0; k < 4; ++k) {
      const int e = row_exponents[k];
      v[k] = decode(mine[k * TILE + c], fmt);
      const int needed = needed_exponent(v[k], fmt, mx);
      if (filled) {
        if (filled[k] >> part & 1u && e != ZERO_SCALE) target = max(target, e == NAN_SCALE ? NAN_TARGET : e);
      } else if (e == NAN_SCALE || needed == NAN_TARGET) {
        target = NAN_TARGET;
      } else if (needed != NO_TARGET && e != ZERO_SCALE) {
        target = max(target, e + needed);
      }
    }
    for (int step = 1; step < (mx ? 8 : 32); step *= 2)
      target = max(target, __shfl_xor_sync(0xffffffffu, target, step));
    target = final_target(target, mx);
    for (int k = 0; k < 4; ++k)
      if (k < count) to[k] = (u8)encode2(moved_value(v[k], row_exponents[k], target), 0.f, fmt);
    if (at < 0 || threadIdx.x % (mx ? 8 : 32)) continue;
    if (mx)
      ((u8*)out_scales)[at + c] = some_rows ? (u8)(target + 127) : 0;
    else
      ((float*)out_scales)[at + c] = some_rows ? power_of_two(target) : 0.f;
  }
}

// What: the codes of q [rows, columns] with the powers of two of `scales`, as column-wise blocks: out
//   [columns, rows], out_scales [strips, columns]. With `source` [rows] row r is row source[r] of q, or zeros
//   (-1).
// Shapes: columns a multiple of 16, of 128 for mx; blocks of 128, or 32 (mx).
// Bytes: every code read once and written once.
// Launch: blocks of 256 threads, as many as fit at once; shared memory for two tiles of codes and the table
//   of strips. The next tile's codes and scales travel while this one is made. A warp has 16 columns of a
//   tile, and a lane four rows of them: so a column's largest is found by shuffles, a warp writes whole
//   lines, and the only barrier is the one behind which a tile has arrived.
// How: two codes at a time, as halves. First pass, each value times 2^(e - E), e the exponent of its row's
//   scale and E the largest of the tile, exact within SPREAD; the largest of a column gives its target.
//   Second pass, the same times 2^(E - target), rounded once: where halves lose bits, below 2^-14, e4m3 has
//   zeros only, and e5m2 is exact. Rows of zeros have no say in E. What lies further apart goes column by
//   column, value by value.
extern "C" __global__ void __launch_bounds__(256, 3)
    scaling_aware_transpose(const u8* codes, const void* scales, const int* source, const int* offsets,
                            i64 experts, i64 rows, i64 columns, i64 strips, i64 tile, u8* out,
                            void* out_scales) {
  DYNAMIC_SHARED(shared);  // the tile at hand | the next | the table of strips
  u8(*in)[TILE * TILE] = (u8(*)[TILE * TILE]) shared;
  __shared__ Place places[PLACES];
  __shared__ int row_of[2][TILE];  // of the codes; -1: no such row
  __shared__ __align__(16) short exponents[2][PARTS][TILE];
  __shared__ int lows[2][4], highs[2][4];
  __shared__ u32 filled[TILE];  // rows with a code that is not zero (mx: a bit for each of its four blocks)
  const int fmt = FMT, mx = MX;
  const u32 t = threadIdx.x, lane = t % 32, warp = t / 32;
  const u32 part = mx ? warp / 2 : 0;  // block of a row that this warp's columns belong to
  const u32 q = mx ? lane / 8 : 0;     // strip of this lane's rows
  const u32 inside = 4 * lane - q * 32;
  const Strips strips_of =
      find_strips(offsets, experts, rows, mx ? 32 : TILE, (int*)(shared + 2 * TILE * TILE));
  const Turns turns(strips_of, columns, places, false);
  clear_scales(turns, strips, columns, mx ? 1 : 4, out_scales);
  const u32 row_words = (u32)((columns + TILE - 1) / TILE);
  u32 word = 0;  // a thread's row's scales in the next tile; 0 when there is no row
  bool there = false;
  auto look = [&](u32 turn) {
    if (t >= TILE || !turns.has(turn)) return;
    int row = turns.row(turn, t);
    if (row >= 0 && source) row = source[row];
    there = row >= 0;
    row_of[turn % 2][t] = row;
    word = there ? ((const u32*)scales)[(u64)(u32)row * row_words + turns.place(turn).column] : 0u;
  };
  auto fetch = [&](u32 turn) {
    if (turns.has(turn)) {
      // row r has its piece c of 16 bytes at c ^ (r / 4 % 8): no bank conflicts
      const int column = turns.place(turn).column * TILE + t % 8 * 16;
      u8* to = in[turn % 2] + t / 8 * TILE + (t % 8 ^ warp) * 16;
#pragma unroll
      for (u32 k = 0; k < 4; ++k) {
        const int row = row_of[turn % 2][t / 8 + 32 * k];
        copy_async16(to + k * (32 * TILE), codes + column + (u64)(u32)row * (u32)columns,
                     row >= 0 && column < columns);
      }
    }
    copy_async_commit();
  };
  turns.start(look, fetch);
#pragma unroll 1
  for (u32 turn = 0; turns.has(turn); ++turn) {
    const Place& place = turns.place(turn);
    const u32 b = turn % 2;
    if (t < TILE) {
      int low = NAN_SCALE, high = ZERO_SCALE;
#pragma unroll
      for (int p = 0; p < PARTS; ++p) {
        const int e = there ? exponent_of(word, p, mx) : ZERO_SCALE;
        exponents[b][p][t] = (short)e;
        const bool counts = e != ZERO_SCALE && e != NAN_SCALE;
        low = counts ? min(low, e) : low;
        high = counts ? max(high, e) : high;
      }
      low = __reduce_min_sync(0xffffffffu, low);
      high = __reduce_max_sync(0xffffffffu, high);
      if (lane == 0) lows[b][warp] = low, highs[b][warp] = high;
    }
    turns.begin(turn);
    look(turn + 1);
    copy_async_wait<0>();
    __syncthreads();  // this tile is here, and nobody reads the one before it
    fetch(turn + 1);

    const i64 first_column = (i64)place.column * TILE + 16 * warp;
    const short* row_exponents = exponents[b][part] + 4 * lane;
    const u8* mine = in[b] + 4 * lane * TILE + (warp ^ lane % 8) * 16;
    int low = min(min(lows[b][0], lows[b][1]), min(lows[b][2], lows[b][3]));
    int high = max(max(highs[b][0], highs[b][1]), max(highs[b][2], highs[b][3]));
    if (tile || high - low > SPREAD) {
      // only rows with a code that is not zero count
      __syncthreads();
      if (t < TILE) filled[t] = 0u;
      __syncthreads();
      if (first_column < columns)
        for (int k = 0; k < 4; ++k) {
          const uint4 v = *(const uint4*)(mine + k * TILE);
          if ((v.x | v.y | v.z | v.w) & 0x7f7f7f7fu) atomicOr(&filled[4 * lane + k], 1u << part);
        }
      __syncthreads();
      low = NAN_SCALE, high = ZERO_SCALE;
      for (u32 k = lane; k < PARTS * TILE; k += 32) {
        const int e = exponents[b][k / TILE][k % TILE];
        if (e == ZERO_SCALE || e == NAN_SCALE || !(filled[k % TILE] >> (k / TILE) & 1u)) continue;
        low = min(low, e);
        high = max(high, e);
      }
      low = __reduce_min_sync(0xffffffffu, low);
      high = __reduce_max_sync(0xffffffffu, high);
    }
    if (first_column >= columns) continue;
    if (high == ZERO_SCALE) low = high = 0;
    const int unit = high - RAISED;  // 1 as a half stands for 2^unit
    const i64 strip = (i64)place.row * PARTS + q;
    const bool some_rows = place.count[q] > 0, keeps_scales = strip < strips;
    const i64 base = place.base[q] + inside;
    const int count = (int)clamped(place.count[q] - (int)inside, 4);
    const bool whole = count == 4 && (((size_t)out | rows | base) & 3) == 0;
    u8* to = out + first_column * rows + base;
    if (!tile && high - low <= SPREAD) {
      u32 factor[4], seen[4][8], tops[8];  // of the rows; the values, in pairs of columns; their largest
      const short4 four_rows = *(const short4*)row_exponents;
      const int of_row[4] = {four_rows.x, four_rows.y, four_rows.z, four_rows.w};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int up = min(of_row[k] - unit, 15);
        factor[k] = up < -14 ? 0u : (u32)(up + 15) << 10;
        factor[k] = 0x10001u * (of_row[k] == NAN_SCALE ? 0x7e00u : factor[k]);
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint4 v = *(const uint4*)(mine + k * TILE);
        const u32 four[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int p = 0; p < 8; ++p) {
          seen[k][p] = halves_times(decode2((u16)(four[p / 2] >> (16 * (p % 2))), fmt), factor[k]);
          tops[p] = larger_halves(k ? tops[p] : 0u, seen[k][p]);
        }
      }
      // a lane ends with the largest of pair `lane % 8`
#pragma unroll
      for (int half = 4; half > 0; half /= 2)
#pragma unroll
        for (int p = 0; p < half; ++p) {
          const bool upper = lane & half;
          const u32 keep = upper ? tops[p + half] : tops[p], give = upper ? tops[p] : tops[p + half];
          tops[p] = larger_halves(keep, __shfl_xor_sync(0xffffffffu, give, half));
        }
      u32 top = tops[0];
      if (!mx) {
        top = larger_halves(top, __shfl_xor_sync(0xffffffffu, top, 8));
        top = larger_halves(top, __shfl_xor_sync(0xffffffffu, top, 16));
      }
      int target[2];
      u32 lift = 0;
      bool near = true;  // what is left to multiply with is a normal half
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int needed = needed_exponent(f16_to_float((u16)(top >> (16 * c))), fmt, mx);
        const bool some = needed != NO_TARGET;
        target[c] = final_target(some && needed != NAN_TARGET ? unit + needed : needed, mx);
        const int left = some ? unit - target[c] : 0;
        near = near && left >= -14 && left <= 15;
        lift |= (u32)(left + 15) << (10 + 16 * c);
      }
      if (!__any_sync(0xffffffffu, !near)) {
        if (keeps_scales && (mx || lane < 8)) {
          const i64 at = strip * columns + first_column + 2 * (lane % 8);
          if (mx)
            *(u16*)((u8*)out_scales + at) = some_rows ? (u16)((target[0] + 127) | (target[1] + 127) << 8) : 0;
          else
            *(uint2*)((float*)out_scales + at) =
                some_rows ? make_uint2((u32)(target[0] + 127) << 23, (u32)(target[1] + 127) << 23)
                          : make_uint2(0u, 0u);
        }
        u32 columns_of[16];
#pragma unroll
        for (int p = 0; p < 8; ++p) {
          const u32 by = __shfl_sync(0xffffffffu, lift, (int)(lane & 24u) + p);
          u32 pairs[2];  // of two rows each
#pragma unroll
          for (int k = 0; k < 2; ++k)
            pairs[k] = encode2_halves(halves_times(seen[2 * k][p], by), fmt) |
                       encode2_halves(halves_times(seen[2 * k + 1][p], by), fmt) << 16;
          columns_of[2 * p] = __byte_perm(pairs[0], pairs[1], 0x6420);
          columns_of[2 * p + 1] = __byte_perm(pairs[0], pairs[1], 0x7531);
        }
        if (whole) {
#pragma unroll
          for (int c = 0; c < 16; ++c, to += rows) __stcs((u32*)to, columns_of[c]);
        } else {
#pragma unroll
          for (int c = 0; c < 16; ++c, to += rows)
#pragma unroll 1
            for (int r = 0; r < count; ++r) to[r] = (u8)(columns_of[c] >> (8 * r));
        }
        continue;
      }
    }
    by_columns(mine, row_exponents, tile ? filled + 4 * lane : 0, part, count, to, rows,
               strip < strips ? strip * columns + first_column : -1, some_rows, out_scales);
  }
}

// codes [rows, columns], scales [rows, ceil(columns / width)] -> out [columns, rows], out_scales [strips,
// columns]. Grid (strips, columns / 128). `source`: token of each row (-1: zeros), or null for the row
// itself.
extern "C" __global__ void scaling_aware_transpose_plain(const u8* codes, const void* scales,
                                                         const int* source, const int* strips, i64 rows,
                                                         i64 columns, i64 width, i64 fmt, i64 mx, i64 tile,
                                                         u8* out, void* out_scales) {
  const i64 strip = blockIdx.x, c = (i64)blockIdx.y * blockDim.x + threadIdx.x;
  const i64 lo = strips[2 * strip], hi = strips[2 * strip + 1], blocks = (columns + width - 1) / width;
  const bool inside = c < columns;
  int target = ZERO_SCALE;
  bool any_nan = false;
  for (i64 r = lo; r < hi; ++r) {
    const i64 from = source ? source[r] : r;
    int code = 0, e = ZERO_SCALE;
    if (inside && from >= 0) {
      code = codes[from * columns + c];
      e = exponent_of(scale_word(scales, from * blocks + c / width, (int)mx), 0, (int)mx);
    }
    if (tile) {
      // a row counts when any of its codes in this tile is not zero
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
      const int e = exponent_of(scale_word(scales, from * blocks + c / width, (int)mx), 0, (int)mx);
      value = moved_value(decode(codes[from * columns + c], (int)fmt), e, target);
    }
    out[c * rows + r] = encode(value, (int)fmt);
  }
  const i64 at = strip * columns + c;
  if (mx)
    ((u8*)out_scales)[at] = hi > lo ? (u8)(target + 127) : 0;
  else
    ((float*)out_scales)[at] = hi > lo ? power_of_two(target) : 0.f;
}

// Set *flag when a scale is no power of two (0 is fine). One thread a scale.
extern "C" __global__ void check_pow2(const float* scales, i64 count, int* flag) {
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const u32 u = __float_as_uint(scales[i]);
  const bool subnormal_pow2 = u < 0x800000u && (u & (u - 1u)) == 0u;
  const bool normal_pow2 = u >= 0x800000u && u < 0x7f800000u && (u & 0x7fffffu) == 0u;
  if (!subnormal_pow2 && !normal_pow2) *flag = 1;
}
