// SPDX-License-Identifier: Apache-2.0
//
// linears(x, weights, biases): y_i = x @ weights[i].T + biases[i] for several weights that share their input, in one
// parallel region. Made for token generation: few rows of x, weights in their natural [N, K] layout, read from memory
// once at full bandwidth. bfloat16 and float32, accumulated in float32.
//
// Contracts:
// - x has 1 to kMaxRows rows, weights and biases are contiguous, all are of one type; anything else is an error.
// - A row's result depends on that row, the weight and the bias only, to the bit: not on the number of rows, the other
//   rows, the number of threads, or the weights computed by the same call. Every output is summed over K in one order:
//   lane by lane in one vector, then addLanes().
// - In bfloat16, subnormal numbers count as zero, as the hardware instruction has it.
// - No autograd formula: for inference. The macro OPTIMUM_NEURON_NAMESPACE names the operator's torch namespace.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "simd.h"

#ifndef OPTIMUM_NEURON_NAMESPACE
#error "Define OPTIMUM_NEURON_NAMESPACE: the torch namespace the operators are registered in."
#endif

namespace {

constexpr int64_t kMaxRows = 32;
// 4 weight rows of this length stay in the first-level cache while all rows of x pass over them.
constexpr int64_t kChunkBytes = 4096;
// What one thread reads in about 20 us; less is not worth waking another. Above kFreeRows the arithmetic is what costs.
constexpr int64_t kGrainBytes = 512 * 1024;
constexpr int64_t kFreeRows = 8;

struct Input {
  const void* x;
  int64_t rows, columns;
};

struct Linear {
  const void* weight;
  const void* bias;  // null: none
  void* output;
  int64_t outputs;
};

using Sums = __m512[kTileVectors];  // of one row of x, one vector for each weight row of the tile

template <class Type>
struct Tile {
  const typename Type::Element* x;
  const typename Type::Element* weights[kTileVectors];
  int64_t columns;
};

// Columns from k on: a vector of each row of x times a vector of each weight row. `count...` is empty or, where less
// than a vector is left, the number of columns.
template <class Type, int Rows, class... Count>
INLINE_AVX512 void multiplyStep(Sums (&sums)[Rows], const Tile<Type>& tile, int64_t k, Count... count) {
  __m512i vectors[kTileVectors];
  UNROLL for (int j = 0; j < kTileVectors; ++j) {
    vectors[j] = Type::loadWords(tile.weights[j] + k, count...);
    // The same place in the next tile: the hardware alone stops at the end of each page, and so of short rows.
    _mm_prefetch(reinterpret_cast<const char*>(tile.weights[j] + (k + kTileVectors * tile.columns)), _MM_HINT_T0);
  }
  UNROLL for (int m = 0; m < Rows; ++m) {
    const __m512i row = Type::loadWords(tile.x + m * tile.columns + k, count...);
    UNROLL for (int j = 0; j < kTileVectors; ++j) {
      sums[m][j] = Type::multiplyAdd(row, vectors[j], sums[m][j]);
    }
  }
}

// Columns [begin, end) of Rows rows of x times the weight rows, added to `total` (set, where begin is 0).
template <class Type, int Rows>
TARGET_AVX512 void multiplyTile(Sums* total, const Tile<Type>& tile, int64_t begin, int64_t end) {
  constexpr int64_t kStep = kLanes * Type::kPerWord;
  Sums sums[Rows];
  UNROLL for (int m = 0; m < Rows; ++m) {
    UNROLL for (int j = 0; j < kTileVectors; ++j) {
      sums[m][j] = begin == 0 ? _mm512_setzero_ps() : total[m][j];
    }
  }
  int64_t k = begin;
  for (; k + kStep <= end; k += kStep) {
    multiplyStep(sums, tile, k);
  }
  if (k < end) {
    multiplyStep(sums, tile, k, end - k);
  }
  UNROLL for (int m = 0; m < Rows; ++m) {
    UNROLL for (int j = 0; j < kTileVectors; ++j) {
      total[m][j] = sums[m][j];
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

// Outputs [n, n + count) of every row, count <= kTileVectors.
template <class Type>
TARGET_AVX512 void computeOutputs(const Input& input, const Linear& linear, int64_t n, int64_t count) {
  using Element = typename Type::Element;
  static constexpr void (*kTiles[kTileRows])(Sums*, const Tile<Type>&, int64_t, int64_t) = {
      multiplyTile<Type, 1>, multiplyTile<Type, 2>, multiplyTile<Type, 3>,
      multiplyTile<Type, 4>, multiplyTile<Type, 5>, multiplyTile<Type, 6>};
  constexpr int64_t kChunk = kChunkBytes / sizeof(Element);

  const auto [x, rows, columns] = input;
  Tile<Type> tile{nullptr, {}, columns};
  // A short tile repeats its last row; the store leaves the copies out.
  for (int64_t j = 0; j < kTileVectors; ++j) {
    tile.weights[j] = static_cast<const Element*>(linear.weight) + (n + std::min(j, count - 1)) * columns;
  }
  Sums sums[kMaxRows];
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  for (int64_t begin = 0; begin < columns; begin += kChunk) {
    const int64_t end = std::min(begin + kChunk, columns);
    for (int64_t i = 0; i < tiles; ++i) {
      // Even heights: 8 rows are 4 + 4, not 6 + 2.
      const int64_t first = rows * i / tiles;
      const int64_t last = rows * (i + 1) / tiles;
      tile.x = static_cast<const Element*>(x) + first * columns;
      kTiles[last - first - 1](sums + first, tile, begin, end);
    }
  }
  const auto mask = static_cast<__mmask8>((1 << count) - 1);
  const auto* bias = static_cast<const Element*>(linear.bias);
  // Adding -0 changes no value, adding +0 would make +0 of -0.
  const __m128 offset = bias ? Type::load4(bias + n, mask) : _mm_set1_ps(-0.0f);
  for (int64_t m = 0; m < rows; ++m) {
    auto* output = static_cast<Element*>(linear.output) + m * linear.outputs + n;
    Type::store4(output, _mm_add_ps(addLanes(sums[m]), offset), mask);
  }
}

// The outputs of all weights are one range, split evenly: all weight rows have the same length.
template <class Type>
void computeAll(const Input& input, const std::vector<Linear>& linears) {
  int64_t total = 0;
  for (const Linear& linear : linears) {
    total += linear.outputs;
  }
  const int64_t cost = input.columns * sizeof(typename Type::Element) * std::max(input.rows, kFreeRows) / kFreeRows;
  at::parallel_for(0, total, (kGrainBytes + cost - 1) / cost, [&](int64_t begin, int64_t end) {
    for (const Linear& linear : linears) {
      const int64_t last = std::min(end, linear.outputs);
      for (int64_t n = std::max<int64_t>(begin, 0); n < last; n += kTileVectors) {
        computeOutputs<Type>(input, linear, n, std::min(kTileVectors, last - n));
      }
      begin -= linear.outputs;
      end -= linear.outputs;
    }
  });
}

void checkInput(const at::Tensor& x) {
  const auto type = x.scalar_type();
  TORCH_CHECK(type == at::kBFloat16 || type == at::kFloat, "linears: bfloat16 or float32 expected, not ", type);
  TORCH_CHECK(
      x.dim() > 0 && x.numel() > 0 && x.numel() / x.size(-1) <= kMaxRows, "linears: input ", x.sizes(),
      " has not 1 to ", kMaxRows, " rows");
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
  const Input input{rows.const_data_ptr(), rows.numel() / rows.size(-1), rows.size(-1)};
  x.scalar_type() == at::kFloat ? computeAll<Float32>(input, layers) : computeAll<BFloat16>(input, layers);
  return outputs;
}

}  // namespace

TORCH_LIBRARY(OPTIMUM_NEURON_NAMESPACE, m) {
  m.def("linears(Tensor x, Tensor[] weights, Tensor?[] biases) -> Tensor[]");
}

TORCH_LIBRARY_IMPL(OPTIMUM_NEURON_NAMESPACE, CPU, m) {
  m.impl("linears", &linears);
}
