// SPDX-License-Identifier: Apache-2.0
//
// How far down a row's scores tokens have to be kept, so that their numbers add up to what is wanted.
#pragma once

#include <cmath>

#include "sample/token_weights.h"

namespace step {
namespace {

// Scores in bins, by their distances from the best: what is in a bin is larger than all in the next one.
constexpr int kBins = 512;
constexpr float kBinsPerUnit = 16.0f;

struct Bins {
  uint64_t weight[kBins];
  uint32_t count[kBins];
};

INLINE IntVec binsOf(Vec distance) {
  const Vec place = distance * kBinsPerUnit, last = broadcast(kBins - 1);
  return __builtin_convertvector(place < last ? place : last, IntVec);
}

inline void fillBins(Bins& bins, const TokenRow& row, int64_t begin, int64_t end) {
  bins = {};
  for (int64_t token = begin; token < end; token += kLanes) {
    const Scored scored = scoresFrom(row, token);
    const IntVec bin = binsOf(scored.distance);
    const int64_t lanes = std::min<int64_t>(end - token, kLanes);
    int32_t places[kLanes];
    float weights[kLanes];
    storeBits(places, (BitVec)bin);
    storeVec(weights, scored.weight);
    for (int64_t i = 0; i < lanes; ++i) {
      bins.count[places[i]] += 1;
      bins.weight[places[i]] += static_cast<uint64_t>(weights[i]);
    }
  }
}

inline void join(Bins& bins, const Bins& other) {
  for (int i = 0; i < kBins; ++i) {
    bins.weight[i] += other.weight[i];
    bins.count[i] += other.count[i];
  }
}

struct Candidate {
  float score, weight;
};

// The kept tokens of a bin; their number.
inline int64_t collect(Candidate* found, const TokenRow& row, int bin) {
  int64_t count = 0;
  for (int64_t token = 0; token < row.vocab; token += kLanes) {
    const Scored scored = scoresFrom(row, token);
    const BitVec taken = (BitVec)((binsOf(scored.distance) == bin) & (scored.score >= row.lowest));
    if (orOf(taken) == 0) {
      continue;
    }
    const int64_t lanes = std::min<int64_t>(row.vocab - token, kLanes);
    for (int64_t i = 0; i < lanes; ++i) {
      if (taken[i]) {
        found[count++] = {scored.score[i], scored.weight[i]};
      }
    }
  }
  return count;
}

// The largest score for which it and those above add up to `wanted`, which they all do at least.
template <class Number>
float reached(Candidate* begin, Candidate* end, uint64_t wanted, Number number) {
  const auto sum = [&](const Candidate* from, const Candidate* to) {
    uint64_t result = 0;
    for (; from < to; ++from) {
      result += number(*from);
    }
    return result;
  };
  while (end - begin > 1) {
    const float first = begin->score, middle = begin[(end - begin) / 2].score, last = end[-1].score;
    const float pivot = std::max(std::min(first, middle), std::min(std::max(first, middle), last));
    Candidate* const equal = std::partition(begin, end, [&](const Candidate& each) { return each.score > pivot; });
    const uint64_t above = sum(begin, equal);
    if (above >= wanted) {
      end = equal;
      continue;
    }
    Candidate* const below = std::partition(equal, end, [&](const Candidate& each) { return each.score == pivot; });
    const uint64_t upto = above + sum(equal, below);
    if (upto >= wanted || below == end) {
      return pivot;
    }
    wanted -= upto;
    begin = below;
  }
  return begin->score;
}

// The first bin with which `numbers` add up to `wanted`, and what lies before it; kBins where they do not.
template <class T>
int binOf(const T* numbers, uint64_t wanted, uint64_t& before) {
  before = 0;
  for (int bin = 0; bin < kBins; ++bin) {
    if (before + numbers[bin] >= wanted) {
      return bin;
    }
    before += numbers[bin];
  }
  return kBins;
}

// Leaves the tokens of the `wanted` largest scores, and those that tie with the last. What is in the bins goes with the others.
inline void keepLargest(TokenRow& row, uint64_t wanted, Bins& bins, Candidate* scratch) {
  uint64_t before;
  const int bin = binOf(bins.count, wanted, before);
  if (bin == kBins) {
    return;
  }
  const int64_t count = collect(scratch, row, bin);
  row.lowest = reached(scratch, scratch + count, wanted - before, [](const Candidate&) { return uint64_t{1}; });
  std::fill(bins.weight + bin, bins.weight + kBins, 0);
  for (const Candidate* each = scratch; each < scratch + count; ++each) {
    bins.weight[bin] += each->score >= row.lowest ? static_cast<uint64_t>(each->weight) : 0;
  }
}

// Leaves the fewest tokens of the largest scores that have a share of the weight, and those that tie with the last.
inline void keepNucleus(TokenRow& row, float share, const Bins& bins, Candidate* scratch) {
  uint64_t whole = 0;
  for (const uint64_t each : bins.weight) {
    whole += each;
  }
  const uint64_t wanted = static_cast<uint64_t>(std::max(std::ceil(share * rounded(whole)), 1.0f));
  uint64_t before;
  const int bin = binOf(bins.weight, wanted, before);
  if (bin == kBins) {
    return;
  }
  const int64_t count = collect(scratch, row, bin);
  row.lowest = reached(
      scratch, scratch + count, wanted - before, [](const Candidate& each) { return static_cast<uint64_t>(each.weight); });
}

}  // namespace
}  // namespace step
