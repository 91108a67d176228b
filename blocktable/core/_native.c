/* The hot paths of the pool, the prefix index and the decode step, on the arrays of the NumPy code.
 *
 * Nothing here owns cache state: a `Core` holds views of the same arrays that pool.py, eviction.py,
 * table.py, index.py and rows.py work on, and does what they do, in the same order, with the same
 * results (tests compare them). A call that meets something it does not handle (an error to report,
 * a full ring, fences, another eviction order) changes nothing and says so, and the NumPy code
 * runs instead. SHA-256 uses the processor's instructions where it has them.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#include <immintrin.h>
#define HAVE_X86 1
#endif

/* ---------------------------------------------------------------- SHA-256 ------------------- */

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

/* ---------------------------------------------------------------- views --------------------- */

enum { FREE_, OWNED_, FENCED_, EVICTABLE_ };
enum { TOP, FRESH, USED, FENCED_COUNT, PUSHED };
enum { HEAD, TAIL, LIVE };
enum { STORED, REMOVED, CLEARED, VERSION };
#define SORT_FROM 32
#define NEVER INT32_MAX
#define MAX_VIEWS 24
#define MAX_GROUPS 32

typedef struct {
    int32_t *rows, *counts, *lo, *hi, *null_lo, *null_hi, *log, *capacity, *keyed, *key_due, *skipped;
    int64_t *log_n; /* entries of the log; whether more than appending was done */
    int64_t width, log_size, block_size, ratio;
    int64_t back, chunk, head; /* what is skipped: see skipped_for; back < 0 = nothing */
    int plain;    /* entries = ceil(tokens / block_size) */
    int deferred; /* keys are due when the step that computes them is over */
    int aligned;  /* only states on a step's end exist */
} GroupView;
#define GROUP_ARRAYS 12
#define GROUP_NUMBERS 8

/* What a listener will be told, in int32 words. */
typedef struct {
    int32_t *words;
    int64_t used, room;
    int lost; /* there was no memory for some */
} Notes;

static int32_t *note(Notes *notes, int64_t words) {
    if (notes->used + words > notes->room) {
        int64_t room = 2 * notes->room + 64 * words;
        int32_t *bigger = realloc(notes->words, (size_t)room * sizeof(int32_t));
        if (!bigger) {
            notes->lost = 1;
            return NULL;
        }
        notes->words = bigger;
        notes->room = room;
    }
    notes->used += words;
    return notes->words + notes->used - words;
}

typedef struct {
    PyObject_HEAD Py_buffer *held;
    int num_held, num_groups, lru;
    /* pool */
    int32_t *ref, *place, *stack, *ring;
    uint8_t *state, *keyed;
    int64_t *scalars, *queue;
    int64_t num_blocks, ring_size;
    /* index and keys; NULL with caching off */
    int32_t *links, *num_hashed;
    uint64_t *words;
    uint8_t *owner, *keys;
    int64_t *size, *counters;
    int64_t key_words, max_keys, hash_size;
    /* rows */
    int32_t *tokens, *num_tokens, *num_computed;
    int64_t max_len, max_rows;
    GroupView groups[MAX_GROUPS];
    int32_t *scratch;
    int64_t scratch_size;
    int listening; /* whether changes of the cache are written down for `heard` */
    Notes given, taken;
} Core;

static void *view(Core *self, PyObject *array, int64_t *items) {
    Py_buffer *b = &self->held[self->num_held];
    if (PyObject_GetBuffer(array, b, PyBUF_WRITABLE | PyBUF_ND | PyBUF_C_CONTIGUOUS)) return NULL;
    self->num_held++;
    if (items) *items = b->len / b->itemsize;
    return b->buf;
}

static int32_t *scratch(Core *self, int64_t n) {
    if (n > self->scratch_size) {
        int32_t *bigger = realloc(self->scratch, (size_t)n * 2 * sizeof(int32_t));
        if (!bigger) return NULL;
        self->scratch = bigger;
        self->scratch_size = n * 2;
    }
    return self->scratch;
}

typedef struct {
    Py_buffer buffer;
    const void *data;
    int64_t one, count;
    int width; /* bytes an item; 0 = the same number for all */
} Ints;

/* A number, or a contiguous array of int32 or int64. */
static int ints_get(Ints *in, PyObject *arg) {
    in->buffer.obj = NULL;
    if (PyLong_CheckExact(arg)) {
        in->one = PyLong_AsLongLong(arg);
        in->width = 0;
        in->count = -1;
        return in->one == -1 && PyErr_Occurred() ? -1 : 0;
    }
    if (PyObject_GetBuffer(arg, &in->buffer, PyBUF_ND | PyBUF_C_CONTIGUOUS | PyBUF_FORMAT)) return -1;
    const char *format = in->buffer.format ? in->buffer.format : "B";
    in->width = (int)in->buffer.itemsize;
    if (!strchr("ilq", format[0]) || (in->width != 4 && in->width != 8) || in->buffer.ndim != 1) {
        PyBuffer_Release(&in->buffer);
        in->buffer.obj = NULL;
        PyErr_SetString(PyExc_BufferError, "not a row of integers");
        return -1;
    }
    in->data = in->buffer.buf;
    in->count = in->buffer.len / in->width;
    return 0;
}

static inline int64_t ints_at(const Ints *in, int64_t i) {
    if (in->width == 4) return ((const int32_t *)in->data)[i];
    if (in->width == 8) return ((const int64_t *)in->data)[i];
    return in->one;
}

static void ints_drop(Ints *in) {
    if (in->buffer.obj) PyBuffer_Release(&in->buffer);
}

/* ---------------------------------------------------------------- index --------------------- */

static inline int64_t bucket(const Core *c, uint64_t word) {
    return (int64_t)((word >> 32) * (uint64_t)c->num_blocks >> 32);
}

/* Keys ahead of the one at hand, so that their buckets are in the cache when their turn comes. */
#define AHEAD 12

static inline void index_fetch(const Core *c, const uint8_t *keys, int64_t i, int64_t count) {
    uint64_t word;
    if (i + AHEAD >= count) return;
    memcpy(&word, keys + (i + AHEAD) * c->key_words * 8, 8);
    __builtin_prefetch(&c->links[bucket(c, word)]);
}

static void index_insert(Core *c, int32_t block, const uint8_t *key, int group) {
    uint64_t *words = c->words + block * c->key_words;
    memcpy(words, key, (size_t)c->key_words * 8);
    words[c->key_words - 1] ^= (uint64_t)group;
    c->owner[block] = (uint8_t)group;
    c->links[c->num_blocks + block] = 0;
    int64_t at = bucket(c, words[0]);
    while (c->links[at]) at = c->num_blocks + c->links[at];
    c->links[at] = block;
    c->size[0]++;
}

static void index_remove(Core *c, int32_t block) {
    int64_t at = bucket(c, c->words[block * c->key_words]);
    while (c->links[at] && c->links[at] != block) at = c->num_blocks + c->links[at];
    if (!c->links[at]) return;
    c->links[at] = c->links[c->num_blocks + block];
    c->size[0]--;
}

static int32_t index_find(const Core *c, const uint8_t *key, int group) {
    uint64_t want[8];
    memcpy(want, key, (size_t)c->key_words * 8);
    want[c->key_words - 1] ^= (uint64_t)group;
    int32_t block = c->links[bucket(c, want[0])];
    while (block && memcmp(c->words + block * c->key_words, want, (size_t)c->key_words * 8))
        block = c->links[c->num_blocks + block];
    return block;
}

/* ---------------------------------------------------------------- pool ---------------------- */

static int falling(const void *a, const void *b) {
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x < y) - (x > y);
}

static inline int64_t pool_unkeyed(const Core *c) {
    return c->scalars[TOP] + c->num_blocks - c->scalars[FRESH];
}

static inline int64_t pool_available(const Core *c) {
    return c->num_blocks - 1 - c->scalars[USED] - c->scalars[FENCED_COUNT];
}

/* Whether pool_take(count) will succeed here. */
static int pool_can_take(const Core *c, int64_t count) {
    return count <= pool_available(c) && (c->lru || count <= pool_unkeyed(c));
}

/* Block, group and key of a block that is about to lose it. */
static void note_taken(Core *c, int32_t block) {
    int32_t *to = note(&c->taken, 2 + 2 * c->key_words);
    if (!to) return;
    to[0] = block;
    to[1] = c->owner[block];
    memcpy(to + 2, c->words + block * c->key_words, (size_t)c->key_words * 8);
}

static void pool_take(Core *c, int64_t count, int32_t *out) {
    int64_t *s = c->scalars, taken = 0;
    if (count >= SORT_FROM && s[PUSHED] >= SORT_FROM) {
        int64_t from = s[TOP] - 2 * (s[PUSHED] + count);
        if (from < 0) from = 0;
        qsort(c->stack + from, (size_t)(s[TOP] - from), sizeof(int32_t), falling);
        s[PUSHED] = 0;
    }
    while (taken < count && s[TOP]) out[taken++] = c->stack[--s[TOP]];
    while (taken < count && s[FRESH] < c->num_blocks) out[taken++] = (int32_t)s[FRESH]++;
    int64_t evicted = count - taken;
    while (taken < count) {
        int64_t slot = c->queue[HEAD]++ % c->ring_size;
        int32_t block = c->ring[slot];
        if (c->place[block] != slot) continue;
        c->place[block] = -1;
        c->queue[LIVE]--;
        if (c->listening) note_taken(c, block);
        if (c->links) index_remove(c, block);
        c->keyed[block] = 0;
        out[taken++] = block;
    }
    if (evicted && c->counters) {
        c->counters[REMOVED] += evicted;
        c->counters[VERSION]++;
    }
    for (int64_t i = 0; i < count; i++) {
        c->state[out[i]] = OWNED_;
        c->ref[out[i]] = 1;
    }
    s[USED] += count;
}

static int known(const Core *c, int64_t block) { return block >= 0 && block < c->num_blocks; }

/* Whether every block of the list is owned once and can be released here; no lasting change. */
static int pool_can_release(Core *c, const Ints *in) {
    if (!c->lru || c->queue[TAIL] - c->queue[HEAD] + in->count > c->ring_size) return 0;
    int64_t seen, i, good = 1;
    for (seen = 0; good && seen < in->count; seen++) {
        int64_t block = ints_at(in, seen);
        if (!known(c, block) || (block && c->state[block] != OWNED_)) good = 0, seen--;
        else c->place[block] = (int32_t)seen; /* owned blocks have no place: room to find repeats */
    }
    for (i = 0; i < seen; i++) {
        int64_t block = ints_at(in, i);
        if (block) good &= c->place[block] == (int32_t)i;
        c->place[block] = -1;
    }
    c->place[0] = 0;
    return (int)good;
}

static void pool_release(Core *c, const Ints *in) {
    int64_t *s = c->scalars;
    for (int64_t i = 0; i < in->count; i++) {
        int32_t block = (int32_t)ints_at(in, i);
        if (!block || --c->ref[block]) continue;
        s[USED]--;
        if (c->keyed[block]) {
            int64_t slot = c->queue[TAIL]++ % c->ring_size;
            c->state[block] = EVICTABLE_;
            c->ring[slot] = block;
            c->place[block] = (int32_t)slot;
            c->queue[LIVE]++;
        } else {
            c->state[block] = FREE_;
            c->stack[s[TOP]++] = block;
            s[PUSHED]++;
        }
    }
}

/* ---------------------------------------------------------------- the decode step ----------- */

static int hashers_good(const Core *c, PyObject *hashers) {
    return PyList_CheckExact(hashers) && PyList_GET_SIZE(hashers) == c->max_rows;
}

static void hash_upto(Core *c, PyObject *hashers, int64_t row, int64_t blocks) {
    Sha *sha = &((Hasher *)PyList_GET_ITEM(hashers, row))->sha;
    for (int64_t n = c->num_hashed[row]; n < blocks; n++) {
        const int32_t *tokens = c->tokens + row * c->max_len + n * c->hash_size;
        sha_update(sha, (const uint8_t *)tokens, (size_t)c->hash_size * 4);
        sha_digest(sha, c->keys + (row * c->max_keys + n) * c->key_words * 8);
        c->num_hashed[row] = (int32_t)(n + 1);
    }
}

static void give_keys(Core *c, PyObject *hashers, GroupView *g, int group, int64_t row, int64_t upto) {
    hash_upto(c, hashers, row, upto * g->ratio);
    for (int64_t column = g->keyed[row]; column < upto; column++) {
        int32_t block = g->rows[row * g->width + column];
        if (!block || c->keyed[block]) continue; /* forks share blocks: keyed once */
        int64_t at = row * c->max_keys + (column + 1) * g->ratio - 1;
        index_insert(c, block, c->keys + at * c->key_words * 8, group);
        c->keyed[block] = 1;
        c->counters[STORED]++;
        int32_t *to = c->listening ? note(&c->given, 4) : NULL;
        if (to) to[0] = group, to[1] = (int32_t)row, to[2] = (int32_t)column, to[3] = block;
    }
    g->keyed[row] = (int32_t)upto;
    g->key_due[row] = (int32_t)((upto + 1) * g->block_size);
}

static int64_t shortage(const Core *c, const GroupView *g, int64_t row, int64_t total, int64_t ahead) {
    int64_t limit = total + ahead < c->max_len ? total + ahead : c->max_len;
    if (limit <= g->capacity[row]) return 0;
    if (!g->plain) return -1;
    int64_t more = (limit + g->block_size - 1) / g->block_size - g->counts[row];
    return g->aligned && more > 1 ? -1 : more;
}

/* Leading blocks that no token after the first `computed` ones attends to. */
static int64_t skipped_for(const GroupView *g, int64_t computed) {
    if (g->chunk) return computed / g->chunk * g->chunk / g->block_size;
    return computed <= g->back ? 0 : (computed - g->back) / g->block_size;
}

/* Columns of a row that are given up: start .. return value; empty if nothing is. */
static int64_t skip_range(const GroupView *g, int64_t row, int64_t computed, int64_t *start) {
    *start = g->skipped[row] > g->head ? g->skipped[row] : g->head;
    if (g->back < 0) return *start;
    int64_t stop = skipped_for(g, computed);
    return stop < g->counts[row] ? stop : g->counts[row];
}

/* Blocks to be given up, group by group, each row's highest column first; how many. */
static int64_t list_skipped(const Core *c, const Ints *rows, int32_t *out) {
    int64_t n = 0, start;
    for (int k = 0; k < c->num_groups; k++)
        for (int64_t i = 0; i < rows->count; i++) {
            const GroupView *g = &c->groups[k];
            int64_t row = ints_at(rows, i), stop = skip_range(g, row, c->num_computed[row], &start);
            for (int64_t column = stop - 1; column >= start; column--, n++)
                if (out) out[n] = g->rows[row * g->width + column];
        }
    return n;
}

static inline void widen(int32_t *lo, int32_t *hi, int64_t start, int64_t stop) {
    if (start < *lo) *lo = (int32_t)start;
    if (stop > *hi) *hi = (int32_t)stop;
}

/* As HostTable.null for one row. */
static void table_null(GroupView *g, int64_t row, int64_t start, int64_t stop) {
    int32_t *lo = &g->null_lo[row], *hi = &g->null_hi[row];
    memset(g->rows + row * g->width + start, 0, (size_t)(stop - start) * 4);
    if (*lo == INT32_MAX || (start <= *hi && stop >= *lo)) widen(lo, hi, start, stop);
    else widen(&g->lo[row], &g->hi[row], start, stop);
    g->log[g->log_n[0]++] = (int32_t)row;
    g->log_n[1] = 1;
}

/* Keys of states whose step is over, then the blocks in `gone` (list_skipped) leave their rows. */
static void release_skipped(Core *c, const Ints *rows, PyObject *hashers, const Ints *gone) {
    int64_t start;
    for (int k = 0; c->links && k < c->num_groups; k++) {
        GroupView *g = &c->groups[k];
        for (int64_t i = 0; g->deferred && i < rows->count; i++) {
            int64_t row = ints_at(rows, i), computed = c->num_computed[row];
            if (computed < g->key_due[row] || (g->aligned && computed % g->block_size)) continue;
            if (g->aligned) g->keyed[row] = (int32_t)(computed / g->block_size - 1);
            give_keys(c, hashers, g, k, row, computed / g->block_size);
        }
    }
    if (!gone->count) return;
    pool_release(c, gone);
    for (int k = 0; k < c->num_groups; k++) {
        GroupView *g = &c->groups[k];
        for (int64_t i = 0; i < rows->count; i++) {
            int64_t row = ints_at(rows, i), stop = skip_range(g, row, c->num_computed[row], &start);
            if (stop <= start) continue;
            table_null(g, row, start, stop);
            g->skipped[row] = (int32_t)stop;
        }
    }
}

/* Blocks the call needs; -1 = something only the NumPy code handles. */
static int64_t grow_plan(Core *c, const Ints *rows, const Ints *new_, const Ints *ahead, PyObject *hashers) {
    int64_t need = 0;
    for (int64_t i = 0; i < rows->count; i++) {
        int64_t row = ints_at(rows, i), n = ints_at(new_, i), a = ints_at(ahead, i);
        if (row < 0 || row >= c->max_rows || n < 0 || a < 0) return -1;
        int64_t total = c->num_computed[row] + n;
        if (total > c->max_len) return -1;
        if (c->links && Py_TYPE(PyList_GET_ITEM(hashers, row)) != &HasherType) return -1;
        for (int g = 0; g < c->num_groups; g++) {
            int64_t more = shortage(c, &c->groups[g], row, total, a);
            if (more < 0) return -1;
            need += more;
        }
    }
    return need;
}

static void grow_do(Core *c, const Ints *rows, const Ints *new_, const Ints *ahead, PyObject *hashers,
                    const int32_t *ids) {
    int64_t used = 0;
    for (int k = 0; k < c->num_groups; k++) {
        GroupView *g = &c->groups[k];
        for (int64_t i = 0; i < rows->count; i++) {
            int64_t row = ints_at(rows, i), total = c->num_computed[row] + ints_at(new_, i);
            int64_t more = shortage(c, g, row, total, ints_at(ahead, i));
            if (more <= 0) continue;
            int32_t count = g->counts[row], after = count + (int32_t)more;
            memcpy(g->rows + row * g->width + count, ids + used, (size_t)more * 4);
            used += more;
            g->counts[row] = after;
            g->capacity[row] = (int32_t)(after * g->block_size);
            widen(&g->lo[row], &g->hi[row], count, after);
            g->log[g->log_n[0]++] = (int32_t)row;
        }
    }
    for (int64_t i = 0; i < rows->count; i++)
        c->num_computed[ints_at(rows, i)] += (int32_t)ints_at(new_, i);
    for (int k = 0; c->links && k < c->num_groups; k++) {
        GroupView *g = &c->groups[k];
        for (int64_t i = 0; !g->deferred && i < rows->count; i++) {
            int64_t row = ints_at(rows, i), known_ = c->num_computed[row];
            if (known_ > c->num_tokens[row]) known_ = c->num_tokens[row];
            if (known_ >= g->key_due[row]) give_keys(c, hashers, g, k, row, known_ / g->block_size);
        }
    }
}

/* grow(rows, new, ahead, hashers, fences) -> True if done, False: nothing changed, use the NumPy
 * code. fences: steps are in flight, so nothing can be released here. */
static PyObject *core_grow(Core *self, PyObject *const *args, Py_ssize_t n) {
    Ints rows = {0}, new_ = {0}, ahead = {0};
    int done = 0;
    if (n != 5) return PyErr_Format(PyExc_TypeError, "grow takes 5 arguments, got %zd", n);
    if (ints_get(&rows, args[0]) || ints_get(&new_, args[1]) || ints_get(&ahead, args[2])) {
        PyErr_Clear();
        goto out;
    }
    if (rows.count < 0 || (new_.count >= 0 && new_.count != rows.count) ||
        (ahead.count >= 0 && ahead.count != rows.count) || (self->links && !hashers_good(self, args[3])))
        goto out;
    for (int g = 0; g < self->num_groups; g++)
        if (self->groups[g].log_n[0] + 2 * rows.count > self->groups[g].log_size) goto out;
    int64_t need = grow_plan(self, &rows, &new_, &ahead, args[3]);
    if (need < 0 || !pool_can_take(self, need)) goto out;
    Ints gone = {.width = 4, .count = list_skipped(self, &rows, NULL)};
    int32_t *ids = scratch(self, need + gone.count + 1);
    if (!ids || (gone.count && PyObject_IsTrue(args[4]))) goto out;
    list_skipped(self, &rows, ids + need);
    gone.data = ids + need;
    if (gone.count && !pool_can_release(self, &gone)) goto out;
    release_skipped(self, &rows, args[3], &gone);
    if (need) pool_take(self, need, ids);
    grow_do(self, &rows, &new_, &ahead, args[3], ids);
    done = 1;
out:
    ints_drop(&rows);
    ints_drop(&new_);
    ints_drop(&ahead);
    return PyBool_FromLong(done);
}

static PyObject *note_bytes(Notes *notes) {
    PyObject *out = PyBytes_FromStringAndSize((const char *)notes->words, notes->used * 4);
    notes->used = 0;
    return out;
}

/* heard() -> what grow did to the cache since the last call: int32 [n, 4] group, row, column and
 * block of each key given, and int32 [n, 2 + 2 * key_words] block, group and key of each taken. */
static PyObject *core_heard(Core *self, PyObject *none) {
    (void)none;
    if (self->given.lost || self->taken.lost) return PyErr_NoMemory();
    return Py_BuildValue("NN", note_bytes(&self->given), note_bytes(&self->taken));
}

/* listen(): from now on `heard` knows what grow does. */
static PyObject *core_listen(Core *self, PyObject *none) {
    (void)none;
    self->listening = self->links != NULL;
    Py_RETURN_NONE;
}

/* append(rows, ids) -> True if done: one token for each row. */
static PyObject *core_append(Core *self, PyObject *const *args, Py_ssize_t n) {
    Ints rows = {0}, ids = {0};
    int done = 0;
    if (n != 2) return PyErr_Format(PyExc_TypeError, "append takes 2 arguments, got %zd", n);
    if (ints_get(&rows, args[0]) || ints_get(&ids, args[1])) {
        PyErr_Clear();
        goto out;
    }
    if (rows.count < 0 || (ids.count >= 0 && ids.count != rows.count)) goto out;
    for (int64_t i = 0; i < rows.count; i++) {
        int64_t row = ints_at(&rows, i), id = ints_at(&ids, i);
        if (row < 0 || row >= self->max_rows || self->num_tokens[row] >= self->max_len) goto out;
        if (id != (int32_t)id) goto out;
    }
    for (int64_t i = 0; i < rows.count; i++) {
        int64_t row = ints_at(&rows, i);
        self->tokens[row * self->max_len + self->num_tokens[row]++] = (int32_t)ints_at(&ids, i);
    }
    done = 1;
out:
    ints_drop(&rows);
    ints_drop(&ids);
    return PyBool_FromLong(done);
}

/* take(out): fill an int32 array with blocks; False: use the NumPy code. */
static PyObject *core_take(Core *self, PyObject *arg) {
    Py_buffer out;
    if (PyObject_GetBuffer(arg, &out, PyBUF_WRITABLE)) return NULL;
    int64_t count = out.len / 4;
    int done = pool_can_take(self, count);
    if (done) pool_take(self, count, out.buf);
    PyBuffer_Release(&out);
    return PyBool_FromLong(done);
}

static PyObject *core_release(Core *self, PyObject *arg) {
    Ints in;
    if (ints_get(&in, arg)) return NULL;
    int done = in.count >= 0 && pool_can_release(self, &in);
    if (done) pool_release(self, &in);
    ints_drop(&in);
    return PyBool_FromLong(done);
}

/* touch(blocks) -> True if done: one more reference each. */
static PyObject *core_touch(Core *self, PyObject *arg) {
    Ints in;
    if (ints_get(&in, arg)) return NULL;
    int64_t i;
    int done = in.count >= 0;
    for (i = 0; done && i < in.count; i++) {
        int64_t block = ints_at(&in, i);
        done = known(self, block) && (!block || self->state[block] == OWNED_ ||
                                      (self->lru && self->state[block] == EVICTABLE_));
    }
    for (i = 0; done && i < in.count; i++) {
        int64_t block = ints_at(&in, i);
        if (!block) continue;
        if (self->state[block] != OWNED_) {
            self->place[block] = -1;
            self->queue[LIVE]--;
            self->scalars[USED]++;
            self->state[block] = OWNED_;
        }
        self->ref[block]++;
    }
    ints_drop(&in);
    return PyBool_FromLong(done);
}

static int key_args(Core *self, PyObject *const *args, Py_ssize_t n, Py_buffer *blocks, Py_buffer *keys,
                    long *group) {
    if (n != 3 || !self->links) {
        PyErr_SetString(PyExc_TypeError, "needs blocks, keys and a group, and an index");
        return -1;
    }
    *group = PyLong_AsLong(args[2]);
    if (*group == -1 && PyErr_Occurred()) return -1;
    if (PyObject_GetBuffer(args[0], blocks, PyBUF_WRITABLE)) return -1;
    if (PyObject_GetBuffer(args[1], keys, PyBUF_SIMPLE)) {
        PyBuffer_Release(blocks);
        return -1;
    }
    if (blocks->len / 4 * self->key_words * 8 == keys->len) return 0;
    PyBuffer_Release(blocks);
    PyBuffer_Release(keys);
    PyErr_SetString(PyExc_ValueError, "as many keys as blocks are needed");
    return -1;
}

/* insert(blocks int32, keys uint8, group) */
static PyObject *core_insert(Core *self, PyObject *const *args, Py_ssize_t n) {
    Py_buffer blocks, keys;
    long group;
    if (key_args(self, args, n, &blocks, &keys, &group)) return NULL;
    const int32_t *ids = blocks.buf;
    for (int64_t i = 0; i < blocks.len / 4; i++) {
        index_fetch(self, keys.buf, i, blocks.len / 4);
        index_insert(self, ids[i], (uint8_t *)keys.buf + i * self->key_words * 8, (int)group);
    }
    PyBuffer_Release(&blocks);
    PyBuffer_Release(&keys);
    Py_RETURN_NONE;
}

/* find(out int32, keys uint8, group) -> leading keys that were found; all of `out` is written. */
static PyObject *core_find(Core *self, PyObject *const *args, Py_ssize_t n) {
    Py_buffer blocks, keys;
    long group;
    if (key_args(self, args, n, &blocks, &keys, &group)) return NULL;
    int32_t *out = blocks.buf;
    for (int64_t i = 0; i < blocks.len / 4; i++)
        out[i] = index_find(self, (uint8_t *)keys.buf + i * self->key_words * 8, (int)group);
    PyBuffer_Release(&blocks);
    PyBuffer_Release(&keys);
    Py_RETURN_NONE;
}

/* find_prefix(out int32, keys uint8, group) -> how many leading keys were found, then it stops. */
static PyObject *core_find_prefix(Core *self, PyObject *const *args, Py_ssize_t n) {
    Py_buffer blocks, keys;
    long group;
    if (key_args(self, args, n, &blocks, &keys, &group)) return NULL;
    int32_t *out = blocks.buf;
    int64_t i = 0, count = blocks.len / 4;
    for (; i < count; i++) {
        index_fetch(self, keys.buf, i, count);
        out[i] = index_find(self, (uint8_t *)keys.buf + i * self->key_words * 8, (int)group);
        if (!out[i]) break;
    }
    PyBuffer_Release(&blocks);
    PyBuffer_Release(&keys);
    return PyLong_FromLongLong(i);
}

/* remove(blocks int32) */
static PyObject *core_remove(Core *self, PyObject *arg) {
    Ints in;
    if (ints_get(&in, arg)) return NULL;
    for (int64_t i = 0; i < in.count; i++) index_remove(self, (int32_t)ints_at(&in, i));
    ints_drop(&in);
    Py_RETURN_NONE;
}

/* ---------------------------------------------------------------- construction -------------- */

static int64_t number(PyObject *tuple, Py_ssize_t at) {
    return PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, at));
}

#define VIEW(field, tuple, at, items) \
    if (!(self->field = view(self, PyTuple_GET_ITEM(tuple, at), items))) goto fail

static int set_group(Core *self, PyObject *t) {
    GroupView *g = &self->groups[self->num_groups];
    int64_t rows = 1;
    if (!PyTuple_Check(t) || PyTuple_GET_SIZE(t) != GROUP_ARRAYS + GROUP_NUMBERS) {
        PyErr_SetString(PyExc_TypeError, "a group is a tuple of 20");
        return -1;
    }
    void **where[GROUP_ARRAYS] = {
        (void **)&g->rows,     (void **)&g->counts,  (void **)&g->lo,    (void **)&g->hi,
        (void **)&g->null_lo,  (void **)&g->null_hi, (void **)&g->log,   (void **)&g->log_n,
        (void **)&g->capacity, (void **)&g->keyed,   (void **)&g->key_due, (void **)&g->skipped};
    for (int i = 0; i < GROUP_ARRAYS; i++) {
        int64_t items;
        if (!(*where[i] = view(self, PyTuple_GET_ITEM(t, i), &items))) return -1;
        if (i == 1) rows = items;
        if (i == 0) g->width = items;
        if (where[i] == (void **)&g->log) g->log_size = items;
    }
    g->width /= rows;
    int at = GROUP_ARRAYS;
    g->block_size = number(t, at++);
    g->ratio = number(t, at++);
    g->back = number(t, at++);
    g->chunk = number(t, at++);
    g->head = number(t, at++);
    g->plain = (int)number(t, at++);
    g->deferred = (int)number(t, at++);
    g->aligned = (int)number(t, at);
    self->num_groups++;
    return PyErr_Occurred() ? -1 : 0;
}

static void core_dealloc(Core *self) {
    for (int i = 0; i < self->num_held; i++) PyBuffer_Release(&self->held[i]);
    PyMem_Free(self->held);
    free(self->scratch);
    free(self->given.words);
    free(self->taken.words);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* Core(pool, queue or None, index or None, rows or None, groups) */
static PyObject *core_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *pool, *queue, *index, *rows, *groups;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "O!OOOO!", &PyTuple_Type, &pool, &queue, &index, &rows, &PyTuple_Type,
                          &groups))
        return NULL;
    Core *self = (Core *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    Py_ssize_t num_groups = PyTuple_GET_SIZE(groups);
    self->held = PyMem_Calloc((size_t)(MAX_VIEWS + GROUP_ARRAYS * num_groups), sizeof(Py_buffer));
    if (!self->held || num_groups > MAX_GROUPS || PyTuple_GET_SIZE(pool) != 6) goto fail;
    VIEW(ref, pool, 0, &self->num_blocks);
    VIEW(state, pool, 1, NULL);
    VIEW(keyed, pool, 2, NULL);
    VIEW(place, pool, 3, NULL);
    VIEW(stack, pool, 4, NULL);
    VIEW(scalars, pool, 5, NULL);
    if (queue != Py_None) {
        VIEW(ring, queue, 0, &self->ring_size);
        VIEW(queue, queue, 1, NULL);
        self->lru = 1;
    }
    if (index != Py_None) {
        int64_t items;
        VIEW(links, index, 0, NULL);
        VIEW(words, index, 1, &items);
        VIEW(owner, index, 2, NULL);
        VIEW(size, index, 3, NULL);
        self->key_words = items / self->num_blocks;
    }
    if (rows != Py_None) {
        int64_t items;
        VIEW(tokens, rows, 0, &items);
        VIEW(num_tokens, rows, 1, &self->max_rows);
        VIEW(num_computed, rows, 2, NULL);
        self->max_len = items / self->max_rows;
        if (index != Py_None) {
            VIEW(keys, rows, 3, &items);
            VIEW(num_hashed, rows, 4, NULL);
            VIEW(counters, rows, 5, NULL);
            self->max_keys = items / self->max_rows / (self->key_words * 8);
            self->hash_size = number(rows, 6);
        }
    }
    for (Py_ssize_t i = 0; i < num_groups; i++)
        if (set_group(self, PyTuple_GET_ITEM(groups, i))) goto fail;
    return (PyObject *)self;
fail:
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "arrays do not fit a Core");
    Py_DECREF(self);
    return NULL;
}

#define FAST (PyCFunction)(void (*)(void))

static PyMethodDef core_methods[] = {
    {"grow", FAST core_grow, METH_FASTCALL, "grow(rows, new, ahead, hashers, fences) -> bool"},
    {"listen", (PyCFunction)core_listen, METH_NOARGS, "Write down what grow does to the cache."},
    {"heard", (PyCFunction)core_heard, METH_NOARGS, "Keys given and taken since the last call."},
    {"append", FAST core_append, METH_FASTCALL, "append(rows, token_ids) -> bool"},
    {"take", (PyCFunction)core_take, METH_O, "take(out) -> bool"},
    {"release", (PyCFunction)core_release, METH_O, "release(blocks) -> bool"},
    {"touch", (PyCFunction)core_touch, METH_O, "touch(blocks) -> bool"},
    {"insert", FAST core_insert, METH_FASTCALL, "insert(blocks, keys, group)"},
    {"find", FAST core_find, METH_FASTCALL, "find(out, keys, group)"},
    {"find_prefix", FAST core_find_prefix, METH_FASTCALL, "find_prefix(out, keys, group) -> int"},
    {"remove", (PyCFunction)core_remove, METH_O, "remove(blocks)"},
    {NULL}};

static PyTypeObject CoreType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "blocktable.core._native.Core",
    .tp_basicsize = sizeof(Core), .tp_flags = Py_TPFLAGS_DEFAULT, .tp_new = core_new,
    .tp_dealloc = (destructor)core_dealloc, .tp_methods = core_methods,
    .tp_doc = "Hot paths over the arrays of one manager, or of a pool alone."};

/* token_ids(list or tuple, out int32) -> index of the first item that is no int 0 .. 2**31 - 1, or -1 */
static PyObject *token_ids(PyObject *module, PyObject *const *args, Py_ssize_t n) {
    Py_buffer out;
    (void)module;
    if (n != 2 || !(PyList_Check(args[0]) || PyTuple_Check(args[0])))
        return PyErr_Format(PyExc_TypeError, "token_ids takes a list or tuple, and an array");
    if (PyObject_GetBuffer(args[1], &out, PyBUF_WRITABLE)) return NULL;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(args[0]), bad = -1;
    PyObject **items = PySequence_Fast_ITEMS(args[0]);
    int32_t *ids = out.buf;
    if (out.len / 4 < count) bad = 0;
    for (Py_ssize_t i = 0; bad < 0 && i < count; i++) {
        int overflow = 0;
        long long value = PyLong_CheckExact(items[i]) ? PyLong_AsLongLongAndOverflow(items[i], &overflow) : -1;
        if (overflow || value < 0 || value > INT32_MAX) bad = i;
        else ids[i] = (int32_t)value;
    }
    PyBuffer_Release(&out);
    return PyLong_FromSsize_t(bad);
}

static PyMethodDef module_methods[] = {
    {"token_ids", FAST token_ids, METH_FASTCALL, "token_ids(items, out) -> first bad index or -1"},
    {NULL}};

static struct PyModuleDef module_definition = {PyModuleDef_HEAD_INIT, "_native",
                                               "Hot paths in C; see core/native.py.", -1, module_methods};

PyMODINIT_FUNC PyInit__native(void) {
#ifdef HAVE_X86
    if (has_sha_instructions()) compress = compress_sha;
#endif
    if (PyType_Ready(&HasherType) || PyType_Ready(&CoreType)) return NULL;
    PyObject *module = PyModule_Create(&module_definition);
    if (!module) return NULL;
    Py_INCREF(&HasherType);
    Py_INCREF(&CoreType);
    if (PyModule_AddObject(module, "Sha256", (PyObject *)&HasherType) ||
        PyModule_AddObject(module, "Core", (PyObject *)&CoreType))
        return NULL;
    return module;
}
