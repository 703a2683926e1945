// SPDX-License-Identifier: Apache-2.0
//
// One row of x and a line of as many weight rows as a vector has lanes: each weight row's products are summed where they lie, and the sums,
// which are fewer, are what is transposed.
#pragma once

#include "vectors/dot_codes.h"
#include "rounded/rounded.h"
#include "vectors/transpose.h"

#if defined(STEP_VNNI)

namespace step {
namespace {

constexpr int64_t kLineBytes = 64;

// Sums of the lanes of each of `Blocks` parts of r[i] become lane i of dots[0], dots[1] and so on.
template <int Blocks>
INLINE void sumParts(IntVec (&dots)[Blocks], const IntVec (&r)[kLanes]) {
  IntVec pairs[kLanes / 2], fours[kLanes / 4];
  UNROLL for (int i = 0; i < kLanes / 2; ++i) {
    pairs[i] = shuffle<Unpack<1, 0>>(r[2 * i], r[2 * i + 1]) + shuffle<Unpack<1, 1>>(r[2 * i], r[2 * i + 1]);
  }
  UNROLL for (int i = 0; i < kLanes / 4; ++i) {
    fours[i] = shuffle<Unpack<2, 0>>(pairs[2 * i], pairs[2 * i + 1]) + shuffle<Unpack<2, 1>>(pairs[2 * i], pairs[2 * i + 1]);
  }
  // Each 128 bits of fours[i] are now of one quarter of a line: a sum of each of four rows.
  IntVec even[2], odd[2];
  UNROLL for (int i = 0; i < 2; ++i) {
    even[i] = shuffle<Parts<0>>(fours[2 * i], fours[2 * i + 1]);
    odd[i] = shuffle<Parts<1>>(fours[2 * i], fours[2 * i + 1]);
  }
  if constexpr (Blocks == 4) {
    dots[0] = shuffle<Parts<0>>(even[0], even[1]);
    dots[1] = shuffle<Parts<0>>(odd[0], odd[1]);
    dots[2] = shuffle<Parts<1>>(even[0], even[1]);
    dots[3] = shuffle<Parts<1>>(odd[0], odd[1]);
  } else {
    const IntVec first = even[0] + odd[0], second = even[1] + odd[1];
    const IntVec low = shuffle<Parts<0>>(first, second), high = shuffle<Parts<1>>(first, second);
    if constexpr (Blocks == 2) {
      dots[0] = low;
      dots[1] = high;
    } else {
      dots[0] = low + high;
    }
  }
}

// What the blocks of a line come to, as dotCodes has them. Of weight rows `row` bytes apart, `bytes` of each; after them there is nothing.
template <Coding C, int Blocks>
INLINE void dotLine(IntVec (&dots)[Blocks], const uint8_t* weights, int64_t row, const uint8_t* x, int64_t bytes) {
  const __mmask64 used = bytes == kLineBytes ? ~__mmask64{0} : (__mmask64{1} << bytes) - 1;
  IntVec sums[kLanes];
  if constexpr (isPacked(C)) {
    // Words of x for even columns and for odd ones take turns.
    alignas(64) static constexpr int32_t kEven[] = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
    const __m512i order = _mm512_load_si512(kEven), next = _mm512_add_epi32(order, _mm512_set1_epi32(1));
    const __mmask64 low = bytes >= kLineBytes / 2 ? ~__mmask64{0} : (__mmask64{1} << 2 * bytes) - 1;
    const __mmask64 high = bytes == kLineBytes ? ~__mmask64{0} : bytes > kLineBytes / 2 ? (__mmask64{1} << (2 * bytes - 64)) - 1 : 0;
    const __m512i first = _mm512_maskz_loadu_epi8(low, x), second = _mm512_maskz_loadu_epi8(high, x + kLineBytes);
    const BitVec even = (BitVec)_mm512_permutex2var_epi32(first, order, second);
    const BitVec odd = (BitVec)_mm512_permutex2var_epi32(first, next, second);
    forEach<kLanes>([&](auto i) __attribute__((always_inline)) {
      const BitVec w = (BitVec)_mm512_maskz_loadu_epi8(used, weights + i * row);
      sums[i] = dotCodes<false>(dotCodes<false>(IntVec{}, w & 0x0f0f0f0fu, even), w >> 4 & 0x0f0f0f0fu, odd);
    });
  } else {
    const BitVec own = (BitVec)_mm512_maskz_loadu_epi8(used, x);
    forEach<kLanes>([&](auto i) __attribute__((always_inline)) {
      const BitVec w = (BitVec)_mm512_maskz_loadu_epi8(used, weights + i * row);
      sums[i] = dotCodes<true>(IntVec{}, w ^ 0x80808080u, own);
    });
  }
  sumParts<Blocks>(dots, sums);
}

}  // namespace
}  // namespace step

#endif
