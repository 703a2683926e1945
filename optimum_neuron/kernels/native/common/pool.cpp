// SPDX-License-Identifier: Apache-2.0
#include "common/pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace step {

namespace {

constexpr int kRemainingBits = 40;
constexpr uint64_t kRemaining = (uint64_t{1} << kRemainingBits) - 1;
// How long a thread looks out for the next run before it sleeps: longer than what lies between two layers, shorter than what
// lies between two steps.
constexpr int kLooks = 4000;
constexpr size_t kLine = 64;

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

void* Pool::Block::reserve(size_t bytes) {
  if (bytes > size) {
    memory = nullptr;
    memory.reset(new char[bytes + kLine]);
    size = bytes;
  }
  const auto address = reinterpret_cast<uintptr_t>(memory.get());
  return reinterpret_cast<void*>((address + kLine - 1) / kLine * kLine);
}

Pool::Pool(int threads) : scratch_(threads) {
  for (int worker = 1; worker < threads; ++worker) {
    workers_.emplace_back([this, worker] { work(worker); });
  }
}

Pool::~Pool() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) {
    worker.join();
  }
}

bool Pool::takeTask(uint64_t round, int worker) {
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  do {
    if (ticket >> kRemainingBits != round || (ticket & kRemaining) == 0) {
      return false;
    }
  } while (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel));
  call_(function_, tasks_ - static_cast<int64_t>(ticket & kRemaining), worker);
  done_.fetch_add(1, std::memory_order_release);
  return true;
}

void Pool::share(int64_t tasks, Call call, void* function) {
  call_ = call;
  function_ = function;
  tasks_ = tasks;
  done_.store(0, std::memory_order_relaxed);
  const uint64_t round = ((ticket_.load(std::memory_order_relaxed) >> kRemainingBits) + 1) & (~uint64_t{0} >> kRemainingBits);
  ticket_.store(round << kRemainingBits | static_cast<uint64_t>(tasks));
  if (asleep_.load() > 0) {
    { const std::lock_guard lock(mutex_); }
    wake_.notify_all();
  }
  while (takeTask(round, 0)) {
  }
  for (int looks = 0; done_.load(std::memory_order_acquire) != tasks; ++looks) {
    if (looks < kLooks) {
      pause();
    } else {
      std::this_thread::yield();  // whoever computes the last task may wait for this core
    }
  }
}

void Pool::work(int worker) {
  uint64_t seen = 0;
  while (!ending_.load(std::memory_order_relaxed)) {
    uint64_t round = seen;
    for (int looks = 0; looks < kLooks && round == seen; ++looks) {
      round = ticket_.load(std::memory_order_acquire) >> kRemainingBits;
      if (round == seen) {
        pause();
      }
    }
    if (round == seen) {
      std::unique_lock lock(mutex_);
      asleep_.fetch_add(1);
      wake_.wait(lock, [&] { return ending_ || ticket_.load() >> kRemainingBits != seen; });
      asleep_.fetch_sub(1);
      continue;
    }
    seen = round;
    while (takeTask(round, worker)) {
    }
  }
}

}  // namespace step
