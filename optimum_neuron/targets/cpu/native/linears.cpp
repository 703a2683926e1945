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
#include <algorithm>

#include "linear_worker.h"

namespace step {

namespace {

// Outputs of a task, at least, where rows can be shared out too: fewer would read x too often.
constexpr int64_t kTaskOutputs = 32;
// Rows of fewer bytes one thread packs in less than it takes to share them out.
constexpr int64_t kPackBytes = 32 * 1024;
constexpr int64_t kPackTasksPerThread = 2;

template <class Kind>
void packInput(Pool& pool, const Input<Kind>& input, const LinearsCall& call) {
  const auto* x = static_cast<const typename Kind::Element*>(call.x);
  const int64_t tiles = input.tiles();
  const int64_t bytes = input.rows * input.stride * sizeof(typename Kind::Packed);
  // All threads are about to compute, so none has to be woken for this alone.
  const int64_t tasks = bytes < kPackBytes ? 1 : std::min(kPackTasksPerThread * pool.threads(), tiles);
  pool.run(tasks, [&](int64_t task, int) {
    const Range range = part(tiles, task, tasks);
    for (int64_t tile = range.begin; tile < range.end; ++tile) {
      LinearWorker<Kind>::pack(input, tile, [&](int64_t row) { return x + row * call.stride; });
    }
  });
}

// The outputs of all weights are one range, as all weight rows have the same length. Of these from layer `i` on, the weights that a
// worker reads first.
template <class Kind>
Bytes firstWeights(const LinearsCall& call, int64_t i, Range outputs) {
  for (; i < call.count; outputs = shift(outputs, -call.linears[i++].outputs)) {
    const int64_t end = std::min({outputs.begin + kPanelOutputs, outputs.end, call.linears[i].outputs});
    if (outputs.begin < end) {
      const int64_t row = call.columns * static_cast<int64_t>(sizeof(typename Kind::Element));
      return {static_cast<const char*>(call.linears[i].weight) + outputs.begin * row, (end - outputs.begin) * row};
    }
  }
  return {};
}

template <class Kind>
void computeOutputs(
    const LinearsCall& call, const Input<Kind>& input, Range outputs, Range tiles, Bytes next, void* memory) {
  for (int64_t i = 0; i < call.count; ++i) {
    const Linear& linear = call.linears[i];
    const Range own{std::max<int64_t>(outputs.begin, 0), std::min(outputs.end, linear.outputs)};
    outputs = shift(outputs, -linear.outputs);
    if (own.begin < own.end) {
      const Bytes then = outputs.end > 0 ? firstWeights<Kind>(call, i + 1, {0, outputs.end}) : next;
      LinearWorker<Kind>(input, linear, memory).run(own, tiles, then);
    }
  }
}

template <class Kind>
void computeAll(Pool& pool, const LinearsCall& call) {
  using Worker = LinearWorker<Kind>;
  void* packed = pool.shared(Worker::packedBytes(call.rows, call.columns));
  const Input<Kind> input{packed, call.rows, call.columns, packedStride<Kind>(call.columns), nullptr};
  packInput<Kind>(pool, input, call);
  int64_t total = 0;
  for (int64_t i = 0; i < call.count; ++i) {
    total += call.linears[i].outputs;
  }
  const int64_t wanted = countTasks(pool, total * outputCost<Kind>(input));
  // Many rows are shared out first: those of a task stay in the second-level cache while its weights pass over them.
  const int64_t tileParts = std::min(divideUp(input.tiles(), Worker::batchTiles(input)), wanted);
  const int64_t most = divideUp(total, tileParts > 1 ? kTaskOutputs : Worker::kOutputs);
  const int64_t outputParts = std::clamp<int64_t>(divideUp(wanted, tileParts), 1, std::max<int64_t>(most, 1));
  const int64_t tasks = outputParts * tileParts;
  const auto outputsOf = [&](int64_t task) { return part(total, task / tileParts, outputParts, Worker::kOutputs); };
  pool.run(tasks, [&](int64_t task, int worker) {
    // Tasks cost the same: while this one is computed, the other threads take those between.
    const int64_t then = task + pool.threads();
    computeOutputs<Kind>(
        call, input, outputsOf(task), part(input.tiles(), task % tileParts, tileParts),
        then < tasks ? firstWeights<Kind>(call, 0, outputsOf(then)) : Bytes{}, pool.scratch(worker, Worker::kBytes));
  });
}

}  // namespace

void linears(Pool& pool, const LinearsCall& call) {
  if (call.rows > 0) {
    withKind(call.type, [&](auto kind) { computeAll<decltype(kind)>(pool, call); });
  }
}

}  // namespace step
