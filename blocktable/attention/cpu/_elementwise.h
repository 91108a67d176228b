// Row-wise operations between the matrix products of a decoder layer, each in one pass.
//
// Included once per instruction set level inside namespace BT_NS, after _simd.h. They compute in
// float32 whatever the element type, and round once at the end.

template <class T>
static inline vf load_some(const T* p, int64_t left) {
  return left >= W ? load(p) : load_part(p, int(left));
}

template <class T>
static inline void store_some(T* p, vf x, int64_t left) {
  if (left >= W) store(p, x);
  else store_part_as(p, x, int(left));
}

// out = x / sqrt(mean(x^2) + eps) * (weight + shift) for rows [first, end).
template <class T>
static void norm_as(const Norm& n, int64_t first, int64_t end) {
  const T* weight = (const T*)n.weight;
  for (int64_t row = first; row < end; row++) {
    const T* x = (const T*)n.x + row * n.x_row;
    T* out = (T*)n.out + row * n.size;
    vf squares[2] = {zero(), zero()};
    int64_t d = 0;
    for (; d + 2 * W <= n.size; d += 2 * W) {
      vf a = load(x + d), b = load(x + d + W);
      squares[0] = fma(a, a, squares[0]);
      squares[1] = fma(b, b, squares[1]);
    }
    for (; d < n.size; d += W) {
      vf a = load_some(x + d, n.size - d);
      squares[0] = fma(a, a, squares[0]);
    }
    const float mean = sum(add(squares[0], squares[1])) / float(n.size);
    const vf factor = set1(1.0f / std::sqrt(mean + n.eps)), shift = set1(n.shift);
    for (d = 0; d < n.size; d += W) {
      vf w = add(load_some(weight + d, n.size - d), shift);
      store_some(out + d, mul(mul(load_some(x + d, n.size - d), factor), w), n.size - d);
    }
  }
}

static void norm_rows(const Norm& n, int64_t first, int64_t end) {
  if (n.type == Type::f32) norm_as<float>(n, first, end);
  else if (n.type == Type::bf16) norm_as<bf16>(n, first, end);
  else norm_as<f16>(n, first, end);
}

// out = x * cos + rotate_half(x) * sin for tokens [first, end), all heads.
template <class T>
static void rotate_as(const Rotate& r, int64_t first, int64_t end) {
  const int64_t half = r.size / 2;
  for (int64_t token = first; token < end; token++) {
    const T *cos = (const T*)r.cos + token * r.angle_token, *sin = (const T*)r.sin + token * r.angle_token;
    for (int64_t head = 0; head < r.heads; head++) {
      const T* x = (const T*)r.x + token * r.x_token + head * r.x_head;
      T* out = (T*)r.out + token * r.out_token + head * r.out_head;
      for (int64_t d = 0; d < half; d += W) {
        const int64_t left = half - d;
        vf low = load_some(x + d, left), high = load_some(x + half + d, left);
        vf a = sub(mul(low, load_some(cos + d, left)), mul(high, load_some(sin + d, left)));
        vf b = add(mul(high, load_some(cos + half + d, left)), mul(low, load_some(sin + half + d, left)));
        store_some(out + d, a, left);
        store_some(out + half + d, b, left);
      }
    }
  }
}

static void rotate_tokens(const Rotate& r, int64_t first, int64_t end) {
  if (r.type == Type::f32) rotate_as<float>(r, first, end);
  else if (r.type == Type::bf16) rotate_as<bf16>(r, first, end);
  else rotate_as<f16>(r, first, end);
}
