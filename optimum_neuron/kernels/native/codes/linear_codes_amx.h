// SPDX-License-Identifier: Apache-2.0
//
// Linear layers of bfloat16 with weights that are codes, by the tile registers of AMX. Codes become bfloat16, exactly, a panel's at once, while
// rows of x pass over them. What a group of columns comes to is multiplied by its scale in float32 and added to what the groups before
// came to. Every output is summed in one order: 32 columns after 32 columns of a group, then group after group, and after each its shift
// times the sum of its x. With short scales, what codes stand for becomes bfloat16, and 32 columns are summed after 32 columns of all.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "common/ahead.h"
#include "vectors/amx.h"
#include "vectors/amx_store.h"
#include "codes/codes_amx.h"
#include "linear/linear_block.h"
#include "codes/linear_codes_few.h"
#include "codes/linear_codes_tile.h"
#include "codes/linear_coded_input.h"
#include "codes/linear_flat_row.h"
#include "codes/linear_flat_tile.h"

namespace step {
namespace {

class AmxCodesWorker {
 public:
  using Element = BFloat16::Element;
  using Packed = BFloat16::Packed;
  using Input = AmxCodedInput;

  static constexpr int64_t kTileRows = kAmxLines, kOutputs = 2 * kAmxLines;

 private:
  static constexpr int64_t kSums = kLanes * kLanes, kTileElements = kAmxBytes / sizeof(Element);
  static constexpr int64_t kPanelTiles = kPanelOutputs / kAmxLines;
  static constexpr int64_t kLeastTiles = 8, kMostTiles = 32, kBatchBytes = 1024 * 1024;
  // Tiles of weights in a row that are unpacked at once: of a long group as many as the second-level cache holds with x; of short
  // ones as many as the first-level cache holds with what they come to.
  static constexpr int64_t kLongSteps = 64, kShortSteps = kShortGroup / kLineColumns;
  static constexpr int64_t kSumsBytes = kPanelTiles * kMostTiles * kAmxBytes;

 public:
  // Memory of a worker: what groups came to before and what this one comes to, of a panel and a batch; complete sums of groups, scales,
  // shifts and weights.
  static constexpr int64_t kBytes = 2 * kSumsBytes + (kShortSteps * 4 + 2 * kPanelTiles + kPanelTiles * kLongSteps) * kAmxBytes;
  static_assert(kBytes >= std::max({FewRowsWorker::kBytes, OneTileWorker::kBytes, FlatTileWorker::kBytes}));

  AmxCodesWorker(const Input& input, const Linear& linear, void* memory)
      : input_(input),
        linear_(linear),
        form_(input.sumsFormOf(linear.scales)),
        isScaled_(takesScaled(input.form, linear.scales)),
        groupSteps_(form_.paddedGroup() / kLineColumns),
        totals_(static_cast<float*>(memory)),
        sums_(totals_ + kSumsBytes / sizeof(float)),
        parts_(sums_ + kSumsBytes / sizeof(float)),
        scales_(parts_ + kShortSteps * 4 * kSums),
        shifts_(scales_ + kPanelTiles * kSums),
        weights_(reinterpret_cast<Element*>(shifts_ + kPanelTiles * kSums)) {}

  static int64_t batchTiles(const Input& input) {
    return std::clamp<int64_t>(kBatchBytes / (input.stride * kTileRows * sizeof(Packed)), kLeastTiles, kMostTiles);
  }

  template <class Call>
  static int64_t rowBytes(const Call& call) {
    return bytesOf(call.coding, call.columns);
  }
  template <class Call>
  static Input inputOf(const Call& call, void* packed, int64_t rows, const int64_t* places) {
    return codedInputOf(call, packed, rows, places);
  }
  static int64_t packedBytes(const Input& input) { return input.bytes(); }

  template <class RowOf>
  static void pack(const Input& input, int64_t tile, RowOf rowOf) {
    input.pack(tile, rowOf);
  }

  // `next` are the weights that this thread is likely to read then.
  void run(Range outputs, Range tiles, Bytes next) {
    if (input_.isPlain) {
      FlatRowWorker(input_, linear_).run(outputs, next);
      return;
    }
    const int64_t count = outputs.end - outputs.begin, all = tiles.end - tiles.begin;
    if (all == 1 && input_.slots == 0) {
      const AmxTiles registers(input_.shapesOf(tiles.begin));
      if (form_.groups == 1) {
        FlatTileWorker(input_, linear_, tiles.begin, totals_).run(outputs, next);
      } else {
        OneTileWorker(input_, linear_, tiles.begin, totals_).run(outputs, next);
      }
      return;
    }
    const AmxTiles registers;
    if (input_.slots) {
      FewRowsWorker(input_, linear_, totals_).run(outputs, next);
      return;
    }
    const int64_t panels = divideUp(count, kPanelOutputs), batches = divideUp(all, batchTiles(input_));
    const auto panelOf = [&](int64_t i) { return shift(part(count, i, panels, kOutputs), outputs.begin); };
    for (int64_t i = 0; i < panels; ++i) {
      const Range panel = panelOf(i);
      const int64_t asks = divideUp(panel.end - panel.begin, kOutputs) * divideUp(all, 2) * divideUp(steps(), kShortSteps);
      Ahead ahead(i + 1 < panels ? bytesOfRows(panelOf(i + 1)) : next, asks);
      for (int64_t j = 0; j < batches; ++j) {
        computeBatch(panel, shift(part(all, j, batches), tiles.begin), ahead);
      }
    }
  }

 private:
  // Weights that are unpacked, by the tiles of 32 columns that they fill.
  struct Chunk {
    Range steps;
    int64_t group;      // the first one
    bool begins, ends;  // whether they begin with a group, and end with one
  };

  Bytes bytesOfRows(Range outputs) const {
    const int64_t row = form_.rowBytes();
    return {static_cast<const char*>(linear_.weight) + outputs.begin * row, (outputs.end - outputs.begin) * row};
  }
  int64_t steps() const { return form_.padded() / kLineColumns; }

  void computeBatch(Range panel, Range batch, Ahead& ahead) {
    const int64_t pairs = divideUp(panel.end - panel.begin, kOutputs), all = steps();
    for (int64_t begin = 0, end; begin < all; begin = end) {
      const int64_t group = begin / groupSteps_;
      end = groupSteps_ <= kShortSteps ? std::min(begin + kShortSteps / groupSteps_ * groupSteps_, all)
                      : std::min(begin + kLongSteps, (group + 1) * groupSteps_);
      const Chunk chunk{{begin, end}, group, begin % groupSteps_ == 0, end % groupSteps_ == 0};
      unpack(panel, pairs, chunk);
      for (int64_t a = 0; a < 2 * pairs; a += 2) {
        for (int64_t t = batch.begin; t < batch.end; t += 2) {
          t + 1 < batch.end ? multiply<2>(chunk, t, a, t - batch.begin, ahead) : multiply<1>(chunk, t, a, t - batch.begin, ahead);
        }
      }
    }
    for (int64_t t = batch.begin; t < batch.end; ++t) {
      store(panel, t, totals_ + placeOf(t - batch.begin, 0));
    }
  }

  // Where sums of a tile of x and one of weights lie.
  static int64_t placeOf(int64_t t, int64_t a) { return (t * kPanelTiles + a) * kSums; }
  // Tiles of a pair lie side by side.
  Element* weightsOf(int64_t a, int64_t step) const { return weights_ + ((a / 2 * kLongSteps + step) * 2 + a % 2) * kTileElements; }

  // A line that is missing is a copy of the last one.
  void unpack(Range panel, int64_t pairs, const Chunk& chunk) {
    if (isScaled_) {
      unpackScaledLines(panel, pairs, chunk);
      return;
    }
    static constexpr void (AmxCodesWorker::*kUnpackers[])(Range, int64_t, const Chunk&) = {
        &AmxCodesWorker::unpackAll<Coding::kInt8>, &AmxCodesWorker::unpackAll<Coding::kInt4>,
        &AmxCodesWorker::unpackAll<Coding::kFp8>, &AmxCodesWorker::unpackAll<Coding::kFp4>};
    (this->*kUnpackers[static_cast<int>(form_.coding) - 1])(panel, pairs, chunk);
    const Scales& own = linear_.scales;
    const int64_t count = std::min<int64_t>(divideUp(chunk.steps.end - chunk.steps.begin, groupSteps_), kLanes);
    for (int64_t line = 0; line < pairs * kOutputs; ++line) {
      const int64_t first = std::min(panel.begin + line, panel.end - 1) * form_.groups + chunk.group;
      const char* scale = static_cast<const char*>(own.scale) + first * sizeOf(own.type);
      storeVec(scales_ + line * kLanes, loadScales(own.type, scale, count));
      if (own.shift) {
        storeVec(shifts_ + line * kLanes, loadScales(Type::kFloat32, own.shift + first, count));
      }
    }
  }

  template <Coding C>
  void unpackAll(Range panel, int64_t pairs, const Chunk& chunk) {
    constexpr int64_t kColumns = 4 * kLineColumns;
    const Line<C> numbers(linear_.scales.shift);
    const CodeForm& form = form_;
    for (int64_t line = 0; line < pairs * kOutputs; ++line) {
      const uint8_t* codes = static_cast<const uint8_t*>(linear_.weight) + std::min(panel.begin + line, panel.end - 1) * form.rowBytes();
      Element* to = weightsOf(line / kAmxLines, 0) + line % kAmxLines * kLineColumns;
      const int64_t end = chunk.steps.end * kLineColumns;
      for (int64_t k = chunk.steps.begin * kLineColumns; k < end; k += kColumns, to += 4 * 2 * kTileElements) {
        const auto [column, in] = linePlace(form, k);
        unpackLine<C, 2>(to, codes + bytesOf(C, column), numbers, form, std::min(end - k, kColumns), in);
      }
    }
  }

  void unpackScaledLines(Range panel, int64_t pairs, const Chunk& chunk) {
    const ScaledLine numbers;
    const Range steps = chunk.steps;
    const int64_t groupSteps = input_.form.group / kLineColumns;
    for (int64_t line = 0; line < pairs * kOutputs; ++line) {
      const int64_t row = std::min(panel.begin + line, panel.end - 1);
      const auto* codes = static_cast<const uint8_t*>(linear_.weight) + row * form_.rowBytes() + bytesOf(Coding::kInt4, steps.begin * kLineColumns);
      const auto* scales = static_cast<const uint16_t*>(linear_.scales.scale) + row * input_.form.groups;
      unpackScaled<2>(
          weightsOf(line / kAmxLines, 0) + line % kAmxLines * kLineColumns, codes, scales, numbers, steps.begin, steps.end - steps.begin,
          groupSteps);
    }
  }

  // Two tiles of weights meet one or two of x, four products for four loads. Registers 0 to 3 are sums, 4 and 5 weights, 6 and 7 rows of x.
  template <int Tiles>
  void multiply(const Chunk& chunk, int64_t t, int64_t a, int64_t place, Ahead& ahead) {
    const Packed* x[Tiles];
    int64_t rows[Tiles];
    for (int b = 0; b < Tiles; ++b) {
      const auto [first, last] = input_.tileRows(t + b);
      rows[b] = last - first;
      x[b] = input_.columnsOf(t + b, chunk.steps.begin * kLineColumns);
    }
    float *const before = sums_ + placeOf(place, a), *const other = before + placeOf(1, 0);
    const Element* numbers = weightsOf(a, 0);
    const int64_t all = chunk.steps.end - chunk.steps.begin, each = std::min(groupSteps_, all);
    for (int64_t end = each; end <= all; end += each) {
      begin<0>(chunk, before);
      begin<1>(chunk, before + kSums);
      if constexpr (Tiles == 2) {
        begin<2>(chunk, other);
        begin<3>(chunk, other + kSums);
      }
      for (int64_t step = end - each; step < end; ++step, numbers += 2 * kTileElements) {
        if (step % kShortSteps == 0) {
          ahead.ask();
        }
        amxLoad<4>(numbers, kAmxLineBytes);
        amxLoad<5>(numbers + kTileElements, kAmxLineBytes);
        amxLoad<6>(x[0], rows[0] * sizeof(uint32_t));
        amxMultiplyAdd<0, 4, 6>();
        amxMultiplyAdd<1, 5, 6>();
        x[0] += kLineColumns * rows[0];
        if constexpr (Tiles == 2) {
          amxLoad<7>(x[1], rows[1] * sizeof(uint32_t));
          amxMultiplyAdd<2, 4, 7>();
          amxMultiplyAdd<3, 5, 7>();
          x[1] += kLineColumns * rows[1];
        }
      }
      float* const part = isScaled_ ? totals_ + placeOf(place, a) : partsOf(end / each - 1);
      float* const otherPart = part + (isScaled_ ? placeOf(1, 0) : 2 * kSums);
      float *const after = chunk.ends ? part : before, *const otherAfter = chunk.ends ? otherPart : other;
      amxStore<0>(after, kAmxLineBytes);
      amxStore<1>(after + kSums, kAmxLineBytes);
      if constexpr (Tiles == 2) {
        amxStore<2>(otherAfter, kAmxLineBytes);
        amxStore<3>(otherAfter + kSums, kAmxLineBytes);
      }
    }
    for (int i = 0; chunk.ends && !isScaled_ && i < 2 * Tiles; ++i) {
      add(chunk, all / each, t + i / 2, a + i % 2, i, totals_ + placeOf(place + i / 2, a + i % 2));
    }
  }

  float* partsOf(int64_t group) const { return parts_ + group * 4 * kSums; }

  // Adds what groups came to, times their scales, and their shifts times the sums of x.
  INLINE void add(const Chunk& chunk, int64_t groups, int64_t t, int64_t a, int64_t part, float* totals) const {
    Vec total[kAmxLines];
    UNROLL for (int line = 0; line < kAmxLines; ++line) {
      total[line] = chunk.group == 0 ? Vec{} : loadVec(totals + line * kLanes);
    }
    for (int64_t g = 0; g < groups; ++g) {
      const float *parts = partsOf(g) + part * kSums, *scales = scales_ + a * kSums + g, *shifts = shifts_ + a * kSums + g;
      UNROLL for (int line = 0; line < kAmxLines; ++line) {
        total[line] = fma(loadVec(parts + line * kLanes), broadcast(scales[line * kLanes]), total[line]);
      }
      if (linear_.scales.shift) {
        const auto [first, last] = input_.tileRows(t);
        const Vec x = loadVec(input_.sumsOf(t) + (chunk.group + g) * (last - first));
        UNROLL for (int line = 0; line < kAmxLines; ++line) {
          total[line] = fma(x, broadcast(shifts[line * kLanes]), total[line]);
        }
      }
    }
    UNROLL for (int line = 0; line < kAmxLines; ++line) {
      storeVec(totals + line * kLanes, total[line]);
    }
  }

  template <int Register>
  static INLINE void begin(const Chunk& chunk, const float* before) {
    if (chunk.begins) {
      amxZero<Register>();
    } else {
      amxLoad<Register>(before, kAmxLineBytes);
    }
  }

  // `totals` are those of a tile of x, for all outputs of a panel.
  void store(Range panel, int64_t tile, const float* totals) const {
    alignas(64) float biases[kOutputs];
    const auto* bias = static_cast<const Element*>(linear_.bias);
    for (int64_t n = panel.begin; n < panel.end; n += kOutputs, totals += 2 * kSums) {
      const int64_t count = std::min(panel.end - n, kOutputs);
      for (int64_t i = 0; i < kOutputs; ++i) {
        // Adding -0 changes no value, adding +0 would make +0 of -0.
        biases[i] = !bias || i >= count ? -0.0f : std::bit_cast<float>(uint32_t{bias[n + i]} << 16);
      }
      storePairs(totals, biases, count, input_.tileRows(tile), [&](int64_t row) {
        return static_cast<Element*>(linear_.output) + input_.place(row) * linear_.outputStride + n;
      });
    }
  }

  const Input& input_;
  const Linear& linear_;
  const CodeForm form_;  // by which it sums
  const bool isScaled_;
  const int64_t groupSteps_;
  float *const totals_, *const sums_, *const parts_, *const scales_, *const shifts_;
  Element* const weights_;
};

}  // namespace
}  // namespace step
