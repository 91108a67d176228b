// Paged attention and KV writes for CPUs, as a CPython extension without torch.
//
// Arrays come as addresses and element strides; the Python side (native.py) checks shapes and keeps
// the arrays alive. Each kernel is compiled for several instruction set levels and chosen at run
// time from what the CPU has, so one wheel runs everywhere.

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12's own AVX-512 headers trip both
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cmath>
#include <cstring>
#include <type_traits>
#include <memory>

#include "_plan.h"
#include "_threads.h"
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace blocktable {

enum class Type { f32 = 0, bf16 = 1, f16 = 2 };

struct Pages { int64_t block, head, token; };  // strides in elements

struct Call {
  const Plan* plan;
  const void *q, *k, *v;
  void* out;
  float* lse;
  const int32_t* table;
  int64_t table_stride, q_token, q_head, out_token, out_head, size, size_v;
  Pages k_at, v_at;
  Type q_type, kv_type;
  const float *sinks, *slopes, *k_scale, *v_scale;
  float scale, softcap;
  float* parts;                // partial results, rows of padded(size_v) + 2
  std::atomic<int>* pending;   // parts still missing of each merge
};

struct Write {
  const void* from;
  void* to;
  const int64_t* slots;
  const float* factor;  // of each KV head, or null
  int64_t from_token, from_head, kv_heads, block_size, size;
  Pages at;
  Type from_type, to_type;
};

struct Norm {
  const void *x, *weight;
  void* out;  // rows one behind the other
  int64_t x_row, size;
  float eps, shift;
  Type type;
};

struct Rotate {
  const void *x, *cos, *sin;
  void* out;
  int64_t x_token, x_head, out_token, out_head, angle_token, heads, size;
  Type type;
};

struct Level {
  const char* name;
  size_t (*scratch_floats)(const Call&);
  void (*run_item)(const Call&, const Item&, const Item*, float*);
  void (*write_tokens)(const Write&, int64_t, int64_t);
  void (*norm_rows)(const Norm&, int64_t, int64_t);
  void (*rotate_tokens)(const Rotate&, int64_t, int64_t);
};

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif
#define BT_LEVEL 512
namespace avx512 {
#include "_simd.h"
#include "_tiles.h"
#include "_attend.h"
#include "_write.h"
#include "_elementwise.h"
}  // namespace avx512
#undef BT_LEVEL
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
#define BT_LEVEL 256
namespace avx2 {
#include "_simd.h"
#include "_tiles.h"
#include "_attend.h"
#include "_write.h"
#include "_elementwise.h"
}  // namespace avx2
#undef BT_LEVEL
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif  // __x86_64__

#define BT_LEVEL 0
namespace generic {
#include "_simd.h"
#include "_tiles.h"
#include "_attend.h"
#include "_write.h"
#include "_elementwise.h"
}  // namespace generic
#undef BT_LEVEL

#define BT_KERNELS(level)                                                              \
  {#level, level::scratch_floats, level::run_item, level::write_tokens, level::norm_rows, \
   level::rotate_tokens}

#if defined(__x86_64__)
struct Features { bool avx2, avx512; };

// What the CPU has and the operating system saves, straight from cpuid: the compilers' own
// __builtin_cpu_supports knows no F16C and depends on their run-time library.
static Features cpu_features() {
  unsigned a, b, c, d, low, high;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return {false, false};
  const bool os_saves = c >> 27 & 1, fma = c >> 12 & 1, f16c = c >> 29 & 1;
  if (!os_saves || !fma || !f16c || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return {false, false};
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  const bool avx2 = (low & 0x6) == 0x6 && (b >> 5 & 1);
  const unsigned wanted = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // F, DQ, BW, VL
  return {avx2, avx2 && (low & 0xe6) == 0xe6 && (b & wanted) == wanted};
}
#endif

// Best first.
static std::vector<Level> levels() {
  std::vector<Level> found;
#if defined(__x86_64__)
  const Features cpu = cpu_features();
  if (cpu.avx512) found.push_back(BT_KERNELS(avx512));
  if (cpu.avx2) found.push_back(BT_KERNELS(avx2));
#endif
  found.push_back(BT_KERNELS(generic));
  return found;
}

static const std::vector<Level>& all_levels() {
  static const std::vector<Level> found = levels();
  return found;
}

// Memory that grows and stays with its thread: no allocation in a step once warm.
static float* thread_memory(size_t floats) {
  static thread_local std::unique_ptr<float[]> memory;
  static thread_local size_t size = 0;
  if (size < floats + 16) {
    memory.reset(new float[floats + 16]);
    size = floats + 16;
  }
  return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.get()) + 63) & ~uintptr_t(63));
}

struct Team {  // items are handed out `grain` at a time
  const Call* call;
  const Level* level;
  std::atomic<size_t> next{0};
  size_t grain;
};

static void take_items(void* data) {
  Team& team = *static_cast<Team*>(data);
  const std::vector<Item>& items = team.call->plan->items;
  float* memory = nullptr;
  for (size_t at; (at = team.next.fetch_add(team.grain)) < items.size();) {
    if (!memory) memory = thread_memory(team.level->scratch_floats(*team.call));
    const size_t end = std::min(at + team.grain, items.size());
    for (size_t i = at; i < end; i++)
      team.level->run_item(*team.call, items[i], i + 1 < end ? &items[i + 1] : nullptr, memory);
  }
}

constexpr int64_t kSerialWork = 1 << 14;  // key-row-elements below which one thread is faster

static void attend(Call& call, const Level& level, int threads, bool own_pool) {
  const Plan& plan = *call.plan;
  const int64_t width = (call.size_v + 15) / 16 * 16 + 2;
  std::unique_ptr<float[]> parts;
  std::unique_ptr<std::atomic<int>[]> pending;
  if (plan.part_rows) {
    parts.reset(new float[size_t(plan.part_rows * width)]);
    pending.reset(new std::atomic<int>[plan.merges.size()]);
    for (size_t i = 0; i < plan.merges.size(); i++) pending[i] = plan.merges[i].parts;
    call.parts = parts.get();
    call.pending = pending.get();
  }
  const size_t bytes = call.q_type == Type::f32 ? 4 : 2;
  for (int32_t token : plan.idle) {
    for (int h = 0; h < plan.shape.heads; h++) {
      memset((char*)call.out + (token * call.out_token + h * call.out_head) * bytes, 0, call.size_v * bytes);
      if (call.lse) call.lse[int64_t(token) * plan.shape.heads + h] = -INFINITY;
    }
  }
  Team team;
  team.call = &call;
  team.level = &level;
  threads = int(std::min<size_t>(threads, plan.items.size()));
  if (plan.work * (call.size + call.size_v) < kSerialWork) threads = 1;
  team.grain = std::max<size_t>(1, std::min<size_t>(16, plan.items.size() / (8 * std::max(1, threads))));
  parallel(threads, own_pool, take_items, &team);
}

// Runs rows(work, first, end) over [0, count), in shares of equal length, on several threads when
// there is more than `serial` to do in all (`cost` a row).
template <class Work>
struct Shares {
  const Work* work;
  void (*rows)(const Work&, int64_t, int64_t);
  int64_t count, share;
  std::atomic<int64_t> next{0};
  static void take(void* data) {
    Shares& s = *static_cast<Shares*>(data);
    for (int64_t at; (at = s.next.fetch_add(s.share)) < s.count;)
      s.rows(*s.work, at, std::min(at + s.share, s.count));
  }
};

template <class Work>
static void share_rows(const Work& work, void (*rows)(const Work&, int64_t, int64_t), int64_t count,
                       int64_t cost, int threads, bool own_pool) {
  constexpr int64_t kSerial = 1 << 16;  // elements: some 10 us of one thread
  if (threads < 2 || count * cost < kSerial) { rows(work, 0, count); return; }
  Shares<Work> shares;
  shares.work = &work;
  shares.rows = rows;
  shares.count = count;
  shares.share = std::max<int64_t>(1, count / (threads * 4));
  parallel(threads, own_pool, Shares<Work>::take, &shares);
}

}  // namespace blocktable

#include "_module.h"
