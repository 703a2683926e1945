// SPDX-License-Identifier: Apache-2.0
//
// Linear layers and experts with weights that are codes of int8 or int4, and rows of x that are rounded to codes of int8 (rounded.h), as
// step/features/codes/activations.py defines them.
//
// Contracts: those of linears.cpp and experts.cpp; and a row's bits are the same for all instruction sets.
#include "linear/experts_run.h"
#include "rounded/linear_rounded_lanes.h"
#include "linear/linears_run.h"
#if defined(STEP_AMX)
#include "rounded/linear_rounded_amx.h"
#endif

namespace step {

namespace {

#if defined(STEP_AMX)
// Up to so many rows a vector meets in less time than a tile register does, which short blocks fill by half.
template <class Call>
int64_t vectorRows(const Call& call) {
  return call.group < kRoundedBlock ? 8 : 4;
}

template <class Kind>
using ManyRows = RoundedAmxWorker<Kind>;
#else
template <class Call>
int64_t vectorRows(const Call&) {
  return std::numeric_limits<int64_t>::max();
}

template <class Kind>
using ManyRows = RoundedLanesWorker<Kind>;
#endif

}  // namespace

void roundedLinears(Pool& pool, const LinearsCall& call) {
  withKind(call.type, [&](auto kind) {
    if (call.rows <= vectorRows(call)) {
      computeLinears<RoundedLanesWorker<decltype(kind)>>(pool, call);
    } else {
      computeLinears<ManyRows<decltype(kind)>>(pool, call);
    }
  });
}

void roundedExperts(Pool& pool, const ExpertsCall& call) {
  withKind(call.type, [&](auto kind) {
    if (call.tokens * call.k / call.experts <= vectorRows(call)) {
      computeExperts<RoundedLanesWorker<decltype(kind)>>(pool, call);
    } else {
      computeExperts<ManyRows<decltype(kind)>>(pool, call);
    }
  });
}

}  // namespace step
