// SPDX-License-Identifier: Apache-2.0
//
// Rows of x of bfloat16 as the tile registers of AMX read them, for weights that are codes.
#pragma once

#include <algorithm>
#include <cstdint>

#include "vectors/amx.h"
#include "codes/codes_amx.h"
#include "linear/linear_block.h"
#include "codes/scaled_line.h"
#include "vectors/transpose.h"

namespace step {
namespace {

// Rows that are few, and columns of a group that is short: linear_codes_few.h.
constexpr int64_t kFewRows = 2, kShortGroup = 128;

struct AmxCodedInput : CodedInput<kAmxLines> {
  bool hasSums;   // whether each row has the sum of each of its groups after its columns, as weights have shifts
  int64_t slots;  // of few rows and short groups: groups that have lines of a tile of x; else 0
  bool isPlain;   // whether there is one row, of float32: linear_flat_row.h

  // Columns from `column` on of a tile.
  const uint16_t* columnsOf(int64_t tile, int64_t column) const {
    const auto [first, last] = tileRows(tile);
    return static_cast<const uint16_t*>(packed) + first * stride + column * (slots ? kAmxLines : last - first);
  }
  // By which products are summed: with short scales by all columns, as if they were one group.
  CodeForm sumsFormOf(const Scales& scales) const {
    return takesScaled(form, scales) ? CodeForm{form.coding, form.groups * form.group, form.block, 1} : form;
  }
  const float* sumsOf(int64_t tile) const { return reinterpret_cast<const float*>(columnsOf(tile, form.padded())); }

  // Memory for packed rows, and for what is read after the last tile.
  int64_t bytes() const {
    if (isPlain) {
      return stride * static_cast<int64_t>(sizeof(float));
    }
    const int64_t sums = hasSums ? rows * form.groups * static_cast<int64_t>(sizeof(float)) : 0;
    const int64_t lines = slots ? kAmxLines : rows;
    return lines * form.padded() * static_cast<int64_t>(sizeof(uint16_t)) + sums + kAmxLineBytes;
  }

  // Registers for products of one tile: 0 to 3 are sums, 4 and 5 rows of x, which are as wide as there are rows. Wider ones would read lines
  // of x that begin within each other's cache lines, which takes long.
  AmxShapes shapesOf(int64_t tile) const {
    const auto [first, last] = tileRows(tile);
    AmxShapes shapes;
    for (int i = 0; i < 6; ++i) {
      shapes.set(i, kAmxLines, (last - first) * static_cast<int64_t>(sizeof(uint32_t)));
    }
    return shapes;
  }

  // Packs one tile; `rowOf` is where a row begins.
  template <class RowOf>
  void pack(int64_t tile, RowOf rowOf) const {
    const auto [first, last] = tileRows(tile);
    const int64_t count = last - first;
    if (isPlain) {
      auto* to = static_cast<float*>(packed);
      widen(to, Type::kBFloat16, rowOf(first), form.group);
      std::fill(to + form.group, to + stride, 0.0f);
      return;
    }
    const uint16_t* from[kAmxLines];
    for (int64_t m = 0; m < count; ++m) {
      from[m] = rowOf(first + m);
    }
    const __mmask16 used = (1u << count) - 1;
    const bool isInOrder = form.coding == Coding::kFp8;
    const __m512i order = _mm512_load_si512(isPacked(form.coding) ? kFoursApart : kHalvesInTurn);
    auto* to = const_cast<uint16_t*>(columnsOf(tile, 0));
    auto* sums = const_cast<float*>(sumsOf(tile));
    for (int64_t g = 0; g < form.groups; ++g, sums += count) {
      Vec even{}, odd{};
      for (int64_t k = 0; k < form.group; k += kLineColumns) {
        BitVec words[kLanes];
        UNROLL for (int m = 0; m < kLanes; ++m) {
          const auto load = [&](auto... columns) { return BFloat16::loadWords(from[m] + g * form.group + k, columns...); };
          words[m] = m >= count ? BitVec{} : k + kLineColumns <= form.group ? load() : load(form.group - k);
          if (!isInOrder) {
            words[m] = (BitVec)_mm512_permutexvar_epi16(order, (__m512i)words[m]);
          }
        }
        transpose(words);
        const int64_t line = slots ? g % slots * count : 0;
        UNROLL for (int pair = 0; pair < kLanes; ++pair) {
          if (slots) {
            storeBits(to, (BitVec)_mm512_maskz_expand_epi32(used << line, (__m512i)words[pair]));
            to += kAmxLines * BFloat16::kPerWord;
          } else {
            _mm512_mask_storeu_epi32(to, used, (__m512i)words[pair]);
            to += count * BFloat16::kPerWord;
          }
          even += (Vec)(words[pair] << 16);
          odd += (Vec)(words[pair] & 0xffff0000u);
        }
      }
      if (hasSums) {
        _mm512_mask_storeu_ps(sums, used, even + odd);
      }
    }
  }
};

template <class Call>
AmxCodedInput codedInputOf(const Call& call, void* packed, int64_t rows, const int64_t* places) {
  const CodeForm form = formOf(call.coding, call.columns, call.group, kLineColumns);
  const bool sums = hasShift(call);
  const int64_t stride = form.padded() + (sums ? form.groups * static_cast<int64_t>(sizeof(float) / sizeof(uint16_t)) : 0);
  const bool isPlain = rows == 1 && form.coding == Coding::kInt8 && form.groups == 1 && !sums;
  const bool isFew = !isPlain && rows <= kFewRows && form.paddedGroup() <= kShortGroup && !takesAnyScaled(form, call);
  return {{{packed, rows, form.padded(), stride, places}, form}, sums, isFew ? kAmxLines / std::max<int64_t>(rows, 1) : 0, isPlain};
}

}  // namespace
}  // namespace step
