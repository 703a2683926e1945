// SPDX-License-Identifier: Apache-2.0
//
// Codes of int4 with short scales: what such a code stands for is a number of bfloat16, exactly.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

#include "codes/codes_amx.h"

namespace step {
namespace {

// Whether a weight is met as what its codes stand for, and not as codes.
inline bool takesScaled(const CodeForm& form, const Scales& scales) { return scales.isShort && form.group % kLineColumns == 0; }
inline bool takesAnyScaled(const CodeForm& form, const LinearsCall& call) {
  return std::any_of(call.linears, call.linears + call.count, [&](const Linear& each) { return takesScaled(form, each.scales); });
}
inline bool takesAnyScaled(const CodeForm& form, const ExpertsCall& call) { return takesScaled(form, call.scales); }

// A line. The bits of a short scale are a multiple of 64, and so they are where its table of 64 bytes begins.
class ScaledLine {
 public:
  ScaledLine() : tables_(all().bytes) {}

  INLINE BitVec operator()(const uint8_t* codes, uint16_t scale) const { return lookUp(codes, _mm512_loadu_si512(tables_ + scale)); }

 private:
  struct Tables {
    // And for what is read where a scale is another one, as a file that is mapped can be written to.
    alignas(64) uint8_t bytes[(1 << 16) + kAmxLineBytes] = {};

    Tables() {
      constexpr int kTimes = 2, kCodes = 16, kInfinity = 0x7c00;
      for (int scale = 0; scale < 1 << 16; scale += kAmxLineBytes) {
        if ((scale & kInfinity) == kInfinity) {
          continue;
        }
        for (int code = 0; code < kTimes * kCodes; ++code) {
          const float number = _cvtsh_ss(static_cast<uint16_t>(scale)) * (static_cast<float>(code % kCodes) - kInt4Middle);
          const auto bits = static_cast<uint16_t>(std::bit_cast<uint32_t>(number) >> 16);
          std::memcpy(bytes + scale + code * sizeof(bits), &bits, sizeof(bits));
        }
      }
    }
  };

  static const Tables& all() {
    static const Tables tables;
    return tables;
  }

  const uint8_t* const tables_;
};

// Unpacks lines, from a tile's to that `Tiles` tiles further. They are those from `step` on of a weight row that begins at its scales; a group has
// `groupSteps` of them.
template <int64_t Tiles = 1>
INLINE void unpackScaled(
    uint16_t* to, const uint8_t* codes, const uint16_t* scales, const ScaledLine& numbers, int64_t step, int64_t steps,
    int64_t groupSteps) {
  constexpr int64_t bytes = bytesOf(Coding::kInt4, kLineColumns), tile = Tiles * kAmxLines * kLineColumns;
  const uint16_t* scale = scales + step / groupSteps;
  for (int64_t left = groupSteps - step % groupSteps; steps > 0; left = groupSteps, ++scale) {
    const int64_t count = std::min(left, steps);
    steps -= count;
    for (int64_t i = 0; i < count; ++i, to += tile, codes += bytes) {
      storeBits(to, numbers(codes, *scale));
    }
  }
}

}  // namespace
}  // namespace step
