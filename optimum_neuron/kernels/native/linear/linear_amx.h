// SPDX-License-Identifier: Apache-2.0
//
// Linear layers of bfloat16 by the tile registers of AMX. A tile of weights is 16 rows of 32 columns where they are; a
// tile of x is packed, the word of a pair of columns next to that of the next row. Every output is summed over K in one
// order, 32 columns after 32 columns, whatever else is computed with it.
//
// All registers keep their full size: a tile of fewer than 16 rows of x is read with the words that follow it, which
// reach sums that are not stored.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "common/ahead.h"
#include "vectors/amx.h"
#include "vectors/amx_store.h"
#include "linear/linear_block.h"
#include "vectors/transpose.h"

namespace step {
namespace {

class AmxWorker {
 public:
  using Element = BFloat16::Element;
  using Packed = BFloat16::Packed;

  // What is shared out: tiles of x, batches of them, and weight rows. Two tiles of weights meet two of x: four products
  // for four loads.
  static constexpr int64_t kTileRows = kAmxLines, kOutputs = 2 * kAmxLines;
  using Input = TiledInput<kTileRows>;

 private:
  static constexpr int64_t kColumns = kStep<BFloat16>;  // of a tile
  static_assert(kColumns * sizeof(Element) == kAmxLineBytes && kLanes == kAmxLines);
  static constexpr int64_t kSums = kLanes * kLanes;  // of a tile
  // Two tiles of weights and two of x, of so many columns each, fill a first-level cache of 48 KB.
  static constexpr int64_t kChunkSteps = 12;
  // Tiles of x that a panel of weights meets: what they take stays in the second-level cache, of 2 MB where there is AMX.
  static constexpr int64_t kLeastTiles = 8, kMostTiles = 32, kBatchBytes = 640 * 1024;
  // Beside so many, the next panel is asked for in time; else weights are, as they are read.
  static constexpr int64_t kAheadTiles = 16;
  static constexpr int64_t kSumsBytes = kPanelOutputs / kAmxLines * kMostTiles * kAmxBytes;
  static constexpr int64_t kDoneTiles = 4;

 public:
  // Memory of a worker: the sums of a panel and a batch, complete ones, and a tile of weights.
  static constexpr int64_t kBytes = kSumsBytes + (kDoneTiles + 1) * kAmxBytes;

  AmxWorker(const Input& input, const Linear& linear, void* memory)
      : input_(input),
        linear_(linear),
        sums_(static_cast<float*>(memory)),
        complete_(sums_ + kSumsBytes / sizeof(float)),
        copy_(reinterpret_cast<Element*>(complete_ + kDoneTiles * kSums)) {}

  static int64_t batchTiles(const Input& input) {
    return std::clamp<int64_t>(kBatchBytes / (input.stride * kTileRows * sizeof(Packed)), kLeastTiles, kMostTiles);
  }

  template <class Call>
  static int64_t rowBytes(const Call& call) {
    return call.columns * static_cast<int64_t>(sizeof(Element));
  }
  template <class Call>
  static Input inputOf(const Call& call, void* packed, int64_t rows, const int64_t* places) {
    return {packed, rows, call.columns, packedStride<BFloat16>(call.columns), places};
  }

  // Memory for packed rows, and for what is read after the last tile.
  static int64_t packedBytes(const Input& input) { return input.rows * input.stride * sizeof(Packed) + kAmxLineBytes; }

  // Packs one tile of `input`; `rowOf` is where a row begins.
  template <class RowOf>
  static void pack(const Input& input, int64_t tile, RowOf rowOf) {
    const auto [first, last] = input.tileRows(tile);
    const int64_t rows = last - first;
    const Element* from[kTileRows];
    for (int64_t m = 0; m < rows; ++m) {
      from[m] = rowOf(first + m);
    }
    const __mmask16 used = (1 << rows) - 1;
    auto* to = static_cast<Packed*>(input.packed) + first * input.stride;
    for (int64_t k = 0; k < input.columns; k += kColumns) {
      const bool whole = k + kColumns <= input.columns;
      BitVec words[kLanes];
      UNROLL for (int m = 0; m < kLanes; ++m) {
        words[m] = m >= rows ? BitVec{}
                   : whole   ? BFloat16::loadWords(from[m] + k)
                             : BFloat16::loadWords(from[m] + k, input.columns - k);
      }
      if (rows == 1) {
        BFloat16::storePacked(to, words[0]);
        to += kColumns;
        continue;
      }
      transpose(words);
      UNROLL for (int pair = 0; pair < kLanes; ++pair, to += rows * BFloat16::kPerWord) {
        _mm512_mask_storeu_epi32(to, used, (__m512i)words[pair]);
      }
    }
  }

  // `next` are the weights that this thread is likely to read then.
  void run(Range outputs, Range tiles, Bytes next) {
    const AmxTiles registers;
    const int64_t count = outputs.end - outputs.begin, all = tiles.end - tiles.begin;
    const int64_t panels = divideUp(count, kPanelOutputs), batches = divideUp(all, batchTiles(input_));
    const auto panelOf = [&](int64_t i) { return shift(part(count, i, panels, kOutputs), outputs.begin); };
    for (int64_t i = 0; i < panels; ++i) {
      const Range panel = panelOf(i);
      const Bytes then = i + 1 < panels ? weightsOf(panelOf(i + 1)) : next;
      const bool far = all >= kAheadTiles && then.count <= kAheadBytes;
      const int64_t products = chunksOf(all) * divideUp(panel.end - panel.begin, kOutputs) * divideUp(all, 2);
      Ahead ahead(far ? then : Bytes{}, products);
      for (int64_t j = 0; j < batches; ++j) {
        computeBatch(panel, shift(part(all, j, batches), tiles.begin), j == 0 && !far, ahead);
      }
    }
    finish();
  }

 private:
  // Of a panel and a batch, up to two tiles of weights and two of x, and the columns that they are asked for.
  struct Task {
    const Element* weights;
    int64_t outputs;
    const Packed* x[2];
    int64_t rows[2];
    float *before[2][2], *after[2][2];  // sums of a tile of weights and one of x
    Chunk chunk;
    int64_t ahead;  // from these weights to those that are read next; 0: those are near
  };

  // Where complete sums are to be stored.
  struct Done {
    int64_t n, outputs, tiles;
    Range rows[2];
  };

  Bytes weightsOf(Range outputs) const {
    const int64_t row = input_.columns * static_cast<int64_t>(sizeof(Element));
    return {weightsAt(outputs.begin, 0), (outputs.end - outputs.begin) * row};
  }
  const Element* weightsAt(int64_t n, int64_t column) const {
    return static_cast<const Element*>(linear_.weight) + n * input_.columns + column;
  }
  Element* outputAt(int64_t row, int64_t n) const {
    return static_cast<Element*>(linear_.output) + input_.place(row) * linear_.outputStride + n;
  }

  // Weights that are used once need no cache.
  int64_t chunksOf(int64_t tiles) const {
    return tiles <= 2 ? 1 : std::max<int64_t>(divideUp(input_.stride / kColumns, kChunkSteps), 1);
  }

  void computeBatch(Range panel, Range batch, bool asks, Ahead& ahead) {
    const int64_t steps = input_.stride / kColumns, chunks = chunksOf(batch.end - batch.begin);
    for (int64_t i = 0; i < chunks; ++i) {
      const Range range = part(steps, i, chunks);
      const int64_t begin = range.begin * kColumns;
      const Chunk chunk{std::min(range.end * kColumns, input_.columns) - begin, i == 0, i == chunks - 1};
      for (int64_t n = panel.begin; n < panel.end; n += kOutputs) {
        for (int64_t t = batch.begin; t < batch.end; t += 2) {
          ahead.ask();
          compute(panel, batch, n, t, begin, chunk, asks && t == batch.begin);
        }
      }
    }
  }

  void compute(Range panel, Range batch, int64_t n, int64_t t, int64_t begin, Chunk chunk, bool asks) {
    const int64_t tiles = std::min<int64_t>(batch.end - t, 2);
    Task task{};
    task.weights = weightsAt(n, begin);
    task.outputs = std::min(panel.end - n, kOutputs);
    task.chunk = chunk;
    if (asks) {
      const bool again = n + kOutputs >= panel.end && !chunk.last;
      task.ahead = again ? (panel.begin - n) * input_.columns + chunk.columns : kOutputs * input_.columns;
    }
    for (int64_t b = 0; b < tiles; ++b) {
      const auto [first, last] = input_.tileRows(t + b);
      task.rows[b] = last - first;
      task.x[b] = static_cast<const Packed*>(input_.packed) + first * input_.stride + begin * (last - first);
      for (int64_t a = 0; a < 2; ++a) {
        const int64_t line = (n - panel.begin) / kAmxLines + a;
        task.before[a][b] = sums_ + (line * kMostTiles + t - batch.begin + b) * kSums;
        task.after[a][b] = chunk.last ? complete_ + (b * 2 + a) * kSums : task.before[a][b];
      }
    }
    tiles == 2 ? multiply<2>(task) : multiply<1>(task);
    if (chunk.last) {
      done_ = {n, task.outputs, tiles, {input_.tileRows(t), input_.tileRows(t + tiles - 1)}};
    }
  }

  // Registers 0 to 3 are sums, 4 and 5 weights, 6 and 7 rows of x. What was complete before is stored while the first products
  // are under way, and leaves its place to these.
  template <int Tiles>
  void multiply(const Task& task) {
    loadSums<0>(task, 0, 0);
    loadSums<1>(task, 1, 0);
    if constexpr (Tiles == 2) {
      loadSums<2>(task, 0, 1);
      loadSums<3>(task, 1, 1);
    }
    const int64_t first = std::min(task.chunk.columns, 2 * kColumns);
    multiplyColumns<Tiles>(task, {0, first});
    finish();
    multiplyColumns<Tiles>(task, {first, task.chunk.columns});
    amxStore<0>(task.after[0][0], kAmxLineBytes);
    amxStore<1>(task.after[1][0], kAmxLineBytes);
    if constexpr (Tiles == 2) {
      amxStore<2>(task.after[0][1], kAmxLineBytes);
      amxStore<3>(task.after[1][1], kAmxLineBytes);
    }
  }

  template <int Tiles>
  void multiplyColumns(const Task& task, Range columns) {
    for (int64_t k = columns.begin; k < columns.end; k += kColumns) {
      loadWeights<4>(task, 0, k);
      loadWeights<5>(task, kAmxLines, k);
      amxLoad<6>(task.x[0] + k * task.rows[0], task.rows[0] * sizeof(uint32_t));
      amxMultiplyAdd<0, 4, 6>();
      amxMultiplyAdd<1, 5, 6>();
      if constexpr (Tiles == 2) {
        amxLoad<7>(task.x[1] + k * task.rows[1], task.rows[1] * sizeof(uint32_t));
        amxMultiplyAdd<2, 4, 7>();
        amxMultiplyAdd<3, 5, 7>();
      }
    }
  }

  template <int Register>
  static void loadSums(const Task& task, int a, int b) {
    if (task.chunk.first) {
      amxZero<Register>();
    } else {
      amxLoad<Register>(task.before[a][b], kAmxLineBytes);
    }
  }

  // A tile of weights from column k on. Where rows or columns are missing, a copy with zeros in their place: after the
  // last row there may be no memory, after a row's last column is the next row, and zero times infinity is not zero.
  template <int Register>
  void loadWeights(const Task& task, int64_t first, int64_t k) {
    const Element* weights = task.weights + first * input_.columns + k;
    const int64_t rows = std::clamp<int64_t>(task.outputs - first, 0, kAmxLines);
    const int64_t columns = std::min(task.chunk.columns - k, kColumns);
    if (task.ahead != 0) {
      for (int64_t row = 0; row < rows; ++row) {
        prefetchFar(weights + row * input_.columns + task.ahead);
      }
    }
    if (rows == kAmxLines && columns == kColumns) {
      amxLoad<Register>(weights, input_.columns * sizeof(Element));
      return;
    }
    std::memset(copy_, 0, kAmxBytes);
    for (int64_t row = 0; row < rows; ++row) {
      std::memcpy(copy_ + row * kColumns, weights + row * input_.columns, columns * sizeof(Element));
    }
    amxLoad<Register>(copy_, kAmxLineBytes);
  }

  // Stores the outputs that are complete, two to a word.
  void finish() {
    alignas(64) float biases[kOutputs];
    if (done_.tiles == 0) {
      return;
    }
    for (int64_t first = 0; first < kOutputs; first += kLanes) {
      const int64_t count = std::clamp<int64_t>(done_.outputs - first, 0, kLanes);
      storeVec(biases + first, biasesOf(done_.n + first, count));
    }
    for (int64_t b = 0; b < done_.tiles; ++b) {
      storePairs(complete_ + b * kOutputs * kLanes, biases, done_.outputs, done_.rows[b], [&](int64_t row) {
        return outputAt(row, done_.n);
      });
    }
    done_.tiles = 0;
  }

  Vec biasesOf(int64_t n, int64_t count) const {
    const auto* bias = static_cast<const Element*>(linear_.bias);
    // Adding -0 changes no value, adding +0 would make +0 of -0.
    return !bias             ? broadcast(-0.0f)
           : count == kLanes ? BFloat16::load(bias + n)
                             : loadSome<BFloat16>(bias + n, count);
  }

  const Input& input_;
  const Linear& linear_;
  float *const sums_, *const complete_;
  Element* const copy_;
  Done done_{};
};

}  // namespace
}  // namespace step
