// SPDX-License-Identifier: Apache-2.0
//
// Some blocks of as many weight rows as a vector has lanes, read as they lie and transposed, so that a lane has four columns of its row; and
// what rows of x come to with them. Nothing here depends on the type of x.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "common/ahead.h"
#include "rounded/rounded_lanes_input.h"
#include "rounded/rounded_line.h"
#include "codes/scale_vectors.h"
#include "vectors/transpose.h"

namespace step {
namespace {

class RoundedLanes {
 public:
  static constexpr int64_t kMostRows = 256;

 private:
  // Words of a vector of outputs that rows of x meet at once, and blocks of them: they stay in the first-level cache.
  static constexpr int64_t kWords = 256, kMostBlocks = 64;
  // Words of the longest blocks.
  template <Coding C>
  static constexpr int kBlockWords = bytesOf(C, kRoundedBlock) / 4;
#if defined(STEP_SHORT_SUMS)
  static constexpr int kWaitingRows = 0;
#else
  static constexpr int kWaitingRows = 4;
#endif

 public:
  // Memory: transposed weights, scales, shifts, and what rows of a batch came to.
  static constexpr int64_t kBytes = (kWords + 2 * (kMostBlocks + kLanes) + 2 * kMostRows) * kVectorBytes;

  struct Task {
    int64_t n, count;  // outputs
    Range blocks;
  };

  RoundedLanes(const RoundedLanesInput& input, const Linear& linear, void* memory)
      : input_(input),
        linear_(linear),
        form_(input.form),
        excess_(isPacked(form_.coding) && linear.scales.shift ? 0 : ~uint32_t{0}),
        blockWords_(divideUp(bytesOf(form_.coding, form_.mostColumns()), 4)),
        words_(static_cast<uint32_t*>(memory)),
        scales_(reinterpret_cast<float*>(words_ + kWords * kLanes)),
        shifts_(scales_ + (kMostBlocks + kLanes) * kLanes),
        sums_(shifts_ + (kMostBlocks + kLanes) * kLanes) {}

  // Blocks of a task, at most.
  int64_t taskBlocks() const { return std::min(kWords / blockWords_, kMostBlocks); }

  // How often memory is asked for what is read next, while all blocks of some outputs are unpacked.
  int64_t asks() const {
    const int64_t block = bytesOf(form_.coding, form_.mostColumns()), blocks = form_.blocks();
    return isEven() ? divideUp(blocks * block, kLineBytes) : blocks * divideUp(block, kLineBytes);
  }

  void prepare(const Task& task, Ahead& ahead) {
    if (!meetsLines(task)) {
      isPacked(form_.coding) ? unpack<Coding::kInt4>(task, ahead) : unpack<Coding::kInt8>(task, ahead);
    }
    loadScales(task);
  }

  // A tile of x, from the batch's row `row` on, meets what was prepared.
  void meet(const Task& task, int64_t t, int64_t row, Ahead& ahead) {
    if (meetsLines(task)) {
      meetLines(task, ahead);
    } else {
      isPacked(form_.coding) ? meetCodes<Coding::kInt4>(task, t, row) : meetCodes<Coding::kInt8>(task, t, row);
    }
  }

  // What a row of the batch came to.
  const float* totalsOf(int64_t row) const { return sums_ + (2 * row + 1) * kLanes; }

 private:
#if !defined(STEP_VNNI)
  static constexpr int64_t kLineBytes = 4 * kLanes;

#endif
  // Codes that lie one after another need not be unpacked block by block.
  bool isEven() const { return form_.isEven() && bytesOf(form_.coding, form_.mostColumns()) % 4 == 0; }

  // Whether weights are not unpacked: of a single row, and blocks that fill lines.
  bool meetsLines(const Task& task) const {
#if defined(STEP_VNNI)
    const int64_t block = bytesOf(form_.coding, form_.mostColumns());
    return input_.rows == 1 && task.count == kLanes && isEven() && (block == 16 || block == 32 || block == 64);
#else
    return false;
#endif
  }

  void meetLines(const Task& task, Ahead& ahead) {
#if defined(STEP_VNNI)
    const bool packed = isPacked(form_.coding);
    switch (kLineBytes / bytesOf(form_.coding, form_.mostColumns())) {
      case 1: return multiplyLines<Coding::kInt8, 1>(task, ahead);  // codes of 4 bits are two blocks or more
      case 2: return packed ? multiplyLines<Coding::kInt4, 2>(task, ahead) : multiplyLines<Coding::kInt8, 2>(task, ahead);
      default: return packed ? multiplyLines<Coding::kInt4, 4>(task, ahead) : multiplyLines<Coding::kInt8, 4>(task, ahead);
    }
#endif
  }

#if defined(STEP_VNNI)
  template <Coding C, int Blocks>
  void multiplyLines(const Task& task, Ahead& ahead) {
    const int64_t block = bytesOf(C, form_.mostColumns()), row = form_.rowBytes(), perGroup = form_.perGroup;
    const bool begins = task.blocks.begin == 0;
    const uint8_t* weights = static_cast<const uint8_t*>(linear_.weight) + task.n * row + task.blocks.begin * block;
    const uint8_t* x = input_.codesOf(0, task.blocks.begin);
    const float* own = input_.scalesOf(0);
    const int32_t* excess = input_.excessOf(0);
    const float* ones = linear_.scales.shift ? input_.sumsOf(0) + form_.groupOf(task.blocks.begin) : nullptr;
    const float *scale = scales_, *shift = shifts_;
    Vec inner = begins ? Vec{} : loadVec(sums_), total = begins ? Vec{} : loadVec(sums_ + kLanes);
    int64_t in = task.blocks.begin % perGroup;
    for (int64_t b = task.blocks.begin; b < task.blocks.end; b += Blocks, weights += kLineBytes, x += Blocks * input_.blockBytes()) {
      ahead.ask();
      IntVec dots[Blocks];
      const int64_t bytes = std::min((task.blocks.end - b) * block, kLineBytes);
      bytes == kLineBytes ? dotLine<C, Blocks>(dots, weights, row, x, kLineBytes) : dotLine<C, Blocks>(dots, weights, row, x, bytes);
      forEach<Blocks>([&](auto i) __attribute__((always_inline)) {
        if (b + i >= task.blocks.end) {
          return;
        }
        inner = fuse(toFloats(dots[i] + (IntVec)(repeatWord(excess + b + i) & excess_)), broadcast(own[b + i]), inner);
        if (++in < perGroup) {
          return;
        }
        total = fuse(inner, loadVec(scale), total);
        if (ones) {
          total = fuse(loadVec(shift), broadcast(*ones++), total);
        }
        inner = Vec{};
        scale += kLanes;
        shift += kLanes;
        in = 0;
      });
    }
    storeVec(sums_, inner);
    storeVec(sums_ + kLanes, total);
  }
#endif

  template <Coding C>
  void unpack(const Task& task, Ahead& ahead) {
    const auto* weights = static_cast<const uint8_t*>(linear_.weight) + task.n * form_.rowBytes();
    uint32_t* to = words_;
    if (isEven()) {
      const int64_t block = bytesOf(C, form_.mostColumns());
      const int64_t begin = task.blocks.begin * block, end = task.blocks.end * block;
      for (int64_t k = begin; k < end; k += kLineBytes, to += kLineBytes / 4 * kLanes) {
        ahead.ask();
        unpackLines<C>(to, weights + k, task.count, std::min(end - k, kLineBytes));
      }
      return;
    }
    for (int64_t b = task.blocks.begin; b < task.blocks.end; ++b, to += blockWords_ * kLanes) {
      const int64_t begin = bytesOf(C, form_.columnOf(b)), bytes = bytesOf(C, form_.columnsOf(b));
      for (int64_t k = 0; k < bytes; k += kLineBytes) {
        ahead.ask();
        unpackLines<C>(to + k / 4 * kLanes, weights + begin + k, task.count, std::min(bytes - k, kLineBytes));
      }
    }
  }

  // Up to a vector of each row's codes; rows that are missing are copies of the last one.
  template <Coding C>
  INLINE void unpackLines(uint32_t* to, const uint8_t* weights, int64_t count, int64_t bytes) const {
    const int64_t row = form_.rowBytes();
    BitVec lines[kLanes];
    if (bytes == kLineBytes && count == kLanes) {
      forEach<kLanes>([&](auto i) { lines[i] = loadBits(weights + i * row); });
    } else {
      forEach<kLanes>([&](auto i) { lines[i] = loadLine(weights + std::min<int64_t>(i, count - 1) * row, bytes); });
    }
    if constexpr (!isPacked(C) && kDotOffset != 0) {
      UNROLL for (int i = 0; i < kLanes; ++i) {
        lines[i] ^= 0x80808080u;
      }
    }
    transpose(lines);
    const int64_t words = bytes == kLineBytes ? kLanes : divideUp(bytes, 4);
    UNROLL for (int i = 0; i < kLanes; ++i) {
      if (i < words) {
        storeBits(to + i * kLanes, lines[i]);
      }
    }
  }

  // Up to a vector of bytes, and zeros after them.
  static INLINE BitVec loadLine(const uint8_t* p, int64_t bytes) {
#if defined(STEP_AVX512)
    return (BitVec)_mm512_maskz_loadu_epi8(~uint64_t{0} >> (kLineBytes - bytes), p);
#else
    uint8_t line[kLineBytes] = {};
    std::memcpy(line, p, bytes);
    return loadBits(line);
#endif
  }

  // Of the groups that end in these blocks, a vector of outputs each.
  void loadScales(const Task& task) const {
    const GroupScalesOf of{
        task.n, task.count, form_.groups, form_.groupOf(task.blocks.begin), form_.groupOf(task.blocks.end - 1) + 1};
    const Scales& own = linear_.scales;
    loadGroups(scales_, own.type, own.scale, of);
    if (own.shift) {
      loadGroups(shifts_, Type::kFloat32, own.shift, of);
    }
  }

  template <Coding C>
  void meetCodes(const Task& task, int64_t t, int64_t row) {
    constexpr int most = kBlockWords<C>;
    const bool alone = form_.perGroup == 1;
    if (blockWords_ == most) {
      alone ? meetRows<C, most, true>(task, t, row) : meetRows<C, most, false>(task, t, row);
    } else if (blockWords_ == most / 2 && alone) {
      meetRows<C, most / 2, true>(task, t, row);
    } else {
      meetRows<C, 0, false>(task, t, row);
    }
  }

  template <Coding C, int Words, bool Alone>
  void meetRows(const Task& task, int64_t t, int64_t row) {
    using Meet = void (RoundedLanes::*)(const Task&, int64_t, int64_t);
    static constexpr auto kMeet = []<size_t... R>(std::index_sequence<R...>) {
      return std::array<Meet, kRoundedRows>{&RoundedLanes::multiply<C, R + 1, Words, Alone>...};
    }(std::make_index_sequence<kRoundedRows>());
    const auto [first, last] = input_.tileRows(t);
    (this->*kMeet[last - first - 1])(task, t, row);
  }

  // Blocks have so many words, or where `Words` is 0, any number. Where `Alone`, each is a group.
  template <Coding C, int R, int Words, bool Alone>
  void multiply(const Task& task, int64_t t, int64_t row) {
    const int64_t count = Words > 0 ? Words : blockWords_, perGroup = form_.perGroup;
    const int64_t bytes = Words > 0 ? Words * (isPacked(C) ? 8 : 4) : input_.blockBytes();
    const bool begins = task.blocks.begin == 0;
    const uint8_t* x = input_.codesOf(t, task.blocks.begin);
    const float* scales = input_.scalesOf(t) + task.blocks.begin * R;
    const float* ones = linear_.scales.shift ? input_.sumsOf(t) + form_.groupOf(task.blocks.begin) * R : nullptr;
    const int32_t* excess = input_.excessOf(t) + task.blocks.begin * R;
    const BitVec used = broadcastBits(excess_);
    const uint32_t* words = words_;
    const float *scale = scales_, *shift = shifts_;
    float *const inner = sums_ + row * 2 * kLanes, *const total = inner + kLanes;
    // What a group comes to so far; where each block is one, what all come to. The other sums are met once a group: they stay in memory.
    Vec sums[R];
    forEach<R>([&](auto r) {
      sums[r] = begins ? Vec{} : loadVec((Alone ? total : inner) + 2 * r * kLanes);
      if (begins && !Alone) {
        storeVec(total + 2 * r * kLanes, Vec{});
      }
    });
    int64_t in = task.blocks.begin % perGroup;
    for (int64_t b = task.blocks.begin; b < task.blocks.end; ++b) {
      IntVec dots[R];
      forEach<R>([&](auto r) { dots[r] = (IntVec)(repeatWord(excess + r) & used); });
      dot<C, R, Words>(dots, words, x, bytes, count);
      words += count * kLanes;
      x += R * bytes;
      excess += R;
      const float* own = scales;
      scales += R;
      if constexpr (!Alone) {
        forEach<R>([&](auto r) { sums[r] = fuse(toFloats(dots[r]), broadcast(own[r]), sums[r]); });
        if (++in < perGroup) {
          continue;
        }
        in = 0;
      }
      const Vec by = loadVec(scale), plus = ones ? loadVec(shift) : Vec{};
      forEach<R>([&](auto r) {
        if constexpr (Alone) {
          sums[r] = fuse(toFloats(dots[r]) * broadcast(own[r]), by, sums[r]);
          sums[r] = ones ? fuse(plus, broadcast(ones[r]), sums[r]) : sums[r];
        } else {
          const Vec all = fuse(sums[r], by, loadVec(total + 2 * r * kLanes));
          storeVec(total + 2 * r * kLanes, ones ? fuse(plus, broadcast(ones[r]), all) : all);
          sums[r] = Vec{};
        }
      });
      ones += ones ? R : 0;
      scale += kLanes;
      shift += kLanes;
    }
    forEach<R>([&](auto r) { storeVec((Alone ? total : inner) + 2 * r * kLanes, sums[r]); });
  }

  // Adds what a block comes to.
  template <Coding C, int R, int Words>
  static INLINE void dot(IntVec (&dots)[R], const uint32_t* words, const uint8_t* x, int64_t bytes, int64_t count) {
#if defined(STEP_SHORT_SUMS)
    if constexpr (isPacked(C)) {
      return dotShort<R, Words>(dots, words, x, bytes, count);
    }
#endif
    constexpr bool two = R <= kWaitingRows;  // of few rows two sums each, as one would wait for itself
    IntVec others[R] = {};
    const auto add = [&](auto other, BitVec w, const uint8_t* at) __attribute__((always_inline)) {
      forEach<R>([&](auto r) __attribute__((always_inline)) {
        if constexpr (two && other) {
          others[r] = dotCodes<!isPacked(C)>(others[r], w, repeatWord(at + r * bytes));
        } else {
          dots[r] = dotCodes<!isPacked(C)>(dots[r], w, repeatWord(at + r * bytes));
        }
      });
    };
    const auto meet = [&](int64_t j, auto odd) __attribute__((always_inline)) {
      const BitVec w = loadBits(words + j * kLanes);
      if constexpr (isPacked(C)) {
        add(std::false_type(), w & 0x0f0f0f0fu, x + 8 * j);
        add(std::true_type(), w >> 4 & 0x0f0f0f0fu, x + 8 * j + 4);
      } else {
        add(odd, w, x + 4 * j);
      }
    };
    // g++ spills sums where it unrolls all of what many rows do with codes of 4 bits, or with many words.
    if constexpr (Words > 0 && (two || !isPacked(C))) {
      constexpr int part = two ? Words : std::min(Words, 8);
      for (int64_t k = 0; k < Words; k += part) {
        forEach<part>([&](auto j) { meet(k + j, std::bool_constant<j % 2 == 1>()); });
      }
    } else {
      for (int64_t j = 0; j < count; ++j) {
        meet(j, std::false_type());
      }
    }
    forEach<R>([&](auto r) { dots[r] += others[r]; });
  }

#if defined(STEP_SHORT_SUMS)
  // The same of codes of 4 bits: their products are added in 16 bits as long as they fit.
  template <int R, int Words>
  static INLINE void dotShort(IntVec (&dots)[R], const uint32_t* words, const uint8_t* x, int64_t bytes, int64_t count) {
    for (int64_t k = 0; k < count; k += kShortWords, words += kShortWords * kLanes, x += kShortWords * 8) {
      ShortVec sums[R] = {};
      const auto meet = [&](int64_t j) __attribute__((always_inline)) {
        const BitVec w = loadBits(words + j * kLanes), low = w & 0x0f0f0f0fu, high = w >> 4 & 0x0f0f0f0fu;
        const uint8_t* at = x + 8 * j;
        forEach<R>([&](auto r) __attribute__((always_inline)) { sums[r] += multiplyPairs(low, repeatWord(at + r * bytes)); });
        forEach<R>([&](auto r) __attribute__((always_inline)) { sums[r] += multiplyPairs(high, repeatWord(at + r * bytes + 4)); });
      };
      if constexpr (Words > 0) {
        forEach<kShortWords>(meet);
      } else {
        for (int64_t j = 0; j < std::min<int64_t>(count - k, kShortWords); ++j) {
          meet(j);
        }
      }
      forEach<R>([&](auto r) { dots[r] = addPairs(dots[r], sums[r]); });
    }
  }
#endif

  const RoundedLanesInput& input_;
  const Linear& linear_;
  const RoundedForm& form_;
  const uint32_t excess_;  // all bits, where codes of weights are not met as what they stand for
  const int64_t blockWords_;
  uint32_t* const words_;
  float *const scales_, *const shifts_, *const sums_;
};

}  // namespace
}  // namespace step
