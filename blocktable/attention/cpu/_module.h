// The Python face of the kernels: addresses and strides in, nothing checked here but plans.
#pragma once

namespace blocktable {

struct Arguments {  // positional integers and floats of a METH_FASTCALL function
  PyObject* const* at;
  Py_ssize_t left;
  bool bad = false;
  PyObject* object() {
    if (left-- <= 0) { bad = true; return nullptr; }
    return *at++;
  }
  int64_t integer() {
    PyObject* x = object();
    if (!x) return 0;
    long long value = PyLong_AsLongLong(x);
    if (value == -1 && PyErr_Occurred()) bad = true;
    return value;
  }
  template <class T> T* address() { return reinterpret_cast<T*>(uintptr_t(integer())); }
  float number() {
    PyObject* x = object();
    if (!x) return 0;
    double value = PyFloat_AsDouble(x);
    if (value == -1 && PyErr_Occurred()) bad = true;
    return float(value);
  }
  bool done() {
    if (!bad && left == 0) return true;
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "wrong number of arguments");
    return false;
  }
};

static const Level* level_at(int64_t index) {
  const auto& found = all_levels();
  if (index >= 0 && index < int64_t(found.size())) return &found[size_t(index)];
  PyErr_Format(PyExc_ValueError, "level %lld is outside 0..%zu", (long long)index, found.size() - 1);
  return nullptr;
}

static const char* kPlanName = "blocktable.attention.cpu.plan";

static void free_plan(PyObject* capsule) {
  delete static_cast<Plan*>(PyCapsule_GetPointer(capsule, kPlanName));
}

// plan(table, table_stride, width, starts, lens, rows, tokens, heads, kv_heads, block_size,
//      num_blocks, causal, window, sinks, chunk) -> capsule; ValueError for lengths or ids out of range.
static PyObject* py_plan(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments a{args, count};
  const int32_t* table = a.address<const int32_t>();
  int64_t stride = a.integer();
  auto plan = std::make_unique<Plan>();
  Shape& s = plan->shape;
  s.width = a.integer();
  const int32_t* starts = a.address<const int32_t>();
  const int32_t* lens = a.address<const int32_t>();
  s.rows = a.integer();
  s.tokens = a.integer();
  s.heads = int32_t(a.integer());
  s.kv_heads = int32_t(a.integer());
  s.block_size = int32_t(a.integer());
  s.num_blocks = a.integer();
  s.causal = a.integer() != 0;
  s.window = a.integer();
  s.sinks = a.integer();
  s.chunk = a.integer();
  if (!a.done()) return nullptr;
  try {
    plan->starts.assign(starts, starts + s.rows + 1);
    plan->lens.assign(lens, lens + s.rows);
    plan->check(table, stride);
    plan->build();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
    return nullptr;
  }
  return PyCapsule_New(plan.release(), kPlanName, free_plan);
}

// attend(level, threads, own_pool, plan, table, table_stride, size, size_v, scale, softcap,
//        q, q_type, q_token, q_head, k, k_block, k_head, k_token, v, v_block, v_head, v_token,
//        kv_type, out, out_token, out_head, lse, sinks, slopes, k_scale, v_scale)
static PyObject* py_attend(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments a{args, count};
  Call c{};
  const Level* level = level_at(a.integer());
  int threads = int(a.integer());
  bool own_pool = a.integer() != 0;
  PyObject* capsule = a.object();
  c.table = a.address<const int32_t>();
  c.table_stride = a.integer();
  c.size = a.integer();
  c.size_v = a.integer();
  c.scale = a.number();
  c.softcap = a.number();
  c.q = a.address<const void>();
  c.q_type = Type(a.integer());
  c.q_token = a.integer();
  c.q_head = a.integer();
  c.k = a.address<const void>();
  c.k_at.block = a.integer();
  c.k_at.head = a.integer();
  c.k_at.token = a.integer();
  c.v = a.address<const void>();
  c.v_at.block = a.integer();
  c.v_at.head = a.integer();
  c.v_at.token = a.integer();
  c.kv_type = Type(a.integer());
  c.out = a.address<void>();
  c.out_token = a.integer();
  c.out_head = a.integer();
  c.lse = a.address<float>();
  c.sinks = a.address<const float>();
  c.slopes = a.address<const float>();
  c.k_scale = a.address<const float>();
  c.v_scale = a.address<const float>();
  if (!level || !a.done()) return nullptr;
  c.plan = static_cast<const Plan*>(PyCapsule_GetPointer(capsule, kPlanName));
  if (!c.plan) return nullptr;
  try {
    PyThreadState* state = PyEval_SaveThread();
    try {
      attend(c, *level, threads, own_pool);
    } catch (...) {
      PyEval_RestoreThread(state);
      throw;
    }
    PyEval_RestoreThread(state);
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_MemoryError, error.what());
    return nullptr;
  }
  Py_RETURN_NONE;
}

// write_kv(level, threads, own_pool, from, from_type, from_token, from_head, to, to_type, block, head, token, slots,
//          tokens, kv_heads, block_size, size, num_blocks, factor)
static PyObject* py_write_kv(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments a{args, count};
  Write w{};
  const Level* level = level_at(a.integer());
  int threads = int(a.integer());
  bool own_pool = a.integer() != 0;
  w.from = a.address<const void>();
  w.from_type = Type(a.integer());
  w.from_token = a.integer();
  w.from_head = a.integer();
  w.to = a.address<void>();
  w.to_type = Type(a.integer());
  w.at.block = a.integer();
  w.at.head = a.integer();
  w.at.token = a.integer();
  w.slots = a.address<const int64_t>();
  int64_t tokens = a.integer();
  w.kv_heads = a.integer();
  w.block_size = a.integer();
  w.size = a.integer();
  int64_t num_blocks = a.integer();
  w.factor = a.address<const float>();
  if (!level || !a.done()) return nullptr;
  for (int64_t i = 0; i < tokens; i++) {
    if (w.slots[i] >= num_blocks * w.block_size || w.slots[i] < -1) {
      PyErr_Format(PyExc_ValueError, "slot %lld of token %lld is outside a cache of %lld blocks of %lld",
                   (long long)w.slots[i], (long long)i, (long long)num_blocks, (long long)w.block_size);
      return nullptr;
    }
  }
  Py_BEGIN_ALLOW_THREADS
  share_rows(w, level->write_tokens, tokens, w.kv_heads * w.size, threads, own_pool);
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

// rms_norm(level, threads, own_pool, x, type, x_row, rows, size, weight, shift, eps, out)
static PyObject* py_rms_norm(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments a{args, count};
  Norm n{};
  const Level* level = level_at(a.integer());
  int threads = int(a.integer());
  bool own_pool = a.integer() != 0;
  n.x = a.address<const void>();
  n.type = Type(a.integer());
  n.x_row = a.integer();
  int64_t rows = a.integer();
  n.size = a.integer();
  n.weight = a.address<const void>();
  n.shift = a.number();
  n.eps = a.number();
  n.out = a.address<void>();
  if (!level || !a.done()) return nullptr;
  Py_BEGIN_ALLOW_THREADS
  share_rows(n, level->norm_rows, rows, n.size, threads, own_pool);
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

// rotate(level, threads, own_pool, x, type, x_token, x_head, cos, sin, angle_token, tokens, heads,
//        size, out, out_token, out_head)
static PyObject* py_rotate(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments a{args, count};
  Rotate r{};
  const Level* level = level_at(a.integer());
  int threads = int(a.integer());
  bool own_pool = a.integer() != 0;
  r.x = a.address<const void>();
  r.type = Type(a.integer());
  r.x_token = a.integer();
  r.x_head = a.integer();
  r.cos = a.address<const void>();
  r.sin = a.address<const void>();
  r.angle_token = a.integer();
  int64_t tokens = a.integer();
  r.heads = a.integer();
  r.size = a.integer();
  r.out = a.address<void>();
  r.out_token = a.integer();
  r.out_head = a.integer();
  if (!level || !a.done()) return nullptr;
  Py_BEGIN_ALLOW_THREADS
  share_rows(r, level->rotate_tokens, tokens, r.heads * r.size, threads, own_pool);
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

static PyObject* py_levels(PyObject*, PyObject*) {
  const auto& found = all_levels();
  PyObject* names = PyTuple_New(Py_ssize_t(found.size()));
  for (size_t i = 0; names && i < found.size(); i++)
    PyTuple_SET_ITEM(names, Py_ssize_t(i), PyUnicode_FromString(found[i].name));
  return names;
}

static PyMethodDef kMethods[] = {
    {"levels", py_levels, METH_NOARGS, "Instruction set levels this CPU can run, best first."},
    {"plan", (PyCFunction)(void*)py_plan, METH_FASTCALL, "Cut one step's attention into items."},
    {"attend", (PyCFunction)(void*)py_attend, METH_FASTCALL, "Run a plan on one layer."},
    {"write_kv", (PyCFunction)(void*)py_write_kv, METH_FASTCALL, "Store rows in their slots."},
    {"rms_norm", (PyCFunction)(void*)py_rms_norm, METH_FASTCALL, "RMS norm of rows."},
    {"rotate", (PyCFunction)(void*)py_rotate, METH_FASTCALL, "Rotary embedding of all heads."},
    {nullptr, nullptr, 0, nullptr},
};

static PyModuleDef kModule = {
    PyModuleDef_HEAD_INIT, "_kernels", "CPU attention kernels.", -1, kMethods,
    nullptr, nullptr, nullptr, nullptr,
};

}  // namespace blocktable

extern "C" __attribute__((visibility("default"))) PyObject* PyInit__kernels(void) {
  return PyModule_Create(&blocktable::kModule);
}
