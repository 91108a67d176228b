// Attention of one work item: a tile of query rows over a run of keys in pages, in one pass.
//
// Included once per instruction set level inside namespace BT_NS, after _simd.h. Rows are query
// tokens x heads of the group. Up to kDirectRows rows (decode), keys are read straight from their
// pages and dotted against the rows; above (prefill), each tile of keys is transposed once and both
// products run as small matrix products.

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

static size_t scratch_floats(const Call& c) {
  int64_t rows = c.plan->max_rows, dp = padded(c.size), vp = padded(c.size_v);
  return size_t(rows * (dp + KT + vp + 2) + (dp + vp) * KT + 7 * 16);
}

static Scratch carve(const Call& c, float* p) {
  int64_t rows = c.plan->max_rows, dp = padded(c.size), vp = padded(c.size_v);
  Scratch s;
  auto take = [&p](int64_t n) { float* at = p; p += padded(n); return at; };
  s.q = take(rows * dp);
  s.scores = take(rows * KT);
  s.acc = take(rows * vp);
  s.max = take(rows);
  s.total = take(rows);
  s.keys = take(dp * KT);
  s.values = take(vp * KT);
  return s;
}

template <class T>
static void load_row(const T* from, int64_t n, float factor, float* to, int64_t n_padded) {
  int64_t d = 0;
  for (; d + W <= n; d += W) store(to + d, mul(load(from + d), set1(factor)));
  if (d < n) { store(to + d, mul(load_part(from + d, int(n - d)), set1(factor))); d += W; }
  for (; d < n_padded; d++) to[d] = 0;
}

template <class T>
static void store_row(T* to, const float* from, int64_t n, float factor) {
  int64_t d = 0;
  for (; d + W <= n; d += W) store(to + d, mul(load(from + d), set1(factor)));
  if (d < n) store_part_as(to + d, mul(load(from + d), set1(factor)), int(n - d));
}

// Start of each key's row for `count` keys from position `first` on.
template <class T>
static void key_rows(const T* base, const int32_t* table, const Pages& at, int block_size,
                     int64_t first, int count, const T** rows) {
  int64_t block = first / block_size, offset = first % block_size;
  for (int j = 0; j < count; block++, offset = 0) {
    const T* row = base + int64_t(table[block]) * at.block + offset * at.token;
    int64_t n = std::min<int64_t>(block_size - offset, count - j);
    for (int64_t i = 0; i < n; i++, row += at.token) rows[j++] = row;
  }
}

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

// One step of the online softmax for one query row: scores become weights, acc is rescaled.
// The row sees the tile's keys [first, end) of `count`; `slope * (key - position)` is added.
static void soften(const Call& c, float* scores, int first, int end, int count, float slope,
                   float offset, float* max, float* total, float* acc, int64_t vp) {
  const int n = (count + W - 1) / W;
  const bool whole = first <= 0 && end >= n * W;
  const vf low = set1(float(first)), high = set1(float(end)), none = set1(-INFINITY);
  vf best = none;
  for (int i = 0; i < n; i++) {
    vf x = load(scores + i * W), index = add(lanes(), set1(float(i * W)));
    if (c.softcap > 0) x = mul(vtanh(mul(x, set1(1 / c.softcap))), set1(c.softcap));
    if (slope != 0) x = fma(add(index, set1(offset)), set1(slope), x);
    if (!whole) x = where_in(x, index, low, high, none);
    store(scores + i * W, x);
    best = vmax(best, x);
  }
  float new_max = std::max(*max, top(best));
  if (new_max == -INFINITY) {
    for (int i = 0; i < n; i++) store(scores + i * W, zero());
    return;
  }
  vf shift = set1(new_max), weights = zero();
  for (int i = 0; i < n; i++) {
    vf x = vexp(sub(load(scores + i * W), shift));
    store(scores + i * W, x);
    weights = add(weights, x);
  }
  if (new_max > *max) {
    float shrink = std::exp(*max - new_max);  // 0 at the first tile
    *total *= shrink;
    for (int64_t d = 0; d < vp; d += W) store(acc + d, mul(load(acc + d), set1(shrink)));
    *max = new_max;
  }
  *total += sum(weights);
}

template <class T>
static void load_queries(const Call& c, const Item& item, const Scratch& s, int64_t dp) {
  const int group = c.plan->shape.group();
  const float factor = c.scale * (c.k_scale ? c.k_scale[item.kv] : 1.0f);
  for (int r = 0; r < item.tokens * group; r++) {
    const T* q = (const T*)c.q + int64_t(item.token + r / group) * c.q_token +
                 int64_t(item.kv * group + r % group) * c.q_head;
    load_row(q, c.size, factor, s.q + r * dp, dp);
  }
}

// Row addresses of the tile of an item's keys at position `at`; returns how many there are.
template <class T>
static int tile_rows(const Call& c, const Item& item, int64_t at, const T** k, const T** v) {
  const int count = int(std::max<int64_t>(0, std::min<int64_t>(KT, item.end - at)));
  const int32_t* table = c.table + item.row * c.table_stride;
  const int block_size = c.plan->shape.block_size;
  key_rows((const T*)c.k + item.kv * c.k_at.head, table, c.k_at, block_size, at, count, k);
  key_rows((const T*)c.v + item.kv * c.v_at.head, table, c.v_at, block_size, at, count, v);
  return count;
}

template <class T>
static void walk_keys(const Call& c, const Item& item, const Item* next, const Scratch& s) {
  const Shape& shape = c.plan->shape;
  const int group = shape.group(), rows = item.tokens * group;
  const int64_t dp = padded(c.size), vp = padded(c.size_v), len = c.plan->lens[item.row];
  const T *k_rows[2][KT + 4], *v_rows[2][KT + 4];
  const bool direct = rows <= kDirectRows;
  int side = 0, count = tile_rows(c, item, item.first, k_rows[0], v_rows[0]);
  for (int64_t at = item.first; at < item.end; at += KT, side ^= 1) {
    // What is read next, so that its pages are on their way: the next tile or, at the end, the
    // first tile of the next item (short requests have but one: 157 -> 90 us for 32 x 40 tokens,
    // bfloat16, 3 heads of 64, one thread, nothing in a cache).
    const T **k_next = k_rows[side ^ 1], **v_next = v_rows[side ^ 1];
    const int next_count = tile_rows(c, item, at + KT, k_next, v_next);
    const int fetch_count =
        next_count || !next ? next_count : tile_rows(c, *next, next->first, k_next, v_next);
    if (direct) {
      scores_direct(s, rows, dp, k_rows[side], k_next, count, fetch_count, c.size);
    } else {
      transpose_keys(k_rows[side], count, c.size, s.keys);
      product<false>(s.q, dp, s.keys, KT, c.size, s.scores, KT, rows, KT);
    }
    for (int r = 0; r < rows; r++) {
      const int64_t position = item.position + r / group;
      const Range seen = visible(shape, position, len);
      const float slope = c.slopes ? c.slopes[item.kv * group + r % group] : 0.0f;
      soften(c, s.scores + r * KT, int(std::max<int64_t>(seen.first - at, 0)),
             int(std::min<int64_t>(std::max<int64_t>(seen.end - at, 0), count)), count, slope,
             float(at - position), s.max + r, s.total + r, s.acc + r * vp, vp);
    }
    if (direct) {
      absorb_direct(s, rows, v_rows[side], v_next, count, fetch_count, c.size_v, vp);
    } else {
      for (int j = 0; j < count; j++)
        load_row(v_rows[side][j], c.size_v, 1.0f, s.values + j * vp, vp);
      product<true>(s.scores, KT, s.values, vp, count, s.acc, vp, rows, vp);
    }
    count = next_count;
  }
}

// Divide by the softmax denominator and store the rows of an item.
template <class T>
static void store_result(const Call& c, const Item& item, float* acc, float* max, float* total) {
  const int group = c.plan->shape.group();
  const int64_t vp = padded(c.size_v);
  for (int r = 0; r < item.tokens * group; r++) {
    const int64_t token = item.token + r / group, head = item.kv * group + r % group;
    float factor = 1, denominator = total[r], peak = max[r];
    if (c.sinks) {
      peak = std::max(max[r], c.sinks[head]);
      factor = max[r] == -INFINITY ? 0.0f : std::exp(max[r] - peak);
      denominator = denominator * factor + std::exp(c.sinks[head] - peak);
    }
    const bool empty = denominator == 0;
    factor = empty ? 0.0f : factor * (c.v_scale ? c.v_scale[item.kv] : 1.0f) / denominator;
    store_row((T*)c.out + token * c.out_token + head * c.out_head, acc + r * vp, c.size_v, factor);
    if (c.lse) c.lse[token * c.plan->shape.heads + head] = empty ? -INFINITY : peak + std::log(denominator);
  }
}

static void store_any(const Call& c, const Item& item, float* acc, float* max, float* total) {
  if (c.q_type == Type::f32) store_result<float>(c, item, acc, max, total);
  else if (c.q_type == Type::bf16) store_result<bf16>(c, item, acc, max, total);
  else store_result<f16>(c, item, acc, max, total);
}

// Fold the partial results of a split item, in the order of their keys, into scratch and store.
static void merge_parts(const Call& c, const Merge& merge, const float* parts, const Scratch& s) {
  const Item& item = c.plan->items[merge.item];
  const int rows = item.tokens * c.plan->shape.group();
  const int64_t vp = padded(c.size_v), stride = vp + 2;
  for (int r = 0; r < rows; r++) {
    const float* first = parts + (merge.first_row + r) * stride;
    float peak = -INFINITY, total = 0;
    for (int p = 0; p < merge.parts; p++) peak = std::max(peak, first[p * rows * stride + vp]);
    float* acc = s.acc + r * vp;
    for (int64_t d = 0; d < vp; d += W) store(acc + d, zero());
    for (int p = 0; p < merge.parts && peak > -INFINITY; p++) {
      const float* part = first + p * rows * stride;
      float factor = std::exp(part[vp] - peak);
      total += part[vp + 1] * factor;
      for (int64_t d = 0; d < vp; d += W) store(acc + d, fma(load(part + d), set1(factor), load(acc + d)));
    }
    s.max[r] = peak;
    s.total[r] = total;
  }
  store_any(c, item, s.acc, s.max, s.total);
}

// `next`: the item this thread runs afterwards, or null.
static void run_item(const Call& c, const Item& item, const Item* next, float* memory) {
  Scratch s = carve(c, memory);
  const int rows = item.tokens * c.plan->shape.group();
  const int64_t dp = padded(c.size), vp = padded(c.size_v);
  if (c.q_type == Type::f32) load_queries<float>(c, item, s, dp);
  else if (c.q_type == Type::bf16) load_queries<bf16>(c, item, s, dp);
  else load_queries<f16>(c, item, s, dp);
  for (int64_t i = 0; i < rows * vp; i += W) store(s.acc + i, zero());
  for (int r = 0; r < rows; r++) { s.max[r] = -INFINITY; s.total[r] = 0; }
  if (c.kv_type == Type::f32) walk_keys<float>(c, item, next, s);
  else if (c.kv_type == Type::bf16) walk_keys<bf16>(c, item, next, s);
  else walk_keys<f16>(c, item, next, s);
  if (item.part < 0) { store_any(c, item, s.acc, s.max, s.total); return; }
  const Merge& merge = c.plan->merges[item.merge];
  for (int r = 0; r < rows; r++) {
    float* to = c.parts + (merge.first_row + int64_t(item.part) * rows + r) * (vp + 2);
    memcpy(to, s.acc + r * vp, vp * sizeof(float));
    to[vp] = s.max[r];
    to[vp + 1] = s.total[r];
  }
  if (c.pending[item.merge].fetch_sub(1) == 1) merge_parts(c, merge, c.parts, s);
}
