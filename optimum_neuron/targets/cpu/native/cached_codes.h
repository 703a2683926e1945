// SPDX-License-Identifier: Apache-2.0
//
// Keys and values as codes of 8 bits with a scale for each head of a token: code * scale, in float32. Numbers become codes as they are
// written to the cache, and codes elements of the queries' type as a block of columns is attended to.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "codes.h"
#include "elements.h"

namespace step {
namespace {

// `count` codes, a multiple of 16, as elements of a type; each is exact in any. On the way asks memory for the codes of the next block.
template <Coding C, class Kind>
void decodeAs(typename Kind::Element* to, const uint8_t* codes, const uint8_t* next, int64_t count) {
  constexpr int64_t kLineBytes = 64;
  for (int64_t i = 0; i < count; i += kLanes) {
    if (i % kLineBytes == 0) {
      prefetchFar(next + i);
    }
    Kind::store(to + i, Codes<C>::value(Codes<C>::load(codes + i)));
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

// What codes stand for at most, before they are scaled: graphs/coded_states.py.
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
