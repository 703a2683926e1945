// SPDX-License-Identifier: Apache-2.0
//
// The same as linear_codes_amx.h for one tile of x and short scales, to the bit. Weights are met once: two tiles of 16 outputs pass over all
// columns, a few of which are unpacked, while lines of the next tiles' codes are asked for, and multiplied. Two, as a product takes longer to
// end than it takes the next one to begin.
#pragma once

#include <algorithm>
#include <cstdint>

#include "amx.h"
#include "linear_coded_input.h"
#include "transpose.h"

namespace step {
namespace {

class ScaledTileWorker {
  static constexpr int64_t kSums = kLanes * kLanes, kTileElements = kAmxLines * kLineColumns, kTiles = 2;
  // Tiles of weights in a row that are unpacked at once: a cache line of a row's codes.
  static constexpr int64_t kSteps = 4, kCodeBytes = bytesOf(Coding::kInt4, kLineColumns);

 public:
  static constexpr int64_t kOutputs = kTiles * kAmxLines;
  // Memory: weights that are unpacked, and what they come to.
  static constexpr int64_t kBytes = kTiles * (kSteps + 1) * kAmxBytes;

  ScaledTileWorker(const AmxCodedInput& input, const Linear& linear, int64_t tile, void* memory)
      : input_(input),
        linear_(linear),
        tile_(tile),
        rows_(input.tileRows(tile)),
        steps_(input.form.padded() / kLineColumns),
        groupSteps_(input.form.group / kLineColumns),
        rowBytes_(input.form.rowBytes()),
        // Whether the lines that are unpacked at once are those of whole groups, or of one.
        isEven_(kSteps % groupSteps_ == 0 || groupSteps_ % kSteps == 0),
        weights_(static_cast<uint16_t*>(memory)),
        sums_(reinterpret_cast<float*>(weights_ + kTiles * kSteps * kTileElements)) {
    for (int64_t i = 0; i < kSteps; ++i) {
      scaleOf_[i] = i / groupSteps_;
    }
  }

  // `next` are the weights that this thread is likely to read then.
  void run(Range outputs, Bytes next) {
    for (int64_t n = outputs.begin; n < outputs.end; n += kOutputs) {
      const bool isLast = n + kOutputs >= outputs.end;
      const void* then = !isLast ? codesOf(n + kOutputs) : next.begin ? next.begin : codesOf(n);
      const auto* ahead = static_cast<const char*>(then);
      const int64_t count = outputs.end - n;
      count > kAmxLines ? compute<2>(n, std::min(count, kOutputs), ahead) : compute<1>(n, count, ahead);
    }
  }

 private:
  // Asks for as many codes from `next` on as it unpacks. Registers 0 and 1 are sums, 2 rows of x, 3 and 4 weights.
  template <int Tiles>
  void compute(int64_t first, int64_t count, const char* next) {
    const int64_t stride = (rows_.end - rows_.begin) * sizeof(uint32_t);
    const auto* x = reinterpret_cast<const char*>(input_.columnsOf(tile_, 0));
    const int64_t rest = count - (Tiles - 1) * kAmxLines;  // of the last tile
    amxZero<0>();
    amxZero<1>();
    for (int64_t step = 0; step < steps_;) {
      for (int64_t a = 0; a < Tiles; ++a) {
        unpack(step, first + a * kAmxLines, a + 1 < Tiles ? kAmxLines : rest, weightsOf(a), next);
      }
      const int64_t end = std::min(step + kSteps, steps_);
      for (int64_t i = 0; step < end; ++step, ++i) {
        amxLoad<2>(x, stride);
        amxLoad<3>(weightsOf(0) + i * kTileElements, kAmxLineBytes);
        amxMultiplyAdd<0, 3, 2>();
        if constexpr (Tiles == 2) {
          amxLoad<4>(weightsOf(1) + i * kTileElements, kAmxLineBytes);
          amxMultiplyAdd<1, 4, 2>();
        }
        x += stride * kAmxLines;
      }
    }
    amxStore<0>(sums_, kAmxLineBytes);
    amxStore<1>(sums_ + kSums, kAmxLineBytes);
    for (int64_t a = 0; a < Tiles; ++a) {
      store(first + a * kAmxLines, a + 1 < Tiles ? kAmxLines : rest, sums_ + a * kSums);
    }
  }

  uint16_t* weightsOf(int64_t a) const { return weights_ + a * kSteps * kTileElements; }
  const uint8_t* codesOf(int64_t row) const { return static_cast<const uint8_t*>(linear_.weight) + row * rowBytes_; }
  const uint16_t* scalesOf(int64_t row) const { return static_cast<const uint16_t*>(linear_.scales.scale) + row * input_.form.groups; }

  // Unpacks what is multiplied next, of `count` outputs; lines behind the last one are copies of it.
  INLINE void unpack(int64_t step, int64_t first, int64_t count, uint16_t* to, const char*& next) const {
    const ScaledLine& numbers = numbers_;
    const int64_t groups = input_.form.groups, steps = std::min(kSteps, steps_ - step);
    const uint8_t* codes = codesOf(first) + step * kCodeBytes;
    if (!isEven_ || steps < kSteps) {
      const uint16_t* scales = scalesOf(first);
      for (int64_t line = 0; line < kAmxLines; ++line, to += kLineColumns) {
        unpackScaled(to, codes, scales, numbers, step, steps, groupSteps_);
        codes += line + 1 < count ? rowBytes_ : 0;
        scales += line + 1 < count ? groups : 0;
        prefetchFar(next);
        next += steps * kCodeBytes;
      }
      return;
    }
    const uint16_t* scales = scalesOf(first) + step / groupSteps_;
    const int64_t second = scaleOf_[1], third = scaleOf_[2], fourth = scaleOf_[3];
    for (int64_t line = 0; line < kAmxLines; ++line, to += kLineColumns) {
      storeBits(to, numbers(codes, scales[0]));
      storeBits(to + kTileElements, numbers(codes + kCodeBytes, scales[second]));
      storeBits(to + 2 * kTileElements, numbers(codes + 2 * kCodeBytes, scales[third]));
      storeBits(to + 3 * kTileElements, numbers(codes + 3 * kCodeBytes, scales[fourth]));
      prefetchFar(scales + kOutputs * groups);
      prefetchFar(next);
      next += kSteps * kCodeBytes;
      codes += line + 1 < count ? rowBytes_ : 0;
      scales += line + 1 < count ? groups : 0;
    }
  }

  void store(int64_t first, int64_t count, const float* sums) const {
    const __mmask16 used = (1u << count) - 1;
    const auto* bias = static_cast<const uint16_t*>(linear_.bias);
    // Adding -0 changes no value, adding +0 would make +0 of -0.
    const Vec added = bias ? (Vec)((BitVec)_mm512_maskz_cvtepu16_epi32(kAll, _mm256_maskz_loadu_epi16(used, bias + first)) << 16)
                           : broadcast(-0.0f);
    Vec total[kLanes];
    UNROLL for (int line = 0; line < kLanes; ++line) {
      total[line] = loadVec(sums + line * kLanes);
    }
    transpose(total);
    for (int64_t row = rows_.begin; row < rows_.end; ++row) {
      auto* to = static_cast<uint16_t*>(linear_.output) + input_.place(row) * linear_.outputStride + first;
      _mm256_mask_storeu_epi16(to, used, (__m256i)_mm512_cvtneps_pbh(total[row - rows_.begin] + added));
    }
  }

  const AmxCodedInput& input_;
  const Linear& linear_;
  const ScaledLine numbers_;
  const int64_t tile_;
  const Range rows_;
  const int64_t steps_, groupSteps_, rowBytes_;
  const bool isEven_;
  uint16_t* const weights_;
  float* const sums_;
  int64_t scaleOf_[kSteps];  // which one, from a whole number of groups on, each line has
};

}  // namespace
}  // namespace step
