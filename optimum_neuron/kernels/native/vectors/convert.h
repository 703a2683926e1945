// SPDX-License-Identifier: Apache-2.0
//
// From bfloat16 and float16 to float32 and back, vector by vector. Rounding is to the nearest, ties to even; NaN stays
// NaN.
#pragma once

#include "vectors/simd.h"

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
INLINE typename Lanes<N>::Bits loadWide(const void* p) {
#if defined(STEP_SVE)
  if constexpr (N == kLanes) {
    return (BitVec)(SveBits)svld1uh_u32(svptrue_b32(), static_cast<const uint16_t*>(p));
  }
#endif
  return widen<N>(loadHalves<N>(p));
}

template <int N>
INLINE typename Lanes<N>::Floats loadBFloat16(const void* p) {
  return (typename Lanes<N>::Floats)(loadWide<N>(p) << 16);
}

// Subnormal numbers are kept.
template <int N>
INLINE typename Lanes<N>::Halves roundToBFloat16(typename Lanes<N>::Floats values) {
  using Bits = typename Lanes<N>::Bits;
  const Bits bits = (Bits)values;
  const Bits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Bits quiet = (bits >> 16) | 0x40;  // the payload's upper bits alone could be those of an infinity
  return __builtin_convertvector(values == values ? rounded : quiet, typename Lanes<N>::Halves);
}

// As a CPU does it that has products of bfloat16: some take subnormal numbers for zero.
template <int N>
INLINE typename Lanes<N>::Halves toBFloat16(typename Lanes<N>::Floats values) {
#if defined(STEP_AVX512_BF16)
  if constexpr (N == 16) {
    return (typename Lanes<N>::Halves)_mm512_cvtneps_pbh(values);
  } else if constexpr (N == 4) {
    return (typename Lanes<N>::Halves)_mm_cvtsi128_si64((__m128i)_mm_cvtneps_pbh(values));
  }
#elif defined(STEP_NEON_BF16)
  return (typename Lanes<N>::Halves)vcvt_bf16_f32(values);
#endif
  return roundToBFloat16<N>(values);
}

// Each in the upper half of 32 bits.
template <int N>
INLINE typename Lanes<N>::Bits widenHigh(typename Lanes<N>::Halves halves) {
#if defined(__SSE2__)
  if constexpr (N == 4) {
    return (typename Lanes<N>::Bits)_mm_unpacklo_epi16(_mm_setzero_si128(), _mm_set_epi64x(0, (int64_t)halves));
  }
#endif
  return widen<N>(halves) << 16;
}

// Whether all are normal numbers of float16; false where finding out costs more than it saves.
template <int N>
INLINE bool areNormal([[maybe_unused]] typename Lanes<N>::Halves halves) {
#if defined(__SSE2__)
  if constexpr (N == 4) {
    // The exponents 0 and 31 are those of which, with one added, no bit but the last is left.
    const __m128i next = _mm_add_epi16(_mm_set_epi64x(0, (int64_t)halves), _mm_set1_epi16(1 << 10));
    const __m128i others = _mm_cmpeq_epi16(_mm_and_si128(next, _mm_set1_epi16(0x7800)), _mm_setzero_si128());
    return (_mm_movemask_epi8(others) & 0xff) == 0;
  }
#endif
  return false;
}

template <int N>
INLINE typename Lanes<N>::Floats loadFloat16(const void* p) {
  [[maybe_unused]] const auto halves = loadHalves<N>(p);
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
  if constexpr (N == 4) {
    return vcvt_f32_f16((float16x4_t)halves);
  }
#if defined(STEP_SVE)
  else {
    return (Vec)svcvt_f32_f16_x(svptrue_b32(), svreinterpret_f16((SveBits)loadWide<N>(p)));
  }
#endif
#else
  using Bits = typename Lanes<N>::Bits;
  using Ints = typename Lanes<N>::Ints;
  using Floats = typename Lanes<N>::Floats;
  constexpr uint32_t kBias = (127 - 15) << 23;
  const Bits high = widenHigh<N>(halves);
  // Most weights are normal numbers, which need another exponent only.
  if (__builtin_expect(areNormal<N>(halves), true)) {
    return (Floats)(((Bits)((Ints)high >> 3) & 0x8fffe000u) + kBias);
  }
  const Bits magnitude = (high & 0x7fffffffu) >> 3;
  const Floats biased = (Floats)(magnitude + kBias);
  // Of a subnormal number the leading one is not implied: what it was taken for, less the one's value, is its half.
  const Bits half = (Bits)((Ints)magnitude < (1 << 23)) & (Bits)(biased - 0x1p-14f);
  const Bits infinite = (Bits)((Ints)magnitude >= (31 << 23)) & kBias;
  return (Floats)(((Bits)(biased + (Floats)half) + infinite) | (high & 0x80000000u));
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
  if constexpr (N == 4) {
    return (Halves)vcvt_f16_f32(values);
  }
#if defined(STEP_SVE)
  else {
    const svfloat16_t lower = svcvt_f16_f32_x(svptrue_b32(), (SveFloats)values);  // of each 32 bits
    return __builtin_convertvector((BitVec)(SveBits)svreinterpret_u32(lower), Halves);
  }
#endif
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
