// SPDX-License-Identifier: Apache-2.0
//
// The same as linear_codes_amx.h for few rows of x and short groups, to the bit. There are 16 lines of x in a tile, and few rows fill few of
// them: here each group has lines of its own, as many groups as there is room for, and zeros elsewhere. So one tile holds what several
// groups come to, and is stored once for all of them.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "common/ahead.h"
#include "vectors/amx.h"
#include "vectors/amx_store.h"
#include "codes/codes_amx.h"
#include "codes/linear_coded_input.h"
#include "vectors/transpose.h"

namespace step {
namespace {

class FewRowsWorker {
  static constexpr int64_t kSums = kLanes * kLanes, kPanelTiles = kPanelOutputs / kAmxLines;
  // Columns that are unpacked at once: those of a panel stay in the first-level cache.
  static constexpr int64_t kColumns = 128, kTileElements = kAmxLines * kLineColumns;

 public:
  // Memory: weights, and what tiles of a panel come to.
  static constexpr int64_t kBytes = kPanelOutputs * kColumns * sizeof(uint16_t) + kPanelTiles * kAmxBytes;

  FewRowsWorker(const AmxCodedInput& input, const Linear& linear, void* memory)
      : input_(input),
        linear_(linear),
        weights_(static_cast<uint16_t*>(memory)),
        parts_(reinterpret_cast<float*>(weights_ + kPanelOutputs * kColumns)) {}

  // `next` are the weights that this thread is likely to read then. Those of the next panel lie in a row: memory is asked for them in
  // order, in even parts while this one is unpacked and multiplied.
  void run(Range outputs, Bytes next) {
    const int64_t count = outputs.end - outputs.begin, panels = divideUp(count, kPanelOutputs);
    const auto panelOf = [&](int64_t i) { return shift(part(count, i, panels, kAmxLines), outputs.begin); };
    for (int64_t i = 0; i < panels; ++i) {
      const Range panel = panelOf(i);
      const int64_t tiles = divideUp(panel.end - panel.begin, kAmxLines), steps = input_.form.padded() / kLineColumns;
      Ahead ahead(i + 1 < panels ? bytesOfRows(panelOf(i + 1)) : next, steps + divideUp(steps, kColumns / kLineColumns) * tiles);
      computePanel(panel, tiles, ahead);
    }
  }

 private:
  Bytes bytesOfRows(Range outputs) const {
    const int64_t row = input_.form.rowBytes();
    return {static_cast<const char*>(linear_.weight) + outputs.begin * row, (outputs.end - outputs.begin) * row};
  }

  void computePanel(Range panel, int64_t tiles, Ahead& ahead) {
    const int64_t groups = input_.form.groups, padded = input_.form.paddedGroup(), slots = input_.slots;
    Vec total[kPanelTiles][kFewRows] = {};
    for (int64_t begin = 0; begin < groups; begin += slots) {
      const Range range{begin, std::min(begin + slots, groups)};
      multiply(panel, tiles, {range.begin * padded, range.end * padded}, ahead);
      for (int64_t a = 0; a < tiles; ++a) {
        add(panel, a, range, total[a]);
      }
    }
    for (int64_t a = 0; a < tiles; ++a) {
      store(panel.begin + a * kAmxLines, std::min(panel.end - panel.begin - a * kAmxLines, kAmxLines), total[a]);
    }
  }

  // Registers 0 to 3 are sums, 4 and 5 weights, 6 rows of x.
  void multiply(Range panel, int64_t tiles, Range columns, Ahead& ahead) {
    amxZero<0>();
    amxZero<1>();
    amxZero<2>();
    amxZero<3>();
    for (int64_t k = columns.begin; k < columns.end; k += kColumns) {
      const Range some{k, std::min(k + kColumns, columns.end)};
      for (int64_t a = 0; a < tiles; ++a) {
        ahead.ask();
        unpack(a, panel, some);
      }
      const uint16_t* weights = weights_;
      for (int64_t column = k; column < some.end; column += kLineColumns, weights += kTileElements) {
        ahead.ask();
        amxLoad<6>(input_.columnsOf(0, column), kAmxLineBytes);
        multiplyTile<0>(weights, tiles);
        multiplyTile<1>(weights, tiles);
        multiplyTile<2>(weights, tiles);
        multiplyTile<3>(weights, tiles);
      }
    }
    amxStore<0>(parts_, kAmxLineBytes);
    amxStore<1>(parts_ + kSums, kAmxLineBytes);
    amxStore<2>(parts_ + 2 * kSums, kAmxLineBytes);
    amxStore<3>(parts_ + 3 * kSums, kAmxLineBytes);
  }

  void unpack(int64_t a, Range panel, Range columns) const {
    static constexpr void (FewRowsWorker::*kUnpackers[])(int64_t, Range, Range) const = {
        &FewRowsWorker::unpackAs<Coding::kInt8>, &FewRowsWorker::unpackAs<Coding::kInt4>,
        &FewRowsWorker::unpackAs<Coding::kFp8>, &FewRowsWorker::unpackAs<Coding::kFp4>};
    (this->*kUnpackers[static_cast<int>(input_.form.coding) - 1])(a, panel, columns);
  }

  // A line that is missing is a copy of the last one.
  template <Coding C>
  void unpackAs(int64_t a, Range panel, Range columns) const {
    const Line<C> numbers(linear_.scales.shift);
    const auto [column, in] = linePlace(input_.form, columns.begin);
    const int64_t row = panel.begin + a * kAmxLines, bytes = input_.form.rowBytes();
    const auto* codes = static_cast<const uint8_t*>(linear_.weight) + row * bytes + bytesOf(C, column);
    uint16_t* to = weights_ + a * kColumns * kAmxLines;
    if (columns.end - columns.begin == kColumns && input_.form.group % kLineColumns == 0) {
      for (int64_t line = 0; line < kAmxLines; ++line, to += kLineColumns) {
        UNROLL for (int64_t k = 0; k < kColumns / kLineColumns; ++k) {
          storeBits(to + k * kTileElements, numbers(codes + bytesOf(C, k * kLineColumns)));
        }
        codes += row + line + 1 < panel.end ? bytes : 0;
      }
      return;
    }
    for (int64_t line = 0; line < kAmxLines; ++line, to += kLineColumns) {
      unpackLine(to, codes, numbers, input_.form, columns.end - columns.begin, in);
      codes += row + line + 1 < panel.end ? bytes : 0;
    }
  }

  template <int Sums>
  static INLINE void multiplyTile(const uint16_t* weights, int64_t tiles) {
    if (Sums < tiles) {
      amxLoad<4 + Sums % 2>(weights + Sums * kColumns * kAmxLines, kAmxLineBytes);
      amxMultiplyAdd<Sums, 4 + Sums % 2, 6>();
    }
  }

  // Adds what groups come to, a lane of a vector for each output.
  void add(Range panel, int64_t a, Range range, Vec* total) const {
    const int64_t first = range.begin, groups = range.end - first;
    Vec parts[kLanes], scales[kLanes], shifts[kLanes];
    const Scales& own = linear_.scales;
    UNROLL for (int line = 0; line < kLanes; ++line) {
      parts[line] = loadVec(parts_ + a * kSums + line * kLanes);
      const int64_t row = std::min(panel.begin + a * kAmxLines + line, panel.end - 1);
      const int64_t group = row * input_.form.groups + first, next = kPanelOutputs * input_.form.groups;
      const char* scale = static_cast<const char*>(own.scale) + group * sizeOf(own.type);
      scales[line] = loadScales(own.type, scale, groups);
      prefetchFar(scale + next * sizeOf(own.type));
      if (own.shift) {
        shifts[line] = loadScales(Type::kFloat32, own.shift + group, groups);
        prefetchFar(own.shift + group + next);
      }
    }
    transpose(parts);
    transpose(scales);
    if (own.shift) {
      transpose(shifts);
    }
    const Vec* part = parts;
    for (int64_t g = 0; g < groups; ++g) {
      for (int64_t row = 0; row < input_.rows; ++row) {
        total[row] = fma(*part++, scales[g], total[row]);
        if (own.shift) {
          total[row] = fma(broadcast(input_.sumsOf(0)[(first + g) * input_.rows + row]), shifts[g], total[row]);
        }
      }
    }
  }

  void store(int64_t n, int64_t count, const Vec* total) const {
    for (int64_t row = 0; row < input_.rows; ++row) {
      storeOutputs(linear_, input_.place(row), n, count, total[row]);
    }
  }

  const AmxCodedInput& input_;
  const Linear& linear_;
  uint16_t* const weights_;
  float* const parts_;
};

}  // namespace
}  // namespace step
