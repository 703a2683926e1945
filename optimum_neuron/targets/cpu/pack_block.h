// SPDX-License-Identifier: Apache-2.0
//
// Brings a block of the cache into the layout that the products read: the keys transposed, the values two columns to a
// word where the elements are bfloat16.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention_call.h"
#include "simd.h"

namespace {

INLINE_AVX512 void transpose(__m512i (&r)[kLanes]) {
  __m512i t[kLanes];
  UNROLL for (int i = 0; i < kLanes; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  UNROLL for (int i = 0; i < kLanes; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  UNROLL for (int i = 0; i < 4; ++i) {
    const __m512i even0 = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    const __m512i even1 = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    const __m512i odd0 = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    const __m512i odd1 = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    r[i] = _mm512_shuffle_i32x4(even0, even1, 0x88);
    r[i + 4] = _mm512_shuffle_i32x4(odd0, odd1, 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(even0, even1, 0xdd);
    r[i + 12] = _mm512_shuffle_i32x4(odd0, odd1, 0xdd);
  }
}

// to[word][column] = keys[column][word] for `count` columns; up to the next multiple of kLanes, zero. On the way asks
// memory for what is read next: the values of the block and the keys of another.
TARGET_AVX512 void packKeys(
    Word* to, const Word* keys, const Word* values, const Word* nextKeys, int64_t words, int64_t count) {
  for (int64_t column = 0; column < count; column += kLanes) {
    for (int64_t word = 0; word < words; word += kLanes) {
      const int64_t width = std::min(kLanes, words - word);
      const auto mask = static_cast<__mmask16>((1u << width) - 1);
      __m512i r[kLanes];
      UNROLL for (int i = 0; i < kLanes; ++i) {
        const int64_t offset = (column + i) * words + word;
        r[i] = _mm512_maskz_loadu_epi32(column + i < count ? mask : 0, keys + offset);
        _mm_prefetch(reinterpret_cast<const char*>(values + offset), _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(nextKeys + offset), _MM_HINT_T0);
      }
      transpose(r);
      UNROLL for (int i = 0; i < kLanes; ++i) {
        if (i < width) {
          _mm512_storeu_si512(to + (word + i) * kBlock + column, r[i]);
        }
      }
    }
  }
}

// The words of the value rows that cover `range`. A word of bfloat16 holds a dimension of two columns, the first of
// them even; a column outside the range is zero in it.
INLINE_AVX512 const Word* packValues(BFloat16, Word* to, const c10::BFloat16* values, int64_t dim, Range range) {
  for (int64_t column = range.begin & ~1; column < range.end; column += 2) {
    const __m512i low = _mm512_set1_epi32(column >= range.begin ? 0xffff : 0);
    const __mmask16 high = column + 1 < range.end ? 0xffff : 0;
    for (int64_t d = 0; d < dim; d += kLanes) {
      const auto* first = values + column * dim + d;
      const __m512i odd = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(high, first + dim));
      const __m512i even = _mm512_and_si512(BFloat16::loadBits(first), low);
      _mm512_storeu_si512(to + column / 2 * dim + d, _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
    }
  }
  return to;
}

INLINE_AVX512 const Word* packValues(Float32, Word*, const float* values, int64_t, Range) {
  return reinterpret_cast<const Word*>(values);
}

template <class Type>
TARGET_AVX512 bool allFinite(const typename Type::Element* values, int64_t dim, Range range) {
  constexpr int kNanOrInfinity = 0x99;
  __mmask16 found = 0;
  for (int64_t i = range.begin * dim; i < range.end * dim; i += kLanes) {
    found |= _mm512_fpclass_ps_mask(Type::load(values + i), kNanOrInfinity);
  }
  return !found;
}

}  // namespace
