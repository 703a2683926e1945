// SPDX-License-Identifier: Apache-2.0
//
// Attention of one tile: some tokens of one row, with the heads that share one kv head. A token's result is that of its
// sections, joined in ascending order, whoever computes them.
#pragma once

#include <algorithm>
#include <cstring>

#include "attention/attend_state.h"
#include "tables/cached_codes.h"
#include "attention/pack_block.h"

namespace step {
namespace {

// Some tokens of one row with the heads of one kv head. Query i is head i % group of token i / group.
struct AttendTile {
  int64_t row, kvHead, firstToken, queries;
  Range seen;    // columns that some of the tokens see
  Range common;  // columns that all of them see

  Range sections() const { return {seen.begin / kSection, divideUp(seen.end, kSection)}; }
};

// What a thread works in: the queries of a tile, two states of them, and one packed block; before it is packed, with whole rows and decoded.
struct Scratch {
  QueryState state, later;
  Word *queries, *keys, *values, *decoded, *whole;

  static int64_t floats(int64_t queries, const Layout& call) {
    const int64_t keys = call.wideDim(), values = call.wideValueDim();
    return 2 * QueryState::floats(queries, values) + queries * keys + kBlock * (keys + values + 2 * std::max(keys, values));
  }
  // Rows of queries after the last, which a product of fewer rows than it has may read, are keys.
  Scratch(float* memory, int64_t count, const Layout& call)
      : state(memory, count),
        later(memory + QueryState::floats(count, call.wideValueDim()), count),
        queries(reinterpret_cast<Word*>(memory + 2 * QueryState::floats(count, call.wideValueDim()))),
        keys(queries + count * call.wideDim()),
        values(keys + kBlock * call.wideDim()),
        decoded(values + kBlock * call.wideValueDim()),
        whole(decoded + kBlock * std::max(call.wideDim(), call.wideValueDim())) {}
};

// The part of `range` in a block, counted from its begin.
inline Range cut(Range range, int64_t block) {
  return {std::clamp<int64_t>(range.begin - block, 0, kBlock), std::clamp<int64_t>(range.end - block, 0, kBlock)};
}

template <class Kind>
class TileWorker {
 public:
  using Element = typename Kind::Element;
  static constexpr int64_t kRows = Products<Kind>::kRows, kTogether = kSoftmaxRows / kRows * kRows;

  TileWorker(const Layout& call, const AttendTile& tile, const Scratch& scratch)
      : call_(call),
        tile_(tile),
        scratch_(scratch),
        dim_(call.wideDim()),
        valueDim_(call.wideValueDim()),
        words_(dimWords<Kind>(dim_)),
        group_(call.group()) {}

  void run() {
    [[maybe_unused]] const Registers registers;
    packQueries();
    const Range sections = tile_.sections();
    attendSection(sections.begin, scratch_.state);
    for (int64_t section = sections.begin + 1; section < sections.end; ++section) {
      attendSection(section, scratch_.later);
      join(scratch_.state, scratch_.later);
    }
    finish(scratch_.state);
  }

  // What the queries see of a section, as their state.
  void runSection(int64_t section, const QueryState& state) {
    [[maybe_unused]] const Registers registers;
    packQueries();
    attendSection(section, state);
  }

  // The result, from the states of the tile's sections, which are changed.
  template <class StateOf>
  void joinSections(StateOf stateOf) {
    const Range sections = tile_.sections();
    const QueryState state = stateOf(sections.begin);
    for (int64_t section = sections.begin + 1; section < sections.end; ++section) {
      join(state, stateOf(section));
    }
    finish(state);
  }

 private:
  void packQueries() {
    for (int64_t i = 0; i < tile_.queries; ++i) {
      const auto* query = static_cast<const Element*>(call_.query) + call_.queryOffset(tile_.row, head(i), token(i));
      packQuery(scratch_.queries + i * words_, wholeRows(query, 1, call_.dim, dim_));
    }
  }

  void attendSection(int64_t section, const QueryState& state) {
    for (int64_t i = 0; i < tile_.queries; ++i) {
      // A sink counts once, in the first section of which a token sees something.
      const bool hasSink = call_.sinks && section == visible(i).begin / kSection;
      state.start(i, valueDim_, hasSink ? call_.sinks + head(i) : nullptr);
    }
    const int64_t begin = std::max(tile_.seen.begin / kBlock * kBlock, section * kSection);
    const int64_t end = std::min(tile_.seen.end, (section + 1) * kSection);
    for (int64_t block = begin; block < end; block += kBlock) {
      attendBlock(block, state);
    }
  }

  void join(const QueryState& state, const QueryState& later) {
    for (int64_t i = 0; i < tile_.queries; ++i) {
      state.join(later, i, valueDim_);
    }
  }

  void packQuery(Word* to, const Element* query) {
    if constexpr (sizeof(typename Kind::Packed) == sizeof(Element)) {
      std::memcpy(to, query, dim_ * sizeof(Element));
      std::fill(to + dim_ / Kind::kPerWord, to + words_, 0);
    } else {
      for (int64_t d = 0; d < dim_; d += kLanes) {
        storeVec(to + d, Kind::load(query + d));
      }
    }
  }

  // Rows of `dim` elements where they lie; if they are no whole vectors, copied next to zeros.
  template <class E>
  const E* wholeRows(const E* rows, int64_t count, int64_t dim, int64_t wide) {
    if (dim == wide) {
      return rows;
    }
    auto* to = reinterpret_cast<E*>(scratch_.whole);
    for (int64_t i = 0; i < count; ++i) {
      std::copy_n(rows + i * dim, dim, to + i * wide);
      std::fill_n(to + i * wide + dim, wide - dim, E{});
    }
    return to;
  }

  void attendBlock(int64_t block, const QueryState& state) {
    const int64_t column = call_.cacheColumn(tile_.row, tile_.kvHead, block);
    const int64_t next = block + kBlock < tile_.seen.end ? call_.cacheColumn(tile_.row, tile_.kvHead, block + kBlock) : column;
    if (call_.coding != Coding::kPlain) {
      attendCodes(block, column, next, state);
      return;
    }
    const Range seen = cut(tile_.seen, block);
    const Range common = cut(tile_.common, block);
    const auto rowsOf = [&](const void* cache, int64_t dim, int64_t wide) {
      return wholeRows(static_cast<const Element*>(cache) + column * dim, seen.end, dim, wide);
    };
    const auto* nextKeys = static_cast<const Element*>(call_.keys) + next * call_.dim;
    const auto* nextValues = static_cast<const Element*>(call_.values) + next * call_.valueDim;
    packKeys<Kind>(scratch_.keys, rowsOf(call_.keys, call_.dim, dim_), nextKeys, dim_, seen.end);
    const Element* values = rowsOf(call_.values, call_.valueDim, valueDim_);
    const bool same = common.begin <= seen.begin && common.end >= seen.end;
    // Probability zero hides a value from a query only if their product is zero. If not, each query has its own copy.
    if (same || allFinite<Kind>(values, valueDim_, seen)) {
      attendAllRows(block, packValues(Kind(), scratch_.values, values, nextValues, valueDim_, seen), state, {});
      return;
    }
    for (int64_t i = 0; i < tile_.queries; ++i) {
      const Word* packed = packValues(Kind(), scratch_.values, values, nextValues, valueDim_, cut(visible(i), block));
      attendRows(block, packed, {i, i + 1}, state, {});
    }
  }

  // Of a block of codes, which are all finite: what a query does not see has the probability zero, whatever its scale is.
  void attendCodes(int64_t block, int64_t column, int64_t next, const QueryState& state) {
    const Range seen = cut(tile_.seen, block);
    auto* decoded = reinterpret_cast<Element*>(scratch_.decoded);
    const auto elements = [&](const void* cache, int64_t dim, int64_t wide) {
      const auto* codes = static_cast<const uint8_t*>(cache);
      const uint8_t* rows = wholeRows(codes + column * dim, seen.end, dim, wide);
      decode<Kind>(call_.coding, decoded, rows, codes + next * dim, seen.end * wide);
      return decoded;
    };
    alignas(64) float keyScales[kBlock] = {}, valueScales[kBlock] = {};
    std::copy_n(call_.keyScales + column, seen.end, keyScales);
    std::copy_n(call_.valueScales + column, seen.end, valueScales);
    const Element* keys = elements(call_.keys, call_.dim, dim_);
    packKeys<Kind>(scratch_.keys, keys, keys, dim_, seen.end);
    const Element* values = elements(call_.values, call_.valueDim, valueDim_);
    const Word* packed = packValues(Kind(), scratch_.values, values, values, valueDim_, seen);
    attendAllRows(block, packed, state, {keyScales, valueScales});
  }

  // Of a block of codes, [kBlock] each; null of numbers.
  struct BlockScales {
    const float *keys = nullptr, *values = nullptr;
  };

  void attendAllRows(int64_t block, const Word* values, const QueryState& state, BlockScales scales) {
    const int64_t groups = divideUp(tile_.queries, kTogether);
    for (int64_t i = 0; i < groups; ++i) {
      attendRows(block, values, part(tile_.queries, i, groups), state, scales);
    }
  }

  void attendRows(int64_t block, const Word* values, Range queries, const QueryState& all, BlockScales scales) {
    const bool whole = tile_.common.begin <= block && tile_.common.end >= block + kBlock;
    Range seen = whole ? Range{0, kBlock} : Range{kBlock, 0};
    Range ranges[kTogether];
    const int64_t rows = queries.end - queries.begin;
    for (int64_t m = 0; m < rows && !whole; ++m) {
      const Range range = cut(visible(queries.begin + m), block);
      ranges[m] = range;
      if (range.begin < range.end) {
        seen = {std::min(seen.begin, range.begin), std::max(seen.end, range.end)};
      }
    }
    if (seen.begin >= seen.end) {
      return;
    }
    alignas(64) float scores[kTogether * kBlock];
    alignas(64) Word probabilities[kTogether * kBlock];
    float factors[kTogether];
    const int64_t vectors = divideUp(seen.end, kLanes), groups = divideUp(rows, kRows);
    const Word* query = scratch_.queries + queries.begin * words_;
    for (int64_t i = 0; i < groups; ++i) {
      const auto [first, last] = part(rows, i, groups);
      Products<Kind>::multiply(
          last - first, vectors,
          {scores + first * kBlock, kBlock, query + first * words_, words_, scratch_.keys, kBlock, words_, nullptr});
    }
    if (scales.keys) {
      scaleScores(scores, rows, vectors, kBlock, scales.keys);
    }
    float scale = call_.scaling * kLog2E;  // of scores, for powers of two
    if (call_.softcap > 0) {
      capScores(scores, rows, vectors, call_.scaling, call_.softcap);
      scale = kLog2E;
    }
    if (call_.columnBias) {
      for (int64_t m = 0; m < rows; ++m) {
        const float* bias = call_.columnBias + head(queries.begin + m) * call_.biasColumns;
        const int64_t own = std::max<int64_t>(visible(queries.begin + m).end - 1, 0);  // an idle token has none
        addBias(scores + m * kBlock, vectors, call_.softcap > 0 ? 1.0f : call_.scaling, bias + block, bias[own]);
      }
      scale = kLog2E;
    }
    const Softmax state{all.maxima + queries.begin, all.sums + queries.begin * kLanes};
    const auto probable = scales.values ? (whole ? softmax<Kind, true, true> : softmax<Kind, false, true>)
                                        : (whole ? softmax<Kind, true, false> : softmax<Kind, false, false>);
    probable(probabilities, factors, state, scores, ranges, rows, scale, scales.values);
    constexpr int64_t kWords = Products<Kind>::kWords;
    const int64_t step = seen.begin / Kind::kPerWord / kWords * kWords;
    const int64_t steps = roundUp(divideUp(seen.end, Kind::kPerWord), kWords) - step;
    for (int64_t i = 0; i < groups; ++i) {
      const auto [first, last] = part(rows, i, groups);
      Products<Kind>::multiply(
          last - first, valueDim_ / kLanes,
          {all.outputs + (queries.begin + first) * valueDim_, valueDim_, probabilities + first * kBlock + step, kBlock,
           values + step * valueDim_, valueDim_, steps, factors + first});
    }
  }

  void finish(const QueryState& state) {
    for (int64_t i = 0; i < tile_.queries; ++i) {
      const float sum = sumOf(loadVec(state.sums + i * kLanes));
      const Vec factor = broadcast(sum == 0 ? 0 : 1 / sum);  // zero: an idle token
      auto* output = static_cast<Element*>(call_.output) + call_.outputOffset(tile_.row, head(i), token(i));
      for (int64_t d = 0; d < call_.valueDim; d += kLanes) {
        // Adding zero makes +0 of -0: which of them a sum is may depend on zeros added for columns not seen.
        const Vec value = loadVec(state.outputs + i * valueDim_ + d) * factor + 0.0f;
        if (d + kLanes <= call_.valueDim) {
          Kind::store(output + d, value);
          continue;
        }
        Element last[kLanes];
        Kind::store(last, value);
        std::copy_n(last, call_.valueDim - d, output + d);
      }
    }
  }

  int64_t head(int64_t query) const { return tile_.kvHead * group_ + query % group_; }
  int64_t token(int64_t query) const { return tile_.firstToken + query / group_; }
  Range visible(int64_t query) const { return call_.visible(tile_.row, token(query)); }

  using Registers = typename Products<Kind>::Registers;

  const Layout& call_;
  const AttendTile& tile_;
  const Scratch& scratch_;
  const int64_t dim_, valueDim_;
  const int64_t words_;
  const int64_t group_;
};

}  // namespace
}  // namespace step
