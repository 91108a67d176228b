// Attention of one work item: a tile of query rows over a run of keys in pages, in one pass.
//
// Included once per instruction set level inside namespace BT_NS, after _tiles.h. Rows are query
// tokens x heads of the group. Up to kDirectRows rows (decode), keys are read straight from their
// pages and dotted against the rows; above (prefill), each tile of keys is transposed once and both
// products run as small matrix products.

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

// One step of the online softmax for one query row: scores become weights, acc is rescaled.
// The row sees the tile's keys [0, head) and [first, end) of `count`; `slope * (key - position)` is
// added.
static void soften(const Call& c, float* scores, int head, int first, int end, int count,
                   float slope, float offset, float* max, float* total, float* acc, int64_t vp) {
  const int n = (count + W - 1) / W;
  const bool whole = first <= 0 && end >= n * W;
  const vf low = set1(float(first)), high = set1(float(end)), none = set1(-INFINITY);
  const vf sinks = set1(float(head));
  vf best = none;
  for (int i = 0; i < n; i++) {
    vf x = load(scores + i * W), index = add(lanes(), set1(float(i * W)));
    if (c.softcap > 0) x = mul(vtanh(mul(x, set1(1 / c.softcap))), set1(c.softcap));
    if (slope != 0) x = fma(add(index, set1(offset)), set1(slope), x);
    if (!whole)
      x = where_in(x, index, low, high, head > 0 ? where_in(x, index, none, sinks, none) : none);
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
      const Seen seen = visible(shape, position, len);
      const float slope = c.slopes ? c.slopes[item.kv * group + r % group] : 0.0f;
      auto in_tile = [&](int64_t key) { return int(std::clamp<int64_t>(key - at, 0, count)); };
      soften(c, s.scores + r * KT, in_tile(seen.head), in_tile(seen.first), in_tile(seen.end), count,
             slope, float(at - position), s.max + r, s.total + r, s.acc + r * vp, vp);
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
