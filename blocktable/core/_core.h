/* A `Core`: views of the arrays of one manager, and the numbers and notes that go in and out. */
#pragma once

#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

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
