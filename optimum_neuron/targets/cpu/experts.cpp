// SPDX-License-Identifier: Apache-2.0
//
// expert_linear(x, index, weight, bias): y[t, i] = x[t] @ weight[e].T + bias[e] with e = index[t, i], the linear layer of
// mixtures of experts. x is [tokens, columns], or [tokens, k, columns] where each of a token's k experts has its own row;
// index is [tokens, k], weight [experts, outputs, columns], bias [experts, outputs]. Rows are sorted by their expert, so
// each expert in use is read once, in its natural layout, and the others cost nothing. bfloat16 and float32, accumulated in
// float32.
//
// Contracts:
// - An index not below the number of experts stands for no expert: its row of y is zero, and costs nothing. A negative
//   index is an error.
// - A row's result depends on that row and its expert only, to the bit: not on which other rows there are, who else is
//   routed where, or the number of threads. It is what `linears` computes of the row.
// - x has at least one row; weight and bias are contiguous and of its type; anything else is an error.
// - No autograd formula: for inference.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <vector>

#include "linear_block.h"
#include "simd.h"

namespace {

// Rows of y, which are named by their place in `index`, sorted by expert; those of one expert in order.
struct Sorted {
  std::vector<int64_t> places;
  std::vector<int64_t> begins;  // [experts + 1], where those of each expert begin; all behind have none
};

Sorted sortPlaces(const at::Tensor& index, int64_t experts) {
  const int64_t* expert = index.const_data_ptr<int64_t>();
  Sorted sorted{std::vector<int64_t>(index.numel()), std::vector<int64_t>(experts + 2)};
  for (int64_t i = 0; i < index.numel(); ++i) {
    TORCH_CHECK(expert[i] >= 0, "expert_linear: index ", expert[i], " is negative");
    ++sorted.begins[std::min(expert[i], experts) + 1];
  }
  std::partial_sum(sorted.begins.begin(), sorted.begins.end(), sorted.begins.begin());
  std::vector<int64_t> next = sorted.begins;
  for (int64_t i = 0; i < index.numel(); ++i) {
    sorted.places[next[std::min(expert[i], experts)]++] = i;
  }
  return sorted;
}

// An expert in use: its rows, its layer, and where what it costs begins in the cost of all.
struct Group {
  Input input;
  Linear linear;
  int64_t cost;  // of an output
  int64_t begin;
};

struct Call {
  at::Tensor x, index, weight;
  std::optional<at::Tensor> bias;
  at::Tensor y;

  int64_t rowsPerInput() const { return x.dim() == 2 ? index.size(1) : 1; }
};

template <class Type>
std::vector<Group> makeGroups(const Call& call, const Sorted& sorted, void* packed, int64_t stride) {
  using Element = typename Type::Element;
  const int64_t experts = call.weight.size(0), outputs = call.weight.size(1), columns = call.weight.size(2);
  const auto* weight = static_cast<const Element*>(call.weight.const_data_ptr());
  const auto* bias = call.bias ? static_cast<const Element*>(call.bias->const_data_ptr()) : nullptr;
  std::vector<Group> groups;
  int64_t total = 0;
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t first = sorted.begins[e], rows = sorted.begins[e + 1] - first;
    if (rows == 0) {
      continue;
    }
    const Input input{static_cast<Element*>(packed) + first * stride, rows, columns, stride,
                      sorted.places.data() + first};
    const Linear linear{weight + e * outputs * columns, bias ? bias + e * outputs : nullptr,
                        call.y.mutable_data_ptr(), outputs};
    groups.push_back({input, linear, outputCost<Type>(input), total});
    total += outputs * groups.back().cost;
  }
  return groups;
}

template <class Type>
void packGroups(const Call& call, const std::vector<Group>& groups, int64_t stride) {
  using Element = typename Type::Element;
  const auto* x = static_cast<const Element*>(call.x.const_data_ptr());
  const int64_t each = call.rowsPerInput();
  std::vector<std::pair<const Input*, int64_t>> tiles;
  for (const Group& group : groups) {
    for (int64_t tile = 0; tile < group.input.tiles(); ++tile) {
      tiles.emplace_back(&group.input, tile);
    }
  }
  const int64_t bytes = kTileRows * stride * sizeof(Element);
  at::parallel_for(0, tiles.size(), (kGrainBytes + bytes - 1) / bytes, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto [input, tile] = tiles[i];
      packTile<Type>(*input, tile, [&](int64_t row) { return x + input->place(row) / each * input->columns; });
    }
  });
}

// The outputs of all groups are shared out by what they cost, since experts have more rows or fewer.
template <class Type>
void computeGroups(const std::vector<Group>& groups) {
  if (groups.empty()) {
    return;
  }
  const int64_t total = groups.back().begin + groups.back().linear.outputs * groups.back().cost;
  at::parallel_for(0, total, kGrainBytes, [&](int64_t begin, int64_t end) {
    for (const Group& group : groups) {
      const auto output = [&](int64_t cost) {
        return std::clamp<int64_t>((cost - group.begin) / group.cost, 0, group.linear.outputs);
      };
      computeOutputs<Type>(group.input, group.linear, {output(begin), output(end)});
    }
  });
}

template <class Type>
void computeCall(const Call& call) {
  const int64_t experts = call.weight.size(0), outputs = call.weight.size(1);
  const int64_t stride = packedStride<Type>(call.weight.size(2));
  const Sorted sorted = sortPlaces(call.index, experts);
  const at::Tensor packed = at::empty({sorted.begins[experts], stride}, call.x.options());
  const std::vector<Group> groups = makeGroups<Type>(call, sorted, packed.mutable_data_ptr(), stride);
  packGroups<Type>(call, groups, stride);
  computeGroups<Type>(groups);
  auto* y = static_cast<typename Type::Element*>(call.y.mutable_data_ptr());
  for (size_t i = sorted.begins[experts]; i < sorted.places.size(); ++i) {
    std::fill_n(y + sorted.places[i] * outputs, outputs, 0.0f);
  }
}

void check(const at::Tensor& x, const at::Tensor& index, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  const auto type = x.scalar_type();
  TORCH_CHECK(type == at::kBFloat16 || type == at::kFloat, "expert_linear: bfloat16 or float32 expected, not ", type);
  TORCH_CHECK(x.numel() > 0 && index.numel() > 0, "expert_linear: input ", x.sizes(), " is empty");
  TORCH_CHECK(
      index.dim() == 2 && at::isIntegralType(index.scalar_type(), false), "expert_linear: index ", index.sizes(), " of ",
      index.scalar_type(), " is not [tokens, k] of integers");
  TORCH_CHECK(
      (x.dim() == 2 || (x.dim() == 3 && x.size(1) == index.size(1))) && x.size(0) == index.size(0),
      "expert_linear: input ", x.sizes(), ", index ", index.sizes());
  TORCH_CHECK(
      weight.dim() == 3 && weight.size(2) == x.size(-1), "expert_linear: input ", x.sizes(), ", weight ",
      weight.sizes());
  TORCH_CHECK(
      !bias || bias->sizes() == weight.sizes().slice(0, 2), "expert_linear: weight ", weight.sizes(),
      " with a bias of another size");
  const auto fits = [&](const at::Tensor& tensor) { return tensor.scalar_type() == type && tensor.is_contiguous(); };
  TORCH_CHECK(
      fits(weight) && (!bias || fits(*bias)), "expert_linear: weight and bias must be contiguous and ", type);
}

at::Tensor expertLinear(
    const at::Tensor& x, const at::Tensor& index, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  checkInstructions();
  check(x, index, weight, bias);
  const at::Tensor y = at::empty({index.size(0), index.size(1), weight.size(1)}, x.options());
  const Call call{x.contiguous(), index.to(at::kLong).contiguous(), weight, bias, y};
  x.scalar_type() == at::kFloat ? computeCall<Float32>(call) : computeCall<BFloat16>(call);
  return y;
}

}  // namespace

// Not TORCH_LIBRARY: that of torch 2.9 takes the name of a macro for the name of the namespace.
TORCH_LIBRARY_FRAGMENT(OPTIMUM_NEURON_NAMESPACE, m) {
  m.def("expert_linear(Tensor x, Tensor index, Tensor weight, Tensor? bias) -> Tensor");
}

TORCH_LIBRARY_IMPL(OPTIMUM_NEURON_NAMESPACE, CPU, m) {
  m.impl("expert_linear", &expertLinear);
}
