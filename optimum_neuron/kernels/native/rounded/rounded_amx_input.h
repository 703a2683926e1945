// SPDX-License-Identifier: Apache-2.0
//
// Rows of x as codes of int8, as the tile registers of AMX read them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "vectors/amx.h"
#include "linear/linear_block.h"
#include "rounded/rounded.h"
#include "vectors/transpose.h"

namespace step {
namespace {

// Of a tile: of each block its codes, a word of four columns of a row next to that of the next; of each block what its rows' scales are; of
// each group what its rows' sums are, where weights have shifts.
struct RoundedAmxInput : TiledInput<kAmxLines> {
  RoundedForm form;

  static constexpr int64_t kWords = sizeof(uint32_t);
  // Columns of a block as tiles have them.
  static int64_t blockColumnsOf(const RoundedForm& form) { return form.group == kRoundedBlock / 2 ? form.group : kRoundedBlock; }
  static int64_t rowBytesOf(const RoundedForm& form) {
    return form.blocks() * (blockColumnsOf(form) + kWords) + (form.hasShift ? form.groups * kWords : 0);
  }

  int64_t blockColumns() const { return blockColumnsOf(form); }
  const uint8_t* codesOf(int64_t tile, int64_t block) const {
    const auto [first, last] = tileRows(tile);
    return static_cast<const uint8_t*>(packed) + first * stride + block * blockColumns() * (last - first);
  }
  const float* scalesOf(int64_t tile) const { return reinterpret_cast<const float*>(codesOf(tile, form.blocks())); }
  const float* sumsOf(int64_t tile) const {
    const auto [first, last] = tileRows(tile);
    return scalesOf(tile) + form.blocks() * (last - first);
  }

  // Codes of 4 bits are unpacked to those of even columns and then those of odd ones.
  static INLINE __m512i inHalves(__m512i codes, int64_t columns) {
    alignas(64) static constexpr int8_t kPairs[] = {
        0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15, 0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15,
        0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15, 0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15};
    alignas(64) static constexpr int64_t kShort[] = {0, 2, 1, 3, 4, 6, 5, 7}, kLong[] = {0, 2, 4, 6, 1, 3, 5, 7};
    const __m512i halves = _mm512_shuffle_epi8(codes, _mm512_load_si512(kPairs));
    return _mm512_permutexvar_epi64(_mm512_load_si512(columns == kRoundedBlock ? kLong : kShort), halves);
  }

  // Packs one tile; `rowOf` is where a row begins.
  template <class Kind, class RowOf>
  void pack(int64_t tile, RowOf rowOf) const {
    const auto [first, last] = tileRows(tile);
    const int64_t count = last - first, columns = blockColumns();
    const __mmask16 used = (1u << count) - 1;
    auto* to = const_cast<uint8_t*>(codesOf(tile, 0));
    auto *scales = const_cast<float*>(scalesOf(tile)), *sums = const_cast<float*>(sumsOf(tile));
    float sum[kAmxLines] = {};
    for (int64_t block = 0; block < form.blocks(); ++block) {
      alignas(64) int8_t codes[kAmxLines][kRoundedBlock];
      for (int64_t m = 0; m < count; ++m) {
        const RoundedScale own = roundBlock<Kind>(codes[m], rowOf(first + m) + form.columnOf(block), form.columnsOf(block));
        scales[block * count + m] = own.scale;
        sum[m] = addSum(sum[m], own);
      }
      BitVec words[kLanes];
      UNROLL for (int m = 0; m < kLanes; ++m) {
        const __m512i line = _mm512_load_si512(codes[std::min<int64_t>(m, count - 1)]);
        words[m] = (BitVec)(isPacked(form.coding) ? inHalves(line, columns) : line);
      }
      transpose(words);
      const int64_t lines = columns / kWords;
      UNROLL for (int k = 0; k < kLanes; ++k) {
        if (k < lines) {
          _mm512_mask_storeu_epi32(to + k * count * kWords, used, (__m512i)words[k]);
        }
      }
      to += columns * count;
      if (form.hasShift && form.endsGroup(block)) {
        std::copy_n(sum, count, sums + form.groupOf(block) * count);
        std::fill_n(sum, count, 0.0f);
      }
    }
  }
};

}  // namespace
}  // namespace step
