// SPDX-License-Identifier: Apache-2.0
//
// The sums of AMX by vectors, to the bit: of one or two rows of x a tile computes as much as of sixteen, and reads weights slower
// than memory gives them. 16 x 32 weights are transposed in registers, so that a lane is an output.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "elements.h"
#include "transpose.h"

namespace step {
namespace {

constexpr int64_t kFewRows = 2;
constexpr int64_t kAmxStep = 2 * kLanes;  // columns

// As AMX has it: subnormal operands and results are zero. What is computed meanwhile comes from memory and goes there, or a
// compiler could move it away.
class FlushSubnormals {
 public:
  FlushSubnormals() { control(0x9fc0); }
  ~FlushSubnormals() { control(before_); }
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;

 private:
  static void control(uint32_t value) { asm volatile("ldmxcsr %0" ::"m"(value) : "memory"); }

  const uint32_t before_ = _mm_getcsr();
};

// total[r] += row r of x times 16 weight rows, of 32 columns: those of even and of odd columns apart, then both.
template <int Rows>
INLINE void addStep(const BFloat16::Element* weights, int64_t stride, const BFloat16::Packed* x, Vec (&total)[Rows]) {
  alignas(64) float evenX[Rows * kLanes], oddX[Rows * kLanes];
  constexpr uint32_t kOdd = 0xffff0000u;
  UNROLL for (int i = 0; i < Rows; ++i) {
    const BitVec pairs = loadBits(x + i * kAmxStep);
    storeBits(evenX + i * kLanes, pairs << 16);
    storeBits(oddX + i * kLanes, pairs & kOdd);
  }
  BitVec words[kLanes];
  UNROLL for (int i = 0; i < kLanes; ++i) {
    words[i] = BFloat16::loadWords(weights + i * stride);
  }
  transpose(words);
  Vec even[Rows] = {}, odd[Rows] = {};
  UNROLL for (int pair = 0; pair < kLanes; ++pair) {
    UNROLL for (int r = 0; r < Rows; ++r) {
      even[r] = fma((Vec)(words[pair] << 16), broadcast(evenX[pair * Rows + r]), even[r]);
      odd[r] = fma((Vec)(words[pair] & kOdd), broadcast(oddX[pair * Rows + r]), odd[r]);
    }
  }
  UNROLL for (int r = 0; r < Rows; ++r) {
    total[r] += even[r] + odd[r];
  }
}

// sums[r][i] is row r of x times weight row i, of up to 16. x is packed, the words of a pair of columns of all rows side by side;
// weights that are missing in the last step count as zeros, as there may be no memory.
template <int Rows>
inline void multiplyFew(
    const BFloat16::Element* weights, int64_t stride, int64_t outputs, const BFloat16::Packed* x, int64_t columns,
    int64_t ahead, float* sums) {
  const FlushSubnormals control;
  Vec total[Rows] = {};
  const int64_t whole = outputs == kLanes ? columns / kAmxStep * kAmxStep : 0;
  int64_t k = 0;
  for (; k < whole; k += kAmxStep, x += Rows * kAmxStep) {
    UNROLL for (int i = 0; i < kLanes; ++i) {
      prefetch(weights + i * stride + k + ahead);
    }
    addStep<Rows>(weights + k, stride, x, total);
  }
  for (; k < columns; k += kAmxStep, x += Rows * kAmxStep) {
    alignas(64) BFloat16::Element copy[kLanes * kAmxStep] = {};
    for (int64_t i = 0; i < outputs; ++i) {
      std::memcpy(copy + i * kAmxStep, weights + i * stride + k, std::min(columns - k, kAmxStep) * sizeof(*copy));
    }
    addStep<Rows>(copy, kAmxStep, x, total);
  }
  UNROLL for (int r = 0; r < Rows; ++r) {
    storeVec(sums + r * kLanes, total[r]);
  }
}

}  // namespace
}  // namespace step
