// kernels_cuda/gemm/wgmma.cuh in C++. Each thread computes its own products, with codes at their swizzled
// addresses, immediately or when it waits for them.
#pragma once
#include "bulk.cuh"

struct TensorMap {  // cuda_on_cpu passes this instead of a CUtensorMap
  const u8* codes;
  i64 rows, columns, box;
  i64 unused[12];
};

inline void cluster_wait(CALLER) { wait_for_cluster(line); }
inline u32 cluster_rank() { return rank_of_block(); }
inline At at_of_block(const void* p, u32 block) {
  return (At)((u8*)p - dynamic_shared[rank_of_block()] + dynamic_shared[block]);
}
inline bool barrier_ready_at(At barrier, u32 parity, CALLER) {
  return phase_is_complete((void*)barrier, parity, line);
}
inline void barrier_wait_at(At barrier, u32 parity, CALLER) { wait_for_phase((void*)barrier, parity, line); }
inline void barrier_arrive_at(At barrier, CALLER) { barrier_expect((u64*)barrier, 0, line); }
inline void barrier_arrive_here(u64* barrier, CALLER) { barrier_expect(barrier, 0, line); }
inline void barrier_arrive_copied(u64* barrier, CALLER) {
  auto& copies = this_thread().copies;
  begin_operation([=, groups = std::move(copies)] {
    for (const auto& group : groups)
      for (const Copy& copy : group) copy();
    arrive(barrier, 0, line);
  });
  copies.assign(1, {});
  end_turn_perhaps();
}

inline u64 swizzled(u64 address) { return address ^ (address >> 3 & 0x70); }

inline void tile_load(void* to, const TensorMap* map, int x, int y, u64* barrier, u16 blocks, CALLER) {
  if ((u64)to & 1023 || blocks == 0 || blocks >> blocks_of_cluster)
    give_up_at("TMA does not support this tile", line);
  for (u32 block = 0; block < blocks_of_cluster; ++block) {
    if (!(blocks == 1 ? block == rank_of_block() : blocks >> block & 1)) continue;
    u8* there = (u8*)at_of_block(to, block);
    counted_copy(there, (u32)map->box * 128, (u64*)at_of_block(barrier, block), line, [=, map = *map] {
      for (i64 r = 0; r < map.box; ++r)
        for (i64 c = 0; c < 128; ++c) {
          const bool inside = y + r >= 0 && y + r < map.rows && x + c >= 0 && x + c < map.columns;
          *(u8*)swizzled((u64)there + r * 128 + c) = inside ? map.codes[(y + r) * map.columns + x + c] : 0;
        }
    });
  }
  end_turn_perhaps();
}
inline void prefetch_map(const TensorMap*) {}
inline bool elected() { return threadIdx.x % 32 == elected_lane; }
inline void store_counted_at(At to, int4 value, At barrier, CALLER) {
  counted_copy((void*)to, 16, (u64*)barrier, line, [=] { *(int4*)to = value; });
  end_turn_perhaps();
}

typedef u64 Tile;
inline Tile tile_at(At at) { return at >> 4; }
template <int COUNT>
void more_registers() {}
template <int COUNT>
void fewer_registers() {}
inline void products_begin() {}
// Products run in order, because they add to the same sums.
template <class Work>
void make_product(const Work& work) {
  auto& groups = this_thread().products;
  if (groups.size() == 1 && groups[0].empty())
    run_or_defer(groups[0], work);
  else
    groups.back().push_back(work);
}
inline void products_commit() { this_thread().products.push_back({}); }
template <int LEFT>
void products_wait() {
  end_turn_perhaps();
  auto& groups = this_thread().products;
  while (groups.size() > LEFT + 1) {
    for (const auto& product : groups.front()) product();
    groups.erase(groups.begin());
  }
}
template <int COUNT>
void products_seen(float (&)[COUNT]) {}

inline void named_wait(u32 name, u32 count, CALLER) { wait_for_named(name, count, line); }

inline void store_matrices_at(At at, u32 a, u32 b, u32 c, u32 d, CALLER) {
  const At* rows = warp_values(at, line);
  const u32 lane = threadIdx.x % 32, words[4] = {a, b, c, d};
  for (u32 m = 0; m < 4; ++m) ((u32*)rows[8 * m + lane / 4])[lane % 4] = words[m];
}
inline void store2_at(At at, float2 v) { *(float2*)at = v; }
inline void add_floats(float* to, float2 v) { to[0] += v.x, to[1] += v.y; }
inline void add_floats(float* to, float4 v) { to[0] += v.x, to[1] += v.y, to[2] += v.z, to[3] += v.w; }

inline const float* decoded(int fmt) {  // the values of all codes
  static float all[2][256];
  if (all[fmt][1] == 0)
    for (u32 code = 0; code < 256; ++code) all[fmt][code] = decode(code, fmt);
  return all[fmt];
}

template <int A, int B>
void product_now(float (&d)[64], Tile a, Tile b, bool add) {
  auto row_of = [](Tile tile, u32 row, int fmt, float* values) {
    const float* of_code = decoded(fmt);
    const u64 at = (u64)async_view((const u8*)(tile << 4)) + row / 8 * 1024 + row % 8 * 128;
    for (u32 k = 0; k < 32; ++k) values[k] = of_code[*(const u8*)swizzled(at + k)];
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

template <int A, int B>
void product(float (&d)[64], Tile a, Tile b, bool add) {
  make_product([=, &d] { product_now<A, B>(d, a, b, add); });
}

#define PIECE_BYTES 8192
inline Tile tile_mn_major_at(At at) { return at >> 4; }

// Value k of row or column i of a tile of 16-bit values, at the address from which the tensor cores read it.
template <int TYPE, bool MN>
float value_16(Tile tile, u32 i, u32 k) {
  const u64 in_rows = i / 8 * 1024 + i % 8 * 128 + 2 * k;
  const u64 in_pieces = i / 64 * PIECE_BYTES + k / 8 * 1024 + k % 8 * 128 + 2 * (i % 64);
  const u64 at = (u64)async_view((const u8*)(tile << 4));
  return load((const void*)swizzled(at + (MN ? in_pieces : in_rows)), 0, TYPE);
}

template <int WIDTH, int TYPE, bool A_MN, bool B_MN>
void product_16_now(float (&d)[128], Tile a, Tile b, bool add) {
  const u32 lane = threadIdx.x % 32, top = threadIdx.x % 128 / 32 * 16 + lane / 4;
  float rows[2][16];
  for (u32 k = 0; k < 16; ++k)
    for (u32 low = 0; low < 2; ++low) rows[low][k] = value_16<TYPE, A_MN>(a, top + 8 * low, k);
  for (u32 i = 0; i < WIDTH / 4; ++i) {
    float column[16];
    for (u32 k = 0; k < 16; ++k) column[k] = value_16<TYPE, B_MN>(b, i / 2 * 8 + lane % 4 * 2 + i % 2, k);
    for (u32 low = 0; low < 2; ++low) {
      float& sum = d[i / 2 * 4 + low * 2 + i % 2];
      if (!add) sum = 0;
      for (u32 k = 0; k < 16; ++k) sum += rows[low][k] * column[k];
    }
  }
}
template <int WIDTH, int TYPE, bool A_MN, bool B_MN>
void product_16(float (&d)[128], Tile a, Tile b, bool add) {
  make_product([=, &d] { product_16_now<WIDTH, TYPE, A_MN, B_MN>(d, a, b, add); });
}
