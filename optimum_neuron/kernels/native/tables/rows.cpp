// SPDX-License-Identifier: Apache-2.0
#include "tables/rows.h"

#include <cstring>

namespace step {

namespace {

template <class Index>
bool select(Pool& pool, const SelectCall& call) {
  const auto* index = static_cast<const Index*>(call.index);
  const auto row = [&](int64_t i) -> int64_t { return index[i] < 0 && call.wraps ? index[i] + call.size : index[i]; };
  for (int64_t i = 0; i < call.count; ++i) {
    if (row(i) < 0 || row(i) >= call.size) {
      return false;
    }
  }
  constexpr int64_t kGrainBytes = 256 * 1024;
  const int64_t copies = call.outer * call.count;
  const int64_t each = call.bytes >= kGrainBytes ? 1 : kGrainBytes / call.bytes;
  pool.run((copies + each - 1) / each, [&](int64_t task, int) {
    for (int64_t i = task * each; i < copies && i < (task + 1) * each; ++i) {
      const int64_t number = row(i % call.count);
      if (number >= 0 && number < call.size) {  // checked where it is used, too: what was copied may lie over it
        const int64_t from = i / call.count * call.size + number;
        std::memcpy(call.to + i * call.bytes, call.from + from * call.bytes, call.bytes);
      }
    }
  });
  return true;
}

}  // namespace

bool selectRows(Pool& pool, const SelectCall& call) {
  return call.indexType == Type::kInt32 ? select<int32_t>(pool, call) : select<int64_t>(pool, call);
}

bool writeCache(Pool& pool, const WriteCall& call) {
  const int64_t* places = placesOf(pool, call);
  for (int64_t t = 0; places && t < call.tokens; ++t) {
    for (int64_t head = 0; head < call.heads; ++head) {
      const int64_t place = places[t] + head * call.length;
      std::memcpy(
          call.cache + place * call.bytes, call.states + t * call.tokenStride + head * call.headStride, call.bytes);
    }
  }
  return places != nullptr;
}

}  // namespace step
