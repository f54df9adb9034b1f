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
#define SPREAD 60  // powers of two between the row scales of a tile that floats hold with room to spare
#define ACROSS 4   // tiles of a strip that a block makes, one after the other
#define GROUP 16   // tiles of rows that are worked on at a time

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

// Exponent of a row's scale; `word` is a float32, or (mx) four E8M0 codes of which `part` is meant. A row
// that is not there has the word 0: scale 0 (mx: 2^-127, and codes of zero).
__device__ __forceinline__ int exponent_of(u32 word, int part, int mx) {
  if (mx) {
    const int code = word >> (8 * part) & 0xffu;
    return code == 255 ? NAN_SCALE : code - 127;
  }
  if (word == 0u) return ZERO_SCALE;
  return word < 0x800000u ? ilogbf(__uint_as_float(word)) : (int)(word >> 23 & 0xffu) - 127;
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
// Launch: blocks of 256 threads, one for ACROSS tiles of a strip, in an order that keeps what is read and
//   what is written at a time together; 3 * TILE * TILE bytes of shared memory. The next tile's codes and
//   scales travel to shared memory while this one is made. tile.cuh says who has what.
// How: first pass, each value times scale * 2^-E, E the tile's largest row exponent, exact in float32 as
//   long as the exponents lie within SPREAD; the largest of a column gives its target. Second pass, the same
//   times 2^(E - target), rounded once by the conversion. Tiles with a larger spread take the exponents one
//   by one.
extern "C" __global__ void __launch_bounds__(256, __CUDA_ARCH__ < 900 ? 3 : 4)
    scaling_aware_transpose(const u8* codes, const void* scales, const int* source, const int* offsets,
                            i64 experts, i64 rows, i64 columns, i64 strips, i64 tile, u8* out,
                            void* out_scales) {
  DYNAMIC_SHARED(shared);  // the tile that goes out | the one at hand | the next
  u8* stage = shared;
  u8(*in)[TILE * TILE] = (u8(*)[TILE * TILE])(shared + TILE * TILE);
  __shared__ u32 in_scales[2][TILE];
  __shared__ __align__(16) short largest[CHUNKS][TILE];
  __shared__ __align__(16) float factors[CHUNKS][MX ? 4 : 1][CHUNK_ROWS];
  __shared__ int first_row[4], row_count[4], sums[8], from[TILE];
  const int fmt = FMT, mx = MX, t = threadIdx.x, lane = t % 32, warp = t / 32;
  const int height = mx ? 32 : TILE, per_tile = mx ? 4 : 1, part = mx ? lane / 8 : 0;
  // GROUP tiles of rows, then the next tiles of columns: what is read, or written, at a time lies together
  const int across_all = (int)((columns + ACROSS * TILE - 1) / (ACROSS * TILE));
  const int down_all = gridDim.x / across_all, group = blockIdx.x / (GROUP * across_all);
  const int in_group = down_all - group * GROUP < GROUP ? down_all - group * GROUP : GROUP;
  const int rest = blockIdx.x - group * GROUP * across_all;
  const int tile_row = group * GROUP + rest % in_group, tile_column = rest / in_group;
  const i64 row_bytes = (columns + TILE - 1) / TILE * 4;  // of the scales: a word a tile
  find_strips(offsets, (int)experts, rows, height, tile_row * per_tile, per_tile, first_row, row_count, sums);
  if (t < TILE) {
    const int q = t / height, i = t % height;
    from[t] = i < row_count[q] ? (source ? source[first_row[q] + i] : first_row[q] + i) : -1;
  }
  __syncthreads();
  const int first_tile = tile_column * ACROSS;
  const int tiles = (int)((columns + TILE - 1) / TILE) - first_tile;
  const int end = tiles < ACROSS ? tiles : ACROSS;
  auto fetch = [&](int across) {
    const i64 column = (i64)(first_tile + across) * TILE + t % 8 * 16;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int r = t / 8 + 32 * k, row = from[r];
      const bool there = row >= 0 && column < columns;
      copy_async16(in[across & 1] + r * TILE + t % 8 * 16, codes + (there ? row * columns + column : 0),
                   there);
    }
    if (t < TILE) {
      const bool there = from[t] >= 0;
      copy_async4(in_scales[across & 1] + t,
                  (const u8*)scales + (there ? from[t] * row_bytes + (first_tile + across) * 4ll : 0), there);
    }
    copy_async_commit();
  };
  fetch(0);
#pragma unroll 1
  for (int across = 0; across < end; ++across) {
    if (across + 1 < end) {
      fetch(across + 1);
      copy_async_wait<1>();
    } else {
      copy_async_wait<0>();
    }
    __syncthreads();  // this tile is here, and the one before it has been written
    const u32* words = (const u32*)in[across & 1] + warp * CHUNK_ROWS * (TILE / 4) + lane;
    const u32* row_words = in_scales[across & 1];
    const i64 first_column = (i64)(first_tile + across) * TILE, column = first_column + 4 * lane;
    int low = NAN_SCALE, high = ZERO_SCALE;  // every warp looks at all rows' exponents: no barrier
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const u32 word = row_words[lane + 32 * k];
      for (int p = 0; p < (mx ? 4 : 1); ++p) {
        const int e = exponent_of(word, p, mx);
        if (e == ZERO_SCALE || e == NAN_SCALE || (mx && from[lane + 32 * k] < 0)) continue;
        low = min(low, e);
        high = max(high, e);
      }
    }
    low = __reduce_min_sync(0xffffffffu, low);
    high = __reduce_max_sync(0xffffffffu, high);
    if (high == ZERO_SCALE) low = high = 0;
    const bool quick = high - low <= SPREAD && !tile;
    if (quick) {
      // a factor in two steps: 2^-high may be no normal float
      const int half = -high / 2;
      const float down = power_of_two(half), again = power_of_two(-high - half);
      for (int k = lane; k < (MX ? 4 : 1) * CHUNK_ROWS; k += 32) {
        const int row = k % CHUNK_ROWS, p = k / CHUNK_ROWS;
        const u32 word = row_words[warp * CHUNK_ROWS + row];
        const int e = exponent_of(word, p, mx);
        const float moved = e == NAN_SCALE ? __uint_as_float(0x7fc00000u) : power_of_two(max(e - high, -126));
        factors[warp][p][row] = mx ? moved : __uint_as_float(word) * down * again;
      }
      __syncwarp();
    }
    const float4* my_factors = (const float4*)factors[warp][part];
    int target[4];
    if (quick) {
      float top[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float4 four = my_factors[k];
        const float factor[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float v[4];
          decode4(words[(4 * k + i) * (TILE / 4)], fmt, v);
#pragma unroll
          for (int c = 0; c < 4; ++c) top[c] = larger_or_nan(top[c], fabsf(v[c] * factor[i]));
        }
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int needed = needed_exponent(top[c], fmt, mx);
        target[c] = needed == NO_TARGET || needed == NAN_TARGET ? needed : high + needed;
      }
    } else {
      for (int c = 0; c < 4; ++c) target[c] = NO_TARGET;
#pragma unroll 1
      for (int i = 0; i < CHUNK_ROWS; ++i) {
        const int e = exponent_of(row_words[warp * CHUNK_ROWS + i], part, mx);
        const u32 word = words[i * (TILE / 4)];
        if (tile) {
          // a row counts when any of its codes in this tile is not zero
          const u32 filled = __ballot_sync(0xffffffffu, (word & 0x7f7f7f7fu) != 0u);
          const bool occupied = mx ? (filled >> (8 * part) & 0xffu) != 0u : filled != 0u;
          if (occupied && e != ZERO_SCALE)
            for (int c = 0; c < 4; ++c) target[c] = max(target[c], e == NAN_SCALE ? NAN_TARGET : e);
        } else {
          float v[4];
          decode4(word, fmt, v);
          for (int c = 0; c < 4; ++c) {
            const int needed = needed_exponent(v[c], fmt, mx);
            if ((e == NAN_SCALE && from[warp * CHUNK_ROWS + i] >= 0) || needed == NAN_TARGET)
              target[c] = NAN_TARGET;
            else if (needed != NO_TARGET && e != ZERO_SCALE)
              target[c] = max(target[c], e + needed);
          }
        }
      }
    }
    *(short4*)&largest[warp][4 * lane] =
        make_short4((short)target[0], (short)target[1], (short)target[2], (short)target[3]);
    __syncthreads();
    const int first_chunk = mx ? warp / 2 * 2 : 0, chunks = mx ? 2 : CHUNKS;
    for (int j = first_chunk; j < first_chunk + chunks; ++j) {
      const short4 other = *(const short4*)&largest[j][4 * lane];
      target[0] = max(target[0], (int)other.x);
      target[1] = max(target[1], (int)other.y);
      target[2] = max(target[2], (int)other.z);
      target[3] = max(target[3], (int)other.w);
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) target[c] = final_target(target[c], mx);
    const i64 strip = (i64)tile_row * per_tile + (mx ? warp / 2 : 0);
    if (warp % (mx ? 2 : 8) == 0 && column < columns && strip < strips) {
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
        *(float4*)((float*)out_scales + strip * columns + column) = four;
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
      for (int i = 0; i < 4; ++i) decode4(words[(4 * k + i) * (TILE / 4)], fmt, v[i]);
      if (quick) {
        const float4 four = my_factors[k];
        const float factor[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
          for (int c = 0; c < 4; ++c) v[i][c] = v[i][c] * factor[i] * lift[c];
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int e = exponent_of(row_words[warp * CHUNK_ROWS + 4 * k + i], part, mx);
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
    const int q = mx ? lane % 8 / 2 : 0, inside = (mx ? lane % 2 : lane % 8) * CHUNK_ROWS;
    write_columns(stage, first_row[q] + inside, (int)clamped(row_count[q] - inside, CHUNK_ROWS), first_column,
                  columns, rows, out);
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
