// SPDX-License-Identifier: Apache-2.0
//
// From sums of AMX, a line of which is an output of 16 rows, to the rows of a result in bfloat16.
#pragma once

#include <cstdint>

#include "vectors/amx.h"
#include "vectors/elements.h"
#include "common/range.h"
#include "vectors/transpose.h"

namespace step {
namespace {

// Rounded to bfloat16, two numbers of a lane in a word.
INLINE BitVec pairsOf(Vec first, Vec second) {
  alignas(64) static constexpr uint16_t kInTurn[] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                     8,  24, 9,  25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i all = (__m512i)_mm512_cvtne2ps_pbh(second, first);
  return (BitVec)_mm512_permutexvar_epi16(_mm512_load_si512(kInTurn), all);
}

// Stores what a row's outputs from `first` on, up to 16, came to.
INLINE void storeOutputs(const Linear& linear, int64_t place, int64_t first, int64_t count, Vec sums) {
  const __mmask16 used = (1u << count) - 1;
  const auto* bias = static_cast<const uint16_t*>(linear.bias);
  // Adding -0 changes no value, adding +0 would make +0 of -0.
  const Vec added = bias ? (Vec)((BitVec)_mm512_maskz_cvtepu16_epi32(kAll, _mm256_maskz_loadu_epi16(used, bias + first)) << 16)
                         : broadcast(-0.0f);
  auto* to = static_cast<uint16_t*>(linear.output) + place * linear.outputStride + first;
  _mm256_mask_storeu_epi16(to, used, (__m256i)_mm512_cvtneps_pbh(sums + added));
}

// Of two tiles of sums, one after the other, `outputs` lines to `rows`; `to(row)` is where a row's first output goes. `biases` has one
// for each line.
template <class To>
INLINE void storePairs(const float* sums, const float* biases, int64_t outputs, Range rows, To to) {
  constexpr int64_t kLines = 2 * kAmxLines;
  BitVec words[kLanes];
  UNROLL for (int pair = 0; pair < kLanes; ++pair, sums += 2 * kLanes) {
    words[pair] = pairsOf(
        loadVec(sums) + broadcast(biases[2 * pair]), loadVec(sums + kLanes) + broadcast(biases[2 * pair + 1]));
  }
  transpose(words);
  const __mmask32 used = ~__mmask32{0} >> (kLines - outputs);
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    _mm512_mask_storeu_epi16(to(row), used, (__m512i)words[row - rows.begin]);
  }
}

}  // namespace
}  // namespace step
