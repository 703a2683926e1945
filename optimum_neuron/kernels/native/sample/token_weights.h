// SPDX-License-Identifier: Apache-2.0
//
// A row of logits as the sampler sees it: scores, their distances from the best one, and weights, vector by vector. Every
// rounding is that of step/sampling/sampler.py.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "vectors/simd.h"

namespace step {
namespace {

constexpr float kWhole = 68719476736.0f;  // 2^36, the weight of the best token
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// A token is kept with a score of at least `lowest`, and a weight of at least `least`.
struct TokenRow {
  const float* logits;
  int64_t vocab;
  float temperature, best;
  float lowest = -kInfinity, least = 0.0f;
};

// x without its fraction, 0 <= x <= 2^24.
INLINE Vec wholePart(Vec x) { return __builtin_convertvector(__builtin_convertvector(x, IntVec), Vec); }

// exp(-distance) * 2^36 in whole numbers. The constants are those of `weights_of`.
INLINE Vec weightsOf(Vec distance) {
  const Vec limit = broadcast(40.0f);
  distance = distance < limit ? distance : limit;
  const Vec halvings = wholePart(distance * 1.44269504f);
  Vec rest = distance - halvings * 0.6931381225585938f - halvings * 9.05798515304923e-06f;
  rest = rest > 0.0f ? rest : Vec{};
  Vec series = broadcast(49538.0f);
  series = 334538.0f - wholePart(series * rest);
  series = 1392892.0f - wholePart(series * rest);
  series = 4193494.0f - wholePart(series * rest);
  series = 8388566.0f - wholePart(series * rest);
  series = 8388608.0f - wholePart(series * rest);
  const Vec power = (Vec)((140 - __builtin_convertvector(halvings, IntVec)) << 23);
  const Vec weight = series * power;
  const Vec fractional = broadcast(8388608.0f);  // beyond, a float32 has no fraction
  return weight < fractional ? wholePart(weight < fractional ? weight : fractional) : weight;
}

// Logits from `token` on; after the last one, what has no weight.
INLINE Vec logitsFrom(const TokenRow& row, int64_t token) {
  const int64_t left = row.vocab - token;
  if (left >= kLanes) {
    return loadVec(row.logits + token);
  }
  Vec last = broadcast(-kInfinity);
  for (int64_t i = 0; i < left; ++i) {
    last[i] = row.logits[token + i];
  }
  return last;
}

struct Scored {
  Vec score, distance, weight;
};

INLINE Scored scoresFrom(const TokenRow& row, int64_t token) {
  const Vec score = logitsFrom(row, token) / row.temperature;
  const Vec distance = row.best - score;
  return {score, distance, weightsOf(distance)};
}

INLINE Vec keptWeightsFrom(const TokenRow& row, int64_t token) {
  const Scored scored = scoresFrom(row, token);
  return ((scored.score >= row.lowest) & (scored.weight >= row.least)) ? scored.weight : Vec{};
}

// The sum of kept weights of up to 4096 tokens.
INLINE uint64_t keptWeight(const TokenRow& row, int64_t begin, int64_t end) {
  constexpr float kPart = 262144.0f;  // 2^18: a weight has two parts of 18 bits
  BitVec high{}, low{};
  for (int64_t token = begin; token < end; token += kLanes) {
    const Vec weight = keptWeightsFrom(row, token);
    const IntVec upper = __builtin_convertvector(weight * (1.0f / kPart), IntVec);
    high += (BitVec)upper;
    low += (BitVec)__builtin_convertvector(weight - __builtin_convertvector(upper, Vec) * kPart, IntVec);
  }
  const auto sum = [](BitVec a, BitVec b) { return a + b; };
  return (static_cast<uint64_t>(reduce(high, sum)) << 18) + reduce(low, sum);
}

// A whole number as float32, rounded as `to_float` does: after each digit of base 4096.
inline float rounded(uint64_t number) {
  float result = static_cast<float>(number >> 36);
  for (int shift = 24; shift >= 0; shift -= 12) {
    result = result * 4096.0f + static_cast<float>(number >> shift & 4095);
  }
  return result;
}

}  // namespace
}  // namespace step
