// SPDX-License-Identifier: Apache-2.0
//
// The same as linear_codes_amx.h for one tile of x, to the bit. Weights are met once: a tile of 16 outputs passes over all columns, a few of
// which are unpacked, while lines of the next tile's codes are asked for, and multiplied. Sums of groups stay in registers.
#pragma once

#include <algorithm>
#include <cstdint>

#include "vectors/amx.h"
#include "vectors/amx_store.h"
#include "codes/codes_amx.h"
#include "codes/linear_coded_input.h"
#include "vectors/transpose.h"

namespace step {
namespace {

class OneTileWorker {
  static constexpr int64_t kSums = kLanes * kLanes, kTileElements = kAmxLines * kLineColumns;
  // Tiles of weights that are unpacked at once: a cache line of a row's codes of 4 bits, or two of 8 bits.
  static constexpr int64_t kSteps = 4;

 public:
  // Memory: weights that are unpacked, what two groups come to, and scales and shifts of kLanes groups.
  static constexpr int64_t kBytes = (kSteps + 2 + 2) * kAmxBytes;

  OneTileWorker(const AmxCodedInput& input, const Linear& linear, int64_t tile, void* memory)
      : input_(input),
        linear_(linear),
        tile_(tile),
        rows_(input.tileRows(tile)),
        steps_(input.form.padded() / kLineColumns),
        groupSteps_(input.form.paddedGroup() / kLineColumns),
        rowBytes_(input.form.rowBytes()),
        isWhole_(input.form.group % kLineColumns == 0),
        weights_(static_cast<uint16_t*>(memory)),
        parts_(reinterpret_cast<float*>(weights_ + kSteps * kTileElements)),
        scales_(parts_ + 2 * kSums),
        shifts_(scales_ + kSums) {}

  // `next` are the weights that this thread is likely to read then.
  void run(Range outputs, Bytes next) {
    std::fill_n(parts_, 2 * kSums, 0.0f);  // tiles that are narrow leave the rest of a line as it is
    static constexpr void (OneTileWorker::*kRuns[])(Range, Bytes) = {
        &OneTileWorker::compute<Coding::kInt8>, &OneTileWorker::compute<Coding::kInt4>,
        &OneTileWorker::compute<Coding::kFp8>, &OneTileWorker::compute<Coding::kFp4>};
    (this->*kRuns[static_cast<int>(input_.form.coding) - 1])(outputs, next);
  }

 private:
  // A tile of outputs; lines after its last output are copies of that.
  struct Outputs {
    int64_t first, count;

    int64_t operator[](int64_t line) const { return first + std::min(line, count - 1); }
  };

  template <Coding C>
  void compute(Range outputs, Bytes next) {
    const Line<C> numbers(linear_.scales.shift);
    for (int64_t n = outputs.begin; n < outputs.end; n += kAmxLines) {
      const bool isLast = n + kAmxLines >= outputs.end;
      const void* then = !isLast ? codesOf(n + kAmxLines) : next.begin ? next.begin : codesOf(n);
      computeTile({n, std::min(outputs.end - n, kAmxLines)}, numbers, static_cast<const char*>(then));
    }
  }

  // Asks for as many codes from `next` on as it unpacks.
  template <Coding C>
  void computeTile(Outputs outputs, const Line<C>& numbers, const char* next) {
    const int64_t steps = steps_, groupSteps = groupSteps_;
    const int64_t stride = (rows_.end - rows_.begin) * sizeof(uint32_t);
    const auto* x = reinterpret_cast<const char*>(input_.columnsOf(tile_, 0));
    Vec total[kAmxLines];
    UNROLL for (int line = 0; line < kAmxLines; ++line) {
      total[line] = Vec{};
    }
    int64_t group = 0, inGroup = 0, step = 0;
    while (step < steps) {
      unpack(step, outputs, numbers, next);
      const uint16_t* weights = weights_;
      for (const int64_t end = std::min(step + kSteps, steps); step < end; ++step, weights += kTileElements) {
        if (inGroup == 0) {
          amxZero<0>();
        }
        amxLoad<6>(weights, kAmxLineBytes);
        amxLoad<4>(x, stride);
        amxMultiplyAdd<0, 6, 4>();
        x += stride * kAmxLines;
        if (++inGroup == groupSteps) {
          amxStore<0>(parts_ + group % 2 * kSums, kAmxLineBytes);
          if (group > 0) {
            add(outputs, group - 1, total);
          }
          inGroup = 0;
          ++group;
        }
      }
    }
    add(outputs, group - 1, total);
    store(outputs, total);
  }

  const uint8_t* codesOf(int64_t row) const {
    return static_cast<const uint8_t*>(linear_.weight) + row * input_.form.rowBytes();
  }

  // One address for all that lies at a distance from it that is known: else there would be more of them than registers, and to keep
  // some in vector registers takes the ports that unpack.
  template <class T>
  static INLINE void hold(T*& address) {
    asm("" : "+r"(address));
  }

  // Unpacks what is multiplied next, from a step on.
  template <Coding C>
  INLINE void unpack(int64_t first, Outputs outputs, const Line<C>& numbers, const char*& next) const {
    constexpr int64_t columns = kSteps * kLineColumns, bytes = bytesOf(C, columns), step = bytesOf(C, kLineColumns), most = 4;
    if (!isWhole_ || first + kSteps > steps_) {
      unpackRest(first, outputs, numbers);
      next += kAmxLines * bytes;
      return;
    }
    uint16_t* to = weights_;
    const uint8_t* codes = codesOf(outputs.first) + first * step;
    for (int64_t line = 0; line < kAmxLines; line += most) {
      UNROLL for (int64_t i = 0; i < most; ++i, to += kLineColumns) {
        const uint8_t* own = codes;
        codes += line + i + 1 < outputs.count ? rowBytes_ : 0;
        hold(own);
        hold(to);
        UNROLL for (int64_t k = 0; k < kSteps; ++k) {
          storeBits(to + k * kTileElements, numbers(own + k * step));
        }
        UNROLL for (int64_t k = 0; k < bytes; k += kAmxLineBytes) {
          prefetchFar(next + k);
        }
        next += bytes;
        hold(next);
      }
    }
  }

  // The same of fewer columns, or of groups that end within lines.
  template <Coding C>
  __attribute__((noinline)) void unpackRest(int64_t first, Outputs outputs, const Line<C>& numbers) const {
    const int64_t columns = std::min(kSteps, steps_ - first) * kLineColumns;
    const auto [column, in] = linePlace(input_.form, first * kLineColumns);
    for (int64_t line = 0; line < kAmxLines; ++line) {
      unpackLine(
          weights_ + line * kLineColumns, codesOf(outputs[line]) + bytesOf(C, column), numbers, input_.form, columns, in);
    }
  }

  // Adds what a group came to, times its scales, and its shift times the sum of its x.
  INLINE void add(Outputs outputs, int64_t group, Vec (&total)[kAmxLines]) const {
    const int64_t in = group % kLanes;
    if (in == 0) {
      loadScalesFrom(outputs, group);
    }
    const float *parts = parts_ + group % 2 * kSums, *scales = scales_ + in;
    UNROLL for (int line = 0; line < kAmxLines; ++line) {
      total[line] = fma(loadVec(parts + line * kLanes), broadcast(scales[line * kLanes]), total[line]);
    }
    if (linear_.scales.shift) {
      const Vec x = loadVec(input_.sumsOf(tile_) + group * (rows_.end - rows_.begin));
      UNROLL for (int line = 0; line < kAmxLines; ++line) {
        total[line] = fma(x, broadcast(shifts_[line * kLanes + in]), total[line]);
      }
    }
  }

  __attribute__((noinline)) void loadScalesFrom(Outputs outputs, int64_t group) const {
    const Scales& own = linear_.scales;
    const int64_t groups = input_.form.groups, count = std::min<int64_t>(groups - group, kLanes);
    for (int64_t line = 0; line < kAmxLines; ++line) {
      const int64_t first = outputs[line] * groups + group, next = kAmxLines * groups;
      const char* scale = static_cast<const char*>(own.scale) + first * sizeOf(own.type);
      storeVec(scales_ + line * kLanes, loadScales(own.type, scale, count));
      prefetchFar(scale + next * sizeOf(own.type));
      if (own.shift) {
        storeVec(shifts_ + line * kLanes, loadScales(Type::kFloat32, own.shift + first, count));
        prefetchFar(own.shift + first + next);
      }
    }
  }

  void store(Outputs outputs, Vec (&total)[kAmxLines]) const {
    transpose(total);
    for (int64_t row = rows_.begin; row < rows_.end; ++row) {
      storeOutputs(linear_, input_.place(row), outputs.first, outputs.count, total[row - rows_.begin]);
    }
  }

  const AmxCodedInput& input_;
  const Linear& linear_;
  const int64_t tile_;
  const Range rows_;
  const int64_t steps_, groupSteps_, rowBytes_;
  const bool isWhole_;
  uint16_t* const weights_;
  float *const parts_, *const scales_, *const shifts_;
};

}  // namespace
}  // namespace step
