/* SHA-256, with the processor's instructions where it has them, and its Python type. */
#pragma once

#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#include <immintrin.h>
#define HAVE_X86 1
#endif

typedef struct {
    uint32_t h[8];
    uint64_t length; /* bytes fed */
    uint8_t tail[64];
} Sha;

static const uint32_t K[64] __attribute__((aligned(16))) = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static inline uint32_t rotr(uint32_t x, int n) { return x >> n | x << (32 - n); }

static inline uint32_t load_be(const uint8_t *p) {
    return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
}

static void compress_plain(uint32_t h[8], const uint8_t *data, size_t blocks) {
    uint32_t w[64];
    for (; blocks; blocks--, data += 64) {
        for (int i = 0; i < 16; i++) w[i] = load_be(data + 4 * i);
        for (int i = 16; i < 64; i++) {
            uint32_t a = w[i - 15], b = w[i - 2];
            w[i] = w[i - 16] + w[i - 7] + (rotr(a, 7) ^ rotr(a, 18) ^ a >> 3) +
                   (rotr(b, 17) ^ rotr(b, 19) ^ b >> 10);
        }
        uint32_t s[8];
        memcpy(s, h, 32);
        for (int i = 0; i < 64; i++) {
            uint32_t e = s[4], a = s[0];
            uint32_t t1 = s[7] + (rotr(e, 6) ^ rotr(e, 11) ^ rotr(e, 25)) +
                          ((e & s[5]) ^ (~e & s[6])) + K[i] + w[i];
            uint32_t t2 = (rotr(a, 2) ^ rotr(a, 13) ^ rotr(a, 22)) +
                          ((a & s[1]) ^ (a & s[2]) ^ (s[1] & s[2]));
            memmove(s + 1, s, 28);
            s[4] += t1;
            s[0] = t1 + t2;
        }
        for (int i = 0; i < 8; i++) h[i] += s[i];
    }
}

#ifdef HAVE_X86
__attribute__((target("sha,sse4.1,ssse3")))
static void compress_sha(uint32_t h[8], const uint8_t *data, size_t blocks) {
    const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
    __m128i low = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)h), 0xB1);
    __m128i s1 = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)(h + 4)), 0x1B);
    __m128i s0 = _mm_alignr_epi8(low, s1, 8);
    s1 = _mm_blend_epi16(s1, low, 0xF0);
    for (; blocks; blocks--, data += 64) {
        __m128i m[4], save0 = s0, save1 = s1;
        for (int i = 0; i < 4; i++)
            m[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(data + 16 * i)), swap);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            __m128i k = _mm_add_epi32(m[i & 3], _mm_load_si128((const __m128i *)(K + 4 * i)));
            s1 = _mm_sha256rnds2_epu32(s1, s0, k);
            s0 = _mm_sha256rnds2_epu32(s0, s1, _mm_shuffle_epi32(k, 0x0E));
            if (i < 12) {
                __m128i c = m[(i + 2) & 3], d = m[(i + 3) & 3];
                __m128i t = _mm_sha256msg1_epu32(m[i & 3], m[(i + 1) & 3]);
                m[i & 3] = _mm_sha256msg2_epu32(_mm_add_epi32(t, _mm_alignr_epi8(d, c, 4)), d);
            }
        }
        s0 = _mm_add_epi32(s0, save0);
        s1 = _mm_add_epi32(s1, save1);
    }
    low = _mm_shuffle_epi32(s0, 0x1B);
    s1 = _mm_shuffle_epi32(s1, 0xB1);
    _mm_storeu_si128((__m128i *)h, _mm_blend_epi16(low, s1, 0xF0));
    _mm_storeu_si128((__m128i *)(h + 4), _mm_alignr_epi8(s1, low, 8));
}

static int has_sha_instructions(void) {
    unsigned a = 7, b = 0, c = 0, d = 0;
    __asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    return (b >> 29 & 1) && __builtin_cpu_supports("sse4.1") && __builtin_cpu_supports("ssse3");
}
#endif

static void (*compress)(uint32_t *, const uint8_t *, size_t) = compress_plain;

static void sha_start(Sha *s) {
    static const uint32_t start[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    memcpy(s->h, start, 32);
    s->length = 0;
}

static void sha_update(Sha *s, const uint8_t *data, size_t n) {
    size_t fill = s->length & 63;
    s->length += n;
    if (fill) {
        size_t room = 64 - fill;
        if (n < room) {
            memcpy(s->tail + fill, data, n);
            return;
        }
        memcpy(s->tail + fill, data, room);
        compress(s->h, s->tail, 1);
        data += room;
        n -= room;
    }
    if (n >= 64) {
        compress(s->h, data, n >> 6);
        data += n & ~(size_t)63;
        n &= 63;
    }
    memcpy(s->tail, data, n);
}

static void sha_digest(const Sha *s, uint8_t *out) {
    uint32_t h[8];
    uint8_t end[128];
    size_t fill = s->length & 63, size = fill < 56 ? 64 : 128;
    memcpy(h, s->h, 32);
    memset(end, 0, size);
    memcpy(end, s->tail, fill);
    end[fill] = 0x80;
    uint64_t bits = s->length << 3;
    for (int i = 0; i < 8; i++) end[size - 1 - i] = (uint8_t)(bits >> 8 * i);
    compress(h, end, size >> 6);
    for (int i = 0; i < 8; i++) {
        out[4 * i] = (uint8_t)(h[i] >> 24);
        out[4 * i + 1] = (uint8_t)(h[i] >> 16);
        out[4 * i + 2] = (uint8_t)(h[i] >> 8);
        out[4 * i + 3] = (uint8_t)h[i];
    }
}

typedef struct {
    PyObject_HEAD Sha sha;
} Hasher;

static PyTypeObject HasherType;

static PyObject *hasher_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    Py_buffer data = {0};
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "|y*", &data)) return NULL;
    Hasher *self = (Hasher *)type->tp_alloc(type, 0);
    if (self) {
        sha_start(&self->sha);
        if (data.buf) sha_update(&self->sha, data.buf, data.len);
    }
    if (data.obj) PyBuffer_Release(&data);
    return (PyObject *)self;
}

static PyObject *hasher_update(Hasher *self, PyObject *arg) {
    Py_buffer data;
    if (PyObject_GetBuffer(arg, &data, PyBUF_SIMPLE)) return NULL;
    sha_update(&self->sha, data.buf, data.len);
    PyBuffer_Release(&data);
    Py_RETURN_NONE;
}

static PyObject *hasher_digest(Hasher *self, PyObject *none) {
    (void)none;
    PyObject *out = PyBytes_FromStringAndSize(NULL, 32);
    if (out) sha_digest(&self->sha, (uint8_t *)PyBytes_AS_STRING(out));
    return out;
}

static PyObject *hasher_copy(Hasher *self, PyObject *none) {
    (void)none;
    Hasher *made = (Hasher *)HasherType.tp_alloc(&HasherType, 0);
    if (made) made->sha = self->sha;
    return (PyObject *)made;
}

static PyObject *hasher_blocks(Hasher *self, PyObject *args) {
    Py_buffer data;
    Py_ssize_t size;
    if (!PyArg_ParseTuple(args, "y*n", &data, &size)) return NULL;
    if (size < 1) {
        PyBuffer_Release(&data);
        return PyErr_Format(PyExc_ValueError, "a block of %zd bytes", size);
    }
    Py_ssize_t count = data.len / size;
    PyObject *out = PyBytes_FromStringAndSize(NULL, 32 * count);
    if (out) {
        uint8_t *key = (uint8_t *)PyBytes_AS_STRING(out);
        for (Py_ssize_t i = 0; i < count; i++, key += 32) {
            sha_update(&self->sha, (const uint8_t *)data.buf + i * size, size);
            sha_digest(&self->sha, key);
        }
    }
    PyBuffer_Release(&data);
    return out;
}

static PyMethodDef hasher_methods[] = {
    {"update", (PyCFunction)hasher_update, METH_O, "Feed bytes."},
    {"digest", (PyCFunction)hasher_digest, METH_NOARGS, "The digest of what was fed so far."},
    {"copy", (PyCFunction)hasher_copy, METH_NOARGS, "An independent hasher in the same state."},
    {"blocks", (PyCFunction)hasher_blocks, METH_VARARGS,
     "blocks(data, size): feed data block by block; the digests at each block's end, joined."},
    {NULL}};

static PyTypeObject HasherType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "blocktable.core._native.Sha256",
    .tp_basicsize = sizeof(Hasher), .tp_flags = Py_TPFLAGS_DEFAULT, .tp_new = hasher_new,
    .tp_methods = hasher_methods, .tp_doc = "SHA-256 with hashlib's methods, and `blocks`."};
