// SPDX-License-Identifier: Apache-2.0
//
// Memory that is needed next, asked for in even parts while something else is computed.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/range.h"
#include "vectors/simd.h"

namespace step {
namespace {

struct Bytes {
  const void* begin = nullptr;
  int64_t count = 0;
};

class Ahead {
 public:
  Ahead(Bytes bytes, int64_t parts)
      : next_(static_cast<const char*>(bytes.begin)),
        end_(next_ + bytes.count),
        each_(divideUp(divideUp(bytes.count, kLine), parts) * kLine) {}

  void ask() {
    for (const char* end = next_ + std::min<int64_t>(each_, end_ - next_); next_ < end; next_ += kLine) {
      prefetchFar(next_);
    }
  }

 private:
  static constexpr int64_t kLine = 64;

  const char* next_;
  const char* const end_;
  const int64_t each_;
};

}  // namespace
}  // namespace step
