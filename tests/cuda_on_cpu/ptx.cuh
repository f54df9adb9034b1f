// kernels_cuda/ptx.cuh in C++.
#pragma once

#define DYNAMIC_SHARED(name) u8* const name = dynamic_shared[rank_of_block()]
#define DYNAMIC_SHARED_TILES(name) DYNAMIC_SHARED(name)

inline void pdl_wait() { after_pdl_wait() = true; }
inline void pdl_launch_dependents(CALLER) {
  if (!after_pdl_wait()) give_up_at("the next launch may start before the one in front is done", line);
}
inline float f16_to_float(u16 bits) {
  _Float16 h;
  memcpy(&h, &bits, 2);
  return (float)h;
}
inline u16 float_to_f16(float x) {
  const _Float16 h = (_Float16)x;
  u16 bits;
  memcpy(&bits, &h, 2);
  return bits;
}
inline float decode(u32 code, int fmt);
inline u8 encode(float x, int fmt);
inline u32 to_e4m3x2(float a, float b) { return encode(a, 0) | (u32)encode(b, 0) << 8; }
inline u32 to_e5m2x2(float a, float b) { return encode(a, 1) | (u32)encode(b, 1) << 8; }
inline u32 halves_of(u16 codes, int fmt) {
  return float_to_f16(decode(codes & 0xffu, fmt)) | (u32)float_to_f16(decode(codes >> 8, fmt)) << 16;
}
inline void halves_of_e4m3x4(u32 codes, u32* low, u32* high) {
  *low = halves_of((u16)codes, 0), *high = halves_of((u16)(codes >> 16), 0);
}
inline void halves_of_e5m2x4(u32 codes, u32* low, u32* high) {
  *low = halves_of((u16)codes, 1), *high = halves_of((u16)(codes >> 16), 1);
}
inline u32 halves_to(u32 halves, int fmt) {
  return encode(f16_to_float((u16)halves), fmt) | (u32)encode(f16_to_float((u16)(halves >> 16)), fmt) << 8;
}
inline u32 halves_to_e4m3x2(u32 halves) { return halves_to(halves, 0); }
inline u32 halves_to_e5m2x2(u32 halves) { return halves_to(halves, 1); }
typedef u64 At;
inline At at_of(const void* p) { return (At)p; }
template <class T>
T kept(T x) {
  return x;
}
inline float load_at(At at) { return *(const float*)at; }
inline float2 load2_at(At at) { return *(const float2*)at; }
inline uint2 load_words_at(At at) { return *(const uint2*)at; }
template <int OFFSET>
void store_words_at(At at, uint2 v) {
  *(uint2*)(at + OFFSET) = v;
}
inline int4 load_ints_at(At at) { return *(const int4*)at; }
template <int PLACE, int KEPT>
u32 of_lane_near(u32 v, CALLER) {
  return of_lane(v, (threadIdx.x & KEPT) | (PLACE & ~KEPT), line);
}
template <class F>
u32 each_half(u32 a, u32 b, F f) {
  const float low = f(f16_to_float((u16)a), f16_to_float((u16)b));
  return float_to_f16(low) | (u32)float_to_f16(f(f16_to_float((u16)(a >> 16)), f16_to_float((u16)(b >> 16))))
                                 << 16;
}
inline float larger_or_nan(float a, float b);
inline u32 to_f16x2(float a, float b) { return float_to_f16(a) | (u32)float_to_f16(b) << 16; }
inline u32 halves_times(u32 a, u32 b) {
  return each_half(a, b, [](float x, float y) { return x * y; });
}
inline u32 larger_halves(u32 a, u32 b) {
  return each_half(a, b, [](float x, float y) { return larger_or_nan(x, std::fabs(y)); });
}
inline u32 larger_magnitudes(u32 a, u32 b) { return larger_halves(larger_halves(0, a), b); }
inline u16 float_to_bf16(float x);
inline u32 larger_u16s(u32 a, u32 b) {
  return std::max(a & 0xffff0000u, b & 0xffff0000u) | std::max(a & 0xffffu, b & 0xffffu);
}
inline u32 to_bf16x2(float a, float b) { return float_to_bf16(a) | (u32)float_to_bf16(b) << 16; }
inline float larger_or_nan(float a, float b) { return a != a || b != b ? NAN : std::max(a, b); }
inline void copy_async(const Copy& copy) {
  if (((size_t)copy.to | (copy.has_source ? (size_t)copy.from : 0)) % copy.bytes)
    give_up_at("copies from or to an address that is no multiple of the size", Line::current());
  poison_destination(copy.to, copy.bytes);
  run_or_defer(this_thread().copies.back(), copy);
}
inline void copy_async16(void* to, const void* from, bool there) { copy_async({to, from, 16, there}); }
inline void copy_async16_at(At to, const void* from, bool there) { copy_async16((void*)to, from, there); }
inline void copy_async4(void* to, const void* from, bool there) { copy_async({to, from, 4, there}); }
inline void copy_async8(void* to, const void* from, bool there) { copy_async({to, from, 8, there}); }
inline void copy_async_commit() { this_thread().copies.push_back({}); }
template <int LEFT>
void copy_async_wait() {
  end_turn_perhaps();
  auto& groups = this_thread().copies;
  while (groups.size() > LEFT + 1) {
    for (const Copy& copy : groups.front()) copy();
    groups.erase(groups.begin());
  }
}
inline float exp2_approx(float x) { return exp2f(x); }
inline float reciprocal_approx(float x) { return 1.f / x; }
inline u32 load_kept(const u32* p, bool) { return *p; }
inline void store_kept(float* p, float v, bool) { *p = v; }
