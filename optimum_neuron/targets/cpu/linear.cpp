// SPDX-License-Identifier: Apache-2.0
//
// linears(x, weights, biases): y_i = x @ weights[i].T + biases[i] for several weights that share their input, in one
// parallel region. Made for token generation: few rows of x, weights in their natural [N, K] layout, read from memory
// once at full bandwidth. bfloat16 and float32, accumulated in float32.
//
// Contracts:
// - Up to kMaxRows rows, a row's result depends on that row, the weight and the bias only, to the bit: not on the
//   number of rows, the other rows, the number of threads, or the weights computed by the same call. Every output
//   is summed over K in one order: lane by lane in one vector, then addLanes().
// - What the own code does not cover (CPU without AVX512-BF16, other types, more rows, a weight or bias that is not
//   contiguous) is computed by at::linear, decided for each weight alone.
// - In bfloat16, subnormal numbers count as zero, as the hardware instruction has it.
// - No autograd formula: for inference. The macro OPTIMUM_NEURON_NAMESPACE names the operator's torch namespace.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

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

#if defined(__x86_64__)

// Attributes, not compiler flags: the rest of the file must run on any x86-64.
#define TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")))
#define INLINE_AVX512 TARGET_AVX512 __attribute__((always_inline)) static inline
// Sums stay in registers only where their loops are unrolled.
#define UNROLL _Pragma("GCC unroll 8")

bool cpuSupported() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bf16");
}

// A tile of 6 x 4 sums, 4 weight vectors and one input vector fit the 32 registers.
constexpr int kTileRows = 6;
constexpr int kTileWeights = 4;
constexpr int64_t kMaxRows = 32;
// 4 weight rows of this length stay in the first-level cache while all rows of x pass over them.
constexpr int64_t kChunkBytes = 4096;
// What one thread reads in about 20 us; less is not worth waking another. Above kFreeRows the arithmetic is what costs.
constexpr int64_t kGrainBytes = 512 * 1024;
constexpr int64_t kFreeRows = 8;

struct BFloat16 {
  using Element = c10::BFloat16;
  using Vector = __m512bh;
  using Mask = __mmask32;
  static constexpr int kLanes = 32;

  INLINE_AVX512 Vector load(const Element* p) { return (__m512bh)_mm512_loadu_si512(p); }
  INLINE_AVX512 Vector load(const Element* p, Mask mask) { return (__m512bh)_mm512_maskz_loadu_epi16(mask, p); }
  INLINE_AVX512 __m512 multiplyAdd(Vector a, Vector b, __m512 sum) { return _mm512_dpbf16_ps(sum, a, b); }
  INLINE_AVX512 __m128 loadBias(const Element* p, __mmask8 mask) {
    return _mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(_mm_maskz_loadu_epi16(mask, p)), 16));
  }
  INLINE_AVX512 void store(Element* p, __m128 values, __mmask8 mask) {
    _mm_mask_storeu_epi16(p, mask, (__m128i)_mm_cvtneps_pbh(values));
  }
};

struct Float32 {
  using Element = float;
  using Vector = __m512;
  using Mask = __mmask16;
  static constexpr int kLanes = 16;

  INLINE_AVX512 Vector load(const Element* p) { return _mm512_loadu_ps(p); }
  INLINE_AVX512 Vector load(const Element* p, Mask mask) { return _mm512_maskz_loadu_ps(mask, p); }
  INLINE_AVX512 __m512 multiplyAdd(Vector a, Vector b, __m512 sum) { return _mm512_fmadd_ps(a, b, sum); }
  INLINE_AVX512 __m128 loadBias(const Element* p, __mmask8 mask) { return _mm_maskz_loadu_ps(mask, p); }
  INLINE_AVX512 void store(Element* p, __m128 values, __mmask8 mask) { _mm_mask_storeu_ps(p, mask, values); }
};

using Sums = __m512[kTileWeights];  // of one row of x, one vector for each weight row of the tile

template <class Type>
struct Tile {
  const typename Type::Element* x;
  const typename Type::Element* weights[kTileWeights];
  int64_t columns;
};

// Columns from k on: a vector of each row of x times a vector of each weight row. `mask...` is empty or one mask.
template <class Type, int Rows, class... Mask>
INLINE_AVX512 void multiplyStep(Sums (&sums)[Rows], const Tile<Type>& tile, int64_t k, Mask... mask) {
  typename Type::Vector vectors[kTileWeights];
  UNROLL for (int j = 0; j < kTileWeights; ++j) {
    vectors[j] = Type::load(tile.weights[j] + k, mask...);
    // The same place in the next tile: the hardware alone stops at the end of each page, and so of short rows.
    _mm_prefetch(reinterpret_cast<const char*>(tile.weights[j] + (k + kTileWeights * tile.columns)), _MM_HINT_T0);
  }
  UNROLL for (int m = 0; m < Rows; ++m) {
    const auto row = Type::load(tile.x + m * tile.columns + k, mask...);
    UNROLL for (int j = 0; j < kTileWeights; ++j)
      sums[m][j] = Type::multiplyAdd(row, vectors[j], sums[m][j]);
  }
}

// Columns [begin, end) of Rows rows of x times the weight rows, added to `total` (set, where begin is 0).
template <class Type, int Rows>
TARGET_AVX512 void multiplyTile(Sums* total, const Tile<Type>& tile, int64_t begin, int64_t end) {
  Sums sums[Rows];
  UNROLL for (int m = 0; m < Rows; ++m)
    UNROLL for (int j = 0; j < kTileWeights; ++j)
      sums[m][j] = begin == 0 ? _mm512_setzero_ps() : total[m][j];
  int64_t k = begin;
  for (; k + Type::kLanes <= end; k += Type::kLanes) multiplyStep(sums, tile, k);
  if (k < end) multiplyStep(sums, tile, k, static_cast<typename Type::Mask>((1u << (end - k)) - 1));
  UNROLL for (int m = 0; m < Rows; ++m)
    UNROLL for (int j = 0; j < kTileWeights; ++j)
      total[m][j] = sums[m][j];
}

// The sum of the lanes of each of four vectors.
INLINE_AVX512 __m128 addLanes(const Sums& v) {
  const __m512 v01 = _mm512_add_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
  const __m512 v23 = _mm512_add_ps(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
  const __m512 quarters = _mm512_add_ps(_mm512_shuffle_ps(v01, v23, 0x44), _mm512_shuffle_ps(v01, v23, 0xee));
  const __m256 halves = _mm256_add_ps(_mm512_castps512_ps256(quarters), _mm512_extractf32x8_ps(quarters, 1));
  return _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
}

// Outputs [n, n + count) of every row, count <= kTileWeights.
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
  for (int64_t j = 0; j < kTileWeights; ++j)
    tile.weights[j] = static_cast<const Element*>(linear.weight) + (n + std::min(j, count - 1)) * columns;
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
  const __m128 offset = bias ? Type::loadBias(bias + n, mask) : _mm_set1_ps(-0.0f);
  for (int64_t m = 0; m < rows; ++m) {
    auto* output = static_cast<Element*>(linear.output) + m * linear.outputs + n;
    Type::store(output, _mm_add_ps(addLanes(sums[m]), offset), mask);
  }
}

// The outputs of all weights are one range, split evenly: all weight rows have the same length.
template <class Type>
void computeAll(const Input& input, const std::vector<Linear>& linears) {
  int64_t total = 0;
  for (const Linear& linear : linears) total += linear.outputs;
  const int64_t cost = input.columns * sizeof(typename Type::Element) * std::max(input.rows, kFreeRows) / kFreeRows;
  at::parallel_for(0, total, (kGrainBytes + cost - 1) / cost, [&](int64_t begin, int64_t end) {
    for (const Linear& linear : linears) {
      const int64_t last = std::min(end, linear.outputs);
      for (int64_t n = std::max<int64_t>(begin, 0); n < last; n += kTileWeights)
        computeOutputs<Type>(input, linear, n, std::min<int64_t>(kTileWeights, last - n));
      begin -= linear.outputs;
      end -= linear.outputs;
    }
  });
}

bool inputSupported(const at::Tensor& x) {
  return cpuSupported() && (x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kFloat) && x.dim() > 0 &&
      x.numel() > 0 && x.numel() / x.size(-1) <= kMaxRows;
}

void compute(const at::Tensor& x, const std::vector<Linear>& linears) {
  const Input input{x.const_data_ptr(), x.numel() / x.size(-1), x.size(-1)};
  x.scalar_type() == at::kFloat ? computeAll<Float32>(input, linears) : computeAll<BFloat16>(input, linears);
}

#else

bool inputSupported(const at::Tensor&) { return false; }
void compute(const at::Tensor&, const std::vector<Linear>&) {}
#endif

// Whatever is wrong with the shapes or types is left to at::linear to report.
bool weightSupported(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  return weight.dim() == 2 && weight.size(1) == x.size(-1) && weight.is_cpu() && weight.is_contiguous() &&
      weight.scalar_type() == x.scalar_type() &&
      (!bias ||
       (bias->dim() == 1 && bias->size(0) == weight.size(0) && bias->is_cpu() && bias->is_contiguous() &&
        bias->scalar_type() == x.scalar_type()));
}

std::vector<at::Tensor> linears(
    const at::Tensor& x, at::TensorList weights, const c10::List<std::optional<at::Tensor>>& biases) {
  TORCH_CHECK(weights.size() == biases.size(), "linears: ", weights.size(), " weights, ", biases.size(), " biases");
  const bool supported = inputSupported(x);
  std::vector<at::Tensor> outputs;
  std::vector<Linear> covered;
  auto shape = x.sizes().vec();
  for (size_t i = 0; i < weights.size(); ++i) {
    const at::Tensor& weight = weights[i];
    const std::optional<at::Tensor> bias = biases.get(i);
    if (supported && weightSupported(x, weight, bias)) {
      shape.back() = weight.size(0);
      outputs.push_back(at::empty(shape, x.options()));
      covered.push_back({weight.const_data_ptr(), bias ? bias->const_data_ptr() : nullptr,
                         outputs.back().mutable_data_ptr(), weight.size(0)});
    } else {
      outputs.push_back(at::linear(x, weight, bias));
    }
  }
  if (!covered.empty()) compute(x.contiguous(), covered);
  return outputs;
}

}  // namespace

TORCH_LIBRARY(OPTIMUM_NEURON_NAMESPACE, m) {
  m.def("linears(Tensor x, Tensor[] weights, Tensor?[] biases) -> Tensor[]");
}
TORCH_LIBRARY_IMPL(OPTIMUM_NEURON_NAMESPACE, CPU, m) { m.impl("linears", &linears); }
