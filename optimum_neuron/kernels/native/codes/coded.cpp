// SPDX-License-Identifier: Apache-2.0
//
// Linear layers and experts with weights that are codes: y = x @ (codes * scale + shift).T + bias. Products are summed in float32, and what a
// code stands for is never rounded to a type of fewer bits. Where a call asks for it, rows of x become codes too (rounded.cpp).
//
// Contracts: those of linears.cpp and experts.cpp.
#include "linear/experts_run.h"
#include "linear/linears_run.h"
#if defined(STEP_AMX)
#include "codes/linear_codes_amx.h"
#endif

namespace step {

namespace {

// What computes with codes: where there is no AMX, products are taken in float32.
template <class Kind>
struct CodesWorkerOf {
  using Type = BlockWorker<Kind, true>;
};
template <>
struct CodesWorkerOf<BFloat16> {
#if defined(STEP_AMX)
  using Type = AmxCodesWorker;
#else
  using Type = BlockWorker<WideBFloat16, true>;
#endif
};

template <class Kind>
using CodesWorker = typename CodesWorkerOf<Kind>::Type;

}  // namespace

void codedLinears(Pool& pool, const LinearsCall& call) {
  if (call.activations == Coding::kInt8) {
    return roundedLinears(pool, call);
  }
  withKind(call.type, [&](auto kind) { computeLinears<CodesWorker<decltype(kind)>>(pool, call); });
}

void codedExperts(Pool& pool, const ExpertsCall& call) {
  if (call.activations == Coding::kInt8) {
    return roundedExperts(pool, call);
  }
  withKind(call.type, [&](auto kind) { computeExperts<CodesWorker<decltype(kind)>>(pool, call); });
}

}  // namespace step
