// The micro-kernel that libtorch exports; with LT_BLAS its BLAS instead (same library, Fortran symbol).
#ifdef LT_BLAS
extern "C" void sgemm_(const char*, const char*, const int*, const int*, const int*, const float*, const float*,
                       const int*, const float*, const int*, const float*, float*, const int*);
namespace at { namespace native { namespace cpublas { static inline void brgemm_release(bool) {} } } }
static inline void lt_brgemm(int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc, bool add,
                             const float* a, const float* b, float* c) {  // column-major: C' = B' A'
  const int mi = (int)m, ni = (int)n, ki = (int)k, la = (int)lda, lb = (int)ldb, lc = (int)ldc;
  const float one = 1.0f, keep = add ? 1.0f : 0.0f;
  sgemm_("N", "N", &ni, &mi, &ki, &one, b, &lb, a, &la, &keep, c, &lc);
}
#else
namespace at { namespace native { namespace cpublas {
void brgemm(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, const bool, const float*, const float*, float*, bool);
void brgemm_release(bool);
} } }
static inline void lt_brgemm(int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc, bool add,
                             const float* a, const float* b, float* c) {
  at::native::cpublas::brgemm(m, n, k, lda, ldb, ldc, add, a, b, c, false);
}
#endif
// Rows of `taps` runs of `c` floats, which follow each other and overlap the next row's (lda may be less than both).
static inline void lt_window(int64_t m, int64_t n, int64_t taps, int64_t c, int64_t lda, int64_t ldb, int64_t ldc, bool add,
                             const float* a, const float* b, float* o) {
#ifdef LT_BLAS
  for (int64_t t = 0; t < taps; ++t) lt_brgemm(m, n, c, lda, ldb, ldc, add || t, a + t * c, b + t * c * ldb, o);
#else
  lt_brgemm(m, n, taps * c, lda, ldb, ldc, add, a, b, o);
#endif
}
extern "C" long lt_self_test() {
  float a[20 * 24], b[24 * 32], c[20 * 32], d[20 * 32];
  for (int i = 0; i < 20 * 24; ++i) a[i] = (float)((i * 7) % 11) - 5.0f;
  for (int i = 0; i < 24 * 32; ++i) b[i] = (float)((i * 5) % 13) - 6.0f;
  for (int i = 0; i < 20 * 32; ++i) c[i] = d[i] = (float)(i % 3);
  try {
    lt_brgemm(20, 30, 24, 24, 32, 32, true, a, b, c);
    lt_window(10, 30, 3, 8, 8, 32, 32, true, a, b, c);  // rows that overlap
  } catch (...) { return 1; }
  at::native::cpublas::brgemm_release(false);
  for (int i = 0; i < 20; ++i) for (int j = 0; j < 30; ++j) for (int k = 0; k < 24; ++k) d[i * 32 + j] += a[i * 24 + k] * b[k * 32 + j];
  for (int i = 0; i < 10; ++i) for (int j = 0; j < 30; ++j) for (int k = 0; k < 24; ++k) d[i * 32 + j] += a[i * 8 + k] * b[k * 32 + j];
  for (int i = 0; i < 20 * 32; ++i) if (c[i] != d[i]) return 1;
  return 0;
}
