// SPDX-License-Identifier: Apache-2.0
//
// Sums of products of codes: four of a weight and four of x in each lane, in integers and exactly.
#pragma once

#include "vectors/simd.h"

#if defined(STEP_AVX512) && defined(__AVX512VNNI__)
#define STEP_VNNI
#endif

namespace step {
namespace {

// What is added to codes of int8 of weights before they are multiplied, so that they have no sign.
#if defined(STEP_VNNI)
constexpr int32_t kDotOffset = 128;
#else
constexpr int32_t kDotOffset = 0;
#endif

#if defined(__x86_64__) && !defined(STEP_AVX512) && !defined(STEP_AVX2)
// The bytes of 16 bits as two numbers of 16 bits, even ones and odd ones: products of pairs are summed in 32 bits.
typedef int16_t ShortVec __attribute__((vector_size(4 * kLanes)));
INLINE ShortVec evenBytes(BitVec v) { return (ShortVec)v << 8 >> 8; }
INLINE ShortVec oddBytes(BitVec v) { return (ShortVec)v >> 8; }
INLINE IntVec multiplyPairs(ShortVec a, ShortVec b) {
  return (IntVec)_mm_madd_epi16((__m128i)a, (__m128i)b);
}
INLINE IntVec dotPairs(IntVec sum, BitVec w, BitVec x) {
  return sum + multiplyPairs(evenBytes(w), evenBytes(x)) + multiplyPairs(oddBytes(w), oddBytes(x));
}
#endif

#if defined(STEP_AVX2) || (defined(STEP_AVX512) && !defined(STEP_VNNI))
#define STEP_SHORT_SUMS
// Sums of pairs of products in 16 bits, of codes without a sign and of codes with one.
typedef int16_t ShortVec __attribute__((vector_size(4 * kLanes)));
INLINE ShortVec multiplyPairs(BitVec w, BitVec x) {
#if defined(STEP_AVX512)
  return (ShortVec)_mm512_maddubs_epi16((__m512i)w, (__m512i)x);
#else
  return (ShortVec)_mm256_maddubs_epi16((__m256i)w, (__m256i)x);
#endif
}
INLINE IntVec addPairs(IntVec sum, ShortVec pairs) {
#if defined(STEP_AVX512)
  return sum + (IntVec)_mm512_madd_epi16((__m512i)pairs, _mm512_set1_epi16(1));
#else
  return sum + (IntVec)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi16(1));
#endif
}
// A word has 8 codes of 4 bits. 16 bits hold what so many words come to: 4 * 4 * 15 * 127.
constexpr int kShortWords = 4;
#endif

// Weights are codes of 4 bits, from 0 to 15, or where `Wide` codes of 8 bits plus kDotOffset; x are from -127 to 127.
template <bool Wide>
INLINE IntVec dotCodes(IntVec sum, BitVec w, BitVec x) {
#if defined(STEP_VNNI)
  return (IntVec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
#elif defined(STEP_AVX512)
  // A pair's sum fits 16 bits: 2 * 128 * 127.
  const __m512i own = (__m512i)x, size = Wide ? _mm512_abs_epi8((__m512i)w) : (__m512i)w;
  const __m512i signs = Wide ? _mm512_mask_sub_epi8(own, _mm512_movepi8_mask((__m512i)w), __m512i{}, own) : own;
  return addPairs(sum, multiplyPairs((BitVec)size, (BitVec)signs));
#elif defined(STEP_AVX2)
  const __m256i size = Wide ? _mm256_abs_epi8((__m256i)w) : (__m256i)w;
  const __m256i signs = Wide ? _mm256_sign_epi8((__m256i)x, (__m256i)w) : (__m256i)x;
  return addPairs(sum, multiplyPairs((BitVec)size, (BitVec)signs));
#elif defined(__x86_64__)
  return dotPairs(sum, w, x);
#elif defined(STEP_SVE)
  typedef svint32_t Sums __attribute__((arm_sve_vector_bits(__ARM_FEATURE_SVE_BITS)));
  return (IntVec)(Sums)svdot_s32(
      (Sums)sum, svreinterpret_s8_u32((SveBits)w), svreinterpret_s8_u32((SveBits)x));
#elif defined(__ARM_FEATURE_DOTPROD)
  return vdotq_s32(sum, (int8x16_t)w, (int8x16_t)x);
#elif defined(__aarch64__)
  const int8x16_t left = (int8x16_t)w, right = (int8x16_t)x;
  const int16x8_t low = vmull_s8(vget_low_s8(left), vget_low_s8(right)), high = vmull_high_s8(left, right);
  return sum + vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
#else
  for (int shift = 24; shift >= 0; shift -= 8) {
    sum += ((IntVec)(w << shift) >> 24) * ((IntVec)(x << shift) >> 24);
  }
  return sum;
#endif
}

INLINE BitVec repeatWord(const void* p) {
  uint32_t word;
  std::memcpy(&word, p, sizeof(word));
  return broadcastBits(word);
}

}  // namespace
}  // namespace step
