// SPDX-License-Identifier: Apache-2.0
//
// Quantized weights: where the codes of a weight row lie, and how they become numbers of float32 in registers. A code stands for
// code * scale + shift of its group, computed in float32.
//
// Numbers are unpacked block by block. A block of codes of 4 bits is two vectors, that of the low halves of its bytes and that of the
// high ones, and rows of x are packed in the same order. A group that is no multiple of a block is filled up with zeros of x.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "vectors/elements.h"
#include "common/range.h"

namespace step {
namespace {

constexpr bool isPacked(Coding coding) { return coding == Coding::kInt4 || coding == Coding::kFp4; }

constexpr int64_t bytesOf(Coding coding, int64_t codes) { return isPacked(coding) ? codes / 2 : codes; }

// Of all weight rows of a call, in columns.
struct CodeForm {
  Coding coding;
  int64_t group;  // even, where two codes share a byte
  int64_t block;
  int64_t groups;

  int64_t paddedGroup() const { return roundUp(group, block); }
  int64_t padded() const { return groups * paddedGroup(); }
  int64_t rowBytes() const { return bytesOf(coding, groups * group); }
};

inline CodeForm formOf(Coding coding, int64_t columns, int64_t group, int64_t block) {
  return {coding, group, block, columns / group};
}

// Whether any weight of a call has shifts.
inline bool hasShift(const LinearsCall& call) {
  return std::any_of(call.linears, call.linears + call.count, [](const Linear& each) { return each.scales.shift; });
}
inline bool hasShift(const ExpertsCall& call) { return call.scales.shift; }

typedef uint8_t LaneBytes __attribute__((vector_size(kLanes)));

// kLanes bytes, each in 32 bits.
INLINE BitVec loadBytes(const uint8_t* p) {
  LaneBytes bytes;
  std::memcpy(&bytes, p, sizeof(bytes));
#if defined(STEP_AVX512)
  return (BitVec)_mm512_maskz_cvtepu8_epi32(kAll, (__m128i)bytes);
#elif defined(STEP_AVX2)
  return (BitVec)_mm256_cvtepu8_epi32(_mm_set_epi64x(0, (int64_t)bytes));
#else
  return __builtin_convertvector(bytes, BitVec);
#endif
}

// Fewer than kLanes bytes, and zeros up to so many.
INLINE void copySome(uint8_t* to, const uint8_t* from, int64_t count) {
#if defined(STEP_AVX512)
  const __mmask16 used = (1u << count) - 1;
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_maskz_loadu_epi8(used, from));
#else
  std::memset(to, 0, kLanes);
  std::memcpy(to, from, count);
#endif
}

// kLanes bytes, each in 32 bits, with a sign.
INLINE BitVec loadSignedBytes(const uint8_t* p) {
#if defined(STEP_AVX512)
  return (BitVec)_mm512_maskz_cvtepi8_epi32(kAll, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(STEP_AVX2)
  return (BitVec)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  return (BitVec)((IntVec)(loadBytes(p) << 24) >> 24);
#endif
}

INLINE Vec toFloats(IntVec values) {
#if defined(STEP_AVX512)
  return _mm512_maskz_cvtepi32_ps(kAll, (__m512i)values);
#else
  return __builtin_convertvector(values, Vec);
#endif
}

// Numbers of a sign, an exponent of this bias and a mantissa of so many bits; the exponent 0 has those below the normal ones.
template <int Mantissa, int Bias>
INLINE Vec fromMinifloat(BitVec magnitude, BitVec sign) {
  const Vec biased = (Vec)((magnitude << (23 - Mantissa)) + ((127u - Bias) << 23));
  // Of a subnormal number the leading one is not there: what it was taken for, less the one's value, is its half.
  const Vec half = biased - (Vec)broadcastBits((127u - Bias) << 23);
  const Vec value = (IntVec)magnitude < (1 << Mantissa) ? half + half : biased;
  return (Vec)((BitVec)value | sign);
}

// What the lowest bits of a lane are as a number, and of 8 bits, how a lane gets them.
template <Coding C>
struct Codes;

template <>
struct Codes<Coding::kInt8> {
  static INLINE BitVec load(const uint8_t* p) { return loadSignedBytes(p); }
  static INLINE Vec value(BitVec code) { return toFloats((IntVec)code); }
};
template <>
struct Codes<Coding::kFp8> {
  static INLINE BitVec load(const uint8_t* p) { return loadBytes(p); }
  static INLINE Vec value(BitVec code) {
    const BitVec magnitude = code & 0x7f;
    const Vec value = fromMinifloat<3, 7>(magnitude, (code & 0x80) << 24);
    return magnitude == 0x7f ? broadcast(std::numeric_limits<float>::quiet_NaN()) : value;
  }
};
template <>
struct Codes<Coding::kInt4> {
  static INLINE Vec value(BitVec code) { return toFloats((IntVec)(code & 15)); }
};
template <>
struct Codes<Coding::kFp4> {
  static INLINE Vec value(BitVec code) { return fromMinifloat<1, 1>(code & 7, (code & 8) << 28); }
};

// What a code of int4 stands for without a shift is itself less this.
constexpr float kInt4Middle = 8;

// All codes of 4 bits as numbers, where a register holds so many; of others nothing.
template <Coding C>
INLINE Vec tableOf() {
#if defined(STEP_AVX512)
  if constexpr (isPacked(C)) {
    alignas(64) static constexpr uint32_t kCodes[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return Codes<C>::value(loadBits(kCodes));
  }
#endif
  return Vec{};
}

// Codes of a group as what they stand for.
template <Coding C>
class Numbers {
 public:
#if defined(STEP_AVX512)
  static constexpr bool kHasTable = isPacked(C);
#else
  static constexpr bool kHasTable = false;
#endif

  INLINE Numbers(Vec table, float scale, float shift)
      : scale_(kHasTable ? fma(table, broadcast(scale), broadcast(shift)) : broadcast(scale)), shift_(broadcast(shift)) {}

  // Of a code the lowest bits count, as many as it has.
  INLINE Vec operator()(BitVec codes) const {
#if defined(STEP_AVX512)
    if constexpr (kHasTable) {
      return _mm512_maskz_permutexvar_ps(kAll, (__m512i)codes, scale_);
    }
#endif
    return fma(Codes<C>::value(codes), scale_, shift_);
  }

  // Unpacks a block: a vector, or of 4 bits two, `stride` floats apart.
  INLINE void operator()(float* to, int64_t stride, const uint8_t* codes) const {
    if constexpr (isPacked(C)) {
      const BitVec pairs = loadBytes(codes);
      storeVec(to, (*this)(pairs));
      storeVec(to + stride, (*this)(pairs >> 4));
    } else {
      storeVec(to, (*this)(Codes<C>::load(codes)));
    }
  }

 private:
  Vec scale_, shift_;
};

constexpr int64_t sizeOf(Type type) { return type == Type::kFloat32 ? 4 : 2; }

// Numbers of float32, bfloat16 or float16 as float32.
inline void widen(float* to, Type type, const void* from, int64_t count) {
  withKind(type, [&](auto kind) {
    using Kind = decltype(kind);
    const auto* elements = static_cast<const typename Kind::Element*>(from);
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      storeVec(to + i, Kind::load(elements + i));
    }
    if (i < count) {
      const Vec last = loadSome<Kind>(elements + i, count - i);
      std::memcpy(to + i, &last, (count - i) * sizeof(float));
    }
  });
}

// Columns of a row that are unpacked at a time, at most, and the groups that they can be in.
constexpr int64_t kUnpackedColumns = 1024, kUnpackedGroups = kUnpackedColumns / kLanes + 2;

// Some groups of a row: their scales, and what is added to a code's product with them.
struct GroupScales {
  float scales[kUnpackedGroups], shifts[kUnpackedGroups];

  GroupScales(const Scales& all, Coding coding, int64_t first, int64_t count) {
    const int64_t size = sizeOf(all.type);
    const char* scale = static_cast<const char*>(all.scale) + first * size;
    widen(scales, all.type, scale, count);
    prefetchFar(scale + kTileAhead);
    if (all.shift) {
      std::memcpy(shifts, all.shift + first, count * sizeof(float));
      prefetchFar(reinterpret_cast<const char*>(all.shift + first) + kTileAhead);
      return;
    }
    for (int64_t g = 0; g < count; ++g) {
      // Adding -0 changes no value. With codes of int4, less their middle, one rounding is left as without it.
      shifts[g] = coding == Coding::kInt4 ? -kInt4Middle * scales[g] : -0.0f;
    }
  }

 private:
  static constexpr int64_t kTileAhead = 1024;
};

// Writes `columns` unpacked columns of a row, which are whole blocks, `stride` floats from a vector to the next. Asks memory for the
// codes `ahead` bytes further.
template <Coding C>
void unpackCodes(
    float* to, int64_t stride, const uint8_t* codes, const GroupScales& scales, const CodeForm& form, Range columns,
    int64_t ahead) {
  constexpr int64_t block = isPacked(C) ? 2 * kLanes : kLanes;
  const Vec table = tableOf<C>();
  const int64_t group = form.group, padded = form.paddedGroup();
  int64_t in = columns.begin % padded;
  codes += bytesOf(C, columns.begin / padded * group + in);
  const float *scale = scales.scales, *shift = scales.shifts;
  for (int64_t left = columns.end - columns.begin; left > 0; in = 0) {
    const Numbers<C> numbers(table, *scale++, *shift++);
    const int64_t count = std::min(left, padded - in), whole = std::min(count, (group - in) / block * block);
    left -= count;
    for (int64_t k = 0; k < whole; k += block, to += block / kLanes * stride, codes += bytesOf(C, block)) {
      prefetchFar(codes + ahead);
      numbers(to, stride, codes);
    }
    if (whole < count) {  // the group ends within a block
      uint8_t copy[kLanes];
      const int64_t rest = bytesOf(C, group - in - whole);
      copySome(copy, codes, rest);
      numbers(to, stride, copy);
      to += block / kLanes * stride;
      codes += rest;
    }
  }
}

// Columns of weight row `row`; the codes of all rows begin at `codes`.
inline void unpackRow(
    float* to, int64_t stride, const uint8_t* codes, const Scales& scales, int64_t row, const CodeForm& form,
    Range columns, int64_t ahead) {
  static constexpr void (*kUnpackers[])(
      float*, int64_t, const uint8_t*, const GroupScales&, const CodeForm&, Range, int64_t) = {
      unpackCodes<Coding::kInt8>, unpackCodes<Coding::kInt4>, unpackCodes<Coding::kFp8>, unpackCodes<Coding::kFp4>};
  const int64_t first = columns.begin / form.paddedGroup();
  const int64_t count = divideUp(columns.end, form.paddedGroup()) - first;
  const GroupScales own(scales, form.coding, row * form.groups + first, count);
  kUnpackers[static_cast<int>(form.coding) - 1](
      to, stride, codes + row * form.rowBytes(), own, form, columns, ahead);
}

// A vector of which there may be less, or nothing.
template <class Kind>
INLINE Vec loadUpTo(const typename Kind::Element* p, int64_t count) {
  return count >= kLanes ? Kind::load(p) : count > 0 ? loadSome<Kind>(p, count) : Vec{};
}

// Rows of x as packRows() packs them, in the order and with the gaps of unpacked columns.
template <class Kind>
void packForCodes(
    typename Kind::Packed* to, const typename Kind::Element* const* from, int64_t rows, const CodeForm& form) {
  struct Even {
    static constexpr int at(int i) { return 2 * i; }
  };
  struct Odd {
    static constexpr int at(int i) { return 2 * i + 1; }
  };
  for (int64_t g = 0; g < form.groups; ++g) {
    for (int64_t k = 0; k < form.group; k += form.block) {
      for (int64_t m = 0; m < rows; ++m, to += kLanes) {
        const auto* x = from[m] + g * form.group + k;
        const Vec first = loadUpTo<Kind>(x, form.group - k);
        if (form.block == kLanes) {
          storeVec(to, first);
          continue;
        }
        const Vec second = loadUpTo<Kind>(x + kLanes, form.group - k - kLanes);
        storeVec(to, shuffle<Even>(first, second));
        storeVec(to + rows * kLanes, shuffle<Odd>(first, second));
      }
      to += form.block == kLanes ? 0 : rows * kLanes;
    }
  }
}

}  // namespace
}  // namespace step
