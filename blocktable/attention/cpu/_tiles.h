// The products of one tile of keys: scores from keys, weighted sums of values.
//
// Included once per instruction set level inside namespace BT_NS, after _simd.h. The direct forms
// (few query rows) read keys and values in their pages and fetch the next tile meanwhile; the packed
// forms (many rows) are small matrix products over a transposed copy.

constexpr int KT = 64;  // keys a tile

struct Scratch {
  float* q;       // [rows, dp]
  float* scores;  // [rows, KT]
  float* acc;     // [rows, vp]
  float* max;     // [rows]
  float* total;   // [rows]
  float* keys;    // [D, KT]
  float* values;  // [KT, vp]
};

static inline int64_t padded(int64_t n) { return (n + 15) / 16 * 16; }

// scores[r][0..4) = q[r] . k[0..4) for R query rows.
template <int R, class T>
static inline void dot4(const float* q, int64_t dp, const T* const* k, int64_t size, float* scores) {
  vf acc[R][4];
  for (int r = 0; r < R; r++)
    for (int j = 0; j < 4; j++) acc[r][j] = zero();
  int64_t d = 0;
  for (; d + W <= size; d += W) {
    vf x[4] = {load(k[0] + d), load(k[1] + d), load(k[2] + d), load(k[3] + d)};
    for (int r = 0; r < R; r++) {
      vf y = load(q + r * dp + d);
      for (int j = 0; j < 4; j++) acc[r][j] = fma(x[j], y, acc[r][j]);
    }
  }
  if (d < size) {
    int n = int(size - d);
    vf x[4] = {load_part(k[0] + d, n), load_part(k[1] + d, n), load_part(k[2] + d, n),
               load_part(k[3] + d, n)};
    for (int r = 0; r < R; r++) {
      vf y = load(q + r * dp + d);
      for (int j = 0; j < 4; j++) acc[r][j] = fma(x[j], y, acc[r][j]);
    }
  }
  for (int r = 0; r < R; r++)
    sum4(acc[r][0], acc[r][1], acc[r][2], acc[r][3], scores + r * KT);
}

template <class T>
static inline void fetch_row(const T* row, int64_t size) {
  for (int64_t d = 0; d < size; d += int64_t(64 / sizeof(T))) __builtin_prefetch(row + d, 0, 3);
}

template <class T>
static void scores_direct(const Scratch& s, int rows, int64_t dp, const T** k, const T** next,
                          int count, int next_count, int64_t size) {
  for (int j = count; j % 4; j++) k[j] = k[count - 1];
  for (int j = 0; j < std::max(count, next_count); j += 4) {
    for (int i = j; i < std::min(j + 4, next_count); i++) fetch_row(next[i], size);
    if (j >= count) continue;
    for (int r = 0; r < rows;) {
      const float* q = s.q + r * dp;
      float* to = s.scores + r * KT + j;
      switch (rows - r) {
        case 1: dot4<1>(q, dp, k + j, size, to); r += 1; break;
        case 2: dot4<2>(q, dp, k + j, size, to); r += 2; break;
        case 3: dot4<3>(q, dp, k + j, size, to); r += 3; break;
        default: dot4<4>(q, dp, k + j, size, to); r += 4; break;
      }
    }
  }
}

// acc[r][0 .. N*W) += weights[r] . v rows; the last vector has `part` lanes.
template <int R, int N, class T>
static inline void absorb(const float* weights, const T* const* v, int count, int64_t d, int part,
                          float* acc, int64_t vp) {
  vf sums[R][N];
  for (int r = 0; r < R; r++)
    for (int i = 0; i < N; i++) sums[r][i] = load(acc + r * vp + d + i * W);
  for (int j = 0; j < count; j++) {
    vf x[N];
    for (int i = 0; i < N; i++)
      x[i] = i < N - 1 || part == W ? load(v[j] + d + i * W) : load_part(v[j] + d + i * W, part);
    for (int r = 0; r < R; r++) {
      vf w = set1(weights[r * KT + j]);
      for (int i = 0; i < N; i++) sums[r][i] = fma(w, x[i], sums[r][i]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int i = 0; i < N; i++) store(acc + r * vp + d + i * W, sums[r][i]);
}

template <int R, class T>
static void absorb_rows(const float* weights, const T* const* v, int count, int64_t size,
                        float* acc, int64_t vp) {
  int64_t d = 0;
  for (; d + 4 * W <= size; d += 4 * W) absorb<R, 4>(weights, v, count, d, W, acc, vp);
  while (d < size) {
    int64_t left = size - d;
    if (left >= 2 * W) { absorb<R, 2>(weights, v, count, d, W, acc, vp); d += 2 * W; continue; }
    absorb<R, 1>(weights, v, count, d, int(std::min<int64_t>(left, W)), acc, vp);
    d += W;
  }
}

template <class T>
static void absorb_direct(const Scratch& s, int rows, const T* const* v, const T* const* next,
                          int count, int next_count, int64_t size, int64_t vp) {
  for (int j = 0; j < next_count; j++) fetch_row(next[j], size);
  for (int r = 0; r < rows;) {
    const float* w = s.scores + r * KT;
    float* acc = s.acc + r * vp;
    switch (rows - r) {
      case 1: absorb_rows<1>(w, v, count, size, acc, vp); r += 1; break;
      case 2: absorb_rows<2>(w, v, count, size, acc, vp); r += 2; break;
      case 3: absorb_rows<3>(w, v, count, size, acc, vp); r += 3; break;
      default: absorb_rows<4>(w, v, count, size, acc, vp); r += 4; break;
    }
  }
}

// Columns of `keys` [size, KT] become the keys; columns past `count` are zero.
template <class T>
static void transpose_keys(const T* const* k, int count, int64_t size, float* keys) {
  for (int j = 0; j < KT; j += W) {
    for (int64_t d = 0; d < size; d += W) {
      int n = int(std::min<int64_t>(W, size - d));
      vf block[W];
      for (int i = 0; i < W; i++)
        block[i] = j + i >= count ? zero() : n == W ? load(k[j + i] + d) : load_part(k[j + i] + d, n);
      transpose(block);
      for (int i = 0; i < n; i++) store(keys + (d + i) * KT + j, block[i]);
    }
  }
}

#if BT_LEVEL == 512
constexpr int MR = 6, NV = 4;
#elif BT_LEVEL == 256
constexpr int MR = 6, NV = 2;
#else
constexpr int MR = 4, NV = 2;
#endif

// c[r][0 .. N*W) (+)= sum over i < depth of a[r][i] * b[i][0 .. N*W); a, c row-major.
template <int R, int N, bool ADD>
static inline void block_product(const float* a, int64_t lda, const float* b, int64_t ldb,
                                 int64_t depth, float* c, int64_t ldc) {
  vf sums[R][N];
  for (int r = 0; r < R; r++)
    for (int i = 0; i < N; i++) sums[r][i] = ADD ? load(c + r * ldc + i * W) : zero();
  for (int64_t d = 0; d < depth; d++, b += ldb) {
    vf x[N];
    for (int i = 0; i < N; i++) x[i] = load(b + i * W);
    for (int r = 0; r < R; r++) {
      vf w = set1(a[r * lda + d]);
      for (int i = 0; i < N; i++) sums[r][i] = fma(w, x[i], sums[r][i]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int i = 0; i < N; i++) store(c + r * ldc + i * W, sums[r][i]);
}

template <int N, bool ADD>
static void product_rows(const float* a, int64_t lda, const float* b, int64_t ldb, int64_t depth,
                         float* c, int64_t ldc, int rows) {
  int r = 0;
  for (; r + MR <= rows; r += MR)
    block_product<MR, N, ADD>(a + r * lda, lda, b, ldb, depth, c + r * ldc, ldc);
  for (; r + 2 <= rows; r += 2)
    block_product<2, N, ADD>(a + r * lda, lda, b, ldb, depth, c + r * ldc, ldc);
  if (r < rows) block_product<1, N, ADD>(a + r * lda, lda, b, ldb, depth, c + r * ldc, ldc);
}

// c [rows, n] (+)= a [rows, depth] b [depth, n], n a multiple of W.
template <bool ADD>
static void product(const float* a, int64_t lda, const float* b, int64_t ldb, int64_t depth,
                    float* c, int64_t ldc, int rows, int64_t n) {
  int64_t d = 0;
  for (; d + NV * W <= n; d += NV * W)
    product_rows<NV, ADD>(a, lda, b + d, ldb, depth, c + d, ldc, rows);
  for (; d < n; d += W) product_rows<1, ADD>(a, lda, b + d, ldb, depth, c + d, ldc, rows);
}
