// SPDX-License-Identifier: Apache-2.0
//
// Keys and values as codes of 8 bits with a scale for each head of a token: code * scale, in float32. Numbers become codes as they are
// written to the cache, and codes elements of the queries' type as a block of columns is attended to.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "codes/codes.h"
#include "vectors/elements.h"

namespace step {
namespace {

// kLanes codes as numbers. The code of NaN is never written.
template <Coding C>
INLINE Vec codeValues(const uint8_t* codes) {
#if defined(STEP_AVX512) || defined(STEP_AVX2)
  if constexpr (C == Coding::kFp8) {
    // With the sign before an exponent of one bit more they are float16, subnormal numbers included, of 2^-8 the size.
    constexpr int16_t kUsed = static_cast<int16_t>(0xbf80);
#if defined(STEP_AVX512)
    const __m256i high = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes))), 8);
    return (Vec)_mm512_maskz_cvtph_ps(kAll, _mm256_and_si256(_mm256_srai_epi16(high, 1), _mm256_set1_epi16(kUsed))) * 256.0f;
#else
    const __m128i high = _mm_slli_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes))), 8);
    return (Vec)_mm256_cvtph_ps(_mm_and_si128(_mm_srai_epi16(high, 1), _mm_set1_epi16(kUsed))) * 256.0f;
#endif
  }
#endif
  return Codes<C>::value(Codes<C>::load(codes));
}

// `count` codes, a multiple of 16, as elements of a type; each is exact in any. On the way asks memory for the codes of the next block.
template <Coding C, class Kind>
void decodeAs(typename Kind::Element* to, const uint8_t* codes, const uint8_t* next, int64_t count) {
  constexpr int64_t kLineBytes = 64;
  for (int64_t i = 0; i < count; i += kLanes) {
    if (i % kLineBytes == 0) {
      prefetchFar(next + i);
    }
    Kind::store(to + i, codeValues<C>(codes + i));
  }
}

template <class Kind>
void decode(Coding coding, typename Kind::Element* to, const uint8_t* codes, const uint8_t* next, int64_t count) {
  if (coding == Coding::kInt8) {
    decodeAs<Coding::kInt8, Kind>(to, codes, next, count);
  } else {
    decodeAs<Coding::kFp8, Kind>(to, codes, next, count);
  }
}

// scores *= scales for all vectors of some rows of `stride`.
INLINE void scaleScores(float* scores, int64_t rows, int64_t vectors, int64_t stride, const float* scales) {
  for (int64_t j = 0; j < vectors; ++j) {
    const Vec scale = loadVec(scales + j * kLanes);
    for (int64_t m = 0; m < rows; ++m) {
      float* p = scores + m * stride + j * kLanes;
      storeVec(p, loadVec(p) * scale);
    }
  }
}

// What codes stand for at most, before they are scaled: step/attention/coded_states.py.
constexpr float largestCode(Coding coding) { return coding == Coding::kInt8 ? 127.0f : 240.0f; }

// Adding this rounds to the nearest whole number, ties to even, which the sum's lowest bits then are.
constexpr float kWholeRounder = 12582912.0f;
constexpr int32_t kWholeRounderBits = 0x4b400000;

// The nearest codes, ties to even, of numbers that are no larger than the largest; in the lowest 8 bits of each lane.
template <Coding C>
INLINE IntVec nearestCodes(Vec values) {
  if constexpr (C == Coding::kInt8) {
    return (IntVec)(values + kWholeRounder) - kWholeRounderBits;
  } else {
    const BitVec sign = (BitVec)values & 0x80000000u, bits = (BitVec)values ^ sign;
    const BitVec normal = ((bits + 0x7ffffu + (bits >> 20 & 1u)) >> 20) - (120u << 3);
    // Below 2^-6 they are multiples of 2^-9.
    const BitVec subnormal = (BitVec)((Vec)bits * 512.0f + kWholeRounder) - (uint32_t)kWholeRounderBits;
    const BitVec magnitude = (Vec)bits < 0x1p-6f ? subnormal : normal;
    return (IntVec)(magnitude | sign >> 24);
  }
}

// One head of a token. Of numbers that are not all finite the scale is NaN, and codes are zeros.
template <Coding C, class Kind>
void encodeAs(uint8_t* codes, float* scale, const typename Kind::Element* numbers, int64_t dim) {
  typedef uint8_t LaneCodes __attribute__((vector_size(kLanes)));
  constexpr float kSmallestHead = 0x1p-100f;
  const auto load = [&](int64_t d) {
    return d + kLanes <= dim ? Kind::load(numbers + d) : loadSome<Kind>(numbers + d, dim - d);
  };
  Vec top{};
  BitVec infinite{};
  for (int64_t d = 0; d < dim; d += kLanes) {
    const BitVec size = (BitVec)load(d) & 0x7fffffffu;
    infinite |= (BitVec)(size >= 0x7f800000u);
    top = max(top, (Vec)size);
  }
  if (orOf(infinite)) {
    *scale = std::numeric_limits<float>::quiet_NaN();
    std::fill_n(codes, dim, uint8_t{0});
    return;
  }
  const float largest = maximumOf(top);
  *scale = largest < kSmallestHead ? 1.0f : largest / largestCode(C);
  const Vec limit = broadcast(largestCode(C)), divisor = broadcast(*scale);
  for (int64_t d = 0; d < dim; d += kLanes) {
    const Vec value = load(d) / divisor;
    const Vec clamped = value > limit ? limit : value < -limit ? -limit : value;
    const LaneCodes own = __builtin_convertvector((BitVec)nearestCodes<C>(clamped), LaneCodes);
    std::memcpy(codes + d, &own, std::min<int64_t>(kLanes, dim - d));
  }
}

}  // namespace
}  // namespace step
