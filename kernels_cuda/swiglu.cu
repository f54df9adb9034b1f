// SwiGLU and its backward in float32 (float64 for float64), step by step as in fp8moe/reference/swiglu.py.
//
// Fast paths: swiglu_quantize_rows and swiglu_quantize_backward_rows fuse the activation with row-wise
// quantisation in one read and one write; swiglu_rows and swiglu_backward_rows do not quantise. Their sigmoid
// is float32 with the hardware exponential, the reference's is float64 rounded once; quick_sigmoid states the
// error. The other kernels compute in float64 and, for quantised results, use a float32 buffer and
// quantize.cu.
#include "swiglu.cuh"
#include "tile_quantize.cuh"

// y [rows, width] from h [rows, HALVES * width]; rows past *last (if given) are zeros. One thread block per
// row.
extern "C" __global__ void swiglu_forward(const void* h, i64 kind, const void* probs, i64 probs_kind,
                                          const int* last, i64 clamp_bits, i64 alpha_bits, i64 offset_bits,
                                          i64 width, i64 out_kind, void* y) {
  pdl_wait();
  const WideActivation act(clamp_bits, alpha_bits, offset_bits);
  const i64 row = blockIdx.x;
  const bool real = !last || row < *last;
  for (i64 i = threadIdx.x; i < width; i += blockDim.x) {
    if (kind == F64) {
      const double* in = (const double*)h + row * HALVES * width;
      double a = in[i], b = HALVES == 2 ? in[width + i] : 1.0;
      if (ACT == RELU2 && a < 0.0) a = 0.0;
      if (a > act.clamp) a = act.clamp;
      if (b > act.clamp) b = act.clamp;
      if (b < -act.clamp) b = -act.clamp;
      double value = a * wide_weight(a, act.alpha) * (b + act.offset);
      if (probs) value *= load_wide(probs, row, (int)probs_kind);
      store(y, row * width + i, (int)out_kind, value);
      continue;
    }
    float value = 0.f;
    if (real) {
      const i64 at = row * HALVES * width + i;
      const float b = HALVES == 2 ? load(h, at + width, (int)kind) : 1.f;
      const Element e =
          element(load(h, at, (int)kind), b, (float)act.clamp, (float)act.alpha, (float)act.offset);
      value = e.a * e.s * e.b;
      if (probs) value *= load(probs, row, (int)probs_kind);
    }
    store(y, row * width + i, (int)out_kind, value);
  }
}

// dh [rows, HALVES * width] and dprobs [rows], summed in float64 in a fixed order. One thread block of 256
// per row. grad is float64 where h is.
extern "C" __global__ void swiglu_backward(const void* grad, i64 grad_kind, const void* h, i64 kind,
                                           const void* probs, i64 probs_kind, const int* last, i64 clamp_bits,
                                           i64 alpha_bits, i64 offset_bits, i64 width, i64 out_kind, void* dh,
                                           i64 dprobs_kind, void* dprobs) {
  pdl_wait();
  const WideActivation act(clamp_bits, alpha_bits, offset_bits);
  __shared__ double partial[256];
  const i64 row = blockIdx.x;
  const bool real = !last || row < *last;
  double sum = 0.0;
  for (i64 i = threadIdx.x; i < width; i += blockDim.x) {
    double da = 0.0, db = 0.0;
    const i64 at = row * HALVES * width + i;
    if (kind == F64) {
      double a = ((const double*)h)[at], b = HALVES == 2 ? ((const double*)h)[at + width] : 1.0;
      if (ACT == RELU2 && a < 0.0) a = 0.0;
      const double g = ((const double*)grad)[row * width + i];
      const bool a_free = !(a > act.clamp), b_free = !(fabs(b) > act.clamp);
      if (a > act.clamp) a = act.clamp;
      if (b > act.clamp) b = act.clamp;
      if (b < -act.clamp) b = -act.clamp;
      b += act.offset;
      const double s = wide_weight(a, act.alpha);
      const double scaled = probs ? g * load_wide(probs, row, (int)probs_kind) : g;
      da = a_free ? scaled * b * (s + wide_slope(a, s, act.alpha)) : 0.0;
      db = b_free ? scaled * a * s : 0.0;
      sum += g * a * s * b;
    } else if (real) {
      const float b = HALVES == 2 ? load(h, at + width, (int)kind) : 1.f;
      const Element e =
          element(load(h, at, (int)kind), b, (float)act.clamp, (float)act.alpha, (float)act.offset);
      float scaled = load(grad, row * width + i, (int)grad_kind);
      const float g = e.a * e.s;
      sum += (double)(scaled * g * e.b);
      if (probs) scaled *= load(probs, row, (int)probs_kind);
      da = e.a_free ? scaled * e.b * (e.s + slope(e.a, g, e.s, (float)act.alpha)) : 0.f;
      db = e.b_free ? scaled * g : 0.f;
    }
    store(dh, at, (int)out_kind, da);
    if (HALVES == 2) store(dh, at + width, (int)out_kind, db);
  }
  sum = block_reduce(sum, partial, [](double a, double b) { return a + b; });
  if (dprobs && threadIdx.x == 0) store(dprobs, row, (int)dprobs_kind, sum);
}

template <int TO>
__device__ __forceinline__ void store_products(void* to, i64 vector, const float* v, float by) {
  float products[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) products[i] = v[i] * by;
  store_eight<TO>(to, vector, products);
}

// y = a * sigmoid(alpha a) * b, zeros past *last. put(y, z, prob, at, whole, a, b, from) receives a lane's
// sixteen values, vectors `at` and `at` + lanes_of(MX) of the result (valid if `whole`), the row's
// probability, and what they were computed of: a is vectors `from` and `from` + lanes_of(MX) of h, b those
// `vectors` later.
template <class Put>
__device__ __forceinline__ void forward_rows(const void* h, const void* probs, i64 probs_kind,
                                             const int* last, Activation act, i64 rows, u32 vectors,
                                             const Put& put) {
  const int lane = threadIdx.x % 32, lanes = lanes_of(MX);
  const i64 first = ((i64)blockIdx.x * blockDim.x + threadIdx.x - lane) * 2;
  const i64 at = vector_of(first, lane, MX);
  const bool whole = at + lanes < rows * vectors;
  const i64 row = at <= 0xffffffffll ? (u32)at / vectors : at / vectors;
  const i64 from = at + (HALVES - 1) * row * vectors;
  Eight<KIND> a[2] = {}, b[2] = {};
  float y[2][8], prob = 1.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) y[0][i] = y[1][i] = 0.f;
  if (whole && (!last || row < *last)) {
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      a[u] = load_eight<KIND>(h, from + u * lanes);
      if (HALVES == 2) b[u] = load_eight<KIND>(h, from + u * lanes + vectors);
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
  put(y[0], y[1], prob, at, whole, a, b, from);
}

typedef const Eight<KIND> (&Loaded)[2];

// y, quantised row-wise by blocks of 128 (mx: 32); zeros past *last.
// Arguments: h [rows, 2 width] = (a | b), or [rows, width] without a gate; codes [rows, width], scales [rows,
//   width / block]; `vectors`: width / 8.
// Requires: width a multiple of the block.
// Traffic: h is read once, codes and scales are written once.
// Launch: thread blocks of 64, sixteen values of a and b per thread. (256 threads: 24,576 x 1408 take 43.6
//   instead of 42.6 us; 32,768 x 2048 the same.)
extern "C" __global__ void __launch_bounds__(64)
    swiglu_quantize_rows(const void* h, const void* probs, i64 probs_kind, const int* last, float clamp,
                         float alpha, float offset, i64 rows, i64 vectors, u8* codes, void* scales) {
  pdl_wait();
  const Rule rule = {FMT, 1, MX, 0.f};
  forward_rows(h, probs, probs_kind, last, {clamp, alpha, offset}, rows, (u32)vectors,
               [&](float* y, float* z, float prob, i64 at, bool whole, Loaded, Loaded, i64) {
                 const u32 scale = write_products(y, z, prob, rule, at, whole, codes);
                 if (whole) store_block_scale(scales, at, scale, MX);
               });
}

#if !MX
// The same with h itself quantised to e4m3 by blocks of 128 of each half: h_codes [rows, HALVES width],
// h_scales [rows, HALVES width / 128], zeros past *last. Infinities have the NaN code, which gradients and
// statistics keep; 448 would hide them. Traffic: as above, and the codes of h.
extern "C" __global__ void __launch_bounds__(64)
    swiglu_quantize_rows_and_h(const void* h, const void* probs, i64 probs_kind, const int* last, float clamp,
                               float alpha, float offset, i64 rows, i64 vectors, u8* codes, void* scales,
                               u8* h_codes, void* h_scales) {
  pdl_wait();
  const Rule rule = {FMT, 1, MX, 0.f}, of_h = {0, 1, 0, 0.f, true};
  forward_rows(h, probs, probs_kind, last, {clamp, alpha, offset}, rows, (u32)vectors,
               [&](float* y, float* z, float prob, i64 at, bool whole, Loaded a, Loaded b, i64 from) {
                 const u32 scale = write_products(y, z, prob, rule, at, whole, codes);
                 if (whole) store_block_scale(scales, at, scale, MX);
#pragma unroll
                 for (int half = 0; half < HALVES; ++half, from += vectors) {
                   floats(half ? b[0] : a[0], y);
                   floats(half ? b[1] : a[1], z);
                   const u32 scale_of_h = write_products(y, z, 1.f, of_h, from, whole, h_codes);
                   if (whole) store_block_scale(h_scales, from, scale_of_h, 0);
                 }
               });
}
#endif

// The e4m3 codes of infinities of h [count] become NaN, for codes that `quantize` has made.
extern "C" __global__ void infinities_to_nan(const void* h, i64 kind, i64 count, u8* codes) {
  pdl_wait();
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count && fabsf(load(h, i, (int)kind)) == __uint_as_float(0x7f800000u)) codes[i] = 0x7f;
}

// swiglu_quantize_rows without quantisation: y [rows, width] of the dtype of h; width a multiple of 128.
extern "C" __global__ void __launch_bounds__(64)
    swiglu_rows(const void* h, const void* probs, i64 probs_kind, float clamp, float alpha, float offset,
                i64 rows, i64 vectors, void* y) {
  pdl_wait();
  forward_rows(h, probs, probs_kind, 0, {clamp, alpha, offset}, rows, (u32)vectors,
               [&](const float* v, const float* w, float prob, i64 at, bool whole, Loaded, Loaded, i64) {
                 if (!whole) return;
                 store_products<KIND>(y, at, v, prob);
                 store_products<KIND>(y, at + lanes_of(MX), w, prob);
               });
}

// One warp per row of dh = (da | db) and dprobs, zeros past *last. put(x, y, prob, at, whole, row, half,
// first) receives a lane's sixteen values before the multiplication by the row's probability: vectors `at`
// and `at` + lanes_of(MX) of dh (valid if `whole`). The warp's 64 vectors begin at `first` of the half (0:
// da, 1: db). The sum for dprobs is float64 over groups of eight products, in a fixed order.
template <class Put>
__device__ __forceinline__ void backward_rows(const void* grad, const void* h, const void* probs,
                                              i64 probs_kind, const int* last, Activation act, i64 rows,
                                              i64 vectors, float* dprobs, const Put& put) {
  const i64 row = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32, lanes = lanes_of(MX);
  if (row >= rows) return;
  const bool real = !last || row < *last;
  const float prob = probs && real ? load(probs, row, (int)probs_kind) : 1.f;
  double sum = 0.0;
  for (i64 first = 0; first < vectors; first += 64) {
    const i64 at = vector_of(first, lane, MX), half = row * HALVES * vectors + at;
    const bool whole = at + lanes < vectors;
    float da[2][8], db[2][8];
#pragma unroll
    for (int i = 0; i < 8; ++i) da[0][i] = da[1][i] = db[0][i] = db[1][i] = 0.f;
    if (whole && real) {
      Eight<KIND> a[2], b[2], up[2];
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        a[u] = load_eight<KIND>(h, half + u * lanes);
        if (HALVES == 2) b[u] = load_eight<KIND>(h, half + u * lanes + vectors);
        up[u] = load_eight<KIND>(grad, row * vectors + at + u * lanes);
      }
#pragma unroll
      for (int u = 0; u < 2; ++u) sum += (double)eight_gradients(a[u], b[u], up[u], act, da[u], db[u]);
    }
    if (first + 64 >= vectors) pdl_launch_dependents();
#pragma unroll
    for (int u = 0; u < HALVES; ++u)
      put(u ? db[0] : da[0], u ? db[1] : da[1], prob, half + u * vectors, whole, row, u, first);
  }
  if (!dprobs) return;
  for (int step = 16; step > 0; step /= 2) sum += __shfl_down_sync(0xffffffffu, sum, step);
  if (lane == 0) dprobs[row] = (float)sum;
}

// Scales of a row's blocks of 128. A warp computes four of each half of dh at a time; lanes 0 to 15 keep
// da's, the others db's, until those of 256 vectors are stored together (142.9 to 141.9 us).
struct RowScales {
  u32 kept = 0;
  __device__ __forceinline__ void add(u32 scale, i64 row, int half, i64 first, i64 vectors, u32* scales) {
    const u32 lane = threadIdx.x % 32, turn = (u32)first / 64 % 4;
    const u32 scale_of_block = __shfl_sync(0xffffffffu, scale, lane % 4 * 8);
    if (lane / 4 == 4 * half + turn) kept = scale_of_block;
    if (half < HALVES - 1 || (turn < 3 && first + 64 < vectors)) return;
    const i64 blocks = vectors / 16, block = first / 256 * 16 + lane % 16;
    if (block < blocks && lane / 16 < HALVES) scales[(HALVES * row + lane / 16) * blocks + block] = kept;
  }
};

// Blocks per multiprocessor: as many as leave enough registers. On sm_100a and sm_120a GELU with clamp and
// offset spilled 52 and 76 bytes with 5 blocks, 20 and 4 with 4.
#define SPILLS_WITH_FOUR (ACT == GELU && !BARE && __CUDA_ARCH__ >= 1000)
#define BACKWARD_BLOCKS (KIND == F32 ? 4 : ACT == SILU ? 6 : SPILLS_WITH_FOUR ? 3 : 5)

// dh with each half quantised in blocks of its own, and dprobs; zeros past *last.
// Arguments: grad [rows, width], h and dh [rows, HALVES width], dprobs [rows] float32 or null; `vectors`:
//   width / 8.
// Traffic: grad and h are read once, codes and scales are written once.
// Launch: one warp per row.
extern "C" __global__ void __launch_bounds__(128, BACKWARD_BLOCKS)
    swiglu_quantize_backward_rows(const void* grad, const void* h, const void* probs, i64 probs_kind,
                                  const int* last, float clamp, float alpha, float offset, i64 rows,
                                  i64 vectors, u8* codes, void* scales, float* dprobs) {
  pdl_wait();
  const Rule rule = {FMT, 1, MX, 0.f};
  RowScales kept;
  backward_rows(grad, h, probs, probs_kind, last, {clamp, alpha, offset}, rows, vectors, dprobs,
                [&](float* x, float* y, float prob, i64 at, bool whole, i64 row, int half, i64 first) {
                  const u32 scale = write_products(x, y, prob, rule, at, whole, codes);
                  if (!MX)
                    kept.add(scale, row, half, first, vectors, (u32*)scales);
                  else if (whole)
                    store_block_scale(scales, at, scale, MX);
                });
}

// The same without quantisation: dh of the dtype of h; width a multiple of 128.
extern "C" __global__ void __launch_bounds__(128, BACKWARD_BLOCKS)
    swiglu_backward_rows(const void* grad, const void* h, const void* probs, i64 probs_kind, float clamp,
                         float alpha, float offset, i64 rows, i64 vectors, void* dh, float* dprobs) {
  pdl_wait();
  backward_rows(grad, h, probs, probs_kind, 0, {clamp, alpha, offset}, rows, vectors, dprobs,
                [&](const float* x, const float* y, float prob, i64 at, bool whole, i64, int, i64) {
                  if (!whole) return;
                  store_products<KIND>(dh, at, x, prob);
                  store_products<KIND>(dh, at + lanes_of(MX), y, prob);
                });
}

// The forward with column-wise blocks in addition to the row-wise ones, from one read.
// Arguments: outputs as in tile_quantize.cuh: quantize_tile.
// Requires: width a multiple of 128.
// Launch: like quantize_tiles, with a and b in shared memory.
extern "C" __global__ void __launch_bounds__(TILE_THREADS, KIND == F32 ? 1 : TILE_BLOCKS)
    swiglu_quantize_tiles(const void* h, const void* probs, i64 probs_kind, float clamp, float alpha,
                          float offset, i64 rows, i64 width, const int* offsets, i64 experts, i64 strips,
                          int* taken, u8* row_codes, void* row_scales, u8* codes, void* scales) {
  if (!taken) pdl_wait();
  const int size = KIND == F32 ? 4 : 2, table = TILE * TILE * size;
  DYNAMIC_SHARED(shared);  // output tile | a and b of the input tile | table of strips
  u8 *stage = shared, *in = shared + TILE * TILE;
  __shared__ TileShared tile_shared;
  __shared__ Place places[PLACES];
  __shared__ int used;
  __shared__ float row_probs[2][TILE];
  const u32 t = threadIdx.x, warp = t / 32;
  const Activation act = {clamp, alpha, offset};
  const Rule rule = {FMT, 1, MX, 0.f};
  const Strips strips_of = find_strips(offsets, experts, rows, MX ? 32 : TILE, (int*)(in + 2 * table), &used);
  Turns turns(strips_of, width, places, taken, row_codes != 0);
  const i64 last = offsets ? offsets[experts] : rows;  // rows past the last expert are zeros
  auto look = [&](u32 turn) {
    if (t >= TILE || !turns.has(turn)) return;
    const int row = turns.row(turn, t);
    row_probs[turn % 2][t] = row >= 0 && row < last && probs ? load(probs, row, (int)probs_kind) : 1.f;
  };
  auto fetch = [&](u32 turn) {
    if (turns.has(turn)) {
      const u8* x = (const u8*)h + turns.place(turn).column * (TILE * size);
      fetch_tile<size, MX>(in, turns.place(turn), last, x, (u32)width * HALVES * size);
      if (HALVES == 2)
        fetch_tile<size, MX>(in + table, turns.place(turn), last, x + width * size, (u32)width * 2 * size);
    }
    copy_async_commit();
  };
  turns.start(look, fetch);
  clear_scales(turns, strips, width, MX ? 1 : 4, scales);
  u8* own_values = in + (warp * CHUNK_ROWS * TILE + t % 32 * 4) * size;
#pragma unroll 1
  for (u32 turn = 0; turns.has(turn); ++turn) {
    turns.begin(turn);
    look(turn + 1);
    copy_async_wait<0>();
    __syncthreads();  // the tile has arrived
    const Place& place = turns.place(turn);
    const int q = strip_of_chunk(warp, MX), inside = warp * CHUNK_ROWS - 32 * q;
    const i64 left = last - place.base[q];
    const int valid_rows = min(place.count[q], (int)clamped(left, TILE)) - inside;  // valid rows of the chunk
    const float* prob = row_probs[turn % 2] + warp * CHUNK_ROWS;
    FloatChunk made;
    float (&v)[CHUNK_ROWS][4] = made.v;
    bool near = true;
#pragma unroll
    for (int i = 0; i < CHUNK_ROWS; i += 2) {
      Gates g;
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        four_of<KIND>(own_values + (i + k) * (TILE * size), g.a + 4 * k);
        if (HALVES == 2) four_of<KIND>(own_values + (i + k) * (TILE * size) + table, g.b + 4 * k);
      }
      near = quick_gates(g, act) && near;
#pragma unroll
      for (int k = 0; k < 2; ++k)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const float y = g.a[4 * k + c] * g.s[4 * k + c] * g.b[4 * k + c] * prob[i + k];
          v[i + k][c] = BARE || i + k < valid_rows ? y : 0.f;  // for a row of zeros y is 0 already
        }
    }
    if (!near) {
      // very rare: stages the results in this thread's slots of shared memory
#pragma unroll 1
      for (int i = 0; i < CHUNK_ROWS; ++i) {
        float a[4], b[4], y[4];
        u8* row = own_values + i * (TILE * size);
        four_of<KIND>(row, a);
        if (HALVES == 2) four_of<KIND>(row + table, b);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const Element e = element(a[c], HALVES == 2 ? b[c] : 1.f, act.clamp, act.alpha, act.offset);
          const float x = exponent(e.a, act.alpha), s = fabsf(x) < FAR ? quick_sigmoid(x) : far_sigmoid(x);
          y[c] = i < valid_rows ? e.a * s * e.b * prob[i] : 0.f;
        }
        *(uint2*)row = make_uint2(__float_as_uint(y[0]), __float_as_uint(y[1]));
        *(uint2*)(row + table) = make_uint2(__float_as_uint(y[2]), __float_as_uint(y[3]));
      }
#pragma unroll
      for (int i = 0; i < CHUNK_ROWS; ++i) {
        const uint2 left = *(const uint2*)(own_values + i * (TILE * size));
        const uint2 right = *(const uint2*)(own_values + i * (TILE * size) + table);
        v[i][0] = __uint_as_float(left.x), v[i][1] = __uint_as_float(left.y);
        v[i][2] = __uint_as_float(right.x), v[i][3] = __uint_as_float(right.y);
      }
    }
    __syncthreads();  // the tile is in registers, and the previous output tile has been written
    fetch(turn + 1);
    quantize_tile(made, rule, place, used, strips, width, rows, row_codes, row_scales, codes, scales, stage,
                  tile_shared);
  }
}
