// SPDX-License-Identifier: Apache-2.0
//
// The on-device sampler of step/sampling/sampler.py, which says what it computes: the same token from the same numbers.
#pragma once

#include <cstdint>

#include "common/pool.h"

namespace step {

struct SampleCall {
  const float* logits;    // [rows, vocab], elements of a row adjacent
  const float* params;    // [rows, 4]: top_k, top_p, temperature, min_p
  const float* uniforms;  // [rows]
  int32_t* tokens;        // [rows]
  int64_t rows, vocab, stride;  // stride: elements from a row of logits to the next
};

void sample(Pool& pool, const SampleCall& call);

}  // namespace step
