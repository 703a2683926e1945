// SPDX-License-Identifier: Apache-2.0
//
// Brings a block of the cache into the layout that the products read: the keys transposed, the values two columns to a
// word where words are pairs.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/attend_products.h"
#include "attention/attention_call.h"
#include "vectors/elements.h"
#include "vectors/transpose.h"

namespace step {
namespace {

// to[word][column] = keys[column][word] for `count` columns; up to the next multiple of kLanes, and in words after the last, zero.
// On the way asks memory for the keys of the next block.
template <class Kind>
void packKeys(
    Word* to, const typename Kind::Element* keys, const typename Kind::Element* nextKeys, int64_t dim, int64_t count) {
  using Words = typename Kind::Words;
  constexpr int64_t step = kLanes * Kind::kPerWord;
  for (int64_t column = 0; column < count; column += kLanes) {
    for (int64_t d = 0; d < dim; d += step) {
      const bool whole = d + step <= dim;
      Words r[kLanes];
      UNROLL for (int i = 0; i < kLanes; ++i) {
        const int64_t offset = (column + i) * dim + d;
        const bool used = column + i < count;
        r[i] = !used ? Words{} : whole ? Kind::loadWords(keys + offset) : Kind::loadWords(keys + offset, dim - d);
        prefetchFar(nextKeys + offset);
      }
      transpose(r);
      Word* words = to + d / Kind::kPerWord * kBlock + column;
      const int64_t width = std::min<int64_t>(kLanes, dimWords<Kind>(dim) - d / Kind::kPerWord);
      UNROLL for (int i = 0; i < kLanes; ++i) {
        if (i < width) {
          Kind::storePacked(words + i * kBlock, r[i]);
        }
      }
    }
  }
}

// The words of the value rows that cover `range`; those of other rows may be anything. On the way asks memory for the
// values of the next block: all that a block needs at once would be more than can be on its way, and nothing would be
// on its way during the products.
template <class Kind>
INLINE const Word* packValues(
    Kind, Word* to, const typename Kind::Element* values, const typename Kind::Element* nextValues, int64_t dim,
    Range range) {
  for (int64_t i = range.begin * dim; i < range.end * dim; i += kLanes) {
    storeVec(to + i, Kind::load(values + i));
    prefetchFar(nextValues + i);
  }
  return to;
}

INLINE const Word* packValues(Float32, Word*, const float* values, const float* nextValues, int64_t dim, Range range) {
  for (int64_t i = range.begin * dim; i < range.end * dim; i += kLine) {
    prefetchFar(nextValues + i);
  }
  return reinterpret_cast<const Word*>(values);
}

#if defined(STEP_AVX512_BF16) || defined(STEP_NEON_BF16)
// A word holds a dimension of two columns, the first of them even; a column outside the range is zero in it. So are words up to
// where steps may begin and end.
INLINE const Word* packValues(
    BFloat16, Word* to, const uint16_t* values, const uint16_t* nextValues, int64_t dim, Range range) {
  constexpr int64_t kColumns = 2 * Products<BFloat16>::kWords;
  const auto load = [&](int64_t column, int64_t d) {
    return column >= range.begin && column < range.end ? loadWide<kLanes>(values + column * dim + d) : BitVec{};
  };
  for (int64_t column = range.begin / kColumns * kColumns; column < roundUp(range.end, kColumns); column += 2) {
    for (int64_t d = 0; d < dim; d += kLanes) {
      storeBits(to + column / 2 * dim + d, load(column, d) | load(column + 1, d) << 16);
      prefetchFar(nextValues + column * dim + 2 * d);
    }
  }
  return to;
}
#endif

template <class Kind>
bool allFinite(const typename Kind::Element* values, int64_t dim, Range range) {
  constexpr int32_t kExponent = 0x7f800000;
  BitVec found{};
  for (int64_t i = range.begin * dim; i < range.end * dim; i += kLanes) {
    found |= (BitVec)(((IntVec)Kind::load(values + i) & kExponent) == kExponent);
  }
  return orOf(found) == 0;
}

}  // namespace
}  // namespace step
