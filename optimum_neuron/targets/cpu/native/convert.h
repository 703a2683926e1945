// SPDX-License-Identifier: Apache-2.0
//
// From bfloat16 and float16 to float32 and back, vector by vector. Rounding is to the nearest, ties to even; NaN stays
// NaN.
#pragma once

#include "simd.h"

namespace step {
namespace {

template <int N>
struct Lanes {
  typedef float Floats __attribute__((vector_size(4 * N)));
  typedef int32_t Ints __attribute__((vector_size(4 * N)));
  typedef uint32_t Bits __attribute__((vector_size(4 * N)));
  typedef uint16_t Halves __attribute__((vector_size(2 * N)));
  typedef uint16_t LooseHalves __attribute__((vector_size(2 * N), aligned(2), may_alias));
};

template <int N>
INLINE typename Lanes<N>::Halves loadHalves(const void* p) {
  return *static_cast<const typename Lanes<N>::LooseHalves*>(p);
}

// Each in 32 bits of its own, where the compilers' own conversion takes several steps.
template <int N>
INLINE typename Lanes<N>::Bits widen(typename Lanes<N>::Halves halves) {
  using Bits = typename Lanes<N>::Bits;
#if defined(STEP_AVX512)
  if constexpr (N == 16) {
    return (Bits)_mm512_maskz_cvtepu16_epi32(kAll, (__m256i)halves);
  }
#elif defined(STEP_AVX2)
  if constexpr (N == 8) {
    return (Bits)_mm256_cvtepu16_epi32((__m128i)halves);
  }
#elif defined(__x86_64__)
  if constexpr (N == 4) {
    return (Bits)_mm_unpacklo_epi16(_mm_set_epi64x(0, (int64_t)halves), _mm_setzero_si128());
  }
#endif
  return __builtin_convertvector(halves, Bits);
}

template <int N>
INLINE typename Lanes<N>::Floats fromBFloat16(typename Lanes<N>::Halves halves) {
  return (typename Lanes<N>::Floats)(widen<N>(halves) << 16);
}

template <int N>
INLINE typename Lanes<N>::Halves toBFloat16(typename Lanes<N>::Floats values) {
  using Bits = typename Lanes<N>::Bits;
#if defined(STEP_AVX512_BF16)
  if constexpr (N == 16) {
    return (typename Lanes<N>::Halves)_mm512_cvtneps_pbh(values);
  } else if constexpr (N == 4) {
    return (typename Lanes<N>::Halves)_mm_cvtsi128_si64((__m128i)_mm_cvtneps_pbh(values));
  }
#endif
  const Bits bits = (Bits)values;
  const Bits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Bits quiet = (bits >> 16) | 0x40;  // the payload's upper bits alone could be those of an infinity
  return __builtin_convertvector(values == values ? rounded : quiet, typename Lanes<N>::Halves);
}

template <int N>
INLINE typename Lanes<N>::Floats fromFloat16(typename Lanes<N>::Halves halves) {
#if defined(STEP_AVX512) || defined(STEP_AVX2)
  if constexpr (N == 4) {
    return _mm_cvtph_ps(_mm_set_epi64x(0, (int64_t)halves));
  } else if constexpr (N == 8) {
    return _mm256_cvtph_ps((__m128i)halves);
  }
#if defined(STEP_AVX512)
  else {
    return _mm512_maskz_cvtph_ps(kAll, (__m256i)halves);
  }
#endif
#elif defined(__aarch64__)
  return vcvt_f32_f16((float16x4_t)halves);
#else
  using Bits = typename Lanes<N>::Bits;
  using Floats = typename Lanes<N>::Floats;
  const Bits wide = widen<N>(halves);
  const Bits magnitude = (wide & 0x7fff) << 13;
  const Bits exponent = magnitude & (31u << 23);
  constexpr uint32_t kBias = (127 - 15) << 23;
  // Of a subnormal number the leading one is not implied: add it, and subtract its value again.
  const Bits subnormal = (Bits)((Floats)(magnitude + (kBias + (1u << 23))) - 0x1p-14f);
  const Bits infinite = magnitude + 2 * kBias;
  Bits bits = magnitude + kBias;
  bits = exponent == 0 ? subnormal : bits;
  bits = exponent == (31u << 23) ? infinite : bits;
  return (Floats)(bits | (wide & 0x8000) << 16);
#endif
}

template <int N>
INLINE typename Lanes<N>::Halves toFloat16(typename Lanes<N>::Floats values) {
  using Halves = typename Lanes<N>::Halves;
#if defined(STEP_AVX512) || defined(STEP_AVX2)
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  if constexpr (N == 4) {
    return (Halves)_mm_cvtsi128_si64(_mm_cvtps_ph(values, kNearest));
  } else if constexpr (N == 8) {
    return (Halves)_mm256_cvtps_ph(values, kNearest);
  }
#if defined(STEP_AVX512)
  else {
    return (Halves)_mm512_maskz_cvtps_ph(kAll, values, kNearest);
  }
#endif
#elif defined(__aarch64__)
  return (Halves)vcvt_f16_f32(values);
#else
  using Bits = typename Lanes<N>::Bits;
  using Ints = typename Lanes<N>::Ints;
  using Floats = typename Lanes<N>::Floats;
  const Bits sign = (Bits)values & 0x80000000u;
  const Bits magnitude = (Bits)values ^ sign;
  // Below the normal numbers an addition rounds: the last bit of the sum is worth 2^-24.
  const Bits subnormal = (Bits)((Floats)magnitude + 0.5f) - (126u << 23);
  const Bits normal = (magnitude - ((127u - 15) << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  const Ints size = (Ints)magnitude;  // compared as signed numbers, as SSE2 can
  Bits bits = size < (113 << 23) ? subnormal : normal;
  bits = size >= (143 << 23) ? Bits{} + 0x7c00 : bits;
  bits = size > (255 << 23) ? Bits{} + 0x7e00 : bits;
  return __builtin_convertvector(bits | sign >> 16, Halves);
#endif
}

}  // namespace
}  // namespace step
