// SPDX-License-Identifier: Apache-2.0
//
// One tile of a linear layer: up to 6 rows of x times 4 weight rows, in registers.
#pragma once

#include <cstdint>

#include "simd.h"

namespace {

template <class Type>
constexpr int64_t kStep = kLanes * Type::kPerWord;  // elements of a vector

using Sums = __m512[kTileVectors];  // of one row of x, one vector for each weight row of the tile

template <class Type>
struct Tile {
  using Element = typename Type::Element;

  const Element* x;  // packed
  const Element* weights[kTileVectors];
  int64_t ahead;  // from these weights to those that are read next
  __m128 bias;
  Element* outputs[kTileRows];  // of each row
  __mmask8 mask;                // of the outputs that are stored
};

// Which columns a tile is asked for: all in one go, or chunk by chunk with the sums kept in between.
struct Chunk {
  int64_t columns;
  bool first, last;
};

// Rows of x as tiles read them: the first vector of each row, then the second of each, the last one filled up with
// zeros. A tile is then one stream, where rows a power of two apart would displace each other from the caches.
template <class Type>
TARGET_AVX512 void packRows(
    typename Type::Element* to, const typename Type::Element* const* from, int64_t rows, int64_t columns) {
  for (int64_t k = 0; k < columns; k += kStep<Type>) {
    const bool whole = k + kStep<Type> <= columns;
    for (int64_t m = 0; m < rows; ++m, to += kStep<Type>) {
      const auto* row = from[m] + k;
      _mm512_storeu_si512(to, whole ? Type::loadWords(row) : Type::loadWords(row, columns - k));
    }
  }
}

// The sum of the lanes of each of four vectors.
INLINE_AVX512 __m128 addLanes(const Sums& v) {
  const __m512 v01 = _mm512_add_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
  const __m512 v23 = _mm512_add_ps(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
  const __m512 quarters = _mm512_add_ps(_mm512_shuffle_ps(v01, v23, 0x44), _mm512_shuffle_ps(v01, v23, 0xee));
  const __m256 halves = _mm256_add_ps(_mm512_castps512_ps256(quarters), _mm512_extractf32x8_ps(quarters, 1));
  return _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
}

// Columns from k on: a vector of each row of x times a vector of each weight row. `count...` is empty or, where less
// than a vector is left, the number of columns.
template <class Type, int Rows, class... Count>
INLINE_AVX512 void multiplyStep(Sums (&sums)[Rows], const Tile<Type>& tile, int64_t k, Count... count) {
  __m512i vectors[kTileVectors];
  UNROLL for (int j = 0; j < kTileVectors; ++j) {
    vectors[j] = Type::loadWords(tile.weights[j] + k, count...);
    // The hardware alone stops at the end of each page, and so of short rows.
    _mm_prefetch(reinterpret_cast<const char*>(tile.weights[j] + (k + tile.ahead)), _MM_HINT_T0);
  }
  UNROLL for (int m = 0; m < Rows; ++m) {
    const __m512i row = Type::loadWords(tile.x + k * Rows + m * kStep<Type>);
    UNROLL for (int j = 0; j < kTileVectors; ++j) {
      sums[m][j] = Type::multiplyAdd(row, vectors[j], sums[m][j]);
    }
  }
}

// Rows of packed x times the weight rows: adds a chunk of columns to `total`, stores the outputs after the last.
template <class Type, int Rows>
TARGET_AVX512 void multiplyTile(const Tile<Type>& tile, Chunk chunk, Sums* total) {
  Sums sums[Rows];
  UNROLL for (int m = 0; m < Rows; ++m) {
    UNROLL for (int j = 0; j < kTileVectors; ++j) {
      sums[m][j] = chunk.first ? _mm512_setzero_ps() : total[m][j];
    }
  }
  int64_t k = 0;
  for (; k + kStep<Type> <= chunk.columns; k += kStep<Type>) {
    multiplyStep(sums, tile, k);
  }
  if (k < chunk.columns) {
    multiplyStep(sums, tile, k, chunk.columns - k);
  }
  if (chunk.last) {
    UNROLL for (int m = 0; m < Rows; ++m) {
      Type::store4(tile.outputs[m], _mm_add_ps(addLanes(sums[m]), tile.bias), tile.mask);
    }
    return;
  }
  UNROLL for (int m = 0; m < Rows; ++m) {
    UNROLL for (int j = 0; j < kTileVectors; ++j) {
      total[m][j] = sums[m][j];
    }
  }
}

template <class Type>
void multiplyTile(int64_t rows, const Tile<Type>& tile, Chunk chunk, Sums* total) {
  static constexpr void (*kTiles[kTileRows])(const Tile<Type>&, Chunk, Sums*) = {
      multiplyTile<Type, 1>, multiplyTile<Type, 2>, multiplyTile<Type, 3>,
      multiplyTile<Type, 4>, multiplyTile<Type, 5>, multiplyTile<Type, 6>};
  kTiles[rows - 1](tile, chunk, total);
}

}  // namespace
