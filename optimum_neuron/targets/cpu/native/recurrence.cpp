// SPDX-License-Identifier: Apache-2.0
//
// walk: recurrences token by token, for token generation and prompt chunks alike.
//
// Contracts:
// - What a token gives and leaves depends on the tokens of its slot up to it only, to the bit: not on how they are cut into
//   calls, on other slots, or on the number of threads. All is float32.
// - An idle token, and what a slot held before its token at position 0, has no effect, NaN included.
#include "recurrence.h"

#include <algorithm>
#include <cstring>

#include "attend_state.h"
#include "range.h"
#include "simd.h"

namespace step {

namespace {

// Columns of a state that are walked at a time: with up to 256 rows they stay in the first-level cache.
constexpr int kVectors = kLanes >= 16 ? 2 : 4;
constexpr int64_t kColumns = kVectors * kLanes;
// Sums that run side by side hide how long an addition takes.
constexpr int kSums = 2;
// Multiply-adds of some 5 us.
constexpr int64_t kTaskGrain = 1 << 17;

using Columns = Vec[kVectors];

// Tokens of a slot that stand side by side, but for idle ones: `count` places in a list of live tokens.
struct Segment {
  int64_t slot, first, count;
};

struct Live {
  int32_t* tokens;
  Segment* segments;
  int64_t count;
};

// False where a slot is out of range or comes again behind another.
bool findSegments(const WalkCall& call, Live& live, char* seen) {
  std::fill_n(seen, call.slotCount, 0);
  int64_t tokens = 0;
  live.count = 0;
  for (int64_t t = 0; t < call.tokens; ++t) {
    const int64_t slot = call.slots[t];
    if (slot < 0 || slot > call.slotCount) {
      return false;
    }
    if (slot == call.slotCount) {
      continue;
    }
    if (live.count == 0 || live.segments[live.count - 1].slot != slot) {
      if (seen[slot]) {
        return false;
      }
      seen[slot] = 1;
      live.segments[live.count++] = {slot, tokens, 0};
    }
    ++live.segments[live.count - 1].count;
    live.tokens[tokens++] = static_cast<int32_t>(t);
  }
  return true;
}

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

  void run(const Segment& segment, const int32_t* tokens) {
    float* own = call_.state + (segment.slot * call_.heads + head_) * call_.keyDim * call_.valueDim + column_;
    if (call_.positions[tokens[0]] == 0) {
      std::fill_n(state_, call_.keyDim * kColumns, 0.0f);
    } else {
      readRows(own, state_);
    }
    for (int64_t t = 0; t < segment.count; ++t) {
      step(tokens[t]);
    }
    for (int64_t i = 0; i < call_.keyDim; ++i) {
      std::memcpy(own + i * call_.valueDim, state_ + i * kColumns, width_ * sizeof(float));
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

  // Columns behind the last one are zero, and nobody reads what becomes of them.
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

  INLINE void step(int64_t token) const {
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
      const Vec own = broadcast(key[row]), asked = broadcast(query[row]);
      UNROLL for (int j = 0; j < kVectors; ++j) {
        float* p = state_ + row * kColumns + j * kLanes;
        const Vec now = fma(own, added[j], loadVec(p) * decay(row, j));
        storeVec(p, now);
        sums[j] = fma(now, asked, sums[j]);
      }
    });
    alignas(64) float output[kColumns];
    UNROLL for (int j = 0; j < kVectors; ++j) {
      storeVec(output + j * kLanes, result[j]);
    }
    std::memcpy(call_.output + place * call_.valueDim + column_, output, width_ * sizeof(float));
  }

  const WalkCall& call_;
  const int64_t head_, keyHead_, column_, width_;
  float *const state_, *const rates_;
};

template <bool Delta, Decay Kind>
void walkAll(Pool& pool, const WalkCall& call, const Live& live) {
  const int64_t blocks = divideUp(call.valueDim, kColumns), perSegment = call.heads * blocks;
  const int64_t parts = live.count * perSegment;
  const int64_t bytes = Walker<Delta, Kind>::floats(call) * sizeof(float);
  const int64_t tokens = live.count ? live.segments[live.count - 1].first + live.segments[live.count - 1].count : 0;
  const int64_t tasks = std::min(parts, tokens * perSegment * call.keyDim * kColumns / kTaskGrain + 1);
  pool.run(tasks, [&](int64_t task, int worker) {
    float* memory = static_cast<float*>(pool.scratch(worker, bytes));
    const Range own = part(parts, task, tasks);
    for (int64_t i = own.begin; i < own.end; ++i) {
      // The last segments first: those of chunks, which take longest.
      const Segment& segment = live.segments[live.count - 1 - i / perSegment];
      const int64_t head = i % perSegment / blocks, column = i % blocks * kColumns;
      Walker<Delta, Kind>(call, head, column, memory).run(segment, live.tokens + segment.first);
    }
  });
}

}  // namespace

bool walk(Pool& pool, const WalkCall& call) {
  const int64_t most = std::min(call.tokens, call.slotCount);
  const int64_t segmentsBytes = most * sizeof(Segment), tokensBytes = call.tokens * sizeof(int32_t);
  char* memory = static_cast<char*>(pool.shared(segmentsBytes + tokensBytes + call.slotCount));
  Live live{reinterpret_cast<int32_t*>(memory + segmentsBytes), reinterpret_cast<Segment*>(memory), 0};
  if (!findSegments(call, live, memory + segmentsBytes + tokensBytes)) {
    return false;
  }
  for (int64_t t = 0; t < call.tokens; ++t) {
    if (call.slots[t] == call.slotCount) {
      std::fill_n(call.output + t * call.heads * call.valueDim, call.heads * call.valueDim, 0.0f);
    }
  }
  const bool perRow = call.decays > 1;
  if (call.rates) {
    walkAll<false, Decay::kByRates>(pool, call, live);
  } else if (call.share) {
    perRow ? walkAll<true, Decay::kPerRow>(pool, call, live) : walkAll<true, Decay::kOne>(pool, call, live);
  } else {
    perRow ? walkAll<false, Decay::kPerRow>(pool, call, live) : walkAll<false, Decay::kOne>(pool, call, live);
  }
  return true;
}

}  // namespace step
