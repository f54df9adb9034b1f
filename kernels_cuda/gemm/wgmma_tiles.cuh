// Shared by the grouped GEMMs on Hopper's tensor cores (sm_90a) for all operand types: tile scheduler,
// pipeline stages and epilogue stores. Empty for other architectures.
//
// Persistent thread blocks process output tiles of 128 x 256. Two consumer warpgroups compute. The third
// warpgroup holds the producer warps: one thread loads K-steps of both operands by TMA, up to STAGES ahead,
// and two warps store finished tiles from shared memory while the next tile is computed.
//
// Dynamic schedule: each cluster claims its next tile one tile ahead, from a counter in global memory that is
// zero at launch. A concurrent kernel that occupies some SMs then costs only their share of the time; with a
// static schedule, the tiles of clusters that could not start ran after all others, at 1.7 times the time.
// The lane that claims a tile locates its expert, row and column once, after it has requested the first
// K-steps of the tile before, and publishes them to each thread block: when every warp located them between
// two tiles, a tile took 0.6 us longer. The same lane requests K-steps, and must return to that before the
// stages in flight are consumed: with a binary search per thread block it took 4400 cycles, and consumers
// waited for 1400.
//
// The CLUSTER thread blocks of a cluster process vertically adjacent tiles and share the column operand: each
// loads its part and multicasts it. This reads a fifth less from L2 than horizontally adjacent tiles; the
// kernel is power-limited, and time fell by 2 %. In an expert's last row of tiles, if it has no partner, they
// process horizontally adjacent tiles and share the row operand. The last tiles, if they occupy at most half
// of the clusters, are split into two halves.
//
// The FP8 and the 16-bit pipeline define before including this file: STAGES, pipeline depth; STAGE_SCALES,
// floats per stage; FULL_ARRIVALS, arrival count of a full stage; PRODUCER_WARPS, producer and store warps;
// HALF_TILES, whether an expert's last tile may have 64 rows; PARTS of a tile that are handed over
// separately; TILE_BYTES of shared memory for finished tiles, in BUFFERS buffers.
#pragma once
#include "wgmma.cuh"

#ifndef CLUSTER
#define CLUSTER 2
#endif

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define ROWS 128
#define COLUMNS 256
#define STEP_BYTES 128
#define A_BYTES (ROWS * STEP_BYTES)
#define B_BYTES (COLUMNS * STEP_BYTES)
#define STAGE_BYTES (A_BYTES + B_BYTES)
#define PITCH 528        // row pitch in bytes of a staged output row, 256 16-bit values
#define WIDE_PITCH 1056  // the same for 32-bit values; both avoid bank conflicts
// Rows of tiles processed together so that their operands stay in L2: HEIGHT for wgrad, IN_L2 bytes for the
// forward. With 16 for both, 7168 x 2048 and x 3072 took 1.4 and 0.8 % longer.
#ifndef HEIGHT
#define HEIGHT 16
#endif
#ifndef IN_L2
#define IN_L2 (15 << 20)
#endif
#ifndef GATHER
#define GATHER 0
#endif
#ifndef ADDEND
#define ADDEND 0
#endif
#define TURNS 4  // ring of scheduled tiles per cluster
#define CONSUMER_THREADS 256
#define WRITERS 64
#ifndef ARRIVING
// arriving lanes per warp; racecheck needs all 32, as it does not track arrivals on behalf of a warp
#define ARRIVING 1
#endif

// Declares a value warp-uniform, so that the compiler keeps it in uniform registers, from which wgmma reads
// its descriptors; otherwise it inserts a move before each wgmma. Bounds of enclosing loops must be uniform
// as well.
template <class T>
__device__ __forceinline__ T uniform(T value) {
  return __shfl_sync(0xffffffffu, value, 0);
}

// A tile as one thread block of the cluster computes it.
struct WorkTile {
  int number;  // as the cluster claimed it; inverted, hence negative: only the upper half of it
  int expert;
  int row;              // first row
  int column_and_pair;  // first column, a multiple of 8, + 1 if the cluster's tiles are vertically adjacent
  __device__ __forceinline__ int column() const { return column_and_pair & ~1; }
  __device__ __forceinline__ bool below() const { return column_and_pair & 1; }
};

struct Shared {
  u8* operands;                        // [STAGES][STAGE_BYTES]: rows of a, then of b
  float* scales;                       // [STAGES][STAGE_SCALES]
  u8* tile;                            // [TILE_BYTES]
  int* offsets;                        // [experts + 1]
  int* first;                          // [experts + 1]: prefix sum of the experts' `units`
  u8* half;                            // [experts], for HALF_TILES: whether the last tile has at most 64 rows
  u64 *full, *empty, *made, *written;  // mbarriers: [STAGES] of the stages, [PARTS] of the tile
  u64 *known, *seen;                   // mbarriers: [TURNS]
  u64* gathered;                       // mbarriers, with GATHER: [STAGES]
  u64* added;                          // mbarriers, with ADDEND: [PARTS]
  WorkTile* turns;                     // [TURNS]: the tile of that turn
};

struct Turn {  // pipeline state: stage, parity, K-steps so far
  u32 stage = 0, phase = 0, step = 0;
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, phase ^= 1u;
    ++step;
  }
};

// Prologue, called by the whole thread block: lays out shared memory, fills the experts' table, initialises
// the barriers. offsets: null for one expert with all rows. units(rows): an expert's number of units; real:
// each expert's number of rows without padding, or null. Units are counted over these rows; with HALF_TILES,
// over all rows.
template <class Units>
__device__ __forceinline__ Shared begin(u8* memory, const int* offsets, int experts, i64 rows,
                                        const Units& units, const int* real = nullptr) {
  const u32 t = threadIdx.x, lane = t % 32;
  Shared s;
  s.operands = memory;
  s.scales = (float*)(memory + STAGES * STAGE_BYTES);
  s.tile = (u8*)(s.scales + STAGES * STAGE_SCALES);
  s.full = (u64*)(s.tile + TILE_BYTES);
  s.empty = s.full + STAGES, s.made = s.empty + STAGES, s.written = s.made + PARTS;
  s.known = s.written + PARTS, s.seen = s.known + TURNS;
  s.gathered = s.seen + TURNS;
  s.added = s.gathered + (GATHER ? STAGES + STAGES % 2 : 0);
  s.turns = (WorkTile*)(s.added + (ADDEND ? PARTS : 0));
  s.offsets = (int*)(s.turns + TURNS);
  s.first = s.offsets + experts + 1;
  s.half = (u8*)(s.first + experts + 1);
  if (t == 0) {
    for (u32 i = 0; i < STAGES; ++i) {
      barrier_init(&s.full[i], FULL_ARRIVALS);
      if (GATHER) barrier_init(&s.gathered[i], 128);
      barrier_init(&s.empty[i], CLUSTER * CONSUMER_THREADS / 32 * ARRIVING);
    }
    for (u32 i = 0; i < PARTS; ++i) {
      barrier_init(&s.made[i], CONSUMER_THREADS / PARTS / 32 * ARRIVING);
      barrier_init(&s.written[i], WRITERS / 32 * ARRIVING);
      if (ADDEND) barrier_init(&s.added[i], WRITERS / 32);
    }
    for (u32 i = 0; i < TURNS; ++i) {
      barrier_init(&s.known[i]);
      barrier_init(&s.seen[i], CLUSTER * (CONSUMER_THREADS / 32 + PRODUCER_WARPS) * ARRIVING);
    }
  }
  for (int e = (int)t; e <= experts; e += (int)blockDim.x)
    s.offsets[e] = (int)clamped(offsets ? offsets[e] : e * rows, rows);
  __syncthreads();
  for (int e = (int)t; HALF_TILES && e < experts; e += (int)blockDim.x) {
    const int count = s.offsets[e + 1] - s.offsets[e], real_rows = real ? min(real[e], count) : count;
    s.half[e] = real_rows <= count - (count - 1) % ROWS - 1 + ROWS / 2;
  }
  if (t < 32) {
    int before = 0;
    for (int e0 = 0; e0 <= experts; e0 += 32) {
      const int e = e0 + (int)lane;
      int count = e < experts ? s.offsets[e + 1] - s.offsets[e] : 0;
      if (!HALF_TILES && real && e < experts) count = min(real[e], count);
      const int own_units = units(max(count, 0));
      const int total = sum_up_to_here(own_units);
      if (e <= experts) s.first[e] = before + total - own_units;
      before += __shfl_sync(0xffffffffu, total, 31);
    }
  }
  if (CLUSTER > 1)
    cluster_wait();
  else
    __syncthreads();
  return s;
}

// No thread block exits while another may still write to its shared memory.
__device__ __forceinline__ void end() {
  if (CLUSTER > 1) cluster_wait();
}

__device__ __forceinline__ int blocks_of_128(int rows) { return (rows + 127) / 128; }

// A cluster's sequence of tiles. At each turn every warp of the cluster reads the tile and then releases the
// slot. The producer warp of the first thread block claims tiles and publishes them to all blocks ahead of
// time.
struct Order {
  u32 turn = 0;

  // Called by a warp: waits for this turn's tile; again() reads it again before done().
  __device__ __forceinline__ WorkTile tile(const Shared& s) const {
    barrier_wait(&s.known[turn % TURNS], turn / TURNS % 2);
    return again(s);
  }
  __device__ __forceinline__ WorkTile again(const Shared& s) const {
    const int4 tile = *(const int4*)&s.turns[turn % TURNS];
    return {uniform(tile.x), uniform(tile.y), uniform(tile.z), uniform(tile.w)};
  }
  __device__ __forceinline__ void done(const Shared& s) {
    __syncwarp();
    // recomputed, instead of spilling the slot across the tile in the weight gradient's producer warps
    if (threadIdx.x % 32 < ARRIVING) barrier_arrive_at(at_of_block(&s.seen[kept(turn) % TURNS], 0));
    ++turn;
  }

  // Expert of this turn's tile, called by one thread.
  __device__ __forceinline__ int expert(const Shared& s) const { return s.turns[turn % TURNS].expert; }

  // Called by one thread of each thread block: expects the transaction bytes of the turn `ahead` turns later.
  __device__ __forceinline__ void expect(const Shared& s, u32 ahead) const {
    barrier_expect(&s.known[(turn + ahead) % TURNS], sizeof(WorkTile));
  }
  // Called by one thread of the first thread block: publishes tile_of(block) to each block for that turn.
  template <class TileOf>
  __device__ __forceinline__ void pass_on(const Shared& s, u32 ahead, const TileOf& tile_of) const {
    const u32 then = turn + ahead, slot = then % TURNS;
    barrier_wait(&s.seen[slot], then / TURNS % 2 ^ 1u);
#pragma unroll
    for (u32 block = 0; block < CLUSTER; ++block) {
      const WorkTile tile = tile_of(block);
      store_counted_at(at_of_block(&s.turns[slot], block),
                       make_int4(tile.number, tile.expert, tile.row, tile.column_and_pair),
                       at_of_block(&s.known[slot], block));
    }
  }
};

// The clusters' work items: units of CLUSTER tiles, numbered across all experts. The last units are split in
// halves if every cluster then gets at most one. A tile of which only the upper half is computed has its
// number bitwise inverted, hence negative.
struct Work {
  int whole, all;
  __device__ __forceinline__ Work(int units) {
    const int stride = (int)gridDim.x / CLUSTER, rest = units % stride;
    whole = uniform(units - (2 * rest <= stride ? rest : 0));
    all = uniform(2 * units - whole);
  }
  // Of a claimed number: its unit, and whether it is the second half of the unit.
  __device__ __forceinline__ int unit(int claimed) const {
    return claimed < whole ? claimed : whole + (claimed - whole) / 2;
  }
  __device__ __forceinline__ int half(int claimed) const {
    return claimed < whole ? 0 : (claimed - whole) % 2;
  }
  // Of a WorkTile's number: how many halves are computed.
  __device__ __forceinline__ u32 halves(int number) const { return (u32)number < (u32)whole ? 2 : 1; }
};

// Number of units of a grid of `high` x `wide` tiles: vertical pairs, and horizontal ones in the remaining
// row.
__device__ __forceinline__ int across(int wide) { return (wide + CLUSTER - 1) / CLUSTER; }
__device__ __forceinline__ int units_of(int high, int wide) {
  return high / CLUSTER * wide + high % CLUSTER * across(wide);
}

// Where a cluster's tiles are in such a grid, in tiles.
struct Location {
  int row, column;  // of the first thread block's tile
  bool below;       // whether they are vertically adjacent
  __device__ __forceinline__ int row_of(u32 block) const { return row + (below ? (int)block : 0); }
  __device__ __forceinline__ int column_of(u32 block) const { return column + (below ? 0 : (int)block); }
};

// Location of unit `rest` of such a grid: `height` rows of units at a time, column by column.
__device__ __forceinline__ Location find_tiles(int rest, int high, int wide, int height) {
  const int below = high / CLUSTER;
  if (rest >= below * wide) {
    rest -= below * wide;
    return {below * CLUSTER + rest / across(wide), rest % across(wide) * CLUSTER, false};
  }
  // one thread needs about 200 cycles for a division, so the first group is found without
  const int first = rest < height * wide ? 0 : rest / (height * wide) * height;
  rest -= first * wide;
  height = min(below - first, height);
  return {(first + rest % height) * CLUSTER, rest / height, true};
}

// The last expert with first[expert] <= unit, from an earlier one on: one thread needs about 150 cycles for
// each step of a binary search.
__device__ __forceinline__ int expert_of(const int* first, int experts, int unit, int expert) {
  int further;
  do {
    further = 0;
#pragma unroll
    for (int i = 1; i <= 2; ++i) further += first[min(expert + i, experts)] <= unit;
    expert += further;
  } while (further == 2);
  return expert;
}

// Forward: location of a claimed number's tiles among its expert's rows, and in *expert that expert; on entry
// the expert of an earlier number.
__device__ __forceinline__ Location find_rows(const Shared& s, const Work& work, int claimed, int experts,
                                              int wide, int height, int* expert) {
  Location at{0, 0, false};
  if (claimed < work.all) {
    const int unit = work.unit(claimed), e = *expert = expert_of(s.first, experts, unit, *expert);
    at = find_tiles(unit - s.first[e], blocks_of_128(s.offsets[e + 1] - s.offsets[e]), wide, height);
  }
  return at;
}

// Called by the consumer warps of a part of a finished tile that they have written to its staging buffer:
// hands it over to the store warps.
__device__ __forceinline__ void hand_over(const Shared& s, u32 part) {
  fence_async();
  __syncwarp();
  if (threadIdx.x % 32 < ARRIVING) barrier_arrive_here(&s.made[part]);
}

// Called by the two store warps: TMA stores of one part of a finished tile of 16-bit values, up to `count`
// rows of min(bytes, max_bytes) bytes, to rows `pitch` bytes apart.
__device__ __forceinline__ void write_rows(const Shared& s, u32 part, int count, int bytes, int max_bytes,
                                           u8* to, i64 pitch, u32& phase) {
  const u8* from = s.tile + part % BUFFERS * (TILE_BYTES / BUFFERS);
  barrier_wait(&s.made[part], phase);
  if (part + 1 == PARTS) phase ^= 1u;
  // One lane issues a warp's stores: the compiler makes a loop over the lanes of a store by all of them.
  if (bytes > 0 && elected())
    for (int row = (int)threadIdx.x % WRITERS / 32; row < min(count, ROWS / PARTS); row += WRITERS / 32)
      bulk_store(to + row * pitch, from + row * PITCH, (u32)min(bytes, max_bytes));
  bulk_finish();
  __syncwarp();
  if (threadIdx.x % 32 < ARRIVING) barrier_arrive_here(&s.written[part]);
}

// Called by the two store warps, after they have stored the tile before: TMA loads of the rows that
// write_rows will store, from `from` to the part's staging buffer. `added` completes with them: one lane of
// each warp arrives. All parts are loaded before the first is stored, so each needs a buffer of its own.
__device__ __forceinline__ void load_rows(const Shared& s, u32 part, int count, int bytes, int max_bytes,
                                          const u8* from, i64 pitch) {
  static_assert(!ADDEND || BUFFERS == PARTS, "a buffer for each part");
  u8* to = s.tile + part % BUFFERS * (TILE_BYTES / BUFFERS);
  const int first = (int)threadIdx.x % WRITERS / 32, size = max(min(bytes, max_bytes), 0);
  count = min(count, ROWS / PARTS);
  if (elected()) {  // each warp loads the rows that it stores
    barrier_expect(&s.added[part], max(count - first + 1, 0) / (WRITERS / 32) * size);
    for (int row = first; size > 0 && row < count; row += WRITERS / 32)
      bulk_load(to + row * PITCH, from + row * pitch, (u32)size, &s.added[part]);
  }
  __syncwarp();
}

// As write_rows, for half as many rows of float32, stored or (add) accumulated; `to_row(row)` is a row's
// destination.
template <class ToRow>
__device__ __forceinline__ void write_wide_rows(const Shared& s, u32 part, int count, int bytes,
                                                int max_bytes, const ToRow& to_row, bool add, u32& phase) {
  const int row = (int)threadIdx.x % WRITERS;
  const u8* from = s.tile + part % BUFFERS * (TILE_BYTES / BUFFERS) + row * WIDE_PITCH;
  barrier_wait(&s.made[part], phase);
  if (part + 1 == PARTS) phase ^= 1u;
  if (row < count && bytes > 0) {
    if (add)
      bulk_add_floats(to_row(row), from, (u32)min(bytes, max_bytes));
    else
      bulk_store(to_row(row), from, (u32)min(bytes, max_bytes));
  }
  bulk_finish();
  __syncwarp();
  if (threadIdx.x % 32 < ARRIVING) barrier_arrive_here(&s.written[part]);
}
#endif
