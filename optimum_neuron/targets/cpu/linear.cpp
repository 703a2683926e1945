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

#include "linear_block.h"
#include "simd.h"

#ifndef OPTIMUM_NEURON_NAMESPACE
#error "Define OPTIMUM_NEURON_NAMESPACE: the torch namespace the operators are registered in."
#endif

namespace {

template <class Type>
void packInput(const Input& input, const void* x) {
  using Element = typename Type::Element;
  const int64_t bytes = kTileRows * input.stride * sizeof(Element);
  at::parallel_for(0, input.tiles(), (kGrainBytes + bytes - 1) / bytes, [&](int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; ++tile) {
      packTile<Type>(input, tile, [&](int64_t row) { return static_cast<const Element*>(x) + row * input.columns; });
    }
  });
}

// The outputs of all weights are one range, split evenly: all weight rows have the same length.
template <class Type>
void computeAll(const at::Tensor& x, const std::vector<Linear>& linears) {
  const int64_t columns = x.size(-1), rows = x.numel() / columns;
  const int64_t stride = packedStride<Type>(columns);
  const at::Tensor packed = at::empty({rows, stride}, x.options());
  const Input input{packed.mutable_data_ptr(), rows, columns, stride, nullptr};
  packInput<Type>(input, x.const_data_ptr());
  int64_t total = 0;
  for (const Linear& linear : linears) {
    total += linear.outputs;
  }
  const int64_t cost = outputCost<Type>(input);
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
