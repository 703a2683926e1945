// SPDX-License-Identifier: Apache-2.0
//
// Attention of one tile: some tokens of one row, with the heads that share one kv head.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "attention_call.h"
#include "online_softmax.h"
#include "pack_block.h"
#include "simd.h"
#include "tile_multiply.h"

namespace {

// Some tokens of one row with the heads of one kv head. Query i is head i % group of token i / group.
struct Tile {
  int64_t row, kvHead, firstToken, queries;
  Range seen;    // columns that some of the tokens see
  Range common;  // columns that all of them see
};

// What a thread works in: the queries of a tile and their state, and one packed block.
struct Scratch {
  float *sums, *outputs, *maxima;
  Word *queries, *keys, *values;

  // A multiple of a cache line, as is every part.
  static int64_t floats(int64_t queries, int64_t dim) {
    return queries * (kLanes + 2 * dim) + roundUp(queries) + 2 * kBlock * dim;
  }
  Scratch(float* memory, int64_t count, int64_t dim)
      : sums(memory),
        outputs(sums + count * kLanes),
        maxima(outputs + count * dim),
        queries(reinterpret_cast<Word*>(maxima + roundUp(count))),
        keys(queries + count * dim),
        values(keys + kBlock * dim) {}

 private:
  static int64_t roundUp(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }
};

// The part of `range` in a block, counted from its begin.
Range cut(Range range, int64_t block) {
  return {std::clamp<int64_t>(range.begin - block, 0, kBlock), std::clamp<int64_t>(range.end - block, 0, kBlock)};
}

uint64_t bits(Range range) {
  const auto below = [](int64_t n) { return n < 64 ? (uint64_t{1} << n) - 1 : ~uint64_t{0}; };
  return range.begin < range.end ? below(range.end) & ~below(range.begin) : 0;
}

template <class Type>
class TileWorker {
 public:
  using Element = typename Type::Element;

  TileWorker(const Call& call, const Tile& tile, const Scratch& scratch)
      : call_(call),
        tile_(tile),
        scratch_(scratch),
        words_(call.dim / Type::kPerWord),
        group_(call.group()),
        scale_(call.scaling * static_cast<float>(M_LOG2E)) {}

  TARGET_AVX512 void run() {
    start();
    const int64_t offset = call_.cacheOffset(tile_.row, tile_.kvHead);
    const auto* keys = static_cast<const Element*>(call_.keys) + offset;
    const auto* values = static_cast<const Element*>(call_.values) + offset;
    for (int64_t block = tile_.seen.begin / kBlock * kBlock; block < tile_.seen.end; block += kBlock) {
      attendBlock(block, keys + block * call_.dim, values + block * call_.dim);
    }
    finish();
  }

 private:
  TARGET_AVX512 void start() {
    std::fill_n(scratch_.sums, tile_.queries * kLanes, 0.0f);
    std::fill_n(scratch_.outputs, tile_.queries * call_.dim, 0.0f);
    // Finite: the difference of two of them must not be NaN.
    std::fill_n(scratch_.maxima, tile_.queries, std::numeric_limits<float>::lowest() / 2);
    for (int64_t i = 0; i < tile_.queries; ++i) {
      const int64_t head = tile_.kvHead * group_ + i % group_;
      const auto* query = static_cast<const Element*>(call_.query) + call_.queryOffset(tile_.row, head, token(i));
      std::memcpy(scratch_.queries + i * words_, query, words_ * sizeof(Word));
    }
  }

  TARGET_AVX512 void attendBlock(int64_t block, const Element* keys, const Element* values) {
    const Range seen = cut(tile_.seen, block);
    const Range common = cut(tile_.common, block);
    const Element* nextKeys = block + kBlock < tile_.seen.end ? keys + kBlock * call_.dim : keys;
    packKeys(
        scratch_.keys, reinterpret_cast<const Word*>(keys), reinterpret_cast<const Word*>(values),
        reinterpret_cast<const Word*>(nextKeys), words_, seen.end);
    const bool same = common.begin <= seen.begin && common.end >= seen.end;
    // Probability zero hides a value from a query only if their product is zero. If not, each query has its own copy.
    if (same || allFinite<Type>(values, call_.dim, seen)) {
      const Word* packed = packValues(Type(), scratch_.values, values, call_.dim, seen);
      const int64_t groups = (tile_.queries + kTileRows - 1) / kTileRows;
      for (int64_t i = 0; i < groups; ++i) {
        attendRows(block, packed, {tile_.queries * i / groups, tile_.queries * (i + 1) / groups});
      }
      return;
    }
    for (int64_t i = 0; i < tile_.queries; ++i) {
      attendRows(block, packValues(Type(), scratch_.values, values, call_.dim, cut(visible(i), block)), {i, i + 1});
    }
  }

  TARGET_AVX512 void attendRows(int64_t block, const Word* values, Range queries) {
    Range seen{kBlock, 0};
    uint64_t masks[kTileRows];
    const int64_t rows = queries.end - queries.begin;
    for (int64_t m = 0; m < rows; ++m) {
      const Range range = cut(visible(queries.begin + m), block);
      masks[m] = bits(range);
      if (masks[m]) {
        seen = {std::min(seen.begin, range.begin), std::max(seen.end, range.end)};
      }
    }
    if (seen.begin >= seen.end) {
      return;
    }
    alignas(64) float scores[kTileRows * kBlock];
    alignas(64) Word probabilities[kTileRows * kBlock];
    float factors[kTileRows];
    const int64_t vectors = (seen.end + kLanes - 1) / kLanes;
    const Word* query = scratch_.queries + queries.begin * words_;
    multiply<Type>(rows, vectors, {scores, kBlock, query, words_, scratch_.keys, kBlock, words_, nullptr});
    const Softmax state{scratch_.maxima + queries.begin, scratch_.sums + queries.begin * kLanes};
    const bool whole = std::all_of(masks, masks + rows, [](uint64_t mask) { return mask == ~uint64_t{0}; });
    (whole ? softmax<Type, true> : softmax<Type, false>)(probabilities, factors, state, scores, masks, rows, scale_);
    const int64_t step = seen.begin / Type::kPerWord;
    const int64_t steps = (seen.end + Type::kPerWord - 1) / Type::kPerWord - step;
    for (int64_t d = 0; d < call_.dim; d += kTileVectors * kLanes) {
      multiply<Type>(
          rows, std::min(kTileVectors, (call_.dim - d) / kLanes),
          {scratch_.outputs + queries.begin * call_.dim + d, call_.dim, probabilities + step, kBlock,
           values + step * call_.dim + d, call_.dim, steps, factors});
    }
  }

  TARGET_AVX512 void finish() {
    for (int64_t i = 0; i < tile_.queries; ++i) {
      const float sum = _mm512_reduce_add_ps(_mm512_loadu_ps(scratch_.sums + i * kLanes));
      const __m512 factor = _mm512_set1_ps(sum == 0 ? 0 : 1 / sum);  // zero: an idle token
      const int64_t head = tile_.kvHead * group_ + i % group_;
      auto* output = static_cast<Element*>(call_.output) + call_.outputOffset(tile_.row, head, token(i));
      for (int64_t d = 0; d < call_.dim; d += kLanes) {
        // Adding zero makes +0 of -0: which of them a sum is may depend on zeros added for columns not seen.
        const __m512 value = _mm512_loadu_ps(scratch_.outputs + i * call_.dim + d);
        Type::store(output + d, _mm512_fmadd_ps(value, factor, _mm512_setzero_ps()));
      }
    }
  }

  int64_t token(int64_t query) const { return tile_.firstToken + query / group_; }
  Range visible(int64_t query) const { return call_.visible(tile_.row, token(query)); }

  const Call& call_;
  const Tile& tile_;
  const Scratch& scratch_;
  const int64_t words_;
  const int64_t group_;
  const float scale_;  // of scores, for powers of two
};

}  // namespace
