// SPDX-License-Identifier: Apache-2.0
//
// Rows of x times weight rows in their natural [N, K] layout, panel by panel and block by block as the caches hold them:
// what `linears` and `expert_linear` have in common. Every output is summed over K in one order, lane by lane in one
// vector, then addLanes(), whatever else is computed with it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "linear_tile.h"
#include "simd.h"

namespace {

// A panel of weight rows stays in the second-level cache while all rows of x pass over it, block by block.
constexpr int64_t kPanelOutputs = 64;
// A chunk of columns of a block of rows stays in the first-level cache while the panel passes over it, beside the
// weights of two tiles.
constexpr int64_t kBlockTiles = 4;
constexpr int64_t kChunkBytes = 28 * 1024;
constexpr int64_t kVectorBytes = sizeof(__m512);
// What one thread reads in about 20 us; less is not worth waking another. Above kFreeRows the arithmetic is what costs.
constexpr int64_t kGrainBytes = 512 * 1024;
constexpr int64_t kFreeRows = 8;

struct Range {
  int64_t begin, end;
};

// Part `i` of `count` even parts of a range that begins at 0.
inline Range part(int64_t size, int64_t i, int64_t count) { return {size * i / count, size * (i + 1) / count}; }

// Rows of x that meet the same weights, packed tile by tile. Tiles have even heights: 8 rows are 4 + 4, not 6 + 2.
struct Input {
  void* packed;
  int64_t rows, columns;
  int64_t stride;         // columns, rounded up to whole vectors
  const int64_t* places;  // the output row of each row; null: their own numbers

  int64_t tiles() const { return (rows + kTileRows - 1) / kTileRows; }
  Range tileRows(int64_t tile) const { return part(rows, tile, tiles()); }
  int64_t place(int64_t row) const { return places ? places[row] : row; }
};

template <class Type>
int64_t packedStride(int64_t columns) {
  return (columns + kStep<Type> - 1) / kStep<Type> * kStep<Type>;
}

struct Linear {
  const void* weight;
  const void* bias;  // null: none
  void* output;
  int64_t outputs;
};

// What an output costs, in bytes read.
template <class Type>
int64_t outputCost(const Input& input) {
  return input.columns * sizeof(typename Type::Element) * std::max(input.rows, kFreeRows) / kFreeRows;
}

// Packs one tile of `input`; `rowOf` is where a row begins.
template <class Type, class RowOf>
void packTile(const Input& input, int64_t tile, RowOf rowOf) {
  using Element = typename Type::Element;
  const auto [first, last] = input.tileRows(tile);
  const Element* rows[kTileRows];
  for (int64_t row = first; row < last; ++row) {
    rows[row - first] = rowOf(row);
  }
  packRows<Type>(static_cast<Element*>(input.packed) + first * input.stride, rows, last - first, input.columns);
}

// A tile of `count` outputs from n on, its columns beginning at `column`; which rows of x it meets is open.
template <class Type>
TARGET_AVX512 Tile<Type> makeTile(const Input& input, const Linear& linear, int64_t n, int64_t count, int64_t column) {
  using Element = typename Type::Element;
  Tile<Type> tile;
  // A short tile repeats its last row; the mask leaves the copies out.
  for (int64_t j = 0; j < kTileVectors; ++j) {
    tile.weights[j] =
        static_cast<const Element*>(linear.weight) + (n + std::min(j, count - 1)) * input.columns + column;
  }
  const auto* bias = static_cast<const Element*>(linear.bias);
  tile.mask = static_cast<__mmask8>((1 << count) - 1);
  // Adding -0 changes no value, adding +0 would make +0 of -0.
  tile.bias = bias ? Type::load4(bias + n, tile.mask) : _mm_set1_ps(-0.0f);
  return tile;
}

// Outputs of a panel for the rows of some tiles.
template <class Type>
TARGET_AVX512 void computeBlock(const Input& input, const Linear& linear, Range panel, Range tiles) {
  using Element = typename Type::Element;
  const int64_t firstRow = input.tileRows(tiles.begin).begin;
  const int64_t rows = input.tileRows(tiles.end - 1).end - firstRow;
  const int64_t vectors = input.stride / kStep<Type>;
  const int64_t fitting = kChunkBytes / kVectorBytes / rows;
  const int64_t chunks = (vectors + fitting - 1) / fitting;
  Sums sums[kPanelOutputs / kTileVectors][kBlockTiles * kTileRows];
  for (int64_t i = 0; i < chunks; ++i) {
    const int64_t begin = part(vectors, i, chunks).begin * kStep<Type>;
    const int64_t end = std::min(part(vectors, i, chunks).end * kStep<Type>, input.columns);
    const Chunk chunk{end - begin, i == 0, i == chunks - 1};
    for (int64_t n = panel.begin; n < panel.end; n += kTileVectors) {
      Tile<Type> tile = makeTile<Type>(input, linear, n, std::min(panel.end - n, kTileVectors), begin);
      // After the panel its next chunk, or else another panel: after the last block, that is right.
      const bool again = n + kTileVectors >= panel.end && !chunk.last;
      tile.ahead = again ? (panel.begin - n) * input.columns + chunk.columns : kTileVectors * input.columns;
      for (int64_t t = tiles.begin; t < tiles.end; ++t) {
        const auto [first, last] = input.tileRows(t);
        tile.x = static_cast<const Element*>(input.packed) + first * input.stride + begin * (last - first);
        for (int64_t row = first; row < last; ++row) {
          tile.outputs[row - first] = static_cast<Element*>(linear.output) + input.place(row) * linear.outputs + n;
        }
        multiplyTile(last - first, tile, chunk, sums[(n - panel.begin) / kTileVectors] + (first - firstRow));
      }
    }
  }
}

// The outputs in a range, of every row.
template <class Type>
void computeOutputs(const Input& input, const Linear& linear, Range outputs) {
  const int64_t tiles = input.tiles();
  const int64_t blocks = (tiles + kBlockTiles - 1) / kBlockTiles;
  for (int64_t n = outputs.begin; n < outputs.end; n += kPanelOutputs) {
    for (int64_t i = 0; i < blocks; ++i) {
      computeBlock<Type>(input, linear, {n, std::min(n + kPanelOutputs, outputs.end)}, part(tiles, i, blocks));
    }
  }
}

}  // namespace
