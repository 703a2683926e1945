// SPDX-License-Identifier: Apache-2.0
//
// A few rows times a packed block: the products of queries and keys, and of probabilities and values.
#pragma once

#include <cstdint>

#include "simd.h"

namespace {

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
  UNROLL for (int m = 0; m < Rows; ++m) {
    UNROLL for (int j = 0; j < Vectors; ++j) {
      sums[m][j] = factors ? _mm512_mul_ps(_mm512_loadu_ps(c + m * cStride + j * kLanes), _mm512_set1_ps(factors[m]))
                           : _mm512_setzero_ps();
    }
  }
  for (int64_t k = 0; k < steps; ++k) {
    __m512i vectors[Vectors];
    UNROLL for (int j = 0; j < Vectors; ++j) {
      vectors[j] = _mm512_loadu_si512(b + k * bStride + j * kLanes);
    }
    UNROLL for (int m = 0; m < Rows; ++m) {
      const __m512i word = _mm512_set1_epi32(static_cast<int>(a[m * aStride + k]));
      UNROLL for (int j = 0; j < Vectors; ++j) {
        sums[m][j] = Type::multiplyAdd(word, vectors[j], sums[m][j]);
      }
    }
  }
  UNROLL for (int m = 0; m < Rows; ++m) {
    UNROLL for (int j = 0; j < Vectors; ++j) {
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

}  // namespace
