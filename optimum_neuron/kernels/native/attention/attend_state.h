// SPDX-License-Identifier: Apache-2.0
//
// The softmax state of some queries over a section of the columns, and how the states of sections become a result.
#pragma once

#include <algorithm>
#include <limits>

#include "attention/attention_call.h"
#include "attention/online_softmax.h"

namespace step {
namespace {

constexpr float kLog2E = 1.44269504f;

// Of some queries: the largest score so far; lane by lane the sum of probabilities relative to it; the sum of values.
struct QueryState {
  float *maxima, *sums, *outputs;

  // A multiple of a cache line, as is every part.
  static int64_t floats(int64_t queries, int64_t dim) {
    return queries * (kLine + dim) + divideUp(queries, kLine) * kLine;
  }
  QueryState(float* memory, int64_t queries)
      : maxima(memory), sums(maxima + divideUp(queries, kLine) * kLine), outputs(sums + queries * kLine) {}

  // A sink is a score that was seen before, of probability 1 so far and without a value.
  void start(int64_t query, int64_t dim, const float* sink) const {
    // Finite: the difference of two of them must not be NaN.
    constexpr float kLowest = std::numeric_limits<float>::lowest() / 2;
    maxima[query] = sink ? std::max(*sink * kLog2E, kLowest) : kLowest;
    storeVec(sums + query * kLanes, Vec{});
    sums[query * kLanes] = sink ? 1.0f : 0.0f;
    std::fill_n(outputs + query * dim, dim, 0.0f);
  }

  // Adds what a query saw of a later section. Where it saw nothing of one of the two, the other's state stays as it is:
  // the lowest maximum makes a factor of 0, and the other factor is 1.
  void join(const QueryState& later, int64_t query, int64_t dim) const {
    const float before = maxima[query], now = later.maxima[query];
    const float top = now > before ? now : before;
    const Vec factor = exp2(broadcast(before - top)), laterFactor = exp2(broadcast(now - top));
    const auto add = [&](float* to, const float* from) {
      storeVec(to, fma(loadVec(from), laterFactor, loadVec(to) * factor));
    };
    maxima[query] = top;
    add(sums + query * kLanes, later.sums + query * kLanes);
    for (int64_t d = 0; d < dim; d += kLanes) {
      add(outputs + query * dim + d, later.outputs + query * dim + d);
    }
  }
};

}  // namespace
}  // namespace step
