// Scalar functions that vectorise under omp simd, and small helpers. Included first in every generated file.
// Compiled with -ffp-contract=off: products and sums round as written. Error bounds: see mathlib.py.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <omp.h>
#define LT static inline __attribute__((always_inline))
#define FMA(a, b, c) __builtin_fmaf(a, b, c)
LT float lt_f(int32_t i) { float f; __builtin_memcpy(&f, &i, 4); return f; }
LT int32_t lt_i(float f) { int32_t i; __builtin_memcpy(&i, &f, 4); return i; }
LT float lt_wide(uint16_t h) { return lt_f((int32_t)((uint32_t)h << 16)); }
LT uint16_t lt_narrow(float x) {
  uint32_t u = (uint32_t)lt_i(x), r = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return (uint16_t)(x != x ? 0x7fc0u : r);
}
LT float lt_round(float x) { return lt_wide(lt_narrow(x)); }
LT float lt_exp(float x) {
  float t = x < -104.0f ? -104.0f : x; t = t > 89.0f ? 89.0f : t;
  float n = FMA(t, 1.44269504f, 12582912.0f);
  int32_t k = lt_i(n) - 0x4b400000; n -= 12582912.0f;
  float r = FMA(n, -0.693145752f, t); r = FMA(n, -1.42860677e-6f, r);
  float p = 1.37805939e-3f;
  p = FMA(p, r, 8.37312452e-3f); p = FMA(p, r, 4.16695364e-2f); p = FMA(p, r, 1.66664720e-1f);
  p = FMA(p, r, 4.99999851e-1f); p = FMA(p, r, 1.0f); p = FMA(p, r, 1.0f);
  int32_t h = k >> 1;
  return p * lt_f((h + 127) << 23) * lt_f((k - h + 127) << 23);
}
LT float lt_log(float a) {
  bool tiny = a < 1.17549435e-38f;
  float b = tiny ? a * 8388608.0f : a, i = tiny ? -23.0f : 0.0f;
  int32_t e = (lt_i(b) - 0x3f2aaaab) & (int32_t)0xff800000;
  float f = lt_f(lt_i(b) - e) - 1.0f, s = f * f;
  i = FMA((float)e, 1.19209290e-7f, i);
  float r = FMA(-0.130187988f, f, 0.140889585f), t = FMA(-0.121489584f, f, 0.139809534f);
  r = FMA(r, s, t); r = FMA(r, f, -0.166845024f); r = FMA(r, f, 0.200121149f); r = FMA(r, f, -0.249996364f);
  r = FMA(r, f, 0.333331943f); r = FMA(r, f, -0.5f); r = FMA(r, s, f); r = FMA(i, 0.693147182f, r);
  r = a == __builtin_inff() ? a : r; r = a == 0.0f ? -__builtin_inff() : r;
  return (a < 0.0f || a != a) ? __builtin_nanf("") : r;
}
LT float lt_exp_small(float t) {  // t in [-80, 0] or NaN
  float n = FMA(t, 1.44269504f, 12582912.0f);
  int32_t k = lt_i(n) - 0x4b400000; n -= 12582912.0f;
  float r = FMA(n, -0.693145752f, t); r = FMA(n, -1.42860677e-6f, r);
  float p = 1.37805939e-3f;
  p = FMA(p, r, 8.37312452e-3f); p = FMA(p, r, 4.16695364e-2f); p = FMA(p, r, 1.66664720e-1f);
  p = FMA(p, r, 4.99999851e-1f); p = FMA(p, r, 1.0f); p = FMA(p, r, 1.0f);
  return p * lt_f((k + 127) << 23);
}
LT float lt_erf(float a) {
  float t = __builtin_fabsf(a), s = a * a; t = t > 4.0f ? 4.0f : t;
  float w = t * t;
  float r = FMA(-1.72853470e-5f, t, 3.83197126e-4f), u = FMA(-3.88396438e-3f, t, 2.42546219e-2f);
  r = FMA(r, w, u); r = FMA(r, t, -1.06777877e-1f); r = FMA(r, t, -6.34846687e-1f);
  r = FMA(r, t, -1.28717512e-1f); r = FMA(r, t, -t);
  r = __builtin_copysignf(1.0f - lt_exp_small(r), a);
  float q = -5.96761703e-4f;
  q = FMA(q, s, 4.99119423e-3f); q = FMA(q, s, -2.67681349e-2f); q = FMA(q, s, 1.12819925e-1f);
  q = FMA(q, s, -3.76125336e-1f); q = FMA(q, s, 1.28379166e-1f); q = FMA(q, a, a);
  return t > 0.927734375f ? r : q;
}
LT float lt_tanh(float x) {
  float t = __builtin_fabsf(x); t = t > 9.1f ? -9.1f : -t;
  float n = FMA(t, 2.88539008f, 12582912.0f);
  int32_t k = lt_i(n) - 0x4b400000; n -= 12582912.0f; t = t + t;
  float r = FMA(n, -0.693145752f, t); r = FMA(n, -1.42860677e-6f, r);
  float p = 1.97350979e-4f;
  p = FMA(p, r, 1.39309070e-3f); p = FMA(p, r, 8.33343994e-3f); p = FMA(p, r, 4.16668020e-2f);
  p = FMA(p, r, 1.66666716e-1f); p = FMA(p, r, 4.99999970e-1f); p = FMA(p * r, r, r);
  float e = lt_f((k + 127) << 23), m = FMA(e, p, e - 1.0f);
  return __builtin_copysignf(m / (m + 2.0f), x);
}
LT float lt_tanh_precise(float x) {
  float t = __builtin_fabsf(x); t = t > 10.0f ? 10.0f : t;
  float big = __builtin_copysignf(1.0f - 2.0f / (lt_exp(t + t) + 1.0f), x), s = x * x;
  float p = -5.70498872745e-3f;
  p = FMA(p, s, 2.06390887954e-2f); p = FMA(p, s, -5.37397155531e-2f); p = FMA(p, s, 1.33314422036e-1f);
  p = FMA(p, s, -3.33332819422e-1f); p = FMA(p * s, x, x);
  return __builtin_fabsf(x) < 0.625f ? p : (x != x ? x : big);
}
LT float lt_sigmoid(float x) { return 1.0f / (1.0f + lt_exp(-x)); }
LT double lt_exp(double x) { return std::exp(x); }
LT double lt_log(double x) { return std::log(x); }
LT double lt_erf(double x) { return std::erf(x); }
LT double lt_tanh(double x) { return std::tanh(x); }
LT double lt_sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }
template <class T> LT T lt_max(T a, T b) { return (a > b || a != a) ? a : b; }
template <class T> LT T lt_min(T a, T b) { return (a < b || a != a) ? a : b; }
template <class T> LT T lt_floor_c(T a, T b) { return a < b ? b : a; }
template <class T> LT T lt_ceil_c(T a, T b) { return a > b ? b : a; }
template <class T> LT T lt_fmax(T a, T b) { return (a > b || b != b) ? a : b; }
template <class T> LT T lt_fmin(T a, T b) { return (a < b || b != b) ? a : b; }
LT float lt_fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
LT double lt_fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
template <class T> LT T lt_sign(T a) { return (T)((a > 0) - (a < 0)); }
template <class T> LT T lt_floordiv_i(T a, T b) { T q = a / b; return q - ((a % b != 0) & ((a < 0) != (b < 0))); }
template <class T> LT T lt_rem_i(T a, T b) { T r = a % b; return r + (((r != 0) & ((r < 0) != (b < 0))) ? b : 0); }
template <class T> LT T lt_rem_f(T a, T b) {
  T m = std::fmod(a, b); return (m != 0 && ((b < 0) != (m < 0))) ? m + b : m;
}
template <class T> LT T lt_floordiv_f(T a, T b) {
  if (b == 0) return a / b;
  T m = std::fmod(a, b), d = (a - m) / b;
  if (m != 0 && (b < 0) != (m < 0)) d -= 1;
  if (d == 0) return std::copysign((T)0, a / b);
  T f = std::floor(d);
  return d - f > (T)0.5 ? f + 1 : f;
}
template <class T> LT T lt_ipow(T a, T b) {
  if (b < 0) return a == 1 ? 1 : (a == -1 ? ((b & 1) ? (T)-1 : (T)1) : (T)0);
  T r = 1; while (b) { if (b & 1) r *= a; a *= a; b >>= 1; } return r;
}
typedef int32_t lt_v16 __attribute__((vector_size(64)));
typedef lt_v16 lt_u16 __attribute__((aligned(4)));
template <int K> LT void lt_swap16(lt_v16* r) {  // exchange the off-diagonal K x K blocks
  lt_v16 low, high;
  for (int j = 0; j < 16; ++j) { low[j] = j & K ? 16 + j - K : j; high[j] = j & K ? 16 + j : j + K; }
  #pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) if (!(i & K)) {
    lt_v16 a = r[i], b = r[i + K];
    r[i] = __builtin_shuffle(a, b, low); r[i + K] = __builtin_shuffle(a, b, high);
  }
}
static inline void lt_block16(const char* src, int64_t lds, char* dst, int64_t ldd) {
  lt_v16 r[16];
  #pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) r[i] = *(const lt_u16*)(const void*)(src + i * lds);
  lt_swap16<1>(r); lt_swap16<2>(r); lt_swap16<4>(r); lt_swap16<8>(r);
  #pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) *(lt_u16*)(void*)(dst + i * ldd) = r[i];
}
// dst[u * ldd + l] = src[l * lds + u] for u < nu, l < nl: a tile of a transposed operand
template <class T> static void lt_transpose(const T* src, int64_t lds, T* dst, int64_t ldd, int64_t nu, int64_t nl) {
  int64_t lo = 0, uo = sizeof(T) == 4 ? nu / 16 * 16 : 0;
  if (sizeof(T) == 4)
    for (; lo + 16 <= nl; lo += 16)
      for (int64_t u = 0; u < uo; u += 16)
        lt_block16((const char*)(src + lo * lds + u), lds * 4, (char*)(dst + u * ldd + lo), ldd * 4);
  for (int64_t l = 0; l < lo; ++l) for (int64_t u = uo; u < nu; ++u) dst[u * ldd + l] = src[l * lds + u];
  for (int64_t l = lo; l < nl; ++l) for (int64_t u = 0; u < nu; ++u) dst[u * ldd + l] = src[l * lds + u];
}
static inline void lt_pack_rows(const float* src, int64_t lds, float* dst, int64_t ldd, int64_t rows, int64_t cols) {
  for (int64_t r = 0; r < rows; ++r)
    _Pragma("omp simd") for (int64_t c = 0; c < cols; ++c) dst[r * ldd + c] = src[r * lds + c];
}
LT int64_t lt_row(int64_t row, int64_t bound, long& bad) {
  if ((uint64_t)row >= (uint64_t)bound) { bad = 1; return 0; }
  return row;
}
struct lt_span { int64_t lo, hi; };
LT lt_span lt_share(int64_t n, int64_t grain, int64_t thread, int64_t threads) {
  int64_t blocks = (n + grain - 1) / grain;
  int64_t lo = blocks * thread / threads * grain, hi = blocks * (thread + 1) / threads * grain;
  return {lo < n ? lo : n, hi < n ? hi : n};
}
#define lt_barrier(n) do { if ((n) > 1) { _Pragma("omp barrier") } } while (0)
