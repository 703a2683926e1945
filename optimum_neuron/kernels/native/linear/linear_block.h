// SPDX-License-Identifier: Apache-2.0
//
// Rows of x times weight rows in their natural [N, K] layout by vectors, panel by panel and block by block as the caches
// hold them. Every output is summed over K in one order, lane by lane in one vector, then addLanes(), whatever else is
// computed with it. Codes are unpacked to float32 as they are met, and then computed with as any weight.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "common/ahead.h"
#include "codes/codes.h"
#include "linear/linear_tile.h"
#include "common/pool.h"
#include "common/range.h"

namespace step {
namespace {

// A panel of weight rows stays in the second-level cache while rows of x pass over it, block by block.
constexpr int64_t kPanelOutputs = 64;
// A chunk of columns of a block of rows stays in the first-level cache, with the weights of two tiles, while the panel passes
// over it. Where registers hold many sums, to keep them from chunk to chunk costs more than to read the weights for fewer
// rows: blocks are then as low as leaves all columns in one chunk, if one tile can; and few rows, which are one block, get longer
// chunks.
constexpr int64_t kBlockTiles = 4;
constexpr int64_t kChunkBytes = 28 * 1024, kFewRowsBytes = (kManyRegisters ? 40 : 28) * 1024;
constexpr int64_t kVectorBytes = sizeof(Vec);
// Panels that are asked for while several blocks of rows pass over the one before: of more, the second-level cache would lose
// what it holds.
constexpr int64_t kAheadBytes = 256 * 1024;
// From this many rows on, weights that are converted to float32 are converted once for all rows of a batch: their sums
// and weights fit the second-level cache; a few tiles convert faster, again and again, with their products.
constexpr int64_t kConvertRows = kTileRows == 2 ? 3 : 8 * kTileRows;
constexpr int64_t kBatchTiles = 96 / kTileRows;
constexpr int64_t kPackedVectors = 4096 / kVectorBytes;  // of a converted weight row
// What one thread reads in about 20 us; less is not worth waking another. Above kFreeRows the arithmetic is what costs.
constexpr int64_t kGrainBytes = 512 * 1024;
constexpr int64_t kFreeRows = 8;
// Tasks are shares of the work that are small against a thread's, and large against what it takes to begin one.
constexpr int64_t kTaskBytes = kGrainBytes / 4;
constexpr int64_t kTasksPerThread = 8;

// Tasks for work that costs as much as reading this many bytes.
inline int64_t countTasks(const Pool& pool, int64_t bytes) {
  if (bytes <= kGrainBytes || pool.threads() == 1) {
    return 1;
  }
  return std::min(bytes / kTaskBytes, kTasksPerThread * pool.threads());
}

// Rows of x that meet the same weights, packed tile by tile. Tiles have even heights: 8 rows are 4 + 4, not 6 + 2.
template <int64_t TileRows>
struct TiledInput {
  void* packed;
  int64_t rows, columns;
  int64_t stride;         // columns, rounded up to whole vectors
  const int64_t* places;  // the output row of each row; null: their own numbers

  int64_t tiles() const { return divideUp(rows, TileRows); }
  Range tileRows(int64_t tile) const { return part(rows, tile, tiles()); }
  int64_t place(int64_t row) const { return places ? places[row] : row; }
};

// The same where weights are codes; columns are unpacked ones.
template <int64_t TileRows>
struct CodedInput : TiledInput<TileRows> {
  CodeForm form;
};

template <class Kind>
int64_t packedStride(int64_t columns) {
  return divideUp(columns, kStep<Kind>) * kStep<Kind>;
}

// What an output costs, in bytes read: its own weights are so many.
inline int64_t outputCost(int64_t rowBytes, int64_t rows) {
  return std::max<int64_t>(rowBytes * std::max(rows, kFreeRows) / kFreeRows, 1);
}

// Outputs of a layer for the rows of some tiles, all of it or what a task has of it.
template <class Kind, bool Coded = false>
class BlockWorker {
 public:
  using Element = typename Kind::Element;
  using Packed = typename Kind::Packed;
  using Input = std::conditional_t<Coded, CodedInput<step::kTileRows>, TiledInput<step::kTileRows>>;

  // What is shared out: tiles of x, batches of them, and weight rows.
  static constexpr int64_t kTileRows = step::kTileRows, kOutputs = kTileOutputs;
  // Memory of a worker: the sums of a panel and a batch, and the packed chunk of a panel.
  static constexpr int64_t kSumsBytes = kPanelOutputs * kBatchTiles * kTileRows * kVectorBytes;
  static constexpr int64_t kBytes = kSumsBytes + kPanelOutputs * kPackedVectors * kVectorBytes;

  BlockWorker(const Input& input, const Linear& linear, void* memory)
      : input_(input),
        linear_(linear),
        blockTiles_(blockTiles(input)),
        sums_(static_cast<Sums*>(memory)),
        panel_(reinterpret_cast<Packed*>(static_cast<char*>(memory) + kSumsBytes)) {}

  static int64_t batchTiles(const Input&) { return kBatchTiles; }

  // Of the weights of a call.
  template <class Call>
  static int64_t rowBytes(const Call& call) {
    return Coded ? bytesOf(call.coding, call.columns) : call.columns * static_cast<int64_t>(sizeof(Element));
  }

  // Rows of a call's x; `packed` and `places` as in TiledInput.
  template <class Call>
  static Input inputOf(const Call& call, void* packed, int64_t rows, const int64_t* places) {
    if constexpr (Coded) {
      const int64_t block = (isPacked(call.coding) ? 2 : 1) * kLanes;
      const CodeForm form = formOf(call.coding, call.columns, call.group, block);
      return {{packed, rows, form.padded(), form.padded(), places}, form};
    } else {
      return {packed, rows, call.columns, packedStride<Kind>(call.columns), places};
    }
  }

  // Memory for packed rows.
  static int64_t packedBytes(const Input& input) { return input.rows * input.stride * sizeof(Packed); }

  // Packs one tile of `input`; `rowOf` is where a row begins.
  template <class RowOf>
  static void pack(const Input& input, int64_t tile, RowOf rowOf) {
    const auto [first, last] = input.tileRows(tile);
    const Element* rows[kTileRows];
    for (int64_t row = first; row < last; ++row) {
      rows[row - first] = rowOf(row);
    }
    Packed* to = static_cast<Packed*>(input.packed) + first * input.stride;
    if constexpr (Coded) {
      packForCodes<Kind>(to, rows, last - first, input.form);
    } else {
      packRows<Kind>(to, rows, last - first, input.columns);
    }
  }

  // `next` are the weights that this thread is likely to read then.
  void run(Range outputs, Range tiles, Bytes next) {
    const int64_t count = outputs.end - outputs.begin, all = tiles.end - tiles.begin;
    const int64_t panels = divideUp(count, kPanelOutputs);
    const bool converts = Coded || (sizeof(Packed) != sizeof(Element) && input_.rows >= kConvertRows);
    const int64_t batchTiles = converts ? kBatchTiles : blockTiles_;
    const int64_t batches = divideUp(all, batchTiles);
    bool near = false;
    for (int64_t i = 0; i < panels; ++i) {
      const Range panel = shift(part(count, i, panels, kTileOutputs), outputs.begin);
      const Bytes then = i + 1 < panels ? weightsOf(shift(part(count, i + 1, panels, kTileOutputs), outputs.begin)) : next;
      const bool asks = all > blockTiles_ && then.count <= kAheadBytes;
      Ahead ahead(asks ? then : Bytes{}, divideUp(panel.end - panel.begin, kTileOutputs) * all);
      for (int64_t j = 0; j < batches; ++j) {
        const Range batch = shift(part(all, j, batches), tiles.begin);
        if (converts) {
          computeBatch<PackedWeights<Kind>>(panel, batch, ahead);
        } else if constexpr (!Coded) {
          if (j == 0 && !near) {
            computeBatch<PlainWeights<Kind>>(panel, batch, ahead);
          } else {
            computeBatch<PlainWeights<Kind, false>>(panel, batch, ahead);
          }
        }
      }
      near = asks;
    }
  }

 private:
  Bytes weightsOf(Range outputs) const {
    const auto* weights = static_cast<const char*>(linear_.weight);
    return {weights + outputs.begin * ownRowBytes(), (outputs.end - outputs.begin) * ownRowBytes()};
  }
  int64_t ownRowBytes() const {
    if constexpr (Coded) {
      return input_.form.rowBytes();
    } else {
      return input_.columns * static_cast<int64_t>(sizeof(Element));
    }
  }

  // Few rows are one block, so that their weights are read once.
  static int64_t blockTiles(const Input& input) {
    if (!kManyRegisters || input.tiles() <= kBlockTiles) {
      return kBlockTiles;
    }
    const int64_t tileBytes = kTileRows * input.stride * static_cast<int64_t>(sizeof(Packed));
    return std::clamp<int64_t>(kChunkBytes / tileBytes, 1, kBlockTiles);
  }

  template <class Weights>
  static constexpr bool kConvert = std::is_same_v<Weights, PackedWeights<Kind>>;

  template <class Weights>
  void computeBatch(Range panel, Range batch, Ahead& ahead) {
    const int64_t tiles = batch.end - batch.begin;
    const int64_t blocks = divideUp(tiles, blockTiles_);
    const int64_t vectors = input_.stride / unit();
    const int64_t rows = std::min(input_.rows, blockTiles_ * kTileRows);
    const int64_t fitting = (input_.tiles() <= kBlockTiles ? kFewRowsBytes : kChunkBytes) / kVectorBytes / rows;
    const int64_t most = (kConvert<Weights> ? std::min(fitting, kPackedVectors) : fitting) * kStep<Kind> / unit();
    const int64_t chunks = std::max<int64_t>(divideUp(vectors, most), 1);
    for (int64_t i = 0; i < chunks; ++i) {
      const Range range = part(vectors, i, chunks);
      const int64_t begin = range.begin * unit();
      const int64_t columns = std::min(range.end * unit(), input_.columns) - begin;
      for (int64_t j = 0; j < blocks; ++j) {
        const Range block = shift(part(tiles, j, blocks), batch.begin);
        computeBlock<Weights>(panel, batch, block, begin, {columns, i == 0, i == chunks - 1}, ahead);
      }
    }
  }

  // Columns that are not parted.
  int64_t unit() const {
    if constexpr (Coded) {
      return input_.form.block;
    } else {
      return kStep<Kind>;
    }
  }

  template <class Weights>
  void computeBlock(Range panel, Range batch, Range block, int64_t begin, Chunk chunk, Ahead& ahead) {
    const int64_t firstRow = input_.tileRows(batch.begin).begin;
    const bool once = block.begin == batch.begin && block.end == batch.end;
    const auto* bias = static_cast<const Element*>(linear_.bias);
    // Whole vectors of packed weights, with ends that are zero like those of x.
    const Chunk whole{kConvert<Weights> ? packedStride<Kind>(chunk.columns) : chunk.columns, chunk.first, chunk.last};
    for (int64_t n = panel.begin; n < panel.end; n += kTileOutputs) {
      Tile<Kind, Weights> tile;
      tile.count = std::min(panel.end - n, kTileOutputs);
      // Adding -0 changes no value, adding +0 would make +0 of -0.
      tile.bias = bias ? load4<Kind>(bias + n, tile.count) : Vec4{-0.0f, -0.0f, -0.0f, -0.0f};
      if constexpr (kConvert<Weights>) {
        // Weights that are used once stay in the first-level cache.
        Packed* packed = panel_ + (once ? 0 : n - panel.begin) * whole.columns;
        tile.weights = {packed};
        if (block.begin == batch.begin) {
          packWeights(packed, panel, n, begin, chunk);
        }
      } else {
        tile.weights = plainWeights<Weights>(panel, n, begin, chunk);
      }
      Sums* sums = sums_ + (n - panel.begin) / kTileOutputs * kBatchTiles * kTileRows;
      for (int64_t t = block.begin; t < block.end; ++t) {
        ahead.ask();
        const auto [first, last] = input_.tileRows(t);
        tile.x = static_cast<const Packed*>(input_.packed) + first * input_.stride + begin * (last - first);
        for (int64_t row = first; row < last; ++row) {
          tile.outputs[row - first] =
              static_cast<Element*>(linear_.output) + input_.place(row) * linear_.outputStride + n;
        }
        multiplyTile(last - first, tile, whole, sums + (first - firstRow));
      }
    }
  }

  void packWeights(Packed* to, Range panel, int64_t n, int64_t begin, Chunk chunk) const {
    if constexpr (Coded) {
      const CodeForm& form = input_.form;
      // After the panel its next chunk, or else another panel.
      const bool again = n + kTileOutputs >= panel.end && !chunk.last;
      const int64_t ahead = again ? (panel.begin - n) * form.rowBytes() + bytesOf(form.coding, chunk.columns)
                                  : kTileOutputs * form.rowBytes();
      for (int64_t j = 0; j < kTileOutputs; ++j) {
        const int64_t row = std::min(n + j, panel.end - 1);
        unpackRow(
            to + j * kStep<Kind>, kTileOutputs * kStep<Kind>, static_cast<const uint8_t*>(linear_.weight), linear_.scales,
            row, form, {begin, begin + chunk.columns}, ahead);
      }
    } else {
      const auto plain = plainWeights<PlainWeights<Kind>>(panel, n, begin, chunk);
      packRows<Kind>(to, plain.rows, kTileOutputs, chunk.columns, plain.ahead);
    }
  }

  template <class Plain>
  Plain plainWeights(Range panel, int64_t n, int64_t begin, Chunk chunk) const {
    Plain weights;
    for (int64_t j = 0; j < kTileOutputs; ++j) {
      weights.rows[j] = weightRow(panel, n + j) + begin;
    }
    // After the panel its next chunk, or else another panel: after the last block, that is right.
    const bool again = n + kTileOutputs >= panel.end && !chunk.last;
    weights.ahead =
        again ? (panel.begin - n) * input_.columns + chunk.columns : kTileOutputs * input_.columns;
    return weights;
  }

  // A short tile repeats the last row, and its copies are not stored.
  const Element* weightRow(Range panel, int64_t n) const {
    return static_cast<const Element*>(linear_.weight) + std::min(n, panel.end - 1) * input_.columns;
  }

  const Input& input_;
  const Linear& linear_;
  const int64_t blockTiles_;
  Sums* const sums_;
  Packed* const panel_;
};

}  // namespace
}  // namespace step
