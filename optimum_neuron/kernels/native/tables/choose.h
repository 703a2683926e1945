// SPDX-License-Identifier: Apache-2.0
//
// Elements of rows by number: the largest of each, and those that an index names.
#pragma once

#include <cstdint>

#include "common/pool.h"

namespace step {

// The k largest of each row, the largest first, and their columns; of equal ones the first, and NaN before all others.
struct TopKCall {
  const float* from;  // [rows, columns]
  float* values;      // [rows, k]
  int32_t* index;     // [rows, k]
  int64_t rows, columns, k;
};

void findTopK(Pool& pool, const TopKCall& call);

// to[r, i] = from[r, index[r, i]]
struct GatherCall {
  const char* from;      // [rows, columns]
  char* to;              // [rows, count]
  const int32_t* index;  // [rows, count]
  int64_t rows, columns, count, bytes;  // bytes of an element
};

// False: an index is outside of its row, and nothing was copied.
bool gatherElements(const GatherCall& call);

// to[r] = from[r], but to[r, index[r, i]] = values[r, i], or one value where they are null
struct ScatterCall {
  const char* from;      // [rows, columns]
  char* to;              // [rows, columns]
  const int32_t* index;  // [rows, count]
  const char* values;    // [rows, count]
  int64_t rows, columns, count, bytes;
  int64_t value;         // its first bytes
};

// False: an index is outside of its row, and nothing was written.
bool scatterElements(const ScatterCall& call);

}  // namespace step
