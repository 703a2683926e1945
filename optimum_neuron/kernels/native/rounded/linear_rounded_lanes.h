// SPDX-License-Identifier: Apache-2.0
//
// Rows of x as codes of int8 times weights that are codes of int8 or int4, an output in each lane of a vector.
#pragma once

#include <algorithm>
#include <cstdint>

#include "rounded/rounded_lanes.h"

namespace step {
namespace {

template <class Kind>
class RoundedLanesWorker {
 public:
  using Element = typename Kind::Element;
  using Packed = uint8_t;
  using Input = RoundedLanesInput;

  // As in BlockWorker.
  static constexpr int64_t kTileRows = kRoundedRows, kOutputs = kLanes, kBytes = RoundedLanes::kBytes;

  RoundedLanesWorker(const Input& input, const Linear& linear, void* memory)
      : input_(input), linear_(linear), lanes_(input, linear, memory) {}

  static int64_t batchTiles(const Input&) { return RoundedLanes::kMostRows / kTileRows; }

  template <class Call>
  static int64_t rowBytes(const Call& call) {
    return bytesOf(call.coding, call.columns);
  }
  template <class Call>
  static Input inputOf(const Call& call, void* packed, int64_t rows, const int64_t* places) {
    const RoundedForm form = roundedFormOf(call);
    return {{packed, rows, call.columns, Input::rowBytesOf(form), places}, form};
  }
  static int64_t packedBytes(const Input& input) { return input.rows * input.stride; }

  template <class RowOf>
  static void pack(const Input& input, int64_t tile, RowOf rowOf) {
    const auto [first, last] = input.tileRows(tile);
    for (int64_t row = first; row < last; ++row) {
      input.template pack<Kind>(tile, row, rowOf(row));
    }
  }

  // `next` are the weights that this thread is likely to read then.
  void run(Range outputs, Range tiles, Bytes next) {
    const int64_t all = tiles.end - tiles.begin, batches = divideUp(all, batchTiles(input_)), blocks = input_.form.blocks();
    for (int64_t j = 0; j < batches; ++j) {
      const Range batch = shift(part(all, j, batches), tiles.begin);
      for (int64_t n = outputs.begin; n < outputs.end; n += kLanes) {
        const int64_t end = std::min(n + kLanes, outputs.end);
        const Bytes then = end < outputs.end ? weightsOf(end, std::min(end + kLanes, outputs.end)) : next;
        Ahead ahead(j == 0 ? then : Bytes{}, lanes_.asks());
        for (int64_t begin = 0; begin < blocks; begin += lanes_.taskBlocks()) {
          const RoundedLanes::Task task{n, end - n, {begin, std::min(begin + lanes_.taskBlocks(), blocks)}};
          lanes_.prepare(task, ahead);
          for (int64_t t = batch.begin; t < batch.end; ++t) {
            lanes_.meet(task, t, input_.tileRows(t).begin - input_.tileRows(batch.begin).begin, ahead);
          }
        }
        store({n, end}, {input_.tileRows(batch.begin).begin, input_.tileRows(batch.end - 1).end});
      }
    }
  }

 private:
  Bytes weightsOf(int64_t n, int64_t end) const {
    const int64_t row = input_.form.rowBytes();
    return {static_cast<const char*>(linear_.weight) + n * row, (end - n) * row};
  }

  void store(Range outputs, Range rows) const {
    const int64_t count = outputs.end - outputs.begin;
    const auto* bias = static_cast<const Element*>(linear_.bias);
    // Adding -0 changes no value, adding +0 would make +0 of -0.
    const Vec added = bias ? loadUpTo<Kind>(bias + outputs.begin, count) : broadcast(-0.0f);
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      auto* to = static_cast<Element*>(linear_.output) + input_.place(row) * linear_.outputStride + outputs.begin;
      storeUpTo<Kind>(to, loadVec(lanes_.totalsOf(row - rows.begin)) + added, count);
    }
  }

  const Input& input_;
  const Linear& linear_;
  RoundedLanes lanes_;
};

}  // namespace
}  // namespace step
