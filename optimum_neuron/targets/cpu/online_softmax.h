// SPDX-License-Identifier: Apache-2.0
//
// The softmax of a row whose columns come block by block: earlier results are scaled when a larger score appears.
#pragma once

#include <cstdint>

#include "attention_call.h"
#include "simd.h"

namespace {

static_assert(kBlock == kTileVectors * kLanes);

// 2^x for x <= 0 where the mask is set, else 0. The polynomial is that of exp2f in the Cephes library (S. Moshier), for
// 2^f on [-1/2, 1/2]; relative error 1e-7.
INLINE_AVX512 __m512 exp2(__m512 x, __mmask16 mask) {
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(x, whole);
  __m512 y = _mm512_set1_ps(1.535336188319500e-4f);
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.339887440266574e-3f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(9.618437357674640e-3f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(5.550332471162809e-2f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.402264791363012e-1f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.931472028550421e-1f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f));
  return _mm512_maskz_scalef_ps(mask, y, whole);
}

template <bool Whole>
__mmask16 vectorMask(uint64_t mask, int j) {
  return Whole ? 0xffff : static_cast<__mmask16>(mask >> (j * kLanes));
}

// Running softmax state of some queries: largest score, and the sum of probabilities, lane by lane until the end.
struct Softmax {
  float* maxima;
  float* sums;
};

// Probabilities of up to kTileRows queries over a block, relative to their largest score so far, and the factors that
// make the earlier ones relative to that score. Where a query sees nothing of the block, 0 and a factor of 1.
// Whole: all of them see all columns of the block. That is the usual case, and masks cost a tenth of all time.
template <class Type, bool Whole>
TARGET_AVX512 void softmax(
    Word* probabilities, float* factors, Softmax state, float* scores, const uint64_t* masks, int64_t rows,
    float scale) {
  const __m512 scales = _mm512_set1_ps(scale);
  alignas(64) float maxima[kLanes] = {};
  for (int64_t m = 0; m < rows; ++m) {
    __m512 top = _mm512_set1_ps(state.maxima[m]);
    UNROLL for (int j = 0; j < kTileVectors; ++j) {
      const auto seen = vectorMask<Whole>(masks[m], j);
      const __m512 score = _mm512_maskz_loadu_ps(seen, scores + m * kBlock + j * kLanes);
      const __m512 scaled = _mm512_mul_ps(score, scales);
      // Stored, as computing it again might fuse it with the subtraction below: the largest would not be 2^0.
      _mm512_storeu_ps(scores + m * kBlock + j * kLanes, scaled);
      top = _mm512_mask_max_ps(top, seen, top, scaled);
    }
    maxima[m] = _mm512_reduce_max_ps(top);
  }
  const auto used = static_cast<__mmask16>((1u << rows) - 1);
  const __m512 now = _mm512_load_ps(maxima);
  const __m512 before = _mm512_maskz_loadu_ps(used, state.maxima);
  _mm512_mask_storeu_ps(factors, used, exp2(_mm512_sub_ps(before, now), used));
  _mm512_mask_storeu_ps(state.maxima, used, now);
  for (int64_t m = 0; m < rows; ++m) {
    __m512 sum = _mm512_setzero_ps();
    UNROLL for (int j = 0; j < kTileVectors; ++j) {
      const auto seen = vectorMask<Whole>(masks[m], j);
      const __m512 scaled = _mm512_loadu_ps(scores + m * kBlock + j * kLanes);
      const __m512 p = exp2(_mm512_sub_ps(scaled, _mm512_set1_ps(maxima[m])), seen);
      sum = _mm512_add_ps(sum, p);
      Type::store(reinterpret_cast<typename Type::Element*>(probabilities + m * kBlock) + j * kLanes, p);
    }
    const __m512 earlier = _mm512_loadu_ps(state.sums + m * kLanes);
    _mm512_storeu_ps(state.sums + m * kLanes, _mm512_fmadd_ps(earlier, _mm512_set1_ps(factors[m]), sum));
  }
}

}  // namespace
