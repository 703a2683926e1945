// SPDX-License-Identifier: Apache-2.0
//
// Linear layers that share their input, shared out to threads.
#pragma once

#include <algorithm>

#include "linear/linear_worker.h"

namespace step {
namespace {

// Outputs of a task, at least, where rows can be shared out too: fewer would read x too often.
constexpr int64_t kTaskOutputs = 32;
// Rows of fewer bytes one thread packs in less than it takes to share them out.
constexpr int64_t kPackBytes = 32 * 1024;
constexpr int64_t kPackTasksPerThread = 2;

template <class Worker>
void packInput(Pool& pool, const typename Worker::Input& input, const LinearsCall& call) {
  const auto* x = static_cast<const typename Worker::Element*>(call.x);
  const int64_t tiles = input.tiles();
  const int64_t bytes = input.rows * input.stride * sizeof(typename Worker::Packed);
  // All threads are about to compute, so none has to be woken for this alone.
  const int64_t tasks = bytes < kPackBytes ? 1 : std::min(kPackTasksPerThread * pool.threads(), tiles);
  pool.run(tasks, [&](int64_t task, int) {
    const Range range = part(tiles, task, tasks);
    for (int64_t tile = range.begin; tile < range.end; ++tile) {
      Worker::pack(input, tile, [&](int64_t row) { return x + row * call.stride; });
    }
  });
}

// The outputs of all weights are one range, as all weight rows have the same length. Of these from layer `i` on, the weights that a
// worker reads first.
template <class Worker>
Bytes firstWeights(const LinearsCall& call, int64_t i, Range outputs) {
  for (; i < call.count; outputs = shift(outputs, -call.linears[i++].outputs)) {
    const int64_t end = std::min({outputs.begin + kPanelOutputs, outputs.end, call.linears[i].outputs});
    if (outputs.begin < end) {
      const int64_t row = Worker::rowBytes(call);
      return {static_cast<const char*>(call.linears[i].weight) + outputs.begin * row, (end - outputs.begin) * row};
    }
  }
  return {};
}

template <class Worker>
void computeOutputs(
    const LinearsCall& call, const typename Worker::Input& input, Range outputs, Range tiles, Bytes next, void* memory) {
  for (int64_t i = 0; i < call.count; ++i) {
    const Linear& linear = call.linears[i];
    const Range own{std::max<int64_t>(outputs.begin, 0), std::min(outputs.end, linear.outputs)};
    outputs = shift(outputs, -linear.outputs);
    if (own.begin < own.end) {
      const Bytes then = outputs.end > 0 ? firstWeights<Worker>(call, i + 1, {0, outputs.end}) : next;
      Worker(input, linear, memory).run(own, tiles, then);
    }
  }
}

template <class Worker>
void computeLinears(Pool& pool, const LinearsCall& call) {
  auto input = Worker::inputOf(call, nullptr, call.rows, nullptr);
  input.packed = pool.shared(Worker::packedBytes(input));
  packInput<Worker>(pool, input, call);
  int64_t total = 0;
  for (int64_t i = 0; i < call.count; ++i) {
    total += call.linears[i].outputs;
  }
  const int64_t wanted = countTasks(pool, total * outputCost(Worker::rowBytes(call), call.rows));
  // Many rows are shared out first: those of a task stay in the second-level cache while its weights pass over them.
  const int64_t tileParts = std::min(divideUp(input.tiles(), Worker::batchTiles(input)), wanted);
  const int64_t most = divideUp(total, tileParts > 1 ? kTaskOutputs : Worker::kOutputs);
  const int64_t outputParts = std::clamp<int64_t>(divideUp(wanted, tileParts), 1, std::max<int64_t>(most, 1));
  const int64_t tasks = outputParts * tileParts;
  const auto outputsOf = [&](int64_t task) { return part(total, task / tileParts, outputParts, Worker::kOutputs); };
  pool.run(tasks, [&](int64_t task, int worker) {
    // Tasks cost the same: while this one is computed, the other threads take those between.
    const int64_t then = task + pool.threads();
    computeOutputs<Worker>(
        call, input, outputsOf(task), part(input.tiles(), task % tileParts, tileParts),
        then < tasks ? firstWeights<Worker>(call, 0, outputsOf(then)) : Bytes{}, pool.scratch(worker, Worker::kBytes));
  });
}

}  // namespace
}  // namespace step
