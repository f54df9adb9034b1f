// The pipeline of the grouped GEMMs by mma.sync, for every tensor core from sm_80 on.
//
// A thread block computes one tile of ROWS x COLUMNS. Its threads copy both operands to shared memory by
// cp.async, STAGES - 1 K-steps ahead. A K-step is 128 bytes: 64 values of 16 bits, or 128 FP8 codes, which is
// one scale block. Each warp computes WARP_ROWS x WARP_COLUMNS of the tile.
//
// An operand is K-major (FP8 codes always are) or MN-major (ACROSS: the other orientation of 16-bit weights,
// and both operands of their gradient). Shared memory keeps the layout of global memory, in lines of 128
// bytes whose 16-byte chunks are swizzled, so that neither copies nor ldmatrix have bank conflicts. A line
// holds 128 bytes along K of one row, or (ACROSS) 64 values of one of the 64 K indices, panel by panel.
//
// FP8 is multiplied natively where tensor cores support it, and otherwise as f16, which represents every code
// exactly. The products of each K-step are multiplied by their scales and promoted to float32 accumulators;
// native products need that, as they accumulate fewer than 24 bits. Products of f16 do not: where registers
// suffice (RESCALED), they are added to the accumulators directly (mma_codes.cuh).
#pragma once
#include "mma.cuh"

// 99 KB of shared memory per thread block instead of 163 KB or more
#define LITTLE_SHARED (__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)

// 1: a warp has one set of sums of FP8 products. Registers do not suffice where conversions take several
// instructions (sm_80, sm_86), nor with a scale per column.
#if !defined KIND && __CUDA_ARCH__ >= 900 && !MULTIPLIES_CODES && !(defined BLOCKS && !BLOCKS)
#define RESCALED 1
#else
#define RESCALED 0
#endif

#define ROWS 128
#define WARP_ROWS 64
#if !defined KIND && !RESCALED  // a K-step's products and the accumulators take 128 registers together
#define WARP_COLUMNS 32
#else
#define WARP_COLUMNS 64
#endif
#ifdef KIND  // BF16 or F16
#define OPERAND_BYTES 2
#else  // A_FMT and B_FMT
#define OPERAND_BYTES 1
#endif
#if !defined COLUMNS && (LITTLE_SHARED || WARP_COLUMNS == 32)
#define COLUMNS 128
#elif !defined COLUMNS
#define COLUMNS 256
#endif
#ifndef STAGES
#define STAGES 3
#endif
// Register fragments per warp: with two, the next fragments load during the products. Accumulators of FP8
// products with one scale per column leave no registers for the second.
#if !defined KIND && defined BLOCKS && !BLOCKS
#define BUFFERS 1
#else
#define BUFFERS 2
#endif
#define THREADS (32 * (ROWS / WARP_ROWS) * (COLUMNS / WARP_COLUMNS))
#define LINE 128  // bytes
#define STEP (LINE / OPERAND_BYTES)
#define A_BYTES (ROWS * LINE)
#define STAGE_BYTES ((ROWS + COLUMNS) * LINE)
#define PARTS (LINE / 32)  // of a K-step, each as long as K of one instruction
#define ROW_TILES (WARP_ROWS / 16)
#define COLUMN_TILES (WARP_COLUMNS / 8)
#define AT_ONCE (THREADS / 8)  // lines copied by the thread block with one chunk per thread
#ifndef HEIGHT
#define HEIGHT 8  // rows of tiles processed together so that their operands stay in L2
#endif

// Copies of one operand to shared memory by the whole thread block. A thread's chunks are 16 bytes, AT_ONCE
// lines apart. LINES: rows or columns of the tile.
template <bool ACROSS, int LINES>
struct Operand {
  const u8* from;  // the thread's first chunk of the next K-step
  i64 pitch;       // bytes between rows
  int lines;       // K-major: lines remaining from the thread's own; ACROSS: bytes remaining of its row
  int left;        // K-major: bytes of K remaining from the thread's own; ACROSS: rows remaining
  bool whole;      // all chunks are 16-byte aligned and complete

  // Lines `first` to `end` of the tile (`end` may cut it short), k0 to k1 of K; rows have `length` values.
  __device__ __forceinline__ Operand(const void* data, i64 length, i64 first, i64 end, i64 k0, i64 k1) {
    const int line = (int)threadIdx.x / 8, piece = (int)threadIdx.x % 8 * 16;
    pitch = length * OPERAND_BYTES;
    const u8* start =
        (const u8*)data + (ACROSS ? k0 * pitch + first * OPERAND_BYTES : first * pitch + k0 * OPERAND_BYTES);
    whole = (((size_t)start | (size_t)pitch) & 15) == 0;
    if (!ACROSS && (k1 - k0) * OPERAND_BYTES % 16) whole = false;
    from = start + line * pitch + piece;
    const i64 bytes = min((ACROSS ? end - first : k1 - k0) * OPERAND_BYTES, (i64)1 << 30) - piece;
    const i64 rows = min(ACROSS ? k1 - k0 : end - first, (i64)1 << 30) - line;
    lines = max(min((int)(ACROSS ? bytes : rows), 1 << 20), 0);  // no tile is as large
    left = (int)(ACROSS ? rows : bytes);
  }

  // Global address of the thread's chunk i (of LINES / AT_ONCE) of the next K-step; *bytes: its valid bytes,
  // 0 past the last K-step.
  __device__ __forceinline__ const u8* piece(int i, u32* bytes) const {
    constexpr int DOWN = ACROSS ? STEP / AT_ONCE : LINES / AT_ONCE;  // chunks per panel
    const int down = i % DOWN, panel = i / DOWN;
    const int available = ACROSS ? lines - panel * LINE : left;
    *bytes = down * AT_ONCE < (ACROSS ? left : lines) ? (u32)max(min(available, 16), 0) : 0u;
    return from + down * (AT_ONCE * pitch) + panel * LINE;
  }
  __device__ __forceinline__ At place(At stage) const {  // of chunk 0; the others are AT_ONCE lines apart
    return stage + threadIdx.x / 8 * LINE + (threadIdx.x / 8 ^ threadIdx.x) % 8 * 16;
  }

  // From now on `fetch` copies zeros. `lines` becomes negative, and includes the bytes by which `from` was
  // unaligned: with registers of their own, FP8 spills on sm_80 and sm_120.
  __device__ __forceinline__ void copy_zeros() {
    const int odd = (int)((size_t)from & 15);
    from -= odd;
    lines = ~(lines * 16 + odd);
  }
  __device__ __forceinline__ Operand by_values() const {  // as before copy_zeros
    Operand o = *this;
    o.from = from + ~lines % 16;
    o.lines = ~lines / 16;
    return o;
  }
  // Copies one of PARTS shares of the chunks of the next K-step, or zeros outside the operand.
  __device__ __forceinline__ void fetch(At stage, u32 share) const {
    constexpr int DOWN = ACROSS ? STEP / AT_ONCE : LINES / AT_ONCE;  // chunks per panel
    constexpr int CHUNKS = LINES / AT_ONCE / PARTS;
    const At to = place(stage);
#pragma unroll
    for (int i = 0; i < LINES / AT_ONCE; ++i) {
      if (i / CHUNKS != (int)share) continue;
      const int down = i % DOWN, panel = i / DOWN;
      const bool valid =
          (ACROSS ? lines > panel * LINE : left > 0) && (ACROSS ? left : lines) > down * AT_ONCE;
      copy_async_or_zero(to + i * (AT_ONCE * LINE), from + down * (AT_ONCE * pitch) + panel * LINE, valid);
    }
  }
  // Copies all chunks value by value, for any alignment.
  __device__ __forceinline__ void fetch_by_values(At stage) const {
    const At to = place(stage);
#pragma unroll 1
    for (int i = 0; i < LINES / AT_ONCE; ++i) {
      u32 bytes, words[4] = {0, 0, 0, 0};
      const u8* source = piece(i, &bytes);
#pragma unroll
      for (u32 b = 0; b < 16; b += OPERAND_BYTES)
        if (b < bytes)
          words[b / 4] |= (u32)(OPERAND_BYTES == 2 ? *(const u16*)(source + b) : source[b]) << b % 4 * 8;
      store_words_at(to + i * (AT_ONCE * LINE), make_uint4(words[0], words[1], words[2], words[3]));
    }
  }
  __device__ __forceinline__ void next() {
    from += ACROSS ? STEP * pitch : LINE;
    left -= ACROSS ? STEP : LINE;
  }
};

// A warp's part of the tile, and a lane's share of it: rows `row` + 16 i and `row` + 16 i + 8, columns
// `column` + 8 j and `column` + 8 j + 1.
struct Part {
  int first_row, first_column, row, column;
  __device__ __forceinline__ Part() {
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    first_row = warp % (ROWS / WARP_ROWS) * WARP_ROWS;
    first_column = warp / (ROWS / WARP_ROWS) * WARP_COLUMNS;
    row = first_row + lane / 4;
    column = first_column + lane % 4 * 2;
  }
};

typedef float Sums[ROW_TILES][COLUMN_TILES][4];

// Scales of a K-step, shared by a warp. BY_ROW: each of the four lanes that have the same rows holds those of
// two; eight loads per lane, and the computation of their addresses, are slower than two loads and eight
// exchanges between lanes. BY_COLUMN: each of the eight lanes that have the same columns holds that of one.
// Without either, one scale of all values.
template <bool BY_ROW, bool BY_COLUMN>
struct StepScales {
  static constexpr int OF_ROWS = BY_ROW ? ROW_TILES / 2 : 1;
  static constexpr int COUNT = OF_ROWS + (BY_COLUMN ? COLUMN_TILES / 4 : 0);
  typedef float Values[COUNT];  // a lane's

  // row(i): the scale of row i of the tile; column(i): of column i
  template <class Row>
  static __device__ __forceinline__ void load_rows(Values& values, const Row& row) {
    const Part part;
#pragma unroll
    for (int i = 0; i < OF_ROWS; ++i) values[i] = row(part.row + 8 * ((int)threadIdx.x % 4 + 4 * i));
  }
  template <class Column>
  static __device__ __forceinline__ void load_columns(Values& values, const Column& column) {
    const Part part;
    const int lane = (int)threadIdx.x % 32, own = part.column + lane / 8 * 8 + lane / 4 % 2;
#pragma unroll
    for (int i = OF_ROWS; i < COUNT; ++i) values[i] = column(own + 32 * (i - OF_ROWS));
  }
  // f(i, j, v, the scale of d[i][j][v]) for all sums of a lane
  template <class F>
  static __device__ __forceinline__ void for_each(const Values& values, const F& f) {
    auto of_row = [&](int i) {  // row + 8 i
      return BY_ROW ? of_lane_at<28>(values[i / 4 % OF_ROWS], i % 4) : values[0];
    };
    if constexpr (BY_COLUMN) {
      float of_rows[2 * ROW_TILES];
#pragma unroll
      for (int i = 0; i < 2 * ROW_TILES; ++i) of_rows[i] = of_row(i);
#pragma unroll
      for (int j = 0; j < 2 * COLUMN_TILES; ++j) {
        const float of_column = of_lane_at<3>(values[OF_ROWS + j / 8], 4 * (j % 8));
#pragma unroll
        for (int i = 0; i < 2 * ROW_TILES; ++i) f(i / 2, j / 2, i % 2 * 2 + j % 2, of_rows[i] * of_column);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 2 * ROW_TILES; ++i) {
        const float scale = of_row(i);
#pragma unroll
        for (int j = 0; j < 2 * COLUMN_TILES; ++j) f(i / 2, j / 2, i % 2 * 2 + j % 2, scale);
      }
    }
  }
};

struct Fragments {  // of one part of a K-step
  u32 a[ROW_TILES][4], b[COLUMN_TILES / 2][4];
};

// Loads a warp's fragments of one part of a K-step. a_at, b_at: the lane's addresses in both operands' first
// matrices, for part 0. (The swizzle changes three bits of the address that depend on the chunk number only.)
template <bool A_ACROSS, bool B_ACROSS>
__device__ __forceinline__ void load_fragments(Fragments& f, At a_at, At b_at, u32 part, u32 stage) {
#pragma unroll
  for (u32 i = 0; i < ROW_TILES; ++i)
    if (A_ACROSS)
      load_transposed_at((a_at ^ 32 * i) + stage + part * 16 * LINE, f.a[i]);
    else
      load_matrices_at((a_at ^ 32 * part) + stage + i * 16 * LINE, f.a[i]);
#pragma unroll
  for (u32 j = 0; j < COLUMN_TILES / 2; ++j)
    if (B_ACROSS)
      load_transposed_at((b_at ^ 32 * j) + stage + part * 16 * LINE, f.b[j]);
    else
      load_matrices_at((b_at ^ 32 * part) + stage + j * 16 * LINE, f.b[j]);
}

// The lane's addresses in both operands' first matrices, for part 0 of a K-step.
template <bool A_ACROSS, bool B_ACROSS>
__device__ __forceinline__ void find_fragments(At stages, At* a_at, At* b_at) {
  const u32 lane = threadIdx.x % 32;
  const Part part;
  // four 8 x 8 matrices: for a two along M, then two along K; for b two along K, then two along N
  const u32 low = lane / 8 % 2, high = lane / 16, line = lane % 8;
  const u32 a_line = A_ACROSS ? high * 8 + line : part.first_row + low * 8 + line;
  const u32 b_line = B_ACROSS ? low * 8 + line : part.first_column + high * 8 + line;
  const u32 a_piece = A_ACROSS ? low : high, b_piece = B_ACROSS ? high : low;
  const u32 a_panel = A_ACROSS ? part.first_row / 64 * (STEP * LINE) : 0;
  const u32 b_panel = B_ACROSS ? part.first_column / 64 * (STEP * LINE) : 0;
  *a_at = stages + a_panel + a_line * LINE + (a_piece ^ line) * 16;
  *b_at = stages + A_BYTES + b_panel + b_line * LINE + (b_piece ^ line) * 16;
}

__device__ __forceinline__ void add_products(Sums& d, const Fragments& f) {
#if defined KIND
#pragma unroll
  for (u32 i = 0; i < ROW_TILES; ++i)
#pragma unroll
    for (u32 j = 0; j < COLUMN_TILES; ++j) {
      const u32 b0 = f.b[j / 2][j % 2 * 2], b1 = f.b[j / 2][j % 2 * 2 + 1];
      if (KIND == BF16)
        mma_bf16(d[i][j], f.a[i], b0, b1);
      else
        mma_f16(d[i][j], f.a[i], b0, b1);
    }
#elif MULTIPLIES_CODES
#pragma unroll
  for (u32 i = 0; i < ROW_TILES; ++i)
#pragma unroll
    for (u32 j = 0; j < COLUMN_TILES; ++j)
      mma_codes<A_FMT, B_FMT>(d[i][j], f.a[i], f.b[j / 2][j % 2 * 2], f.b[j / 2][j % 2 * 2 + 1]);
#else
  // 16 codes at a time. A lane holds four adjacent codes and uses the first two as k = 2 q and the others as
  // k = 2 q + 8: the same permutation of K for both operands, which leaves the set of products unchanged.
#pragma unroll
  for (u32 half = 0; half < 2; ++half) {
    u32 b[COLUMN_TILES][2];
#pragma unroll
    for (u32 j = 0; j < COLUMN_TILES; ++j) decode4(f.b[j / 2][j % 2 * 2 + half], B_FMT, &b[j][0], &b[j][1]);
#pragma unroll
    for (u32 i = 0; i < ROW_TILES; ++i) {
      u32 a[4];
      decode4(f.a[i][2 * half], A_FMT, &a[0], &a[2]);
      decode4(f.a[i][2 * half + 1], A_FMT, &a[1], &a[3]);
#pragma unroll
      for (u32 j = 0; j < COLUMN_TILES; ++j) mma_f16(d[i][j], a, b[j][0], b[j][1]);
    }
  }
#endif
}

__device__ __forceinline__ void fill(Sums& d, float value) {
#pragma unroll
  for (u32 i = 0; i < ROW_TILES; ++i)
#pragma unroll
    for (u32 j = 0; j < COLUMN_TILES; ++j) d[i][j][0] = d[i][j][1] = d[i][j][2] = d[i][j][3] = value;
}
__device__ __forceinline__ void clear(Sums& d) { fill(d, 0.f); }

#if RESCALED
#include "mma_codes.cuh"
#endif

// Main loop, called by the whole thread block: d accumulates a tile's products over `steps` K-steps; for FP8,
// unless RESCALED, of each K-step by itself. begin(step, d) is called before the step's products, end(step,
// d) once d holds their sum; if RESCALED, in the middle of them.
template <bool A_ACROSS, bool B_ACROSS, class Begin, class End>
__device__ __forceinline__ void multiply(u8* memory, Operand<A_ACROSS, ROWS>& a,
                                         Operand<B_ACROSS, COLUMNS>& b, int steps, Sums& d,
                                         const Begin& begin, const End& end) {
  const At stages = at_of(memory);
#if RESCALED
  Codes codes(stages);
#else
  At a_at, b_at;
  find_fragments<A_ACROSS, B_ACROSS>(stages, &a_at, &b_at);
  Fragments f[BUFFERS];
#endif
  u32 to = 0, stage = 0;  // offsets of the stage to fill next, and of the stage in use
  auto after = [](u32 at) { return at + STAGE_BYTES == STAGES * STAGE_BYTES ? 0 : at + STAGE_BYTES; };
  auto fetch = [&](u32 share) {  // one of PARTS shares of the next K-step
    a.fetch(stages + to, share);
    b.fetch(stages + to + A_BYTES, share);
    if (share + 1 < PARTS) return;
    a.next();
    b.next();
    copy_async_commit();
    to = after(to);
  };
  const bool whole = __shfl_sync(0xffffffffu, a.whole && b.whole, 0);
  if (!whole) a.copy_zeros(), b.copy_zeros();
#pragma unroll 1
  for (int k = 0; k < STAGES - 1; ++k) {
    if (!whole) {
      to = after(to);
      continue;
    }
#pragma unroll
    for (u32 i = 0; i < PARTS; ++i) fetch(i);
  }
  auto turn = [&] {  // all warps have read the last K-step's fragments, and the next K-step has arrived
    copy_async_wait<STAGES - 2>();
    __syncthreads();
  };
  if (BUFFERS == 2) {
    turn();
    fetch(0);
  }
#pragma unroll 1
  for (int k = 0; k < steps;) {
    // Unaligned: the loop below for each K-step by itself. With a second loop for it NVRTC 13.0 spills, and
    // with a branch in the loop below that is a tenth slower.
    const int stop = whole ? steps : k + 1;
    if (!whole) {
      copy_async_wait<0>();
      __syncthreads();
      a.by_values().fetch_by_values(stages + stage);
      b.by_values().fetch_by_values(stages + stage + A_BYTES);
      __syncthreads();
    }
#if RESCALED
    codes.begin(stage);
#else
    if (BUFFERS == 2) load_fragments<A_ACROSS, B_ACROSS>(f[0], a_at, b_at, 0, stage);
#endif
#pragma unroll 1
    for (; k < stop; ++k) {
      begin(k, d);
#if RESCALED
#pragma unroll
      for (u32 half = 0; half < 2 * PARTS; ++half) {
        codes.load_a(half + 1, stage);
        if (half + 2 == 2 * PARTS) {  // all of this stage is in registers: it can be filled
          turn();
          stage = after(stage);
        }
        codes.load_b(half + 2, stage);
        if (half % 2 == 0) fetch((half + 2) / 2 % PARTS);
        if (half == PARTS) end(k, d);
        codes.multiply(d, half);
      }
#else
#pragma unroll
      for (u32 i = 0; i < PARTS; ++i) {
        // with two buffers, the last part's fragments are in registers: its stage can be filled
        const u32 part = (i + BUFFERS - 1) % PARTS;
        if (part == 0) {
          turn();
          if (BUFFERS == 2) stage = after(stage);
        }
        load_fragments<A_ACROSS, B_ACROSS>(f[part % BUFFERS], a_at, b_at, part, stage);
        fetch(part);
        add_products(d, f[i % BUFFERS]);
      }
      if (BUFFERS == 1) stage = after(stage);
      end(k, d);
#endif
    }
  }
  copy_async_commit();
  copy_async_wait<0>();
}

#ifndef KIND
// multiply() of FP8: sums accumulates the products times their scales. fetch(step) loads a step's scales,
// scales(values) returns what the last fetch has loaded.
template <bool BY_ROW, bool BY_COLUMN, class Fetch, class Get>
__device__ __forceinline__ void multiply_scaled(u8* memory, Operand<false, ROWS>& a,
                                                Operand<false, COLUMNS>& b, int steps, Sums& sums,
                                                const Fetch& fetch, const Get& scales) {
  typename StepScales<BY_ROW, BY_COLUMN>::Values values;
#if RESCALED
  typename Units<BY_ROW>::Memory local;
  Units<BY_ROW> units(local);
  if (steps > 0) fetch(0);
  multiply<false, false>(
      memory, a, b, steps, sums,
      [&](int k, Sums& d) {
        if (k == 0) {
          scales(values);
          units.start(values);
        }
        units.change(d);
        fetch(min(k + 1, steps - 1));
      },
      [&](int, Sums&) {
        scales(values);
        units.prepare(values);
      });
  units.end(sums);
#else
  Sums d;
  clear(d);
  multiply<false, false>(
      memory, a, b, steps, d, [&](int k, Sums&) { fetch(k); },
      [&](int, Sums& d) {
        scales(values);
        StepScales<BY_ROW, BY_COLUMN>::for_each(values, [&](int i, int j, int v, float scale) {
          sums[i][j][v] = __fmaf_rn(d[i][j][v], scale, sums[i][j][v]);
        });
        clear(d);
      });
#endif
}
#endif

__device__ __forceinline__ i64 blocks_of(i64 rows, i64 height) { return (rows + height - 1) / height; }

// The expert that contains unit `unit`, where units(rows) is an expert's number of units; called by a whole
// warp. *before: units of all earlier experts. Returns `experts` if there is none.
template <class Units>
__device__ __forceinline__ i64 find_expert(const int* offsets, i64 experts, i64 rows, i64 unit, i64* before,
                                           const Units& units) {
  const i64 lane = threadIdx.x % 32;
  i64 sum = 0;
  for (i64 e0 = 0; e0 < experts; e0 += 32) {
    const i64 e = e0 + lane;
    const i64 count = e < experts ? clamped(offsets[e + 1], rows) - clamped(offsets[e], rows) : 0;
    const i64 own_units = units(max(count, (i64)0)), end = sum + sum_up_to_here(own_units);
    const u32 after = __ballot_sync(0xffffffffu, e < experts && end > unit);
    if (after) {
      const int first = __ffs(after) - 1;
      *before = __shfl_sync(0xffffffffu, end - own_units, first);
      return e0 + first;
    }
    sum = __shfl_sync(0xffffffffu, end, 31);
  }
  *before = sum;
  return experts;
}

// Row and column of tile `tile` in a grid of `high` x `wide`: HEIGHT rows at a time, column by column.
__device__ __forceinline__ void find_tile(i64 tile, i64 high, i64 wide, i64* row, i64* column) {
  const i64 strip = tile / (HEIGHT * wide), first = strip * HEIGHT, count = min(high - first, (i64)HEIGHT);
  const i64 inside = tile - first * wide;
  *row = first + inside % count;
  *column = inside / count;
}

// Place of a value of the tile in shared memory: lanes that store the pairs of four rows, or read 16 bytes of
// a row, have no bank conflicts.
__device__ __forceinline__ int place_of(int row, int column) {
  return row * COLUMNS + (column ^ row % 4 * 8);
}

__device__ __forceinline__ float4 load_four(const void* p, i64 i, int kind) {
  if (kind == F32) return *(const float4*)((const float*)p + i);
  const uint2 v = *(const uint2*)((const u16*)p + i);
  auto value = [&](u32 bits) { return kind == BF16 ? bf16_to_float((u16)bits) : f16_to_float((u16)bits); };
  return make_float4(value(v.x), value(v.x >> 16), value(v.y), value(v.y >> 16));
}

__device__ __forceinline__ void store_four(void* p, i64 i, int kind, float4 v) {
  if (kind == F32)
    *(float4*)((float*)p + i) = v;
  else if (kind == BF16)
    *(uint2*)((u16*)p + i) = make_uint2(to_bf16x2(v.x, v.y), to_bf16x2(v.z, v.w));
  else
    *(uint2*)((u16*)p + i) = make_uint2(to_f16x2(v.x, v.y), to_f16x2(v.z, v.w));
}

// Epilogue: stores (add: accumulates) the tile to rows of `pitch` values starting at element `at`, predicated
// on `rows` and `columns`, in the dtype of `out`. The sums pass through shared memory, whose stages are no
// longer in use. Stored from registers, where a loop cannot index them, their code was so long that the
// compiler copied wgrad's to local memory first, and looped over that: four loops of 720 instructions, with a
// branch for each pair.
__device__ __forceinline__ void store_tile(const Sums& sums, u8* memory, void* out, int kind, i64 at,
                                           i64 pitch, i64 rows, i64 columns, bool add,
                                           const float* bias = nullptr) {
  static_assert(STAGES * STAGE_BYTES >= ROWS * COLUMNS * 4, "shared memory for the sums");
  float* tile = (float*)memory;
  const Part part;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < ROW_TILES; ++i)
#pragma unroll
    for (int j = 0; j < COLUMN_TILES; ++j)
#pragma unroll
      for (int below = 0; below < 2; ++below)
        *(float2*)(tile + place_of(part.row + 16 * i + 8 * below, part.column + 8 * j)) =
            make_float2(sums[i][j][2 * below], sums[i][j][2 * below + 1]);
  __syncthreads();
  constexpr int ACROSS = COLUMNS / 4, DOWN = THREADS / ACROSS;  // threads along a row, and rows at once
  const int first = (int)threadIdx.x / ACROSS, column = (int)threadIdx.x % ACROSS * 4;
  const int end = (int)min(rows, (i64)ROWS), count = (int)min(columns - column, (i64)4);
  if (kind != F64 && pitch % 4 == 0 && ((size_t)out & (kind == F32 ? 15 : 7)) == 0) {
    if (count <= 0) return;
    const float* own = bias + column;
    const float4 more = bias ? make_float4(own[0], own[1], own[2], own[3]) : make_float4(0.f, 0.f, 0.f, 0.f);
    constexpr int BATCH = 4;  // rows whose loads, if any, are issued before the first store
#pragma unroll 1
    for (int row = first; row < end; row += BATCH * DOWN) {
      float4 before[BATCH];
#pragma unroll
      for (int i = 0; i < BATCH; ++i)
        if (add && row + i * DOWN < end)
          before[i] = load_four(out, at + (row + i * DOWN) * pitch + column, kind);
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        if (row + i * DOWN >= end) continue;
        float4 v = *(const float4*)(tile + place_of(row + i * DOWN, column));
        const float4 b = before[i];
        if (add) v = make_float4(v.x + b.x, v.y + b.y, v.z + b.z, v.w + b.w);
        if (bias) v = make_float4(v.x + more.x, v.y + more.y, v.z + more.z, v.w + more.w);
        store_four(out, at + (row + i * DOWN) * pitch + column, kind, v);
      }
    }
    return;
  }
#pragma unroll 1
  for (int row = first; row < end; row += DOWN)
#pragma unroll 1
    for (int k = 0; k < count; ++k) {
      const i64 i = at + row * pitch + column + k;
      const float x = tile[place_of(row, column) + k] + (bias ? bias[column + k] : 0.f);
      store(out, i, kind, add ? x + load_wide(out, i, kind) : x);
    }
}
