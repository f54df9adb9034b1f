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
// within SPREAD powers of two.
#define PARTS (MX ? 4 : 1)  // blocks of rows in a tile, and of columns in a row of it
#define RAISED (FMT == 0 ? 7 : 0)
#define SPREAD (FMT == 0 ? 22 : 8)

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

// A power of two as a half; 0 below the smallest.
__device__ __forceinline__ u32 half_power(int exponent) {
  const u32 subnormal = exponent < -24 ? 0u : 1u << (exponent + 24 & 31);
  return exponent < -14 ? subnormal : (u32)(exponent + 15) << 10;
}

// Of the lanes that have four codes of a row each, those with one that is not zero.
__device__ __forceinline__ u32 lanes_filled(u32 codes, bool inside) {
  return __ballot_sync(0xffffffffu, inside && (codes & 0x7f7f7f7fu) != 0u);
}

// The word of one scale: a float32, or (mx) an E8M0 code.
__device__ __forceinline__ u32 scale_word(const void* scales, i64 at, int mx) {
  return mx ? ((const u8*)scales)[at] : ((const u32*)scales)[at];
}

// What: the codes of q [rows, columns] with the powers of two of `scales`, as column-wise blocks: out
//   [columns, rows], out_scales [strips, columns]. With `source` [rows] row r is row source[r] of q, or zeros
//   (-1).
// Shapes: columns a multiple of 16, of 128 for mx; blocks of 128, or 32 (mx).
// Bytes: every code read once and written once.
// Launch: blocks of 256 threads, as many as fit at once; shared memory for three tiles of codes and the table
//   of strips. The next tile's codes and scales travel while this one is made.
// How: two codes at a time, as halves. First pass, each value times 2^(e - E), e the exponent of its row's
//   scale and E the largest of the tile, exact within SPREAD; the largest of a column gives its target.
//   Second pass, the same times 2^(E - target), rounded once: where halves lose bits, below 2^-14, e4m3 has
//   zeros only, and e5m2 is exact. Rows of zeros have no say in E. What lies further apart takes the
//   exponents one by one.
extern "C" __global__ void __launch_bounds__(256, __CUDA_ARCH__ < 900 || MX ? 3 : 4)
    scaling_aware_transpose(const u8* codes, const void* scales, const int* source, const int* offsets,
                            i64 experts, i64 rows, i64 columns, i64 tiles_down, i64 strips, i64 tile, u8* out,
                            void* out_scales) {
  DYNAMIC_SHARED(shared);  // the tile that goes out | the one at hand | the next | the table of strips
  u8* stage = shared;
  u8(*in)[TILE * TILE] = (u8(*)[TILE * TILE])(shared + TILE * TILE);
  __shared__ Place places[PLACES];
  __shared__ int row_of[TILE];                         // of the codes; -1: no such row
  __shared__ __align__(16) u16 largest[CHUNKS][TILE];  // halves; exponents (as short) in the slow way
  __shared__ __align__(16) u32 factors[CHUNKS][PARTS][CHUNK_ROWS];
  __shared__ __align__(16) u16 lifts[PARTS][TILE];
  __shared__ short exponents[PARTS][TILE], targets[PARTS][TILE];  // of the rows; of the columns
  __shared__ u8 filled[TILE];  // rows with a code that is not zero (mx: a bit for each of its four blocks)
  __shared__ int lows[4], highs[4];
  const int fmt = FMT, mx = MX;
  const u32 t = threadIdx.x, lane = t % 32, warp = t / 32;
  const int part = mx ? lane / 8 : 0, strip_of_warp = mx ? warp / 2 : 0;
  const u32 across = (u32)((columns + TILE - 1) / TILE);
  const Strips strips_of =
      find_strips(offsets, experts, rows, mx ? 32 : TILE, (int*)(shared + 3 * TILE * TILE));
  const Turns turns = {strips_of, (u32)tiles_down, across, (u32)tiles_down * across, places};
  u32 word = 0;  // a thread's row's scales in the next tile; 0 when there is no row
  bool there = false;
  auto look = [&](u32 turn) {
    if (t >= TILE || !turns.has(turn)) return;
    int row = turns.row(turn, t);
    if (row >= 0 && source) row = source[row];
    there = row >= 0;
    row_of[t] = row;
    word = there ? ((const u32*)scales)[(u64)(u32)row * across + turns.place(turn).column] : 0u;
  };
  auto fetch = [&](u32 turn) {
    if (turns.has(turn)) {
      const int column = turns.place(turn).column * TILE + t % 8 * 16;
      u8* to = in[turn % 2] + t * 16;
#pragma unroll
      for (u32 k = 0; k < 4; ++k) {
        const int row = row_of[t / 8 + 32 * k];
        copy_async16(to + k * (32 * TILE), codes + column + (u64)(u32)row * (u32)columns,
                     row >= 0 && column < columns);
      }
    }
    copy_async_commit();
  };
  if (t < 32) turns.find(0);
  __syncthreads();
  look(0);
  __syncthreads();
  fetch(0);
  u8* my_stage = staged(stage, 4 * lane, warp);
#pragma unroll 1
  for (u32 turn = 0; turns.has(turn); ++turn) {
    const Place& place = turns.place(turn);
    const int b = turn % 2;
    if (t < TILE) {
      int low = NAN_SCALE, high = ZERO_SCALE;
#pragma unroll
      for (int p = 0; p < PARTS; ++p) {
        const int e = there ? exponent_of(word, p, mx) : ZERO_SCALE;
        exponents[p][t] = (short)e;
        const bool counts = e != ZERO_SCALE && e != NAN_SCALE;
        low = counts ? min(low, e) : low;
        high = counts ? max(high, e) : high;
      }
      low = __reduce_min_sync(0xffffffffu, low);
      high = __reduce_max_sync(0xffffffffu, high);
      if (lane == 0) lows[warp] = low, highs[warp] = high;
    }
    turns.begin(turn);
    look(turn + 1);
    copy_async_wait<0>();
    __syncthreads();  // this tile is here, and the one before it has been written
    fetch(turn + 1);
    const int column = place.column * TILE + 4 * lane;
    const u32* words = (const u32*)in[b] + warp * CHUNK_ROWS * (TILE / 4) + lane;
    int low = min(min(lows[0], lows[1]), min(lows[2], lows[3]));
    int high = max(max(highs[0], highs[1]), max(highs[2], highs[3]));
    if (high - low > SPREAD) {
      // only rows with a code that is not zero count
#pragma unroll 1
      for (int i = 0; i < CHUNK_ROWS; ++i) {
        const u32 lanes = lanes_filled(words[i * (TILE / 4)], column < columns);
        u32 parts = lanes != 0u;
        if (mx)
          parts = (lanes & 0xffu ? 1u : 0u) | (lanes & 0xff00u ? 2u : 0u) | (lanes & 0xff0000u ? 4u : 0u) |
                  (lanes >> 24 ? 8u : 0u);
        if (lane == 0) filled[warp * CHUNK_ROWS + i] = (u8)parts;
      }
      __syncthreads();
      low = NAN_SCALE, high = ZERO_SCALE;
#pragma unroll 1
      for (u32 k = lane; k < PARTS * TILE; k += 32) {
        const int e = exponents[k / TILE][k % TILE];
        if (e == ZERO_SCALE || e == NAN_SCALE || !(filled[k % TILE] >> (k / TILE) & 1)) continue;
        low = min(low, e);
        high = max(high, e);
      }
      low = __reduce_min_sync(0xffffffffu, low);
      high = __reduce_max_sync(0xffffffffu, high);
    }
    if (high == ZERO_SCALE) low = high = 0;
    const bool quick = high - low <= SPREAD && !tile;
    const int unit = high - RAISED;  // 1 as a half stands for 2^unit
    u32 seen[CHUNK_ROWS][2];         // the values, in columns 4 l and 4 l + 1, and the next two
    if (quick) {
      for (u32 k = lane; k < PARTS * CHUNK_ROWS; k += 32) {
        const u32 row = k % CHUNK_ROWS, p = k / CHUNK_ROWS;
        const int e = exponents[p][warp * CHUNK_ROWS + row];
        factors[warp][p][row] = 0x10001u * (e == NAN_SCALE ? 0x7e00u : half_power(min(e - unit, 15)));
      }
      __syncwarp();
      u32 tops[2] = {0u, 0u};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint4 four = ((const uint4*)factors[warp][part])[k];
        const u32 factor[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const u32 codes_here = words[(4 * k + i) * (TILE / 4)];
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            seen[4 * k + i][h] = halves_times(decode2((u16)(codes_here >> (16 * h)), fmt), factor[i]);
            tops[h] = larger_halves(tops[h], seen[4 * k + i][h]);
          }
        }
      }
      *(uint2*)&largest[warp][4 * lane] = make_uint2(tops[0], tops[1]);
    } else {
      int target[4] = {NO_TARGET, NO_TARGET, NO_TARGET, NO_TARGET};
#pragma unroll 1
      for (int i = 0; i < CHUNK_ROWS; ++i) {
        const int e = exponents[part][warp * CHUNK_ROWS + i];
        const u32 codes_here = words[i * (TILE / 4)];
        const u32 lanes = lanes_filled(codes_here, column < columns);
        if (tile) {
          // a row counts when any of its codes in this tile is not zero
          const bool occupied = mx ? (lanes >> (8 * part) & 0xffu) != 0u : lanes != 0u;
          if (occupied && e != ZERO_SCALE)
            for (int c = 0; c < 4; ++c) target[c] = max(target[c], e == NAN_SCALE ? NAN_TARGET : e);
        } else {
          float v[4];
          decode4(codes_here, fmt, v);
          for (int c = 0; c < 4; ++c) {
            const int needed = needed_exponent(v[c], fmt, mx);
            if (e == NAN_SCALE || needed == NAN_TARGET)
              target[c] = NAN_TARGET;
            else if (needed != NO_TARGET && e != ZERO_SCALE)
              target[c] = max(target[c], e + needed);
          }
        }
      }
      *(short4*)&largest[warp][4 * lane] =
          make_short4((short)target[0], (short)target[1], (short)target[2], (short)target[3]);
    }
    __syncthreads();
    bool far = !quick;  // what is left to multiply with is no normal half
    for (u32 k = t; k < PARTS * TILE; k += 256) {
      const u32 q = k / TILE, c = k % TILE, chunks = CHUNKS / PARTS;
      const i64 strip = (i64)place.row * PARTS + q;
      int target = NO_TARGET;
      if (quick) {
        u32 top = 0;
#pragma unroll
        for (int j = 0; j < chunks; ++j) top = max(top, (u32)largest[q * chunks + j][c]);
        const int needed = needed_exponent(f16_to_float((u16)top), fmt, mx);
        const bool some = needed != NO_TARGET;
        target = final_target(some && needed != NAN_TARGET ? unit + needed : needed, mx);
        const int left = some ? unit - target : 0;
        far = far || left < -14 || left > 15;
        lifts[q][c] = (u16)half_power(min(left, 15));
      } else {
        for (int j = 0; j < chunks; ++j) target = max(target, (int)(short)largest[q * chunks + j][c]);
        target = final_target(target, mx);
      }
      targets[q][c] = (short)target;
      if (place.column * TILE + c < columns && strip < strips) {
        const bool there = place.count[q] > 0;
        if (mx)
          ((u8*)out_scales)[strip * columns + place.column * TILE + c] = there ? (u8)(target + 127) : 0;
        else
          ((float*)out_scales)[strip * columns + place.column * TILE + c] =
              there ? power_of_two(target) : 0.f;
      }
    }
    if (!__syncthreads_or(far)) {
      const uint2 two = *(const uint2*)&lifts[strip_of_warp][4 * lane];
      const u32 lift[2] = {two.x, two.y};
      u32 columns_of[4][4];
#pragma unroll
      for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          u32 pairs[2];  // of two rows each
#pragma unroll
          for (int i = 0; i < 2; ++i)
            pairs[i] = encode2_halves(halves_times(seen[4 * k + 2 * i][h], lift[h]), fmt) |
                       encode2_halves(halves_times(seen[4 * k + 2 * i + 1][h], lift[h]), fmt) << 16;
          columns_of[2 * h][k] = __byte_perm(pairs[0], pairs[1], 0x6420);
          columns_of[2 * h + 1][k] = __byte_perm(pairs[0], pairs[1], 0x7531);
        }
#pragma unroll
      for (int c = 0; c < 4; ++c)
        *(uint4*)(my_stage + c * TILE) =
            make_uint4(columns_of[c][0], columns_of[c][1], columns_of[c][2], columns_of[c][3]);
    } else {
#pragma unroll 1
      for (int i = 0; i < CHUNK_ROWS; ++i) {
        const int e = exponents[part][warp * CHUNK_ROWS + i];
        float v[4];
        decode4(words[i * (TILE / 4)], fmt, v);
        for (int c = 0; c < 4; ++c) {
          const float moved = moved_value(v[c], e, targets[strip_of_warp][4 * lane + c]);
          my_stage[c * TILE + i] = (u8)encode2(moved, 0.f, fmt);
        }
      }
    }
    __syncthreads();
    // eight lanes a column's segment, a piece of 16 rows each
    const int q = mx ? lane % 8 / 2 : 0, inside = (mx ? lane % 2 : lane % 8) * CHUNK_ROWS;
    const int base = place.base[q] + inside, count = (int)clamped(place.count[q] - inside, CHUNK_ROWS);
    write_columns(stage, base, count, (i64)place.column * TILE, columns, rows, out);
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
