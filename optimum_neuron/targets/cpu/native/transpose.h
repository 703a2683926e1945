// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "simd.h"

namespace step {
namespace {

// Of the 128-bit parts of a and b, the even (Odd 0) or odd ones.
template <int Odd>
struct Parts {
  static constexpr int at(int i) { return (i / 4 * 2 + Odd) * 4 + i % 4; }
};

// Lane j of r[i] becomes lane i of r[j].
template <class V>
INLINE void transpose(V (&r)[kLanes]) {
  V t[kLanes];
  UNROLL for (int i = 0; i < kLanes; i += 2) {
    t[i] = shuffle<Unpack<1, 0>>(r[i], r[i + 1]);
    t[i + 1] = shuffle<Unpack<1, 1>>(r[i], r[i + 1]);
  }
  UNROLL for (int i = 0; i < kLanes; i += 4) {
    r[i] = shuffle<Unpack<2, 0>>(t[i], t[i + 2]);
    r[i + 1] = shuffle<Unpack<2, 1>>(t[i], t[i + 2]);
    r[i + 2] = shuffle<Unpack<2, 0>>(t[i + 1], t[i + 3]);
    r[i + 3] = shuffle<Unpack<2, 1>>(t[i + 1], t[i + 3]);
  }
  // Now 128 bits of r[i] are four rows of a column: columns i, i + 4 and so on.
  if constexpr (kLanes == 8) {
    UNROLL for (int i = 0; i < 4; ++i) {
      const V even = shuffle<Parts<0>>(r[i], r[i + 4]);
      r[i + 4] = shuffle<Parts<1>>(r[i], r[i + 4]);
      r[i] = even;
    }
  }
  if constexpr (kLanes == 16) {
    UNROLL for (int i = 0; i < 4; ++i) {
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
}

}  // namespace
}  // namespace step
