// SPDX-License-Identifier: Apache-2.0
//
// A tile of a Map: its registers, and how they are loaded and stored.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "vectors/elements.h"
#include "map/elementwise.h"
#include "map/map.h"

namespace step {

namespace {

// A tile's registers. One that was loaded from adjacent 32-bit elements is where these are. Others that were loaded row by row, and
// those of one number per row, are pending: they are filled where an operator asks for them (see map_operands.h).
struct Tile {
  void* const* buffers;
  char* memory;
  int64_t stride;  // bytes of a register
  int64_t first, count;          // elements of the domain
  int64_t firstRow, rows, columns;
  const void** places;
  const Item** pending;  // what a register would be computed by; null where it was
  uint16_t* stored;      // where a result goes as numbers of bfloat16; null where it becomes a register

  // Where the tile's elements begin in a tensor of adjacent elements.
  template <class T>
  T* adjacent(const Item& item) const {
    return static_cast<T*>(buffers[item.access.buffer]) + item.access.offset + begin(item);
  }
  int64_t begin(const Item& item) const { return item.rows ? firstRow : first; }
  int64_t size(const Item& item) const { return item.rows ? rows : count; }
  void complete(int32_t index) const;
  template <class T>
  const T* from(int32_t index) const {
    if (pending[index]) {
      complete(index);
    }
    return static_cast<const T*>(places[index]);
  }
  template <class T>
  T* to(int32_t index) const {
    void* own = memory + index * stride;
    places[index] = own;
    pending[index] = nullptr;
    return static_cast<T*>(own);
  }
};

bool isAdjacent(const Access& access) { return access.dims == 1 && access.strides[0] == 1; }

// Shorter rows are not worth a loop each.
constexpr int64_t kLeastColumns = 2 * kLanes;

// Where rows of a tensor lie: of each `inner`, one `innerStride` after another.
struct RowStrides {
  int64_t inner, innerStride, outerStride;  // inner is 0 where they lie otherwise
};

RowStrides rowStrides(const Access& access, int64_t columns) {
  const int last = access.dims - 1;
  const int64_t own = access.sizes[last];
  if (columns < kLeastColumns || access.strides[last] != 1) {
    return {0, 0, 0};
  }
  if (access.dims == 2 && own % columns == 0) {
    return {own / columns, columns, access.strides[0]};
  }
  if (access.dims == 3 && own == columns) {
    return {access.sizes[1], access.strides[1], access.strides[0]};
  }
  return {0, 0, 0};
}

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

void loadNow(const Tile& tile, const Item& item) {
  const Access& access = item.access;
  switch (access.type) {
    case Type::kFloat32:
    case Type::kInt32:
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

void load(const Tile& tile, const Item& item) {
  const Access& access = item.access;
  const bool adjacent = isAdjacent(access);
  const bool wide = access.type == Type::kFloat32 || access.type == Type::kInt32;
  if (wide && adjacent) {
    tile.pending[item.to] = nullptr;
    tile.places[item.to] = tile.adjacent<const uint32_t>(item);
  } else if ((wide || access.type == Type::kBFloat16) && !item.rows &&
             (adjacent || rowStrides(access, tile.columns).inner > 0)) {
    tile.pending[item.to] = &item;
  } else {
    loadNow(tile, item);
  }
}

// A number per row, side by side, until a register is asked for.
void spread(const Tile& tile, const Item& item) {
  const uint32_t* a = tile.from<uint32_t>(item.a);
  std::copy_n(a, tile.rows, tile.to<uint32_t>(item.to));
  tile.pending[item.to] = &item;
  if (tile.columns < kLeastColumns) {
    tile.complete(item.to);
  }
}

void Tile::complete(int32_t index) const {
  const Item& item = *pending[index];
  if (item.op == Op::kLoad) {
    return loadNow(*this, item);
  }
  uint32_t* numbers = to<uint32_t>(index);
  for (int64_t row = rows - 1; row >= 0; --row) {
    std::fill_n(numbers + row * columns, columns, numbers[row]);
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

// As torch rounds.
INLINE Lanes<kLanes>::Halves halvesOf(Vec values) {
#if defined(STEP_AVX512_BF16)
  constexpr int kSubnormal = 1 << 5;
  if (__builtin_expect(_mm512_fpclass_ps_mask(values, kSubnormal) == 0, true)) {
    return toBFloat16<kLanes>(values);
  }
#endif
  return roundToBFloat16<kLanes>(values);
}

void storeHalves(const Tile& tile, const Item& item) {
  auto* target = static_cast<uint16_t*>(tile.buffers[item.access.buffer]);
  const float* from = tile.from<float>(item.a);
  forRuns(item.access, tile.begin(item), tile.size(item), [&](int64_t at, int64_t offset, int64_t stride, int64_t n) {
    uint16_t* p = target + offset;
    const float* source = from + at;
    int64_t i = 0;
    for (; stride == 1 && i + kLanes <= n; i += kLanes) {
      *reinterpret_cast<Lanes<kLanes>::LooseHalves*>(p + i) = halvesOf(loadVec(source + i));
    }
    for (; i < n; i += kLanes) {
      const int64_t count = std::min<int64_t>(kLanes, n - i);
      const auto halves = halvesOf(loadSome<Float32>(source + i, count));
      for (int64_t j = 0; j < count; ++j) {
        p[(i + j) * stride] = halves[j];
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
      return storeHalves(tile, item);
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
