// SPDX-License-Identifier: Apache-2.0
//
// Threads that share out tasks one by one, so that a thread that loses its core delays its own task alone.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace step {

class Pool {
 public:
  // Threads that compute, the calling one among them. One caller at a time.
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls body(task, worker) for each task below `tasks`, worker below threads(); returns when all are done. Tasks begin in
  // order. What a task computes must not depend on the worker.
  template <class Body>
  void run(int64_t tasks, Body&& body) {
    if (tasks <= 1 || workers_.empty()) {
      for (int64_t task = 0; task < tasks; ++task) {
        body(task, 0);
      }
      return;
    }
    using Function = std::remove_reference_t<Body>;
    share(
        tasks,
        [](void* function, int64_t task, int worker) { (*static_cast<Function*>(function))(task, worker); },
        const_cast<void*>(static_cast<const void*>(std::addressof(body))));
  }

  // Memory of a worker, aligned to a cache line; what it holds is undefined. It belongs to the task that asked, until its
  // end or until it asks again.
  void* scratch(int worker, size_t bytes) { return scratch_[worker].reserve(bytes); }
  // The same for all tasks of a run: asked for before it, valid until it is asked for again.
  void* shared(size_t bytes) { return shared_.reserve(bytes); }

 private:
  using Call = void (*)(void*, int64_t, int);

  struct alignas(64) Block {
    std::unique_ptr<char[]> memory;
    size_t size = 0;
    void* reserve(size_t bytes);
  };

  void share(int64_t tasks, Call call, void* function);
  void work(int worker);
  bool takeTask(uint64_t round, int worker);

  std::vector<std::thread> workers_;
  std::vector<Block> scratch_;
  Block shared_;

  Call call_ = nullptr;
  void* function_ = nullptr;
  int64_t tasks_ = 0;
  // The number of the run, and below it how many of its tasks have not begun: one word, so that a thread that comes late
  // cannot take a task of a run that it does not know.
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int64_t> done_{0};
  alignas(64) std::atomic<int> asleep_{0};
  std::atomic<bool> ending_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
};

}  // namespace step
