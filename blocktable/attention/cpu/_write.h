// Copies key or value rows of tokens into their slots, converting the element type.
//
// Included once per instruction set level inside namespace BT_NS, after _simd.h.

template <class S, class T>
static inline void convert_row(const S* from, T* to, int64_t n, float factor) {
  if (std::is_same<S, T>::value && factor == 1.0f) {
    memcpy((void*)to, (const void*)from, n * sizeof(T));
    return;
  }
  int64_t d = 0;
  for (; d + W <= n; d += W) store(to + d, mul(load(from + d), set1(factor)));
  if (d < n) store_part_as(to + d, mul(load_part(from + d, int(n - d)), set1(factor)), int(n - d));
}

template <class S, class T>
static void write_as(const Write& w, int64_t first, int64_t end) {
  for (int64_t token = first; token < end; token++) {
    const int64_t slot = w.slots[token];
    if (slot < 0) continue;
    const S* from = (const S*)w.from + token * w.from_token;
    T* to = (T*)w.to + slot / w.block_size * w.at.block + slot % w.block_size * w.at.token;
    for (int64_t h = 0; h < w.kv_heads; h++)
      convert_row(from + h * w.from_head, to + h * w.at.head, w.size, w.factor ? 1.0f / w.factor[h] : 1.0f);
  }
}

template <class S>
static void write_from(const Write& w, int64_t first, int64_t end) {
  if (w.to_type == Type::f32) write_as<S, float>(w, first, end);
  else if (w.to_type == Type::bf16) write_as<S, bf16>(w, first, end);
  else write_as<S, f16>(w, first, end);
}

static void write_tokens(const Write& w, int64_t first, int64_t end) {
  if (w.from_type == Type::f32) write_from<float>(w, first, end);
  else if (w.from_type == Type::bf16) write_from<bf16>(w, first, end);
  else write_from<f16>(w, first, end);
}
