// SPDX-License-Identifier: Apache-2.0
//
// The softmax of a row that comes block by block: earlier results are scaled when a larger score appears.
#pragma once

#include <cstdint>

#include "attention/attention_call.h"
#include "vectors/elements.h"

namespace step {
namespace {

constexpr int kBlockVectors = kBlock / kLanes;
// Queries that one softmax takes, at most: whole vectors of them. Of more, less is waited for before it and after.
constexpr int64_t kSoftmaxRows = 48;

// 2^x for x <= 0. The polynomials are fitted to 2^f on [-1/2, 1/2] with 1 for f = 0; relative error 1e-7, or 3e-6 where the
// result is Rounded to bfloat16.
template <bool Rounded = false>
INLINE Vec exp2(Vec x) {
#if defined(STEP_AVX512)
  const Vec whole = _mm512_maskz_roundscale_ps(kAll, x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  x = max(Vec{} - 127.0f, x);  // in this order NaN stays; what is smaller is zero
  // Adding 1.5 * 2^23 rounds to the nearest whole number, which the sum's lowest bits then are.
  constexpr float kRounder = 12582912.0f;
  const Vec rounded = x + kRounder;
  const Vec whole = rounded - kRounder;
#endif
  const Vec f = x - whole;
  Vec y;
  if constexpr (Rounded) {
    y = broadcast(9.582855315e-3f);
    y = fma(y, f, broadcast(5.590643044e-2f));
    y = fma(y, f, broadcast(2.402409861e-1f));
    y = fma(y, f, broadcast(6.931241927e-1f));
  } else {
    y = broadcast(1.326472877e-3f);
    y = fma(y, f, broadcast(9.671513183e-3f));
    y = fma(y, f, broadcast(5.550733744e-2f));
    y = fma(y, f, broadcast(2.402224208e-1f));
    y = fma(y, f, broadcast(6.931469776e-1f));
  }
  y = fma(y, f, broadcast(1.0f));
#if defined(STEP_AVX512)
  return _mm512_maskz_scalef_ps(kAll, y, whole);
#else
  // The power's exponent, biased; zero for -127, and with that the number.
  constexpr uint32_t kRounderBits = 0x4b400000;
  return y * (Vec)(((BitVec)rounded - kRounderBits + 127) << 23);
#endif
}

// Relative error 2e-7.
INLINE Vec tanh(Vec x) {
  const Vec size = (Vec)((BitVec)x & 0x7fffffffu);
  // Fitted to tanh on [-5/8, 5/8]; beyond, by the exponential function: its difference from 1 is exact enough there.
  const Vec square = x * x;
  Vec y = broadcast(-6.104961038e-3f);
  y = fma(y, square, broadcast(2.100365236e-2f));
  y = fma(y, square, broadcast(-5.385250226e-2f));
  y = fma(y, square, broadcast(1.333278269e-1f));
  y = fma(y, square, broadcast(-3.333332837e-1f));
  const Vec small = fma(y * square, x, x);
  const Vec power = exp2(size * -2.885390082f);  // e^(-2 |x|)
  const Vec large = (1.0f - power) / (1.0f + power);
  const Vec signedLarge = (Vec)((BitVec)large | ((BitVec)x & 0x80000000u));
  return size < 0.625f ? small : signedLarge;
}

// scores = cap * tanh(scores * scale / cap) for all vectors of some rows of kBlock.
INLINE void capScores(float* scores, int64_t rows, int64_t vectors, float scale, float cap) {
  for (int64_t m = 0; m < rows; ++m) {
    for (int64_t j = 0; j < vectors; ++j) {
      float* p = scores + m * kBlock + j * kLanes;
      storeVec(p, tanh(loadVec(p) * (scale / cap)) * cap);
    }
  }
}

// scores = scores * scale + (bias - own) for all vectors of a row of kBlock.
INLINE void addBias(float* scores, int64_t vectors, float scale, const float* bias, float own) {
  for (int64_t j = 0; j < vectors; ++j) {
    float* p = scores + j * kLanes;
    storeVec(p, loadVec(p) * scale + (loadVec(bias + j * kLanes) - own));
  }
}

// Running softmax state of some queries: largest score, and the sum of probabilities, lane by lane until the end.
struct Softmax {
  float* maxima;
  float* sums;
};

// All ones in those lanes of vector `j` that have columns of `seen`.
INLINE IntVec seenLanes(Range seen, int j) {
  IntVec column;
  for (int i = 0; i < kLanes; ++i) {
    column[i] = i;
  }
  const int first = j * kLanes;
  return (column >= static_cast<int>(seen.begin) - first) & (column < static_cast<int>(seen.end) - first);
}

// Probabilities of up to kSoftmaxRows queries over a block, relative to their largest score so far, and the factors
// that make the earlier ones relative to that score. Where a query sees nothing of the block, 0 and a factor of 1.
// `seen` are the columns that each of them sees; scores of others may be anything.
// Whole: all of them see all columns of the block. That is the usual case, and masks cost a tenth of all time.
// Scaled: values have scales, [kBlock], which are part of what they are multiplied by.
template <class Kind, bool Whole, bool Scaled>
void softmax(
    Word* probabilities, float* factors, Softmax state, const float* scores, const Range* seen, int64_t rows, float scale,
    const float* valueScales) {
  alignas(64) float before[kSoftmaxRows], now[kSoftmaxRows], change[kSoftmaxRows];
  for (int64_t m = rows; m < roundUp(rows, kLanes); ++m) {  // the last vector is whole
    before[m] = now[m] = 0.0f;
  }
  for (int64_t m = 0; m < rows; ++m) {
    before[m] = state.maxima[m];
    Vec top = broadcast(before[m]);
    UNROLL for (int j = 0; j < kBlockVectors; ++j) {
      const Vec larger = max(top, loadVec(scores + m * kBlock + j * kLanes) * scale);
      if constexpr (Whole) {
        top = larger;
      } else {
        top = seenLanes(seen[m], j) ? larger : top;
      }
    }
    now[m] = maximumOf(top);
    state.maxima[m] = now[m];
  }
  for (int64_t m = 0; m < rows; m += kLanes) {
    storeVec(change + m, exp2(loadVec(before + m) - loadVec(now + m)));
  }
  for (int64_t m = 0; m < rows; ++m) {
    Vec sum{};
    const Vec factor = broadcast(scale), less = broadcast(-now[m]);
    UNROLL for (int j = 0; j < kBlockVectors; ++j) {
      Vec p = exp2<sizeof(typename Kind::Packed) == 2>(fma(loadVec(scores + m * kBlock + j * kLanes), factor, less));
      if constexpr (!Whole) {
        p = seenLanes(seen[m], j) ? p : Vec{};
      }
      sum += p;
      if constexpr (Scaled) {
        p *= loadVec(valueScales + j * kLanes);
        if constexpr (!Whole) {  // the scale of a column that is not seen may be NaN
          p = seenLanes(seen[m], j) ? p : Vec{};
        }
      }
      Kind::packFloats(probabilities + m * kBlock + j * kLanes / Kind::kPerWord, p);
    }
    factors[m] = change[m];
    storeVec(state.sums + m * kLanes, fma(loadVec(state.sums + m * kLanes), broadcast(factors[m]), sum));
  }
}

}  // namespace
}  // namespace step
