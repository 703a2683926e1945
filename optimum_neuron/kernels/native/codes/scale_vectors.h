// SPDX-License-Identifier: Apache-2.0
//
// Scales of groups as vectors: of a weight row those that lie side by side, or of a group those of several weight rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "codes/codes.h"
#include "rounded/rounded.h"
#include "vectors/transpose.h"

namespace step {
namespace {

// Up to kLanes scales of a type as float32; those after the last are zero.
template <class Kind>
INLINE Vec loadScalesOf(const void* from, int64_t count) {
#if defined(STEP_AVX512)
  const __mmask16 used = (1u << count) - 1;
  if constexpr (sizeof(typename Kind::Element) == sizeof(float)) {
    return _mm512_maskz_loadu_ps(used, from);
  } else {
    const __m256i halves = _mm256_maskz_loadu_epi16(used, from);
    return std::is_same_v<Kind, Float16> ? (Vec)_mm512_maskz_cvtph_ps(kAll, halves)
                                         : (Vec)((BitVec)_mm512_maskz_cvtepu16_epi32(kAll, halves) << 16);
  }
#else
  return loadUpTo<Kind>(static_cast<const typename Kind::Element*>(from), count);
#endif
}
INLINE Vec loadScales(Type type, const void* from, int64_t count) {
  Vec result{};
  withKind(type, [&](auto kind) { result = loadScalesOf<decltype(kind)>(from, count); });
  return result;
}

// Groups from `group` to `end`, of `outputs` weight rows from `first` on that have `groups` each.
struct GroupScalesOf {
  int64_t first, outputs, groups, group, end;
};

// Writes a vector for each of these groups, and on to a multiple of kLanes anything; outputs that are missing are copies of the last one.
// Memory is asked for those that follow, too.
template <class Kind>
void loadGroupsOf(float* to, const typename Kind::Element* from, const GroupScalesOf& of) {
  for (int64_t group = of.group; group < of.end; group += kLanes) {
    // Vectors are whole where there are so many groups: the last one takes some again that lie before it.
    const int64_t begin = std::max<int64_t>(std::min(group, of.groups - kLanes), 0), count = std::min<int64_t>(of.groups, kLanes);
    const auto* p = from + of.first * of.groups + begin;
    Vec scales[kLanes];
    forEach<kLanes>([&](auto i) __attribute__((always_inline)) {
      scales[i] = loadScalesOf<Kind>(p, count);
      prefetchFar(p + kLanes * of.groups);
      p += i + 1 < of.outputs ? of.groups : 0;
    });
    transpose(scales);
    const int64_t again = group - begin;
    forEach<kLanes>([&](auto i) __attribute__((always_inline)) {
      if (i >= again) {
        storeVec(to + (i - again) * kLanes, scales[i]);
      }
    });
    to += kLanes * kLanes;
  }
}
inline void loadGroups(float* to, Type type, const void* from, const GroupScalesOf& of) {
  withKind(type, [&](auto kind) {
    using Kind = decltype(kind);
    loadGroupsOf<Kind>(to, static_cast<const typename Kind::Element*>(from), of);
  });
}

}  // namespace
}  // namespace step
