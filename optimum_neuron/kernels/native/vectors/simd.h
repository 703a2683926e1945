// SPDX-License-Identifier: Apache-2.0
//
// Vectors of float32, as wide as the instruction set that the compiler was given (-march): all files of a library
// must be built for the same one, and with -ffp-contract=off, so that a product and a sum are fused where fma() says so
// only and a row's bits do not depend on which of two loops computed it.
//
// The headers of this folder have an unnamed namespace each: libraries for several instruction sets can live in one
// process, and no symbol of one may stand in for another's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#if defined(__ARM_FEATURE_SVE_BITS) && __ARM_FEATURE_SVE_BITS >= 256
#include <arm_sve.h>
#define STEP_SVE
#endif
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define STEP_AVX512
#if defined(__AVX512BF16__)
#define STEP_AVX512_BF16
#if (defined(__AMX_TILE__) && defined(__AMX_BF16__)) || defined(STEP_AMX_EMULATED)
#define STEP_AMX
#endif
#endif
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define STEP_AVX2
#elif defined(__aarch64__) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) && !defined(STEP_SVE)
#define STEP_NEON_BF16
#endif

#define INLINE __attribute__((always_inline)) inline
// Sums stay in registers only where their loops are unrolled.
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

namespace step {
namespace {

#if defined(STEP_AVX512)
constexpr int kLanes = 16;
#elif defined(STEP_AVX2)
constexpr int kLanes = 8;
#elif defined(STEP_SVE)
constexpr int kLanes = __ARM_FEATURE_SVE_BITS / 32;
#else
constexpr int kLanes = 4;
#endif

// Whether there are 32 vector registers, or 16.
#if defined(STEP_AVX512) || !defined(__x86_64__)
constexpr bool kManyRegisters = true;
#else
constexpr bool kManyRegisters = false;
#endif

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntVec __attribute__((vector_size(4 * kLanes)));
typedef uint32_t BitVec __attribute__((vector_size(4 * kLanes)));
typedef float Vec4 __attribute__((vector_size(16)));
#if defined(STEP_SVE)
typedef svfloat32_t SveFloats __attribute__((arm_sve_vector_bits(__ARM_FEATURE_SVE_BITS)));
typedef svuint32_t SveBits __attribute__((arm_sve_vector_bits(__ARM_FEATURE_SVE_BITS)));
#endif

// The same in memory, at any address, whatever type was written there.
typedef float LooseVec __attribute__((vector_size(4 * kLanes), aligned(1), may_alias));
typedef uint32_t LooseBits __attribute__((vector_size(4 * kLanes), aligned(1), may_alias));

INLINE Vec loadVec(const void* p) { return *static_cast<const LooseVec*>(p); }
INLINE void storeVec(void* p, Vec v) { *static_cast<LooseVec*>(p) = v; }
INLINE BitVec loadBits(const void* p) { return *static_cast<const LooseBits*>(p); }
INLINE void storeBits(void* p, BitVec v) { *static_cast<LooseBits*>(p) = v; }

INLINE Vec broadcast(float value) { return value - Vec{}; }  // not value + 0, which makes +0 of -0
INLINE BitVec broadcastBits(uint32_t bits) { return bits | BitVec{}; }

#if defined(STEP_AVX512)
// For masked intrinsics in place of plain ones, which by g++ 12 read what was never written.
constexpr __mmask16 kAll = 0xffff;
#endif

INLINE Vec fma(Vec a, Vec b, Vec c) {
#if defined(STEP_AVX512)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(STEP_AVX2)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(STEP_SVE)
  return (Vec)svmla_f32_x(svptrue_b32(), (SveFloats)c, (SveFloats)a, (SveFloats)b);
#elif defined(__aarch64__)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}

// Of these two, b where one of the two is NaN.
INLINE Vec max(Vec a, Vec b) {
#if defined(STEP_AVX512)
  return _mm512_maskz_max_ps(kAll, a, b);
#elif defined(STEP_AVX2)
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

INLINE Vec min(Vec a, Vec b) {
#if defined(STEP_AVX512)
  return _mm512_maskz_min_ps(kAll, a, b);
#elif defined(STEP_AVX2)
  return _mm256_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}

// To the second-level cache: few lines can be on their way to the first one, which would bound what a core reads.
INLINE void prefetchFar(const void* p) { __builtin_prefetch(p, 0, 2); }
// What is read once: to the first-level cache by CPUs with bfloat16 and without tiles, AMD's, which wait for more lines.
INLINE void prefetchStream(const void* p) {
#if defined(STEP_AVX512_BF16) && !defined(STEP_AMX)
  __builtin_prefetch(p, 0, 3);
#else
  prefetchFar(p);
#endif
}

// Lane i of the result is lane Pattern::at(i) of a, or where that is not below kLanes, of b.
template <class Pattern, class V, size_t... I>
INLINE V shuffle(V a, V b, std::index_sequence<I...>) {
  return __builtin_shufflevector(a, b, Pattern::at(I)...);
}
template <class Pattern, class V>
INLINE V shuffle(V a, V b) {
  return shuffle<Pattern>(a, b, std::make_index_sequence<kLanes>());
}

// In each 128 bits, the first (Half 0) or second half of a's and b's, in turns of Width lanes.
template <int Width, int Half>
struct Unpack {
  static constexpr int at(int i) {
    const int inner = i % 4, fromB = inner / Width % 2;
    return i / 4 * 4 + Half * 2 + inner / (2 * Width) * Width + inner % Width + fromB * kLanes;
  }
};

// Lanes `By` further, round and round.
template <int By>
struct Rotate {
  static constexpr int at(int i) { return (i + By) % kLanes; }
};

template <int By = kLanes / 2, class V, class Operation>
INLINE auto reduce(V v, Operation operation) {
  if constexpr (By == 0) {
    return v[0];
  } else {
    return reduce<By / 2>(operation(v, shuffle<Rotate<By>>(v, v)), operation);
  }
}
INLINE float sumOf(Vec v) {
  return reduce(v, [](Vec a, Vec b) { return a + b; });
}
INLINE float maximumOf(Vec v) {
  return reduce(v, [](Vec a, Vec b) { return max(a, b); });
}
INLINE uint32_t orOf(BitVec v) {
  return reduce(v, [](BitVec a, BitVec b) { return a | b; });
}

}  // namespace
}  // namespace step
