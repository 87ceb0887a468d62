// Windows: Winograd's transforms, depthwise rows in two layouts, filling of padded rows.
typedef float lt_f16 __attribute__((vector_size(64), aligned(4), may_alias));
LT lt_f16 lt_ld(const float* p) { return *(const lt_f16*)p; }
LT void lt_st(float* p, lt_f16 v) { *(lt_f16*)p = v; }
static inline void lt_fill(float* p, int64_t n, float value) {
  _Pragma("omp simd") for (int64_t k = 0; k < n; ++k) p[k] = value;
}
// V[16][tiles][c] of a band of padded rows; tile (r, q) starts at row 2r, column 2q.
static void lt_winograd_in(const float* x, int64_t row, int64_t c, int64_t tr, int64_t tc, float* v) {
  const int64_t plane = tr * tc * c;
  for (int64_t r = 0; r < tr; ++r) for (int64_t q = 0; q < tc; ++q) {
    const float* const s = x + 2 * r * row + 2 * q * c;
    float* const d = v + (r * tc + q) * c;
    for (int64_t k = 0; k < c; k += 16) {
      lt_f16 t[4][4];
      for (int i = 0; i < 4; ++i) {
        const float* const p = s + i * c + k;
        const lt_f16 a0 = lt_ld(p), a1 = lt_ld(p + row), a2 = lt_ld(p + 2 * row), a3 = lt_ld(p + 3 * row);
        t[0][i] = a0 - a2; t[1][i] = a1 + a2; t[2][i] = a2 - a1; t[3][i] = a1 - a3;
      }
      for (int i = 0; i < 4; ++i) {
        float* const o = d + i * 4 * plane + k;
        lt_st(o, t[i][0] - t[i][2]); lt_st(o + plane, t[i][1] + t[i][2]);
        lt_st(o + 2 * plane, t[i][2] - t[i][1]); lt_st(o + 3 * plane, t[i][1] - t[i][3]);
      }
    }
  }
}
// acc[2 tr][2 tc][n] of M[16][tiles][n], `used` of the n columns; whether something is infinite or NaN.
static bool lt_winograd_out(const float* m, int64_t n, int64_t used, int64_t tr, int64_t tc, float* acc) {
  typedef int32_t flags __attribute__((vector_size(64)));
  flags odd = {};
  const int64_t plane = tr * tc * n, row = 2 * tc * n;
  for (int64_t r = 0; r < tr; ++r) for (int64_t q = 0; q < tc; ++q) {
    const float* const s = m + (r * tc + q) * n;
    float* const d = acc + 2 * r * row + 2 * q * n;
    for (int64_t k = 0; k < used; k += 16) {
      lt_f16 t[2][4], sum = {};
      for (int i = 0; i < 4; ++i) {
        const float* const p = s + i * plane + k;
        const lt_f16 m0 = lt_ld(p), m1 = lt_ld(p + 4 * plane), m2 = lt_ld(p + 8 * plane), m3 = lt_ld(p + 12 * plane);
        t[0][i] = m0 + m1 + m2; t[1][i] = m1 - m2 - m3;
      }
      for (int i = 0; i < 2; ++i) {
        const lt_f16 left = t[i][0] + t[i][1] + t[i][2], right = t[i][1] - t[i][2] - t[i][3];
        lt_st(d + i * row + k, left); lt_st(d + i * row + n + k, right);
        sum += left - right;
      }
      const lt_f16 zero = sum - sum;  // NaN unless everything is finite
      odd |= zero != zero;
    }
  }
  int32_t any = 0;
  for (int i = 0; i < 16; ++i) any |= odd[i];
  return any != 0;
}
// u[16][panel][c][64] of w[3][3] at (channel, column): rows of G are (1,0,0), (.5,.5,.5), (.5,-.5,.5), (0,0,1).
static inline void lt_winograd_weight(const float* g, float* u, int64_t plane) {
  double t[4][3];
  for (int k = 0; k < 3; ++k) {
    const double a = g[k], b = g[3 + k], c = g[6 + k];
    t[0][k] = a; t[1][k] = (a + b + c) * 0.5; t[2][k] = (a - b + c) * 0.5; t[3][k] = c;
  }
  for (int i = 0; i < 4; ++i) {
    const double a = t[i][0], b = t[i][1], c = t[i][2];
    u[(i * 4) * plane] = (float)a; u[(i * 4 + 1) * plane] = (float)((a + b + c) * 0.5);
    u[(i * 4 + 2) * plane] = (float)((a - b + c) * 0.5); u[(i * 4 + 3) * plane] = (float)c;
  }
}
struct lt_multiply {  // weighted sum
  static constexpr float first = 0.0f;
  LT lt_f16 step(lt_f16 a, lt_f16 x, lt_f16 w) {
#ifdef __AVX512F__
    typedef float whole __attribute__((vector_size(64)));
    return (lt_f16)__builtin_ia32_vfmaddps512_mask((whole)x, (whole)w, (whole)a, -1, 4);
#else
    for (int i = 0; i < 16; ++i) a[i] = __builtin_fmaf(x[i], w[i], a[i]);
    return a;
#endif
  }
  LT float step(float a, float x, float w) { return __builtin_fmaf(x, w, a); }
};
struct lt_largest {  // NaN wins
  static constexpr float first = -__builtin_inff();
  LT lt_f16 step(lt_f16 a, lt_f16 x, lt_f16) { return ((x > a) | (x != x)) ? x : a; }
  LT float step(float a, float x, float) { return (x > a) | (x != x) ? x : a; }
};
struct lt_total {
  static constexpr float first = 0.0f;
  LT lt_f16 step(lt_f16 a, lt_f16 x, lt_f16) { return a + x; }
  LT float step(float a, float x, float) { return a + x; }
};
// P pixels with channels in the lanes: rows[kh][column][c] from the first pixel's first column, w[taps][c],
// acc[P][c]; c is a multiple of 16.
template <class Op, int P, int KH, int KW, int SW, int DW>
static void lt_lane_block(const float* const* rows, const float* w, float* acc, int64_t c) {
  for (int64_t k = 0; k < c; k += 16) {
    lt_f16 a[P];
    for (int p = 0; p < P; ++p) for (int i = 0; i < 16; ++i) a[p][i] = Op::first;
    _Pragma("GCC unroll 32") for (int kh = 0; kh < KH; ++kh)
      _Pragma("GCC unroll 32") for (int kw = 0; kw < KW; ++kw) {
        const lt_f16 t = lt_ld(w + (kh * KW + kw) * c + k);
        _Pragma("GCC unroll 8") for (int p = 0; p < P; ++p)
          a[p] = Op::step(a[p], lt_ld(rows[kh] + (p * SW + kw * DW) * c + k), t);
      }
    _Pragma("GCC unroll 8") for (int p = 0; p < P; ++p) lt_st(acc + p * c + k, a[p]);
  }
}
// Columns x ... x + n of each row, those outside [0, width) filled with Op::first (0, or -inf for a maximum).
template <class Op>
static void lt_lane_edge(const float* const* rows, int64_t count, int64_t x, int64_t n, int64_t width, int64_t c,
                         float* into, const float** made) {
  const int64_t lo = x < 0 ? -x : 0, to = width - x < n ? width - x : n, hi = to > lo ? to : lo;
  for (int64_t r = 0; r < count; ++r, into += n * c) {
    made[r] = into;
    lt_fill(into, lo * c, Op::first);
    std::memcpy(into + lo * c, rows[r] + (x + lo) * c, (hi - lo) * c * 4);
    lt_fill(into + hi * c, (n - hi) * c, Op::first);
  }
}
// P output rows of one channel, pixels in the lanes: x[row][column], w[taps], acc[P][columns]; n is a multiple of 16.
template <class Op, int P, int KH, int KW, int SH, int DH, int DW>
static void lt_plane_rows(const float* x, int64_t row, const float* w, float* acc, int64_t n) {
  lt_f16 t[KH * KW];
  for (int k = 0; k < KH * KW; ++k) for (int i = 0; i < 16; ++i) t[k][i] = w[k];
  for (int64_t q = 0; q < n; q += 16) {
    lt_f16 a[P];
    for (int p = 0; p < P; ++p) for (int i = 0; i < 16; ++i) a[p][i] = Op::first;
    _Pragma("GCC unroll 32") for (int kh = 0; kh < KH; ++kh)
      _Pragma("GCC unroll 32") for (int kw = 0; kw < KW; ++kw)
        _Pragma("GCC unroll 8") for (int p = 0; p < P; ++p)
          a[p] = Op::step(a[p], lt_ld(x + (p * SH + kh * DH) * row + q + kw * DW), t[kh * KW + kw]);
    _Pragma("GCC unroll 8") for (int p = 0; p < P; ++p) lt_st(acc + p * n + q, a[p]);
  }
}
// The same with steps between the columns of an output row.
template <class Op, int KH, int KW, int SW, int DH, int DW>
static void lt_plane_row(const float* __restrict x, int64_t row, const float* __restrict w, float* __restrict acc,
                         int64_t n) {
  float t[KH * KW];
  for (int k = 0; k < KH * KW; ++k) t[k] = w[k];
  _Pragma("omp simd") for (int64_t q = 0; q < n; ++q) {
    float a = Op::first;
    _Pragma("GCC unroll 32") for (int kh = 0; kh < KH; ++kh)
      _Pragma("GCC unroll 32") for (int kw = 0; kw < KW; ++kw)
        a = Op::step(a, x[kh * DH * row + q * SW + kw * DW], t[kh * KW + kw]);
    acc[q] = a;
  }
}
