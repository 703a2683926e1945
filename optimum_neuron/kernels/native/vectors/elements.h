// SPDX-License-Identifier: Apache-2.0
//
// The element types in memory: how vectors come from them and go to them, and in what form they are multiplied.
#pragma once

#include "vectors/convert.h"
#include "common/kernels.h"

namespace step {
namespace {

// Types with products in float32: packed operands are float32.
struct FloatWords {
  using Packed = float;
  using Words = Vec;
  static constexpr int64_t kPerWord = 1;

  static INLINE Words loadPacked(const void* p) { return loadVec(p); }
  static INLINE void storePacked(void* p, Words words) { storeVec(p, words); }
  // The word at p in every lane.
  static INLINE Words repeatPacked(const void* p) {
    float value;
    std::memcpy(&value, p, sizeof(value));
    return broadcast(value);
  }
  static INLINE void packFloats(void* p, Vec values) { storeVec(p, values); }
  static INLINE Vec multiplyAdd(Words a, Words b, Vec sum) { return fma(a, b, sum); }
};

// The first `count` elements, fewer than a vector has; the others are zero.
template <class Kind>
INLINE Vec loadSome(const typename Kind::Element* p, int64_t count) {
  typename Kind::Element elements[kLanes] = {};
  std::memcpy(elements, p, count * sizeof(elements[0]));
  return Kind::load(elements);
}

struct Float32 : FloatWords {
  using Element = float;

  static INLINE Vec load(const Element* p) { return loadVec(p); }
  static INLINE void store(Element* p, Vec values) { storeVec(p, values); }
  static INLINE Vec4 from4(const Element* p) { return Vec4{p[0], p[1], p[2], p[3]}; }
  static INLINE void to4(Element* p, Vec4 values) { std::memcpy(p, &values, sizeof(values)); }
  static INLINE Words loadWords(const Element* p) { return load(p); }
  static INLINE Words loadWords(const Element* p, int64_t count) { return loadSome<Float32>(p, count); }
};

struct Float16 : FloatWords {
  using Element = uint16_t;

  static INLINE Vec load(const Element* p) { return loadFloat16<kLanes>(p); }
  static INLINE void store(Element* p, Vec values) {
    *reinterpret_cast<Lanes<kLanes>::LooseHalves*>(p) = toFloat16<kLanes>(values);
  }
  static INLINE Vec4 from4(const Element* p) { return loadFloat16<4>(p); }
  static INLINE void to4(Element* p, Vec4 values) {
    *reinterpret_cast<Lanes<4>::LooseHalves*>(p) = toFloat16<4>(values);
  }
  static INLINE Words loadWords(const Element* p) { return load(p); }
  static INLINE Words loadWords(const Element* p, int64_t count) { return loadSome<Float16>(p, count); }
};

#if defined(STEP_AVX512_BF16) || defined(STEP_NEON_BF16)
// Words are pairs of bfloat16, multiplied and added in one step, in which subnormal numbers count as zero. NEON rounds
// each of its sums to odd, not to the nearest.
struct BFloat16Words {
  using Packed = uint16_t;
  using Words = BitVec;
  static constexpr int64_t kPerWord = 2;

  static INLINE Words loadPacked(const void* p) { return loadBits(p); }
  static INLINE void storePacked(void* p, Words words) { storeBits(p, words); }
  static INLINE Words repeatPacked(const void* p) {
    uint32_t word;
    std::memcpy(&word, p, sizeof(word));
    return broadcastBits(word);
  }
  static INLINE void packFloats(void* p, Vec values) {
    *static_cast<Lanes<kLanes>::LooseHalves*>(p) = toBFloat16<kLanes>(values);
  }
  static INLINE Vec multiplyAdd(Words a, Words b, Vec sum) {
#if defined(STEP_AVX512_BF16)
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#else
    return vbfdotq_f32(sum, (bfloat16x8_t)a, (bfloat16x8_t)b);
#endif
  }
  static INLINE Words loadWords(const uint16_t* p) { return loadBits(p); }
  static INLINE Words loadWords(const uint16_t* p, int64_t count) {
#if defined(STEP_AVX512_BF16)
    return (Words)_mm512_maskz_loadu_epi16((__mmask32{1} << count) - 1, p);
#else
    uint16_t elements[kLanes * kPerWord] = {};
    std::memcpy(elements, p, count * sizeof(elements[0]));
    return loadBits(elements);
#endif
  }
};
#endif

// bfloat16 with products in float32.
struct WideBFloat16Words : FloatWords {
  static INLINE Words loadWords(const uint16_t* p) { return loadBFloat16<kLanes>(p); }
  static INLINE Words loadWords(const uint16_t* p, int64_t count) {
    uint16_t elements[kLanes] = {};
    std::memcpy(elements, p, count * sizeof(elements[0]));
    return loadWords(elements);
  }
};
#if !defined(STEP_AVX512_BF16) && !defined(STEP_NEON_BF16)
using BFloat16Words = WideBFloat16Words;
#endif

template <class Products>
struct BFloat16Of : Products {
  using Element = uint16_t;

  static INLINE Vec load(const Element* p) { return loadBFloat16<kLanes>(p); }
  static INLINE void store(Element* p, Vec values) {
    *reinterpret_cast<Lanes<kLanes>::LooseHalves*>(p) = toBFloat16<kLanes>(values);
  }
  static INLINE Vec4 from4(const Element* p) { return loadBFloat16<4>(p); }
  static INLINE void to4(Element* p, Vec4 values) {
    *reinterpret_cast<Lanes<4>::LooseHalves*>(p) = toBFloat16<4>(values);
  }
};

using BFloat16 = BFloat16Of<BFloat16Words>;
using WideBFloat16 = BFloat16Of<WideBFloat16Words>;

// Up to 4 elements; those left out are zero.
template <class Kind>
INLINE Vec4 load4(const typename Kind::Element* p, int64_t count) {
  typename Kind::Element elements[4] = {};
  std::memcpy(elements, p, count * sizeof(elements[0]));
  return Kind::from4(elements);
}

template <class Kind>
INLINE void store4(typename Kind::Element* p, Vec4 values, int64_t count) {
  if (count == 4) {
    Kind::to4(p, values);
    return;
  }
  typename Kind::Element elements[4];
  Kind::to4(elements, values);
  std::memcpy(p, elements, count * sizeof(elements[0]));
}

// Calls body(Kind()) for the type of a call.
template <class Body>
void withKind(Type type, Body body) {
  switch (type) {
    case Type::kBFloat16:
      return body(BFloat16());
    case Type::kFloat16:
      return body(Float16());
    default:
      return body(Float32());
  }
}

}  // namespace
}  // namespace step
