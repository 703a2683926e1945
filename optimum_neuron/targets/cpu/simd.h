// SPDX-License-Identifier: Apache-2.0
//
// What both kernels share: the instruction sets they are written for, and the two element types.
//
// The headers of this folder have an unnamed namespace each: two builds of the library can live in one process, and no
// symbol of one may stand in for another's.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <immintrin.h>

#include <cstdint>

// Attributes, not compiler flags: what torch's headers define inline may be merged with torch's own copies, and the
// check below runs on any x86-64.
#define TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")))
#define INLINE_AVX512 TARGET_AVX512 __attribute__((always_inline)) static inline
// Sums stay in registers only where their loops are unrolled.
#define UNROLL _Pragma("GCC unroll 16")

namespace {

// Both matrix products work on 32-bit words: two bfloat16 that are multiplied and added in one step, or one float32.
using Word = uint32_t;
constexpr int64_t kLanes = 16;  // words of a vector

// 6 x 4 sums, 4 vectors of one operand and one of the other fit the 32 registers.
constexpr int64_t kTileRows = 6;
constexpr int64_t kTileVectors = 4;

// An element type: `load` and `store` convert from and to float32, `loadWords` and `multiplyAdd` take elements as they
// are, kLanes * kPerWord of them.
struct BFloat16 {
  using Element = c10::BFloat16;
  static constexpr int64_t kPerWord = 2;

  INLINE_AVX512 __m512i loadWords(const Element* p) { return _mm512_loadu_si512(p); }
  // The first `count` elements, fewer than a vector has; the others are zero.
  INLINE_AVX512 __m512i loadWords(const Element* p, int64_t count) {
    return _mm512_maskz_loadu_epi16((__mmask32{1} << count) - 1, p);
  }
  INLINE_AVX512 __m512 multiplyAdd(__m512i a, __m512i b, __m512 sum) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
  }
  INLINE_AVX512 __m512i loadBits(const Element* p) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  INLINE_AVX512 __m512 load(const Element* p) { return _mm512_castsi512_ps(_mm512_slli_epi32(loadBits(p), 16)); }
  INLINE_AVX512 void store(Element* p, __m512 values) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(values));
  }
  INLINE_AVX512 __m128 load4(const Element* p, __mmask8 mask) {
    return _mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(_mm_maskz_loadu_epi16(mask, p)), 16));
  }
  INLINE_AVX512 void store4(Element* p, __m128 values, __mmask8 mask) {
    _mm_mask_storeu_epi16(p, mask, (__m128i)_mm_cvtneps_pbh(values));
  }
};

struct Float32 {
  using Element = float;
  static constexpr int64_t kPerWord = 1;

  INLINE_AVX512 __m512i loadWords(const Element* p) { return _mm512_loadu_si512(p); }
  INLINE_AVX512 __m512i loadWords(const Element* p, int64_t count) {
    return _mm512_maskz_loadu_epi32(static_cast<__mmask16>((1u << count) - 1), p);
  }
  INLINE_AVX512 __m512 multiplyAdd(__m512i a, __m512i b, __m512 sum) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
  }
  INLINE_AVX512 __m512 load(const Element* p) { return _mm512_loadu_ps(p); }
  INLINE_AVX512 void store(Element* p, __m512 values) { _mm512_storeu_ps(p, values); }
  INLINE_AVX512 __m128 load4(const Element* p, __mmask8 mask) { return _mm_maskz_loadu_ps(mask, p); }
  INLINE_AVX512 void store4(Element* p, __m128 values, __mmask8 mask) { _mm_mask_storeu_ps(p, mask, values); }
};

// Without it a library that was carried to another machine would end the process.
inline void checkInstructions() {
  TORCH_CHECK(
      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bf16"),
      "these kernels need a CPU with AVX512 F, BW, DQ, VL and BF16, which this one lacks; export the model here");
}

}  // namespace
