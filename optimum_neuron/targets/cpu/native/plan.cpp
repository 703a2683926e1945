// SPDX-License-Identifier: Apache-2.0
//
// A plan: the steps of a graph as data, run one after another. The C functions at the end are all that Python calls.
//
// A plan is a list of 64-bit words, written by plan/encode.py, which has checked every size against the buffers; here, what
// is read stays inside of the words.
#include <memory>
#include <mutex>
#include <variant>
#include <vector>

#include "kernels.h"
#include "map.h"
#include "rows.h"

namespace step {

namespace {

// A place in a buffer.
struct Place {
  int64_t buffer = -1;  // none
  int64_t bytes = 0;    // from its begin

  explicit operator bool() const { return buffer >= 0; }
};

struct LinearsStep {
  LinearsCall call;
  Place x;
  struct Layer {
    Place weight, bias, output;
    int64_t outputs, outputStride;
  };
  std::vector<Layer> layers;
  std::vector<Linear> linears;
};

struct ExpertsStep {
  ExpertsCall call;
  Place x, index, weight, bias, y;
};

struct AttendStep {
  AttendCall call;
  Place query, keys, values, output, slots, positions, sinks;
};

struct SelectStep {
  SelectCall call;
  Place from, to, index;
};

struct WriteStep {
  WriteCall call;
  Place cache, states, rows, columns;
};

using Step = std::variant<Map, LinearsStep, ExpertsStep, AttendStep, SelectStep, WriteStep>;

class Reader {
 public:
  Reader(const int64_t* words, int64_t count) : next_(words), end_(words + count) {}

  bool atEnd() const { return next_ >= end_; }
  bool failed() const { return failed_; }

  int64_t word() {
    if (next_ >= end_) {
      failed_ = true;
      return 0;
    }
    return *next_++;
  }
  // A number of things that follow, each of at least one word.
  int64_t count() {
    const int64_t n = word();
    if (n < 0 || n > end_ - next_) {
      failed_ = true;
      return 0;
    }
    return n;
  }
  Place place() {
    Place place;
    place.buffer = word();
    place.bytes = word();
    return place;
  }
  Type type() { return static_cast<Type>(word()); }
  float number() { return std::bit_cast<float>(static_cast<uint32_t>(word())); }

 private:
  const int64_t* next_;
  const int64_t* end_;
  bool failed_ = false;
};

Access readAccess(Reader& reader) {
  Access access{};
  access.buffer = static_cast<int32_t>(reader.word());
  access.type = reader.type();
  access.offset = reader.word();
  access.dims = static_cast<int32_t>(std::min<int64_t>(reader.count(), kMaxDims));
  for (int d = 0; d < access.dims; ++d) {
    access.sizes[d] = reader.word();
    access.strides[d] = reader.word();
  }
  return access;
}

Step readMap(Reader& reader) {
  Map map{};
  map.rows = reader.word();
  map.columns = reader.word();
  map.reduces = reader.word();
  map.registers = static_cast<int32_t>(reader.word());
  const int64_t count = reader.count();
  for (int64_t i = 0; i < count; ++i) {
    Item item{};
    item.op = static_cast<Op>(reader.word());
    item.operands = static_cast<Operands>(reader.word());
    item.rows = reader.word();
    item.to = static_cast<int32_t>(reader.word());
    item.a = static_cast<int32_t>(reader.word());
    item.b = static_cast<int32_t>(reader.word());
    item.c = static_cast<int32_t>(reader.word());
    item.first = static_cast<uint32_t>(reader.word());
    item.second = static_cast<uint32_t>(reader.word());
    if (item.op == Op::kLoad || item.op == Op::kStore) {
      item.access = readAccess(reader);
    }
    map.items.push_back(item);
  }
  return map;
}

Step readLinears(Reader& reader) {
  LinearsStep step{};
  step.call.type = reader.type();
  step.x = reader.place();
  step.call.rows = reader.word();
  step.call.columns = reader.word();
  step.call.stride = reader.word();
  const int64_t count = reader.count();
  for (int64_t i = 0; i < count; ++i) {
    LinearsStep::Layer layer{};
    layer.weight = reader.place();
    layer.bias = reader.place();
    layer.output = reader.place();
    layer.outputs = reader.word();
    layer.outputStride = reader.word();
    step.layers.push_back(layer);
  }
  step.linears.resize(step.layers.size());
  return step;
}

Step readExperts(Reader& reader) {
  ExpertsStep step{};
  step.call.type = reader.type();
  for (Place* place : {&step.x, &step.index, &step.weight, &step.bias, &step.y}) {
    *place = reader.place();
  }
  step.call.perExpert = reader.word();
  for (int64_t* size :
       {&step.call.tokens, &step.call.k, &step.call.experts, &step.call.outputs, &step.call.columns}) {
    *size = reader.word();
  }
  return step;
}

Step readAttend(Reader& reader) {
  AttendStep step{};
  AttendCall& call = step.call;
  call.type = reader.type();
  for (Place* place :
       {&step.query, &step.keys, &step.values, &step.output, &step.slots, &step.positions, &step.sinks}) {
    *place = reader.place();
  }
  for (int64_t* size :
       {&call.rows, &call.heads, &call.tokens, &call.dim, &call.kvHeads, &call.columns, &call.cacheSlots, &call.window,
        &call.rowStride, &call.headStride, &call.tokenStride}) {
    *size = reader.word();
  }
  call.scaling = reader.number();
  call.softcap = reader.number();
  return step;
}

Step readSelect(Reader& reader) {
  SelectStep step{};
  step.call.indexType = reader.type();
  for (Place* place : {&step.from, &step.to, &step.index}) {
    *place = reader.place();
  }
  for (int64_t* size : {&step.call.outer, &step.call.size, &step.call.count, &step.call.bytes}) {
    *size = reader.word();
  }
  step.call.wraps = reader.word();
  return step;
}

Step readWrite(Reader& reader) {
  WriteStep step{};
  WriteCall& call = step.call;
  for (Place* place : {&step.cache, &step.states, &step.rows, &step.columns}) {
    *place = reader.place();
  }
  for (int64_t* size :
       {&call.slots, &call.heads, &call.length, &call.bytes, &call.tokens, &call.tokenStride, &call.headStride}) {
    *size = reader.word();
  }
  return step;
}

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
std::mutex running;
std::unique_ptr<Pool> pool;

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
  const std::lock_guard lock(step::running);
  if (!step::pool || step::pool->threads() != threads) {
    step::pool = nullptr;
    step::pool = std::make_unique<step::Pool>(static_cast<int>(threads));
  }
  auto& steps = static_cast<step::Plan*>(plan)->steps;
  const step::Memory memory{buffers};
  for (int64_t i = begin; i < end; ++i) {
    if (!std::visit([&](auto& each) { return step::run(*step::pool, memory, each); }, steps[i])) {
      return i;
    }
  }
  return -1;
}
}
