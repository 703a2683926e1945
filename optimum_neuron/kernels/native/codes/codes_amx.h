// SPDX-License-Identifier: Apache-2.0
//
// Codes of quantized weights as numbers of bfloat16, which all of them are exactly: 32 columns of a weight row as a line of a tile.
#pragma once

#include <cstdint>

#include "vectors/amx.h"
#include "codes/codes.h"
#include "codes/scale_vectors.h"

namespace step {
namespace {

constexpr int64_t kLineColumns = 32;

// The order of columns in a line of int8: the first half and the second half in turn.
alignas(64) constexpr uint16_t kHalvesInTurn[] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                  8,  24, 9,  25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};

template <Coding C>
struct Line;

template <>
struct Line<Coding::kInt8> {
  explicit Line(bool) {}

  INLINE BitVec operator()(const uint8_t* codes) const {
    using Own = Codes<Coding::kInt8>;
    const BitVec first = Own::load(codes), second = Own::load(codes + kLanes);
    return (BitVec)Own::value(first) >> 16 | (BitVec)Own::value(second);  // the low half of such a number is zero
  }
};

// The order of columns in a line of codes of 4 bits: the first of each four, then the second of each.
alignas(64) constexpr uint16_t kFoursApart[] = {0, 4, 8,  12, 16, 20, 24, 28, 1, 5, 9,  13, 17, 21, 25, 29,
                                                2, 6, 10, 14, 18, 22, 26, 30, 3, 7, 11, 15, 19, 23, 27, 31};

// Codes of 4 bits as what a table has for them: twice, as five bits of an index count.
INLINE BitVec lookUp(const uint8_t* codes, __m512i table) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
  constexpr int64_t second = 0x0004000400040004;
  const __m512i by = _mm512_set_epi64(3 * second, 3 * second, 2 * second, 2 * second, second, second, 0, 0);
  return (BitVec)_mm512_permutexvar_epi16(_mm512_srlv_epi16(_mm512_maskz_broadcast_i32x4(kAll, bytes), by), table);
}

template <Coding C>
struct TableLine {
  explicit TableLine(float middle) {
    alignas(64) static constexpr uint32_t kCodes[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const __m512 numbers = Codes<C>::value(loadBits(kCodes)) - broadcast(middle);
    table_ = _mm512_maskz_broadcast_i64x4(0xff, (__m256i)_mm512_cvtneps_pbh(numbers));
  }

  INLINE BitVec operator()(const uint8_t* codes) const { return lookUp(codes, table_); }

 private:
  __m512i table_;
};

template <>
struct Line<Coding::kInt4> : TableLine<Coding::kInt4> {
  explicit Line(bool hasShift) : TableLine(hasShift ? 0 : kInt4Middle) {}
};
template <>
struct Line<Coding::kFp4> : TableLine<Coding::kFp4> {
  explicit Line(bool) : TableLine(0) {}
};

template <>
struct Line<Coding::kFp8> {
  explicit Line(bool) {
    // By a code without its sign: those below the normal numbers.
    alignas(64) static constexpr uint16_t kSubnormal[32] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
    subnormal_ = _mm512_load_si512(kSubnormal);
  }

  INLINE BitVec operator()(const uint8_t* codes) const {
    const auto all = [](int number) { return _mm512_set1_epi16(static_cast<int16_t>(number)); };
    const __m512i words =
        _mm512_maskz_cvtepu8_epi16(~__mmask32{0}, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
    const __m512i magnitude = _mm512_and_si512(words, all(0x7f));
    __m512i bits = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), all((127 - 7) << 7));
    bits = _mm512_mask_permutexvar_epi16(bits, _mm512_cmplt_epu16_mask(magnitude, all(8)), magnitude, subnormal_);
    bits = _mm512_mask_mov_epi16(bits, _mm512_cmpeq_epi16_mask(magnitude, all(0x7f)), all(0x7fc0));
    return (BitVec)_mm512_or_si512(bits, _mm512_slli_epi16(_mm512_and_si512(words, all(0x80)), 8));
  }

 private:
  __m512i subnormal_;
};

// Where a column of a padded row lies: its number among those that have codes, and in its group.
struct LinePlace {
  int64_t column, inGroup;
};
INLINE LinePlace linePlace(const CodeForm& form, int64_t column) {
  const int64_t padded = form.paddedGroup(), in = column % padded;
  return {column / padded * form.group + in, in};
}

// Unpacks columns of a weight row, from column `in` of a group on: lines, from a tile's to that `Tiles` tiles further.
template <Coding C, int64_t Tiles = 1>
INLINE void unpackLine(
    uint16_t* to, const uint8_t* codes, const Line<C>& numbers, const CodeForm& form, int64_t columns, int64_t in) {
  constexpr int64_t bytes = bytesOf(C, kLineColumns), tile = Tiles * kAmxLines * kLineColumns, most = 4;
  if (form.group % kLineColumns == 0) {
    if (columns == most * kLineColumns) {
      UNROLL for (int64_t i = 0; i < most; ++i) {
        storeBits(to + i * tile, numbers(codes + i * bytes));
      }
      return;
    }
    for (; columns > 0; columns -= kLineColumns, codes += bytes, to += tile) {
      storeBits(to, numbers(codes));
    }
    return;
  }
  // Groups end within a line.
  for (; columns > 0; columns -= kLineColumns, to += tile) {
    const int64_t count = std::min(kLineColumns, form.group - in);
    const __mmask32 used = (uint64_t{1} << bytesOf(C, count)) - 1;
    alignas(32) uint8_t copy[kLineColumns];
    _mm256_store_si256(reinterpret_cast<__m256i*>(copy), _mm256_maskz_loadu_epi8(used, codes));
    storeBits(to, numbers(copy));
    codes += bytesOf(C, count);
    in = in + kLineColumns >= form.group ? 0 : in + kLineColumns;
  }
}

}  // namespace
}  // namespace step
