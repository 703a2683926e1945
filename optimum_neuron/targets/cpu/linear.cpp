// SPDX-License-Identifier: Apache-2.0
//
// linears(x, weights, biases): y_i = x @ weights[i].T + biases[i] for several weights that share their input, in one
// parallel region. Weights are in their natural [N, K] layout: they are read from memory once, at full bandwidth, so a
// few rows of x (token generation) cost what reading costs, and many rows (prompts) what the arithmetic costs.
// bfloat16 and float32, accumulated in float32.
//
// Contracts:
// - x has at least 1 row, weights and biases are contiguous, all are of one type; anything else is an error.
// - A row's result depends on that row, the weight and the bias only, to the bit: not on the number of rows, the other
//   rows, the number of threads, or the weights computed by the same call. Every output is summed over K in one order:
//   lane by lane in one vector, then addLanes(). So graphs of all sizes compute the same.
// - In bfloat16, subnormal numbers count as zero, as the hardware instruction has it.
// - No autograd formula: for inference. The macro OPTIMUM_NEURON_NAMESPACE names the operator's torch namespace.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "linear_tile.h"
#include "simd.h"

#ifndef OPTIMUM_NEURON_NAMESPACE
#error "Define OPTIMUM_NEURON_NAMESPACE: the torch namespace the operators are registered in."
#endif

namespace {

// A panel of weight rows stays in the second-level cache while all rows of x pass over it, block by block.
constexpr int64_t kPanelOutputs = 64;
// A chunk of columns of a block of rows stays in the first-level cache while the panel passes over it, beside the
// weights of two tiles.
constexpr int64_t kBlockTiles = 4;
constexpr int64_t kChunkBytes = 28 * 1024;
// What one thread reads in about 20 us; less is not worth waking another. Above kFreeRows the arithmetic is what costs.
constexpr int64_t kGrainBytes = 512 * 1024;
constexpr int64_t kFreeRows = 8;
constexpr int64_t kVectorBytes = sizeof(__m512);

struct Range {
  int64_t begin, end;
};

// Part `i` of `count` even parts of a range that begins at 0.
Range part(int64_t size, int64_t i, int64_t count) { return {size * i / count, size * (i + 1) / count}; }

// The rows of x, packed tile by tile. Tiles have even heights: 8 rows are 4 + 4, not 6 + 2.
struct Input {
  void* packed;
  int64_t rows, columns;
  int64_t stride;  // columns, rounded up to whole vectors

  int64_t tiles() const { return (rows + kTileRows - 1) / kTileRows; }
  Range tileRows(int64_t tile) const { return part(rows, tile, tiles()); }
};

struct Linear {
  const void* weight;
  const void* bias;  // null: none
  void* output;
  int64_t outputs;
};

template <class Type>
void packInput(const Input& input, const void* x) {
  using Element = typename Type::Element;
  const int64_t bytes = kTileRows * input.stride * sizeof(Element);
  at::parallel_for(0, input.tiles(), (kGrainBytes + bytes - 1) / bytes, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto [first, last] = input.tileRows(i);
      packRows<Type>(
          static_cast<Element*>(input.packed) + first * input.stride,
          static_cast<const Element*>(x) + first * input.columns, last - first, input.columns);
    }
  });
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
  tile.outputStride = linear.outputs;
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
        tile.output = static_cast<Element*>(linear.output) + first * linear.outputs + n;
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

// The outputs of all weights are one range, split evenly: all weight rows have the same length.
template <class Type>
void computeAll(const at::Tensor& x, const std::vector<Linear>& linears) {
  const int64_t columns = x.size(-1), rows = x.numel() / columns;
  const int64_t stride = (columns + kStep<Type> - 1) / kStep<Type> * kStep<Type>;
  const at::Tensor packed = at::empty({rows, stride}, x.options());
  const Input input{packed.mutable_data_ptr(), rows, columns, stride};
  packInput<Type>(input, x.const_data_ptr());
  int64_t total = 0;
  for (const Linear& linear : linears) {
    total += linear.outputs;
  }
  const int64_t cost = input.columns * sizeof(typename Type::Element) * std::max(input.rows, kFreeRows) / kFreeRows;
  at::parallel_for(0, total, (kGrainBytes + cost - 1) / cost, [&](int64_t begin, int64_t end) {
    for (const Linear& linear : linears) {
      const int64_t last = std::min(end, linear.outputs);
      computeOutputs<Type>(input, linear, {std::max<int64_t>(begin, 0), last});
      begin -= linear.outputs;
      end -= linear.outputs;
    }
  });
}

void checkInput(const at::Tensor& x) {
  const auto type = x.scalar_type();
  TORCH_CHECK(type == at::kBFloat16 || type == at::kFloat, "linears: bfloat16 or float32 expected, not ", type);
  TORCH_CHECK(x.dim() > 0 && x.numel() > 0, "linears: input ", x.sizes(), " is empty");
}

void checkParameters(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  TORCH_CHECK(
      weight.dim() == 2 && weight.size(1) == x.size(-1), "linears: input ", x.sizes(), ", weight ", weight.sizes());
  TORCH_CHECK(
      !bias || (bias->dim() == 1 && bias->size(0) == weight.size(0)), "linears: weight ", weight.sizes(),
      " with a bias of another size");
  const auto fits = [&](const at::Tensor& tensor) {
    return tensor.scalar_type() == x.scalar_type() && tensor.is_contiguous();
  };
  TORCH_CHECK(
      fits(weight) && (!bias || fits(*bias)), "linears: weights and biases must be contiguous and ", x.scalar_type());
}

std::vector<at::Tensor> linears(
    const at::Tensor& x, at::TensorList weights, const c10::List<std::optional<at::Tensor>>& biases) {
  checkInstructions();
  checkInput(x);
  TORCH_CHECK(weights.size() == biases.size(), "linears: ", weights.size(), " weights, ", biases.size(), " biases");
  std::vector<at::Tensor> outputs;
  std::vector<Linear> layers;
  auto shape = x.sizes().vec();
  for (size_t i = 0; i < weights.size(); ++i) {
    const at::Tensor& weight = weights[i];
    const std::optional<at::Tensor> bias = biases.get(i);
    checkParameters(x, weight, bias);
    shape.back() = weight.size(0);
    outputs.push_back(at::empty(shape, x.options()));
    layers.push_back({weight.const_data_ptr(), bias ? bias->const_data_ptr() : nullptr,
                      outputs.back().mutable_data_ptr(), weight.size(0)});
  }
  const at::Tensor rows = x.contiguous();
  x.scalar_type() == at::kFloat ? computeAll<Float32>(rows, layers) : computeAll<BFloat16>(rows, layers);
  return outputs;
}

}  // namespace

// Not TORCH_LIBRARY: that of torch 2.9 takes the name of a macro for the name of the namespace.
TORCH_LIBRARY_FRAGMENT(OPTIMUM_NEURON_NAMESPACE, m) {
  m.def("linears(Tensor x, Tensor[] weights, Tensor?[] biases) -> Tensor[]");
}

TORCH_LIBRARY_IMPL(OPTIMUM_NEURON_NAMESPACE, CPU, m) {
  m.impl("linears", &linears);
}
