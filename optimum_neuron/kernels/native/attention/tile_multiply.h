// SPDX-License-Identifier: Apache-2.0
//
// A few rows times a packed block: the products of queries and keys, and of probabilities and values.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "attention/attention_call.h"
#include "vectors/elements.h"

namespace step {
namespace {

constexpr int64_t kVectorRows = 6;

// Vectors that so many rows take at a time: their sums, and with them one operand and one element of the other, fit
// the registers; of one row, there are enough sums to wait for none.
constexpr int productVectors(int64_t rows) {
  if (rows <= 2) {
    return kManyRegisters || rows == 1 ? 8 : 4;
  }
  return kManyRegisters ? 4 : 2;
}

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

template <class Kind, int Rows, int Vectors>
void multiplyTile(const Product& product) {
  using Words = typename Kind::Words;
  const auto [c, cStride, a, aStride, b, bStride, steps, factors] = product;
  Vec sums[Rows][Vectors];
  UNROLL for (int m = 0; m < Rows; ++m) {
    UNROLL for (int j = 0; j < Vectors; ++j) {
      sums[m][j] = factors ? loadVec(c + m * cStride + j * kLanes) * broadcast(factors[m]) : Vec{};
    }
  }
  for (int64_t k = 0; k < steps; ++k) {
    if constexpr (Rows < Vectors) {
      Words words[Rows];
      UNROLL for (int m = 0; m < Rows; ++m) {
        words[m] = Kind::repeatPacked(a + m * aStride + k);
      }
      UNROLL for (int j = 0; j < Vectors; ++j) {
        const Words vector = Kind::loadPacked(b + k * bStride + j * kLanes);
        UNROLL for (int m = 0; m < Rows; ++m) {
          sums[m][j] = Kind::multiplyAdd(words[m], vector, sums[m][j]);
        }
      }
    } else {
      Words vectors[Vectors];
      UNROLL for (int j = 0; j < Vectors; ++j) {
        vectors[j] = Kind::loadPacked(b + k * bStride + j * kLanes);
      }
      UNROLL for (int m = 0; m < Rows; ++m) {
        const Words word = Kind::repeatPacked(a + m * aStride + k);
        UNROLL for (int j = 0; j < Vectors; ++j) {
          sums[m][j] = Kind::multiplyAdd(word, vectors[j], sums[m][j]);
        }
      }
    }
  }
  UNROLL for (int m = 0; m < Rows; ++m) {
    UNROLL for (int j = 0; j < Vectors; ++j) {
      storeVec(c + m * cStride + j * kLanes, sums[m][j]);
    }
  }
}

using Multiply = void (*)(const Product&);

template <class Kind, int Rows, size_t... I>
void multiplyRows(int64_t vectors, const Product& product, std::index_sequence<I...>) {
  static constexpr Multiply kTiles[] = {multiplyTile<Kind, Rows, static_cast<int>(I) + 1>...};
  constexpr int64_t most = sizeof...(I);
  if (vectors <= most) {
    kTiles[vectors - 1](product);
    return;
  }
  Product section = product;
  for (int64_t j = 0; j < vectors; j += most) {
    kTiles[std::min(most, vectors - j) - 1](section);
    section.b += most * kLanes;
    section.c += most * kLanes;
  }
}

template <class Kind, size_t... I>
void multiply(int64_t rows, int64_t vectors, const Product& product, std::index_sequence<I...>) {
  static constexpr void (*kRows[])(int64_t, const Product&) = {[](int64_t count, const Product& rowsProduct) {
    multiplyRows<Kind, I + 1>(count, rowsProduct, std::make_index_sequence<productVectors(I + 1)>());
  }...};
  kRows[rows - 1](vectors, product);
}

// Up to kVectorRows rows, and any number of vectors.
template <class Kind>
void multiply(int64_t rows, int64_t vectors, const Product& product) {
  multiply<Kind>(rows, vectors, product, std::make_index_sequence<kVectorRows>());
}

}  // namespace
}  // namespace step
