// Tiles of 128 rows by 128 columns that are quantised and written transposed: where their rows lie, and the
// way through shared memory that makes whole lines of the result. (What transpose.cu moves has ways of its
// own, which with these, whose tiles hold more and take longer, are slower: kernels_cuda/README.md.)
//
// A block is 16 warps; warp w has chunk w, 8 successive rows; lane l has columns 4 l to 4 l + 3.
#pragma once
#include "fp8.cuh"

#define TILE 128
#define CHUNK_ROWS 8
#define CHUNKS 16
#define TILE_THREADS (32 * CHUNKS)
// Blocks on a multiprocessor, whose shared memory holds no second one on sm_89 and sm_120.
#define TILE_BLOCKS (__CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200 ? 2 : 1)

// ---- the way through the tiles
//
// As many blocks as fit at once make tiles in turn, one column of tiles after the other, from above to below:
// what is written at a time lies together, and lines that two tiles share are whole before they leave L2. If
// they have many, a block takes its next one when it is free, so that none falls behind. A row of tiles is a
// strip of 128 rows, or four of 32, and no strip crosses an expert: strips are numbered through all experts.

struct __align__(16) Place {  // of a tile
  int base[4], count[4];      // of its strips: the first row, and how many
  int row, column;            // in tiles; row -1: there is none
};

// What a block knows of all strips. The table, in shared memory, has for each expert its first strip, its
// first row, and the row behind its last.
struct Strips {
  const int* offsets;
  const int* table;
  int ranges, height, total;  // how many strips there are
  i64 rows;
};

#define PLACES 4  // that a block keeps

// Whether it is the last of a line: in the order of the tiles the line is done with, then.
template <class T>
__device__ __forceinline__ bool ends_line(const T* p) {
  return (size_t)p % 128 == 128 - sizeof(T);
}

// How many strips, of so many rows each, the rows from `lo` to `hi` make.
__device__ __forceinline__ int strips_between(int lo, int hi, int height) {
  return hi > lo ? (hi - lo + height - 1) / height : 0;
}

// Fill the table; the whole block takes part, E offsets are read at once (a table made beforehand would be a
// launch of 3 us), by 256 threads of it. The rows behind the last expert, and before the first, come after
// all others, as if they were two more; *used, in shared memory, is where their strips begin.
__device__ __forceinline__ Strips find_strips(const int* offsets, i64 experts, i64 rows, int height,
                                              int* table, int* used) {
  __shared__ int sums[8];
  const int t = threadIdx.x, lane = t % 32, warp = t / 32;
  const int ranges = offsets ? (int)experts + 2 : 0;
  if (t == 0) *used = 0x7fffffff;
  int before = 0;  // strips of the experts of earlier rounds
  for (int e0 = 0; e0 < ranges; e0 += 256) {
    const int e = t < 256 ? e0 + t : ranges;
    int lo = 0, hi = 0;
    if (e < ranges) {
      lo = e <= experts ? (int)clamped(offsets[e], rows) : 0;
      hi = (int)(e < experts    ? clamped(offsets[e + 1], rows)
                 : e == experts ? rows
                                : clamped(offsets[0], rows));
    }
    const int mine = strips_between(lo, hi, height);
    int total = sum_up_to_here(mine);
    if (lane == 31 && warp < 8) sums[warp] = total;
    __syncthreads();
    for (int w = 0; w < 8; ++w) {
      if (w < warp) total += sums[w];
    }
    if (e < ranges) {
      table[e] = before + total - mine;
      table[ranges + e] = lo;
      table[2 * ranges + e] = max(lo, hi);
      if (e == experts) *used = before + total - mine;
    }
    for (int w = 0; w < 8; ++w) before += sums[w];
    __syncthreads();
  }
  __syncthreads();
  if (!offsets) before = (int)((rows + height - 1) / height);
  return {offsets, table, ranges, height, before, rows};
}

// By a whole warp: how many of the strips' experts begin at or before this one is counted, not searched for;
// that is a chain of one load, not of one for every halving.
__device__ __forceinline__ void find_strip(const Strips& s, int strip, int* base, int* count) {
  int first = strip * s.height, end = (int)s.rows;
  if (s.offsets) {
    int e = -1;  // its expert
    for (int e0 = 0; e0 < s.ranges; e0 += 32) {
      const int mine = e0 + threadIdx.x % 32;
      e += __popc(__ballot_sync(0xffffffffu, mine < s.ranges && s.table[mine] <= strip));
    }
    first = e < 0 ? 0 : s.table[s.ranges + e] + (strip - s.table[e]) * s.height;
    end = e < 0 ? 0 : s.table[2 * s.ranges + e];
  }
  *base = min(first, (int)s.rows);
  *count = (int)clamped((i64)end - first, s.height);
}

// A block's tiles, by turn: which it makes, and where they lie. `taken`: how many have been taken beyond the
// first two of each block, 0 from the launch before this one; null: the turns are fixed.
struct Turns {
  Strips strips;
  Place* places;  // [PLACES] in shared memory
  int* taken;
  u32 down, across, claim;  // in tiles; warp 7, lane 0: the next tile that was taken

  __device__ __forceinline__ Turns(const Strips& s, i64 columns, Place* p, int* t)
      : strips(s),
        places(p),
        taken(t),
        down((s.total + TILE / s.height - 1) / (TILE / s.height)),
        across((u32)((columns + TILE - 1) / TILE)) {}
  __device__ __forceinline__ Place& place(u32 turn) const { return places[turn % PLACES]; }
  __device__ __forceinline__ bool has(u32 turn) const { return place(turn).row >= 0; }

  // Warp 7 looks up where the tile of a turn lies, turn by turn.
  __device__ __forceinline__ void find(u32 turn) {
    u32 tile = blockIdx.x + turn * gridDim.x;
    if (taken && turn > 1) {
      tile = __shfl_sync(0xffffffffu, claim, 0);
      take();
    }
    const bool leads = threadIdx.x % 32 == 0;
    Place& p = place(turn);
    if (tile >= down * across) {
      if (leads) p.row = -1;
      return;
    }
    const u32 column = tile / down, row = tile - column * down;
    for (u32 q = 0; q < TILE / strips.height; ++q) {
      int base, count;
      find_strip(strips, (int)(row * (TILE / strips.height) + q), &base, &count);
      if (leads) p.base[q] = base, p.count[q] = count;
    }
    if (leads) p.row = (int)row, p.column = (int)column;
  }

  __device__ __forceinline__ void take() {
    if (taken && threadIdx.x % 32 == 0) claim = 2 * gridDim.x + atomicAdd(taken, 1);
  }

  // Before the first turn, by the whole block: its rows are looked up, and its tile is fetched.
  template <class Look, class Fetch>
  __device__ __forceinline__ void start(Look& look, Fetch& fetch) {
    if (threadIdx.x / 32 == 7) {
      find(0);
      find(1);
    }
    __syncthreads();
    look(0);
    __syncthreads();
    fetch(0);
    if (threadIdx.x / 32 == 7) {
      pdl_wait();
      take();
    }
  }

  // At the top of every turn, by the whole block: behind the next barrier it is known what comes next but
  // one.
  __device__ __forceinline__ void begin(u32 turn) {
    if (threadIdx.x / 32 == 7) find(turn + 2);
  }

  // Row `t` of a tile, or -1.
  __device__ __forceinline__ int row(u32 turn, u32 t) const {
    const Place& p = place(turn);
    const u32 q = t / strips.height, inside = t % strips.height;
    return (int)inside < p.count[q] ? p.base[q] + (int)inside : -1;
  }
};

// The scales of strips that there is room for, and no tile.
__device__ __forceinline__ void clear_scales(const Turns& turns, i64 strips, i64 columns, int size,
                                             void* scales) {
  const i64 first = (i64)turns.down * (TILE / turns.strips.height) * columns * size / 4;
  const i64 end = strips * columns * size / 4, step = (i64)gridDim.x * blockDim.x;
  for (i64 i = first + (i64)blockIdx.x * blockDim.x + threadIdx.x; i < end; i += step) ((u32*)scales)[i] = 0u;
}

// Where a column's 8 rows of a chunk lie in shared memory [TILE columns][TILE rows]: swizzled by 8 bytes, so
// that lanes with four columns each, which lie TILE apart, meet no bank twice.
__device__ __forceinline__ u8* staged(u8* stage, int column, int chunk) {
  return stage + column * TILE + ((chunk ^ (column / 4 & 15)) * CHUNK_ROWS);
}

// out [columns, rows]: each column's segment of the tile, eight lanes a segment, so that whole lines go out.
// A lane has chunks 2 (lane % 8) and the next of each: `count` rows from `base` on. columns is a multiple of
// 16.
__device__ __forceinline__ void write_columns(u8* stage, int base, int count, i64 first_column, i64 columns,
                                              i64 rows, u8* out) {
  const u32 lane = threadIdx.x % 32, first = threadIdx.x / 32 * 8 + lane / 8;
  if (count <= 0 || first_column + threadIdx.x / 32 * 8 >= columns) return;
  u8* to = out + (first_column + first) * rows + base;
  const bool whole = count == 2 * CHUNK_ROWS && (((size_t)out | rows | base) & 15) == 0;
#pragma unroll
  for (int i = 0; i < 2; ++i, to += 4 * rows) {
    const int column = first + 4 * i;
    const uint2 low = *(const uint2*)staged(stage, column, lane % 8 * 2);
    const uint2 high = *(const uint2*)staged(stage, column, lane % 8 * 2 + 1);
    if (whole) {
      __stcs((uint4*)to, make_uint4(low.x, low.y, high.x, high.y));
    } else {
#pragma unroll 1
      for (int r = 0; r < count; ++r) {
        const u32 word = r < 4 ? low.x : r < 8 ? low.y : r < 12 ? high.x : high.y;
        to[r] = (u8)(word >> (r % 4 * 8));
      }
    }
  }
}

// A tile on its way to shared memory, [TILE rows][TILE * SIZE bytes]; zeros where it has no row, or one from
// `last` on. x: the tile's first column.
template <int SIZE, bool MXFP8>
__device__ __forceinline__ void fetch_tile(u8* in, const Place& place, i64 last, const u8* x, u32 row_bytes) {
  const u32 vectors = TILE * SIZE / 16, t = threadIdx.x;  // a thread has one column of vectors
  const u32 step = TILE_THREADS / vectors, first = t / vectors;
  // once: behind every copy they would be read again
  const int4 bases = *(const int4*)place.base, counts = *(const int4*)place.count;
  const int base[4] = {bases.x, bases.y, bases.z, bases.w}, end = (int)last;
  const int count[4] = {counts.x, counts.y, counts.z, counts.w};
  in += t * 16;
  x += t % vectors * 16;
#pragma unroll
  for (u32 k = 0; k < TILE / step; ++k) {
    const u32 q = MXFP8 ? step * k / 32 : 0;
    const int inside = (int)(first + step * k - 32 * q), row = base[q] + inside;
    copy_async16(in + TILE_THREADS * 16 * k, x + (u64)(u32)row * row_bytes, inside < count[q] && row < end);
  }
}

// Strip of its tile that a chunk is in, 32 * this behind the tile's first row.
__device__ __forceinline__ int strip_of_chunk(int chunk, int mx) { return mx ? chunk * CHUNK_ROWS / 32 : 0; }

struct __align__(16) TileShared {
  u32 largest[CHUNKS][TILE];  // of a chunk's columns, as the bits of floats
  float row_factors[TILE], factors[4][TILE];
};

// Four numbers as they lie in shared memory.
template <int FROM>
__device__ __forceinline__ void four_of(const u8* p, float* v) {
  if (FROM == F32) {
    const float4 w = *(const float4*)p;
    v[0] = w.x, v[1] = w.y, v[2] = w.z, v[3] = w.w;
  } else {
    const uint2 w = *(const uint2*)p;
    const u32 halves[4] = {w.x & 0xffffu, w.x >> 16, w.y & 0xffffu, w.y >> 16};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      v[i] = FROM == BF16 ? bf16_to_float((u16)halves[i]) : f16_to_float((u16)halves[i]);
  }
}

// A warp's chunk of a tile, four columns a lane, zeros where there is no row: its rows, and the largest of a
// lane's part of a row, as an integer with the same order, of which float_bits makes the bits of a float.
struct FloatChunk {
  float v[CHUNK_ROWS][4];
  __device__ __forceinline__ void load(int i, const u8* p) { four_of<F32>(p, v[i]); }
  __device__ __forceinline__ void row(int i, float (&x)[4]) const {
#pragma unroll
    for (int c = 0; c < 4; ++c) x[c] = v[i][c];
  }
  __device__ __forceinline__ u32 top_of_row(int i) const {
    return __float_as_uint(larger_or_nan(larger_or_nan(fabsf(v[i][0]), fabsf(v[i][1])),
                                         larger_or_nan(fabsf(v[i][2]), fabsf(v[i][3]))));
  }
  static __device__ __forceinline__ u32 float_bits(u32 top) { return top; }
  __device__ __forceinline__ float4 tops_of_columns() const {
    float top[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int i = 0; i < CHUNK_ROWS; ++i)
#pragma unroll
      for (int c = 0; c < 4; ++c) top[c] = larger_or_nan(top[c], fabsf(v[i][c]));
    return make_float4(top[0], top[1], top[2], top[3]);
  }
};

// The same of 16 bits, whose magnitudes are compared as integers, two at a time.
template <int FROM>
struct PairChunk {
  uint2 v[CHUNK_ROWS];
  __device__ __forceinline__ void load(int i, const u8* p) { v[i] = *(const uint2*)p; }
  __device__ __forceinline__ void row(int i, float (&x)[4]) const { four_of<FROM>((const u8*)&v[i], x); }
  __device__ __forceinline__ uint2 sizes(int i) const {
    return make_uint2(v[i].x & 0x7fff7fffu, v[i].y & 0x7fff7fffu);
  }
  __device__ __forceinline__ u32 top_of_row(int i) const {
    const u32 both = larger_u16s(sizes(i).x, sizes(i).y);
    return max(both, both << 16);
  }
  static __device__ __forceinline__ u32 float_bits(u32 top) {
    return FROM == BF16 ? top & 0xffff0000u : __float_as_uint(f16_to_float((u16)(top >> 16)));
  }
  __device__ __forceinline__ float4 tops_of_columns() const {
    uint2 top = sizes(0);
#pragma unroll
    for (int i = 1; i < CHUNK_ROWS; ++i) {
      const uint2 next = sizes(i);
      top = make_uint2(larger_u16s(top.x, next.x), larger_u16s(top.y, next.y));
    }
    float x[4];
    four_of<FROM>((const u8*)&top, x);
    return make_float4(x[0], x[1], x[2], x[3]);
  }
};

// What a tile of FROM is quantised from.
template <int FROM>
struct ChunkOf {
  typedef PairChunk<FROM> Type;
};
template <>
struct ChunkOf<F32> {
  typedef FloatChunk Type;
};

// A tile that is quantised both ways from one read. v: this warp's chunk. Row-wise blocks go to row_codes
// [rows, columns] and row_scales (null: not wanted), column-wise ones, of the strips before `used`, to codes
// [columns, rows] and scales [strips, columns].
template <class Chunk>
__device__ __forceinline__ void quantize_tile(const Chunk& v, Rule rule, const Place& place, i64 used,
                                              i64 strips, i64 columns, i64 rows, u8* row_codes,
                                              void* row_scales, u8* codes, void* scales, u8* stage,
                                              TileShared& s) {
  const u32 t = threadIdx.x, lane = t % 32, warp = t / 32;
  const int mx = rule.mx;
  const i64 first_column = (i64)place.column * TILE, first_strip = (i64)place.row * (mx ? 4 : 1);
  const int q = strip_of_chunk(warp, mx), inside = warp * CHUNK_ROWS - 32 * q;
  const bool last_column = first_column + TILE >= columns;
  float scale;
  u8 exponent;
  if (row_codes) {
    const int base = place.base[q] + inside, count = (int)clamped(place.count[q] - inside, CHUNK_ROWS);
    const i64 blocks = columns / (mx ? 32 : TILE);
    u8* to = row_codes + base * columns + first_column + 4 * lane;
    u32 mine = 0;
#pragma unroll
    for (int i = 0; i < CHUNK_ROWS; ++i) {
      u32 top = v.top_of_row(i);
      if (mx) {
        top = max(top, __shfl_xor_sync(0xffffffffu, top, 4));
        top = max(top, __shfl_xor_sync(0xffffffffu, top, 2));
        top = max(top, __shfl_xor_sync(0xffffffffu, top, 1));
        const float f = block_scale(v.float_bits(top), rule, &scale, &exponent);
        float x[4];
        v.row(i, x);
        const u32 four = encode4(x[0] * f, x[1] * f, x[2] * f, x[3] * f, rule.fmt);
        if (i < count) *(u32*)to = four;
        to += columns;
        u8* at = (u8*)row_scales + (base + i) * blocks + (first_column + 4 * lane) / 32;
        if (i < count && lane % 8 == 0) store_kept(at, exponent, last_column || ends_line(at));
      } else {
        top = __reduce_max_sync(0xffffffffu, top);
        if (lane == i) mine = top;
      }
    }
    if (!mx) {  // a lane makes the scale of a row
      float* factors = s.row_factors + warp * CHUNK_ROWS;
      const float factor = block_scale(v.float_bits(mine), rule, &scale, &exponent);
      if (lane < CHUNK_ROWS) factors[lane] = factor;
      float* at = (float*)row_scales + (base + lane) * blocks + first_column / TILE;
      if (lane < count) store_kept(at, scale, last_column || ends_line(at));
      __syncwarp();
      const float4 near = *(const float4*)factors, far = *(const float4*)(factors + 4);
      const float by[CHUNK_ROWS] = {near.x, near.y, near.z, near.w, far.x, far.y, far.z, far.w};
#pragma unroll
      for (int i = 0; i < CHUNK_ROWS; ++i) {
        // made of every row: with the products, too, under `count` the addresses were made anew for each
        float x[4];
        v.row(i, x);
        const u32 four = encode4(x[0] * by[i], x[1] * by[i], x[2] * by[i], x[3] * by[i], rule.fmt);
        if (i < count) *(u32*)to = four;
        to += columns;
      }
    }
  }
  if (!codes) return;
  *(float4*)&s.largest[warp][4 * lane] = v.tops_of_columns();
  __syncthreads();
  const u32 parts = mx ? 4 : 1, chunks = CHUNKS / parts;
  for (u32 k = t; k < parts * TILE; k += TILE_THREADS) {  // a thread makes the scale of a column
    const u32 part = k / TILE, c = k % TILE;
    const i64 strip = first_strip + part;
    u32 largest = 0;
    for (u32 j = 0; j < chunks; ++j) largest = max(largest, s.largest[part * chunks + j][c]);
    s.factors[part][c] = block_scale(largest, rule, &scale, &exponent);
    if (strip >= strips) continue;
    const bool there = place.count[part] > 0 && strip < used;
    if (mx)
      ((u8*)scales)[strip * columns + first_column + c] = there ? exponent : 0;
    else
      ((float*)scales)[strip * columns + first_column + c] = there ? scale : 0.f;
  }
  __syncthreads();
  const float4 factor = *(const float4*)&s.factors[q][4 * lane];
  const float by[4] = {factor.x, factor.y, factor.z, factor.w};
  u8* my_stage = staged(stage, 4 * lane, warp);
  u32 words[2][4];
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    float x[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) v.row(4 * k + i, x[i]);
#pragma unroll
    for (int c = 0; c < 4; ++c)
      words[k][c] = encode4(x[0][c] * by[c], x[1][c] * by[c], x[2][c] * by[c], x[3][c] * by[c], rule.fmt);
  }
#pragma unroll
  for (int c = 0; c < 4; ++c) *(uint2*)(my_stage + c * TILE) = make_uint2(words[0][c], words[1][c]);
  __syncthreads();
  const int r = mx ? lane % 8 / 2 : 0, from = (mx ? lane % 2 : lane % 8) * (2 * CHUNK_ROWS);
  const int wanted = first_strip + r < used ? (int)clamped(place.count[r] - from, 2 * CHUNK_ROWS) : 0;
  write_columns(stage, place.base[r] + from, wanted, first_column, columns, rows, codes);
}
