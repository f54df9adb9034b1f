// Transposes a tile of row-wise FP8 codes in shared memory: used by transpose.cu for tiles read from memory
// and by swiglu_transpose.cu for tiles it has just computed.
#pragma once
#include "scale_layout.cuh"
#include "tile_order.cuh"

#ifndef FMT
#define FMT 0          // default of scaling_aware_transpose: e4m3
#define MX 0           // scale blocks of 128
#define TILE_TARGET 0  // each column has its own target scale
#endif

#define ZERO_SCALE -10000
#define NAN_SCALE 10000
#define NO_TARGET -20000
#define NAN_TARGET 20000
#define INFINITY_TARGET 1000  // exceeds every finite exponent, also after adding a scale's

// f16 represents every multiple of 2^-24 below 2^16 with up to 11 significant bits. Values of e4m3 codes are
// multiples of 2^-9 up to 448 and may be scaled by up to 2^7; those of e5m2 are multiples of 2^-16 up to
// 57344. So a tile's values, each scaled by its row's scale relative to the largest, are exact in f16 if the
// scales lie within SPREAD powers of two; the rows' factors are then normal f16 numbers.
#define EMAX (FMT == 0 ? 8 : 15)
#define PARTS (MX ? 4 : 1)  // scale blocks of rows in a tile, and of columns in a row of it
// Minimum resident thread blocks per SM: the largest number that needs no additional register limit. With one
// scale per tile it is what shared memory allows: rows in L2 need many (permute_transpose to 128x128 blocks:
// 143 us with ten, 146 with eight, 156 with six).
#define RESIDENT (TILE_TARGET && !MX ? __CUDA_ARCH__ >= 890 ? 12 : 9 : 5)
#define RAISED (FMT == 0 ? 7 : 0)
#define SPREAD (FMT == 0 ? 21 : 8)

// Smallest power-of-two scale exponent for a block that holds this value (given scale 1): ceil(log2(v /
// max)), max = 1.75 * 2^emax. The value is an f16 number, hence not a subnormal float.
__device__ __forceinline__ int needed_exponent(float value, int fmt, int mx) {
  const u32 a = __float_as_uint(value) & 0x7fffffffu;
  const int exponent = (int)((a + ABOVE_LIMIT) >> 23) - 127 - (fmt == 0 ? 8 : 15);
  if (mx && a == 0x7f800000u) return INFINITY_TARGET;
  return a == 0u ? NO_TARGET : a >= 0x7f800000u ? NAN_TARGET : exponent;
}

__device__ __forceinline__ int final_target(int target, int mx) {
  if (target >= NAN_SCALE) return mx ? 128 : 0;  // E8M0's byte 255: the block is NaN
  if (mx) return min(max(target, -127), 127);    // all zeros: -127
  return target <= ZERO_SCALE ? 0 : max(target, -126);
}

// Value of a code with scale exponent e, relative to a block of scale exponent `target`. Beyond 40 powers of
// two the result is zero or saturates.
__device__ __forceinline__ float moved_value(float value, int e, int target, int mx) {
  if (e == NAN_SCALE || (mx && target > 127)) return __uint_as_float(0x7fc00000u);
  if (e == ZERO_SCALE) return value * 0.f;
  return value * power_of_two(min(max(e - target, -40), 40));
}

// Exponent of a row's scale. `word`: a float32 that is not negative (or -0), or (mx) four E8M0 codes of which
// `part` is selected. For a missing row the word is 0: scale 0 (mx: 2^-127, with zero codes).
__device__ __forceinline__ int exponent_of(u32 word, int part, int mx) {
  if (mx) {
    const int code = word >> (8 * part) & 0xffu;
    return code == 255 ? NAN_SCALE : code - 127;
  }
  const int normal = (int)(word >> 23 & 0xffu) - 127, subnormal = -118 - __clz(word);
  return word << 1 == 0u ? ZERO_SCALE : word < 0x800000u ? subnormal : normal;
}

// Bits of one scale: a float32, or (mx) an E8M0 code.
__device__ __forceinline__ u32 scale_word(const void* scales, i64 at, int mx) {
  return mx ? ((const u8*)scales)[at] : ((const u32*)scales)[at];
}

// Offset of a row's piece of 16 bytes, one of eight, of a tile in shared memory. Eight rows have their pieces
// in the same order, the next eight in another, so that a column's pieces of rows that are eight apart are in
// different banks. A row must not span two lines of 128 bytes of shared memory, as with padding after every
// eight rows: then cp.async reads 1.5 times as many bytes from L2 as it copies (402 instead of 268 MB,
// 131,072 x 2048; the kernel took 107 to 110 us instead of 101 to 103).
__device__ __forceinline__ u32 place_of(u32 row, u32 piece) {
  return row * TILE + (piece ^ row / 8 % 8) * 16;
}

// A lane's share of a piece (128 rows by 16 columns of a tile, processed by one warp): eight consecutive rows
// of 8 columns; 16 lanes together hold all rows of a column. A half-warp's reads of a row differ in their
// banks, and a lane's rows are at constant distances.
struct Lane {
  u32 column, first_row;  // within the tile
  __device__ __forceinline__ Lane(u32 piece)
      : column(piece * 16 + threadIdx.x % 2 * 8), first_row(threadIdx.x % 32 / 2 * 8) {}
  __device__ __forceinline__ u32 at(u32 row) const {  // byte offset of its codes of that row, 0 to 7
    return place_of(first_row, column / 16) + column % 16 + row * TILE;
  }
};

struct Tile {                     // its location; like tile_order.cuh's Place, in registers
  int base[PARTS], count[PARTS];  // per strip: first row, number of rows
  int row, column;                // in units of tiles
};

// all[q], without dynamic indexing.
__device__ __forceinline__ int of_strip(const int (&all)[PARTS], u32 q) {
  int it = all[0];
#pragma unroll
  for (u32 p = 1; p < PARTS; ++p)
    if (q == p) it = all[p];
  return it;
}

struct Results {
  i64 rows, columns, strips;
  u8* codes;     // [columns, rows]
  void* scales;  // [strips, columns]; BLOCKED: this tile's 512 bytes
};

// Bit mask of a tile's rows: bit l of word i is the row that lane l examines in step i. Eight lanes examine
// rows that are eight apart, and thus in different banks.
struct Rows {
  u32 words[4];
  static __device__ __forceinline__ u32 row(u32 i, u32 lane) {
    return i / 2 * 64 + lane % 8 * 8 + i % 2 * 4 + lane / 8;
  }
  __device__ __forceinline__ bool has(u32 row) const {
    return words[row / 64 * 2 + row / 4 % 2] >> (row % 4 * 8 + row / 8 % 8) & 1u;
  }
};

// Rows with a non-zero code in the columns of scale block `part`; called by a whole warp.
__device__ __noinline__ Rows filled_rows(const u8* codes, u32 part) {
  const u32 lane = threadIdx.x % 32;
  Rows filled;
#pragma unroll 1
  for (u32 i = 0; i < 4; ++i) {
    const u32 row = Rows::row(i, lane);
    u32 seen = 0;
#pragma unroll
    for (u32 c = 0; c < 8 / PARTS; ++c) {
      const uint4 v = *(const uint4*)(codes + place_of(row, 8 / PARTS * part + c));
      seen |= (v.x | v.y | v.z | v.w) & 0x7f7f7f7fu;
    }
    filled.words[i] = __ballot_sync(0xffffffffu, seen != 0);
  }
  return filled;
}

// Slow path, column by column and value by value, over the lane's `left` rows: for scales too far apart, for
// NaN, and for MXFP8's target "tile" with the rows `filled`. at: index of the first scale (BLOCKED: strip
// within the tile); -1: scales are not stored.
__device__ __noinline__ void by_columns(const Lane& rows_of_lane, const u8* in, const int* exponents,
                                        const Rows& filled, int left, u8* to, i64 rows, i64 at,
                                        bool some_rows, void* out_scales) {
  const int fmt = FMT, mx = MX;
  const u32 behind = mx ? 8 : 32;  // stride of lanes in different scale blocks
#pragma unroll 1
  for (u32 c = 0; c < 8; ++c, to += rows) {
    int target = NO_TARGET;
    auto value = [&](u32 r) { return (int)r < left ? decode(in[rows_of_lane.at(r) + c], fmt) : 0.f; };
#pragma unroll 1
    for (u32 r = 0; r < 8; ++r) {
      const int e = exponents[r], needed = needed_exponent(value(r), fmt, mx);
      if (TILE_TARGET) {
        // MXFP8: of NaN also zeros
        if ((filled.has(rows_of_lane.first_row + r) && e != ZERO_SCALE) || (mx && e == NAN_SCALE))
          target = max(target, e == NAN_SCALE ? NAN_TARGET : e);
      } else if (e == NAN_SCALE || needed == NAN_TARGET) {
        target = NAN_TARGET;
      } else if (needed != NO_TARGET && e != ZERO_SCALE) {
        target = max(target, e + needed);
      }
    }
    for (u32 step = 2; step < behind; step *= 2)
      target = max(target, __shfl_xor_sync(0xffffffffu, target, step));
    target = final_target(target, mx);
#pragma unroll 1
    for (u32 r = 0; r < 8 && (int)r < left; ++r)
      to[r] = (u8)encode2(moved_value(value(r), exponents[r], target, mx), 0.f, fmt);
    if (at < 0 || threadIdx.x % behind > 1) continue;
    if (BLOCKED)
      ((u8*)out_scales)[place_in_tile(rows_of_lane.column + c, (u32)at)] = some_rows ? (u8)(target + 127) : 0;
    else if (mx)
      ((u8*)out_scales)[at + c] = some_rows ? (u8)(target + 127) : 0;
    else
      ((float*)out_scales)[at + c] = some_rows ? power_of_two(target) : 0.f;
  }
}

__device__ __noinline__ void write_bytes(uint2 eight, int left, u8* to) {
#pragma unroll 1
  for (int r = 0; r < 8 && r < left; ++r) to[r] = (u8)((r < 4 ? eight.x : eight.y) >> (r % 4 * 8));
}

// Smallest and largest scale exponent of the rows that count. A NaN scale makes the spread maximal.
struct Spread {
  int low, high;
  __device__ __forceinline__ void add(int e) {
    low = e == ZERO_SCALE ? low : e == NAN_SCALE ? ZERO_SCALE : min(low, e);
    high = max(high, e);
  }
  __device__ __forceinline__ void of_warp() {
    low = __reduce_min_sync(0xffffffffu, low);
    high = __reduce_max_sync(0xffffffffu, high);
  }
};

#define NO_SPREAD {NAN_SCALE, ZERO_SCALE}

// Spread of the scale exponents, in one block of columns, of the rows `filled`; called by a whole warp.
__device__ __forceinline__ Spread spread_of(const Rows& filled, const int* exponents) {
  const u32 lane = threadIdx.x % 32;
  Spread spread = NO_SPREAD;
  for (u32 i = 0; i < 4; ++i) {
    const int e = exponents[Rows::row(i, lane)];
    if (e == NAN_SCALE || filled.words[i] >> lane & 1u) spread.add(e);
  }
  spread.of_warp();
  return spread;
}

// 2^(e - target) as an f16 pair; e <= target unless the row is zero. What underflows f16 (below 2^-24, or in
// the product) is far less than half a unit of the code. e5m2 values reach from 2^15 to 2^-16 and need two
// factors, [0] and [1], down to 2^-40.
__device__ __forceinline__ void tile_factors(int e, int target, u32 (&factors)[2]) {
  auto power = [](int exponent) {  // 0 from -127 on
    const float f = __uint_as_float((u32)max(min(exponent + 127, 127), 0) << 23);
    return to_f16x2(f, f);
  };
  if (FMT == 0) {
    factors[0] = power(e - target);
    return;
  }
  const int d = min(max(e - target, -40), 0);
  factors[0] = e == ZERO_SCALE ? 0u : power(max(d, -16));
  factors[1] = power(d - max(d, -16));
}

// Writes a lane's codes: its `left` rows of 8 columns. values: by rows, f16 pairs of adjacent columns.
__device__ __forceinline__ void write_lane(const u32 (&values)[8][4], int left, bool whole, u8* out,
                                           u32 rows) {
  uint2 of_column[8];
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    u32 pairs[4];  // of two rows each
#pragma unroll
    for (int k = 0; k < 4; ++k)
      pairs[k] = encode2_halves(values[2 * k][p], FMT) | encode2_halves(values[2 * k + 1][p], FMT) << 16;
#pragma unroll
    for (int c = 0; c < 2; ++c)
      of_column[2 * p + c] = make_uint2(__byte_perm(pairs[0], pairs[1], 0x6420u + 0x1111u * c),
                                        __byte_perm(pairs[2], pairs[3], 0x6420u + 0x1111u * c));
  }
  if (left >= 8 && whole) {
    // opaque, so that each address is one multiplication; the compiler would add the pitch, two instructions
    const u32 pitch = kept(rows);
#pragma unroll
    for (int c = 0; c < 8; ++c) __stcs((uint2*)(kept(out) + (u64)pitch * c), of_column[c]);
  } else if (left > 0) {
#pragma unroll
    for (int c = 0; c < 8; ++c) write_bytes(of_column[c], left, out + (u64)rows * c);
  }
}

// Codes of a tile and the factors of its rows, by which they are multiplied when they are transposed: f16
// pairs, two of them (see tile_factors) for e5m2.
struct __align__(128) Scaled {
  u8 codes[TILE * TILE];
  u32 factors[FMT == 0 ? 1 : 2][TILE];
  __device__ __forceinline__ void set_factors(u32 row, int exponent, int target) {
    u32 both[2];
    tile_factors(exponent, target, both);
    factors[0][row] = both[0];
    if (FMT == 1) factors[FMT][row] = both[1];
  }
};

// Writes a lane's share of a tile transposed: each code times its row's factor, rounded once. offset: columns
// between the lane's piece and the one to write, 0 or 64 from one of the first four pieces. left, whole: see
// write_lane. out: the first code to write.
__device__ __forceinline__ void write_columns(const Scaled& tile, const Lane& lane, u32 offset, int left,
                                              bool whole, u8* out, u32 rows) {
  const u8* from = tile.codes + (lane.at(0) ^ offset);
  u32 values[8][4];
#pragma unroll
  for (u32 k = 0; k < 8; ++k) {
    const uint2 codes = *(const uint2*)(from + k * TILE);
    decode4(codes.x, FMT, &values[k][0], &values[k][1]);
    decode4(codes.y, FMT, &values[k][2], &values[k][3]);
#pragma unroll
    for (int f = 0; f < (FMT == 0 ? 1 : 2); ++f)
#pragma unroll
      for (int p = 0; p < 4; ++p)
        values[k][p] = halves_times(values[k][p], tile.factors[f][lane.first_row + k]);
  }
  write_lane(values, left, whole, out, rows);
}

// Transposes one piece of a tile, called by one warp. exponents: [PARTS][TILE].
__device__ __forceinline__ void transpose_piece(const Tile& tile, u32 piece, const u8* codes,
                                                const int* exponents, Spread spread, const Results& to) {
  const int fmt = FMT, mx = MX;
  const u32 lane = threadIdx.x % 32;
  const Lane rows_of_lane(piece);
  const u32 part = mx ? piece / 2 : 0;  // scale block of these columns
  const u32 q = mx ? lane / 8 : 0;      // strip of this lane's rows
  const int* row_exponents = exponents + part * TILE + rows_of_lane.first_row;
  // number of rows from the lane's first on. Not clamped to 8: NVRTC 13.0 fuses "clamped to 8, equals 8?"
  // into one VIMNMX with a predicate that is false, and all codes were written byte by byte.
  const int left = of_strip(tile.count, q) - (int)(rows_of_lane.first_row - q * 32);
  const i64 first_column = (i64)tile.column * TILE + rows_of_lane.column;
  if (first_column >= to.columns) return;
  const i64 strip = (i64)tile.row * PARTS + q;
  const int first = of_strip(tile.base, q) + (int)(rows_of_lane.first_row - q * 32);
  const bool some_rows = of_strip(tile.count, q) > 0, keeps_scales = strip < to.strips;
  u8* out = to.codes + first_column * to.rows + first;
  const bool whole = (((size_t)to.codes | to.rows | first) & 7) == 0;
  Rows filled = {};
  if (TILE_TARGET || spread.high - spread.low > SPREAD) {
    filled = filled_rows(codes, part);
    spread = spread_of(filled, exponents + part * TILE);
  }
  if (spread.high == ZERO_SCALE) spread.low = spread.high = 0;
  if (!TILE_TARGET && spread.high - spread.low <= SPREAD) {
    uint2 codes_of_row[8];
    const At codes_at = at_of(codes) + rows_of_lane.at(0), exponents_at = at_of(row_exponents);
#pragma unroll
    for (u32 k = 0; k < 8; ++k) codes_of_row[k] = load_words_at(codes_at + k * TILE);
    const int4 near_rows = load_ints_at(exponents_at), far_rows = load_ints_at(exponents_at + 16);
    const int of_row[8] = {near_rows.x, near_rows.y, near_rows.z, near_rows.w,
                           far_rows.x,  far_rows.y,  far_rows.z,  far_rows.w};
    u32 seen[8][4];                         // values by rows, f16 pairs of adjacent columns
    const int unit = spread.high - RAISED;  // f16 1.0 represents 2^unit
    u32 tops[4];                            // amax of each column pair
#pragma unroll
    for (u32 k = 0; k < 8; ++k) {
      // 2^(of_row - unit) as an f16 pair; 0 for scale 0; any positive number for a row of zeros
      const u32 factor = (u32)max(min(of_row[k] + (15 - unit), 30), 0) * 0x04000400u;
      decode4(codes_of_row[k].x, fmt, &seen[k][0], &seen[k][1]);
      decode4(codes_of_row[k].y, fmt, &seen[k][2], &seen[k][3]);
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        seen[k][p] = halves_times(seen[k][p], factor);
        if (k == 1) tops[p] = larger_magnitudes(seen[0][p], seen[1][p]);
        if (k > 1) tops[p] = larger_halves(tops[p], seen[k][p]);
      }
    }
    // reduction after which each lane holds the amax of one column pair, selected by lane bits 1 and 2
#pragma unroll
    for (int half = 2; half > 0; half /= 2)
#pragma unroll
      for (int p = 0; p < half; ++p) {
        const u32 bit = half == 2 ? 2 : 4;
        const u32 keep = lane & bit ? tops[p + half] : tops[p], give = lane & bit ? tops[p] : tops[p + half];
        tops[p] = larger_halves(keep, __shfl_xor_sync(0xffffffffu, give, bit));
      }
    u32 top = tops[0];
    if (!mx) {
      top = larger_halves(top, __shfl_xor_sync(0xffffffffu, top, 8));
      top = larger_halves(top, __shfl_xor_sync(0xffffffffu, top, 16));
    }
    // needed_exponent and final_target from f16 exponents; valid if the amax and the remaining factor are
    // normal f16 numbers
    u32 target[2], lift = 0;  // target: float exponents
    bool near = true;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const u32 amax = top >> (16 * c) & 0xffffu;
      const int exponent = (int)(amax + (ABOVE_LIMIT >> 13)) >> 10;
      const bool has_values = amax != 0;
      const int power = has_values ? exponent - (15 + EMAX) + unit : mx ? -127 : 0;
      near = near && (!has_values || (exponent >= EMAX && exponent < 31)) && power >= (mx ? -127 : -126);
      target[c] = (u32)(power + 127);
      lift |= (u32)(has_values ? 30 + EMAX - exponent : 15) << (10 + 16 * c);
    }
    if (!__any_sync(0xffffffffu, !near)) {
#if BLOCKED
      const u32 c = rows_of_lane.column + (lane & 2 ? 4 : 0) + (lane & 4 ? 2 : 0);
      ((u8*)to.scales)[place_in_tile(c, q)] = some_rows ? (u8)target[0] : 0;
      ((u8*)to.scales)[place_in_tile(c + 1, q)] = some_rows ? (u8)target[1] : 0;
#else
      if (keeps_scales && (mx || lane < 8)) {
        const i64 at = strip * to.columns + first_column + (lane & 2 ? 4 : 0) + (lane & 4 ? 2 : 0);
        if (mx)
          *(u16*)((u8*)to.scales + at) = some_rows ? (u16)(target[0] | target[1] << 8) : 0;
        else
          *(uint2*)((float*)to.scales + at) =
              some_rows ? make_uint2(target[0] << 23, target[1] << 23) : make_uint2(0u, 0u);
      }
#endif
      const u32 lifts[4] = {of_lane_near<0, 25>(lift), of_lane_near<4, 25>(lift), of_lane_near<2, 25>(lift),
                            of_lane_near<6, 25>(lift)};
#pragma unroll
      for (int k = 0; k < 8; ++k)
#pragma unroll
        for (int p = 0; p < 4; ++p) seen[k][p] = halves_times(seen[k][p], lifts[p]);
      write_lane(seen, left, whole, out, (u32)to.rows);
      return;
    }
  }
  by_columns(rows_of_lane, codes, row_exponents, filled, left, out, to.rows,
             BLOCKED        ? (i64)q
             : keeps_scales ? strip * to.columns + first_column
                            : -1,
             some_rows, to.scales);
}
