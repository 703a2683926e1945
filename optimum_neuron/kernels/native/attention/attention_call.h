// SPDX-License-Identifier: Apache-2.0
//
// Where the parts of a call of attend are, and which columns of the cache a token sees.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/kernels.h"
#include "common/range.h"

namespace step {
namespace {

// Columns the softmax takes at a time: part of the result's definition, blocks begin at multiples of it.
constexpr int64_t kBlock = 64;

// Columns with a softmax of their own, which is joined to that of the columns before: part of the result's definition too.
// Threads share out sections, and joining them costs nothing against so many columns.
constexpr int64_t kSection = 1024;

// Elements of a row of packed operands are a multiple of this, of zeros after a row's own: vectors of any width are whole.
constexpr int64_t kLine = 16;

// A word of packed operands: a float32, or two bfloat16.
using Word = uint32_t;

struct Layout : AttendCall {
  int64_t group() const { return heads / kvHeads; }
  int64_t wideDim() const { return roundUp(dim, kLine); }
  int64_t wideValueDim() const { return roundUp(valueDim, kLine); }

  Range visible(int64_t row, int64_t token) const {
    const int64_t position = positions[row * tokens + token];
    if (position < 0) {
      return {0, 0};
    }
    return {window > 0 ? std::max<int64_t>(position + 1 - window, 0) : 0, position + 1};
  }
  int64_t queryOffset(int64_t row, int64_t head, int64_t token) const {
    return row * rowStride + head * headStride + token * tokenStride;
  }
  // Of a row's column, in columns; those up to the next multiple of kBlock lie after it.
  int64_t cacheColumn(int64_t row, int64_t kvHead, int64_t column) const {
    if (perRow == 1) {
      return ((blocks ? blocks[row] : row) * kvHeads + kvHead) * columns + column;
    }
    const int64_t number = column / columns;
    return (blocks[row * perRow + number] * kvHeads + kvHead) * columns + column - number * columns;
  }
  int64_t outputOffset(int64_t row, int64_t head, int64_t token) const {
    return ((row * tokens + token) * heads + head) * valueDim;
  }
};

}  // namespace
}  // namespace step
