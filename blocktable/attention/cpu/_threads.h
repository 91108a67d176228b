// Runs a function on several threads, without bringing a second OpenMP runtime into the process.
//
// Where torch (or anything else) has loaded an OpenMP runtime, its GOMP_parallel is looked up and
// used: the team that torch's own operators run on is already spinning between them, and a second
// pool would fight it for the cores (measured on 2 cores: stalls of up to a 4 ms time slice a
// call). Otherwise a small pool of our own: workers spin for some 20 us, then sleep.
#pragma once

#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace blocktable {

using Body = void (*)(void*);

class Pool {
 public:
  // Runs body(data) on the caller and on up to threads - 1 workers; returns when all are done.
  void run(int threads, Body body, void* data) {
    std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
    if (!turn.owns_lock() || threads < 2) { body(data); return; }  // the body shares work by itself
    if (owner_ != getpid()) { workers_ = 0; owner_ = getpid(); }   // a fork keeps no threads
    while (workers_ < threads - 1) {
      uint64_t seen = ticket_.load();
      std::thread([this, seen, index = workers_] { work(index, seen); }).detach();
      workers_++;
    }
    body_ = body;
    data_ = data;
    wanted_ = threads - 1;
    left_.store(workers_);
    {
      std::lock_guard<std::mutex> guard(sleep_);
      ticket_.fetch_add(1);
    }
    wake_.notify_all();
    body(data);
    while (left_.load(std::memory_order_acquire)) std::this_thread::yield();
  }

 private:
  void work(int index, uint64_t seen) {
    for (;;) {
      for (int spin = 0; spin < 4000 && ticket_.load(std::memory_order_acquire) == seen; spin++) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
      }
      if (ticket_.load() == seen) {
        std::unique_lock<std::mutex> guard(sleep_);
        wake_.wait(guard, [&] { return ticket_.load() != seen; });
      }
      seen++;
      if (index < wanted_) body_(data_);
      left_.fetch_sub(1, std::memory_order_release);
    }
  }

  std::mutex turn_, sleep_;
  std::condition_variable wake_;
  std::atomic<uint64_t> ticket_{0};
  std::atomic<int> left_{0};
  int workers_ = 0, wanted_ = 0;
  Body body_ = nullptr;
  void* data_ = nullptr;
  pid_t owner_ = getpid();
};

using GompParallel = void (*)(Body, void*, unsigned, unsigned);

static inline GompParallel openmp_runtime() {
  static std::atomic<GompParallel> found{nullptr};
  GompParallel at = found.load(std::memory_order_relaxed);
  if (!at) {
    at = reinterpret_cast<GompParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
    found.store(at, std::memory_order_relaxed);
  }
  return at;
}

// Calls body(data) on `threads` threads at once; the body takes its share of the work itself.
static inline void parallel(int threads, bool own_pool, Body body, void* data) {
  if (threads < 2) { body(data); return; }
  GompParallel gomp = own_pool ? nullptr : openmp_runtime();
  if (gomp) { gomp(body, data, unsigned(threads), 0); return; }
  static Pool* pool = new Pool;  // never destroyed: its workers outlive static destructors
  pool->run(threads, body, data);
}

}  // namespace blocktable
