// Conversions between scale layouts, which fp8moe/reference/layout.py defines.
#include "scale_layout.cuh"

// Float32 scales between compact [rows, blocks] and gemm_ready [blocks, padded]; zeros past `rows`.
extern "C" __global__ void convert_scales(const float* in, i64 rows, i64 blocks, i64 padded, i64 to_ready,
                                          float* out) {
  pdl_wait();
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= (to_ready ? padded : rows) * blocks) return;
  if (to_ready) {
    const i64 r = i % padded, b = i / padded;
    out[i] = r < rows ? in[r * blocks + b] : 0.f;
  } else {
    out[i] = in[i % blocks * padded + i / blocks];
  }
}

// MXFP8 scales between compact ([rows, width], or by_columns [known, width]) and the 128x4 blocked layout,
// for all experts.
// Traffic: every scale is read once and written once; unused positions, also past all experts, are zeroed.
// Launch: grid (tiles of rows, tiles along the other dimension), 128 threads: four bytes of a tile each.
extern "C" __global__ void __launch_bounds__(128)
    convert_blocked_scales(u8* compact, const int* offsets, i64 experts, i64 rows, i64 width, i64 known,
                           i64 by_columns, i64 to_blocked, u8* blocked) {
  pdl_wait();
  const ScaleTile tile = find_scale_tile(offsets, (int)experts, (int)rows, (int)blockIdx.x, (int)gridDim.x);
  const i64 outer = threadIdx.x % 4 * 32 + threadIdx.x / 4, other = blockIdx.y;
  const i64 number = by_columns ? tile.number(gridDim.y, other) : (i64)blockIdx.x * gridDim.y + other;
  u8* const four = blocked + (number * 128 + threadIdx.x) * 4;
  for (int i = 0; i < 4; ++i) {
    const i64 strip = tile.first_strip + i, column = other * 128 + outer, block = other * 4 + i;
    const bool in_range =
        by_columns ? i * 32 < tile.count && column < width : outer < tile.count && block < width;
    const i64 at = by_columns ? strip * width + column : (tile.first_row + outer) * width + block;
    const bool has_scale = in_range && (!by_columns || strip < known);
    if (to_blocked)
      four[i] = has_scale ? compact[at] : in_range ? 255 : 0;  // NaN for a missing scale
    else if (has_scale)
      compact[at] = four[i];
  }
}
