// SPDX-License-Identifier: Apache-2.0
//
// Rows of x as codes of int8 times weights that are codes of int8 or int4, in whole numbers: of a block exactly, and of blocks and groups in
// float32 in one order, which graphs/quantized/activations.py has. So a row's bits depend on nothing else, the instruction set included.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "linear_block.h"
#include "rounded_rows.h"

namespace step {
namespace {

// Outputs of a layer for the rows of some tiles, for any instruction set: what has no kernel of its own for such products.
template <class Kind>
class RoundedWorker {
  static constexpr int64_t kRows = 16, kScales = 32;

 public:
  using Element = typename Kind::Element;
  using Packed = int8_t;
  using Input = RoundedInput<kRows>;

  // As in BlockWorker. Memory: a block of a weight row.
  static constexpr int64_t kTileRows = kRows, kOutputs = 16, kBytes = kRoundedBlock;

  RoundedWorker(const Input& input, const Linear& linear, void* memory)
      : input_(input), linear_(linear), block_(static_cast<int8_t*>(memory)) {}

  static int64_t batchTiles(const Input&) { return 1; }

  template <class Call>
  static int64_t rowBytes(const Call& call) {
    return bytesOf(call.coding, call.columns);
  }

  template <class Call>
  static Input inputOf(const Call& call, void* packed, int64_t rows, const int64_t* places) {
    return roundedInputOf<kRows>(call, packed, rows, places);
  }

  static int64_t packedBytes(const Input& input) { return input.rows * input.stride; }

  template <class RowOf>
  static void pack(const Input& input, int64_t tile, RowOf rowOf) {
    const auto [first, last] = input.tileRows(tile);
    for (int64_t row = first; row < last; ++row) {
      input.template pack<Kind>(row, rowOf(row));
    }
  }

  // A panel of weight rows stays in the second-level cache while rows of x pass over it.
  void run(Range outputs, Range tiles, Bytes) {
    for (int64_t begin = outputs.begin; begin < outputs.end; begin += kPanelOutputs) {
      const int64_t end = std::min(begin + kPanelOutputs, outputs.end);
      for (int64_t tile = tiles.begin; tile < tiles.end; ++tile) {
        for (int64_t n = begin; n < end; ++n) {
          computeOutput(n, input_.tileRows(tile));
        }
      }
    }
  }

 private:
  void computeOutput(int64_t n, Range rows) {
    const CodeForm& form = input_.form;
    const auto* codes = static_cast<const uint8_t*>(linear_.weight) + n * form.rowBytes();
    const int64_t first = n * form.groups;
    const auto* scale = static_cast<const char*>(linear_.scales.scale) + first * sizeOf(linear_.scales.type);
    const float* shift = linear_.scales.shift ? linear_.scales.shift + first : nullptr;
    float total[kRows] = {}, scales[kScales];
    for (int64_t g = 0; g < form.groups; ++g) {
      if (g % kScales == 0) {
        const int64_t count = std::min(form.groups - g, kScales);
        widen(scales, linear_.scales.type, scale + g * sizeOf(linear_.scales.type), count);
      }
      float sums[kRows] = {};
      for (int64_t b = 0; b < input_.blocks; ++b) {
        const int64_t count = std::min(form.group - b * form.block, form.block);
        addBlock(sums, rows, g * input_.blocks + b, numbersOf(codes, count));
        codes += bytesOf(form.coding, count);
      }
      for (int64_t row = rows.begin; row < rows.end; ++row) {
        float& own = total[row - rows.begin];
        own = __builtin_fmaf(sums[row - rows.begin], scales[g % kScales], own);
        if (shift) {
          own = __builtin_fmaf(shift[g], input_.sumsOf(row)[g], own);
        }
      }
    }
    store(n, rows, total);
  }

  // Codes of a block as whole numbers; behind the last one, where rows of x have zeros, anything.
  const int8_t* numbersOf(const uint8_t* codes, int64_t count) {
    const CodeForm& form = input_.form;
    if (form.coding == Coding::kInt4) {
      const int middle = linear_.scales.shift ? 0 : static_cast<int>(kInt4Middle);
      for (int64_t i = 0; i < count / 2; ++i) {
        block_[2 * i] = static_cast<int8_t>((codes[i] & 15) - middle);
        block_[2 * i + 1] = static_cast<int8_t>((codes[i] >> 4) - middle);
      }
      return block_;
    }
    if (count == form.block) {
      return reinterpret_cast<const int8_t*>(codes);
    }
    std::memcpy(block_, codes, count);
    return block_;
  }

  void addBlock(float* sums, Range rows, int64_t block, const int8_t* weights) const {
    const int64_t size = input_.form.block;
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      const int8_t* x = input_.codesOf(row) + block * size;
      int32_t sum = 0;
      for (int64_t i = 0; i < size; ++i) {
        sum += static_cast<int32_t>(x[i]) * weights[i];
      }
      float& own = sums[row - rows.begin];
      own = __builtin_fmaf(static_cast<float>(sum), input_.scalesOf(row)[block], own);
    }
  }

  void store(int64_t n, Range rows, const float* total) const {
    const auto* bias = static_cast<const Element*>(linear_.bias);
    // Adding -0 changes no value, adding +0 would make +0 of -0.
    const Vec4 added = bias ? load4<Kind>(bias + n, 1) : Vec4{-0.0f, -0.0f, -0.0f, -0.0f};
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      const Vec4 value{total[row - rows.begin]};
      store4<Kind>(static_cast<Element*>(linear_.output) + input_.place(row) * linear_.outputStride + n, value + added, 1);
    }
  }

  const Input& input_;
  const Linear& linear_;
  int8_t* const block_;
};

}  // namespace
}  // namespace step
