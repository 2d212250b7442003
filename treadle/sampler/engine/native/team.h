// The threads of a step: the caller is thread 0, the others sleep between steps.
//
// A step is one parallel region of some 240 phases, most of them shorter than 100 us. A phase
// ends when its items are done, not when all threads have arrived: on a machine with busy
// neighbours a thread that is off its core for some milliseconds then delays nobody, the others
// take its items and move on. Waiting spins first, and after about 50 us sleeps in the kernel, so
// that it does not keep the very thread that it waits for off the core.
#pragma once

#include <immintrin.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace treadle {

inline void wait_for_change(const std::atomic<std::uint32_t>& word, std::uint32_t old) {
  for (int i = 0; i < 1000; i++) {
    if (word.load(std::memory_order_acquire) != old) return;
    _mm_pause();
  }
  while (word.load(std::memory_order_acquire) == old) word.wait(old, std::memory_order_acquire);
}

class Team {
 public:
  explicit Team(int threads) : threads_(threads) {
    for (int t = 1; t < threads; t++) {
      workers_.emplace_back([this, t] { work(t); });
    }
  }

  ~Team() {
    stop_ = true;
    start();
    for (auto& worker : workers_) worker.join();
  }

  int threads() const { return threads_; }

  // Calls job(thread) on every thread and returns when all are done. Jobs must not throw.
  void run(const std::function<void(int)>& job) {
    job_ = &job;
    left_.store(static_cast<std::uint32_t>(workers_.size()), std::memory_order_relaxed);
    start();
    job(0);
    for (std::uint32_t left; (left = left_.load(std::memory_order_acquire)) != 0;) {
      wait_for_change(left_, left);
    }
  }

 private:
  void start() {
    epoch_.fetch_add(1, std::memory_order_release);
    epoch_.notify_all();
  }

  void work(int thread) {
    for (std::uint32_t seen = 0;; seen++) {
      wait_for_change(epoch_, seen);
      if (stop_) return;
      (*job_)(thread);
      if (left_.fetch_sub(1, std::memory_order_acq_rel) == 1) left_.notify_all();
    }
  }

  const int threads_;
  std::vector<std::thread> workers_;
  const std::function<void(int)>* job_ = nullptr;
  std::atomic<bool> stop_{false};
  alignas(64) std::atomic<std::uint32_t> epoch_{0};
  alignas(64) std::atomic<std::uint32_t> left_{0};
};

// First item of a thread's run when n items are dealt in equal runs; of thread n: the end.
inline int run_begin(int items, int thread, int threads) {
  return static_cast<int>(static_cast<std::int64_t>(items) * thread / threads);
}

// One phase: the items 0..n-1, dealt in equal runs; who is done first helps the others. Which
// thread takes an item never changes its result.
class Phase {
 public:
  explicit Phase(int threads) : shared_(new Shared), runs_(new Run[threads]), threads_(threads) {}

  // Before the parallel region.
  void deal(int items) {
    shared_->items = static_cast<std::uint32_t>(items);
    shared_->done.store(0, std::memory_order_relaxed);
    for (int t = 0; t < threads_; t++) {
      runs_[t].next.store(run_begin(items, t, threads_), std::memory_order_relaxed);
      runs_[t].end = run_begin(items, t + 1, threads_);
    }
  }

  // Does its part of the items and returns when all of them are done.
  template <class F>
  void each(int thread, F&& f) {
    std::uint32_t did = 0;
    for (int i = 0; i < threads_; i++) {
      Run& run = runs_[(thread + i) % threads_];
      while (run.next.load(std::memory_order_relaxed) < run.end) {
        const int item = run.next.fetch_add(1, std::memory_order_relaxed);
        if (item >= run.end) break;
        f(item);
        did++;
      }
    }
    std::atomic<std::uint32_t>& done = shared_->done;
    if (did != 0 && done.fetch_add(did, std::memory_order_acq_rel) + did == shared_->items) {
      done.notify_all();
    }
    for (std::uint32_t now; (now = done.load(std::memory_order_acquire)) != shared_->items;) {
      wait_for_change(done, now);
    }
  }

 private:
  struct alignas(64) Run {
    std::atomic<int> next{0};
    int end = 0;
  };
  struct alignas(64) Shared {
    std::atomic<std::uint32_t> done{0};
    std::uint32_t items = 0;
  };
  std::unique_ptr<Shared> shared_;
  std::unique_ptr<Run[]> runs_;
  int threads_;
};

}  // namespace treadle
