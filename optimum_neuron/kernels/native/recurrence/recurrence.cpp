// SPDX-License-Identifier: Apache-2.0
//
// walk: recurrences token by token, for token generation and prompt chunks alike.
//
// Contracts:
// - What a token gives and leaves depends on the tokens of its slot up to it only, to the bit: not on how they are cut into
//   calls, on other slots, or on the number of threads. All is float32.
// - An idle token, and what a slot held before its token at position 0, has no effect, NaN included.
#include "recurrence/recurrence.h"

#include <algorithm>
#include <cstring>

#include "attention/attend_state.h"
#include "common/range.h"
#include "common/segments.h"
#include "vectors/simd.h"

namespace step {

namespace {

// Columns of a state that are walked at a time: with up to 256 rows they stay in the first-level cache.
constexpr int kVectors = kLanes >= 16 ? 2 : 4;
constexpr int64_t kColumns = kVectors * kLanes;
// Sums that run side by side hide how long an addition takes.
constexpr int kSums = 2;
constexpr int64_t kLineFloats = 64 / sizeof(float);
// Multiply-adds of some 5 us.
constexpr int64_t kTaskGrain = 1 << 17;

using Columns = Vec[kVectors];

// By what a state decays: a number, one of each row, or of each element, from its rate and the column's step.
enum class Decay { kOne, kPerRow, kByRates };

// Some columns of a head's state, walked over the tokens of a segment.
template <bool Delta, Decay Kind>
class Walker {
 public:
  // Memory of `floats(call)`.
  Walker(const WalkCall& call, int64_t head, int64_t column, float* memory)
      : call_(call),
        head_(head),
        keyHead_(head * call.keyHeads / call.heads),
        column_(column),
        width_(std::min(kColumns, call.valueDim - column)),
        state_(memory),
        rates_(memory + call.keyDim * kColumns) {
    if constexpr (Kind == Decay::kByRates) {
      readRows(call.rates + column, rates_);
    }
  }

  static int64_t floats(const WalkCall& call) { return call.keyDim * kColumns * (Kind == Decay::kByRates ? 2 : 1); }

  // Where some columns lie in the state of a slot.
  static float* stateOf(const WalkCall& call, int64_t slot, int64_t head, int64_t column) {
    return call.state + (slot * call.heads + head) * call.keyDim * call.valueDim + column;
  }

  // Meanwhile memory brings what lies at `next`, as far as it is not null: another walker's columns.
  void run(const Segment& segment, const int32_t* tokens, const float* next) {
    float* own = stateOf(call_, segment.slot, head_, column_);
    if (call_.positions[tokens[0]] == 0) {
      std::fill_n(state_, call_.keyDim * kColumns, 0.0f);
    } else {
      readRows(own, state_);
    }
    step(tokens[0], next);
    for (int64_t t = 1; t < segment.count; ++t) {
      step(tokens[t], nullptr);
    }
    for (int64_t i = 0; i < call_.keyDim; ++i) {
      Columns row;
      UNROLL for (int j = 0; j < kVectors; ++j) {
        row[j] = loadVec(state_ + i * kColumns + j * kLanes);
      }
      store(own + i * call_.valueDim, row);
    }
  }

 private:
  // This walker's columns of all rows of a matrix [keyDim, valueDim].
  void readRows(const float* from, float* to) const {
    for (int64_t i = 0; i < call_.keyDim; ++i) {
      Columns row;
      load(from + i * call_.valueDim, row);
      UNROLL for (int j = 0; j < kVectors; ++j) {
        storeVec(to + i * kColumns + j * kLanes, row[j]);
      }
    }
  }

  // Columns after the last one are zero, and their results are not read.
  INLINE void load(const float* from, Columns& columns) const {
    alignas(64) float padded[kColumns];
    if (width_ < kColumns) {
      std::fill_n(padded, kColumns, 0.0f);
      std::memcpy(padded, from, width_ * sizeof(float));
      from = padded;
    }
    UNROLL for (int j = 0; j < kVectors; ++j) {
      columns[j] = loadVec(from + j * kLanes);
    }
  }

  INLINE void store(float* to, const Columns& columns) const {
    alignas(64) float padded[kColumns];
    float* const whole = width_ < kColumns ? padded : to;
    UNROLL for (int j = 0; j < kVectors; ++j) {
      storeVec(whole + j * kLanes, columns[j]);
    }
    if (width_ < kColumns) {
      std::memcpy(to, padded, width_ * sizeof(float));
    }
  }

  // Calls body(row, sums) for all rows of the state, and returns the sums of all rows in `total`.
  template <class Body>
  INLINE void overRows(Columns& total, Body body) const {
    Columns sums[kSums] = {};
    int64_t i = 0;
    for (; i + kSums <= call_.keyDim; i += kSums) {
      UNROLL for (int each = 0; each < kSums; ++each) {
        body(i + each, sums[each]);
      }
    }
    for (; i < call_.keyDim; ++i) {
      body(i, sums[0]);
    }
    UNROLL for (int j = 0; j < kVectors; ++j) {
      total[j] = sums[0][j] + sums[1][j];
    }
  }

  INLINE void step(int64_t token, const float* next) const {
    const int64_t place = token * call_.heads + head_, keyPlace = token * call_.keyHeads + keyHead_;
    const float* query = call_.query + keyPlace * call_.keyDim;
    const float* key = call_.key + keyPlace * call_.keyDim;
    const float* decays = call_.decay + place * call_.decays;
    const Vec common = broadcast(decays[0]);
    Columns steps;
    if constexpr (Kind == Decay::kByRates) {
      load(decays + column_, steps);
      UNROLL for (int j = 0; j < kVectors; ++j) {
        steps[j] = steps[j] * kLog2E;
      }
    }
    const auto decay = [&](int64_t row, int j) {
      if constexpr (Kind == Decay::kByRates) {
        return exp2(loadVec(rates_ + row * kColumns + j * kLanes) * steps[j]);
      } else {
        return Kind == Decay::kPerRow ? broadcast(decays[row]) : common;
      }
    };
    Columns added;
    load(call_.value + place * call_.valueDim + column_, added);
    if constexpr (Delta) {
      Columns known;
      overRows(known, [&](int64_t row, Columns& sums) {
        const Vec own = broadcast(key[row]);
        UNROLL for (int j = 0; j < kVectors; ++j) {
          const Vec before = loadVec(state_ + row * kColumns + j * kLanes);
          sums[j] = fma(Kind == Decay::kPerRow ? before * decay(row, j) : before, own, sums[j]);
        }
      });
      const Vec share = broadcast(call_.share[place]);
      UNROLL for (int j = 0; j < kVectors; ++j) {
        added[j] = (added[j] - (Kind == Decay::kPerRow ? known[j] : known[j] * common)) * share;
      }
    }
    Columns result;
    overRows(result, [&](int64_t row, Columns& sums) {
      if (next) {
        UNROLL for (int64_t j = 0; j < kColumns; j += kLineFloats) {
          prefetchFar(next + row * call_.valueDim + j);
        }
      }
      const Vec own = broadcast(key[row]), asked = broadcast(query[row]);
      UNROLL for (int j = 0; j < kVectors; ++j) {
        float* p = state_ + row * kColumns + j * kLanes;
        const Vec now = fma(own, added[j], loadVec(p) * decay(row, j));
        storeVec(p, now);
        sums[j] = fma(now, asked, sums[j]);
      }
    });
    store(call_.output + place * call_.valueDim + column_, result);
  }

  const WalkCall& call_;
  const int64_t head_, keyHead_, column_, width_;
  float *const state_, *const rates_;
};

template <bool Delta, Decay Kind>
void walkAll(Pool& pool, const WalkCall& call, const Segments& segments) {
  using Own = Walker<Delta, Kind>;
  const int64_t blocks = divideUp(call.valueDim, kColumns), perSegment = call.heads * blocks;
  const int64_t parts = segments.count * perSegment;
  const int64_t bytes = Own::floats(call) * sizeof(float);
  const int64_t tasks = std::min(parts, segments.live() * perSegment * call.keyDim * kColumns / kTaskGrain + 1);
  // The last segments first: those of chunks, which take longest.
  const auto segmentOf = [&](int64_t i) -> const Segment& { return segments.list[segments.count - 1 - i / perSegment]; };
  const auto headOf = [&](int64_t i) { return i % perSegment / blocks; };
  const auto columnOf = [&](int64_t i) { return i % blocks * kColumns; };
  pool.run(tasks, [&](int64_t task, int worker) {
    float* memory = static_cast<float*>(pool.scratch(worker, bytes));
    const Range own = part(parts, task, tasks);
    for (int64_t i = own.begin; i < own.end; ++i) {
      const int64_t j = i + 1;
      const float* next = j < own.end ? Own::stateOf(call, segmentOf(j).slot, headOf(j), columnOf(j)) : nullptr;
      Own(call, headOf(i), columnOf(i), memory).run(segmentOf(i), segments.tokens + segmentOf(i).first, next);
    }
  });
}

}  // namespace

bool walk(Pool& pool, const WalkCall& call) {
  Segments segments;
  if (!segments.find(pool.shared(Segments::bytes(call.tokens, call.slotCount)), call.slots, call.tokens, call.slotCount)) {
    return false;
  }
  for (int64_t t = 0; t < call.tokens; ++t) {
    if (call.slots[t] == call.slotCount) {
      std::fill_n(call.output + t * call.heads * call.valueDim, call.heads * call.valueDim, 0.0f);
    }
  }
  const bool perRow = call.decays > 1;
  if (call.rates) {
    walkAll<false, Decay::kByRates>(pool, call, segments);
  } else if (call.share) {
    perRow ? walkAll<true, Decay::kPerRow>(pool, call, segments) : walkAll<true, Decay::kOne>(pool, call, segments);
  } else {
    perRow ? walkAll<false, Decay::kPerRow>(pool, call, segments) : walkAll<false, Decay::kOne>(pool, call, segments);
  }
  return true;
}

}  // namespace step
