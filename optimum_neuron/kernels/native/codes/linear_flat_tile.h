// SPDX-License-Identifier: Apache-2.0
//
// The same as linear_codes_amx.h for one tile of x and weights that are summed over all columns, to the bit. Weights are met once: two tiles
// of 16 outputs pass over all columns, a few of which are unpacked, while lines of the next tiles' codes are asked for, and multiplied. What
// was unpacked is multiplied after what the other tile has there: to load what has just been stored takes long.
#pragma once

#include <algorithm>
#include <cstdint>

#include "vectors/amx.h"
#include "vectors/amx_store.h"
#include "codes/linear_coded_input.h"
#include "vectors/transpose.h"

namespace step {
namespace {

class FlatTileWorker {
  static constexpr int64_t kSums = kLanes * kLanes, kTileElements = kAmxLines * kLineColumns, kTiles = 2;
  // Tiles of weights in a row that are unpacked at once: a cache line of a row's codes of 4 bits, or two of 8 bits.
  static constexpr int64_t kSteps = 4, kPartElements = kSteps * kTileElements;

 public:
  // Memory: weights that are unpacked, and what they come to.
  static constexpr int64_t kBytes = kTiles * (kSteps + 1) * kAmxBytes;

  FlatTileWorker(const AmxCodedInput& input, const Linear& linear, int64_t tile, void* memory)
      : input_(input),
        linear_(linear),
        form_(input.sumsFormOf(linear.scales)),
        tile_(tile),
        rows_(input.tileRows(tile)),
        steps_(form_.padded() / kLineColumns),
        rowBytes_(form_.rowBytes()),
        weights_(static_cast<uint16_t*>(memory)),
        sums_(reinterpret_cast<float*>(weights_ + kTiles * kPartElements)) {}

  // `next` are the weights that this thread is likely to read then.
  void run(Range outputs, Bytes next) {
    if (takesScaled(input_.form, linear_.scales)) {
      computeAll(Scaled(input_.form, linear_.scales), outputs, next);
      return;
    }
    static constexpr void (FlatTileWorker::*kRuns[])(Range, Bytes) = {
        &FlatTileWorker::computeAs<Coding::kInt8>, &FlatTileWorker::computeAs<Coding::kInt4>,
        &FlatTileWorker::computeAs<Coding::kFp8>, &FlatTileWorker::computeAs<Coding::kFp4>};
    (this->*kRuns[static_cast<int>(form_.coding) - 1])(outputs, next);
  }

 private:
  // Codes as numbers, of weight rows that have one scale.
  template <Coding C>
  class Unscaled {
   public:
    static constexpr Coding kCoding = C;

    // Whether lines can be unpacked at once.
    const bool isEven;

    Unscaled(const CodeForm& form, const Scales& scales)
        : isEven(form.group % kLineColumns == 0), numbers_(scales.shift), form_(form) {}

    // Lines of weight rows from one on.
    struct Lines {
      const Line<C> numbers;

      INLINE BitVec operator()(const uint8_t* codes, int64_t i) const { return numbers(codes + i * bytesOf(C, kLineColumns)); }
      INLINE void nextRow() {}
    };
    Lines linesOf(int64_t, int64_t) const { return {numbers_}; }
    void askAhead(int64_t, int64_t) const {}
    void unpackRow(uint16_t* to, const uint8_t* codes, int64_t, int64_t step, int64_t steps) const {
      unpackLine(to, codes, numbers_, form_, steps * kLineColumns, step * kLineColumns % form_.paddedGroup());
    }

   private:
    const Line<C> numbers_;
    const CodeForm form_;
  };

  // Codes of int4 as what they stand for.
  class Scaled {
   public:
    static constexpr Coding kCoding = Coding::kInt4;

    const bool isEven;

    Scaled(const CodeForm& form, const Scales& scales)
        : isEven(kSteps * kLineColumns % form.group == 0 || form.group % (kSteps * kLineColumns) == 0),
          scales_(static_cast<const uint16_t*>(scales.scale)),
          groups_(form.groups),
          groupSteps_(form.group / kLineColumns) {
      for (int64_t i = 0; i < kSteps; ++i) {
        places_[i] = i / groupSteps_;
      }
    }

    // Which scale each line has, from the first one's on.
    struct Lines {
      const ScaledLine numbers;
      const uint16_t* scales;
      const int64_t groups, places[kSteps];

      INLINE BitVec operator()(const uint8_t* codes, int64_t i) const {
        return numbers(codes + i * bytesOf(kCoding, kLineColumns), scales[places[i]]);
      }
      INLINE void nextRow() { scales += groups; }
    };
    Lines linesOf(int64_t row, int64_t step) const {
      return {numbers_, scales_ + row * groups_ + groupOf(step), groups_, {places_[0], places_[1], places_[2], places_[3]}};
    }
    // For scales of the tiles after those from `row` on, as many as steps from one on have.
    INLINE void askAhead(int64_t row, int64_t step) const {
      constexpr int64_t lines = kTiles * kAmxLines;
      const auto* next = reinterpret_cast<const char*>(scales_ + (row + lines) * groups_) + groupOf(step) * lines * sizeof(uint16_t);
      for (int64_t i = 0; i < kSteps; i += groupSteps_, next += kAmxLineBytes) {
        prefetchFar(next);
      }
    }
    void unpackRow(uint16_t* to, const uint8_t* codes, int64_t row, int64_t step, int64_t steps) const {
      unpackScaled(to, codes, scales_ + row * groups_, numbers_, step, steps, groupSteps_);
    }

   private:
    // Of 32 bits: a division of more takes longer.
    int64_t groupOf(int64_t step) const { return static_cast<uint32_t>(step) / static_cast<uint32_t>(groupSteps_); }

    const ScaledLine numbers_;
    const uint16_t* const scales_;
    const int64_t groups_, groupSteps_;
    int64_t places_[kSteps];
  };
  static_assert(kSteps == 4);

  template <Coding C>
  void computeAs(Range outputs, Bytes next) {
    computeAll(Unscaled<C>(form_, linear_.scales), outputs, next);
  }

  template <class Numbers>
  void computeAll(const Numbers& numbers, Range outputs, Bytes next) {
    for (int64_t n = outputs.begin; n < outputs.end; n += kTiles * kAmxLines) {
      const int64_t middle = std::min(n + kAmxLines, outputs.end), end = std::min(middle + kAmxLines, outputs.end);
      const void* then = end < outputs.end ? codesOf(end) : next.begin ? next.begin : codesOf(n);
      compute(numbers, {n, middle}, {middle, end}, static_cast<const char*>(then));
    }
    finish();
  }

  // Asks for as many codes from `next` on as it unpacks. Registers 0 and 1 are sums, 2 to 5 rows of x, 6 and 7 weights.
  template <class Numbers>
  void compute(const Numbers& numbers, Range first, Range second, const char* next) {
    const bool both = second.begin < second.end;
    amxZero<0>();
    amxZero<1>();
    for (int64_t step = 0; step < steps_; step += kSteps) {
      const int64_t count = std::min(kSteps, steps_ - step);
      unpack(numbers, step, count, first, weights_, next);
      if (step == 0) {
        finish();
      } else if (both) {
        multiply<1>(kSteps);
      }
      loadRows(step, count);
      if (both) {
        unpack(numbers, step, count, second, weights_ + kPartElements, next);
      }
      multiply<0>(count);
      numbers.askAhead(first.begin, step);
    }
    if (both) {
      multiply<1>(steps_ - (steps_ - 1) / kSteps * kSteps);
      amxStore<1>(sums_ + kSums, kAmxLineBytes);
    }
    amxStore<0>(sums_, kAmxLineBytes);
    done_ = {first.begin, both ? second.end : first.end};
  }

  // Stores what is complete, while the next weights are unpacked: products take long to end.
  INLINE void finish() {
    for (int64_t a = 0; done_.begin < done_.end; ++a, done_.begin += kAmxLines) {
      store(done_.begin, std::min(done_.end - done_.begin, kAmxLines), sums_ + a * kSums);
    }
  }

  INLINE void loadRows(int64_t step, int64_t count) const {
    const int64_t stride = (rows_.end - rows_.begin) * sizeof(uint32_t);
    const auto* x = reinterpret_cast<const char*>(input_.columnsOf(tile_, step * kLineColumns));
    forEach<kSteps>([&](auto i) __attribute__((always_inline)) {
      if (i < count) {
        amxLoad<2 + i>(x + i * kAmxLines * stride, stride);
      }
    });
  }

  template <int Tile>
  INLINE void multiply(int64_t count) const {
    const uint16_t* weights = weights_ + Tile * kPartElements;
    forEach<kSteps>([&](auto i) __attribute__((always_inline)) {
      if (i < count) {
        amxLoad<6 + i % 2>(weights + i * kTileElements, kAmxLineBytes);
        amxMultiplyAdd<Tile, 6 + i % 2, 2 + i>();
      }
    });
  }

  const uint8_t* codesOf(int64_t row) const { return static_cast<const uint8_t*>(linear_.weight) + row * rowBytes_; }

  // Unpacks what a tile of outputs has from a step on.
  template <class Numbers>
  INLINE void unpack(const Numbers& numbers, int64_t step, int64_t steps, Range outputs, uint16_t* to, const char*& next) const {
    steps == kSteps ? unpackLines<Numbers, true>(numbers, step, kSteps, outputs, to, next)
                    : unpackLines<Numbers, false>(numbers, step, steps, outputs, to, next);
  }

  template <class Numbers, bool All>
  INLINE void unpackLines(const Numbers& numbers, int64_t step, int64_t some, Range outputs, uint16_t* to, const char*& next) const {
    const int64_t steps = All ? kSteps : some;
    constexpr int64_t bytes = bytesOf(Numbers::kCoding, kLineColumns);
    if (outputs.end - outputs.begin < kAmxLines || !numbers.isEven) {
      unpackRows(numbers, step, steps, outputs, to);
      next += kAmxLines * steps * bytes;
      return;
    }
    auto lines = numbers.linesOf(outputs.begin, step);
    const int64_t row = rowBytes_;
    const uint8_t* codes = codesOf(outputs.begin) + step * bytes;
    const char* ahead = next;
    for (int64_t line = 0; line < kAmxLines; ++line) {
      forEach<kSteps>([&](auto i) __attribute__((always_inline)) {
        if (i < steps) {
          storeBits(to + i * kTileElements, lines(codes, i));
        }
      });
      for (int64_t k = 0; k < kSteps * bytes; k += kAmxLineBytes) {
        prefetchFar(ahead + k);
      }
      to += kLineColumns;
      ahead += steps * bytes;
      codes += row;
      lines.nextRow();
    }
    next = ahead;
  }

  // The same of fewer columns or outputs, or where lines do not end with groups. Lines after the last output are copies of that.
  template <class Numbers>
  __attribute__((noinline)) void unpackRows(const Numbers& numbers, int64_t step, int64_t steps, Range outputs, uint16_t* to) const {
    for (int64_t line = 0; line < kAmxLines; ++line, to += kLineColumns) {
      const int64_t row = std::min(outputs.begin + line, outputs.end - 1);
      numbers.unpackRow(to, codesOf(row) + codesAt(step), row, step, steps);
    }
  }

  // Where codes of a line begin in a row: of a group that ends within a line, there are fewer.
  int64_t codesAt(int64_t step) const { return bytesOf(form_.coding, linePlace(form_, step * kLineColumns).column); }

  void store(int64_t first, int64_t count, const float* sums) const {
    const Scales& own = linear_.scales;
    Vec total[kLanes];
    UNROLL for (int line = 0; line < kLanes; ++line) {
      total[line] = loadVec(sums + line * kLanes);
    }
    transpose(total);
    const bool isScaled = takesScaled(input_.form, own);
    const Vec scale = isScaled ? broadcast(1) : loadScales(own.type, static_cast<const char*>(own.scale) + first * sizeOf(own.type), count);
    const Vec shift = own.shift ? loadScales(Type::kFloat32, own.shift + first, count) : Vec{};
    for (int64_t row = rows_.begin; row < rows_.end; ++row) {
      Vec sum = total[row - rows_.begin];
      if (!isScaled) {
        sum = fma(sum, scale, Vec{});
        sum = own.shift ? fma(broadcast(input_.sumsOf(tile_)[row - rows_.begin]), shift, sum) : sum;
      }
      storeOutputs(linear_, input_.place(row), first, count, sum);
    }
  }

  const AmxCodedInput& input_;
  const Linear& linear_;
  const CodeForm form_;  // by which it sums
  const int64_t tile_;
  const Range rows_;
  const int64_t steps_, rowBytes_;
  uint16_t* const weights_;
  float* const sums_;
  Range done_{};  // outputs with complete sums that are not yet stored
};

}  // namespace
}  // namespace step
