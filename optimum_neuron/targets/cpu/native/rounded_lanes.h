// SPDX-License-Identifier: Apache-2.0
//
// Some blocks of as many weight rows as a vector has lanes, read as they lie and transposed, so that a lane has four columns of its row; and
// what rows of x come to with them. Nothing here depends on the type of x.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "ahead.h"
#include "rounded_lanes_input.h"
#include "rounded_line.h"
#include "scale_vectors.h"
#include "transpose.h"

namespace step {
namespace {

class RoundedLanes {
 public:
  // Blocks of a vector of outputs that rows of x meet at once: their weights stay in the first-level cache.
  static constexpr int64_t kBlocks = 16, kMostRows = 256;

 private:
  static constexpr int64_t kBlockWords = kRoundedBlock / 4;
  static constexpr int kManyRows = 4;

 public:
  // Memory: transposed weights, scales, shifts, and what rows of a batch came to.
  static constexpr int64_t kBytes = (kBlocks * kBlockWords + 2 * (kBlocks + kLanes) + 2 * kMostRows) * kVectorBytes;

  struct Task {
    int64_t n, count;  // outputs
    Range blocks;
  };

  RoundedLanes(const RoundedLanesInput& input, const Linear& linear, void* memory)
      : input_(input),
        linear_(linear),
        form_(input.form),
        offset_(!isPacked(form_.coding) ? kDotOffset : linear.scales.shift ? 0 : static_cast<int32_t>(kInt4Middle)),
        blockWords_(divideUp(bytesOf(form_.coding, form_.mostColumns()), 4)),
        words_(static_cast<uint32_t*>(memory)),
        scales_(reinterpret_cast<float*>(words_ + kBlocks * kBlockWords * kLanes)),
        shifts_(scales_ + (kBlocks + kLanes) * kLanes),
        sums_(shifts_ + (kBlocks + kLanes) * kLanes) {}

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

  // A tile of x, whose first row is the batch's row `row`, meets what was prepared.
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
  // Codes that lie one behind another need not be unpacked block by block.
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
    const int32_t* negated = input_.negatedOf(0);
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
        inner = fuse(toFloats(dots[i] + (IntVec)broadcastBits(offset_ * negated[b + i])), broadcast(own[b + i]), inner);
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
    int64_t row = form_.rowBytes();
    uint8_t copy[kLanes * kLineBytes];
    if (bytes < kLineBytes || count < kLanes) {
      for (int64_t i = 0; i < kLanes; ++i) {
        std::memcpy(copy + i * kLineBytes, weights + std::min<int64_t>(i, count - 1) * row, bytes);
      }
      weights = copy;
      row = kLineBytes;
    }
    BitVec lines[kLanes];
    UNROLL for (int i = 0; i < kLanes; ++i) {
      lines[i] = loadBits(weights + i * row);
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

  // Of the groups that end in these blocks, a vector of outputs each.
  void loadScales(const Task& task) const {
    const int64_t first = form_.groupOf(task.blocks.begin), last = form_.groupOf(task.blocks.end - 1) + 1;
    const Scales& own = linear_.scales;
    for (int64_t g = first; g < last; g += kLanes) {
      const int64_t count = std::min<int64_t>(last - g, kLanes);
      const GroupScalesOf of{task.n, task.count, form_.groups, g, count};
      loadGroups(scales_ + (g - first) * kLanes, own.type, own.scale, of);
      if (own.shift) {
        loadGroups(shifts_ + (g - first) * kLanes, Type::kFloat32, own.shift, of);
      }
    }
  }

  template <Coding C>
  void meetCodes(const Task& task, int64_t t, int64_t row) {
    using Meet = void (RoundedLanes::*)(const Task&, int64_t, int64_t);
    static constexpr auto kMeet = []<size_t... R>(std::index_sequence<R...>) {
      return std::array<Meet, kRoundedRows>{&RoundedLanes::multiply<C, R + 1>...};
    }(std::make_index_sequence<kRoundedRows>());
    const auto [first, last] = input_.tileRows(t);
    (this->*kMeet[last - first - 1])(task, t, row);
  }

  template <Coding C, int R>
  void multiply(const Task& task, int64_t t, int64_t row) {
    const int64_t bytes = input_.blockBytes(), count = blockWords_, perGroup = form_.perGroup;
    const bool begins = task.blocks.begin == 0;
    const uint8_t* x = input_.codesOf(t, task.blocks.begin);
    const float* scales = input_.scalesOf(t) + task.blocks.begin * R;
    const float* ones = linear_.scales.shift ? input_.sumsOf(t) + form_.groupOf(task.blocks.begin) * R : nullptr;
    const int32_t* negated = input_.negatedOf(t) + task.blocks.begin * R;
    const uint32_t* words = words_;
    const float *scale = scales_, *shift = shifts_;
    float* const state = sums_ + row * 2 * kLanes;
    Vec inner[R], total[R];
    forEach<R>([&](auto r) {
      inner[r] = begins ? Vec{} : loadVec(state + 2 * r * kLanes);
      total[r] = begins ? Vec{} : loadVec(state + (2 * r + 1) * kLanes);
    });
    int64_t in = task.blocks.begin % perGroup;
    for (int64_t b = task.blocks.begin; b < task.blocks.end; ++b) {
      IntVec dots[R];
      forEach<R>([&](auto r) { dots[r] = (IntVec)broadcastBits(offset_ * negated[r]); });
      if (count == kBlockWords) {
        dot<C, R, kBlockWords>(dots, words, x, bytes, count);
      } else if (count == kBlockWords / 2) {
        dot<C, R, kBlockWords / 2>(dots, words, x, bytes, count);
      } else if (count == kBlockWords / 4) {
        dot<C, R, kBlockWords / 4>(dots, words, x, bytes, count);
      } else {
        dot<C, R, 0>(dots, words, x, bytes, count);
      }
      forEach<R>([&](auto r) { inner[r] = fuse(toFloats(dots[r]), broadcast(scales[r]), inner[r]); });
      words += count * kLanes;
      x += R * bytes;
      scales += R;
      negated += R;
      if (++in < perGroup) {
        continue;
      }
      const Vec own = loadVec(scale);
      forEach<R>([&](auto r) {
        total[r] = fuse(inner[r], own, total[r]);
        inner[r] = Vec{};
      });
      if (ones) {
        const Vec by = loadVec(shift);
        forEach<R>([&](auto r) { total[r] = fuse(by, broadcast(ones[r]), total[r]); });
        ones += R;
      }
      scale += kLanes;
      shift += kLanes;
      in = 0;
    }
    forEach<R>([&](auto r) {
      storeVec(state + 2 * r * kLanes, inner[r]);
      storeVec(state + (2 * r + 1) * kLanes, total[r]);
    });
  }

  // Of a block, of so many words where `Words` is not 0.
  template <Coding C, int R, int Words>
  static INLINE void dot(IntVec (&dots)[R], const uint32_t* words, const uint8_t* x, int64_t bytes, int64_t count) {
    constexpr bool two = R <= kManyRows;  // of few rows two sums each, as one would wait for itself
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
    // g++ spills sums where it unrolls all of what many rows do with codes of 4 bits.
    if constexpr (Words > 0 && (two || !isPacked(C))) {
      forEach<Words>([&](auto j) { meet(j, std::bool_constant<j % 2 == 1>()); });
    } else {
      for (int64_t j = 0; j < count; ++j) {
        meet(j, std::false_type());
      }
    }
    forEach<R>([&](auto r) { dots[r] += others[r]; });
  }

  const RoundedLanesInput& input_;
  const Linear& linear_;
  const RoundedForm& form_;
  const int32_t offset_;  // what codes of weights have too much, as they are multiplied
  const int64_t blockWords_;
  uint32_t* const words_;
  float *const scales_, *const shifts_, *const sums_;
};

}  // namespace
}  // namespace step
