// SPDX-License-Identifier: Apache-2.0
//
// Rows sorted by their expert, and the linear layers of the experts in use shared out to threads.
#pragma once

#include <algorithm>
#include <numeric>

#include "linear/linear_worker.h"

namespace step {
namespace {

// An expert in use: its rows, its layer, and where what it costs begins in the cost of all.
template <class Worker>
struct Group {
  typename Worker::Input input;
  Linear linear;
  int64_t cost;  // of an output
  int64_t begin;
  int64_t firstTile;  // in the tiles of all
};

// Rows of y, which are named by their place in `index`, sorted by expert; those of one expert in order.
struct Sorted {
  int64_t* places;
  int64_t* begins;  // [experts + 1], where those of each expert begin; all after have none
};

inline int64_t wholeLines(int64_t bytes) { return roundUp(bytes, 64); }

inline void sortPlaces(const ExpertsCall& call, const Sorted& sorted) {
  const int64_t count = call.tokens * call.k;
  const auto expertOf = [&](int64_t i) { return std::min<int64_t>(call.index[i], call.experts); };
  // First the ends of all experts, one further: each row moves its expert's begin up by one.
  std::fill_n(sorted.begins, call.experts + 2, 0);
  for (int64_t i = 0; i < count; ++i) {
    ++sorted.begins[expertOf(i) + 1];
  }
  std::partial_sum(sorted.begins, sorted.begins + call.experts + 2, sorted.begins);
  for (int64_t i = 0; i < count; ++i) {
    sorted.places[sorted.begins[expertOf(i)]++] = i;
  }
  std::copy_backward(sorted.begins, sorted.begins + call.experts + 1, sorted.begins + call.experts + 2);
  sorted.begins[0] = 0;
}

inline Scales expertScales(const ExpertsCall& call, int64_t e) {
  if (call.coding == Coding::kPlain) {
    return {};
  }
  const int64_t first = e * call.outputs * (call.columns / call.group);
  const auto* scale = static_cast<const char*>(call.scales.scale) + first * sizeOf(call.scales.type);
  return {scale, call.scales.shift ? call.scales.shift + first : nullptr, call.scales.type, call.scales.isShort};
}

// The groups in use are made in `groups`; returns their number.
template <class Worker>
int64_t makeGroups(const ExpertsCall& call, const Sorted& sorted, char* packed, Group<Worker>* groups) {
  using Element = typename Worker::Element;
  const int64_t weightBytes = call.outputs * Worker::rowBytes(call);
  const auto* bias = static_cast<const Element*>(call.bias);
  int64_t count = 0, begin = 0, tiles = 0;
  for (int64_t e = 0; e < call.experts; ++e) {
    const int64_t first = sorted.begins[e], rows = sorted.begins[e + 1] - first;
    if (rows == 0) {
      continue;
    }
    typename Worker::Input input = Worker::inputOf(call, nullptr, rows, sorted.places + first);
    input.packed = packed;
    packed += wholeLines(Worker::packedBytes(input));
    const Linear linear{static_cast<const char*>(call.weight) + e * weightBytes,
                        bias ? bias + e * call.outputs : nullptr,
                        call.y,
                        call.outputs,
                        call.outputs,
                        expertScales(call, e)};
    const Group<Worker> group{input, linear, outputCost(Worker::rowBytes(call), rows), begin, tiles};
    groups[count++] = group;
    begin += call.outputs * group.cost;
    tiles += input.tiles();
  }
  return count;
}

template <class Worker>
void packGroups(Pool& pool, const ExpertsCall& call, const Group<Worker>* groups, int64_t count) {
  const auto* x = static_cast<const typename Worker::Element*>(call.x);
  const int64_t each = call.perExpert ? 1 : call.k;
  const Group<Worker>& last = groups[count - 1];
  const int64_t tiles = last.firstTile + last.input.tiles();
  const int64_t bytes = tiles * Worker::kTileRows * last.input.stride * sizeof(typename Worker::Packed);
  const int64_t tasks = std::min(countTasks(pool, bytes), tiles);
  pool.run(tasks, [&](int64_t task, int) {
    const Range range = part(tiles, task, tasks);
    for (int64_t i = 0; i < count; ++i) {
      const auto& [input, linear, cost, begin, firstTile] = groups[i];
      const int64_t end = std::min(range.end - firstTile, input.tiles());
      for (int64_t tile = std::max<int64_t>(range.begin - firstTile, 0); tile < end; ++tile) {
        const auto& own = input;
        Worker::pack(own, tile, [&](int64_t row) { return x + own.place(row) / each * call.columns; });
      }
    }
  });
}

// The outputs of all groups are shared out by what they cost, since experts have more rows or fewer.
template <class Worker>
void computeGroups(Pool& pool, const Group<Worker>* groups, int64_t count) {
  const Group<Worker>& last = groups[count - 1];
  const int64_t total = last.begin + last.linear.outputs * last.cost;
  const int64_t tasks = countTasks(pool, total);
  constexpr int64_t unit = Worker::kOutputs;
  pool.run(tasks, [&](int64_t task, int worker) {
    const Range share = part(total, task, tasks);
    void* memory = pool.scratch(worker, Worker::kBytes);
    for (int64_t i = 0; i < count; ++i) {
      const Group<Worker>& group = groups[i];
      const int64_t outputs = group.linear.outputs;
      const auto output = [&](int64_t cost) {
        const int64_t number = std::max<int64_t>(cost - group.begin, 0) / group.cost;
        return number < outputs ? number / unit * unit : outputs;
      };
      const Range own{output(share.begin), output(share.end)};
      if (own.begin < own.end) {
        Worker(group.input, group.linear, memory).run(own, {0, group.input.tiles()}, {});
      }
    }
  });
}

template <class Worker>
void computeExperts(Pool& pool, const ExpertsCall& call) {
  using Element = typename Worker::Element;
  const int64_t rows = call.tokens * call.k, most = std::min(rows, call.experts);
  // Of rows, and of experts that have one.
  const auto bytesOfRows = [&](int64_t count) {
    return wholeLines(Worker::packedBytes(Worker::inputOf(call, nullptr, count, nullptr)));
  };
  const int64_t packedBytes = bytesOfRows(rows) + most * bytesOfRows(1);
  const int64_t groupsBytes = wholeLines(most * sizeof(Group<Worker>));
  char* memory = static_cast<char*>(
      pool.shared(packedBytes + groupsBytes + (rows + call.experts + 2) * static_cast<int64_t>(sizeof(int64_t))));
  auto* groups = reinterpret_cast<Group<Worker>*>(memory + packedBytes);
  auto* places = reinterpret_cast<int64_t*>(memory + packedBytes + groupsBytes);
  const Sorted sorted{places, places + rows};
  sortPlaces(call, sorted);
  const int64_t count = makeGroups<Worker>(call, sorted, memory, groups);
  if (count > 0) {
    packGroups<Worker>(pool, call, groups, count);
    computeGroups<Worker>(pool, groups, count);
  }
  for (int64_t i = sorted.begins[call.experts]; i < rows; ++i) {
    std::fill_n(static_cast<Element*>(call.y) + sorted.places[i] * call.outputs, call.outputs, Element{});
  }
}

}  // namespace
}  // namespace step
