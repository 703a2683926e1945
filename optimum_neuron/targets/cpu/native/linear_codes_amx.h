// SPDX-License-Identifier: Apache-2.0
//
// Linear layers of bfloat16 whose weights are codes, by the tile registers of AMX. Codes become bfloat16, exactly, tile by tile; what a
// tile of weights makes of one of x is multiplied by its scales in float32 and added up in vector registers. Every output is
// summed in one order: 32 columns after 32 columns of a segment, then segment after segment. A segment is a group, or a part of a
// long one; after a group's last one follows its shift times the sum of its x.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

#include "ahead.h"
#include "amx.h"
#include "amx_store.h"
#include "codes_amx.h"
#include "linear_block.h"
#include "transpose.h"

namespace step {
namespace {

// Rows of x, of which each has the sum of each of its groups behind its columns, where weights have shifts.
struct AmxCodedInput : CodedInput<kAmxLines> {
  bool hasSums;

  // Columns from `column` on of a tile.
  const uint16_t* columnsOf(int64_t tile, int64_t column) const {
    const auto [first, last] = tileRows(tile);
    return static_cast<const uint16_t*>(packed) + first * stride + column * (last - first);
  }
  const float* sumsOf(int64_t tile) const { return reinterpret_cast<const float*>(columnsOf(tile, form.padded())); }
};

inline bool hasShift(const LinearsCall& call) {
  return std::any_of(call.linears, call.linears + call.count, [](const Linear& each) { return each.scales.shift; });
}
inline bool hasShift(const ExpertsCall& call) { return call.scales.shift; }

class AmxCodesWorker {
 public:
  using Element = BFloat16::Element;
  using Packed = BFloat16::Packed;
  using Input = AmxCodedInput;

  static constexpr int64_t kTileRows = kAmxLines, kOutputs = 2 * kAmxLines;

 private:
  static constexpr int64_t kSums = kLanes * kLanes;  // of a tile
  static constexpr int64_t kSegment = 256;           // columns, at most
  // Columns of a tile of weights that are unpacked at once: for few rows, and where they stay in the first-level cache, with those of the
  // rest of a panel, while rows pass over them.
  static constexpr int64_t kFewColumns = 512, kColumns = kSegment;
  static constexpr int64_t kFewTiles = 2, kMostTiles = 32, kBatchBytes = 1024 * 1024;
  static constexpr int64_t kPanelTiles = kPanelOutputs / kAmxLines, kTileElements = kAmxBytes / sizeof(Element);
  static constexpr int64_t kCodesBytes = kPanelOutputs * std::max(kFewColumns / kPanelTiles, kColumns) * sizeof(Element);
  static constexpr int64_t kSumsBytes = kPanelTiles * kMostTiles * kAmxBytes;
  static constexpr int64_t kScalesBytes = kPanelOutputs * kLanes * sizeof(float);

 public:
  // Memory of a worker: the sums of a panel and a batch, weights, their scales and shifts, and what two segments come to.
  static constexpr int64_t kBytes = kSumsBytes + kCodesBytes + 2 * kScalesBytes + 2 * kAmxBytes;

  AmxCodesWorker(const Input& input, const Linear& linear, void* memory)
      : input_(input),
        linear_(linear),
        sums_(static_cast<float*>(memory)),
        weights_(reinterpret_cast<Element*>(sums_ + kSumsBytes / sizeof(float))),
        scales_(reinterpret_cast<float*>(weights_ + kCodesBytes / sizeof(Element))),
        shifts_(scales_ + kScalesBytes / sizeof(float)),
        parts_(shifts_ + kScalesBytes / sizeof(float)),
        segmentsOfGroup_(divideUp(input.form.paddedGroup(), kSegment)) {}

  static int64_t batchTiles(const Input& input) {
    return std::clamp<int64_t>(kBatchBytes / (input.stride * kTileRows * sizeof(Packed)), kLeastTiles, kMostTiles);
  }

  template <class Call>
  static int64_t rowBytes(const Call& call) {
    return bytesOf(call.coding, call.columns);
  }
  template <class Call>
  static Input inputOf(const Call& call, void* packed, int64_t rows, const int64_t* places) {
    const CodeForm form = formOf(call.coding, call.columns, call.group, kLineColumns);
    const bool sums = hasShift(call);
    const int64_t stride = form.padded() + (sums ? form.groups * static_cast<int64_t>(sizeof(float) / sizeof(Packed)) : 0);
    return {{{packed, rows, form.padded(), stride, places}, form}, sums};
  }
  // Memory for packed rows, and for what is read behind the last tile.
  static int64_t packedBytes(const Input& input) { return input.rows * input.stride * sizeof(Packed) + kAmxLineBytes; }

  // Packs one tile of `input`; `rowOf` is where a row begins.
  template <class RowOf>
  static void pack(const Input& input, int64_t tile, RowOf rowOf) {
    const auto [first, last] = input.tileRows(tile);
    const int64_t rows = last - first;
    const Element* from[kTileRows];
    for (int64_t m = 0; m < rows; ++m) {
      from[m] = rowOf(first + m);
    }
    const CodeForm& form = input.form;
    const __mmask16 used = (1u << rows) - 1;
    const __m512i order = _mm512_load_si512(kHalvesInTurn);
    auto* to = const_cast<Packed*>(input.columnsOf(tile, 0));
    auto* sums = const_cast<float*>(input.sumsOf(tile));
    for (int64_t g = 0; g < form.groups; ++g, sums += rows) {
      Vec even{}, odd{};
      for (int64_t k = 0; k < form.group; k += kLineColumns) {
        const int64_t column = g * form.group + k;
        BitVec words[kLanes];
        UNROLL for (int m = 0; m < kLanes; ++m) {
          words[m] = m >= rows                        ? BitVec{}
                     : k + kLineColumns <= form.group ? BFloat16::loadWords(from[m] + column)
                                                      : BFloat16::loadWords(from[m] + column, form.group - k);
          if (form.coding == Coding::kInt8) {
            words[m] = (BitVec)_mm512_permutexvar_epi16(order, (__m512i)words[m]);
          }
        }
        transpose(words);
        UNROLL for (int pair = 0; pair < kLanes; ++pair, to += rows * BFloat16::kPerWord) {
          _mm512_mask_storeu_epi32(to, used, (__m512i)words[pair]);
          even += (Vec)(words[pair] << 16);
          odd += (Vec)(words[pair] & 0xffff0000u);
        }
      }
      if (input.hasSums) {
        _mm512_mask_storeu_ps(sums, used, even + odd);
      }
    }
  }

  // `next` are the weights that this thread is likely to read then.
  void run(Range outputs, Range tiles, Bytes next) {
    const AmxTiles registers;
    const int64_t count = outputs.end - outputs.begin, all = tiles.end - tiles.begin;
    const bool few = all <= kFewTiles;
    const int64_t panels = divideUp(count, few ? kOutputs : kPanelOutputs), batches = divideUp(all, batchTiles(input_));
    const auto panelOf = [&](int64_t i) { return shift(part(count, i, panels, kOutputs), outputs.begin); };
    for (int64_t i = 0; i < panels; ++i) {
      const Range panel = panelOf(i);
      const Bytes then = i + 1 < panels ? bytesOfRows(panelOf(i + 1)) : next;
      Ahead ahead(few ? Bytes{} : then, divideUp(panel.end - panel.begin, kAmxLines) * all);
      for (int64_t j = 0; j < batches; ++j) {
        computeBatch(panel, shift(part(all, j, batches), tiles.begin), few, ahead);
      }
    }
  }

 private:
  static constexpr int64_t kLeastTiles = 8;

  // A tile of weights: unpacked ones of some segments, and for each of its lines the scales and shifts of their groups.
  struct Weights {
    const Element* numbers;
    const float *scales, *shifts;
    Range segments;
  };

  Bytes bytesOfRows(Range outputs) const {
    const int64_t row = input_.form.rowBytes();
    return {static_cast<const char*>(linear_.weight) + outputs.begin * row, (outputs.end - outputs.begin) * row};
  }
  Range columnsOf(int64_t segment) const {
    const int64_t padded = input_.form.paddedGroup();
    const int64_t group = segment / segmentsOfGroup_ * padded, begin = segment % segmentsOfGroup_ * kSegment;
    return {group + begin, group + std::min(begin + kSegment, padded)};
  }

  void computeBatch(Range panel, Range batch, bool few, Ahead& ahead) {
    const int64_t segments = input_.form.groups * segmentsOfGroup_, most = few ? kFewColumns : kColumns;
    const int64_t lines = divideUp(panel.end - panel.begin, kAmxLines);
    for (int64_t begin = 0; begin < segments;) {
      int64_t end = begin + 1;
      while (end < segments && columnsOf(end).end - columnsOf(begin).begin <= most) {
        ++end;
      }
      const Range range{begin, end};
      Weights weights[kPanelTiles];
      for (int64_t a = 0; a < lines; ++a) {
        weights[a] = unpack(panel, a, few ? 0 : a, range);
        for (int64_t t = batch.begin; few && t < batch.end; ++t) {
          multiply(weights[a], t, sums_ + ((t - batch.begin) * kPanelTiles + a) * kSums);
        }
      }
      for (int64_t t = batch.begin; !few && t < batch.end; ++t) {
        for (int64_t a = 0; a < lines; ++a) {
          ahead.ask();
          multiply(weights[a], t, sums_ + ((t - batch.begin) * kPanelTiles + a) * kSums);
        }
      }
      begin = end;
    }
    for (int64_t t = batch.begin; t < batch.end; ++t) {
      store(panel, t, sums_ + (t - batch.begin) * kPanelTiles * kSums);
    }
  }

  // Lines of a panel from its tile `a` on; a line that is missing is a copy of the last one.
  Weights unpack(Range panel, int64_t a, int64_t place, Range segments) {
    const Range columns{columnsOf(segments.begin).begin, columnsOf(segments.end - 1).end};
    const int64_t first = segments.begin / segmentsOfGroup_, count = (segments.end - 1) / segmentsOfGroup_ + 1 - first;
    const Scales& own = linear_.scales;
    Element* to = weights_ + place * kAmxLines * kColumns;
    float *scales = scales_ + place * kSums, *shifts = shifts_ + place * kSums;
    for (int64_t line = 0; line < kAmxLines; ++line) {
      const int64_t row = std::min(panel.begin + a * kAmxLines + line, panel.end - 1);
      const int64_t group = row * input_.form.groups + first, next = kAmxLines * input_.form.groups;
      const char* scale = static_cast<const char*>(own.scale) + group * sizeOf(own.type);
      storeVec(scales + line * kLanes, loadScales(own.type, scale, count));
      prefetchFar(scale + next * sizeOf(own.type));
      if (own.shift) {
        storeVec(shifts + line * kLanes, loadScales(Type::kFloat32, own.shift + group, count));
        prefetchFar(own.shift + group + next);
      }
      const uint8_t* codes = static_cast<const uint8_t*>(linear_.weight) + row * input_.form.rowBytes();
      switch (input_.form.coding) {
        case Coding::kInt8:
          unpackLine<Coding::kInt8>(to + line * kLineColumns, codes, columns);
          break;
        case Coding::kInt4:
          unpackLine<Coding::kInt4>(to + line * kLineColumns, codes, columns);
          break;
        case Coding::kFp8:
          unpackLine<Coding::kFp8>(to + line * kLineColumns, codes, columns);
          break;
        default:
          unpackLine<Coding::kFp4>(to + line * kLineColumns, codes, columns);
      }
    }
    return {to, scales, shifts, segments};
  }

  // Columns of a weight row, a line of a tile after the other. Asks memory for those of the row that has this line in the next tile.
  template <Coding C>
  INLINE void unpackLine(Element* to, const uint8_t* codes, Range columns) const {
    const CodeForm& form = input_.form;
    const int64_t padded = form.paddedGroup(), ahead = kAmxLines * form.rowBytes();
    const Line<C> line(linear_.scales.shift);
    int64_t in = columns.begin % padded;
    codes += bytesOf(C, columns.begin / padded * form.group + in);
    for (int64_t k = columns.begin; k < columns.end; k += kLineColumns, to += kTileElements) {
      const int64_t count = std::min(kLineColumns, form.group - in);
      prefetchFar(codes + ahead);
      if (count == kLineColumns) {
        storeBits(to, line(codes));
      } else {
        uint8_t copy[kLineColumns] = {};
        std::memcpy(copy, codes, bytesOf(C, count));
        storeBits(to, line(copy));
      }
      codes += bytesOf(C, count);
      in = in + kLineColumns == padded ? 0 : in + kLineColumns;
    }
  }

  // Adds the products of a tile of weights and one of x to their sums, a line of which is an output of 16 rows.
  void multiply(const Weights& weights, int64_t tile, float* sums) {
    const Range range = weights.segments;
    const Range rows = input_.tileRows(tile);
    const Vec* begin = reinterpret_cast<const Vec*>(sums);
    Vec total[kAmxLines];
    UNROLL for (int line = 0; line < kAmxLines; ++line) {
      total[line] = range.begin == 0 ? Vec{} : begin[line];
    }
    const auto add = [&](int64_t segment, const float* part) __attribute__((always_inline)) {
      const int64_t g = segment / segmentsOfGroup_, own = g - range.begin / segmentsOfGroup_;
      UNROLL for (int line = 0; line < kAmxLines; ++line) {
        total[line] = fma(loadVec(part + line * kLanes), broadcast(weights.scales[line * kLanes + own]), total[line]);
      }
      if (linear_.scales.shift && (segment + 1) % segmentsOfGroup_ == 0) {
        const Vec x = loadVec(input_.sumsOf(tile) + g * (rows.end - rows.begin));
        UNROLL for (int line = 0; line < kAmxLines; ++line) {
          total[line] = fma(x, broadcast(weights.shifts[line * kLanes + own]), total[line]);
        }
      }
    };
    // While a segment is multiplied, the one before it is added.
    float* const parts[] = {parts_, parts_ + kSums};
    for (int64_t s = range.begin; s < range.end; s += 2) {
      multiplySegment<0>(weights, tile, s);
      if (s > range.begin) {
        amxStore<1>(parts[1], kAmxLineBytes);
        add(s - 1, parts[1]);
      }
      if (s + 1 < range.end) {
        multiplySegment<1>(weights, tile, s + 1);
      }
      amxStore<0>(parts[0], kAmxLineBytes);
      add(s, parts[0]);
    }
    if ((range.end - range.begin) % 2 == 0) {
      amxStore<1>(parts[1], kAmxLineBytes);
      add(range.end - 1, parts[1]);
    }
    UNROLL for (int line = 0; line < kAmxLines; ++line) {
      storeVec(sums + line * kLanes, total[line]);
    }
  }

  // Registers 0 and 1 are sums of segments, 2 and 4 weights, 3 and 5 rows of x.
  template <int Sums>
  INLINE void multiplySegment(const Weights& weights, int64_t tile, int64_t segment) const {
    const Range columns = columnsOf(segment), rows = input_.tileRows(tile);
    const int64_t begin = columnsOf(weights.segments.begin).begin, stride = (rows.end - rows.begin) * sizeof(uint32_t);
    const Element* numbers = weights.numbers + (columns.begin - begin) * kAmxLines;
    const Packed* x = input_.columnsOf(tile, columns.begin);
    amxZero<Sums>();
    for (int64_t k = columns.begin; k < columns.end; k += kLineColumns) {
      amxLoad<2 + 2 * Sums>(numbers, kAmxLineBytes);
      amxLoad<3 + 2 * Sums>(x, stride);
      amxMultiplyAdd<Sums, 2 + 2 * Sums, 3 + 2 * Sums>();
      numbers += kTileElements;
      x += kLineColumns * (rows.end - rows.begin);
    }
  }

  void store(Range panel, int64_t tile, const float* sums) const {
    alignas(64) float biases[kOutputs];
    const auto* bias = static_cast<const Element*>(linear_.bias);
    for (int64_t n = panel.begin; n < panel.end; n += kOutputs, sums += 2 * kSums) {
      const int64_t count = std::min(panel.end - n, kOutputs);
      for (int64_t i = 0; i < kOutputs; ++i) {
        // Adding -0 changes no value, adding +0 would make +0 of -0.
        biases[i] = !bias || i >= count ? -0.0f : std::bit_cast<float>(uint32_t{bias[n + i]} << 16);
      }
      storePairs(sums, biases, count, input_.tileRows(tile), [&](int64_t row) {
        return static_cast<Element*>(linear_.output) + input_.place(row) * linear_.outputStride + n;
      });
    }
  }

  const Input& input_;
  const Linear& linear_;
  float* const sums_;
  Element* const weights_;
  float *const scales_, *const shifts_, *const parts_;
  const int64_t segmentsOfGroup_;
};

}  // namespace
}  // namespace step
