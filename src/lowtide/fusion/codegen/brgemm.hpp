// The micro-kernel that libtorch exports; with LT_CBLAS its BLAS instead (same library, C symbol).
#ifdef LT_CBLAS
extern "C" void cblas_sgemm(int, int, int, int, int, int, float, const float*, int, const float*, int, float, float*, int);
namespace at { namespace native { namespace cpublas { static inline void brgemm_release(bool) {} } } }
static inline void lt_brgemm(int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc, bool add,
                             const float* a, const float* b, float* c) {
  cblas_sgemm(101, 111, 111, m, n, k, 1.0f, a, lda, b, ldb, add ? 1.0f : 0.0f, c, ldc);
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
extern "C" long lt_self_test() {
  float a[20 * 24], b[24 * 32], c[20 * 32], d[20 * 32];
  for (int i = 0; i < 20 * 24; ++i) a[i] = (float)((i * 7) % 11) - 5.0f;
  for (int i = 0; i < 24 * 32; ++i) b[i] = (float)((i * 5) % 13) - 6.0f;
  for (int i = 0; i < 20 * 32; ++i) c[i] = d[i] = (float)(i % 3);
  lt_brgemm(20, 30, 24, 24, 32, 32, true, a, b, c);
  at::native::cpublas::brgemm_release(false);
  for (int i = 0; i < 20; ++i) for (int j = 0; j < 30; ++j) for (int k = 0; k < 24; ++k) d[i * 32 + j] += a[i * 24 + k] * b[k * 32 + j];
  for (int i = 0; i < 20 * 32; ++i) if (c[i] != d[i]) return 1;
  return 0;
}
