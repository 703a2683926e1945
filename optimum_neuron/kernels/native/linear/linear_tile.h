// SPDX-License-Identifier: Apache-2.0
//
// One tile of a linear layer: some rows of x times 4 weight rows, in registers.
#pragma once

#include <cstdint>

#include "vectors/elements.h"
#include "vectors/simd.h"

namespace step {
namespace {

// With 32 registers 6 x 4 sums, 4 vectors of the weights and one of x fit; with 16, 3 x 4 sums, 3 vectors of x and one
// of the weights; and where products need a register before they are added, 2 x 4.
#if defined(STEP_AVX2)
constexpr int64_t kTileRows = 3;
#else
constexpr int64_t kTileRows = kManyRegisters ? 6 : 2;
#endif
constexpr int64_t kTileOutputs = 4;

template <class Kind>
constexpr int64_t kStep = kLanes * Kind::kPerWord;  // elements of a vector

using Sums = Vec[kTileOutputs];  // of one row of x, one vector for each weight row of the tile

// Weight rows where they are; converted as they are read. Asks memory for what is read next, or, where an earlier block of
// rows has read all of the panel, for nothing: on AVX2 that is a tenth of what the products take.
template <class Kind, bool Asks = true>
struct PlainWeights {
  const typename Kind::Element* rows[kTileOutputs];
  int64_t ahead;  // from these weights to those that are read next

  template <class... Count>
  INLINE typename Kind::Words load(int j, int64_t k, Count... count) const {
    if constexpr (Asks) {
      // The hardware alone stops at the end of each page, and so of short rows.
      prefetchStream(rows[j] + (k + ahead));
    }
    return Kind::loadWords(rows[j] + k, count...);
  }
};

// Weight rows as packRows() leaves them.
template <class Kind>
struct PackedWeights {
  const typename Kind::Packed* rows;

  template <class... Count>
  INLINE typename Kind::Words load(int j, int64_t k, Count...) const {
    return Kind::loadPacked(rows + k * kTileOutputs + j * kStep<Kind>);
  }
};

template <class Kind, class Weights>
struct Tile {
  using Element = typename Kind::Element;

  const typename Kind::Packed* x;  // packed
  Weights weights;
  Vec4 bias;
  Element* outputs[kTileRows];  // of each row
  int64_t count;                // of the outputs that are stored
};

// Which columns a tile is asked for: all in one go, or chunk by chunk with the sums kept in between.
struct Chunk {
  int64_t columns;
  bool first, last;
};

// Rows as tiles read them: the first vector of each row, then the second of each, the last one filled up with zeros. A
// tile is then one stream, where rows a power of two apart would displace each other from the caches.
// Asks memory for what is `ahead` of them.
template <class Kind>
INLINE void packRows(
    typename Kind::Packed* to, const typename Kind::Element* const* from, int64_t rows, int64_t columns,
    int64_t ahead = 0) {
  constexpr int64_t step = kStep<Kind>;
  for (int64_t k = 0; k < columns; k += step) {
    const bool whole = k + step <= columns;
    for (int64_t m = 0; m < rows; ++m, to += step) {
      const auto* row = from[m] + k;
      prefetchFar(row + ahead);
      Kind::storePacked(to, whole ? Kind::loadWords(row) : Kind::loadWords(row, columns - k));
    }
  }
}


// The sum of the lanes of each of four vectors.
INLINE Vec4 addLanes(const Sums& v) {
  const Vec v01 = shuffle<Unpack<1, 0>>(v[0], v[1]) + shuffle<Unpack<1, 1>>(v[0], v[1]);
  const Vec v23 = shuffle<Unpack<1, 0>>(v[2], v[3]) + shuffle<Unpack<1, 1>>(v[2], v[3]);
  Vec quarters = shuffle<Unpack<2, 0>>(v01, v23) + shuffle<Unpack<2, 1>>(v01, v23);
  if constexpr (kLanes == 16) {
    quarters += shuffle<Rotate<kLanes / 2>>(quarters, quarters);
  }
  if constexpr (kLanes >= 8) {
    quarters += shuffle<Rotate<4>>(quarters, quarters);
  }
  return __builtin_shufflevector(quarters, quarters, 0, 1, 2, 3);
}

// Columns from k on: a vector of each row of x times a vector of each weight row. `count...` is empty or, where less
// than a vector is left, the number of columns.
template <class Kind, class Weights, int Rows, class... Count>
INLINE void multiplyStep(Sums (&sums)[Rows], const Tile<Kind, Weights>& tile, int64_t k, Count... count) {
  using Words = typename Kind::Words;
  const auto* x = tile.x + k * Rows;
  if constexpr (Rows < kTileOutputs) {
    Words rows[Rows];
    UNROLL for (int m = 0; m < Rows; ++m) {
      rows[m] = Kind::loadPacked(x + m * kStep<Kind>);
    }
    UNROLL for (int j = 0; j < kTileOutputs; ++j) {
      const Words weights = tile.weights.load(j, k, count...);
      UNROLL for (int m = 0; m < Rows; ++m) {
        sums[m][j] = Kind::multiplyAdd(rows[m], weights, sums[m][j]);
      }
    }
  } else {
    Words weights[kTileOutputs];
    UNROLL for (int j = 0; j < kTileOutputs; ++j) {
      weights[j] = tile.weights.load(j, k, count...);
    }
    UNROLL for (int m = 0; m < Rows; ++m) {
      const Words row = Kind::loadPacked(x + m * kStep<Kind>);
      UNROLL for (int j = 0; j < kTileOutputs; ++j) {
        sums[m][j] = Kind::multiplyAdd(row, weights[j], sums[m][j]);
      }
    }
  }
}

// Rows of packed x times the weight rows: adds a chunk of columns to `total`, stores the outputs after the last.
template <class Kind, class Weights, int Rows>
void multiplyTile(const Tile<Kind, Weights>& tile, Chunk chunk, Sums* total) {
  Sums sums[Rows];
  UNROLL for (int m = 0; m < Rows; ++m) {
    UNROLL for (int j = 0; j < kTileOutputs; ++j) {
      sums[m][j] = chunk.first ? Vec{} : total[m][j];
    }
  }
  int64_t k = 0;
  for (; k + kStep<Kind> <= chunk.columns; k += kStep<Kind>) {
    multiplyStep<Kind>(sums, tile, k);
  }
  if (k < chunk.columns) {
    multiplyStep<Kind>(sums, tile, k, chunk.columns - k);
  }
  if (chunk.last) {
    UNROLL for (int m = 0; m < Rows; ++m) {
      store4<Kind>(tile.outputs[m], addLanes(sums[m]) + tile.bias, tile.count);
    }
    return;
  }
  UNROLL for (int m = 0; m < Rows; ++m) {
    UNROLL for (int j = 0; j < kTileOutputs; ++j) {
      total[m][j] = sums[m][j];
    }
  }
}

template <class Kind, class Weights, size_t... I>
void multiplyTile(
    int64_t rows, const Tile<Kind, Weights>& tile, Chunk chunk, Sums* total, std::index_sequence<I...>) {
  static constexpr void (*kTiles[])(const Tile<Kind, Weights>&, Chunk, Sums*) = {
      multiplyTile<Kind, Weights, static_cast<int>(I) + 1>...};
  kTiles[rows - 1](tile, chunk, total);
}

template <class Kind, class Weights>
void multiplyTile(int64_t rows, const Tile<Kind, Weights>& tile, Chunk chunk, Sums* total) {
  multiplyTile(rows, tile, chunk, total, std::make_index_sequence<kTileRows>());
}

}  // namespace
}  // namespace step
