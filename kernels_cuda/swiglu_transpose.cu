// SwiGLU or its backward, quantised row-wise, together with the scaling-aware transpose of these codes, by
// tiles of 128 x 128. The transposed codes equal what transpose.cu computes from the row-wise ones, without
// reading them. For 16-bit and float32 input, blocks of 128, rows and width multiples of 128.
#ifndef KIND
#define KIND BF16  // input
#define FMT 0      // output: e4m3
#define MX 0
#define BARE 1  // alpha 1, no clamp, no offset
#endif
#define TILE_TARGET 1  // one scale per tile
#include "swiglu.cuh"
#include "transpose_tile.cuh"

#define BLOCK_THREADS 256

// A tile of row-wise codes in the layout of transpose_piece, which addresses rows by exclusive or.
struct __align__(1024) Made {
  u8 codes[TILE * TILE];
  int exponents[TILE];
};

// Row of the tile that a lane computes in each of four steps; a warp computes sixteen rows. The rows of a
// half-warp are four apart, which limits bank conflicts of the codes to two-way.
__device__ __forceinline__ u32 row_of_step(u32 step) {
  const u32 lane = threadIdx.x % 32, quarter = lane / 8;
  return threadIdx.x / 32 * 16 + step / 2 * 8 + step % 2 * 2 + quarter / 2 + quarter % 2 * 4;
}

// Quantises a lane's sixteen values times `by` (vectors lane % 8 and lane % 8 + 8 of a block of 128) into the
// tile. Called by all lanes of the block; the first one stores the scale.
__device__ __forceinline__ void make_block(float* x, float* y, float by, u32 row, u32* scale_to, Made& made) {
  const Rule rule = {FMT, 1, 0, 0.f};
  const u32 j = threadIdx.x % 8;
  const u32 scale = encode_products(x, y, by, rule, [&](uint2 a, uint2 b) {
    u8* in = made.codes + row * TILE + j % 2 * 8;
    *(uint2*)(in + ((j / 2 ^ row % 8) * 16)) = a;
    *(uint2*)(in + ((4 + j / 2 ^ row % 8) * 16)) = b;
  });
  if (j != 0) return;
  *scale_to = scale;
  made.exponents[exponent_at(row)] = exponent_of(scale, 0, 0);
}

// Writes the codes of `halves` tiles at rows `row`, columns `column` and `column` + `across`; called by the
// whole thread block. Row-wise in whole cache lines (half lines, stored by the lanes that computed them, take
// 1 % longer), and transposed, one warp per piece of 16 columns.
__device__ __forceinline__ void write_tiles(const Made* made, u32 halves, u32 row, u32 column, u32 across,
                                            const int* offsets, i64 experts, u8* row_codes,
                                            const Results& to) {
  const i64 first = (i64)row * TILE;
#pragma unroll 1
  for (u32 half = 0; half < halves; ++half) {
    const u32 piece = threadIdx.x % 8;
    u8* out = row_codes + first * to.columns + (column + half * across) * TILE + piece * 16;
#pragma unroll
    for (u32 r = threadIdx.x / 8; r < TILE; r += BLOCK_THREADS / 8)
      __stcs((uint4*)(out + r * to.columns),
             *(const uint4*)(made[half].codes + r * TILE + ((piece ^ r % 8) * 16)));
  }
  if (offsets && (first < offsets[0] || first >= offsets[experts])) {  // row of no expert
    if (threadIdx.x < halves) ((float*)to.scales)[(column + threadIdx.x * across) * to.strips + row] = 0.f;
    return;
  }
  Tile tile;
  tile.base[0] = (int)first, tile.count[0] = TILE, tile.row = (int)row;
#pragma unroll 1
  for (u32 half = 0; half < halves; ++half) {
    Spread spread = NO_SPREAD;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) spread.add(made[half].exponents[threadIdx.x % 32 + 32 * i]);
    spread.of_warp();
    tile.column = (int)(column + half * across);
    transpose_piece(tile, threadIdx.x / 32, made[half].codes, made[half].exponents, spread, to);
  }
}

// y [rows, width] of h [rows, HALVES width], quantised by (1, 128): row_codes [rows, width], row_scales
// [rows, width / 128]; and transposed: codes [width, rows], scales [width / 128, rows / 128]. From the last
// of `offsets` on, row-wise results are zeros and the transposed codes are not written.
// Requires: offsets are multiples of 128.
// Traffic: h is read once, both codes are written once.
// Launch: one thread block of 256 per tile, in row-major order of tiles.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, KIND == F32             ? 3
                                                            : BARE && ACT == SWIGLU ? 5
                                                                                    : 4)
    swiglu_quantize_transpose(const void* h, const void* probs, i64 probs_kind, const int* offsets,
                              i64 experts, float clamp, float alpha, float offset, i64 rows, i64 width,
                              u8* row_codes, u32* row_scales, u8* codes, float* scales) {
  pdl_wait();
  __shared__ Made made[1];
  const Activation act = {clamp, alpha, offset};
  const u32 across = (u32)width / TILE, tile_row = blockIdx.x / across,
            column = blockIdx.x - tile_row * across;
  const i64 last = offsets ? offsets[experts] : rows, vectors = width / 8;
  const u32 j = threadIdx.x % 8;
#pragma unroll 1
  for (u32 step = 0; step < 4; ++step) {
    const u32 inside = row_of_step(step);
    const i64 row = (i64)tile_row * TILE + inside, at = row * HALVES * vectors + column * 16 + j;
    float y[2][8], prob = 1.f;
#pragma unroll
    for (int i = 0; i < 8; ++i) y[0][i] = y[1][i] = 0.f;
    if (row < last) {
      Eight<KIND> a[2], b[2];
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        a[u] = load_eight<KIND>(h, at + 8 * u);
        if (HALVES == 2) b[u] = load_eight<KIND>(h, at + 8 * u + vectors);
      }
      if (probs) prob = load(probs, row, (int)probs_kind);
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        Gates g;
        floats<KIND>(a[u], g.a);
        if (HALVES == 2) floats<KIND>(b[u], g.b);
        gates(g, act);
#pragma unroll
        for (int i = 0; i < 8; ++i) y[u][i] = g.a[i] * g.s[i] * g.b[i];
      }
    }
    make_block(y[0], y[1], prob, inside, row_scales + row * across + column, made[0]);
  }
  pdl_launch_dependents();
  __syncthreads();
  write_tiles(made, 1, tile_row, column, across, offsets, experts, row_codes,
              {rows, width, rows / TILE, codes, scales, true});
}

// The same for dh [rows, HALVES width], one tile of each half per thread block; partial [width / 128, rows]
// float64: each tile's contribution to dprobs, or null.
// Traffic: grad and h are read once, both codes are written once, plus 8 bytes per row and tile.
// Design: 139,264 x 768 takes 314 us; the row-wise kernel followed by the transpose takes 358. 67,584 x 1536:
//   306 and 318 (forward: 178 and 190, 175 and 184). Prefetching the next step, with fewer resident thread
//   blocks: 348 and 342 us. With four resident thread blocks the backward takes 303 us, and other variants
//   spill.
// Method: the same float32 steps as backward_rows in swiglu.cu; only the order of the sum for dprobs differs.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, KIND == F32 ? 2 : 3)
    swiglu_quantize_backward_transpose(const void* grad, const void* h, const void* probs, i64 probs_kind,
                                       const int* offsets, i64 experts, float clamp, float alpha,
                                       float offset, i64 rows, i64 width, u8* row_codes, u32* row_scales,
                                       u8* codes, float* scales, double* partial) {
  pdl_wait();
  __shared__ Made made[HALVES];
  const Activation act = {clamp, alpha, offset};
  const u32 across = (u32)width / TILE, tile_row = blockIdx.x / across,
            column = blockIdx.x - tile_row * across;
  const i64 last = offsets ? offsets[experts] : rows, vectors = width / 8;
  const u32 j = threadIdx.x % 8;
#pragma unroll 1
  for (u32 step = 0; step < 4; ++step) {
    const u32 inside = row_of_step(step);
    const i64 row = (i64)tile_row * TILE + inside, at = row * HALVES * vectors + column * 16 + j;
    const bool real = row < last;
    const float prob = probs && real ? load(probs, row, (int)probs_kind) : 1.f;
    double sum = 0.0;
    float da[2][8], db[2][8];
#pragma unroll
    for (int i = 0; i < 8; ++i) da[0][i] = da[1][i] = db[0][i] = db[1][i] = 0.f;
    if (real) {
      Eight<KIND> a[2], b[2], up[2];
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        a[u] = load_eight<KIND>(h, at + 8 * u);
        if (HALVES == 2) b[u] = load_eight<KIND>(h, at + 8 * u + vectors);
        up[u] = load_eight<KIND>(grad, row * vectors + column * 16 + j + 8 * u);
      }
#pragma unroll
      for (int u = 0; u < 2; ++u) sum += (double)eight_gradients<KIND>(a[u], b[u], up[u], act, da[u], db[u]);
    }
    u32* scale_to = row_scales + row * HALVES * across + column;
    make_block(da[0], da[1], prob, inside, scale_to, made[0]);
    if (HALVES == 2) make_block(db[0], db[1], prob, inside, scale_to + across, made[HALVES - 1]);
    if (!partial) continue;
#pragma unroll
    for (int apart = 4; apart > 0; apart /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, apart);
    if (j == 0) partial[column * rows + row] = sum;
  }
  pdl_launch_dependents();
  __syncthreads();
  write_tiles(made, HALVES, tile_row, column, across, offsets, experts, row_codes,
              {rows, HALVES * width, rows / TILE, codes, scales, true});
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
