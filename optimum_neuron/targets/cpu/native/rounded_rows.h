// SPDX-License-Identifier: Apache-2.0
//
// Rows of x rounded to codes of int8, block by block: graphs/quantized/activations.py defines them, and all instruction sets give its bits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "cached_codes.h"
#include "codes.h"

namespace step {
namespace {

// Columns of a block, which begin with those of a group of the weight; the last one of a group may have fewer.
constexpr int64_t kRoundedBlock = 64;
constexpr float kLargestRounded = 127.0f;

// Codes of `count` columns, and zeros behind them up to `filled`, a multiple of every vector. Returns their scale.
template <class Kind>
INLINE float roundBlock(int8_t* codes, const typename Kind::Element* x, int64_t count, int64_t filled) {
  typedef int8_t LaneCodes __attribute__((vector_size(kLanes)));
  Vec top{};
  BitVec infinite{};
  for (int64_t k = 0; k < count; k += kLanes) {
    const BitVec size = (BitVec)loadUpTo<Kind>(x + k, count - k) & 0x7fffffffu;
    infinite |= (BitVec)(size >= 0x7f800000u);
    top = max(top, (Vec)size);
  }
  const float scale = maximumOf(top) / kLargestRounded;
  const bool isFinite = !orOf(infinite);
  if (!isFinite || scale < std::numeric_limits<float>::min()) {
    std::fill_n(codes, filled, int8_t{0});
    return isFinite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
  }
  const Vec inverse = broadcast(1.0f / scale);
  for (int64_t k = 0; k < filled; k += kLanes) {
    const IntVec whole = nearestCodes<Coding::kInt8>(loadUpTo<Kind>(x + k, count - k) * inverse);
    const LaneCodes own = __builtin_convertvector(whole, LaneCodes);
    std::memcpy(codes + k, &own, sizeof(own));
  }
  return scale;
}

// Rows of x as codes: of each its codes, group by group and filled up with zeros to whole blocks, then the scale of each block, then of
// each group the sum of what its codes stand for.
template <int64_t TileRows>
struct RoundedInput : CodedInput<TileRows> {
  int64_t blocks;  // of a group

  const int8_t* codesOf(int64_t row) const {
    return static_cast<const int8_t*>(this->packed) + row * this->stride;
  }
  const float* scalesOf(int64_t row) const { return reinterpret_cast<const float*>(codesOf(row) + this->form.padded()); }
  const float* sumsOf(int64_t row) const { return scalesOf(row) + this->form.groups * blocks; }

  template <class Kind>
  void pack(int64_t row, const typename Kind::Element* x) const {
    const CodeForm& form = this->form;
    auto* codes = const_cast<int8_t*>(codesOf(row));
    auto *scales = const_cast<float*>(scalesOf(row)), *sums = const_cast<float*>(sumsOf(row));
    for (int64_t g = 0; g < form.groups; ++g) {
      float sum = 0;
      for (int64_t k = 0; k < form.group; k += form.block, codes += form.block) {
        *scales = roundBlock<Kind>(codes, x + g * form.group + k, std::min(form.group - k, form.block), form.block);
        int32_t own = 0;
        for (int64_t i = 0; i < form.block; ++i) {
          own += codes[i];
        }
        sum = __builtin_fmaf(static_cast<float>(own), *scales++, sum);
      }
      *sums++ = sum;
    }
  }
};

// Rows of a call's x; `packed` and `places` as in TiledInput.
template <int64_t TileRows, class Call>
RoundedInput<TileRows> roundedInputOf(const Call& call, void* packed, int64_t rows, const int64_t* places) {
  // Short groups are filled up less.
  constexpr int64_t kShort = kRoundedBlock / 2;
  const CodeForm form = formOf(call.coding, call.columns, call.group, call.group <= kShort ? kShort : kRoundedBlock);
  const int64_t blocks = form.paddedGroup() / form.block;
  const int64_t stride = form.padded() + form.groups * (blocks + 1) * static_cast<int64_t>(sizeof(float));
  return {{{packed, rows, call.columns, stride, places}, form}, blocks};
}

}  // namespace
}  // namespace step
