// SPDX-License-Identifier: Apache-2.0
//
// The same as linear_flat_tile.h for codes of int8 and a single row of x, to the bit, by vectors in place of tile registers: products
// of tiles take up to 1.7 times as long while others use the machine too, and these do not. Lanes are outputs, and terms are summed as
// TDPBF16PS sums them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "vectors/amx_store.h"
#include "codes/linear_coded_input.h"
#include "vectors/transpose.h"

namespace step {
namespace {

// Subnormal operands and results are zero, as in products of tiles.
class FlushedSubnormals {
 public:
  FlushedSubnormals() : before_(_mm_getcsr()) { set(before_ | kFlushes); }
  ~FlushedSubnormals() { set(before_); }
  FlushedSubnormals(const FlushedSubnormals&) = delete;
  FlushedSubnormals& operator=(const FlushedSubnormals&) = delete;

 private:
  static constexpr uint32_t kFlushes = 0x8040;

  // Nothing is computed across it that passes through memory.
  static void set(uint32_t control) { asm volatile("ldmxcsr %0" ::"m"(control) : "memory"); }

  const uint32_t before_;
};

class FlatRowWorker {
  // Codes that are read of a weight row at a time, and how many of them a lane has.
  static constexpr int64_t kColumns = 64, kInLane = sizeof(uint32_t), kHalf = kLineColumns / 2;

 public:
  FlatRowWorker(const AmxCodedInput& input, const Linear& linear)
      : input_(input), linear_(linear), rowBytes_(input.form.rowBytes()) {}

  // `next` are the weights that this thread is likely to read then.
  void run(Range outputs, Bytes next) const {
    for (int64_t n = outputs.begin; n < outputs.end; n += kLanes) {
      const int64_t count = std::min<int64_t>(outputs.end - n, kLanes);
      const void* then = n + kLanes < outputs.end ? codesOf(n + kLanes) : next.begin ? next.begin : codesOf(n);
      Vec total;
      {
        const FlushedSubnormals flushed;
        compute(n, count, static_cast<const char*>(then), total);
      }
      const Scales& own = linear_.scales;
      const Vec scale = loadScales(own.type, static_cast<const char*>(own.scale) + n * sizeOf(own.type), count);
      storeOutputs(linear_, input_.place(0), n, count, fma(total, scale, Vec{}));
    }
  }

 private:
  // Asks for as many codes from `next` on as it multiplies. Lines after the last output are copies of that.
  __attribute__((noinline)) void compute(int64_t first, int64_t count, const char* next, Vec& result) const {
    const uint8_t* rows[kLanes];
    for (int64_t line = 0; line < kLanes; ++line) {
      rows[line] = codesOf(first + std::min(line, count - 1));
    }
    const auto* x = static_cast<const float*>(input_.packed);
    const int64_t columns = input_.form.group;
    Vec total{};
    BitVec words[kLanes];
    int64_t k = 0;
    for (; k + kColumns <= columns; k += kColumns, next += kLanes * kColumns) {
      UNROLL for (int line = 0; line < kLanes; ++line) {
        words[line] = unsignedCodes(loadBits(rows[line] + k));
      }
      add<2>(words, x + k, next, total);
    }
    if (k < columns) {
      const __mmask64 used = ~uint64_t{0} >> (kColumns - (columns - k));
      UNROLL for (int line = 0; line < kLanes; ++line) {
        words[line] = unsignedCodes((BitVec)_mm512_maskz_loadu_epi8(used, rows[line] + k));
      }
      columns - k > kLineColumns ? add<2>(words, x + k, next, total) : add<1>(words, x + k, next, total);
    }
    result = total;
  }

  // Adds what lines of 32 columns come to. In a line of a tile the first and the second 16 of them lie in turn (kHalvesInTurn), so that
  // these are summed apart. The second half of the transposition is done between the products, which use other ports.
  template <int Lines>
  INLINE void add(BitVec (&words)[kLanes], const float* x, const char* next, Vec& total) const {
    transposeFours(words);
    Vec even[Lines] = {}, odd[Lines] = {};
    forEach<kHalf / kInLane>([&](auto word) __attribute__((always_inline)) {
      transposeParts<word>(words);
      forEach<kInLane>([&](auto in) __attribute__((always_inline)) {
        constexpr int64_t column = word * kInLane + in;
        prefetchFar(next + column * kColumns);
        UNROLL for (int line = 0; line < Lines; ++line) {
          const BitVec *own = words + line * kLineColumns / kInLane + word, *other = own + kHalf / kInLane;
          const float* from = x + line * kLineColumns + column;
          even[line] = fma(number<in>(*own), broadcast(from[0]), even[line]);
          odd[line] = fma(number<in>(*other), broadcast(from[kHalf]), odd[line]);
        }
      });
    });
    UNROLL for (int line = 0; line < Lines; ++line) {
      total += even[line] + odd[line];
    }
  }

  // Codes, each 128 more than it is.
  static INLINE BitVec unsignedCodes(BitVec codes) { return codes ^ 0x80808080u; }

  // A code of each lane: the bits of its byte, where they count as in a whole number in a mantissa, less what that has besides.
  template <int Byte>
  static INLINE Vec number(BitVec words) {
    constexpr int place = Byte % 2, bits = 23 - 8 * place;
    const auto exponent = (__m512i)broadcastBits((127u + bits) << 23), low = (__m512i)(Byte < 2 ? words : words >> 16);
    return (Vec)_mm512_mask_blend_epi8(0x1111111111111111u << place, exponent, low) - broadcast((1 << bits) + 128);
  }

  const uint8_t* codesOf(int64_t row) const { return static_cast<const uint8_t*>(linear_.weight) + row * rowBytes_; }

  const AmxCodedInput& input_;
  const Linear& linear_;
  const int64_t rowBytes_;
};

}  // namespace
}  // namespace step
