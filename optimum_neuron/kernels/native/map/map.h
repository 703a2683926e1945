// SPDX-License-Identifier: Apache-2.0
//
// Elementwise operators and reductions over rows, many to a call: a short program over registers, each of which holds a tile
// of some thousand elements, so that what passes between operators stays in the first-level cache.
//
// Every operator computes in float32 (or int32) what torch's does; numbers of fewer bits are rounded where they are stored. So which
// operators share a program changes no bit of a result where what passes between programs is stored in float32; nor does the tile,
// the number of threads or the instruction set, but that exp and what is made of it differ where a CPU does not fuse products and
// sums (x86-64 without AVX2).
#pragma once

#include <cstdint>
#include <vector>

#include "common/kernels.h"

namespace step {

constexpr int kMaxDims = 8;

// Elements of a buffer in the order of the program's domain; a stride of 0 repeats.
struct Access {
  int32_t buffer;
  Type type;
  int64_t offset;
  int32_t dims;
  int64_t sizes[kMaxDims], strides[kMaxDims];
};

// Operators on 32-bit registers: float32, or int32, which also stands for bool. An `i` in front: on integers.
// Kept in step with `_OPS` in steps/steps.py.
enum class Op : int32_t {
  kLoad, kStore,
  kAdd, kSub, kMul, kDiv, kMax, kMin, kPow,
  kIAdd, kISub, kIMul, kIMax, kIMin, kIAnd, kIOr, kIXor, kIFloorDiv,
  kLt, kLe, kGt, kGe, kEq, kNe,
  kILt, kILe, kIGt, kIGe, kIEq, kINe,
  kWhere,
  kNeg, kAbs, kExp, kLog, kSqrt, kRsqrt, kReciprocal, kSigmoid, kSilu, kTanh, kErf, kGelu, kGeluTanh, kRelu, kSin, kCos,
  kFloor, kCeil, kRound, kTrunc, kIsNan, kExpm1, kLog1p, kSoftplus, kRoundBFloat16, kRoundFloat16,
  kINeg, kIAbs, kINot, kToFloat, kToInt, kToBool, kIToBool,
  kSum, kRowMax, kRowMin, kISum, kIRowMax, kIRowMin, kSpread, kRotateHalf,
  kCount
};

// Which operands are registers: the other is the constant.
enum class Operands : int32_t { kRegisters = 0, kConstantSecond = 1, kConstantFirst = 2, kConstants = 3 };

struct Item {
  Op op;
  Operands operands;
  bool rows;                 // one element per row, of what a reduction left
  int32_t to, a, b, c;       // registers
  uint32_t first, second;    // bits of the constants
  Access access;             // of kLoad and kStore
  bool stored;               // all that becomes of it is what the next item stores: see markStored
};

struct Map {
  int64_t rows, columns;     // the domain; where no operator takes whole rows, a single one
  bool needsRows;
  int32_t registers;
  std::vector<Item> items;
};

// Finds operators with results that need no register: they are stored as adjacent numbers of bfloat16, and not read again.
void markStored(std::vector<Item>& items);

// Computes the first `total` elements of the domain: of whole rows.
void runMap(Pool& pool, const Map& map, void* const* buffers, int64_t total);

}  // namespace step
