// SPDX-License-Identifier: Apache-2.0
//
// Linear layers of bfloat16 by the tile registers of AMX. A tile of weights is 16 rows of 32 columns where they are; a
// tile of x is packed, the word of a pair of columns beside that of the next row. Every output is summed over K in one
// order, 32 columns after 32 columns, whatever else is computed with it.
//
// All registers keep their full size: a tile of fewer than 16 rows of x is read with the words that follow it, which
// reach sums that nobody stores.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "amx.h"
#include "amx_few.h"
#include "linear_block.h"
#include "transpose.h"

namespace step {
namespace {

class AmxWorker {
 public:
  using Element = BFloat16::Element;
  using Packed = BFloat16::Packed;

  // What is shared out: tiles of x, batches of them, and weight rows. Two tiles of weights meet two of x: four products
  // for four loads.
  static constexpr int64_t kTileRows = kAmxLines, kBatchTiles = 8, kOutputs = 2 * kAmxLines;
  using Input = TiledInput<kTileRows>;

 private:
  static constexpr int64_t kColumns = kStep<BFloat16>;  // of a tile
  static_assert(kColumns * sizeof(Element) == kAmxLineBytes && kLanes == kAmxLines);
  static constexpr int64_t kSums = kLanes * kLanes;  // of a tile
  // Two tiles of weights and two of x, of so many columns each, fill a first-level cache of 48 KB.
  static constexpr int64_t kChunkSteps = 12;
  static constexpr int64_t kSumsBytes = kPanelOutputs / kAmxLines * kBatchTiles * kAmxBytes;

 public:
  // Memory of a worker: the sums of a panel and a batch, and a tile of weights.
  static constexpr int64_t kBytes = kSumsBytes + kAmxBytes;

  AmxWorker(const Input& input, const Linear& linear, void* memory)
      : input_(input),
        linear_(linear),
        sums_(static_cast<float*>(memory)),
        copy_(reinterpret_cast<Element*>(static_cast<char*>(memory) + kSumsBytes)) {}

  // Memory for packed rows, and for what is read behind the last tile.
  static int64_t packedBytes(int64_t rows, int64_t columns) {
    return rows * packedStride<BFloat16>(columns) * sizeof(Packed) + kAmxLineBytes;
  }

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

  // What is read next it asks for as it reads.
  void run(Range outputs, Range tiles, Bytes) {
    if (input_.rows <= kFewRows) {
      return input_.rows == 1 ? computeFew<1>(outputs) : computeFew<2>(outputs);
    }
    const AmxTiles registers;
    const int64_t count = outputs.end - outputs.begin;
    const int64_t panels = divideUp(count, kPanelOutputs);
    const int64_t batches = divideUp(tiles.end - tiles.begin, kBatchTiles);
    for (int64_t i = 0; i < panels; ++i) {
      const Range panel = shift(part(count, i, panels, kOutputs), outputs.begin);
      for (int64_t j = 0; j < batches; ++j) {
        computeBatch(panel, shift(part(tiles.end - tiles.begin, j, batches), tiles.begin));
      }
    }
  }

 private:
  // Of a panel and a batch, up to two tiles of weights and two of x, and the columns that they are asked for.
  struct Task {
    const Element* weights;
    int64_t outputs;
    const Packed* x[2];
    int64_t rows[2];
    float* sums[2][2];  // of a tile of weights and one of x
    Chunk chunk;
    int64_t ahead;  // from these weights to those that are read next; 0: those are near
  };

  template <int Rows>
  void computeFew(Range outputs) const {
    static_assert(Rows <= kFewRows);
    const auto* x = static_cast<const Packed*>(input_.packed);
    for (int64_t n = outputs.begin; n < outputs.end; n += kLanes) {
      const int64_t count = std::min<int64_t>(outputs.end - n, kLanes);
      const auto* weights = static_cast<const Element*>(linear_.weight) + n * input_.columns;
      multiplyFew<Rows>(weights, input_.columns, count, x, input_.columns, kLanes * input_.columns, sums_);
      const Vec biases = biasesOf(n, count);
      for (int64_t row = 0; row < Rows; ++row) {
        storeRow(loadVec(sums_ + row * kLanes) + biases, row, n, count);
      }
    }
  }

  void computeBatch(Range panel, Range batch) {
    const int64_t steps = input_.stride / kColumns;
    // Weights that are used once need no cache.
    const bool once = batch.end - batch.begin <= 2;
    const int64_t chunks = once ? 1 : std::max<int64_t>(divideUp(steps, kChunkSteps), 1);
    for (int64_t i = 0; i < chunks; ++i) {
      const Range range = part(steps, i, chunks);
      const int64_t begin = range.begin * kColumns;
      const Chunk chunk{std::min(range.end * kColumns, input_.columns) - begin, i == 0, i == chunks - 1};
      for (int64_t n = panel.begin; n < panel.end; n += kOutputs) {
        for (int64_t t = batch.begin; t < batch.end; t += 2) {
          compute(panel, batch, n, t, begin, chunk);
        }
      }
    }
  }

  void compute(Range panel, Range batch, int64_t n, int64_t t, int64_t begin, Chunk chunk) {
    const int64_t tiles = std::min<int64_t>(batch.end - t, 2);
    Task task{};
    task.weights = static_cast<const Element*>(linear_.weight) + n * input_.columns + begin;
    task.outputs = std::min(panel.end - n, kOutputs);
    task.chunk = chunk;
    if (t == batch.begin) {
      const bool again = n + kOutputs >= panel.end && !chunk.last;
      task.ahead = again ? (panel.begin - n) * input_.columns + chunk.columns : kOutputs * input_.columns;
    }
    for (int64_t b = 0; b < tiles; ++b) {
      const auto [first, last] = input_.tileRows(t + b);
      task.rows[b] = last - first;
      task.x[b] = static_cast<const Packed*>(input_.packed) + first * input_.stride + begin * (last - first);
      for (int64_t a = 0; a < 2; ++a) {
        const int64_t line = (n - panel.begin) / kAmxLines + a;
        task.sums[a][b] = sums_ + (line * kBatchTiles + t - batch.begin + b) * kSums;
      }
    }
    tiles == 2 ? multiply<2>(task) : multiply<1>(task);
    if (chunk.last) {
      for (int64_t a = 0; a * kAmxLines < task.outputs; ++a) {
        for (int64_t b = 0; b < tiles; ++b) {
          store(task.sums[a][b], n + a * kAmxLines, task.outputs - a * kAmxLines, input_.tileRows(t + b));
        }
      }
    }
  }

  // Registers 0 to 3 are sums, 4 and 5 weights, 6 and 7 rows of x.
  template <int Tiles>
  void multiply(const Task& task) {
    loadSums<0>(task, 0, 0);
    loadSums<1>(task, 1, 0);
    if constexpr (Tiles == 2) {
      loadSums<2>(task, 0, 1);
      loadSums<3>(task, 1, 1);
    }
    for (int64_t k = 0; k < task.chunk.columns; k += kColumns) {
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
    amxStore<0>(task.sums[0][0], kAmxLineBytes);
    amxStore<1>(task.sums[1][0], kAmxLineBytes);
    if constexpr (Tiles == 2) {
      amxStore<2>(task.sums[0][1], kAmxLineBytes);
      amxStore<3>(task.sums[1][1], kAmxLineBytes);
    }
  }

  template <int Register>
  static void loadSums(const Task& task, int a, int b) {
    if (task.chunk.first) {
      amxZero<Register>();
    } else {
      amxLoad<Register>(task.sums[a][b], kAmxLineBytes);
    }
  }

  // A tile of weights from column k on. Where rows or columns are missing, a copy with zeros in their place: behind the
  // last row there may be no memory, behind a row's last column is the next row, and zero times infinity is not zero.
  template <int Register>
  void loadWeights(const Task& task, int64_t first, int64_t k) {
    const Element* weights = task.weights + first * input_.columns + k;
    const int64_t rows = std::clamp<int64_t>(task.outputs - first, 0, kAmxLines);
    const int64_t columns = std::min(task.chunk.columns - k, kColumns);
    if (task.ahead != 0) {
      for (int64_t row = 0; row < rows; ++row) {
        prefetch(weights + row * input_.columns + task.ahead);
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

  // The outputs of a tile, from number n on, to their rows.
  void store(const float* sums, int64_t n, int64_t outputs, Range rows) const {
    const int64_t count = std::min<int64_t>(outputs, kLanes);
    const Vec biases = biasesOf(n, count);
    Vec lines[kLanes];
    UNROLL for (int i = 0; i < kLanes; ++i) {
      lines[i] = loadVec(sums + i * kLanes);
    }
    transpose(lines);
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      storeRow(lines[row - rows.begin] + biases, row, n, count);
    }
  }

  Vec biasesOf(int64_t n, int64_t count) const {
    const auto* bias = static_cast<const Element*>(linear_.bias);
    // Adding -0 changes no value, adding +0 would make +0 of -0.
    return !bias             ? broadcast(-0.0f)
           : count == kLanes ? BFloat16::load(bias + n)
                             : loadSome<BFloat16>(bias + n, count);
  }

  void storeRow(Vec sums, int64_t row, int64_t n, int64_t count) const {
    Element values[kLanes];
    BFloat16::store(values, sums);
    auto* output = static_cast<Element*>(linear_.output) + input_.place(row) * linear_.outputStride + n;
    std::memcpy(output, values, count * sizeof(Element));
  }

  const Input& input_;
  const Linear& linear_;
  float* const sums_;
  Element* const copy_;
};

}  // namespace
}  // namespace step
