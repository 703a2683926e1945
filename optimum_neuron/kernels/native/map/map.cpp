// SPDX-License-Identifier: Apache-2.0
#include "map/map.h"

#include <algorithm>

#include "map/elementwise.h"
#include "map/map_operands.h"

namespace step {

namespace {

constexpr int64_t kTile = 2048;  // elements
// Elements times operators of about 10 us: less is not worth waking another thread.
constexpr int64_t kGrain = 1 << 16;
constexpr int64_t kPartial = 32;  // sums of a row that are taken side by side

template <class To, class From, class F>
void unary(const Tile& tile, const Item& item, F f) {
  const From* __restrict a = tile.from<From>(item.a);
  To* __restrict to = tile.to<To>(item.to);
  const int64_t n = tile.size(item);
  for (int64_t i = 0; i < n; ++i) {
    to[i] = f(a[i]);
  }
}

template <class To, class From, class F>
void binary(const Tile& tile, const Item& item, F f) {
  const int64_t n = tile.size(item);
  const From x = std::bit_cast<From>(item.first), y = std::bit_cast<From>(item.second);
  const From* __restrict a = item.operands == Operands::kConstantFirst ? nullptr : tile.from<From>(item.a);
  const From* __restrict b = item.operands == Operands::kConstantSecond ? nullptr : tile.from<From>(item.b);
  To* __restrict to = tile.to<To>(item.to);
  if (!b) {
    for (int64_t i = 0; i < n; ++i) {
      to[i] = f(a[i], y);
    }
  } else if (!a) {
    for (int64_t i = 0; i < n; ++i) {
      to[i] = f(x, b[i]);
    }
  } else {
    for (int64_t i = 0; i < n; ++i) {
      to[i] = f(a[i], b[i]);
    }
  }
}

void choose(const Tile& tile, const Item& item) {
  const int64_t n = tile.size(item);
  const bool constantA = item.operands == Operands::kConstantFirst || item.operands == Operands::kConstants;
  const bool constantB = item.operands == Operands::kConstantSecond || item.operands == Operands::kConstants;
  const int32_t* __restrict c = tile.from<int32_t>(item.c);
  const uint32_t* __restrict a = constantA ? nullptr : tile.from<uint32_t>(item.a);
  const uint32_t* __restrict b = constantB ? nullptr : tile.from<uint32_t>(item.b);
  uint32_t* __restrict to = tile.to<uint32_t>(item.to);
  const uint32_t x = item.first, y = item.second;
  if (a && b) {
    for (int64_t i = 0; i < n; ++i) {
      to[i] = c[i] ? a[i] : b[i];
    }
  } else if (a) {
    for (int64_t i = 0; i < n; ++i) {
      to[i] = c[i] ? a[i] : y;
    }
  } else if (b) {
    for (int64_t i = 0; i < n; ++i) {
      to[i] = c[i] ? x : b[i];
    }
  } else {
    for (int64_t i = 0; i < n; ++i) {
      to[i] = c[i] ? x : y;
    }
  }
}

// Folds each row in an order that depends on its length alone.
template <class T, class F>
void reduce(const Tile& tile, const Item& item, T identity, F f) {
  const T* a = tile.from<T>(item.a);
  T* to = tile.to<T>(item.to);
  for (int64_t row = 0; row < tile.rows; ++row) {
    const T* values = a + row * tile.columns;
    T partial[kPartial];
    std::fill_n(partial, kPartial, identity);
    int64_t i = 0;
    for (; i + kPartial <= tile.columns; i += kPartial) {
      for (int64_t j = 0; j < kPartial; ++j) {
        partial[j] = f(partial[j], values[i + j]);
      }
    }
    for (int64_t j = 0; i + j < tile.columns; ++j) {
      partial[j] = f(partial[j], values[i + j]);
    }
    for (int64_t half = kPartial / 2; half > 0; half /= 2) {
      for (int64_t j = 0; j < half; ++j) {
        partial[j] = f(partial[j], partial[j + half]);
      }
    }
    to[row] = partial[0];
  }
}

template <class F>
void floats(const Tile& tile, const Item& item, F f) {
  unary<float, float>(tile, item, f);
}

// Of what is pending, as it lies.
template <class F>
void arithmetic(const Tile& tile, const Item& item, F f) {
  if (item.operands == Operands::kRegisters && !item.rows && (tile.stored || tile.pending[item.a] || tile.pending[item.b])) {
    vectorPairs(tile, item, f);
  } else {
    binary<float, float>(tile, item, f);
  }
}

// int32 arithmetic wraps, as torch's does.
int32_t wrapped(uint32_t x) { return static_cast<int32_t>(x); }

void compute(const Tile& tile, const Item& item) {
  using I = int32_t;
  using U = uint32_t;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  switch (item.op) {
    case Op::kLoad: return load(tile, item);
    case Op::kStore: return store(tile, item);
    case Op::kAdd: return arithmetic(tile, item, [](auto a, auto b) { return a + b; });
    case Op::kSub: return arithmetic(tile, item, [](auto a, auto b) { return a - b; });
    case Op::kMul: return arithmetic(tile, item, [](auto a, auto b) { return a * b; });
    case Op::kDiv: return binary<float, float>(tile, item, [](float a, float b) { return a / b; });
    case Op::kMax: return binary<float, float>(tile, item, [](float a, float b) { return larger(a, b); });
    case Op::kMin: return binary<float, float>(tile, item, [](float a, float b) { return smaller(a, b); });
    case Op::kPow: return binary<float, float>(tile, item, [](float a, float b) { return std::pow(a, b); });
    case Op::kIAdd: return binary<I, U>(tile, item, [](U a, U b) { return wrapped(a + b); });
    case Op::kISub: return binary<I, U>(tile, item, [](U a, U b) { return wrapped(a - b); });
    case Op::kIMul: return binary<I, U>(tile, item, [](U a, U b) { return wrapped(a * b); });
    case Op::kIMax: return binary<I, I>(tile, item, [](I a, I b) { return std::max(a, b); });
    case Op::kIMin: return binary<I, I>(tile, item, [](I a, I b) { return std::min(a, b); });
    case Op::kIAnd: return binary<I, I>(tile, item, [](I a, I b) { return a & b; });
    case Op::kIOr: return binary<I, I>(tile, item, [](I a, I b) { return a | b; });
    case Op::kIXor: return binary<I, I>(tile, item, [](I a, I b) { return a ^ b; });
    case Op::kIFloorDiv: return binary<I, I>(tile, item, [](I a, I b) { return a / b - (a % b < 0); });  // b > 0
    case Op::kLt: return binary<I, float>(tile, item, [](float a, float b) { return I{a < b}; });
    case Op::kLe: return binary<I, float>(tile, item, [](float a, float b) { return I{a <= b}; });
    case Op::kGt: return binary<I, float>(tile, item, [](float a, float b) { return I{a > b}; });
    case Op::kGe: return binary<I, float>(tile, item, [](float a, float b) { return I{a >= b}; });
    case Op::kEq: return binary<I, float>(tile, item, [](float a, float b) { return I{a == b}; });
    case Op::kNe: return binary<I, float>(tile, item, [](float a, float b) { return I{a != b}; });
    case Op::kILt: return binary<I, I>(tile, item, [](I a, I b) { return I{a < b}; });
    case Op::kILe: return binary<I, I>(tile, item, [](I a, I b) { return I{a <= b}; });
    case Op::kIGt: return binary<I, I>(tile, item, [](I a, I b) { return I{a > b}; });
    case Op::kIGe: return binary<I, I>(tile, item, [](I a, I b) { return I{a >= b}; });
    case Op::kIEq: return binary<I, I>(tile, item, [](I a, I b) { return I{a == b}; });
    case Op::kINe: return binary<I, I>(tile, item, [](I a, I b) { return I{a != b}; });
    case Op::kWhere: return choose(tile, item);
    case Op::kNeg: return floats(tile, item, [](float a) { return -a; });
    case Op::kAbs: return floats(tile, item, [](float a) { return std::fabs(a); });
    case Op::kExp: return vectors(tile, item, [](Vec a) { return exponential(a); });
    case Op::kLog: return floats(tile, item, [](float a) { return std::log(a); });
    case Op::kSqrt: return floats(tile, item, [](float a) { return std::sqrt(a); });
    case Op::kRsqrt: return floats(tile, item, [](float a) { return 1.0f / std::sqrt(a); });
    case Op::kReciprocal: return floats(tile, item, [](float a) { return 1.0f / a; });
    case Op::kSigmoid: return vectors(tile, item, [](Vec a) { return sigmoid(a); });
    case Op::kSilu: return vectors(tile, item, [](Vec a) { return silu(a); });
    case Op::kTanh: return vectors(tile, item, [](Vec a) { return hyperbolicTangent(a); });
    case Op::kErf: return vectors(tile, item, [](Vec a) { return errorFunction(a); });
    case Op::kGelu: return vectors(tile, item, [](Vec a) { return gelu(a); });
    case Op::kGeluTanh: return vectors(tile, item, [](Vec a) { return geluTanh(a); });
    case Op::kRelu: return floats(tile, item, [](float a) { return a < 0 ? 0.0f : a; });
    case Op::kSin: return floats(tile, item, [](float a) { return std::sin(a); });
    case Op::kCos: return floats(tile, item, [](float a) { return std::cos(a); });
    case Op::kFloor: return floats(tile, item, [](float a) { return std::floor(a); });
    case Op::kCeil: return floats(tile, item, [](float a) { return std::ceil(a); });
    case Op::kRound: return floats(tile, item, [](float a) { return std::nearbyint(a); });
    case Op::kTrunc: return floats(tile, item, [](float a) { return std::trunc(a); });
    case Op::kIsNan: return unary<I, float>(tile, item, [](float a) { return I{a != a}; });
    case Op::kExpm1: return floats(tile, item, [](float a) { return std::expm1(a); });
    case Op::kLog1p: return floats(tile, item, [](float a) { return std::log1p(a); });
    case Op::kSoftplus: return vectors(tile, item, [](Vec a) { return softplus(a); });
    case Op::kRoundBFloat16: return floats(tile, item, [](float a) { return roundBFloat16(a); });
    case Op::kRoundFloat16: return floats(tile, item, [](float a) { return roundFloat16(a); });
    case Op::kINeg: return unary<I, U>(tile, item, [](U a) { return wrapped(0 - a); });
    case Op::kIAbs: return unary<I, U>(tile, item, [](U a) { return wrapped(static_cast<I>(a) < 0 ? 0 - a : a); });
    case Op::kINot: return unary<I, I>(tile, item, [](I a) { return I{a == 0}; });
    case Op::kToFloat: return unary<float, I>(tile, item, [](I a) { return static_cast<float>(a); });
    case Op::kToInt: return unary<I, float>(tile, item, [](float a) { return static_cast<I>(a); });
    case Op::kToBool: return unary<I, float>(tile, item, [](float a) { return I{a != 0}; });
    case Op::kIToBool: return unary<I, I>(tile, item, [](I a) { return I{a != 0}; });
    case Op::kSum: return reduce<float>(tile, item, 0.0f, [](float a, float b) { return a + b; });
    case Op::kRowMax: return reduce<float>(tile, item, -kInfinity, [](float a, float b) { return larger(a, b); });
    case Op::kRowMin: return reduce<float>(tile, item, kInfinity, [](float a, float b) { return smaller(a, b); });
    case Op::kISum: return reduce<U>(tile, item, 0, [](U a, U b) { return a + b; });
    case Op::kIRowMax:
      return reduce<I>(tile, item, std::numeric_limits<I>::min(), [](I a, I b) { return std::max(a, b); });
    case Op::kIRowMin:
      return reduce<I>(tile, item, std::numeric_limits<I>::max(), [](I a, I b) { return std::min(a, b); });
    case Op::kSpread: return spread(tile, item);
    case Op::kRotateHalf: return rotateHalf(tile, item);
    case Op::kCount: return;
  }
}

// Whether one writes to the place that it is given, a register or not.
bool takesResult(const Item& item) {
  const bool arithmetic = item.op == Op::kAdd || item.op == Op::kSub || item.op == Op::kMul;
  return arithmetic && item.operands == Operands::kRegisters && !item.rows;
}

bool reads(const Item& item, int32_t index) { return item.a == index || item.b == index || item.c == index; }

}  // namespace

void markStored(std::vector<Item>& items) {
  for (size_t i = 0; i + 1 < items.size(); ++i) {
    const Item& next = items[i + 1];
    const bool stores = next.op == Op::kStore && next.a == items[i].to && next.access.type == Type::kBFloat16;
    if (!takesResult(items[i]) || !stores || !isAdjacent(next.access)) {
      continue;
    }
    size_t later = i + 2;
    while (later < items.size() && !reads(items[later], next.a) && items[later].to != next.a) {
      ++later;
    }
    items[i].stored = later == items.size() || !reads(items[later], next.a);
  }
}

void runMap(Pool& pool, const Map& map, void* const* buffers, int64_t total) {
  const int64_t tileRows = map.needsRows ? std::max<int64_t>(1, kTile / map.columns) : 1;
  const int64_t tile = map.needsRows ? tileRows * map.columns : kTile;
  const int64_t tiles = (total + tile - 1) / tile;
  const int64_t each = std::max<int64_t>(1, kGrain / (tile * static_cast<int64_t>(map.items.size())));
  const int64_t stride = (std::min(tile, total) * sizeof(float) + 63) / 64 * 64;
  pool.run((tiles + each - 1) / each, [&](int64_t task, int worker) {
    const int64_t bytes = map.registers * (stride + 2 * static_cast<int64_t>(sizeof(void*)));
    char* memory = static_cast<char*>(pool.scratch(worker, bytes));
    const auto places = reinterpret_cast<const void**>(memory + map.registers * stride);
    const auto pending = reinterpret_cast<const Item**>(places + map.registers);
    for (int64_t t = task * each; t < std::min(tiles, (task + 1) * each); ++t) {
      const int64_t first = t * tile, count = std::min(tile, total - first);
      Tile now{buffers, memory, stride, first, count, t * tileRows, count / map.columns, map.columns, places, pending, nullptr};
      for (size_t i = 0; i < map.items.size(); ++i) {
        const Item& item = map.items[i];
        now.stored = item.stored ? now.adjacent<uint16_t>(map.items[i + 1]) : nullptr;
        compute(now, item);
        i += item.stored;
      }
    }
  });
}

}  // namespace step
