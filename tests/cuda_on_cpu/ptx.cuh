// What kernels_cuda/ptx.cuh does, in C++.
#pragma once

#define DYNAMIC_SHARED(name) alignas(128) static u8 name[1 << 18]

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
inline u32 halves_of_e4m3x2(u16 codes) { return halves_of(codes, 0); }
inline u32 halves_of_e5m2x2(u16 codes) { return halves_of(codes, 1); }
inline float larger_or_nan(float a, float b) { return a != a || b != b ? NAN : std::max(a, b); }
inline void copy_async16(void* to, const void* from, bool there) {
  there ? memcpy(to, from, 16) : memset(to, 0, 16);
}
inline void copy_async4(void* to, const void* from, bool there) {
  there ? memcpy(to, from, 4) : memset(to, 0, 4);
}
inline void copy_async_commit() {}
template <int LEFT>
void copy_async_wait() {}
inline float exp2_approx(float x) { return exp2f(x); }
inline float reciprocal_approx(float x) { return 1.f / x; }
inline uint4 load_streaming(const uint4* p) { return *p; }
