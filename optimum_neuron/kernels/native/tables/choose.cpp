// SPDX-License-Identifier: Apache-2.0
#include "tables/choose.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace step {

namespace {

bool isInside(const int32_t* index, int64_t count, int64_t columns) {
  return std::all_of(index, index + count, [&](int32_t each) { return each >= 0 && each < columns; });
}

}  // namespace

void findTopK(Pool& pool, const TopKCall& call) {
  constexpr int64_t kGrain = 16 * 1024;  // elements of a task
  const int64_t each = std::max<int64_t>(kGrain / std::max<int64_t>(call.columns, 1), 1);
  pool.run((call.rows + each - 1) / each, [&](int64_t task, int worker) {
    auto* order = static_cast<int32_t*>(pool.scratch(worker, call.columns * sizeof(int32_t)));
    for (int64_t row = task * each; row < std::min(call.rows, (task + 1) * each); ++row) {
      const float* from = call.from + row * call.columns;
      std::iota(order, order + call.columns, 0);
      std::partial_sort(order, order + call.k, order + call.columns, [&](int32_t a, int32_t b) {
        const float x = from[a], y = from[b];
        const bool isNan = x != x, otherIsNan = y != y;
        if (isNan != otherIsNan) {
          return isNan;
        }
        return x > y || (!(x < y) && a < b);
      });
      for (int64_t i = 0; i < call.k; ++i) {
        call.index[row * call.k + i] = order[i];
        call.values[row * call.k + i] = from[order[i]];
      }
    }
  });
}

bool gatherElements(const GatherCall& call) {
  if (!isInside(call.index, call.rows * call.count, call.columns)) {
    return false;
  }
  for (int64_t row = 0; row < call.rows; ++row) {
    const char* from = call.from + row * call.columns * call.bytes;
    for (int64_t i = row * call.count; i < (row + 1) * call.count; ++i) {
      std::memcpy(call.to + i * call.bytes, from + call.index[i] * call.bytes, call.bytes);
    }
  }
  return true;
}

bool scatterElements(const ScatterCall& call) {
  if (!isInside(call.index, call.rows * call.count, call.columns)) {
    return false;
  }
  const int64_t rowBytes = call.columns * call.bytes;
  for (int64_t row = 0; row < call.rows; ++row) {
    char* to = call.to + row * rowBytes;
    std::memcpy(to, call.from + row * rowBytes, rowBytes);
    for (int64_t i = row * call.count; i < (row + 1) * call.count; ++i) {
      const void* value = call.values ? call.values + i * call.bytes : static_cast<const void*>(&call.value);
      std::memcpy(to + call.index[i] * call.bytes, value, call.bytes);
    }
  }
  return true;
}

}  // namespace step
