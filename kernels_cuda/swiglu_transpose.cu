// SwiGLU or its backward, quantised row-wise, together with the scaling-aware transpose of these codes, by
// tiles of 128 x 128. The transposed codes equal what transpose.cu computes from the row-wise ones, without
// reading them. For 16-bit and float32 input, blocks of 128, rows and width multiples of 128.
#ifndef KIND
#define KIND BF16  // input
#define FMT 0      // output: e4m3
#define MX 0
#define BARE 1  // alpha 1, no clamp, no offset
#endif
#ifndef SUMS
#define SUMS 0  // 1: the backward also sums the columns of each tile of dh, before quantisation
#endif
#ifndef CODED
#define CODED 0  // 1: the backward's h is e4m3 codes with scales of blocks of 128
#endif
#define TILE_TARGET 1  // one scale per tile
#include "swiglu.cuh"
#include "transpose_tile.cuh"

#define BLOCK_THREADS 256
#define STEPS 4  // a warp computes sixteen rows in steps of four, eight lanes per row
#define ALL_LANES 0xffffffffu
#define BYTES (KIND == F32 ? 32 : 16)  // of eight values
// Values up to this, half of the smallest subnormal, are encoded as zero.
#define ENCODED_AS_ZERO (FMT == 0 ? 0x1p-10f : 0x1p-17f)

// A tile of row-wise codes.
struct Made : Scaled {
  float scales[TILE];  // 0 for a row whose codes are all zeros
};

// The thread block's number, counted from the last one. A layer's GEMM writes h, and in the backward its
// gradient, from the first row to the last, and more than L2 holds: the last rows are still there, and the
// codes of the first rows are when the next GEMM begins with them. Within a step of 16,384 tokens, 2048 x
// 768, 128 experts: 161.7 to 158.1 us, backward 281.0 to 277.6. (The row-wise kernels took 0.9 and 0.6 us
// longer.)
__device__ __forceinline__ u32 block_from_last() { return gridDim.x - 1 - blockIdx.x; }

// A thread block's tile (backward: the same tile of each half), and a lane's part of it: rows `row` to `row`
// + 3 of the matrix, which are rows `inside` to `inside` + 3 of the tile, one in each step, and vectors j and
// j + 8 of the tile's sixteen. The two rows of a half-warp are 32 apart, so that their codes are in different
// banks. What the steps need is kept in registers: the compiler would recompute it in each of them (102
// instructions beside those of the values became 64).
struct Share {
  u32 across, tile_row, column, j, inside, row;
  __device__ __forceinline__ Share(u32 width)
      : across(width / TILE),
        tile_row(block_from_last() / across),
        column(block_from_last() - tile_row * across),
        j((u32)kept(threadIdx.x % 8)),
        inside(threadIdx.x / 8 % 2 * 32 + threadIdx.x / 16 % 8 * STEPS + threadIdx.x / 128 * 64),
        row(tile_row * TILE + inside) {}
  // Offset of the codes of vector j in `Made`; the next row's are TILE bytes after them. Those of vector j +
  // 8 differ in the bit of 64.
  __device__ __forceinline__ u32 codes_at() const { return place_of(inside, j / 2) + j % 2 * 8; }
  // Address of vector j of the tile in the lane's first row. pitch: bytes per row; bytes: of a vector.
  __device__ __forceinline__ const u8* values_of(const void* x, u32 pitch, u32 bytes = BYTES) const {
    return kept((const u8*)x + (u64)row * pitch + (column * 16 + j) * bytes);
  }
};

// The results of both kernels; blocks: scale blocks per row. Without row_codes or without codes the others
// alone are written.
struct Written {
  u32 rows, blocks;
  u8* row_codes;
  float* row_scales;
  u8* codes;
  float* scales;
  __device__ __forceinline__ u8* row(u32 row, u32 block) const {
    return row_codes + (u64)row * (blocks * TILE) + block * TILE;
  }
  __device__ __forceinline__ float* row_scale(u32 row, u32 block) const {
    return row_scales + (u64)row * blocks + block;
  }
  __device__ __forceinline__ float* scale(u32 tile_row, u32 block) const {
    return scales + (u64)block * (rows / TILE) + tile_row;
  }
};

// The probabilities of a lane's rows: lane j of eight reads that of step j % 4.
__device__ __forceinline__ float load_probs(const void* probs, i64 kind, const Share& own) {
  return probs ? load(probs, own.row + own.j % STEPS, (int)kind) : 1.f;
}
// The scales of a lane's rows of h: lanes 0 to 3 of eight read those of a, the others those of b.
__device__ __forceinline__ float load_scales(const float* scales, const Share& own) {
  const u32 half = HALVES == 2 ? own.j / STEPS : 0;
  return scales[(u64)(own.row + own.j % STEPS) * (HALVES * own.across) + half * own.across + own.column];
}
// What lane `step` of eight has read.
__device__ __forceinline__ float prob_of_step(float of_lanes, u32 step) {
  return __shfl_sync(ALL_LANES, of_lanes, step, 8);
}

// A lane's vectors of h in the backward.
template <bool>
struct ValuesOf {
  typedef Eight<KIND> Type;
  static __device__ __forceinline__ Type load(const u8* p, i64 vector, float) {
    return load_eight<KIND>(p, vector);
  }
};
template <>
struct ValuesOf<true> {
  typedef Coded Type;
  static __device__ __forceinline__ Type load(const u8* p, i64 vector, float scale) {
    return {((const uint2*)p)[vector], scale};
  }
};
typedef ValuesOf<CODED> OfH;

// Whether any lane has a value outside of quick_sigmoid's range, where it is tested by pairs.
template <class Values>
__device__ __forceinline__ bool far_anywhere(const Values&) {
  return false;
}
__device__ __forceinline__ bool far_anywhere(const Eight<KIND> (&a)[2]) {
  return BY_PAIRS<KIND> && __any_sync(ALL_LANES, any_far<KIND>(a[0], a[1]));
}

// As largest_of, of sixteen values, in 15 instructions.
__device__ __forceinline__ u32 largest_of_sixteen(const float* x) {
  float tops[2] = {larger_or_nan(fabsf(x[0]), fabsf(x[1])), larger_or_nan(fabsf(x[8]), fabsf(x[9]))};
#pragma unroll
  for (int i = 2; i < 8; ++i) {
    tops[0] = larger_or_nan(tops[0], fabsf(x[i]));
    tops[1] = larger_or_nan(tops[1], fabsf(x[8 + i]));
  }
  return __float_as_uint(larger_or_nan(tops[0], tops[1]));
}

// Bits of the smallest power of two that is not below amax / 448 or amax / 57344, and normal: as block_scale,
// in 7 instructions instead of 13 (in block_scale itself, quantize_messages would spill on sm_120a).
__device__ __forceinline__ u32 scale_of(float amax) {
  const u32 bits = __float_as_uint(amax);  // of a magnitude
  if (bits == 0u || bits >= 0x7f800000u) return 127u << 23;
  return (u32)max((int)((bits + ABOVE_LIMIT) & 0x7f800000u) - (EMAX << 23), 1 << 23);
}

// Quantises a row's values x times `by` in BLOCKS scale blocks, called by all lanes of a warp: x holds a
// lane's vectors j and j + 8 of each block. to: see Share::codes_at. Returns the scale of a block (with two
// blocks: of the first in lanes 0 to 3 of eight, and of the second in the others), negative if all of its
// codes are zeros.
//
// With two blocks, lanes 0 to 3 of eight reduce the first one's maximum and compute its scale, the others
// the second one's: 27 instructions per step instead of 46.
template <u32 BLOCKS>
__device__ __forceinline__ float make_blocks(float (*x)[16], float by, u32 j, At to) {
  const bool second = BLOCKS == 2 && j >= 4;
  u32 tops[BLOCKS];
#pragma unroll
  for (u32 n = 0; n < BLOCKS; ++n) tops[n] = largest_of_sixteen(x[n]);
  u32 top = second ? tops[BLOCKS - 1] : tops[0];
  top = max(top, __shfl_xor_sync(ALL_LANES, second ? tops[0] : tops[BLOCKS - 1], 4));
  top = max(top, __shfl_xor_sync(ALL_LANES, top, 2));
  top = max(top, __shfl_xor_sync(ALL_LANES, top, 1));
  // values of the two blocks from that of a lane's own
  auto of_blocks = [&](float own, float (&all)[BLOCKS]) {
    const float other = BLOCKS == 2 ? __shfl_xor_sync(ALL_LANES, own, 4) : own;
    all[0] = second ? other : own;
    all[BLOCKS - 1] = second ? own : other;
  };
  // as in encode_products: amax of the products is the product of amax, and (x * by) * factor equals
  // x * (by * factor) unless by * factor is not a normal float
  const float product = __uint_as_float(top) * fabsf(by);
  const u32 scale_bits = scale_of(product);
  const float scale = __uint_as_float(scale_bits), factor = __uint_as_float((254u << 23) - scale_bits);
  float factors[BLOCKS];
  float both = factor * by, largest = __uint_as_float(top) * fabsf(both);
  const bool normal = fabsf(both) >= 0x1p-126f && fabsf(both) <= 0x1p127f;
  if (__any_sync(ALL_LANES, !normal)) {
    float first[BLOCKS];
    of_blocks(normal ? 1.f : by, first);
#pragma unroll
    for (u32 n = 0; n < BLOCKS; ++n)
#pragma unroll
      for (int i = 0; i < 16; ++i) x[n][i] *= first[n];
    if (!normal) both = factor, largest = product * factor;
  }
  of_blocks(both, factors);
  const At far = to ^ 64;
  store_words_at<0>(to, encode_eight(x[0], factors[0], FMT));
  store_words_at<0>(far, encode_eight(x[0] + 8, factors[0], FMT));
  if (BLOCKS == 2) {
    store_words_at<sizeof(Made)>(to, encode_eight(x[1], factors[1], FMT));
    store_words_at<sizeof(Made)>(far, encode_eight(x[1] + 8, factors[1], FMT));
  }
  return largest <= ENCODED_AS_ZERO ? -scale : scale;
}

// Stores the scales that make_blocks returned, of which lane j of eight kept that of step j % 4.
template <u32 BLOCKS>
__device__ __forceinline__ void store_scales(float scale, const Share& own, const Written& to, Made* made) {
  if (own.j >= STEPS * BLOCKS) return;
  const u32 block = own.j / STEPS, step = own.j % STEPS;
  if (to.row_codes) *to.row_scale(own.row + step, own.column + block * own.across) = fabsf(scale);
  made[block].scales[own.inside + step] = fmaxf(scale, 0.f);
}

// Zeros for a tile of rows past the last offset, which no expert owns.
template <u32 BLOCKS>
__device__ __forceinline__ void write_no_rows(const Share& own, const Written& to) {
  const u32 first = own.tile_row * TILE;
#pragma unroll 1
  for (u32 n = 0; n < BLOCKS; ++n) {
    const u32 block = own.column + n * own.across;
#pragma unroll 1
    for (u32 i = threadIdx.x; to.row_codes && i < TILE * TILE / 16; i += BLOCK_THREADS)
      ((uint4*)to.row(first + i / 8, block))[i % 8] = make_uint4(0, 0, 0, 0);
    if (to.row_codes && threadIdx.x < TILE) *to.row_scale(first + threadIdx.x, block) = 1.f;
    if (to.codes && threadIdx.x == 0) *to.scale(own.tile_row, block) = 0.f;
  }
}

// Writes a tile row-wise, in whole cache lines: half lines, stored by the lanes that computed them, take 1 %
// longer.
__device__ __forceinline__ void write_rows(const Made& made, const Share& own, u32 block, const Written& to) {
  const u32 r = threadIdx.x / 8, piece = threadIdx.x % 8;
  u8* out = to.row(own.tile_row * TILE + r, block) + piece * 16;
#pragma unroll
  for (u32 i = 0; i < TILE; i += BLOCK_THREADS / 8)
    __stcs((uint4*)(out + (u64)i * (to.blocks * TILE)), *(const uint4*)(made.codes + place_of(r + i, piece)));
}

// Of a normal power of two; 0 has the next smaller one.
__device__ __forceinline__ int exponent_of_power(float x) { return (int)(__float_as_uint(x) >> 23) - 127; }

// The largest scale of a tile's rows with non-zero codes, or 1.
__device__ __forceinline__ float largest_scale(const Made& made) {
  const uint4 v = ((const uint4*)made.scales)[threadIdx.x % 32];
  const u32 top = __reduce_max_sync(ALL_LANES, max(max(v.x, v.y), max(v.z, v.w)));
  return top == 0 ? 1.f : __uint_as_float(top);
}

// Writes the codes of BLOCKS tiles row-wise and, unless no expert owns their rows, transposed; called by the
// whole thread block.
template <u32 BLOCKS>
__device__ __forceinline__ void write_tiles(Made* made, const Share& own, bool owned, const Written& to) {
#pragma unroll
  for (u32 n = 0; to.row_codes && n < BLOCKS; ++n) write_rows(made[n], own, own.column + n * own.across, to);
  if (!to.codes) return;
  const u32 row = threadIdx.x % TILE;
#pragma unroll
  for (u32 n = 0; n < BLOCKS; ++n) {
    const float scale = largest_scale(made[n]);
    if (threadIdx.x == 0) *to.scale(own.tile_row, own.column + n * own.across) = owned ? scale : 0.f;
    if (threadIdx.x / TILE == n)
      made[n].set_factors(row, exponent_of_power(made[n].scales[row]), exponent_of_power(scale));
  }
  if (!owned) return;
  __syncthreads();
  const Lane lane(threadIdx.x / 32);
#pragma unroll
  for (u32 n = 0; n < BLOCKS; ++n) {
    const u32 column = (own.column + n * own.across) * TILE + lane.column;
    u8* const out = to.codes + (u64)column * to.rows + own.tile_row * TILE + lane.first_row;
    write_columns(made[n], lane, 0, TILE, true, out, to.rows);
  }
}

// sums [BLOCKS * across * TILE]: sums over a tile's rows, in a fixed order. x: of a lane's rows and columns.
template <u32 BLOCKS>
__device__ __forceinline__ void write_sums(float (*x)[16], const Share& own, float* sums) {
  __shared__ float of_warps[BLOCK_THREADS / 32][BLOCKS][TILE];
#pragma unroll
  for (u32 n = 0; n < BLOCKS; ++n)
#pragma unroll
    for (u32 i = 0; i < 16; ++i) {
      x[n][i] += __shfl_xor_sync(ALL_LANES, x[n][i], 8);
      x[n][i] += __shfl_xor_sync(ALL_LANES, x[n][i], 16);
      if (threadIdx.x % 32 < 8) of_warps[threadIdx.x / 32][n][i / 8 * 64 + own.j * 8 + i % 8] = x[n][i];
    }
  __syncthreads();
  const u32 n = threadIdx.x / TILE, column = threadIdx.x % TILE;
  if (n >= BLOCKS) return;
  float sum = 0.f;
#pragma unroll
  for (u32 warp = 0; warp < BLOCK_THREADS / 32; ++warp) sum += of_warps[warp][n][column];
  sums[(own.column + n * own.across) * TILE + column] = sum;
}

// y [rows, width] of h [rows, HALVES width], quantised by (1, 128): row_codes [rows, width], row_scales
// [rows, width / 128]; and transposed: codes [width, rows], scales [width / 128, rows / 128]. From the last
// of `offsets` on, row-wise results are zeros and the transposed codes are not written.
// Requires: offsets are multiples of 128.
// Traffic: h is read once, both codes are written once.
// Launch: one thread block of 256 per tile, in row-major order of tiles from the last one on.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, KIND == F32           ? 3
                                                            : BARE && ACT == SILU ? 5
                                                                                  : 4)
    swiglu_quantize_transpose(const void* h, const void* probs, i64 probs_kind, const int* offsets,
                              i64 experts, float clamp, float alpha, float offset, i64 rows, i64 width,
                              u8* row_codes, float* row_scales, u8* codes, float* scales) {
  pdl_wait();
  __shared__ Made made[1];
  const Activation act = {clamp, alpha, offset};
  const Share own((u32)width);
  const Written to = {(u32)rows, own.across, row_codes, row_scales, codes, scales};
  const int first = (int)(own.tile_row * TILE);
  const float probs_of_lanes = load_probs(probs, probs_kind, own);
  const u32 pitch = HALVES * (u32)width / 8 * BYTES;
  const u8* a_at = own.values_of(h, pitch);
  const At codes_at = kept(at_of(made[0].codes) + own.codes_at());
  float own_scale = 0.f;
  if (offsets && first >= offsets[experts]) {
    write_no_rows<1>(own, to);
    return;
  }
#pragma unroll 1
  for (u32 step = 0; step < STEPS; ++step) {
    Eight<KIND> a[2], b[2];
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      a[u] = load_eight<KIND>(a_at + (u64)step * pitch, 8 * u);
      if (HALVES == 2) b[u] = load_eight<KIND>(a_at + (u64)step * pitch + pitch / 2, 8 * u);
    }
    const float prob = prob_of_step(probs_of_lanes, step);
    const bool far = far_anywhere(a);
    float y[1][16];
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      Gates g;
      floats<KIND>(a[u], g.a);
      if (HALVES == 2) floats<KIND>(b[u], g.b);
      gates<BY_PAIRS<KIND>>(g, act, far);
#pragma unroll
      for (int i = 0; i < 8; ++i) y[0][8 * u + i] = g.a[i] * g.s[i] * g.b[i];
    }
    const float scale = make_blocks<1>(y, prob, own.j, codes_at + step * TILE);
    if (own.j % STEPS == step) own_scale = scale;
  }
  store_scales<1>(own_scale, own, to, made);
  const bool owned = !offsets || first >= offsets[0];  // by an expert
  pdl_launch_dependents();
  __syncthreads();
  write_tiles<1>(made, own, owned, to);
}

// Blocks per multiprocessor: as many as leave enough registers. With three, these spilled 8 to 40 bytes.
#define SPILLS_WITH_THREE \
  (GATED &&               \
   (ACT == GELU_TANH || KIND == F16 || (CODED ? !BARE || ACT == GELU : !BARE && __CUDA_ARCH__ != 900)))
#define BACKWARD_BLOCKS \
  (KIND == F32 || SUMS || SPILLS_WITH_THREE ? 2 : !GATED && KIND == BF16 && BARE && ACT == SILU ? 4 : 3)

// The same for dh [rows, HALVES width], one tile of each half per thread block; partial [width / 128, rows]
// float64: each tile's contribution to dprobs, or null; with SUMS, sums [rows / 128, HALVES width] of the
// float32 values of each tile's rows, unless no expert owns them; with CODED, h is codes with h_scales [rows,
// HALVES width / 128]. Traffic: grad and h are read once, both
// codes are written once, plus 8 bytes per row and tile. y_codes [width, rows], y_scales [width / 128, rows /
// 128], or null: the transposed codes that the forward's y would have, of the same read of h; with them codes
// and scales may be null.
// Shared memory: `Made` for each tile of codes, of dh and then of y.
// Design: within a training step the clock is a quarter lower, and these kernels are limited by instructions:
//   34 per value of grad (forward: 21), of which 21 compute and encode it; 50 (31) before steps shared
//   addresses and probabilities and factors were ratios of scales; 35 (22) before these were computed once
//   per row of the tile. With 35 (22), 139,264 x 768 right after GEMMs: 344 to 305 us, forward 181 to 176;
//   with three resident thread blocks per SM instead of four 312. Alone: 317 to 303 and 177 to 174. The
//   row-wise kernel followed by the transpose took 358 where this one took 314.
// Method: the same float32 steps as backward_rows in swiglu.cu; only the order of the sum for dprobs differs.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, BACKWARD_BLOCKS)
    swiglu_quantize_backward_transpose(const void* grad, const void* h, const float* h_scales,
                                       const void* probs, i64 probs_kind, const int* offsets, i64 experts,
                                       float clamp, float alpha, float offset, i64 rows, i64 width,
                                       u8* row_codes, float* row_scales, u8* codes, float* scales,
                                       u8* y_codes, float* y_scales, double* partial, float* sums) {
  pdl_wait();
  DYNAMIC_SHARED(shared);
  Made* const made = (Made*)shared;
  const Activation act = {clamp, alpha, offset};
  const Share own((u32)width);
  const Written to = {(u32)rows, HALVES * own.across, row_codes, row_scales, codes, scales};
  const Written of_y = {(u32)rows, own.across, 0, 0, y_codes, y_scales};
  const int first = (int)(own.tile_row * TILE);
  const float probs_of_lanes = load_probs(probs, probs_kind, own);
  const u32 up_pitch = (u32)width / 8 * BYTES, half = CODED ? (u32)width : up_pitch, pitch = HALVES * half;
  const u8 *a_at = own.values_of(h, pitch, CODED ? 8 : BYTES), *b_at = kept(a_at + half);
  const float scales_of_lanes = CODED ? load_scales(h_scales, own) : 1.f;
  const u8* up_at = own.values_of(grad, up_pitch);
  const At codes_at = kept(at_of(made[0].codes) + own.codes_at());
  u32 own_scales = 0;  // powers of two: of dh in the upper half, of y in the lower one
  double own_sum = 0.0;
  float of_columns[HALVES][16] = {};
  if (offsets && first >= offsets[experts]) {
    write_no_rows<HALVES>(own, to);
    if (y_codes) write_no_rows<1>(own, of_y);
    if (partial && threadIdx.x < TILE) partial[own.column * rows + first + threadIdx.x] = 0.0;
    return;
  }
#pragma unroll 1
  for (u32 step = 0; step < STEPS; ++step) {
    OfH::Type a[2], b[2];
    Eight<KIND> up[2];
    const float of_a = CODED ? prob_of_step(scales_of_lanes, step) : 1.f;
    const float of_b = CODED ? prob_of_step(scales_of_lanes, step + STEPS) : 1.f;
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      a[u] = OfH::load(a_at + (u64)step * pitch, 8 * u, of_a);
      if (HALVES == 2) b[u] = OfH::load(b_at + (u64)step * pitch, 8 * u, of_b);
      up[u] = load_eight<KIND>(up_at + (u64)step * up_pitch, 8 * u);
    }
    const float prob = prob_of_step(probs_of_lanes, step);
    const bool far = far_anywhere(a);
    float d[2][16], y[1][16], parts[2];  // d: da, db
#pragma unroll
    for (int u = 0; u < 2; ++u)
      parts[u] = eight_gradients < BY_PAIRS<KIND> &&
                 !CODED > (a[u], b[u], up[u], act, d[0] + 8 * u, d[1] + 8 * u, far, y[0] + 8 * u);
    if (y_codes) {
      const float scale = make_blocks<1>(y, prob, own.j, codes_at + HALVES * sizeof(Made) + step * TILE);
      if (own.j % STEPS == step) own_scales = __float_as_uint(scale) >> 16;
    }
#pragma unroll
    for (u32 i = 0; SUMS && i < HALVES * 16; ++i)
      of_columns[i / 16][i % 16] = __fmaf_rn(d[i / 16][i % 16], prob, of_columns[i / 16][i % 16]);
    const float scale = make_blocks<HALVES>(d, prob, own.j, codes_at + step * TILE);
    if (own.j % STEPS == step) own_scales |= __float_as_uint(scale);
    double sum = (double)parts[0] + (double)parts[1];
#pragma unroll
    for (int apart = 4; apart > 0; apart /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, apart);
    if (own.j % STEPS == step) own_sum = sum;
  }
  store_scales<HALVES>(__uint_as_float(own_scales & 0xffff0000u), own, to, made);
  if (y_codes) store_scales<1>(__uint_as_float(own_scales << 16), own, of_y, made + HALVES);
  if (SUMS) write_sums<HALVES>(of_columns, own, sums + (u64)own.tile_row * (to.blocks * TILE));
  if (partial && own.j < STEPS) partial[own.column * rows + own.row + own.j] = own_sum;
  const bool owned = !offsets || first >= offsets[0];  // by an expert
  pdl_launch_dependents();
  __syncthreads();
  write_tiles<HALVES>(made, own, owned, to);
  if (y_codes) write_tiles<1>(made + HALVES, own, owned, of_y);
}

// dprobs [rows]: sums of the tiles' contributions, in tile order.
extern "C" __global__ void sum_tiles(const double* partial, i64 tiles, i64 rows, float* dprobs) {
  pdl_wait();
  const i64 row = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  double sum = 0.0;
  for (i64 tile = 0; tile < tiles; ++tile) sum += partial[tile * rows + row];
  dprobs[row] = (float)sum;
}
