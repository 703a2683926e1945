// SPDX-License-Identifier: Apache-2.0
//
// Scales of groups as vectors: of a weight row those that lie side by side, or of a group those of several weight rows.
#pragma once

#include <cstdint>

#include "codes.h"
#include "rounded.h"
#include "transpose.h"

namespace step {
namespace {

// Up to kLanes scales as float32; those behind the last are zero.
INLINE Vec loadScales(Type type, const void* from, int64_t count) {
#if defined(STEP_AVX512)
  const __mmask16 used = (1u << count) - 1;
  if (type == Type::kFloat32) {
    return _mm512_maskz_loadu_ps(used, from);
  }
  const __m256i halves = _mm256_maskz_loadu_epi16(used, from);
  return type == Type::kFloat16 ? (Vec)_mm512_maskz_cvtph_ps(kAll, halves)
                                : (Vec)((BitVec)_mm512_maskz_cvtepu16_epi32(kAll, halves) << 16);
#else
  Vec result{};
  withKind(type, [&](auto kind) {
    using Own = decltype(kind);
    result = loadUpTo<Own>(static_cast<const typename Own::Element*>(from), count);
  });
  return result;
#endif
}

// Up to kLanes groups from `group` on, of `outputs` weight rows from `first` on that have `groups` each.
struct GroupScalesOf {
  int64_t first, outputs, groups, group, count;
};

// Writes a vector for each of these groups; outputs that are missing are copies of the last one. Memory is asked for those that follow, too.
INLINE void loadGroups(float* to, Type type, const void* from, const GroupScalesOf& of) {
  const int64_t size = sizeOf(type), row = of.groups * size;
  const char* p = static_cast<const char*>(from) + of.first * row + of.group * size;
  Vec groups[kLanes];
  forEach<kLanes>([&](auto i) __attribute__((always_inline)) {
    groups[i] = loadScales(type, p, of.count);
    prefetchFar(p + kLanes * row);
    p += i + 1 < of.outputs ? row : 0;
  });
  transpose(groups);
  forEach<kLanes>([&](auto i) __attribute__((always_inline)) {
    if (i < of.count) {
      storeVec(to + i * kLanes, groups[i]);
    }
  });
}

}  // namespace
}  // namespace step
