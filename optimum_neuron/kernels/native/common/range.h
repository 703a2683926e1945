// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>

namespace step {
namespace {

struct Range {
  int64_t begin, end;
};

inline Range shift(Range range, int64_t by) { return {range.begin + by, range.end + by}; }

// Part `i` of `count` even parts of a range that begins at 0.
inline Range part(int64_t size, int64_t i, int64_t count) { return {size * i / count, size * (i + 1) / count}; }

constexpr int64_t divideUp(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int64_t roundUp(int64_t a, int64_t multiple) { return divideUp(a, multiple) * multiple; }

// The same where parts begin at multiples of `unit`.
inline Range part(int64_t size, int64_t i, int64_t count, int64_t unit) {
  const Range units = part(divideUp(size, unit), i, count);
  return {std::min(units.begin * unit, size), std::min(units.end * unit, size)};
}

}  // namespace
}  // namespace step
