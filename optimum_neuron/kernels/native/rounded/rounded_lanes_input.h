// SPDX-License-Identifier: Apache-2.0
//
// Rows of x as codes of int8, as linear_rounded_lanes.h reads them.
#pragma once

#include <cstdint>

#include "vectors/dot_codes.h"
#include "linear/linear_block.h"
#include "rounded/rounded.h"

namespace step {
namespace {

// Of a tile, by rows that it has: of each block the codes of its rows, of 4 bits in the order of `place`; of each block what its rows'
// scales are; of each block what its rows' codes come to times what codes of weights have too much, negated; of each group what its rows'
// sums are, where weights have shifts.
constexpr int64_t kRoundedRows = kManyRegisters ? 8 : 4;

struct RoundedLanesInput : TiledInput<kRoundedRows> {
  RoundedForm form;

  static constexpr int64_t kWords = sizeof(uint32_t);
  // Of x, of a block of a row.
  static int64_t blockBytesOf(const RoundedForm& form) { return roundUp(form.mostColumns(), isPacked(form.coding) ? 8 : 4); }
  static int64_t rowBytesOf(const RoundedForm& form) {
    return form.blocks() * (blockBytesOf(form) + 2 * kWords) + (form.hasShift ? form.groups * kWords : 0);
  }

  int64_t blockBytes() const { return blockBytesOf(form); }
  const uint8_t* codesOf(int64_t tile, int64_t block) const {
    const auto [first, last] = tileRows(tile);
    return static_cast<const uint8_t*>(packed) + first * stride + block * (last - first) * blockBytes();
  }
  const float* scalesOf(int64_t tile) const { return reinterpret_cast<const float*>(codesOf(tile, form.blocks())); }
  const int32_t* excessOf(int64_t tile) const {
    const auto [first, last] = tileRows(tile);
    return reinterpret_cast<const int32_t*>(scalesOf(tile) + form.blocks() * (last - first));
  }
  const float* sumsOf(int64_t tile) const {
    const auto [first, last] = tileRows(tile);
    return reinterpret_cast<const float*>(excessOf(tile) + form.blocks() * (last - first));
  }

  // A word of 8 codes of 4 bits meets two of x, of even columns and of odd ones.
  static void placePairs(uint8_t* to, const int8_t* codes, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 8) {
      UNROLL for (int64_t j = 0; j < 4; ++j) {
        to[i + j] = codes[i + 2 * j];
        to[i + 4 + j] = codes[i + 2 * j + 1];
      }
    }
  }

  template <class Kind>
  void pack(int64_t tile, int64_t row, const typename Kind::Element* x) const {
    const auto [first, last] = tileRows(tile);
    const int64_t count = last - first, own = row - first;
    auto* codes = const_cast<uint8_t*>(codesOf(tile, 0)) + own * blockBytes();
    auto *scales = const_cast<float*>(scalesOf(tile)) + own, *sums = const_cast<float*>(sumsOf(tile)) + own;
    auto* excess = const_cast<int32_t*>(excessOf(tile)) + own;
    const int32_t offset = isPacked(form.coding) ? static_cast<int32_t>(kInt4Middle) : kDotOffset;
    float sum = 0;
    for (int64_t block = 0; block < form.blocks(); ++block) {
      int8_t numbers[kRoundedBlock];
      const RoundedScale rounded = roundBlock<Kind>(numbers, x + form.columnOf(block), form.columnsOf(block));
      if (isPacked(form.coding)) {
        placePairs(codes + block * count * blockBytes(), numbers, blockBytes());
      } else {
        std::memcpy(codes + block * count * blockBytes(), numbers, blockBytes());
      }
      scales[block * count] = rounded.scale;
      excess[block * count] = -offset * rounded.sum;
      if (form.hasShift) {
        sum = addSum(sum, rounded);
        if (form.endsGroup(block)) {
          sums[form.groupOf(block) * count] = sum;
          sum = 0;
        }
      }
    }
  }
};

}  // namespace
}  // namespace step
