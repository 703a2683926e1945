// SPDX-License-Identifier: Apache-2.0
//
// expertLinear: y[t, i] = x[t] @ weight[e].T + bias[e] with e = index[t, i], the linear layer of mixtures of experts.
// Rows are sorted by their expert, so each expert in use is read once, in its natural layout, and the others cost
// nothing.
//
// Contracts:
// - A row's result depends on that row and its expert only, to the bit: not on which other rows there are, what else is
//   routed where, or the number of threads. It is what `linears` computes of the row.
// - An index not below the number of experts stands for no expert: its row of y is zero.
#include "linear/experts_run.h"

namespace step {

bool expertLinear(Pool& pool, const ExpertsCall& call) {
  const int64_t count = call.tokens * call.k;
  if (std::any_of(call.index, call.index + count, [](int32_t index) { return index < 0; })) {
    return false;
  }
  if (call.coding == Coding::kPlain) {
    withKind(call.type, [&](auto kind) { computeExperts<LinearWorker<decltype(kind)>>(pool, call); });
  } else {
    codedExperts(pool, call);
  }
  return true;
}

}  // namespace step
