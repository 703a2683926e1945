// SPDX-License-Identifier: Apache-2.0
//
// attend(query, keys, values, seq_ids, position_ids, scaling, sliding_window): attention of new tokens over a static
// key-value cache, for token generation (one token a row) and prompt chunks (many tokens of one slot) alike.
//
//   query [rows, heads, tokens, dim], keys and values [slots, kv_heads, columns, dim], seq_ids [rows] (the slot of each
//   row; None: row i is slot i), position_ids [rows, tokens]; result [rows, tokens, heads, dim].
//
// A token at position p sees columns c <= p of its slot and, with a sliding window w > 0, only c > p - w. Position -1
// is an idle token: its result is zero. bfloat16 and float32; scores, softmax and sums are float32.
//
// Contracts:
// - A token's result depends on its query, its position, the window and the columns it sees only, to the bit: not on
//   other tokens or rows, on how tokens are cut into chunks, on the size of the cache or the number of threads. Columns
//   are taken in ascending order in blocks at fixed places, and one code computes single tokens and chunks.
// - What a token does not see cannot reach its result, NaN and infinity included.
// - In bfloat16, probabilities are rounded to bfloat16 before they meet the values, and subnormal numbers count as
//   zero, as the hardware instruction has it.
// - No autograd formula: for inference.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#ifndef OPTIMUM_NEURON_NAMESPACE
#error "Define OPTIMUM_NEURON_NAMESPACE: the torch namespace the operator is registered in."
#endif

namespace {

constexpr int64_t kLanes = 16;
constexpr int64_t kMaxDim = 256;

struct Range {
  int64_t begin;
  int64_t end;
};

struct Call {
  const void* query;
  const void* keys;
  const void* values;
  void* output;
  const int32_t* slots;  // null: row i reads slot i
  const int32_t* positions;
  int64_t rows, heads, tokens, dim, kvHeads, columns, window;
  int64_t rowStride, headStride, tokenStride;  // of query
  float scaling;

  int64_t group() const { return heads / kvHeads; }

  Range visible(int64_t row, int64_t token) const {
    const int64_t position = positions[row * tokens + token];
    if (position < 0) {
      return {0, 0};
    }
    return {window > 0 ? std::max<int64_t>(position + 1 - window, 0) : 0, position + 1};
  }
  int64_t queryOffset(int64_t row, int64_t head, int64_t token) const {
    return row * rowStride + head * headStride + token * tokenStride;
  }
  int64_t cacheOffset(int64_t row, int64_t kvHead) const {
    return ((slots ? slots[row] : row) * kvHeads + kvHead) * columns * dim;
  }
  int64_t outputOffset(int64_t row, int64_t head, int64_t token) const {
    return ((row * tokens + token) * heads + head) * dim;
  }
};

#if defined(__x86_64__)

// Attributes, not compiler flags: the rest of the file must run on any x86-64.
#define TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")))
#define INLINE_AVX512 TARGET_AVX512 __attribute__((always_inline)) static inline

bool cpuSupported() {
  static const bool supported = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bf16");
  return supported;
}

// Columns the softmax takes at a time: part of the result's definition, blocks begin at multiples of it.
constexpr int64_t kBlock = 64;
// 6 x 4 sums, 4 vectors of the block and one of the queries fit the 32 registers.
constexpr int64_t kTileRows = 6;
constexpr int64_t kTileVectors = 4;
// Queries that share a packed block, at most: they should stay in the second-level cache. Fewer, down to the tokens
// below, where there would be too few tiles to balance the threads.
constexpr int64_t kTileQueries = 192;
constexpr int64_t kTilesPerThread = 4;
constexpr int64_t kMinTileTokens = 8;
// Multiply-adds of about 20 us: less is not worth waking another thread. Packing costs as much as some queries.
constexpr int64_t kGrain = 1 << 21;
constexpr int64_t kPackCost = 8;

// Both matrix products work on 32-bit words: two bfloat16 that are multiplied and added in one step, or one float32.
using Word = uint32_t;

struct BFloat16 {
  using Element = c10::BFloat16;
  static constexpr int64_t kPerWord = 2;

  INLINE_AVX512 __m512 multiplyAdd(__m512i a, __m512i b, __m512 sum) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
  }
  INLINE_AVX512 __m512i loadBits(const Element* p) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  INLINE_AVX512 __m512 load(const Element* p) { return _mm512_castsi512_ps(_mm512_slli_epi32(loadBits(p), 16)); }
  INLINE_AVX512 void store(Element* p, __m512 values) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(values));
  }
};

struct Float32 {
  using Element = float;
  static constexpr int64_t kPerWord = 1;

  INLINE_AVX512 __m512 multiplyAdd(__m512i a, __m512i b, __m512 sum) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
  }
  INLINE_AVX512 __m512 load(const Element* p) { return _mm512_loadu_ps(p); }
  INLINE_AVX512 void store(Element* p, __m512 values) { _mm512_storeu_ps(p, values); }
};

// c[m] = c[m] * factors[m] + sum over k of a[m][k] * b[k]; without factors c is only written.
struct Product {
  float* c;
  int64_t cStride;
  const Word* a;
  int64_t aStride;
  const Word* b;
  int64_t bStride;
  int64_t steps;
  const float* factors;
};

template <class Type, int Rows, int Vectors>
TARGET_AVX512 void multiplyTile(const Product& product) {
  const auto [c, cStride, a, aStride, b, bStride, steps, factors] = product;
  __m512 sums[Rows][Vectors];
#pragma GCC unroll 6
  for (int m = 0; m < Rows; ++m) {
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) {
      sums[m][j] = factors ? _mm512_mul_ps(_mm512_loadu_ps(c + m * cStride + j * kLanes), _mm512_set1_ps(factors[m]))
                           : _mm512_setzero_ps();
    }
  }
  for (int64_t k = 0; k < steps; ++k) {
    __m512i vectors[Vectors];
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) {
      vectors[j] = _mm512_loadu_si512(b + k * bStride + j * kLanes);
    }
#pragma GCC unroll 6
    for (int m = 0; m < Rows; ++m) {
      const __m512i word = _mm512_set1_epi32(static_cast<int>(a[m * aStride + k]));
#pragma GCC unroll 4
      for (int j = 0; j < Vectors; ++j) {
        sums[m][j] = Type::multiplyAdd(word, vectors[j], sums[m][j]);
      }
    }
  }
#pragma GCC unroll 6
  for (int m = 0; m < Rows; ++m) {
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) {
      _mm512_storeu_ps(c + m * cStride + j * kLanes, sums[m][j]);
    }
  }
}

using Multiply = void (*)(const Product&);

template <class Type, int Rows>
Multiply multiplyOf(int64_t vectors) {
  static constexpr Multiply kTiles[kTileVectors] = {
      multiplyTile<Type, Rows, 1>, multiplyTile<Type, Rows, 2>, multiplyTile<Type, Rows, 3>,
      multiplyTile<Type, Rows, 4>};
  return kTiles[vectors - 1];
}

template <class Type>
void multiply(int64_t rows, int64_t vectors, const Product& product) {
  static constexpr Multiply (*kTiles[kTileRows])(int64_t) = {
      multiplyOf<Type, 1>, multiplyOf<Type, 2>, multiplyOf<Type, 3>,
      multiplyOf<Type, 4>, multiplyOf<Type, 5>, multiplyOf<Type, 6>};
  kTiles[rows - 1](vectors)(product);
}

// 2^x for x <= 0 where the mask is set, else 0. The polynomial is that of exp2f in the Cephes library (S. Moshier), for
// 2^f on [-1/2, 1/2]; relative error 1e-7.
INLINE_AVX512 __m512 exp2(__m512 x, __mmask16 mask) {
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(x, whole);
  __m512 y = _mm512_set1_ps(1.535336188319500e-4f);
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.339887440266574e-3f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(9.618437357674640e-3f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(5.550332471162809e-2f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.402264791363012e-1f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.931472028550421e-1f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f));
  return _mm512_maskz_scalef_ps(mask, y, whole);
}

INLINE_AVX512 void transpose(__m512i (&r)[kLanes]) {
  __m512i t[kLanes];
#pragma GCC unroll 8
  for (int i = 0; i < kLanes; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < kLanes; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512i even0 = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    const __m512i even1 = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    const __m512i odd0 = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    const __m512i odd1 = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    r[i] = _mm512_shuffle_i32x4(even0, even1, 0x88);
    r[i + 4] = _mm512_shuffle_i32x4(odd0, odd1, 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(even0, even1, 0xdd);
    r[i + 12] = _mm512_shuffle_i32x4(odd0, odd1, 0xdd);
  }
}

// to[word][column] = keys[column][word] for `count` columns; up to the next multiple of kLanes, zero. On the way asks
// memory for what is read next: the values of the block and the keys of another.
TARGET_AVX512 void packKeys(
    Word* to, const Word* keys, const Word* values, const Word* nextKeys, int64_t words, int64_t count) {
  for (int64_t column = 0; column < count; column += kLanes) {
    for (int64_t word = 0; word < words; word += kLanes) {
      const int64_t width = std::min(kLanes, words - word);
      const auto mask = static_cast<__mmask16>((1u << width) - 1);
      __m512i r[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        const int64_t offset = (column + i) * words + word;
        r[i] = _mm512_maskz_loadu_epi32(column + i < count ? mask : 0, keys + offset);
        _mm_prefetch(reinterpret_cast<const char*>(values + offset), _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(nextKeys + offset), _MM_HINT_T0);
      }
      transpose(r);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        if (i < width) {
          _mm512_storeu_si512(to + (word + i) * kBlock + column, r[i]);
        }
      }
    }
  }
}

// The words of the value rows that cover `range`. A word of bfloat16 holds a dimension of two columns, the first of
// them even; a column outside the range is zero in it.
INLINE_AVX512 const Word* packValues(BFloat16, Word* to, const c10::BFloat16* values, int64_t dim, Range range) {
  for (int64_t column = range.begin & ~1; column < range.end; column += 2) {
    const __m512i low = _mm512_set1_epi32(column >= range.begin ? 0xffff : 0);
    const __mmask16 high = column + 1 < range.end ? 0xffff : 0;
    for (int64_t d = 0; d < dim; d += kLanes) {
      const auto* first = values + column * dim + d;
      const __m512i odd = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(high, first + dim));
      const __m512i even = _mm512_and_si512(BFloat16::loadBits(first), low);
      _mm512_storeu_si512(to + column / 2 * dim + d, _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
    }
  }
  return to;
}

INLINE_AVX512 const Word* packValues(Float32, Word*, const float* values, int64_t, Range) {
  return reinterpret_cast<const Word*>(values);
}

template <class Type>
TARGET_AVX512 bool allFinite(const typename Type::Element* values, int64_t dim, Range range) {
  constexpr int kNanOrInfinity = 0x99;
  __mmask16 found = 0;
  for (int64_t i = range.begin * dim; i < range.end * dim; i += kLanes) {
    found |= _mm512_fpclass_ps_mask(Type::load(values + i), kNanOrInfinity);
  }
  return !found;
}

template <bool Whole>
__mmask16 vectorMask(uint64_t mask, int j) {
  return Whole ? 0xffff : static_cast<__mmask16>(mask >> (j * kLanes));
}

// Running softmax state of some queries: largest score, and the sum of probabilities, lane by lane until the end.
struct Softmax {
  float* maxima;
  float* sums;
};

// Probabilities of up to kTileRows queries over a block, relative to their largest score so far, and the factors that
// make the earlier ones relative to that score. Where a query sees nothing of the block, 0 and a factor of 1.
// Whole: all of them see all columns of the block. That is the usual case, and masks cost a tenth of all time.
template <class Type, bool Whole>
TARGET_AVX512 void softmax(
    Word* probabilities, float* factors, Softmax state, float* scores, const uint64_t* masks, int64_t rows,
    float scale) {
  const __m512 scales = _mm512_set1_ps(scale);
  alignas(64) float maxima[kLanes] = {};
  for (int64_t m = 0; m < rows; ++m) {
    __m512 top = _mm512_set1_ps(state.maxima[m]);
#pragma GCC unroll 4
    for (int j = 0; j < kTileVectors; ++j) {
      const auto seen = vectorMask<Whole>(masks[m], j);
      const __m512 score = _mm512_maskz_loadu_ps(seen, scores + m * kBlock + j * kLanes);
      const __m512 scaled = _mm512_mul_ps(score, scales);
      // Stored, as computing it again might fuse it with the subtraction below: the largest would not be 2^0.
      _mm512_storeu_ps(scores + m * kBlock + j * kLanes, scaled);
      top = _mm512_mask_max_ps(top, seen, top, scaled);
    }
    maxima[m] = _mm512_reduce_max_ps(top);
  }
  const auto used = static_cast<__mmask16>((1u << rows) - 1);
  const __m512 now = _mm512_load_ps(maxima);
  const __m512 before = _mm512_maskz_loadu_ps(used, state.maxima);
  _mm512_mask_storeu_ps(factors, used, exp2(_mm512_sub_ps(before, now), used));
  _mm512_mask_storeu_ps(state.maxima, used, now);
  for (int64_t m = 0; m < rows; ++m) {
    __m512 sum = _mm512_setzero_ps();
#pragma GCC unroll 4
    for (int j = 0; j < kTileVectors; ++j) {
      const auto seen = vectorMask<Whole>(masks[m], j);
      const __m512 scaled = _mm512_loadu_ps(scores + m * kBlock + j * kLanes);
      const __m512 p = exp2(_mm512_sub_ps(scaled, _mm512_set1_ps(maxima[m])), seen);
      sum = _mm512_add_ps(sum, p);
      Type::store(reinterpret_cast<typename Type::Element*>(probabilities + m * kBlock) + j * kLanes, p);
    }
    const __m512 earlier = _mm512_loadu_ps(state.sums + m * kLanes);
    _mm512_storeu_ps(state.sums + m * kLanes, _mm512_fmadd_ps(earlier, _mm512_set1_ps(factors[m]), sum));
  }
}

// Some tokens of one row with the heads of one kv head. Query i is head i % group of token i / group.
struct Tile {
  int64_t row, kvHead, firstToken, queries;
  Range seen;    // columns that some of the tokens see
  Range common;  // columns that all of them see
};

// What a thread works in: the queries of a tile and their state, and one packed block.
struct Scratch {
  float *sums, *outputs, *maxima;
  Word *queries, *keys, *values;

  // A multiple of a cache line, as is every part.
  static int64_t floats(int64_t queries, int64_t dim) {
    return queries * (kLanes + 2 * dim) + roundUp(queries) + 2 * kBlock * dim;
  }
  Scratch(float* memory, int64_t count, int64_t dim)
      : sums(memory),
        outputs(sums + count * kLanes),
        maxima(outputs + count * dim),
        queries(reinterpret_cast<Word*>(maxima + roundUp(count))),
        keys(queries + count * dim),
        values(keys + kBlock * dim) {}

 private:
  static int64_t roundUp(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }
};

// The part of `range` in a block, counted from its begin.
Range cut(Range range, int64_t block) {
  return {std::clamp<int64_t>(range.begin - block, 0, kBlock), std::clamp<int64_t>(range.end - block, 0, kBlock)};
}

uint64_t bits(Range range) {
  const auto below = [](int64_t n) { return n < 64 ? (uint64_t{1} << n) - 1 : ~uint64_t{0}; };
  return range.begin < range.end ? below(range.end) & ~below(range.begin) : 0;
}

template <class Type>
class TileWorker {
 public:
  using Element = typename Type::Element;

  TileWorker(const Call& call, const Tile& tile, const Scratch& scratch)
      : call_(call),
        tile_(tile),
        scratch_(scratch),
        words_(call.dim / Type::kPerWord),
        group_(call.group()),
        scale_(call.scaling * static_cast<float>(M_LOG2E)) {}

  TARGET_AVX512 void run() {
    start();
    const int64_t offset = call_.cacheOffset(tile_.row, tile_.kvHead);
    const auto* keys = static_cast<const Element*>(call_.keys) + offset;
    const auto* values = static_cast<const Element*>(call_.values) + offset;
    for (int64_t block = tile_.seen.begin / kBlock * kBlock; block < tile_.seen.end; block += kBlock) {
      attendBlock(block, keys + block * call_.dim, values + block * call_.dim);
    }
    finish();
  }

 private:
  TARGET_AVX512 void start() {
    std::fill_n(scratch_.sums, tile_.queries * kLanes, 0.0f);
    std::fill_n(scratch_.outputs, tile_.queries * call_.dim, 0.0f);
    // Finite: the difference of two of them must not be NaN.
    std::fill_n(scratch_.maxima, tile_.queries, std::numeric_limits<float>::lowest() / 2);
    for (int64_t i = 0; i < tile_.queries; ++i) {
      const int64_t head = tile_.kvHead * group_ + i % group_;
      const auto* query = static_cast<const Element*>(call_.query) + call_.queryOffset(tile_.row, head, token(i));
      std::memcpy(scratch_.queries + i * words_, query, words_ * sizeof(Word));
    }
  }

  TARGET_AVX512 void attendBlock(int64_t block, const Element* keys, const Element* values) {
    const Range seen = cut(tile_.seen, block);
    const Range common = cut(tile_.common, block);
    const Element* nextKeys = block + kBlock < tile_.seen.end ? keys + kBlock * call_.dim : keys;
    packKeys(
        scratch_.keys, reinterpret_cast<const Word*>(keys), reinterpret_cast<const Word*>(values),
        reinterpret_cast<const Word*>(nextKeys), words_, seen.end);
    const bool same = common.begin <= seen.begin && common.end >= seen.end;
    // Probability zero hides a value from a query only if their product is zero. If not, each query has its own copy.
    if (same || allFinite<Type>(values, call_.dim, seen)) {
      const Word* packed = packValues(Type(), scratch_.values, values, call_.dim, seen);
      const int64_t groups = (tile_.queries + kTileRows - 1) / kTileRows;
      for (int64_t i = 0; i < groups; ++i) {
        attendRows(block, packed, {tile_.queries * i / groups, tile_.queries * (i + 1) / groups});
      }
      return;
    }
    for (int64_t i = 0; i < tile_.queries; ++i) {
      attendRows(block, packValues(Type(), scratch_.values, values, call_.dim, cut(visible(i), block)), {i, i + 1});
    }
  }

  TARGET_AVX512 void attendRows(int64_t block, const Word* values, Range queries) {
    Range seen{kBlock, 0};
    uint64_t masks[kTileRows];
    const int64_t rows = queries.end - queries.begin;
    for (int64_t m = 0; m < rows; ++m) {
      const Range range = cut(visible(queries.begin + m), block);
      masks[m] = bits(range);
      if (masks[m]) {
        seen = {std::min(seen.begin, range.begin), std::max(seen.end, range.end)};
      }
    }
    if (seen.begin >= seen.end) {
      return;
    }
    alignas(64) float scores[kTileRows * kBlock];
    alignas(64) Word probabilities[kTileRows * kBlock];
    float factors[kTileRows];
    const int64_t vectors = (seen.end + kLanes - 1) / kLanes;
    const Word* query = scratch_.queries + queries.begin * words_;
    multiply<Type>(rows, vectors, {scores, kBlock, query, words_, scratch_.keys, kBlock, words_, nullptr});
    const Softmax state{scratch_.maxima + queries.begin, scratch_.sums + queries.begin * kLanes};
    const bool whole = std::all_of(masks, masks + rows, [](uint64_t mask) { return mask == ~uint64_t{0}; });
    (whole ? softmax<Type, true> : softmax<Type, false>)(probabilities, factors, state, scores, masks, rows, scale_);
    const int64_t step = seen.begin / Type::kPerWord;
    const int64_t steps = (seen.end + Type::kPerWord - 1) / Type::kPerWord - step;
    for (int64_t d = 0; d < call_.dim; d += kTileVectors * kLanes) {
      multiply<Type>(
          rows, std::min(kTileVectors, (call_.dim - d) / kLanes),
          {scratch_.outputs + queries.begin * call_.dim + d, call_.dim, probabilities + step, kBlock,
           values + step * call_.dim + d, call_.dim, steps, factors});
    }
  }

  TARGET_AVX512 void finish() {
    for (int64_t i = 0; i < tile_.queries; ++i) {
      const float sum = _mm512_reduce_add_ps(_mm512_loadu_ps(scratch_.sums + i * kLanes));
      const __m512 factor = _mm512_set1_ps(sum == 0 ? 0 : 1 / sum);  // zero: an idle token
      const int64_t head = tile_.kvHead * group_ + i % group_;
      auto* output = static_cast<Element*>(call_.output) + call_.outputOffset(tile_.row, head, token(i));
      for (int64_t d = 0; d < call_.dim; d += kLanes) {
        // Adding zero makes +0 of -0: which of them a sum is may depend on zeros added for columns not seen.
        const __m512 value = _mm512_loadu_ps(scratch_.outputs + i * call_.dim + d);
        Type::store(output + d, _mm512_fmadd_ps(value, factor, _mm512_setzero_ps()));
      }
    }
  }

  int64_t token(int64_t query) const { return tile_.firstToken + query / group_; }
  Range visible(int64_t query) const { return call_.visible(tile_.row, token(query)); }

  const Call& call_;
  const Tile& tile_;
  const Scratch& scratch_;
  const int64_t words_;
  const int64_t group_;
  const float scale_;  // of scores, for powers of two
};

// The last tokens first: they see most, and what is left at the end should be small.
std::vector<Tile> makeTiles(const Call& call, int64_t tileTokens) {
  std::vector<Tile> tiles;
  for (int64_t first = (call.tokens - 1) / tileTokens * tileTokens; first >= 0; first -= tileTokens) {
    const int64_t last = std::min(first + tileTokens, call.tokens);
    for (int64_t row = 0; row < call.rows; ++row) {
      Range seen{call.columns, 0};
      Range common{0, call.columns};
      for (int64_t token = first; token < last; ++token) {
        const Range range = call.visible(row, token);
        common = {std::max(common.begin, range.begin), std::min(common.end, range.end)};
        if (range.end > 0) {
          seen = {std::min(seen.begin, range.begin), std::max(seen.end, range.end)};
        }
      }
      for (int64_t kvHead = 0; kvHead < call.kvHeads; ++kvHead) {
        tiles.push_back({row, kvHead, first, (last - first) * call.group(), seen, common});
      }
    }
  }
  return tiles;
}

// Tokens of a tile. Results do not depend on it.
int64_t chooseTileTokens(const Call& call) {
  const int64_t pairs = call.rows * call.kvHeads;
  const int64_t tiles = (kTilesPerThread * at::get_num_threads() + pairs - 1) / pairs;
  const int64_t tokens = std::min(kTileQueries / call.group(), (call.tokens + tiles - 1) / tiles);
  return std::clamp<int64_t>(tokens, std::min<int64_t>(kMinTileTokens, call.tokens), call.tokens);
}

template <class Type>
void attendAll(const Call& call) {
  const int64_t tileTokens = chooseTileTokens(call);
  const std::vector<Tile> tiles = makeTiles(call, tileTokens);
  int64_t cost = 0;
  for (const Tile& tile : tiles) {
    cost += std::max<int64_t>(tile.seen.end - tile.seen.begin, 0) * (tile.queries + kPackCost) * 2 * call.dim;
  }
  const int64_t count = tiles.size();
  const int64_t threads = std::clamp<int64_t>(cost / kGrain, 1, std::min<int64_t>(at::get_num_threads(), count));
  const int64_t floats = Scratch::floats(tileTokens * call.group(), call.dim);
  const at::Tensor memory = at::empty({threads, floats}, at::kFloat);
  std::atomic<int64_t> next{0};
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; ++thread) {
      const Scratch scratch(memory.mutable_data_ptr<float>() + thread * floats, tileTokens * call.group(), call.dim);
      for (int64_t i = next++; i < count; i = next++) {
        TileWorker<Type>(call, tiles[i], scratch).run();
      }
    }
  });
}

void attendFast(const Call& call, at::ScalarType type) {
  type == at::kFloat ? attendAll<Float32>(call) : attendAll<BFloat16>(call);
}

#else

bool cpuSupported() {
  return false;
}

void attendFast(const Call&, at::ScalarType) {}

#endif

// In lanes, for compilers to vectorize: they may not change the order of a sum.
template <class Element>
float dot(const Element* a, const Element* b, int64_t dim) {
  float sums[kLanes] = {};
  for (int64_t d = 0; d < dim; d += kLanes) {
    for (int64_t j = 0; j < kLanes; ++j) {
      sums[j] += static_cast<float>(a[d + j]) * static_cast<float>(b[d + j]);
    }
  }
  float sum = 0;
  for (const float lane : sums) {
    sum += lane;
  }
  return sum;
}

template <class Element>
void attendQuery(const Call& call, int64_t row, int64_t head, int64_t token, std::vector<float>& scores) {
  const Range seen = call.visible(row, token);
  const int64_t offset = call.cacheOffset(row, head / call.group());
  const auto* query = static_cast<const Element*>(call.query) + call.queryOffset(row, head, token);
  const auto* keys = static_cast<const Element*>(call.keys) + offset;
  const auto* values = static_cast<const Element*>(call.values) + offset;
  float maximum = std::numeric_limits<float>::lowest();
  for (int64_t c = seen.begin; c < seen.end; ++c) {
    scores[c] = dot(query, keys + c * call.dim, call.dim) * call.scaling;
    maximum = std::max(maximum, scores[c]);
  }
  float sums[kMaxDim] = {};
  float total = 0;
  for (int64_t c = seen.begin; c < seen.end; ++c) {
    const float probability = std::exp(scores[c] - maximum);
    total += probability;
    const auto rounded = static_cast<float>(static_cast<Element>(probability));
    for (int64_t d = 0; d < call.dim; ++d) {
      sums[d] += rounded * static_cast<float>(values[c * call.dim + d]);
    }
  }
  auto* output = static_cast<Element*>(call.output) + call.outputOffset(row, head, token);
  for (int64_t d = 0; d < call.dim; ++d) {
    output[d] = static_cast<Element>(seen.end > 0 ? sums[d] / total : 0.0f);
  }
}

template <class Element>
void attendPortable(const Call& call) {
  at::parallel_for(0, call.rows * call.heads * call.tokens, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> scores(call.columns);
    for (int64_t i = begin; i < end; ++i) {
      attendQuery<Element>(call, i / call.tokens / call.heads, i / call.tokens % call.heads, i % call.tokens, scores);
    }
  });
}

void checkCaches(const at::Tensor& query, const at::Tensor& keys, const at::Tensor& values) {
  TORCH_CHECK(query.dim() == 4 && keys.dim() == 4, "attend: query and keys must have 4 dimensions");
  const auto type = query.scalar_type();
  const int64_t heads = query.size(1), kvHeads = keys.size(1), dim = query.size(3);
  TORCH_CHECK(type == at::kBFloat16 || type == at::kFloat, "attend: bfloat16 or float32 expected, not ", type);
  TORCH_CHECK(
      dim > 0 && dim % kLanes == 0 && dim <= kMaxDim, "attend: head dimension ", dim, " is not a multiple of ", kLanes,
      " up to ", kMaxDim);
  TORCH_CHECK(
      keys.sizes() == values.sizes() && keys.size(3) == dim, "attend: query ", query.sizes(), ", keys ", keys.sizes(),
      ", values ", values.sizes());
  TORCH_CHECK(kvHeads > 0 && heads % kvHeads == 0, "attend: ", heads, " heads, ", kvHeads, " kv heads");
  TORCH_CHECK(
      keys.scalar_type() == type && values.scalar_type() == type && keys.is_contiguous() && values.is_contiguous(),
      "attend: keys and values must be contiguous and ", type);
  TORCH_CHECK(query.stride(3) == 1, "attend: the last dimension of query must be contiguous");
}

void checkIndices(const at::Tensor& indices, at::IntArrayRef sizes, int64_t begin, int64_t end, const char* name) {
  TORCH_CHECK(
      indices.scalar_type() == at::kInt && indices.sizes() == sizes, "attend: ", name, " must be int32 ", sizes,
      ", not ", indices.scalar_type(), " ", indices.sizes());
  const auto* index = indices.const_data_ptr<int32_t>();
  for (int64_t i = 0; i < indices.numel(); ++i) {
    TORCH_CHECK(index[i] >= begin && index[i] < end, "attend: ", name, " ", index[i], ", cache size ", end);
  }
}

at::Tensor attend(
    const at::Tensor& query, const at::Tensor& keys, const at::Tensor& values, const std::optional<at::Tensor>& seqIds,
    const at::Tensor& positionIds, double scaling, int64_t slidingWindow) {
  checkCaches(query, keys, values);
  const at::Tensor positions = positionIds.contiguous();
  const std::optional<at::Tensor> slots = seqIds ? std::optional(seqIds->contiguous()) : std::nullopt;
  checkIndices(positions, {query.size(0), query.size(2)}, -1, keys.size(2), "position_ids");
  if (slots) {
    checkIndices(*slots, {query.size(0)}, 0, keys.size(0), "seq_ids");
  } else {
    TORCH_CHECK(query.size(0) <= keys.size(0), "attend: ", query.size(0), " rows, cache size ", keys.size(0));
  }
  at::Tensor output = at::empty({query.size(0), query.size(2), query.size(1), query.size(3)}, query.options());
  if (output.numel() == 0) {
    return output;
  }
  const Call call{
      query.const_data_ptr(), keys.const_data_ptr(), values.const_data_ptr(), output.mutable_data_ptr(),
      slots ? slots->const_data_ptr<int32_t>() : nullptr, positions.const_data_ptr<int32_t>(),
      query.size(0), query.size(1), query.size(2), query.size(3), keys.size(1), keys.size(2), slidingWindow,
      query.stride(0), query.stride(1), query.stride(2), static_cast<float>(scaling)};
  if (cpuSupported()) {
    attendFast(call, query.scalar_type());
  } else if (query.scalar_type() == at::kFloat) {
    attendPortable<float>(call);
  } else {
    attendPortable<c10::BFloat16>(call);
  }
  return output;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(OPTIMUM_NEURON_NAMESPACE, m) {
  m.def(
      "attend(Tensor query, Tensor keys, Tensor values, Tensor? seq_ids, Tensor position_ids, float scaling, "
      "int sliding_window) -> Tensor");
}

TORCH_LIBRARY_IMPL(OPTIMUM_NEURON_NAMESPACE, CPU, m) {
  m.impl("attend", &attend);
}
