// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "common/pool.h"

namespace step {

// Per head a state S [keyDim, valueDim], and of each token of its slot, in order:
//   S = decay * S;  d = value, or share * (value - key . S);  S = S + key x d;  output = query . S
// With a share it is the gated delta rule, without one linear attention and the scan of state-space models.
struct WalkCall {
  const float *query, *key;  // [tokens, keyHeads, keyDim]; head h has those of key head h * keyHeads / heads
  const float* value;        // [tokens, heads, valueDim]
  const float* decay;        // [tokens, heads, decays]; decays is 1, or keyDim: one for each row of S
  const float* share;        // [tokens, heads] or null
  const float* rates;        // [keyDim, valueDim] or null; then decays is valueDim, and S decays by exp(rates * decay)
  const int32_t* slots;      // [tokens]; the number after the last slot: an idle token
  const int32_t* positions;  // [tokens]; a slot with its first token at 0 begins with a state of zeros
  float* state;              // [slotCount + 1, heads, keyDim, valueDim]; nothing of the last is read or written
  float* output;             // [tokens, heads, valueDim]; of idle tokens zero
  int64_t tokens, heads, keyHeads, keyDim, valueDim, decays, slotCount;
};

// False: a slot is out of range, or its tokens do not stand side by side, and nothing was computed.
bool walk(Pool& pool, const WalkCall& call);

}  // namespace step
