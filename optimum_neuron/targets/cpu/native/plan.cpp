// SPDX-License-Identifier: Apache-2.0
//
// A plan: the steps of a graph as data, run one after another. The C functions at the end are all that Python calls.
//
// A plan is a list of 64-bit words, written by plan/encode.py, which has checked every size against the buffers.
#include <pthread.h>

#include <memory>
#include <mutex>
#include <vector>

#include "plan_steps.h"

namespace step {

namespace {

// Where places are in this run.
struct Memory {
  void* const* buffers;

  char* at(Place place) const { return place ? static_cast<char*>(buffers[place.buffer]) + place.bytes : nullptr; }
  template <class T>
  T* as(Place place) const {
    return reinterpret_cast<T*>(at(place));
  }
};

bool run(Pool& pool, const Memory& memory, Map& map) {
  runMap(pool, map, memory.buffers);
  return true;
}

bool run(Pool& pool, const Memory& memory, LinearsStep& step) {
  for (size_t i = 0; i < step.layers.size(); ++i) {
    const LinearsStep::Layer& layer = step.layers[i];
    step.linears[i] = {
        memory.at(layer.weight), memory.at(layer.bias), memory.at(layer.output), layer.outputs, layer.outputStride};
  }
  step.call.x = memory.at(step.x);
  step.call.linears = step.linears.data();
  step.call.count = static_cast<int64_t>(step.linears.size());
  linears(pool, step.call);
  return true;
}

bool run(Pool& pool, const Memory& memory, ExpertsStep& step) {
  step.call.x = memory.at(step.x);
  step.call.index = memory.as<const int64_t>(step.index);
  step.call.weight = memory.at(step.weight);
  step.call.bias = memory.at(step.bias);
  step.call.y = memory.at(step.y);
  return expertLinear(pool, step.call);
}

bool run(Pool& pool, const Memory& memory, AttendStep& step) {
  step.call.query = memory.at(step.query);
  step.call.keys = memory.at(step.keys);
  step.call.values = memory.at(step.values);
  step.call.output = memory.at(step.output);
  step.call.slots = memory.as<const int32_t>(step.slots);
  step.call.positions = memory.as<const int32_t>(step.positions);
  step.call.sinks = memory.as<const float>(step.sinks);
  return attend(pool, step.call);
}

bool run(Pool& pool, const Memory& memory, SelectStep& step) {
  step.call.from = memory.at(step.from);
  step.call.to = memory.at(step.to);
  step.call.index = memory.at(step.index);
  return selectRows(pool, step.call);
}

bool run(Pool&, const Memory& memory, WriteStep& step) {
  step.call.cache = memory.at(step.cache);
  step.call.states = memory.at(step.states);
  step.call.rows = memory.as<const int32_t>(step.rows);
  step.call.columns = memory.as<const int32_t>(step.columns);
  return writeCache(step.call);
}

struct Plan {
  std::vector<Step> steps;
};

std::unique_ptr<Plan> readPlan(const int64_t* words, int64_t count) {
  static constexpr Step (*kReaders[])(Reader&) = {readMap,    readLinears, readExperts,
                                                  readAttend, readSelect,  readWrite};
  auto plan = std::make_unique<Plan>();
  Reader reader(words, count);
  while (!reader.atEnd()) {
    const int64_t kind = reader.word();
    if (kind < 0 || kind >= static_cast<int64_t>(std::size(kReaders))) {
      return nullptr;
    }
    plan->steps.push_back(kReaders[kind](reader));
    if (reader.failed()) {
      return nullptr;
    }
  }
  return plan;
}

// All plans of a process share its threads, and so run one at a time.
struct Running {
  std::mutex mutex;
  std::unique_ptr<Pool> pool;
};

// Never destroyed: at the end of a process, threads that sleep are waited for by nobody.
Running* running = new Running;

// A fork brings along neither threads nor who was to unlock a mutex: its child begins anew.
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { running = new Running; });

}  // namespace

}  // namespace step

extern "C" {

// Raised where what a function takes, or a plan's words, change.
int64_t step_interface() { return 1; }

// A plan from its words; null where they are none.
void* step_plan(const int64_t* words, int64_t count) { return step::readPlan(words, count).release(); }

void step_free(void* plan) { delete static_cast<step::Plan*>(plan); }

// Runs the steps from `begin` to `end`. Returns -1, or the number of a step that refused an index that it was given.
int64_t step_run(void* plan, int64_t begin, int64_t end, void* const* buffers, int64_t threads) {
  const std::lock_guard lock(step::running->mutex);
  std::unique_ptr<step::Pool>& pool = step::running->pool;
  if (!pool || pool->threads() != threads) {
    pool = nullptr;
    pool = std::make_unique<step::Pool>(static_cast<int>(threads));
  }
  auto& steps = static_cast<step::Plan*>(plan)->steps;
  const step::Memory memory{buffers};
  for (int64_t i = begin; i < end; ++i) {
    if (!std::visit([&](auto& each) { return step::run(*pool, memory, each); }, steps[i])) {
      return i;
    }
  }
  return -1;
}
}
