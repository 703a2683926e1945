// SPDX-License-Identifier: Apache-2.0
//
// Blocks of weight rows as tiles of AMX, and what tiles of x come to with them. What a block comes to is stored, and added by vectors in which
// a lane is a row of x while the next blocks are multiplied. Nothing here depends on the type of x.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/ahead.h"
#include "codes/codes_amx.h"
#include "rounded/rounded_amx_input.h"

namespace step {
namespace {

class RoundedTiles {
 public:
  // Registers of sums, and of products with lines of A that have fewer bytes, and so fewer lines of B. Sums and B are as wide as a tile has
  // rows: wider ones would read lines of x that begin within each other's cache lines, which takes long.
  static constexpr int kSumsOf = 0, kShortA = 6, kShortB = 7;
  static AmxShapes shapes(int64_t bytes, int64_t rows) {
    constexpr int64_t word = sizeof(uint32_t);
    AmxShapes all;
    all.set(kSumsOf, kAmxLines, rows * word);
    all.set(kShortA, kAmxLines, bytes);
    all.set(kShortB, bytes / word, rows * word);
    return all;
  }

  static constexpr int64_t kOutputs = 2 * kAmxLines, kPanelTiles = kOutputs / kAmxLines, kMostTiles = 32;

 private:
  static constexpr int64_t kSums = kLanes * kLanes, kLineBytes = kAmxLineBytes;
  // Columns that rows of x meet at once: those of a panel and of a tile of x stay in the first-level cache, or nearly.
  static constexpr int64_t kColumns = 1024, kMostGroups = 32, kDelay = 2, kParts = 4;
  static constexpr int64_t kStateBytes = kPanelTiles * kMostTiles * 2 * kAmxBytes, kWeightBytes = kOutputs * kColumns;
  static constexpr int64_t kScaleBytes = kOutputs * kMostGroups * sizeof(float);

 public:
  // Memory: what a panel and a batch came to, of groups and of blocks; weights, scales and shifts; what some blocks come to.
  static constexpr int64_t kBytes = kStateBytes + kWeightBytes + 2 * kScaleBytes + kParts * kAmxBytes;

  // Of a panel of outputs, blocks that are met at once, and where their codes of 8 bits are: lines of a tile, tiles of 64 columns and tiles
  // of outputs are so many bytes apart.
  struct Task {
    Range panel, blocks;
    const uint8_t* weights;
    int64_t line, tile, lines;
  };

  RoundedTiles(const RoundedAmxInput& input, const Linear& linear, void* memory)
      : input_(input),
        linear_(linear),
        form_(input.form),
        columns_(input.blockColumns()),
        state_(static_cast<float*>(memory)),
        weights_(reinterpret_cast<uint8_t*>(state_) + kStateBytes),
        scales_(reinterpret_cast<float*>(weights_ + kWeightBytes)),
        shifts_(scales_ + kScaleBytes / sizeof(float)),
        parts_(reinterpret_cast<int32_t*>(shifts_ + kScaleBytes / sizeof(float))) {}

  int64_t mostBlocks() const { return kColumns / columns_; }

  // Weights that meet one tile of x, `once`, are read where they are if they can be.
  Task prepare(Range panel, Range blocks, bool once, Ahead& ahead) {
    return isPacked(form_.coding) ? prepareCodes<Coding::kInt4>(panel, blocks, once, ahead)
                                  : prepareCodes<Coding::kInt8>(panel, blocks, once, ahead);
  }

  // Tile t of x, the batch's tile `place`, meets tile `a` of the panel.
  void meet(const Task& task, int64_t t, int64_t place, int64_t a, Ahead& ahead) {
    float* state = state_ + (place * kPanelTiles + a) * 2 * kSums;
    form_.perGroup == 1 ? multiply<true>(task, t, a, state, ahead) : multiply<false>(task, t, a, state, ahead);
  }

  // What these came to: a line for each output.
  const float* totalsOf(int64_t place, int64_t a) const { return state_ + ((place * kPanelTiles + a) * 2 + 1) * kSums; }

 private:
  template <Coding C>
  Task prepareCodes(Range panel, Range blocks, bool once, Ahead& ahead) {
    loadScales(panel, blocks);
    const int64_t row = form_.rowBytes(), count = panel.end - panel.begin;
    const auto* weights = static_cast<const uint8_t*>(linear_.weight) + panel.begin * row;
    const bool isEven = form_.isEven() && form_.mostColumns() == columns_;
    if (!isPacked(C) && once && isEven && count % kAmxLines == 0) {
      return {panel, blocks, weights + blocks.begin * columns_, row, kLineBytes, kAmxLines * row};
    }
    const int64_t width = roundUp((blocks.end - blocks.begin) * columns_, kLineBytes);
    for (int64_t line = 0; line < roundUp(count, kAmxLines); ++line) {
      ahead.ask();
      uint8_t* to = weights_ + line / kAmxLines * kAmxLines * width + line % kAmxLines * kLineBytes;
      const uint8_t* from = weights + std::min(line, count - 1) * row;
      if (!isEven) {
        unpackEach<C>(to, from, blocks);
      } else if (columns_ == kRoundedBlock) {
        unpackEven<C, false>(to, from, blocks);
      } else {
        unpackEven<C, true>(to, from, blocks);
      }
    }
    return {panel, blocks, weights_, kLineBytes, kAmxBytes, kAmxLines * width};
  }

  // A line of 64 columns, one block or two short ones, of which bytes that `used` lacks are not read.
  template <Coding C, bool Short = false>
  INLINE void unpackLine(uint8_t* to, const uint8_t* from, __mmask64 used) const {
    if constexpr (isPacked(C)) {
      const __m256i codes = _mm256_maskz_loadu_epi8(static_cast<__mmask32>(used), from);
      const __m512i twice = !Short ? _mm512_broadcast_i64x4(codes)
                                : _mm512_permutexvar_epi64(_mm512_set_epi64(3, 2, 3, 2, 1, 0, 1, 0), _mm512_castsi256_si512(codes));
      const __m512i by = !Short ? _mm512_set_epi64(4, 4, 4, 4, 0, 0, 0, 0)
                                                   : _mm512_set_epi64(4, 4, 0, 0, 4, 4, 0, 0);
      const __m512i numbers = _mm512_and_si512(_mm512_srlv_epi64(twice, by), _mm512_set1_epi8(15));
      const int8_t middle = linear_.scales.shift ? 0 : static_cast<int8_t>(kInt4Middle);
      _mm512_store_si512(to, _mm512_sub_epi8(numbers, _mm512_set1_epi8(middle)));
    } else {
      _mm512_store_si512(to, _mm512_maskz_loadu_epi8(used, from));
    }
  }

  static __mmask64 firstBytes(int64_t count) { return count >= kLineBytes ? ~__mmask64{0} : (__mmask64{1} << count) - 1; }

  template <Coding C, bool Short>
  void unpackEven(uint8_t* to, const uint8_t* from, Range blocks) const {
    constexpr int64_t bytes = bytesOf(C, kLineBytes);
    int64_t left = bytesOf(C, (blocks.end - blocks.begin) * columns_);
    for (from += bytesOf(C, blocks.begin * columns_); left >= bytes; left -= bytes, from += bytes, to += kAmxBytes) {
      unpackLine<C, Short>(to, from, ~__mmask64{0});
    }
    if (left > 0) {
      unpackLine<C, Short>(to, from, firstBytes(left));
    }
  }

  template <Coding C>
  void unpackEach(uint8_t* to, const uint8_t* from, Range blocks) const {
    for (int64_t b = blocks.begin; b < blocks.end; ++b, to += kAmxBytes) {
      unpackLine<C>(to, from + bytesOf(C, form_.columnOf(b)), firstBytes(bytesOf(C, form_.columnsOf(b))));
    }
  }

  // Of the groups of these blocks, a line for each output.
  void loadScales(Range panel, Range blocks) const {
    const int64_t first = form_.groupOf(blocks.begin), count = form_.groupOf(blocks.end - 1) + 1 - first;
    const Scales& own = linear_.scales;
    for (int64_t line = 0; line < roundUp(panel.end - panel.begin, kAmxLines); ++line) {
      const int64_t at = std::min(panel.begin + line, panel.end - 1) * form_.groups + first;
      for (int64_t g = 0; g < count; g += kLanes) {
        const int64_t some = std::min<int64_t>(count - g, kLanes);
        const char* scale = static_cast<const char*>(own.scale) + (at + g) * sizeOf(own.type);
        storeVec(scales_ + line * kMostGroups + g, step::loadScales(own.type, scale, some));
        prefetchFar(scale + kOutputs * form_.groups * sizeOf(own.type));
        if (own.shift) {
          storeVec(shifts_ + line * kMostGroups + g, step::loadScales(Type::kFloat32, own.shift + at + g, some));
          prefetchFar(own.shift + at + g + kOutputs * form_.groups);
        }
      }
    }
  }

  // Sums of groups that have one block, or of the blocks of a group, stay in registers.
  template <bool Single>
  void multiply(const Task& task, int64_t t, int64_t a, float* state, Ahead& ahead) {
    const auto [first, last] = input_.tileRows(t);
    const int64_t rows = last - first, stride = rows * sizeof(uint32_t), count = task.blocks.end - task.blocks.begin;
    const int64_t xBytes = columns_ * rows, line = task.line, perGroup = form_.perGroup;
    // Two short blocks share lines of a tile.
    const int64_t odd = columns_ == kLineBytes ? task.tile : columns_, even = task.tile - (kLineBytes - columns_);
    const __mmask16 used = (1u << rows) - 1;
    const bool begins = task.blocks.begin == 0;
    const uint8_t *x = input_.codesOf(t, task.blocks.begin), *weights = task.weights + a * task.lines;
    const float* xScales = input_.scalesOf(t) + task.blocks.begin * rows;
    const float* ones = linear_.scales.shift ? input_.sumsOf(t) + form_.groupOf(task.blocks.begin) * rows : nullptr;
    const float *scales = scales_ + a * kAmxLines * kMostGroups, *shifts = shifts_ + a * kAmxLines * kMostGroups;
    int32_t* const all = parts_;
    float *const totals = state + kSums, *const own = Single ? totals : state;
    Vec sums[kAmxLines];
    forEach<kAmxLines>([&](auto i) {
      sums[i] = begins ? Vec{} : loadVec(own + i * kLanes);
      if (!Single && begins) {
        storeVec(totals + i * kLanes, Vec{});
      }
    });
    int64_t in = task.blocks.begin % perGroup;
    for (int64_t b = 0; b < count + kDelay; ++b) {
      if (b < count) {
        ahead.ask();
        amxZero<kSumsOf>();
        amxLoad<kShortA>(weights, line);
        amxLoad<kShortB>(x, stride);
        amxMultiplyAddBytes<kSumsOf, kShortA, kShortB>();
        amxStore<kSumsOf>(all + b % kParts * kSums, kAmxLineBytes);
        x += xBytes;
        weights += b % 2 == 0 ? odd : even;
      }
      if (b < kDelay) {
        continue;
      }
      const int32_t* parts = all + (b - kDelay) % kParts * kSums;
      const Vec scale = (Vec)_mm512_maskz_loadu_ps(used, xScales);
      xScales += rows;
      forEach<kAmxLines>([&](auto i) {
        const Vec dots = toFloats((IntVec)loadBits(parts + i * kLanes));
        sums[i] = Single ? fma(dots * scale, broadcast(scales[i * kMostGroups]), sums[i]) : fma(dots, scale, sums[i]);
      });
      if (!Single && ++in < perGroup) {
        continue;
      }
      if constexpr (!Single) {
        forEach<kAmxLines>([&](auto i) {
          float* total = totals + i * kLanes;
          storeVec(total, fma(sums[i], broadcast(scales[i * kMostGroups]), loadVec(total)));
          sums[i] = Vec{};
        });
        in = 0;
      }
      if (ones) {
        const Vec one = (Vec)_mm512_maskz_loadu_ps(used, ones);
        forEach<kAmxLines>([&](auto i) {
          const Vec shift = broadcast(shifts[i * kMostGroups]);
          if constexpr (Single) {
            sums[i] = fma(one, shift, sums[i]);
          } else {
            storeVec(totals + i * kLanes, fma(one, shift, loadVec(totals + i * kLanes)));
          }
        });
        ones += rows;
        ++shifts;
      }
      ++scales;
    }
    forEach<kAmxLines>([&](auto i) { storeVec(own + i * kLanes, sums[i]); });
  }

  const RoundedAmxInput& input_;
  const Linear& linear_;
  const RoundedForm& form_;
  const int64_t columns_;
  float* const state_;
  uint8_t* const weights_;
  float *const scales_, *const shifts_;
  int32_t* const parts_;
};

}  // namespace
}  // namespace step
