// SPDX-License-Identifier: Apache-2.0
//
// linears: y_i = x @ weights[i].T + biases[i] for several weights that share their input, in one run. Weights are in
// their natural [N, K] layout: they are read from memory once, at full bandwidth, so a few rows of x (token generation)
// cost what reading costs, and many rows (prompts) what the arithmetic costs. Sums are float32.
//
// Contracts, in one build of the library:
// - A row's result depends on that row, the weight and the bias only, to the bit: not on the number of rows, the other
//   rows, where they are, the number of threads, or the weights computed by the same call. Every output is summed over
//   K in one order: lane by lane in one vector, then addLanes(), or tile by tile. So graphs of all sizes compute the same.
// - Where the CPU multiplies bfloat16 itself, subnormal numbers count as zero in it, as the hardware has it.
#include "linear/linears_run.h"

namespace step {

void linears(Pool& pool, const LinearsCall& call) {
  if (call.rows > 0 && call.coding == Coding::kPlain) {
    withKind(call.type, [&](auto kind) { computeLinears<LinearWorker<decltype(kind)>>(pool, call); });
  } else if (call.rows > 0) {
    codedLinears(pool, call);
  }
}

}  // namespace step
