// SPDX-License-Identifier: Apache-2.0
//
// Linear layers of bfloat16 whose weights are codes, by the tile registers of AMX. Codes become bfloat16, exactly, tile by tile; what a
// tile of weights makes of one of x is multiplied by its scales in float32 and added up in vector registers. Every output is
// summed in one order: 32 columns after 32 columns of a segment, then segment after segment. A segment is a group, or a part of a
// long one; after a group's last one follows its shift times the sum of its x.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

#include "ahead.h"
#include "amx.h"
#include "amx_store.h"
#include "codes_amx.h"
#include "linear_block.h"
#include "linear_codes_few.h"
#include "linear_coded_input.h"
#include "transpose.h"

namespace step {
namespace {

class AmxCodesWorker {
 public:
  using Element = BFloat16::Element;
  using Packed = BFloat16::Packed;
  using Input = AmxCodedInput;

  static constexpr int64_t kTileRows = kAmxLines, kOutputs = 2 * kAmxLines;

 private:
  static constexpr int64_t kSums = kLanes * kLanes, kPairSums = 2 * kSums;  // of a tile of weights, and of two
  // Columns of a panel that are unpacked at once: they stay in the first-level cache while rows pass over them.
  static constexpr int64_t kColumns = AmxCodedInput::kSegment;
  static constexpr int64_t kLeastTiles = 8, kMostTiles = 32, kBatchBytes = 1024 * 1024;
  static constexpr int64_t kPanelPairs = kPanelOutputs / kOutputs, kTileElements = kAmxBytes / sizeof(Element);
  static constexpr int64_t kCodesBytes = kPanelOutputs * kColumns * sizeof(Element);
  static constexpr int64_t kSumsBytes = kPanelPairs * kMostTiles * kPairSums * sizeof(float);
  static constexpr int64_t kScalesBytes = kPanelOutputs * kLanes * sizeof(float);

 public:
  // Memory of a worker: the sums of a panel and a batch, weights, their scales and shifts, and what segments come to.
  static constexpr int64_t kBytes = kSumsBytes + kCodesBytes + 2 * kScalesBytes + kColumns / kLineColumns * 2 * kPairSums * sizeof(float);
  static_assert(kBytes >= FewRowsWorker::kBytes);

  AmxCodesWorker(const Input& input, const Linear& linear, void* memory)
      : input_(input),
        linear_(linear),
        sums_(static_cast<float*>(memory)),
        weights_(reinterpret_cast<Element*>(sums_ + kSumsBytes / sizeof(float))),
        scales_(reinterpret_cast<float*>(weights_ + kCodesBytes / sizeof(Element))),
        shifts_(scales_ + kScalesBytes / sizeof(float)),
        parts_(shifts_ + kScalesBytes / sizeof(float)) {}

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
    const AmxTiles registers;
    if (input_.slots) {
      FewRowsWorker(input_, linear_, sums_).run(outputs, next);
      return;
    }
    const int64_t count = outputs.end - outputs.begin, all = tiles.end - tiles.begin;
    const int64_t panels = divideUp(count, kPanelOutputs), batches = divideUp(all, batchTiles(input_));
    const auto panelOf = [&](int64_t i) { return shift(part(count, i, panels, kOutputs), outputs.begin); };
    for (int64_t i = 0; i < panels; ++i) {
      const Range panel = panelOf(i);
      const Bytes then = i + 1 < panels ? bytesOfRows(panelOf(i + 1)) : next;
      Ahead ahead(then, divideUp(panel.end - panel.begin, kOutputs) * divideUp(all, 2));
      for (int64_t j = 0; j < batches; ++j) {
        computeBatch(panel, shift(part(all, j, batches), tiles.begin), ahead);
      }
    }
  }

 private:
  // Two tiles of weights: unpacked ones of some segments, and for each of their lines the scales and shifts of their groups.
  struct Weights {
    const Element* numbers;
    const float *scales, *shifts;
  };

  // A segment of those that are unpacked: its columns, its group among theirs and among all, and whether it ends that.
  struct Segment {
    int64_t columns, own, group;
    bool isLast;
  };

  // One or two tiles of x, from the first column that is unpacked on, and their rows.
  template <int Tiles>
  struct Rows {
    const Packed* x[Tiles];
    const float* sums[Tiles];
    int64_t count[Tiles];
  };

  Bytes bytesOfRows(Range outputs) const {
    const int64_t row = input_.form.rowBytes();
    return {static_cast<const char*>(linear_.weight) + outputs.begin * row, (outputs.end - outputs.begin) * row};
  }
  void computeBatch(Range panel, Range batch, Ahead& ahead) {
    const int64_t segments = input_.segments(), pairs = divideUp(panel.end - panel.begin, kOutputs);
    for (int64_t begin = 0, end = 1; begin < segments; begin = end++) {
      const int64_t column = input_.columnsOf(begin).begin;
      while (end < segments && input_.columnsOf(end).end - column <= kColumns) {
        ++end;
      }
      isFirst_ = begin == 0;
      count_ = end - begin;
      for (int64_t s = begin; s < end; ++s) {
        const int64_t group = s / input_.segmentsOfGroup;
        const Range columns = input_.columnsOf(s);
        segments_[s - begin] = {
            columns.end - columns.begin, group - begin / input_.segmentsOfGroup, group,
            linear_.scales.shift && (s + 1) % input_.segmentsOfGroup == 0};
      }
      Weights weights[kPanelPairs];
      for (int64_t a = 0; a < pairs; ++a) {
        weights[a] = unpack(panel, a, {begin, end});
      }
      for (int64_t t = batch.begin; t < batch.end; t += 2) {
        float* sums = sums_ + (t - batch.begin) * kPanelPairs * kPairSums;
        t + 1 < batch.end ? multiply(weights, pairs, rowsOf<2>(t, column), sums, ahead)
                          : multiply(weights, pairs, rowsOf<1>(t, column), sums, ahead);
      }
    }
    for (int64_t t = batch.begin; t < batch.end; ++t) {
      const int64_t place = (t - batch.begin) / 2 * 2 * kPanelPairs + (t - batch.begin) % 2;
      store(panel, t, sums_ + place * kPairSums);
    }
  }

  template <int Tiles>
  Rows<Tiles> rowsOf(int64_t tile, int64_t column) const {
    Rows<Tiles> rows;
    for (int b = 0; b < Tiles; ++b) {
      const auto [first, last] = input_.tileRows(tile + b);
      rows.x[b] = input_.columnsOf(tile + b, column);
      rows.sums[b] = input_.sumsOf(tile + b);
      rows.count[b] = last - first;
    }
    return rows;
  }

  // A line that is missing is a copy of the last one.
  Weights unpack(Range panel, int64_t a, Range segments) {
    const Range columns{input_.columnsOf(segments.begin).begin, input_.columnsOf(segments.end - 1).end};
    const int64_t first = segments.begin / input_.segmentsOfGroup;
    const int64_t count = (segments.end - 1) / input_.segmentsOfGroup + 1 - first;
    const Scales& own = linear_.scales;
    Element* to = weights_ + a * kOutputs * kColumns;
    float *scales = scales_ + a * kOutputs * kLanes, *shifts = shifts_ + a * kOutputs * kLanes;
    for (int64_t line = 0; line < kOutputs; ++line) {
      const int64_t row = std::min(panel.begin + a * kOutputs + line, panel.end - 1);
      const int64_t group = row * input_.form.groups + first;
      const char* scale = static_cast<const char*>(own.scale) + group * sizeOf(own.type);
      storeVec(scales + line * kLanes, loadScales(own.type, scale, count));
      if (own.shift) {
        storeVec(shifts + line * kLanes, loadScales(Type::kFloat32, own.shift + group, count));
      }
    }
    for (int64_t tile = 0; tile < 2; ++tile) {
      const int64_t row = std::min(panel.begin + a * kOutputs + tile * kAmxLines, panel.end - 1);
      unpackLines(
          to + tile * kAmxLines * kColumns, static_cast<const uint8_t*>(linear_.weight), row, panel.end - 1, input_.form,
          columns, own.shift);
    }
    return {to, scales, shifts};
  }

  // Adds the products of pairs of tiles of weights and one or two tiles of x to their sums, a line of which is an output of 16 rows.
  template <int Tiles>
  void multiply(const Weights* weights, int64_t pairs, const Rows<Tiles>& rows, float* sums, Ahead& ahead) {
    for (int64_t a = 0; a < pairs; ++a, sums += 2 * kPairSums) {
      ahead.ask();
      const Element* numbers = weights[a].numbers;
      Rows<Tiles> rest = rows;
      for (int64_t s = 0; s < count_; ++s) {
        multiplySegment<Tiles>(numbers, rest, segments_[s].columns);
        float* part = partsOf(s);
        amxStore<0>(part, kAmxLineBytes);
        amxStore<1>(part + kSums, kAmxLineBytes);
        if constexpr (Tiles == 2) {
          amxStore<2>(part + 2 * kSums, kAmxLineBytes);
          amxStore<3>(part + 3 * kSums, kAmxLineBytes);
        }
      }
      add<Tiles>(weights[a], rows, sums);
    }
  }

  // Registers 0 to 3 are sums, 4 and 5 weights, 6 and 7 rows of x. Leaves what follows the segment.
  template <int Tiles>
  static INLINE void multiplySegment(const Element*& numbers, Rows<Tiles>& rows, int64_t columns) {
    amxZero<0>();
    amxZero<1>();
    amxZero<2>();
    amxZero<3>();
    for (int64_t k = 0; k < columns; k += kLineColumns, numbers += kTileElements) {
      amxLoad<4>(numbers, kAmxLineBytes);
      amxLoad<5>(numbers + kAmxLines * kColumns, kAmxLineBytes);
      amxLoad<6>(rows.x[0], rows.count[0] * sizeof(uint32_t));
      amxMultiplyAdd<0, 4, 6>();
      amxMultiplyAdd<1, 5, 6>();
      rows.x[0] += kLineColumns * rows.count[0];
      if constexpr (Tiles == 2) {
        amxLoad<7>(rows.x[1], rows.count[1] * sizeof(uint32_t));
        amxMultiplyAdd<2, 4, 7>();
        amxMultiplyAdd<3, 5, 7>();
        rows.x[1] += kLineColumns * rows.count[1];
      }
    }
  }

  // Adds up what segments came to, times their scales.
  template <int Tiles>
  INLINE void add(const Weights& weights, const Rows<Tiles>& rows, float* sums) const {
    for (int64_t tile = 0; tile < 2 * Tiles; ++tile, sums += kSums) {
      const float *scales = weights.scales + tile % 2 * kSums, *shifts = weights.shifts + tile % 2 * kSums;
      Vec total[kAmxLines];
      UNROLL for (int line = 0; line < kAmxLines; ++line) {
        total[line] = isFirst_ ? Vec{} : loadVec(sums + line * kLanes);
      }
      for (int64_t s = 0; s < count_; ++s) {
        const auto& [columns, own, group, isLast] = segments_[s];
        const float* part = partsOf(s) + tile * kSums;
        UNROLL for (int line = 0; line < kAmxLines; ++line) {
          total[line] = fma(loadVec(part + line * kLanes), broadcast(scales[line * kLanes + own]), total[line]);
        }
        if (isLast) {
          const Vec x = loadVec(rows.sums[tile / 2] + group * rows.count[tile / 2]);
          UNROLL for (int line = 0; line < kAmxLines; ++line) {
            total[line] = fma(x, broadcast(shifts[line * kLanes + own]), total[line]);
          }
        }
      }
      UNROLL for (int line = 0; line < kAmxLines; ++line) {
        storeVec(sums + line * kLanes, total[line]);
      }
    }
  }

  float* partsOf(int64_t s) const { return parts_ + s * 2 * kPairSums; }

  // `sums` are those of a tile of x; of two such tiles in turn.
  void store(Range panel, int64_t tile, const float* sums) const {
    alignas(64) float biases[kOutputs];
    const auto* bias = static_cast<const Element*>(linear_.bias);
    for (int64_t n = panel.begin; n < panel.end; n += kOutputs, sums += 2 * kPairSums) {
      const int64_t count = std::min(panel.end - n, kOutputs);
      for (int64_t i = 0; i < kOutputs; ++i) {
        // Adding -0 changes no value, adding +0 would make +0 of -0.
        biases[i] = !bias || i >= count ? -0.0f : std::bit_cast<float>(uint32_t{bias[n + i]} << 16);
      }
      storePairs(sums, biases, count, input_.tileRows(tile), [&](int64_t row) {
        return static_cast<Element*>(linear_.output) + input_.place(row) * linear_.outputStride + n;
      });
    }
  }

  const Input& input_;
  const Linear& linear_;
  float* const sums_;
  Element* const weights_;
  float *const scales_, *const shifts_, *const parts_;
  // What is unpacked.
  Segment segments_[kColumns / kLineColumns];
  int64_t count_ = 0;
  bool isFirst_ = false;
};

}  // namespace
}  // namespace step
