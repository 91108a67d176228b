// A float vector and the few operations the kernels need, at one instruction set level.
//
// Included once per level by _kernels.cpp, inside namespace BT_NS and under the compiler's target
// pragma for that level. BT_LEVEL: 512 = AVX-512 (F, BW, DQ, VL), 256 = AVX2 + FMA + F16C,
// 0 = whatever the compiler's baseline is (SSE2, NEON), written with vector extensions.

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

static inline float bits_to_float(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
static inline uint32_t float_to_bits(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }

static inline float to_float(float x) { return x; }
static inline float to_float(bf16 x) { return bits_to_float(uint32_t(x.bits) << 16); }
static inline float to_float(f16 x) {
  // Shift exponent and mantissa into place and let one multiplication renormalise subnormals.
  uint32_t sign = uint32_t(x.bits & 0x8000) << 16, rest = uint32_t(x.bits & 0x7fff) << 13;
  if (rest >= (0x1fu << 23)) return bits_to_float(sign | 0x7f800000 | (rest & 0x7fffff));
  return bits_to_float(sign | float_to_bits(bits_to_float(rest) * 0x1p112f));
}
static inline void from_float(float f, float* out) { *out = f; }
static inline void from_float(float f, bf16* out) {
  uint32_t u = float_to_bits(f);
  if ((u & 0x7fffffff) > 0x7f800000) { out->bits = uint16_t((u >> 16) | 0x40); return; }
  out->bits = uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
static inline void from_float(float f, f16* out) {
  uint32_t u = float_to_bits(f), sign = (u >> 16) & 0x8000, mag = u & 0x7fffffff;
  if (mag > 0x7f800000) { out->bits = uint16_t(sign | 0x7e00); return; }
  if (mag >= 0x477ff000) { out->bits = uint16_t(sign | 0x7c00); return; }  // rounds past 65504
  if (mag < 0x38800000) {  // subnormal: adding 0.5 aligns the mantissa and rounds to even
    out->bits = uint16_t(sign | (float_to_bits(bits_to_float(mag) + 0.5f) - 0x3f000000));
    return;
  }
  mag += 0xc8000fff + ((mag >> 13) & 1);
  out->bits = uint16_t(sign | (mag >> 13));
}

#if BT_LEVEL == 512
constexpr int W = 16;
using vf = __m512;
static inline vf zero() { return _mm512_setzero_ps(); }
static inline vf set1(float x) { return _mm512_set1_ps(x); }
static inline vf load(const float* p) { return _mm512_loadu_ps(p); }
static inline void store(float* p, vf x) { _mm512_storeu_ps(p, x); }
static inline vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
static inline vf add(vf a, vf b) { return _mm512_add_ps(a, b); }
static inline vf sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
static inline vf mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
static inline vf div(vf a, vf b) { return _mm512_div_ps(a, b); }
static inline vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }
static inline float sum(vf x) { return _mm512_reduce_add_ps(x); }
static inline float top(vf x) { return _mm512_reduce_max_ps(x); }
static inline vf lanes() {
  return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}
static inline vf where_in(vf x, vf index, vf first, vf end, vf other) {
  __mmask16 in = _mm512_cmp_ps_mask(index, first, _CMP_GE_OQ) &
                 _mm512_cmp_ps_mask(index, end, _CMP_LT_OQ);
  return _mm512_mask_blend_ps(in, other, x);
}
static inline __mmask16 first_lanes(int n) { return __mmask16((1u << n) - 1); }
static inline vf load_part(const float* p, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
static inline void store_part(float* p, vf x, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), x); }
static inline vf widen_bf16(__m256i x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
static inline vf load(const bf16* p) { return widen_bf16(_mm256_loadu_si256((const __m256i*)p)); }
static inline vf load_part(const bf16* p, int n) {
  return widen_bf16(_mm256_maskz_loadu_epi16(first_lanes(n), p));
}
static inline vf load(const f16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
static inline vf load_part(const f16* p, int n) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(n), p));
}
static inline void store(bf16* p, vf x) {
  __m512i u = _mm512_castps_si512(x);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i r = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  r = _mm512_mask_blend_epi32(nan, r, _mm512_set1_epi32(0x7fc0));
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(r));
}
static inline void store(f16* p, vf x) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
static inline vf round_even(vf x) { return _mm512_roundscale_ps(x, 8); }
static inline vf scale_by_power(vf x, vf n) { return _mm512_scalef_ps(x, n); }
static inline void sum4(vf a, vf b, vf c, vf d, float* out) {
  vf ab = add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  vf cd = add(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  vf q = add(_mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd))),
             _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd))));
  __m256 h = _mm256_add_ps(_mm512_castps512_ps256(q), _mm512_extractf32x8_ps(q, 1));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1)));
}
static inline void transpose(vf* r) {  // 16 x 16
  vf t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xee);
    r[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; i++) {
    r[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xdd);
  }
}
#elif BT_LEVEL == 256
constexpr int W = 8;
using vf = __m256;
static inline vf zero() { return _mm256_setzero_ps(); }
static inline vf set1(float x) { return _mm256_set1_ps(x); }
static inline vf load(const float* p) { return _mm256_loadu_ps(p); }
static inline void store(float* p, vf x) { _mm256_storeu_ps(p, x); }
static inline vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
static inline vf add(vf a, vf b) { return _mm256_add_ps(a, b); }
static inline vf sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
static inline vf mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
static inline vf div(vf a, vf b) { return _mm256_div_ps(a, b); }
static inline vf vmax(vf a, vf b) { return _mm256_max_ps(a, b); }
static inline vf lanes() { return _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7); }
static inline float sum(vf x) {
  __m128 h = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  h = _mm_add_ps(h, _mm_movehl_ps(h, h));
  return _mm_cvtss_f32(_mm_add_ss(h, _mm_shuffle_ps(h, h, 1)));
}
static inline float top(vf x) {
  __m128 h = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  h = _mm_max_ps(h, _mm_movehl_ps(h, h));
  return _mm_cvtss_f32(_mm_max_ss(h, _mm_shuffle_ps(h, h, 1)));
}
static inline vf where_in(vf x, vf index, vf first, vf end, vf other) {
  vf in = _mm256_and_ps(_mm256_cmp_ps(index, first, _CMP_GE_OQ), _mm256_cmp_ps(index, end, _CMP_LT_OQ));
  return _mm256_blendv_ps(other, x, in);
}
static inline __m256i first_lanes(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
static inline vf load_part(const float* p, int n) { return _mm256_maskload_ps(p, first_lanes(n)); }
static inline void store_part(float* p, vf x, int n) { _mm256_maskstore_ps(p, first_lanes(n), x); }
static inline vf load(const bf16* p) {
  __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
static inline vf load(const f16* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
template <class T> static inline vf load_part(const T* p, int n) {
  T part[8] = {};
  memcpy(part, p, n * sizeof(T));
  return load(part);
}
static inline void store(bf16* p, vf x) {
  __m256i u = _mm256_castps_si256(x);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  __m256i r = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  r = _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7fc0), nan);
  _mm_storeu_si128((__m128i*)p, _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1)));
}
static inline void store(f16* p, vf x) { _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x, 0)); }
static inline vf round_even(vf x) { return _mm256_round_ps(x, 8); }
static inline vf scale_by_power(vf x, vf n) {  // n in -126..127
  __m256i e = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(x, _mm256_castsi256_ps(e));
}
static inline void sum4(vf a, vf b, vf c, vf d, float* out) {
  vf q = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(q), _mm256_extractf128_ps(q, 1)));
}
static inline void transpose(vf* r) {  // 8 x 8
  vf t[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int i = 0; i < 4; i++) {
    vf low = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
    r[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
    r[i] = low;
  }
}
#else
constexpr int W = 4;
typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));
static inline vf zero() { return vf{0, 0, 0, 0}; }
static inline vf set1(float x) { return vf{x, x, x, x}; }
static inline vf load(const float* p) { vf x; memcpy(&x, p, 16); return x; }
static inline void store(float* p, vf x) { memcpy(p, &x, 16); }
static inline vf fma(vf a, vf b, vf c) { return a * b + c; }
static inline vf add(vf a, vf b) { return a + b; }
static inline vf sub(vf a, vf b) { return a - b; }
static inline vf mul(vf a, vf b) { return a * b; }
static inline vf div(vf a, vf b) { return a / b; }
static inline vf select(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }
static inline vf vmax(vf a, vf b) { return select((vi)(a > b), a, b); }
static inline float sum(vf x) { return (x[0] + x[2]) + (x[1] + x[3]); }
static inline float top(vf x) {
  float a = x[0] > x[1] ? x[0] : x[1], b = x[2] > x[3] ? x[2] : x[3];
  return a > b ? a : b;
}
static inline vf lanes() { return vf{0, 1, 2, 3}; }
static inline vf where_in(vf x, vf index, vf first, vf end, vf other) {
  return select((vi)(index >= first) & (vi)(index < end), x, other);
}
template <class T> static inline vf load(const T* p) {
  return vf{to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])};
}
template <class T> static inline vf load_part(const T* p, int n) {
  T part[4] = {};
  memcpy(part, p, n * sizeof(T));
  return load(part);
}
static inline void store_part(float* p, vf x, int n) { memcpy(p, &x, n * 4); }
template <class T> static inline void store(T* p, vf x) {
  for (int i = 0; i < 4; i++) from_float(x[i], p + i);
}
static inline vf round_even(vf x) {  // |x| < 2^22
  vf magic = set1(12582912.0f);
  vf shifted = x + magic;
  __asm__("" : "+m"(shifted));  // keeps (x + c) - c from being folded away
  return shifted - magic;
}
static inline vf scale_by_power(vf x, vf n) {
  vi e = (__builtin_convertvector(n, vi) + 127) << 23;
  return x * (vf)e;
}
static inline void sum4(vf a, vf b, vf c, vf d, float* out) {
  out[0] = sum(a); out[1] = sum(b); out[2] = sum(c); out[3] = sum(d);
}
static inline void transpose(vf* r) {
  for (int i = 0; i < 4; i++)
    for (int j = 0; j < i; j++) { float t = r[i][j]; r[i][j] = r[j][i]; r[j][i] = t; }
}
#endif

template <class T> static inline void store_part_as(T* p, vf x, int n) {
  T part[W];
  store(part, x);
  memcpy(p, part, n * sizeof(T));
}

// exp(x) for x <= 88; 0 below -87.3 (-inf included). Relative error < 2e-7.
static inline vf vexp(vf x) {
  vf floor = set1(-87.3f);
  vf y = vmax(floor, x);  // NaN goes through: the second operand wins
  vf n = round_even(mul(y, set1(1.44269504f)));
  vf r = fma(n, set1(-0.693359375f), y);
  r = fma(n, set1(2.12194440e-4f), r);
  vf p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = add(fma(p, mul(r, r), r), set1(1.0f));
  return where_in(zero(), x, set1(-INFINITY), floor, scale_by_power(p, n));
}

static inline vf vtanh(vf x) {  // 1 - 2 / (exp(2x) + 1), absolute error < 3e-7
  vf y = vmax(mul(x, set1(2.0f)), set1(-80.0f));
  vf clipped = sub(zero(), vmax(sub(zero(), y), set1(-80.0f)));
  return sub(set1(1.0f), div(set1(2.0f), add(vexp(clipped), set1(1.0f))));
}
