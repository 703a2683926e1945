// SPDX-License-Identifier: Apache-2.0
//
// The operators on one element, or on vectors. Those on one are written without branches, so that compilers turn the loops over
// them into vector code, and compiled without contraction of products and sums, so that an element's bits do not depend on its
// place in a loop.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "vectors/simd.h"

namespace step {

namespace {

// Always inline: a loop with a call in it stays scalar.
[[gnu::always_inline]] inline float bits(uint32_t value) { return std::bit_cast<float>(value); }
[[gnu::always_inline]] inline uint32_t bits(float value) { return std::bit_cast<uint32_t>(value); }

// To the nearest value, ties to even; NaN stays NaN.
[[gnu::always_inline]] inline float roundBFloat16(float x) {
  const uint32_t u = bits(x);
  const uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) & 0xffff0000u;
  return bits(x != x ? 0x7fc00000u : rounded);
}

// float32 to the bits of float16 and back, for CPUs of all kinds: to nearest even, subnormal numbers kept.
[[gnu::always_inline]] inline uint16_t toFloat16(float x) {
  const uint32_t sign = bits(x) >> 16 & 0x8000u;
  const float magnitude = std::fabs(x);
  // Adding this makes the sum's last bit the last one that float16 keeps of a subnormal number.
  const uint32_t small = bits(magnitude + 0.5f) - bits(0.5f);
  const uint32_t u = bits(magnitude);
  const uint32_t normal = (u - 0x38000000u + 0xfffu + (u >> 13 & 1)) >> 13;
  uint32_t result = magnitude < 6.103515625e-05f ? small : normal;
  result = magnitude >= 65520.0f ? 0x7c00u : result;
  result = x != x ? 0x7e00u : result;
  return static_cast<uint16_t>(sign | result);
}

[[gnu::always_inline]] inline float fromFloat16(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t rest = static_cast<uint32_t>(h & 0x7fffu) << 13;
  // 2^112 moves the exponent's bias, and makes subnormal numbers normal.
  const float scaled = bits(rest) * bits(0x77800000u);
  const uint32_t special = 0x7f800000u | rest;
  return bits(sign | ((h & 0x7c00u) == 0x7c00u ? special : bits(scaled)));
}

[[gnu::always_inline]] inline float roundFloat16(float x) { return fromFloat16(toFloat16(x)); }

// What follows is for vectors, of which the last of a row is filled up: an element's bits do not depend on its place in one.

// e^x = 2^n * e^r; the polynomial is fitted for |r| <= ln(2) / 2, relative error 3e-9. Subnormal results are kept.
INLINE Vec exponential(Vec x) {
  const Vec within = min(broadcast(89.0f), max(broadcast(-104.0f), x));  // in this order NaN stays
  // Adding this rounds to the nearest integer, which is then in the last bits.
  constexpr float kShift = 12582912.0f;
  const Vec shifted = fma(within, broadcast(1.44269504088896341f), broadcast(kShift));
  const Vec n = shifted - kShift;
  // ln(2) in two parts, of which the first times n is exact.
  const Vec r = fma(n, broadcast(2.12194440e-4f), fma(n, broadcast(-0.693359375f), within));
  Vec y = broadcast(1.3820661698e-3f);
  y = fma(y, r, broadcast(8.3686746657e-3f));
  y = fma(y, r, broadcast(4.1668266058e-2f));
  y = fma(y, r, broadcast(1.6666521132e-1f));
  y = fma(y, r, broadcast(4.9999994040e-1f));
  y = fma(y, r, broadcast(1.0f));
  y = fma(y, r, broadcast(1.0f));
#if defined(STEP_AVX512)
  return _mm512_maskz_scalef_ps(kAll, y, n);
#else
  // Two factors: 2^n alone has no float where n is below -126 or above 127.
  const IntVec whole = (IntVec)((BitVec)shifted - bits(kShift));
  const IntVec half = whole >> 1;
  return y * (Vec)((half + 127) << 23) * (Vec)((whole - half + 127) << 23);
#endif
}

INLINE Vec magnitudeOf(Vec x) { return (Vec)((BitVec)x & 0x7fffffffu); }
INLINE Vec withSign(Vec magnitude, Vec x) { return (Vec)((BitVec)magnitude | ((BitVec)x & 0x80000000u)); }

INLINE Vec sigmoid(Vec x) { return 1.0f / (1.0f + exponential(-x)); }

INLINE Vec silu(Vec x) { return x / (1.0f + exponential(-x)); }

// Constants of tanhf in Cephes.
INLINE Vec hyperbolicTangent(Vec x) {
  const Vec magnitude = magnitudeOf(x);
  const Vec z = x * x;
  Vec small = z * -5.70498872745e-3f + 2.06390887954e-2f;
  small = small * z - 5.37397155531e-2f;
  small = small * z + 1.33314422036e-1f;
  small = small * z - 3.33332819422e-1f;
  small = small * z * x + x;
  const Vec large = withSign(1.0f - 2.0f / (exponential(magnitude + magnitude) + 1.0f), x);
  return magnitude < 0.625f ? small : large;
}

// Constants of erff and erfcf in Cephes.
INLINE Vec errorFunction(Vec x) {
  const Vec magnitude = magnitudeOf(x);
  const Vec z = x * x;
  Vec small = z * 7.853861353153693e-5f - 8.010193625184903e-4f;
  small = small * z + 5.188327685732524e-3f;
  small = small * z - 2.685381193529856e-2f;
  small = small * z + 1.128358514861418e-1f;
  small = small * z - 3.761262582423300e-1f;
  small = small * z + 1.128379165726710e+0f;
  small = small * x;
  const Vec q = 1.0f / max(magnitude, broadcast(1.0f));
  const Vec w = q * q;
  Vec middle = w * 2.326819970068386e-2f - 1.387039388740657e-1f;
  middle = middle * w + 3.687424674597105e-1f;
  middle = middle * w - 5.824733027278666e-1f;
  middle = middle * w + 6.210004621745983e-1f;
  middle = middle * w - 4.944515323274145e-1f;
  middle = middle * w + 3.404879937665872e-1f;
  middle = middle * w - 2.741127028184656e-1f;
  middle = middle * w + 5.638259427386472e-1f;
  Vec far = w * -1.047766399936249e+1f + 1.297719955372516e+1f;
  far = far * w - 7.495518717768503e+0f;
  far = far * w + 2.921019019210786e+0f;
  far = far * w - 1.015265279202700e+0f;
  far = far * w + 4.218463358204948e-1f;
  far = far * w - 2.820767439740514e-1f;
  far = far * w + 5.641895067754075e-1f;
  const Vec complement = exponential(-z) * q * (magnitude < 2.0f ? middle : far);
  const Vec large = withSign(1.0f - complement, x);
  return x != x ? x : magnitude < 1.0f ? small : large;
}

INLINE Vec gelu(Vec x) { return x * 0.5f * (1.0f + errorFunction(x * 0.70710678118654752440f)); }

INLINE Vec geluTanh(Vec x) {
  const Vec inner = 0.79788456080286535588f * (x + 0.044715f * (x * x * x));
  return 0.5f * x * (1.0f + hyperbolicTangent(inner));
}

INLINE Vec softplus(Vec x) {
  const Vec power = exponential(x);
  Vec y = x;
  for (int i = 0; i < kLanes; ++i) {
    y[i] = x[i] > 20.0f ? x[i] : std::log1p(power[i]);
  }
  return y;
}

// As torch's maximum and minimum: NaN where one of them is.
[[gnu::always_inline]] inline float larger(float a, float b) { return a != a ? a : b != b ? b : a > b ? a : b; }
[[gnu::always_inline]] inline float smaller(float a, float b) { return a != a ? a : b != b ? b : a < b ? a : b; }

}  // namespace

}  // namespace step
