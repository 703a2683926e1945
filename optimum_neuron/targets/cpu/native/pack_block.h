// SPDX-License-Identifier: Apache-2.0
//
// Brings a block of the cache into the layout that the products read: the keys transposed, the values two columns to a
// word where words are pairs.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention_call.h"
#include "elements.h"

namespace step {
namespace {

// Of the 128-bit parts of a and b, the even (Odd 0) or odd ones.
template <int Odd>
struct Parts {
  static constexpr int at(int i) { return (i / 4 * 2 + Odd) * 4 + i % 4; }
};

template <class V>
INLINE void transpose(V (&r)[kLanes]) {
  V t[kLanes];
  UNROLL for (int i = 0; i < kLanes; i += 2) {
    t[i] = shuffle<Unpack<1, 0>>(r[i], r[i + 1]);
    t[i + 1] = shuffle<Unpack<1, 1>>(r[i], r[i + 1]);
  }
  UNROLL for (int i = 0; i < kLanes; i += 4) {
    r[i] = shuffle<Unpack<2, 0>>(t[i], t[i + 2]);
    r[i + 1] = shuffle<Unpack<2, 1>>(t[i], t[i + 2]);
    r[i + 2] = shuffle<Unpack<2, 0>>(t[i + 1], t[i + 3]);
    r[i + 3] = shuffle<Unpack<2, 1>>(t[i + 1], t[i + 3]);
  }
  // Now 128 bits of r[i] are four rows of a column: columns i, i + 4 and so on.
  if constexpr (kLanes == 8) {
    UNROLL for (int i = 0; i < 4; ++i) {
      const V even = shuffle<Parts<0>>(r[i], r[i + 4]);
      r[i + 4] = shuffle<Parts<1>>(r[i], r[i + 4]);
      r[i] = even;
    }
  }
  if constexpr (kLanes == 16) {
    UNROLL for (int i = 0; i < 4; ++i) {
      const V even0 = shuffle<Parts<0>>(r[i], r[i + 4]);
      const V even1 = shuffle<Parts<0>>(r[i + 8], r[i + 12]);
      const V odd0 = shuffle<Parts<1>>(r[i], r[i + 4]);
      const V odd1 = shuffle<Parts<1>>(r[i + 8], r[i + 12]);
      r[i] = shuffle<Parts<0>>(even0, even1);
      r[i + 4] = shuffle<Parts<0>>(odd0, odd1);
      r[i + 8] = shuffle<Parts<1>>(even0, even1);
      r[i + 12] = shuffle<Parts<1>>(odd0, odd1);
    }
  }
}

// to[word][column] = keys[column][word] for `count` columns; up to the next multiple of kLanes, zero. On the way asks
// memory for what is read next: the values of the block and the keys of another.
template <class Kind>
void packKeys(
    Word* to, const typename Kind::Element* keys, const typename Kind::Element* values,
    const typename Kind::Element* nextKeys, int64_t dim, int64_t count) {
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
        prefetch(values + offset);
        prefetch(nextKeys + offset);
      }
      transpose(r);
      const int64_t width = whole ? kLanes : (dim - d) / Kind::kPerWord;
      Word* words = to + d / Kind::kPerWord * kBlock + column;
      UNROLL for (int i = 0; i < kLanes; ++i) {
        if (i < width) {
          Kind::storePacked(words + i * kBlock, r[i]);
        }
      }
    }
  }
}

// The words of the value rows that cover `range`; those of other rows may be anything.
template <class Kind>
INLINE const Word* packValues(Kind, Word* to, const typename Kind::Element* values, int64_t dim, Range range) {
  for (int64_t i = range.begin * dim; i < range.end * dim; i += kLanes) {
    storeVec(to + i, Kind::load(values + i));
  }
  return to;
}

INLINE const Word* packValues(Float32, Word*, const float* values, int64_t, Range) {
  return reinterpret_cast<const Word*>(values);
}

#if defined(STEP_AVX512_BF16)
// A word holds a dimension of two columns, the first of them even; a column outside the range is zero in it.
INLINE const Word* packValues(BFloat16, Word* to, const uint16_t* values, int64_t dim, Range range) {
  for (int64_t column = range.begin & ~int64_t{1}; column < range.end; column += 2) {
    const BitVec low = broadcastBits(column >= range.begin ? 0xffff : 0);
    const __mmask16 high = column + 1 < range.end ? 0xffff : 0;
    for (int64_t d = 0; d < dim; d += kLanes) {
      const auto* first = values + column * dim + d;
      const BitVec even = widen<kLanes>(loadHalves<kLanes>(first)) & low;
      const BitVec odd = widen<kLanes>((Lanes<kLanes>::Halves)_mm256_maskz_loadu_epi16(high, first + dim));
      storeBits(to + column / 2 * dim + d, even | odd << 16);
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
