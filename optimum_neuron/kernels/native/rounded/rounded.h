// SPDX-License-Identifier: Apache-2.0
//
// Rows of x as codes of 8 bits, for weights that are codes too. Each group of columns is cut into blocks of 64, the last of which may be
// shorter, and a block has a scale: a code stands for code * scale. Products of codes are summed in integers, exactly; what a block comes
// to is multiplied by its scale in float32 and added to the blocks before, and what a group comes to by the weight's scale. So bits depend
// on that order alone.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>

#include "codes/codes.h"

namespace step {
namespace {

constexpr int64_t kRoundedBlock = 64;

// Calls body(i) for i below N, each a constant: what an array's constant places hold stays in registers.
template <int N, class Body>
INLINE void forEach(Body body) {
  [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) {
    (body(std::integral_constant<int, I>()), ...);
  }
  (std::make_integer_sequence<int, N>());
}

// Of all rows of a call: what CodeForm has, and where blocks lie.
struct RoundedForm {
  Coding coding;
  int64_t group, groups;
  int64_t perGroup;  // blocks
  bool hasShift;

  int64_t blocks() const { return groups * perGroup; }
  int64_t rowBytes() const { return bytesOf(coding, groups * group); }
  int64_t groupOf(int64_t block) const { return block / perGroup; }
  bool endsGroup(int64_t block) const { return (block + 1) % perGroup == 0; }
  int64_t columnOf(int64_t block) const { return groupOf(block) * group + block % perGroup * kRoundedBlock; }
  int64_t columnsOf(int64_t block) const { return std::min(kRoundedBlock, group - block % perGroup * kRoundedBlock); }
  int64_t mostColumns() const { return std::min(kRoundedBlock, group); }
  // Whether all blocks are as long, so that their codes lie one after another.
  bool isEven() const { return perGroup * mostColumns() == group; }
};

template <class Call>
RoundedForm roundedFormOf(const Call& call) {
  return {call.coding, call.group, call.columns / call.group, divideUp(call.group, kRoundedBlock), hasShift(call)};
}

typedef int8_t LaneCodes __attribute__((vector_size(kLanes)));

INLINE void storeCodes(int8_t* to, IntVec codes) {
#if defined(STEP_AVX512)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_maskz_cvtepi32_epi8(kAll, (__m512i)codes));
#else
  const LaneCodes bytes = __builtin_convertvector(codes, LaneCodes);
  std::memcpy(to, &bytes, sizeof(bytes));
#endif
}

struct RoundedScale {
  float scale;
  int32_t sum;  // of the codes
};

// Writes the codes of up to 64 numbers, and zeros after them up to 64.
template <class Kind>
INLINE RoundedScale roundBlock(int8_t* codes, const typename Kind::Element* x, int64_t count) {
  constexpr int64_t vectors = kRoundedBlock / kLanes;
  constexpr uint32_t infinity = 0x7f800000;
  Vec values[vectors];
  IntVec most{};
  for (int64_t i = 0; i < vectors; ++i) {
    values[i] = loadUpTo<Kind>(x + i * kLanes, count - i * kLanes);
    const IntVec size = (IntVec)((BitVec)values[i] & 0x7fffffffu);
    most = size > most ? size : most;  // numbers of one sign are in the order of their bits, and NaN is after infinity
  }
  const int32_t bits = reduce(most, [](IntVec a, IntVec b) { return a > b ? a : b; });
  const float scale = std::bit_cast<float>(bits) / 127;
  if (bits >= static_cast<int32_t>(infinity) || scale < std::numeric_limits<float>::min()) {
    std::memset(codes, 0, kRoundedBlock);
    return {bits >= static_cast<int32_t>(infinity) ? std::numeric_limits<float>::quiet_NaN() : 0.0f, 0};
  }
  // Adding this rounds to the nearest whole number, ties to even, which the lowest bits then hold.
  constexpr float whole = 0x1.8p23f;
  const Vec inverse = broadcast(1 / scale);
  IntVec sum{};
  for (int64_t i = 0; i < vectors; ++i) {
    const IntVec code = (IntVec)(values[i] * inverse + whole) - std::bit_cast<int32_t>(whole);
    sum += code;
    storeCodes(codes + i * kLanes, code);
  }
  return {scale, reduce(sum, [](IntVec a, IntVec b) { return a + b; })};
}

// a * b + c, rounded once, on every CPU.
INLINE Vec fuse(Vec a, Vec b, Vec c) {
#if defined(STEP_AVX512) || defined(STEP_AVX2) || defined(__aarch64__)
  return fma(a, b, c);
#else
  for (int i = 0; i < kLanes; ++i) {
    c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  }
  return c;
#endif
}

// Stores a vector, or as much of it as there is.
template <class Kind>
INLINE void storeUpTo(typename Kind::Element* to, Vec values, int64_t count) {
  if (count >= kLanes) {
    Kind::store(to, values);
    return;
  }
  typename Kind::Element some[kLanes];
  Kind::store(some, values);
  std::memcpy(to, some, count * sizeof(some[0]));
}

// Adds what a block's codes come to to the sum of those before.
INLINE float addSum(float before, const RoundedScale& block) {
  return __builtin_fmaf(static_cast<float>(block.sum), block.scale, before);
}

}  // namespace
}  // namespace step
