// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "vectors/simd.h"

namespace step {
namespace {

// Of the 128-bit parts of a and b, the even (Odd 0) or odd ones.
template <int Odd>
struct Parts {
  static constexpr int at(int i) { return (i / 4 * 2 + Odd) * 4 + i % 4; }
};

// As Unpack<2, Half>, by which g++ does not find the instruction.
template <int Half, class V>
INLINE V unpackPairs(V a, V b) {
  typedef uint64_t Pairs __attribute__((vector_size(sizeof(V))));
  struct Pattern {
    static constexpr int at(int i) { return i / 2 * 2 + Half + i % 2 * kLanes / 2; }
  };
  return (V)shuffle<Pattern>((Pairs)a, (Pairs)b, std::make_index_sequence<kLanes / 2>());
}

// Of r, four vectors at a time: 128 bits of r[i] become four rows of a column: columns i, i + 4 and so on.
template <class V>
INLINE void transposeFours(V (&r)[kLanes]) {
  UNROLL for (int i = 0; i < kLanes; i += 4) {
    const V t0 = shuffle<Unpack<1, 0>>(r[i], r[i + 1]), t1 = shuffle<Unpack<1, 1>>(r[i], r[i + 1]);
    const V t2 = shuffle<Unpack<1, 0>>(r[i + 2], r[i + 3]), t3 = shuffle<Unpack<1, 1>>(r[i + 2], r[i + 3]);
    r[i] = unpackPairs<0>(t0, t2);
    r[i + 1] = unpackPairs<1>(t0, t2);
    r[i + 2] = unpackPairs<0>(t1, t3);
    r[i + 3] = unpackPairs<1>(t1, t3);
  }
}

// After that, every fourth vector from r[i] on becomes a column.
template <int i, class V>
INLINE void transposeParts(V (&r)[kLanes]) {
  if constexpr (kLanes == 8) {
    const V even = shuffle<Parts<0>>(r[i], r[i + 4]);
    r[i + 4] = shuffle<Parts<1>>(r[i], r[i + 4]);
    r[i] = even;
  }
  if constexpr (kLanes == 16) {
    const V even0 = shuffle<Parts<0>>(r[i], r[i + 4]);
    const V even1 = shuffle<Parts<0>>(r[i + 8], r[i + 12]);
    const V odd0 = shuffle<Parts<1>>(r[i], r[i + 4]);
    const V odd1 = shuffle<Parts<1>>(r[i + 8], r[i + 12]);
    r[i] = shuffle<Parts<0>>(even0, even1);
    r[i + 4] = shuffle<Parts<0>>(odd0, odd1);
    r[i + 8] = shuffle<Parts<1>>(even0, even1);
    r[i + 12] = shuffle<Parts<1>>(odd0, odd1);
  }
}

// Lane j of r[i] becomes lane i of r[j].
template <class V>
INLINE void transpose(V (&r)[kLanes]) {
  transposeFours(r);
  transposeParts<0>(r);
  transposeParts<1>(r);
  transposeParts<2>(r);
  transposeParts<3>(r);
}

}  // namespace
}  // namespace step
