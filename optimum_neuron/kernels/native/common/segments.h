// SPDX-License-Identifier: Apache-2.0
//
// The tokens of a step by their slots.
#pragma once

#include <algorithm>
#include <cstdint>

namespace step {
namespace {

// Tokens of a slot that stand side by side, but for idle ones: `count` places from `first` on in the list of live tokens.
struct Segment {
  int64_t slot, first, count;
};

struct Segments {
  int32_t* tokens;  // those that are live
  Segment* list;
  int64_t count;

  int64_t live() const { return count == 0 ? 0 : list[count - 1].first + list[count - 1].count; }

  // Of the memory that `find` takes.
  static int64_t bytes(int64_t size, int64_t slotCount) {
    return std::min(size, slotCount) * sizeof(Segment) + size * sizeof(int32_t) + slotCount;
  }

  // From the slot of each of `size` tokens; `slotCount` is that of an idle one. False where a slot is out of range, or comes again
  // after another.
  bool find(void* memory, const int32_t* slots, int64_t size, int64_t slotCount) {
    list = static_cast<Segment*>(memory);
    tokens = reinterpret_cast<int32_t*>(list + std::min(size, slotCount));
    char* seen = reinterpret_cast<char*>(tokens + size);
    std::fill_n(seen, slotCount, 0);
    int64_t place = 0;
    count = 0;
    for (int64_t t = 0; t < size; ++t) {
      const int64_t slot = slots[t];
      if (slot < 0 || slot > slotCount) {
        return false;
      }
      if (slot == slotCount) {
        continue;
      }
      if (count == 0 || list[count - 1].slot != slot) {
        if (seen[slot]) {
          return false;
        }
        seen[slot] = 1;
        list[count++] = {slot, place, 0};
      }
      ++list[count - 1].count;
      tokens[place++] = static_cast<int32_t>(t);
    }
    return true;
  }
};

}  // namespace
}  // namespace step
