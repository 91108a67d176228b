/* Turns the record of changes of a host table into single entries to upload: what a decode step, a
 * window step or a short truncation changed. Same results as core/table.py `drain` followed by
 * upload_plan.py, which do the rest (moves, long spans) and everything where this is not built. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#define NO_LIMIT INT32_MAX

/* The lines of HostTable's state array, in order. */
enum { COUNTS, LO, HI, NULL_LO, NULL_HI, ORIGIN, NUM_LINES };

enum { STATE, EXTENT, LOG, LOG_N, FLAT, CELLS, VALUES, NUM_BUFFERS };

typedef struct {
    int32_t *line[NUM_LINES];
    int32_t *extent;
    const int32_t *log;
    int64_t changed;
} Record;

typedef struct {
    int32_t start, stop;
} Span;

/* Spans of a row that must be sent: written, became null, and behind the count. */
static int row_spans(const Record *record, int32_t row, Span out[3]) {
    int32_t count = record->line[COUNTS][row], old = record->extent[row];
    int32_t hi = record->line[HI][row], null_hi = record->line[NULL_HI][row];
    out[0] = (Span){record->line[LO][row], hi < count ? hi : count};
    out[1] = (Span){record->line[NULL_LO][row], null_hi < count ? null_hi : count};
    out[2] = (Span){count, old};
    return record->line[ORIGIN][row] == row;
}

/* Entries that the record stands for, or -1 where a row was moved or there is no room. */
static int64_t count_entries(const Record *record, int64_t room) {
    int64_t total = 0;
    for (int64_t i = 0; i < record->changed; i++) {
        Span spans[3];
        if (!row_spans(record, record->log[i], spans)) return -1;
        for (int k = 0; k < 3; k++)
            if (spans[k].stop > spans[k].start) total += spans[k].stop - spans[k].start;
        if (total > room) return -1;
    }
    return total;
}

static int64_t write_entries(const Record *record, const int32_t *flat, int64_t width, int64_t base,
                             int32_t *cells, int32_t *values) {
    int64_t n = 0;
    for (int64_t i = 0; i < record->changed; i++) {
        int32_t row = record->log[i];
        Span spans[3];
        row_spans(record, row, spans);
        for (int k = 0; k < 3; k++)
            for (int64_t column = spans[k].start; column < spans[k].stop; column++) {
                int64_t cell = row * width + column;
                cells[n] = (int32_t)(base + cell);
                values[n++] = flat[cell];
            }
        /* forgotten: a row that is in the log twice adds nothing the second time */
        record->extent[row] = record->line[COUNTS][row];
        record->line[LO][row] = record->line[NULL_LO][row] = NO_LIMIT;
        record->line[HI][row] = record->line[NULL_HI][row] = 0;
    }
    return n;
}

PyDoc_STRVAR(take_entries_doc,
             "take_entries(state, extent, log, log_n, flat, cells, values, width, base, used)\n\n"
             "Write the changed entries behind the first `used` of `cells` and `values`, forget the\n"
             "changes and return the new number used; -1 (and nothing changed) where a row was moved\n"
             "or the entries do not fit.");

static PyObject *take_entries(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    Py_buffer view[NUM_BUFFERS];
    PyObject *result = NULL;
    int held = 0;
    (void)module;
    if (nargs != NUM_BUFFERS + 3) {
        PyErr_SetString(PyExc_TypeError, "take_entries takes 10 arguments");
        return NULL;
    }
    for (; held < NUM_BUFFERS; held++) {
        int flags = held == FLAT ? PyBUF_C_CONTIGUOUS : PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE;
        if (PyObject_GetBuffer(args[held], &view[held], flags) < 0) goto done;
    }
    int64_t width = PyLong_AsLongLong(args[NUM_BUFFERS]);
    int64_t base = PyLong_AsLongLong(args[NUM_BUFFERS + 1]);
    int64_t used = PyLong_AsLongLong(args[NUM_BUFFERS + 2]);
    if (PyErr_Occurred()) goto done;

    int64_t rows = view[EXTENT].len / 4, room = view[CELLS].len / 4 - used;
    int64_t *changed = view[LOG_N].buf;
    if (view[STATE].len != NUM_LINES * 4 * rows || view[VALUES].len < view[CELLS].len ||
        *changed * 4 > view[LOG].len || view[FLAT].len < rows * width * 4) {
        PyErr_SetString(PyExc_ValueError, "take_entries: arrays do not belong together");
        goto done;
    }
    Record record = {.extent = view[EXTENT].buf, .log = view[LOG].buf, .changed = *changed};
    for (int i = 0; i < NUM_LINES; i++) record.line[i] = (int32_t *)view[STATE].buf + i * rows;

    if (count_entries(&record, room) < 0) {
        result = PyLong_FromLong(-1);
        goto done;
    }
    used += write_entries(&record, view[FLAT].buf, width, base, (int32_t *)view[CELLS].buf + used,
                          (int32_t *)view[VALUES].buf + used);
    *changed = 0;
    result = PyLong_FromLongLong(used);
done:
    while (held > 0) PyBuffer_Release(&view[--held]);
    return result;
}

static PyMethodDef methods[] = {
    {"take_entries", (PyCFunction)(void (*)(void))take_entries, METH_FASTCALL, take_entries_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "blocktable.device._commit", NULL, 0,
                                        methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__commit(void) { return PyModule_Create(&definition); }
