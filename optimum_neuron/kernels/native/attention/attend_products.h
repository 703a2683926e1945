// SPDX-License-Identifier: Apache-2.0
//
// How attention multiplies the packed operands of a type: by vectors, or by the tile registers of AMX where a CPU has them.
#pragma once

#if defined(STEP_AMX)
#include "attention/tile_multiply_amx.h"
#else
#include "attention/tile_multiply.h"
#endif

namespace step {
namespace {

template <class Kind>
struct Products {
  static constexpr int64_t kRows = kVectorRows;  // at a time
  static constexpr int64_t kWords = 1;           // of which steps are a multiple: packed operands have zeros up to there
  struct Registers {};                           // what a thread holds meanwhile

  static void multiply(int64_t rows, int64_t vectors, const Product& product) {
    step::multiply<Kind>(rows, vectors, product);
  }
};

#if defined(STEP_AMX)
template <>
struct Products<BFloat16> {
  static constexpr int64_t kRows = kAmxLines;
  static constexpr int64_t kWords = kAmxLines;
  using Registers = AmxTiles;

  static void multiply(int64_t rows, int64_t vectors, const Product& product) {
    multiplyByTiles(rows, vectors, product);
  }
};
#endif

// Words of a query, and of a block's keys.
template <class Kind>
constexpr int64_t dimWords(int64_t dim) {
  return roundUp(dim / Kind::kPerWord, Products<Kind>::kWords);
}

}  // namespace
}  // namespace step
