// SPDX-License-Identifier: Apache-2.0
//
// The products of tile_multiply.h by the tile registers of AMX: 16 rows times four tiles of a packed block's columns. Every
// sum is taken over 16 words after 16 words, whatever else is computed with it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "vectors/amx.h"
#include "attention/tile_multiply.h"

namespace step {
namespace {

// Registers 0 to 3 are sums, 4 holds a, 5 and 6 take turns for b.
template <int Tiles>
void multiplyTiles(const Product& product, float* sums, int64_t sumsBytes, int64_t apart) {
  constexpr int64_t kWord = sizeof(Word);
  const auto forTiles = [](auto body) {
    body(std::integral_constant<int, 0>());
    if constexpr (Tiles > 1) body(std::integral_constant<int, 1>());
    if constexpr (Tiles > 2) body(std::integral_constant<int, 2>());
    if constexpr (Tiles > 3) body(std::integral_constant<int, 3>());
  };
  forTiles([](auto tile) { amxZero<tile>(); });
  for (int64_t k = 0; k < product.steps; k += kAmxLines) {
    amxLoad<4>(product.a + k, product.aStride * kWord);
    forTiles([&](auto tile) {
      amxLoad<5 + tile % 2>(product.b + k * product.bStride + tile * kLanes, product.bStride * kWord);
      amxMultiplyAdd<tile, 4, 5 + tile % 2>();
    });
  }
  forTiles([&](auto tile) { amxStore<tile>(sums + tile * apart, sumsBytes); });
}

// A Product of up to 16 rows. Its steps are a multiple of 16, and so many rows of a are readable; without factors so many rows of c
// are written.
inline void multiplyByTiles(int64_t rows, int64_t vectors, const Product& product) {
  static constexpr void (*kTiles[])(const Product&, float*, int64_t, int64_t) = {
      multiplyTiles<1>, multiplyTiles<2>, multiplyTiles<3>, multiplyTiles<4>};
  constexpr int64_t kMost = 4;
  Product section = product;
  for (int64_t j = 0; j < vectors; j += kMost, section.b += kMost * kLanes, section.c += kMost * kLanes) {
    const int64_t count = std::min(vectors - j, kMost);
    if (!product.factors) {
      kTiles[count - 1](section, section.c, section.cStride * sizeof(float), kLanes);
      continue;
    }
    alignas(64) float sums[kMost * kAmxLines * kLanes];
    kTiles[count - 1](section, sums, kAmxLineBytes, kAmxLines * kLanes);
    for (int64_t m = 0; m < rows; ++m) {
      const Vec factor = broadcast(product.factors[m]);
      for (int64_t t = 0; t < count; ++t) {
        float* c = section.c + m * section.cStride + t * kLanes;
        storeVec(c, fma(loadVec(c), factor, loadVec(sums + (t * kAmxLines + m) * kLanes)));
      }
    }
  }
}

}  // namespace
}  // namespace step
