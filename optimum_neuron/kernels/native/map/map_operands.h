// SPDX-License-Identifier: Apache-2.0
//
// What an operator reads of a tile, row by row, as it lies in memory: what was loaded or is one number per row need not become
// a register first.
#pragma once

#include <cstring>

#include "vectors/elements.h"
#include "map/map_tile.h"

namespace step {

namespace {

// Rows that lie `step` elements apart, but for every `inner`th.
template <class Kind>
struct LoadedRows {
  const typename Kind::Element* at;
  int64_t step, inner, jump, index;

  void next() {
    at += step;
    if (++index == inner) {
      index = 0;
      at += jump;
    }
  }
  Vec load(int64_t i) const { return Kind::load(at + i); }
  Vec load(int64_t i, int64_t count) const { return loadSome<Kind>(at + i, count); }
};

// A number per row.
struct SpreadRows {
  const float* at;

  void next() { ++at; }
  Vec load(int64_t) const { return broadcast(*at); }
  Vec load(int64_t, int64_t) const { return broadcast(*at); }
};

template <class Kind>
LoadedRows<Kind> loadedRows(const Tile& tile, const Access& access) {
  const auto* source = static_cast<const typename Kind::Element*>(tile.buffers[access.buffer]) + access.offset;
  if (access.dims == 1) {
    return {source + tile.first, tile.columns, 0, 0, 0};
  }
  const RowStrides rows = rowStrides(access, tile.columns);
  const int64_t outer = tile.firstRow / rows.inner, index = tile.firstRow % rows.inner;
  const auto* at = source + outer * rows.outerStride + index * rows.innerStride;
  return {at, rows.innerStride, rows.inner, rows.outerStride - rows.inner * rows.innerStride, index};
}

// Calls body(rows) with what a register stands for, one of floats.
template <class Body>
void withRows(const Tile& tile, int32_t index, Body body) {
  const Item* pending = tile.pending[index];
  if (!pending) {
    body(LoadedRows<Float32>{tile.from<float>(index), tile.columns, 0, 0, 0});
  } else if (pending->op == Op::kSpread) {
    body(SpreadRows{static_cast<const float*>(tile.places[index])});
  } else if (pending->access.type == Type::kBFloat16) {
    body(loadedRows<BFloat16>(tile, pending->access));
  } else {
    body(loadedRows<Float32>(tile, pending->access));
  }
}

// Whether rows of a register lie one after another.
bool isFlat(const Tile& tile, int32_t index) {
  const Item* pending = tile.pending[index];
  return !pending || (pending->op == Op::kLoad && pending->access.dims == 1);
}

INLINE void put(float* to, Vec values) { storeVec(to, values); }
INLINE void put(uint16_t* to, Vec values) { *reinterpret_cast<Lanes<kLanes>::LooseHalves*>(to) = halvesOf(values); }

// to[i] = f(i, or also how many elements, fewer than a vector has)
template <class To, class F>
INLINE void fill(To* to, int64_t n, F f) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    put(to + i, f(i));
  }
  if (i < n) {
    To last[kLanes];
    put(last, f(i, n - i));
    std::memcpy(to + i, last, (n - i) * sizeof(To));
  }
}

// Calls body(to) with where a result goes.
template <class Body>
void withResult(const Tile& tile, const Item& item, Body body) {
  if (tile.stored) {
    body(tile.stored);
  } else {
    body(tile.to<float>(item.to));
  }
}

template <class F>
void vectors(const Tile& tile, const Item& item, F f) {
  if (!isFlat(tile, item.a)) {
    tile.complete(item.a);
  }
  withResult(tile, item, [&](auto* to) {
    withRows(tile, item.a, [&](auto a) { fill(to, tile.size(item), [&](auto... i) { return f(a.load(i...)); }); });
  });
}

template <class F>
void vectorPairs(const Tile& tile, const Item& item, F f) {
  const bool flat = isFlat(tile, item.a) && isFlat(tile, item.b);
  const int64_t rows = flat ? 1 : tile.rows, columns = flat ? tile.count : tile.columns;
  withResult(tile, item, [&](auto* to) {
    withRows(tile, item.a, [&](auto a) {
      withRows(tile, item.b, [&](auto b) {
        for (int64_t row = 0; row < rows; ++row, a.next(), b.next()) {
          fill(to + row * columns, columns, [&](auto... i) { return f(a.load(i...), b.load(i...)); });
        }
      });
    });
  });
}

// Each row's second half negated, and then its first.
void rotateHalf(const Tile& tile, const Item& item) {
  const int64_t half = tile.columns / 2;
  float* to = tile.to<float>(item.to);
  withRows(tile, item.a, [&](auto a) {
    for (int64_t row = 0; row < tile.rows; ++row, a.next(), to += 2 * half) {
      fill(to, half, [&](int64_t i, auto... count) { return -a.load(half + i, count...); });
      fill(to + half, half, [&](auto... i) { return a.load(i...); });
    }
  });
}

}  // namespace

}  // namespace step
