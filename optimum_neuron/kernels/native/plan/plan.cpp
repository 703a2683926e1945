// SPDX-License-Identifier: Apache-2.0
//
// A plan: the steps of a graph as data, run one after another. The C functions at the end are all that Python calls.
//
// A plan is a list of 64-bit words, written by run/encode.py, which has checked every size against the buffers.
#include <pthread.h>

#include <memory>
#include <mutex>
#include <vector>

#include "plan/plan_steps.h"

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

Scales scalesOf(const Memory& memory, const CodesPlace& codes) {
  return {memory.at(codes.scale), memory.as<const float>(codes.shift), codes.type, codes.isShort};
}

// Each of these computes the first `tokens` of its step's tokens, or all that it has.
bool run(Pool& pool, const Memory& memory, const Map& map, int64_t tokens, int64_t of) {
  runMap(pool, map, memory.buffers, map.rows * map.columns / of * tokens);
  return true;
}

bool run(Pool& pool, const Memory& memory, LinearsStep& step, int64_t tokens, int64_t of) {
  for (size_t i = 0; i < step.layers.size(); ++i) {
    const LinearsStep::Layer& layer = step.layers[i];
    step.linears[i] = {memory.at(layer.weight), memory.at(layer.bias),   memory.at(layer.output),
                       layer.outputs,           layer.outputStride,      scalesOf(memory, layer.codes)};
  }
  LinearsCall call = step.call;
  call.x = memory.at(step.x);
  call.rows = call.rows / of * tokens;
  call.linears = step.linears.data();
  call.count = static_cast<int64_t>(step.linears.size());
  linears(pool, call);
  return true;
}

bool run(Pool& pool, const Memory& memory, const ExpertsStep& step, int64_t tokens, int64_t of) {
  ExpertsCall call = step.call;
  call.x = memory.at(step.x);
  call.index = memory.as<const int32_t>(step.index);
  call.weight = memory.at(step.weight);
  call.bias = memory.at(step.bias);
  call.y = memory.at(step.y);
  call.scales = scalesOf(memory, step.codes);
  call.tokens = call.tokens / of * tokens;
  return expertLinear(pool, call);
}

bool run(Pool& pool, const Memory& memory, const AttendStep& step, int64_t tokens, int64_t of) {
  AttendCall call = step.call;
  call.query = memory.at(step.query);
  call.keys = memory.at(step.keys);
  call.values = memory.at(step.values);
  call.output = memory.at(step.output);
  call.blocks = memory.as<const int32_t>(step.blocks);
  call.positions = memory.as<const int32_t>(step.positions);
  call.sinks = memory.as<const float>(step.sinks);
  call.columnBias = memory.as<const float>(step.columnBias);
  call.keyScales = memory.as<const float>(step.keyScales);
  call.valueScales = memory.as<const float>(step.valueScales);
  if (of > 1) {  // of several rows, the last one that has a live token is computed whole
    call.rows = (tokens + call.tokens - 1) / call.tokens;
    call.tokens = std::min(call.tokens, tokens);
  }
  return attend(pool, call);
}

bool run(Pool& pool, const Memory& memory, const SelectStep& step, int64_t tokens, int64_t of) {
  SelectCall call = step.call;
  call.from = memory.at(step.from);
  call.to = memory.at(step.to);
  call.index = memory.at(step.index);
  call.count = call.count / of * tokens;
  return selectRows(pool, call);
}

bool run(Pool& pool, const Memory& memory, const WriteStep& step, int64_t tokens, int64_t of) {
  WriteCall call = step.call;
  call.cache = memory.at(step.cache);
  call.states = memory.at(step.states);
  call.numbers = memory.as<const int32_t>(step.blocks);
  call.columns = memory.as<const int32_t>(step.columns);
  call.tokens = call.tokens / of * tokens;
  return writeCache(pool, call);
}

bool run(Pool& pool, const Memory& memory, const WriteCodesStep& step, int64_t tokens, int64_t of) {
  WriteCodesCall call = step.call;
  call.codes = memory.as<uint8_t>(step.codes);
  call.scales = memory.as<float>(step.scales);
  call.states = memory.at(step.states);
  call.numbers = memory.as<const int32_t>(step.blocks);
  call.columns = memory.as<const int32_t>(step.columns);
  call.tokens = call.tokens / of * tokens;
  return writeCodes(pool, call);
}

bool run(Pool& pool, const Memory& memory, const SampleStep& step, int64_t tokens, int64_t of) {
  SampleCall call = step.call;
  call.logits = memory.as<const float>(step.logits);
  call.params = memory.as<const float>(step.params);
  call.uniforms = memory.as<const float>(step.uniforms);
  call.tokens = memory.as<int32_t>(step.tokens);
  call.rows = call.rows / of * tokens;
  sample(pool, call);
  return true;
}

bool run(Pool& pool, const Memory& memory, const WalkStep& step, int64_t tokens, int64_t of) {
  WalkCall call = step.call;
  call.query = memory.as<const float>(step.query);
  call.key = memory.as<const float>(step.key);
  call.value = memory.as<const float>(step.value);
  call.decay = memory.as<const float>(step.decay);
  call.share = memory.as<const float>(step.share);
  call.rates = memory.as<const float>(step.rates);
  call.slots = memory.as<const int32_t>(step.slots);
  call.positions = memory.as<const int32_t>(step.positions);
  call.state = memory.as<float>(step.state);
  call.output = memory.as<float>(step.output);
  call.tokens = call.tokens / of * tokens;
  return walk(pool, call);
}

bool run(Pool& pool, const Memory& memory, const ConvolveStep& step, int64_t tokens, int64_t of) {
  ConvolveCall call = step.call;
  call.inputs = memory.at(step.inputs);
  call.weight = memory.as<const float>(step.weight);
  call.bias = memory.as<const float>(step.bias);
  call.slots = memory.as<const int32_t>(step.slots);
  call.positions = memory.as<const int32_t>(step.positions);
  call.state = memory.at(step.state);
  call.output = memory.as<float>(step.output);
  call.tokens = call.tokens / of * tokens;
  return convolve(pool, call);
}

bool run(Pool& pool, const Memory& memory, const MatMulStep& step, int64_t tokens, int64_t of) {
  MatMulCall call = step.call;
  call.left = memory.as<const float>(step.left);
  call.right = memory.as<const float>(step.right);
  call.output = memory.as<float>(step.output);
  call.matrices = call.matrices / of * tokens;
  multiplyMatrices(pool, call);
  return true;
}

bool run(Pool& pool, const Memory& memory, const TopKStep& step, int64_t tokens, int64_t of) {
  TopKCall call = step.call;
  call.from = memory.as<const float>(step.from);
  call.values = memory.as<float>(step.values);
  call.index = memory.as<int32_t>(step.index);
  call.rows = call.rows / of * tokens;
  findTopK(pool, call);
  return true;
}

bool run(Pool&, const Memory& memory, const GatherStep& step, int64_t tokens, int64_t of) {
  GatherCall call = step.call;
  call.from = memory.at(step.from);
  call.index = memory.as<const int32_t>(step.index);
  call.to = memory.at(step.to);
  call.rows = call.rows / of * tokens;
  return gatherElements(call);
}

bool run(Pool&, const Memory& memory, const ScatterStep& step, int64_t tokens, int64_t of) {
  ScatterCall call = step.call;
  call.from = memory.at(step.from);
  call.index = memory.as<const int32_t>(step.index);
  call.to = memory.at(step.to);
  call.values = memory.at(step.values);
  call.rows = call.rows / of * tokens;
  return scatterElements(call);
}

// A step, and of which tokens it may leave out the last; all of them where it has none.
struct Entry {
  int64_t first, count;
  Step step;
};

struct Plan {
  std::vector<Entry> steps;
};

std::unique_ptr<Plan> readPlan(const int64_t* words, int64_t count) {
  static constexpr Step (*kReaders[])(Reader&) = {
      readMap, readLinears, readExperts, readAttend, readSelect, readWrite, readSample, readWalk, readConvolve,
      readWriteCodes, readMatMul, readTopK, readGather, readScatter};
  auto plan = std::make_unique<Plan>();
  Reader reader(words, count);
  while (!reader.atEnd()) {
    const int64_t kind = reader.word();
    const int64_t first = reader.word(), tokens = reader.word();
    if (kind < 0 || kind >= static_cast<int64_t>(std::size(kReaders)) || first < 0 || tokens < 0) {
      return nullptr;
    }
    plan->steps.push_back({first, tokens, kReaders[kind](reader)});
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

// Never destroyed: at the end of a process, nothing waits for threads that sleep.
Running* running = new Running;

// A fork brings along neither threads nor the one that was to unlock a mutex: its child begins anew.
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { running = new Running; });

}  // namespace

}  // namespace step

extern "C" {

// Raised where what a function takes, or a plan's words, change.
int64_t step_interface() { return 12; }

// A plan from its words; null where they are none.
void* step_plan(const int64_t* words, int64_t count) { return step::readPlan(words, count).release(); }

void step_free(void* plan) { delete static_cast<step::Plan*>(plan); }

// Runs the steps from `begin` to `end` for the first `live` tokens of the graph. Returns -1, or the number of a step that
// refused an index that it was given.
int64_t step_run(void* plan, int64_t begin, int64_t end, void* const* buffers, int64_t live, int64_t threads) {
  const std::lock_guard lock(step::running->mutex);
  std::unique_ptr<step::Pool>& pool = step::running->pool;
  if (!pool || pool->threads() != threads) {
    pool = nullptr;
    pool = std::make_unique<step::Pool>(static_cast<int>(threads));
  }
  auto& steps = static_cast<step::Plan*>(plan)->steps;
  const step::Memory memory{buffers};
  for (int64_t i = begin; i < end; ++i) {
    auto& [first, count, step] = steps[i];
    const int64_t tokens = count == 0 ? 1 : std::clamp<int64_t>(live - first, 0, count);
    const auto run = [&](auto& each) { return step::run(*pool, memory, each, tokens, std::max<int64_t>(count, 1)); };
    if (tokens > 0 && !std::visit(run, step)) {
      return i;
    }
  }
  return -1;
}
}
