// What kernels_cuda/wgmma.cuh does, in C++, for clusters of one block. Products are made at once, each thread
// its own, from where the swizzle says the codes lie.
#pragma once
#include "bulk.cuh"

struct TensorMap {  // what cuda_on_cpu passes in its place
  const u8* codes;
  i64 rows, columns, box;
  i64 unused[12];
};

inline void cluster_wait() { __syncthreads(); }
inline u32 cluster_rank() { return 0; }
inline At at_of_block(const void* p, u32) { return (At)p; }
inline bool barrier_ready_at(At barrier, u32 parity) { return (u32)((Barrier*)barrier)->phase != parity; }
inline void barrier_wait_at(At barrier, u32 parity) { barrier_wait((u64*)barrier, parity); }
inline void barrier_arrive_at(At barrier) { barrier_expect((u64*)barrier, 0); }
inline void barrier_arrive_here(u64* barrier) { barrier_expect(barrier, 0); }
inline void barrier_arrive_copied(u64* barrier) {
  auto& mine = this_thread().copies;
  sooner_or_later(awaited[barrier], [=, groups = std::move(mine)] {
    for (const auto& group : groups)
      for (const Copy& copy : group) copy();
    barrier_expect(barrier, 0);
  });
  mine.assign(1, {});
}

inline u64 swizzled(u64 address) { return address ^ (address >> 3 & 0x70); }

inline void tile_load(void* to, const TensorMap* map, int x, int y, u64* barrier, u16 blocks) {
  if ((u64)to & 1023 || blocks != 1) abort();
  sooner_or_later(awaited[barrier], [=, map = *map] {
    for (i64 r = 0; r < map.box; ++r)
      for (i64 c = 0; c < 128; ++c) {
        const bool inside = y + r >= 0 && y + r < map.rows && x + c >= 0 && x + c < map.columns;
        *(u8*)swizzled((u64)to + r * 128 + c) = inside ? map.codes[(y + r) * map.columns + x + c] : 0;
      }
    bytes_came(barrier, (u32)map.box * 128);
  });
}
inline void prefetch_map(const TensorMap*) {}
inline bool elected() { return threadIdx.x % 32 == 0; }
inline void store_counted_at(At to, u32 value, At barrier) {
  sooner_or_later(awaited[(u64*)barrier], [=] {
    *(u32*)to = value;
    bytes_came((u64*)barrier, 4);
  });
}

typedef u64 Tile;
inline Tile tile_at(At at) { return at >> 4; }
template <int COUNT>
void more_registers() {}
template <int COUNT>
void fewer_registers() {}
inline void products_begin() {}
inline void products_commit() {}
template <int LEFT>
void products_wait() {}
template <int COUNT>
void products_seen(float (&)[COUNT]) {}

inline void named_wait(u32 name, u32 count) {
  Meeting& mine = named[name << 16 | count];
  mine.members = count;
  mine.wait();
}

inline void store_matrices_at(At at, u32 a, u32 b, u32 c, u32 d) {
  const u32 lane = threadIdx.x % 32, words[4] = {a, b, c, d};
  for (u32 m = 0; m < 4; ++m) ((u32*)__shfl_sync(0xffffffffu, at, 8 * m + lane / 4))[lane % 4] = words[m];
}
inline void store2_at(At at, float2 v) { *(float2*)at = v; }
inline void add_floats(float* to, float2 v) { to[0] += v.x, to[1] += v.y; }
inline void add_floats(float* to, float4 v) { to[0] += v.x, to[1] += v.y, to[2] += v.z, to[3] += v.w; }

inline const float* decoded(int fmt) {  // every code's value
  static float all[2][256];
  if (all[fmt][1] == 0)
    for (u32 code = 0; code < 256; ++code) all[fmt][code] = decode(code, fmt);
  return all[fmt];
}

template <int A, int B>
void product(float (&d)[64], Tile a, Tile b, bool add) {
  auto row_of = [](Tile tile, u32 row, int fmt, float* values) {
    const float* of_code = decoded(fmt);
    for (u32 k = 0; k < 32; ++k)
      values[k] = of_code[*(const u8*)swizzled((tile << 4) + row / 8 * 1024 + row % 8 * 128 + k)];
  };
  const u32 lane = threadIdx.x % 32, top = threadIdx.x % 128 / 32 * 16 + lane / 4;
  float rows[2][32], column[32];
  row_of(a, top, A, rows[0]);
  row_of(a, top + 8, A, rows[1]);
  for (u32 i = 0; i < 32; ++i) {
    row_of(b, i / 2 * 8 + lane % 4 * 2 + i % 2, B, column);
    for (u32 low = 0; low < 2; ++low) {
      float& sum = d[i / 2 * 4 + low * 2 + i % 2];
      if (!add) sum = 0;
      for (u32 k = 0; k < 32; ++k) sum += rows[low][k] * column[k];
    }
  }
}

#define PIECE_BYTES 8192
inline Tile tile_mn_major_at(At at) { return at >> 4; }

// Value k of row or column i of a tile of 16-bit values, as the tensor cores find it.
template <int TYPE, bool MN>
float value_16(Tile tile, u32 i, u32 k) {
  const u64 in_rows = i / 8 * 1024 + i % 8 * 128 + 2 * k;
  const u64 in_pieces = i / 64 * PIECE_BYTES + k / 8 * 1024 + k % 8 * 128 + 2 * (i % 64);
  return load((const void*)swizzled((tile << 4) + (MN ? in_pieces : in_rows)), 0, TYPE);
}

template <int WIDTH, int TYPE, bool A_MN, bool B_MN>
void product_16(float (&d)[128], Tile a, Tile b) {
  const u32 lane = threadIdx.x % 32, top = threadIdx.x % 128 / 32 * 16 + lane / 4;
  float rows[2][16];
  for (u32 k = 0; k < 16; ++k)
    for (u32 low = 0; low < 2; ++low) rows[low][k] = value_16<TYPE, A_MN>(a, top + 8 * low, k);
  for (u32 i = 0; i < WIDTH / 4; ++i) {
    float column[16];
    for (u32 k = 0; k < 16; ++k) column[k] = value_16<TYPE, B_MN>(b, i / 2 * 8 + lane % 4 * 2 + i % 2, k);
    for (u32 low = 0; low < 2; ++low)
      for (u32 k = 0; k < 16; ++k) d[i / 2 * 4 + low * 2 + i % 2] += rows[low][k] * column[k];
  }
}
