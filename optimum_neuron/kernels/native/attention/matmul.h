// SPDX-License-Identifier: Apache-2.0
//
// Products of matrices that steps compute, as of attention that a model writes out.
#pragma once

#include <cstdint>

#include "common/pool.h"

namespace step {

// output[i] = left[i] * right[i], all contiguous. Sums are taken in order: a row's bits depend on no other row.
struct MatMulCall {
  const float* left;   // [matrices, rows, inner]
  const float* right;  // [matrices, inner, columns]
  float* output;       // [matrices, rows, columns]
  int64_t matrices, rows, inner, columns;
};

void multiplyMatrices(Pool& pool, const MatMulCall& call);

}  // namespace step
