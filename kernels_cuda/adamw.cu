// AdamW for the experts' weights, which also writes the FP8 codes and scales of the updated weights, step by
// step as in fp8moe/reference/adamw.py.
#include "weight_block.cuh"

#ifndef KIND
#define KIND BF16   // of the weights and their gradient
#define STATE BF16  // of both averages
#define WHOLE 1     // all blocks are complete, at 16-byte aligned addresses
#endif

// What an update multiplies by, in float32; computed in float64 of settings = lr, beta1, beta2, eps, weight
// decay.
struct Factors {
  float decay, beta1, rest1, beta2, rest2, size, root, eps;
};

// Launch: one thread. A kernel of its own: in float64 a power costs each of 90,000 blocks more than its
// loads hide.
extern "C" __global__ void adamw_factors(const float* step, const double* settings, Factors* factors) {
  pdl_wait();
  const double lr = settings[0], beta1 = settings[1], beta2 = settings[2];
  *factors = {(float)(lr * settings[4]),
              (float)beta1,
              (float)(1.0 - beta1),
              (float)beta2,
              (float)(1.0 - beta2),
              (float)(lr / (1.0 - pow(beta1, (double)*step))),
              (float)(1.0 / sqrt(1.0 - pow(beta2, (double)*step))),
              (float)settings[3]};
}

__device__ __forceinline__ void update(const Factors& f, float sign, float gradient, float* w, float* average,
                                       float* square) {
  const float g = sign * gradient;
  *w -= f.decay * *w;
  *average = f.beta1 * *average + f.rest1 * g;
  *square = f.beta2 * *square + f.rest2 * g * g;
  *w -= __fdiv_rn(f.size * *average, sqrtf(*square) * f.root + f.eps);
}

template <int TO>
__device__ __forceinline__ void write_some(void* x, i64 at, i64 count, bool aligned, const Eight<TO>& v) {
  if (aligned && count >= 8) {
    store_eight<TO>(x, at / 8, v);
    return;
  }
  const u32* words = (const u32*)&v;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i >= count) continue;
    if (TO == F32)
      ((u32*)x)[at + i] = words[i];
    else
      ((u16*)x)[at + i] = (u16)(words[i / 2] >> (16 * (i % 2)));
  }
}

// Rows of a thread whose loads are in flight together.
#define AT_ONCE (KIND == F32 || STATE == F32 ? 1 : 2)

// One step of AdamW on a part of the weights, in place, and the part of their codes.
// Arguments: w, gradient, average and square [matrices, real_rows, real_columns] with strides `matrix` and
//   `row` in elements, `aligned` if groups of eight are 16-byte aligned; sign: -1 to maximize; the part and
//   its codes as in quantize.cu: quantize_weights_part.
// Requires: the part's start is a multiple of 128; with WHOLE all sizes are.
// Traffic: weights and averages are read and written once, the gradient is read once, every code is written
//   once per orientation.
// Launch: one thread block of 256 per (128, 128) block, grid (blocks of a part, matrices).
// Design: that of quantize_weights, whose values come out of the update, rounded as they are stored.
extern "C" __global__ void __launch_bounds__(WEIGHT_THREADS, 2)
    adamw(void* __restrict__ w, const void* __restrict__ gradient, void* __restrict__ average,
          void* __restrict__ square, const Factors* __restrict__ factors, float sign, i64 aligned,
          i64 matrix_stride, i64 row_stride, i64 real_rows, i64 real_columns, i64 first_row, i64 first_column,
          i64 part_rows, i64 part_columns, i64 rows, i64 columns, u8* codes, float* scales, u8* transposed,
          float* transposed_scales) {
  pdl_wait();
  __shared__ __align__(128) u8 stage[TILE * TILE];  // [columns][rows]
  const u32 t = threadIdx.x, part_across = (u32)((part_columns + TILE - 1) / TILE);
  const u32 block_row = blockIdx.x / part_across, block_column = blockIdx.x - block_row * part_across;
  const i64 down = (i64)block_row * TILE, right = (i64)block_column * TILE, matrix = blockIdx.y;
  const i64 row = down + t / 16 * 8, column = right + t % 16 * 8;
  const i64 from = matrix * matrix_stride + row * row_stride + column;
  const Factors f = *factors;
  Eight<KIND> v[8];
#pragma unroll
  for (int first = 0; first < 8; first += AT_ONCE) {
    Eight<KIND> gradients[AT_ONCE];
    Eight<STATE> averages[AT_ONCE], squares[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const i64 at = from + (first + i) * row_stride;
      const i64 count = WHOLE ? 8 : row + first + i < real_rows ? real_columns - column : 0;
      v[first + i] = load_some<KIND>(w, at, count, WHOLE || aligned);
      gradients[i] = load_some<KIND>(gradient, at, count, WHOLE || aligned);
      averages[i] = load_some<STATE>(average, at, count, WHOLE || aligned);
      squares[i] = load_some<STATE>(square, at, count, WHOLE || aligned);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const i64 at = from + (first + i) * row_stride;
      const i64 count = WHOLE ? 8 : row + first + i < real_rows ? real_columns - column : 0;
      float x[8], g[8], m[8], s[8];
      floats<KIND>(v[first + i], x);
      floats<KIND>(gradients[i], g);
      floats<STATE>(averages[i], m);
      floats<STATE>(squares[i], s);
#pragma unroll
      for (int j = 0; j < 8; ++j)
        if (WHOLE || j < count) update(f, sign, g[j], &x[j], &m[j], &s[j]);  // 0 / 0 past the weights
      v[first + i] = eight<KIND>(x);
      write_some<KIND>(w, at, count, WHOLE || aligned, v[first + i]);
      write_some<STATE>(average, at, count, WHOLE || aligned, eight<STATE>(m));
      write_some<STATE>(square, at, count, WHOLE || aligned, eight<STATE>(s));
    }
  }
  pdl_launch_dependents();
  const Rule rule = {0, 1, 0, 0.f};
  const BlockPlace place = {matrix,
                            rows,
                            columns,
                            first_row + down,
                            first_column + right,
                            WHOLE ? TILE : part_rows - down,
                            WHOLE ? TILE : part_columns - right};
  write_block<KIND>(v, rule, place, stage, codes, scales, transposed, transposed_scales);
}
