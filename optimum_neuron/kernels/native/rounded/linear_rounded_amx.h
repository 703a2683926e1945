// SPDX-License-Identifier: Apache-2.0
//
// Rows of x as codes of int8 times weights that are codes of int8 or int4, by the tile registers of AMX.
#pragma once

#include <algorithm>
#include <cstdint>

#include "rounded/rounded_amx.h"

namespace step {
namespace {

template <class Kind>
class RoundedAmxWorker {
  static constexpr int64_t kBatchBytes = 640 * 1024;

 public:
  using Element = typename Kind::Element;
  using Packed = uint8_t;
  using Input = RoundedAmxInput;

  // As in BlockWorker.
  static constexpr int64_t kTileRows = kAmxLines, kOutputs = RoundedTiles::kOutputs, kBytes = RoundedTiles::kBytes;

  RoundedAmxWorker(const Input& input, const Linear& linear, void* memory)
      : input_(input), linear_(linear), tiles_(input, linear, memory) {}

  static int64_t batchTiles(const Input& input) {
    return std::clamp<int64_t>(kBatchBytes / (input.stride * kTileRows), 1, RoundedTiles::kMostTiles);
  }

  template <class Call>
  static int64_t rowBytes(const Call& call) {
    return bytesOf(call.coding, call.columns);
  }
  template <class Call>
  static Input inputOf(const Call& call, void* packed, int64_t rows, const int64_t* places) {
    const RoundedForm form = roundedFormOf(call);
    return {{packed, rows, call.columns, Input::rowBytesOf(form), places}, form};
  }
  // And for what is read after the last tile.
  static int64_t packedBytes(const Input& input) { return input.rows * input.stride + kAmxLineBytes; }

  template <class RowOf>
  static void pack(const Input& input, int64_t tile, RowOf rowOf) {
    input.template pack<Kind>(tile, rowOf);
  }

  // `next` are the weights that this thread is likely to read then.
  void run(Range outputs, Range tiles, Bytes next) {
    const int64_t all = tiles.end - tiles.begin, batches = divideUp(all, batchTiles(input_)), blocks = input_.form.blocks();
    const auto [first, last] = input_.tileRows(tiles.begin);
    const AmxTiles registers(RoundedTiles::shapes(input_.blockColumns(), all == 1 ? last - first : kAmxLines));
    const int64_t most = tiles_.mostBlocks(), chunks = divideUp(blocks, most);
    const auto panelAt = [&](int64_t n) { return Range{n, std::min(n + kOutputs, outputs.end)}; };
    for (int64_t n = outputs.begin; n < outputs.end; n += kOutputs) {
      const Range panel = panelAt(n);
      const int64_t lines = roundUp(panel.end - n, kAmxLines), asks = chunks * batches * lines + blocks * all * (lines / kAmxLines);
      Ahead ahead(n + kOutputs < outputs.end ? weightsOf(panelAt(n + kOutputs)) : next, asks);
      for (int64_t j = 0; j < batches; ++j) {
        const Range batch = shift(part(all, j, batches), tiles.begin);
        for (int64_t i = 0; i < chunks; ++i) {
          const RoundedTiles::Task task = tiles_.prepare(panel, part(blocks, i, chunks, most), all == 1, ahead);
          for (int64_t t = batch.begin; t < batch.end; ++t) {
            for (int64_t a = 0; a < lines / kAmxLines; ++a) {
              tiles_.meet(task, t, t - batch.begin, a, ahead);
            }
            if (task.blocks.end == blocks) {
              store(panel, input_.tileRows(t), t - batch.begin);
            }
          }
        }
      }
    }
  }

 private:
  Bytes weightsOf(Range outputs) const {
    const int64_t row = input_.form.rowBytes();
    return {static_cast<const char*>(linear_.weight) + outputs.begin * row,
            (outputs.end - outputs.begin) * row};
  }

  // Stores what outputs of a panel are, two tiles side by side: cache lines are written once.
  void store(Range panel, Range rows, int64_t place) const {
    for (int64_t n = panel.begin, a = 0; n < panel.end; n += 2 * kAmxLines, a += 2) {
      const int64_t count = std::min(panel.end - n, kAmxLines), second = std::min(panel.end - n - count, kAmxLines);
      Vec sums[kLanes], others[kLanes];
      takeRows(sums, n, count, tiles_.totalsOf(place, a));
      if (second > 0) {
        takeRows(others, n + kAmxLines, second, tiles_.totalsOf(place, a + 1));
      }
      for (int64_t row = rows.begin; row < rows.end; ++row) {
        auto* to = static_cast<Element*>(linear_.output) + input_.place(row) * linear_.outputStride + n;
        storeUpTo<Kind>(to, sums[row - rows.begin], count);
        if (second > 0) {
          storeUpTo<Kind>(to + kAmxLines, others[row - rows.begin], second);
        }
      }
    }
  }

  INLINE void takeRows(Vec (&rows)[kLanes], int64_t n, int64_t count, const float* totals) const {
    const auto* bias = static_cast<const Element*>(linear_.bias);
    // Adding -0 changes no value, adding +0 would make +0 of -0.
    const Vec added = bias ? loadUpTo<Kind>(bias + n, count) : broadcast(-0.0f);
    UNROLL for (int line = 0; line < kAmxLines; ++line) {
      rows[line] = loadVec(totals + line * kLanes);
    }
    transpose(rows);
    UNROLL for (int row = 0; row < kLanes; ++row) {
      rows[row] += added;
    }
  }

  const Input& input_;
  const Linear& linear_;
  RoundedTiles tiles_;
};

}  // namespace
}  // namespace step
