// SPDX-License-Identifier: Apache-2.0
//
// A tile of a Map: its registers, and how they are loaded and stored.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "elementwise.h"
#include "map.h"

namespace step {

namespace {

// A tile's registers. One that was loaded from adjacent 32-bit elements is where these are.
struct Tile {
  void* const* buffers;
  char* memory;
  int64_t stride;  // bytes of a register
  int64_t first, count;          // elements of the domain
  int64_t firstRow, rows, columns;
  const void** places;

  int64_t begin(const Item& item) const { return item.rows ? firstRow : first; }
  int64_t size(const Item& item) const { return item.rows ? rows : count; }
  template <class T>
  const T* from(int32_t index) const {
    return static_cast<const T*>(places[index]);
  }
  template <class T>
  T* to(int32_t index) const {
    void* own = memory + index * stride;
    places[index] = own;
    return static_cast<T*>(own);
  }
};

// Calls body(position in the tile, offset of the first element, stride, count) for each run of elements that lie evenly.
template <class Body>
void forRuns(const Access& access, int64_t begin, int64_t count, Body body) {
  const int last = access.dims - 1;
  int64_t index[kMaxDims];
  int64_t rest = begin;
  int64_t offset = access.offset;
  for (int d = last; d >= 0; --d) {
    index[d] = rest % access.sizes[d];
    rest /= access.sizes[d];
    offset += index[d] * access.strides[d];
  }
  for (int64_t done = 0; done < count;) {
    const int64_t run = std::min(access.sizes[last] - index[last], count - done);
    body(done, offset, access.strides[last], run);
    done += run;
    offset += run * access.strides[last];
    index[last] += run;
    for (int d = last; d > 0 && index[d] == access.sizes[d]; --d) {
      offset += access.strides[d - 1] - index[d] * access.strides[d];
      index[d] = 0;
      ++index[d - 1];
    }
  }
}

template <class To, class From, class Convert>
void loadAs(const Tile& tile, const Item& item, Convert convert) {
  const auto* source = static_cast<const From*>(tile.buffers[item.access.buffer]);
  To* to = tile.to<To>(item.to);
  forRuns(item.access, tile.begin(item), tile.size(item), [&](int64_t at, int64_t offset, int64_t stride, int64_t n) {
    To* __restrict target = to + at;
    const From* __restrict p = source + offset;
    if (stride == 1) {
      for (int64_t i = 0; i < n; ++i) {
        target[i] = convert(p[i]);
      }
    } else if (stride == 0) {
      std::fill_n(target, n, convert(*p));
    } else {
      for (int64_t i = 0; i < n; ++i) {
        target[i] = convert(p[i * stride]);
      }
    }
  });
}

[[gnu::always_inline]] inline float fromBFloat16(uint16_t x) { return bits(static_cast<uint32_t>(x) << 16); }

void load(const Tile& tile, const Item& item) {
  const Access& access = item.access;
  switch (access.type) {
    case Type::kFloat32:
    case Type::kInt32:
      if (access.dims == 1 && access.strides[0] == 1) {
        tile.places[item.to] =
            static_cast<const uint32_t*>(tile.buffers[access.buffer]) + access.offset + tile.begin(item);
        return;
      }
      return loadAs<uint32_t, uint32_t>(tile, item, [](uint32_t x) { return x; });
    case Type::kBFloat16:
      return loadAs<float, uint16_t>(tile, item, [](uint16_t x) { return fromBFloat16(x); });
    case Type::kFloat16:
      return loadAs<float, uint16_t>(tile, item, [](uint16_t x) { return fromFloat16(x); });
    case Type::kInt64:
      return loadAs<int32_t, int64_t>(tile, item, [](int64_t x) { return static_cast<int32_t>(x); });
    case Type::kBool:
      return loadAs<int32_t, uint8_t>(tile, item, [](uint8_t x) { return static_cast<int32_t>(x != 0); });
    case Type::kInt8:
      return loadAs<int32_t, int8_t>(tile, item, [](int8_t x) { return static_cast<int32_t>(x); });
  }
}

template <class To, class From, class Convert>
void storeAs(const Tile& tile, const Item& item, Convert convert) {
  auto* target = static_cast<To*>(tile.buffers[item.access.buffer]);
  const From* from = tile.from<From>(item.a);
  forRuns(item.access, tile.begin(item), tile.size(item), [&](int64_t at, int64_t offset, int64_t stride, int64_t n) {
    To* __restrict p = target + offset;
    const From* __restrict source = from + at;
    if (stride == 1) {
      for (int64_t i = 0; i < n; ++i) {
        p[i] = convert(source[i]);
      }
    } else {
      for (int64_t i = 0; i < n; ++i) {
        p[i * stride] = convert(source[i]);
      }
    }
  });
}

void store(const Tile& tile, const Item& item) {
  switch (item.access.type) {
    case Type::kFloat32:
    case Type::kInt32:
      return storeAs<uint32_t, uint32_t>(tile, item, [](uint32_t x) { return x; });
    case Type::kBFloat16:
      return storeAs<uint16_t, float>(
          tile, item, [](float x) { return static_cast<uint16_t>(bits(roundBFloat16(x)) >> 16); });
    case Type::kFloat16:
      return storeAs<uint16_t, float>(tile, item, [](float x) { return toFloat16(x); });
    case Type::kInt64:
      return storeAs<int64_t, int32_t>(tile, item, [](int32_t x) { return static_cast<int64_t>(x); });
    case Type::kBool:
      return storeAs<uint8_t, int32_t>(tile, item, [](int32_t x) { return static_cast<uint8_t>(x); });
    case Type::kInt8:
      return;  // no plan has it: codes are loaded alone
  }
}

}  // namespace

}  // namespace step
