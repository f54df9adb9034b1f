// FP8 codes multiplied as f16, which represents every code exactly, by tensor cores that have no FP8
// products. On top of mma_pipeline.cuh, which includes it.
//
// Tensor cores accumulate products of f16 in float32. So a warp needs no sums of each K-step besides its
// accumulators, and can compute 64 x 64 instead of 64 x 32, for which it converts a third fewer codes per
// product. 32,768 x 4096 x 7168 with 8 experts on an H200, in TFLOP/s: forward 425 instead of 354, weight
// gradient of blocks 433 instead of 382.
#pragma once

// A warp's codes, 16 of K (a half of what FP8 products multiply at a time) after the other: converted to f16
// one half ahead, so that conversions and products alternate, and loaded another half ahead.
struct Codes {
  At a_at, b_at;                               // the lane's addresses in both operands, for half 0
  u32 a[2][ROW_TILES][2];                      // of even and odd halves: rows `row` and + 8, four codes each
  u32 b[2][COLUMN_TILES];                      // column lane / 4 of each tile
  u32 a_f16[2][4], b_f16[2][COLUMN_TILES][2];  // of even and odd tiles; of even and odd halves

  __device__ __forceinline__ explicit Codes(At stages) {
    const u32 lane = threadIdx.x % 32;
    const Part part;
    const u32 swizzled = lane % 8 * 16;  // chunk 0 of the lane's line
    a_at = stages + (part.first_row + lane) * LINE + swizzled;
    b_at = stages + A_BYTES + (part.first_column + lane) * LINE + swizzled;
  }
  __device__ __forceinline__ void load_a(u32 half, u32 stage) {
#pragma unroll
    for (u32 i = 0; i < ROW_TILES; i += 2) {
      u32 v[4];
      load_matrices_at((a_at ^ 16 * (half % (2 * PARTS))) + stage + i * 16 * LINE, v);
      a[half % 2][i][0] = v[0], a[half % 2][i][1] = v[1];
      a[half % 2][i + 1][0] = v[2], a[half % 2][i + 1][1] = v[3];
    }
  }
  __device__ __forceinline__ void load_b(u32 half, u32 stage) {
#pragma unroll
    for (u32 j = 0; j < COLUMN_TILES; j += 4) {
      u32 v[4];
      load_matrices_at((b_at ^ 16 * (half % (2 * PARTS))) + stage + j * 8 * LINE, v);
#pragma unroll
      for (u32 m = 0; m < 4; ++m) b[half % 2][j + m] = v[m];
    }
  }
  // A lane uses the first two of four adjacent codes as k = 2 q and the others as k = 2 q + 8: the same
  // permutation of K for both operands, which leaves the set of products unchanged.
  __device__ __forceinline__ void convert_a(u32 half, u32 i) {
    u32(&to)[4] = a_f16[i % 2];
    decode4(a[half % 2][i][0], A_FMT, &to[0], &to[2]);
    decode4(a[half % 2][i][1], A_FMT, &to[1], &to[3]);
  }
  __device__ __forceinline__ void convert_b(u32 half, u32 j) {
    u32(&to)[2] = b_f16[half % 2][j];
    decode4(b[half % 2][j], B_FMT, &to[0], &to[1]);
  }
  // Before the first half of a stage.
  __device__ __forceinline__ void begin(u32 stage) {
    load_b(0, stage);
    load_a(0, stage);
    load_b(1, stage);
#pragma unroll
    for (u32 j = 0; j < COLUMN_TILES; ++j) convert_b(0, j);
    convert_a(0, 0);
  }
  // Multiplies a half, and converts the next one. a of the next half and b of the one after it must have been
  // requested.
  __device__ __forceinline__ void multiply(Sums& d, u32 half) {
    constexpr u32 EACH = COLUMN_TILES / ROW_TILES;
#pragma unroll
    for (u32 i = 0; i < ROW_TILES; ++i) {
      convert_a(half + (i + 1) / ROW_TILES, (i + 1) % ROW_TILES);
#pragma unroll
      for (u32 j = 0; j < EACH; ++j) convert_b(half + 1, i * EACH + j);
#pragma unroll
      for (u32 j = 0; j < COLUMN_TILES; ++j)
        mma_f16(d[i][j], a_f16[i % 2], b_f16[half % 2][j][0], b_f16[half % 2][j][1]);
    }
  }
};

// Sums in units of the current K-step's scales: before its products they are multiplied by the ratio of the
// previous step's scale to its own. This rounds twice more per step than promotion to accumulators in units
// of 1, and not at all if scales are powers of two.
//
// A new scale that is not between 2^-20 and 2^20 of the first one, or not between 2^-100 and 2^100, which
// includes zero, infinity and NaN, begins anew: the sums until then are added to `before`, in units of 1.
// (Sums must not overflow: at most 2^32 per product, 2^30 products and ratios of 2^40 make 2^102. The
// smallest product, 2^-32, times 2^-40 is far from the subnormals.) An unchanged one does not, as padding
// rows have scales of zero.
template <bool BY_ROW>
struct Units {
  typedef StepScales<BY_ROW, false> Of;
  typedef typename Of::Values Values;
  struct Memory {  // local
    Sums before;
    bool used;  // whether `before` has sums; the same in the whole warp
  };
  Values now, next, first, ratios;
  bool far;  // whether the next step begins anew; the same in the whole warp
  Memory* memory;

  __device__ __forceinline__ explicit Units(Memory& memory) : far(false), memory(&memory) {
    kept(&memory)->used = false;
#pragma unroll
    for (int i = 0; i < Of::COUNT; ++i) now[i] = 1.f;
  }
  // Scales of the first K-step.
  __device__ __forceinline__ void start(const Values& scales) {
#pragma unroll
    for (int i = 0; i < Of::COUNT; ++i) next[i] = first[i] = scales[i], ratios[i] = 1.f;
  }
  // Scales of the next K-step. Called during the products before it: at their end a warp would wait for the
  // ratios.
  __device__ __forceinline__ void prepare(const Values& scales) {
    bool near = true;
#pragma unroll
    for (int i = 0; i < Of::COUNT; ++i) {
      const float v = scales[i], r = reciprocal(v);
      const bool same = v == now[i];
      const float least = same ? 0.f : fmaxf(first[i] * 0x1p-20f, 0x1p-100f);
      const float most = same ? 0x1p100f : fminf(first[i] * 0x1p20f, 0x1p100f);
      next[i] = v;
      ratios[i] = same ? 1.f : now[i] * __fmaf_rn(r, __fmaf_rn(-v, r, 1.f), r);
      near = near && v >= least && v <= most;
    }
    far = __any_sync(0xffffffffu, !near);
  }
  // Changes the sums to units of the scales of `start` or `prepare`.
  __device__ __forceinline__ void change(Sums& d) {
    if (far) {
      Memory& m = *kept(memory);
      if (!m.used)
#pragma unroll 1
        for (u32 i = 0; i < sizeof(Sums) / 4; ++i) (&m.before[0][0][0])[i] = 0.f;
      m.used = true;
      Of::for_each(now, [&](int i, int j, int v, float scale) {
        m.before[i][j][v] = __fmaf_rn(d[i][j][v], scale, m.before[i][j][v]);
        d[i][j][v] = 0.f;
      });
#pragma unroll
      for (int i = 0; i < Of::COUNT; ++i) first[i] = next[i], ratios[i] = 1.f;
    }
    // not as an alternative to the above, so that products can begin before all sums have been multiplied
    Of::for_each(ratios, [&](int i, int j, int v, float ratio) { d[i][j][v] *= ratio; });
#pragma unroll
    for (int i = 0; i < Of::COUNT; ++i) now[i] = next[i];
  }
  // Changes the sums to units of 1.
  __device__ __forceinline__ void end(Sums& d) {
    const Memory& m = *kept(memory);
    const bool used = m.used;
    Of::for_each(now, [&](int i, int j, int v, float scale) {
      d[i][j][v] = used ? __fmaf_rn(d[i][j][v], scale, m.before[i][j][v]) : d[i][j][v] * scale;
    });
  }
};
