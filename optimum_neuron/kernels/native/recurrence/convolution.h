// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "common/kernels.h"

namespace step {

// A token's output is the sum, over itself and the `past` tokens of its slot before it, of a channel's input times its weight.
struct ConvolveCall {
  Type type;                 // of inputs and state: kFloat32, kBFloat16 or kFloat16
  const void* inputs;        // [tokens, channels], elements of a token adjacent
  const float* weight;       // [past + 1, channels]; the last are for a token's own input
  const float* bias;         // [channels] or null
  const int32_t* slots;      // [tokens]; the number after the last slot: an idle token
  const int32_t* positions;  // [tokens]; what would be before position 0 is zero
  void* state;               // [slotCount + 1, past, channels], the last inputs; nothing of the last is read or written
  float* output;             // [tokens, channels]; of idle tokens zero
  int64_t tokens, channels, past, slotCount;
  int64_t stride;            // elements from a token's inputs to the next
};

// False: a slot is out of range, or its tokens do not stand side by side, and nothing was computed.
bool convolve(Pool& pool, const ConvolveCall& call);

}  // namespace step
