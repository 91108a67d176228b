/* The hot paths of the pool, the prefix index and the decode step, on the arrays of the NumPy code.
 *
 * Nothing here owns cache state: a `Core` holds views of the same arrays that pool.py, eviction.py,
 * table.py, index.py and rows.py work on, and does what they do, in the same order, with the same
 * results (tests compare them). A call that meets something it does not handle (an error to report,
 * a full ring, fences, another eviction order) changes nothing and says so, and the NumPy code
 * runs instead. From the bottom up: _sha256.h, _core.h (the views), _cache.h (index and pool), _step.h.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "_step.h"

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
