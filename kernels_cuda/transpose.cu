// Scaling-aware transpose: codes move by whole powers of two; the rule is in fp8moe/reference/transpose.py.
//
// scaling_aware_transpose is the fast path, for columns in multiples of 16; scaling_aware_transpose_plain
// serves the rest, one thread a column.
#include "tile.cuh"

#define ZERO_SCALE -10000
#define NAN_SCALE 10000
#define NO_TARGET -20000
#define NAN_TARGET 20000
#define SPREAD 60  // powers of two between the row scales of a tile that floats hold with room to spare
#define ACROSS 4   // tiles of a strip that a block makes, one after the other

__device__ __forceinline__ int row_exponent(const void* scales, i64 at, int mx) {
  if (mx) {
    const int code = ((const u8*)scales)[at];
    return code == 255 ? NAN_SCALE : code - 127;
  }
  const u32 bits = __float_as_uint(((const float*)scales)[at]);
  if (bits == 0u) return ZERO_SCALE;
  return bits < 0x800000u ? ilogbf(__uint_as_float(bits)) : (int)(bits >> 23 & 0xffu) - 127;
}

// The smallest power of two that a block holding this value (at scale 1) would be given.
__device__ __forceinline__ int needed_exponent(float value, int fmt, int mx) {
  const u32 a = __float_as_uint(value) & 0x7fffffffu;
  if (a == 0u) return NO_TARGET;
  if (a >= 0x7f800000u) return NAN_TARGET;
  const int exponent = (int)(a >> 23) - 127 - (fmt == 0 ? 8 : 15);
  if (mx) return exponent;                          // floor(log2 v) - emax
  return exponent + ((a & 0x7fffffu) > 0x600000u);  // ceil(log2(v / max)), max = 1.75 * 2^emax
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

__device__ __forceinline__ float larger_or_nan(float a, float b) {
  float c;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}

// What: the codes of q [rows, columns] with the powers of two of `scales`, as column-wise blocks: out
// [columns,
//   rows], out_scales [strips, columns]. With `source` [rows] row r is row source[r] of q, or zeros (-1).
// Shapes: columns a multiple of 16; blocks of 128, or 32 (mx).
// Bytes: every code read once and written once.
// Launch: blocks of 256 threads, grid (tiles of rows, tiles of columns / ACROSS): neighbours write
// neighbouring
//   segments of the same result rows. tile.cuh says who has what.
// How: first pass, each value times 2^(e - E), E the tile's largest row exponent, exact in float32 as long as
//   the exponents lie within SPREAD; the largest of a column gives its target. Second pass, the same times
//   2^(E - target), rounded once by the conversion. Tiles with a larger spread take the exponents one by one.
extern "C" __global__ void __launch_bounds__(256, 3)
    scaling_aware_transpose(const u8* codes, const void* scales, const int* source, const int* offsets,
                            i64 experts, i64 rows, i64 columns, i64 strips, i64 fmt_, i64 mx_, i64 tile,
                            u8* out, void* out_scales) {
  __shared__ __align__(16) u8 stage[TILE * TILE];
  __shared__ __align__(16) int largest[CHUNKS][TILE];
  __shared__ float
      exponents[4 * TILE];  // of each row (and each quarter of the tile's columns): as int, then 2^
  __shared__ int first_row[4], row_count[4], sums[8], range[2][8], from[TILE];
  const int fmt = (int)fmt_, mx = (int)mx_, t = threadIdx.x, lane = t % 32, warp = t / 32;
  const int height = mx ? 32 : TILE, per_tile = mx ? 4 : 1, parts = mx ? 4 : 1;
  const i64 blocks = (columns + (mx ? 31 : TILE - 1)) / (mx ? 32 : TILE);
  find_strips(offsets, (int)experts, rows, height, blockIdx.x * per_tile, per_tile, first_row, row_count,
              sums);
  Geometry g;
#pragma unroll
  for (int j = 0; j < CHUNKS; ++j) {
    const int q = mx ? j / 2 : 0, inside = mx ? j % 2 * CHUNK_ROWS : j * CHUNK_ROWS;
    g.base[j] = first_row[q] + inside;
    g.count[j] = (int)clamped(row_count[q] - inside, CHUNK_ROWS);
  }
  if (t < TILE) {
    const int j = t / CHUNK_ROWS, i = t % CHUNK_ROWS;
    from[t] = i < g.count[j] ? (source ? source[g.base[j] + i] : g.base[j] + i) : -1;
  }
  __syncthreads();

  for (int across = 0; across < ACROSS; ++across) {
    const i64 first_column = ((i64)blockIdx.y * ACROSS + across) * TILE;
    if (first_column >= columns) break;
    const i64 column = first_column + 4 * lane;
    u32 word[CHUNK_ROWS];
#pragma unroll
    for (int i = 0; i < CHUNK_ROWS; ++i) {
      const int row = from[warp * CHUNK_ROWS + i];
      word[i] = row >= 0 && column < columns ? __ldg((const u32*)(codes + (i64)row * columns + column)) : 0u;
    }
    // exponents of the rows: thread t has row t / 2 (mx: and two of its four parts)
    int low = NAN_SCALE, high = ZERO_SCALE;
    for (int k = t; k < TILE * parts; k += 256) {
      const int row = from[k / parts];
      const i64 block = mx ? first_column / 32 + k % 4 : first_column / TILE;
      const int e =
          row >= 0 && block < blocks ? row_exponent(scales, (i64)row * blocks + block, mx) : ZERO_SCALE;
      ((int*)exponents)[k] = e;
      if (e != ZERO_SCALE && e != NAN_SCALE) {
        low = min(low, e);
        high = max(high, e);
      }
    }
    low = __reduce_min_sync(0xffffffffu, low);
    high = __reduce_max_sync(0xffffffffu, high);
    if (lane == 0) {
      range[0][warp] = low;
      range[1][warp] = high;
    }
    __syncthreads();
#pragma unroll
    for (int w = 0; w < 8; ++w) {
      low = min(low, range[0][w]);
      high = max(high, range[1][w]);
    }
    if (high == ZERO_SCALE) high = 0;
    const bool quick = high - low <= SPREAD && !tile;
    const int part = mx ? lane / 8 : 0;
    int target[4];
    if (quick) {
      for (int k = t; k < TILE * parts; k += 256) {
        const int e = ((int*)exponents)[k];
        exponents[k] = e == ZERO_SCALE  ? 0.f
                       : e == NAN_SCALE ? __uint_as_float(0x7fc00000u)
                                        : power_of_two(e - high);
      }
      __syncthreads();
      float top[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int i = 0; i < CHUNK_ROWS; ++i) {
        const float factor = exponents[(warp * CHUNK_ROWS + i) * parts + part];
        float v[4];
        decode4(word[i], fmt, v);
#pragma unroll
        for (int c = 0; c < 4; ++c) top[c] = larger_or_nan(top[c], fabsf(v[c] * factor));
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int needed = needed_exponent(top[c], fmt, mx);
        target[c] = needed == NO_TARGET || needed == NAN_TARGET ? needed : high + needed;
      }
    } else {
#pragma unroll
      for (int c = 0; c < 4; ++c) target[c] = NO_TARGET;
#pragma unroll 1
      for (int i = 0; i < CHUNK_ROWS; ++i) {
        const int e = ((int*)exponents)[(warp * CHUNK_ROWS + i) * parts + part];
        u32 codes_of_row = 0;
#pragma unroll
        for (int k = 0; k < CHUNK_ROWS; ++k)
          if (k == i) codes_of_row = word[k];
        if (tile) {
          // a row counts when any of its codes in this tile is not zero
          const u32 filled = __ballot_sync(0xffffffffu, (codes_of_row & 0x7f7f7f7fu) != 0u);
          const bool occupied = mx ? (filled >> (8 * part) & 0xffu) != 0u : filled != 0u;
          if (occupied && e != ZERO_SCALE)
            for (int c = 0; c < 4; ++c) target[c] = max(target[c], e == NAN_SCALE ? NAN_TARGET : e);
        } else {
          float v[4];
          decode4(codes_of_row, fmt, v);
          for (int c = 0; c < 4; ++c) {
            const int needed = needed_exponent(v[c], fmt, mx);
            if (e == NAN_SCALE || needed == NAN_TARGET)
              target[c] = NAN_TARGET;
            else if (needed != NO_TARGET && e != ZERO_SCALE)
              target[c] = max(target[c], e + needed);
          }
        }
      }
    }
    *(int4*)&largest[warp][4 * lane] = make_int4(target[0], target[1], target[2], target[3]);
    __syncthreads();
    const int first_chunk = mx ? warp / 2 * 2 : 0, chunks = mx ? 2 : CHUNKS;
    for (int j = first_chunk; j < first_chunk + chunks; ++j) {
      const int4 other = *(const int4*)&largest[j][4 * lane];
      target[0] = max(target[0], other.x);
      target[1] = max(target[1], other.y);
      target[2] = max(target[2], other.z);
      target[3] = max(target[3], other.w);
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) target[c] = final_target(target[c], mx);
    const i64 strip = (i64)blockIdx.x * per_tile + warp / 2;  // of the warp that writes its scales
    if (warp % (mx ? 2 : 8) == 0 && column < columns && (mx ? strip : (i64)blockIdx.x) < strips) {
      const bool there = row_count[mx ? warp / 2 : 0] > 0;
      if (mx) {
        u32 four = 0;
        for (int c = 0; c < 4; ++c) four |= there ? (u32)(target[c] + 127) << (8 * c) : 0u;
        *(u32*)((u8*)out_scales + strip * columns + column) = four;
      } else {
        float4 four = make_float4(0.f, 0.f, 0.f, 0.f);
        if (there)
          four = make_float4(power_of_two(target[0]), power_of_two(target[1]), power_of_two(target[2]),
                             power_of_two(target[3]));
        *(float4*)((float*)out_scales + (i64)blockIdx.x * columns + column) = four;
      }
    }
    float lift[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) lift[c] = power_of_two(min(max(high - target[c], -126), 127));
    u32 packed_rows[4][4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      float v[4][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = (warp * CHUNK_ROWS + 4 * k + i) * parts + part;
        decode4(word[4 * k + i], fmt, v[i]);
        if (quick) {
          const float factor = exponents[at];
#pragma unroll
          for (int c = 0; c < 4; ++c) v[i][c] = v[i][c] * factor * lift[c];
        } else {
          const int e = ((int*)exponents)[at];
#pragma unroll
          for (int c = 0; c < 4; ++c) v[i][c] = moved_value(v[i][c], e, target[c]);
        }
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) packed_rows[c][k] = encode4(v[0][c], v[1][c], v[2][c], v[3][c], fmt);
    }
#pragma unroll
    for (int c = 0; c < 4; ++c)
      stage_column(stage, 4 * lane + c, warp,
                   make_uint4(packed_rows[c][0], packed_rows[c][1], packed_rows[c][2], packed_rows[c][3]));
    __syncthreads();
    write_columns(stage, g, first_column, columns, rows, out);
    __syncthreads();
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
      e = row_exponent(scales, from * blocks + c / width, (int)mx);
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
  if (target == ZERO_SCALE || target == NAN_SCALE || any_nan) target = 0;
  target = max(target, mx ? -127 : -126);
  if (!inside) return;
  for (i64 r = lo; r < hi; ++r) {
    const i64 from = source ? source[r] : r;
    float value = 0.f;
    if (from >= 0) {
      const int e = row_exponent(scales, from * blocks + c / width, (int)mx);
      value = decode(codes[from * columns + c], (int)fmt);
      if (e == NAN_SCALE)
        value = __uint_as_float(0x7fc00000u);
      else if (e == ZERO_SCALE)
        value *= 0.f;
      else  // past 40 powers of two nothing is left, or everything saturates
        value *= __uint_as_float((u32)(127 + min(max(e - target, -40), 40)) << 23);
    }
    out[c * rows + r] = encode(value, (int)fmt);
  }
  const i64 at = strip * columns + c;
  if (mx)
    ((u8*)out_scales)[at] = hi > lo ? (u8)(target + 127) : 0;
  else
    ((float*)out_scales)[at] = hi > lo ? __uint_as_float((u32)(target + 127) << 23) : 0.f;
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
