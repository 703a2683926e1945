// SPDX-License-Identifier: Apache-2.0
//
// What computes a linear layer of a type: what `linears` and `expertLinear` have in common.
#pragma once

#include "linear/linear_block.h"
#if defined(STEP_AMX)
#include "linear/linear_amx.h"
#endif

namespace step {
namespace {

template <class Kind>
struct WorkerOf {
  using Type = BlockWorker<Kind>;
};
#if defined(STEP_AMX)
template <>
struct WorkerOf<BFloat16> {
  using Type = AmxWorker;
};
#endif

template <class Kind>
using LinearWorker = typename WorkerOf<Kind>::Type;

}  // namespace
}  // namespace step
