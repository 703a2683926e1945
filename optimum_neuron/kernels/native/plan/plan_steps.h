// SPDX-License-Identifier: Apache-2.0
//
// The steps of a plan, and how they are read from its words. What is read stays inside of the words; that sizes and places fit
// was checked by run/encode.py.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <variant>
#include <vector>

#include "attention/matmul.h"
#include "recurrence/convolution.h"
#include "common/kernels.h"
#include "map/map.h"
#include "recurrence/recurrence.h"
#include "tables/choose.h"
#include "tables/rows.h"
#include "sample/sample.h"

namespace step {

namespace {

// A place in a buffer.
struct Place {
  int64_t buffer = -1;  // none
  int64_t bytes = 0;    // from its begin

  explicit operator bool() const { return buffer >= 0; }
};

// What codes stand for; nothing of weights that are numbers.
struct CodesPlace {
  Place scale, shift;
  Type type = Type::kFloat32;
  bool isShort = false;
};

struct LinearsStep {
  LinearsCall call;
  Place x;
  struct Layer {
    Place weight, bias, output;
    int64_t outputs, outputStride;
    CodesPlace codes;
  };
  std::vector<Layer> layers;
  std::vector<Linear> linears;
};

struct ExpertsStep {
  ExpertsCall call;
  Place x, index, weight, bias, y;
  CodesPlace codes;
};

struct AttendStep {
  AttendCall call;
  Place query, keys, values, output, blocks, positions, sinks, columnBias, keyScales, valueScales;
};

struct SelectStep {
  SelectCall call;
  Place from, to, index;
};

struct WriteStep {
  WriteCall call;
  Place cache, states, blocks, columns;
};

struct WriteCodesStep {
  WriteCodesCall call;
  Place codes, scales, states, blocks, columns;
};

struct ConvolveStep {
  ConvolveCall call;
  Place inputs, weight, bias, slots, positions, state, output;
};

struct WalkStep {
  WalkCall call;
  Place query, key, value, decay, share, rates, slots, positions, state, output;
};

struct MatMulStep {
  MatMulCall call;
  Place left, right, output;
};

struct TopKStep {
  TopKCall call;
  Place from, values, index;
};

struct GatherStep {
  GatherCall call;
  Place from, index, to;
};

struct ScatterStep {
  ScatterCall call;
  Place from, index, to, values;
};

struct SampleStep {
  SampleCall call;
  Place logits, params, uniforms, tokens;
};

using Step = std::variant<
    Map, LinearsStep, ExpertsStep, AttendStep, SelectStep, WriteStep, SampleStep, WalkStep, ConvolveStep,
    WriteCodesStep, MatMulStep, TopKStep, GatherStep, ScatterStep>;

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

CodesPlace readCodes(Reader& reader) {
  CodesPlace codes;
  codes.scale = reader.place();
  codes.shift = reader.place();
  codes.type = reader.type();
  codes.isShort = reader.word();
  return codes;
}

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
  map.needsRows = reader.word();
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
  markStored(map.items);
  return map;
}

Step readLinears(Reader& reader) {
  LinearsStep step{};
  step.call.type = reader.type();
  step.x = reader.place();
  step.call.rows = reader.word();
  step.call.columns = reader.word();
  step.call.stride = reader.word();
  step.call.coding = static_cast<Coding>(reader.word());
  step.call.group = reader.word();
  step.call.activations = static_cast<Coding>(reader.word());
  const int64_t count = reader.count();
  for (int64_t i = 0; i < count; ++i) {
    LinearsStep::Layer layer{};
    layer.weight = reader.place();
    layer.bias = reader.place();
    layer.output = reader.place();
    layer.outputs = reader.word();
    layer.outputStride = reader.word();
    layer.codes = readCodes(reader);
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
  step.call.coding = static_cast<Coding>(reader.word());
  step.call.group = reader.word();
  step.call.activations = static_cast<Coding>(reader.word());
  step.codes = readCodes(reader);
  return step;
}

Step readAttend(Reader& reader) {
  AttendStep step{};
  AttendCall& call = step.call;
  call.type = reader.type();
  for (Place* place :
       {&step.query, &step.keys, &step.values, &step.output, &step.blocks, &step.positions, &step.sinks,
        &step.columnBias, &step.keyScales, &step.valueScales}) {
    *place = reader.place();
  }
  call.coding = static_cast<Coding>(reader.word());
  for (int64_t* size :
       {&call.rows, &call.heads, &call.tokens, &call.dim, &call.valueDim, &call.kvHeads, &call.columns, &call.cacheBlocks,
        &call.perRow, &call.biasColumns, &call.window,
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
  for (Place* place : {&step.cache, &step.states, &step.blocks, &step.columns}) {
    *place = reader.place();
  }
  for (int64_t* size :
       {&call.blocks, &call.heads, &call.length, &call.bytes, &call.tokens, &call.tokenStride, &call.headStride}) {
    *size = reader.word();
  }
  return step;
}

Step readWriteCodes(Reader& reader) {
  WriteCodesStep step{};
  WriteCodesCall& call = step.call;
  call.type = reader.type();
  for (Place* place : {&step.codes, &step.scales, &step.states, &step.blocks, &step.columns}) {
    *place = reader.place();
  }
  call.coding = static_cast<Coding>(reader.word());
  for (int64_t* size :
       {&call.blocks, &call.heads, &call.length, &call.dim, &call.tokens, &call.tokenStride, &call.headStride}) {
    *size = reader.word();
  }
  return step;
}

Step readWalk(Reader& reader) {
  WalkStep step{};
  WalkCall& call = step.call;
  for (Place* place :
       {&step.query, &step.key, &step.value, &step.decay, &step.share, &step.rates, &step.slots, &step.positions,
        &step.state, &step.output}) {
    *place = reader.place();
  }
  for (int64_t* size :
       {&call.tokens, &call.heads, &call.keyHeads, &call.keyDim, &call.valueDim, &call.decays, &call.slotCount}) {
    *size = reader.word();
  }
  return step;
}

Step readConvolve(Reader& reader) {
  ConvolveStep step{};
  ConvolveCall& call = step.call;
  call.type = reader.type();
  for (Place* place :
       {&step.inputs, &step.weight, &step.bias, &step.slots, &step.positions, &step.state, &step.output}) {
    *place = reader.place();
  }
  for (int64_t* size : {&call.tokens, &call.channels, &call.past, &call.slotCount, &call.stride}) {
    *size = reader.word();
  }
  return step;
}

Step readMatMul(Reader& reader) {
  MatMulStep step{};
  for (Place* place : {&step.left, &step.right, &step.output}) {
    *place = reader.place();
  }
  for (int64_t* size : {&step.call.matrices, &step.call.rows, &step.call.inner, &step.call.columns}) {
    *size = reader.word();
  }
  return step;
}

Step readTopK(Reader& reader) {
  TopKStep step{};
  for (Place* place : {&step.from, &step.values, &step.index}) {
    *place = reader.place();
  }
  for (int64_t* size : {&step.call.rows, &step.call.columns, &step.call.k}) {
    *size = reader.word();
  }
  return step;
}

Step readGather(Reader& reader) {
  GatherStep step{};
  GatherCall& call = step.call;
  for (Place* place : {&step.from, &step.index, &step.to}) {
    *place = reader.place();
  }
  for (int64_t* size : {&call.rows, &call.columns, &call.count, &call.bytes}) {
    *size = reader.word();
  }
  return step;
}

Step readScatter(Reader& reader) {
  ScatterStep step{};
  ScatterCall& call = step.call;
  for (Place* place : {&step.from, &step.index, &step.to}) {
    *place = reader.place();
  }
  for (int64_t* size : {&call.rows, &call.columns, &call.count, &call.bytes}) {
    *size = reader.word();
  }
  step.values = reader.place();
  call.value = reader.word();
  return step;
}

Step readSample(Reader& reader) {
  SampleStep step{};
  for (Place* place : {&step.logits, &step.params, &step.uniforms, &step.tokens}) {
    *place = reader.place();
  }
  for (int64_t* size : {&step.call.rows, &step.call.vocab, &step.call.stride}) {
    *size = reader.word();
  }
  return step;
}

}  // namespace

}  // namespace step
