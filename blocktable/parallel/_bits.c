/* Columns of a step message in one pass each: what bitpack.py does with whole-array operations.
 *
 * Bytes and results are those of the NumPy code, which is the reference in the tests. Buffers are
 * checked before they are touched; nothing is kept between calls.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

enum { PACKED, CONSTANT, RANGE };
static const int PLANES[] = {16, 8, 4, 2, 1};

/* One plane of `groups` x 8 values: the `plane` bits from `shift` on, lowest value first. */
static void pack_plane(const uint32_t *v, size_t groups, int plane, int shift, uint8_t *out) {
    size_t n = groups * 8;
    if (plane == 16) {
        for (size_t i = 0; i < n; i++) {
            uint16_t low = (uint16_t)(v[i] >> shift);
            memcpy(out + 2 * i, &low, 2);
        }
        return;
    }
    if (plane == 8) {
        for (size_t i = 0; i < n; i++) out[i] = (uint8_t)(v[i] >> shift);
        return;
    }
    const int per_byte = 8 / plane;
    const uint32_t mask = (1u << plane) - 1;
    for (size_t i = 0; i < n / per_byte; i++) {
        uint32_t byte = 0;
        for (int k = 0; k < per_byte; k++)
            byte |= ((v[i * per_byte + k] >> shift) & mask) << (k * plane);
        out[i] = (uint8_t)byte;
    }
}

static void unpack_plane(const uint8_t *in, size_t n, int plane, int shift, uint32_t *v) {
    if (plane == 16) {
        for (size_t i = 0; i < n; i++) {
            uint16_t low;
            memcpy(&low, in + 2 * i, 2);
            v[i] |= (uint32_t)low << shift;
        }
        return;
    }
    if (plane == 8) {
        for (size_t i = 0; i < n; i++) v[i] |= (uint32_t)in[i] << shift;
        return;
    }
    const int per_byte = 8 / plane;
    const uint32_t mask = (1u << plane) - 1;
    for (size_t i = 0; i < n / per_byte; i++)
        for (int k = 0; k < per_byte; k++)
            v[i * per_byte + k] |= (((uint32_t)in[i] >> (k * plane)) & mask) << shift;
}

static int get_words(PyObject *object, Py_buffer *view, int flags) {
    if (PyObject_GetBuffer(object, view, PyBUF_C_CONTIGUOUS | flags) < 0) return -1;
    if (view->len % 4 != 0 || (uintptr_t)view->buf % 4 != 0) {
        PyBuffer_Release(view);
        PyErr_SetString(PyExc_ValueError, "a column must be an array of 32-bit integers");
        return -1;
    }
    return 0;
}

static int check_width(int width) {
    if (width >= 0 && width <= 32) return 0;
    PyErr_Format(PyExc_ValueError, "a width of %d bits", width);
    return -1;
}

/* classify(values) -> (mode, width, base): constant, ascending by one, or packed at `width` bits. */
static PyObject *classify(PyObject *self, PyObject *object) {
    Py_buffer view;
    if (get_words(object, &view, PyBUF_SIMPLE) < 0) return NULL;
    const uint32_t *v = view.buf;
    const size_t n = (size_t)view.len / 4;
    uint32_t all = 0, unequal = 0, gap = 0;
    for (size_t i = 0; i < n; i++) {
        all |= v[i];
        unequal |= v[i] ^ v[0];
        gap |= (v[i] - v[0]) ^ (uint32_t)i;
    }
    const uint32_t first = n ? v[0] : 0;
    const int wraps = n && first + (uint32_t)(n - 1) < first;
    PyBuffer_Release(&view);
    if (!unequal) return Py_BuildValue("iiI", CONSTANT, 0, first);
    if (!gap && !wraps) return Py_BuildValue("iiI", RANGE, 0, first);
    int width = 0;
    while (all) { width++; all >>= 1; }
    return Py_BuildValue("iiI", PACKED, width, 0u);
}

/* pack(values, width) -> bytes */
static PyObject *pack(PyObject *self, PyObject *args) {
    PyObject *object;
    int width;
    Py_buffer view;
    if (!PyArg_ParseTuple(args, "Oi", &object, &width) || check_width(width) < 0) return NULL;
    if (get_words(object, &view, PyBUF_SIMPLE) < 0) return NULL;
    const uint32_t *v = view.buf;
    const size_t n = (size_t)view.len / 4, groups = n / 8, rest = n % 8;
    uint32_t tail[8] = {0};
    memcpy(tail, v + groups * 8, rest * 4);
    const size_t all = groups + (rest > 0);
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(all * (size_t)width));
    if (bytes != NULL && width) {
        uint8_t *out = (uint8_t *)PyBytes_AS_STRING(bytes);
        if (width == 32) {
            memcpy(out, v, groups * 32);
            if (rest) memcpy(out + groups * 32, tail, 32);
        }
        int shift = 0;
        for (size_t p = 0; width < 32 && p < 5; p++) {
            const int plane = PLANES[p];
            if (!(width & plane)) continue;
            pack_plane(v, groups, plane, shift, out);
            if (rest) pack_plane(tail, 1, plane, shift, out + groups * plane);
            out += all * plane;
            shift += plane;
        }
    }
    PyBuffer_Release(&view);
    return bytes;
}

/* unpack(data, offset, width, out): fill out, zeroed uint32 [a multiple of 8]. */
static PyObject *unpack(PyObject *self, PyObject *args) {
    Py_buffer data, out;
    PyObject *source, *target;
    Py_ssize_t offset;
    int width;
    if (!PyArg_ParseTuple(args, "OniO", &source, &offset, &width, &target)) return NULL;
    if (check_width(width) < 0 || PyObject_GetBuffer(source, &data, PyBUF_SIMPLE) < 0) return NULL;
    if (get_words(target, &out, PyBUF_WRITABLE) < 0) {
        PyBuffer_Release(&data);
        return NULL;
    }
    const size_t n = (size_t)out.len / 4;
    const size_t need = n / 8 * (size_t)width;
    const int bad = n % 8 != 0 || offset < 0 || offset > data.len
                    || need > (size_t)(data.len - offset);
    if (bad) {
        PyErr_Format(PyExc_ValueError, "%zu values of %d bits do not fit at %zd of %zd bytes", n,
                     width, offset, data.len);
    } else {
        const uint8_t *in = (const uint8_t *)data.buf + offset;
        uint32_t *v = out.buf;
        int shift = 0;
        if (width == 32) memcpy(v, in, n * 4);
        for (size_t p = 0; width < 32 && p < 5; p++) {
            const int plane = PLANES[p];
            if (!(width & plane)) continue;
            unpack_plane(in, n, plane, shift, v);
            in += n / 8 * plane;
            shift += plane;
        }
    }
    PyBuffer_Release(&out);
    PyBuffer_Release(&data);
    if (bad) return NULL;
    Py_RETURN_NONE;
}

/* total(values) -> sum of int32 values */
static PyObject *total(PyObject *self, PyObject *object) {
    Py_buffer view;
    if (get_words(object, &view, PyBUF_SIMPLE) < 0) return NULL;
    const int32_t *v = view.buf;
    const size_t n = (size_t)view.len / 4;
    int64_t sum = 0;
    for (size_t i = 0; i < n; i++) sum += v[i];
    PyBuffer_Release(&view);
    return PyLong_FromLongLong(sum);
}

static PyMethodDef METHODS[] = {
    {"classify", classify, METH_O, "classify(values) -> (mode, width, base)"},
    {"pack", pack, METH_VARARGS, "pack(values, width) -> bytes"},
    {"unpack", unpack, METH_VARARGS, "unpack(data, offset, width, out)"},
    {"total", total, METH_O, "total(values) -> int"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "_bits", "Bit planes of message columns.", -1, METHODS,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__bits(void) { return PyModule_Create(&MODULE); }
