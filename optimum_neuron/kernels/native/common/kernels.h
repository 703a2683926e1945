// SPDX-License-Identifier: Apache-2.0
//
// The kernels that a plan calls, on raw memory. None of them checks an argument that its caller can check once per plan;
// what arrives with a request (positions, blocks, experts) is checked by the kernel that reads it.
#pragma once

#include <cstdint>

#include "common/pool.h"

namespace step {

// Element types, as numbered in a plan.
enum class Type : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kInt32 = 3, kInt64 = 4, kBool = 5, kInt8 = 6 };

// How weights are written down: as numbers, or as codes of 8 bits or of 4, two to a byte, of which each stands for
// code * scale + shift, of its group of adjacent columns.
enum class Coding : int32_t { kPlain = 0, kInt8 = 1, kInt4 = 2, kFp8 = 3, kFp4 = 4 };

// Of codes, what each group has: [outputs, groups], contiguous.
struct Scales {
  const void* scale = nullptr;
  const float* shift = nullptr;  // null: none; then codes of int4 stand for themselves less 8
  Type type = Type::kFloat32;    // of the scales: kFloat32, kBFloat16 or kFloat16
  // Scales of kFloat16 without a shift that are finite and have at most 5 significant bits, of codes kInt4: what a code stands for is a
  // number of bfloat16.
  bool isShort = false;
};

// y = x @ weight.T + bias; weight [outputs, columns] contiguous, bias [outputs] or null, all of one type but for codes.
struct Linear {
  const void* weight;
  const void* bias;
  void* output;          // first element of the first row
  int64_t outputs;
  int64_t outputStride;  // elements from a row of the output to the next
  Scales scales = {};
};

struct LinearsCall {
  Type type;       // kFloat32, kBFloat16 or kFloat16
  const void* x;   // [rows, columns], elements of a row adjacent
  int64_t rows, columns, stride;  // stride: elements from a row of x to the next
  Coding coding;   // of all weights
  int64_t group;   // columns that share a scale: a divisor of columns, even where two codes share a byte
  Coding activations;  // of codes kInt8 and kInt4: kInt8 where rows of x are rounded to codes before (rounded.cpp); else kPlain
  const Linear* linears;
  int64_t count;
};

void linears(Pool& pool, const LinearsCall& call);
// The same of codes, and of codes that meet rows of x as codes.
void codedLinears(Pool& pool, const LinearsCall& call);
void roundedLinears(Pool& pool, const LinearsCall& call);

// y[t, i] = x[t(, i)] @ weight[e].T + bias[e] with e = index[t, i]; an index >= experts gives zeros and costs nothing.
struct ExpertsCall {
  Type type;
  const void* x;         // [tokens, columns], or [tokens * k, columns] where perExpert; contiguous
  bool perExpert;
  const int32_t* index;  // [tokens, k]
  const void* weight;    // [experts, outputs, columns]
  const void* bias;      // [experts, outputs] or null
  void* y;               // [tokens, k, outputs]
  int64_t tokens, k, experts, outputs, columns;
  Coding coding;
  int64_t group;
  Coding activations;
  Scales scales;         // of codes: [experts, outputs, groups]
};

// False: an index is negative, and nothing was computed.
bool expertLinear(Pool& pool, const ExpertsCall& call);
// The same of codes; the indices were checked.
void codedExperts(Pool& pool, const ExpertsCall& call);
void roundedExperts(Pool& pool, const ExpertsCall& call);

struct AttendCall {
  Type type;
  const void *query, *keys, *values;  // query by its strides; keys and values [cacheBlocks, kvHeads, columns, dim or valueDim] contiguous
  Coding coding;                      // of keys and values: kPlain, of the query's type; kInt8 or kFp8, of which each head of a column has
  const float *keyScales, *valueScales;  // [cacheBlocks, kvHeads, columns]
  void* output;                       // [rows, tokens, heads, valueDim] contiguous
  const int32_t* blocks;              // [rows, perRow], those of each row in order; null: row i has block i alone
  const int32_t* positions;           // [rows, tokens]
  int64_t rows, heads, tokens, dim, valueDim, kvHeads, columns, cacheBlocks, perRow;
  int64_t window;                     // 0: none
  int64_t rowStride, headStride, tokenStride;  // of query, in elements; its last dimension is adjacent
  float scaling;
  float softcap;                      // 0: none; else scores become softcap * tanh(score / softcap)
  const float* sinks;                 // [heads] or null: a logit that takes part in the softmax's sum and has no value
  const float* columnBias;            // [heads, biasColumns] or null: added to scores, less what the query's own column has
  int64_t biasColumns;                // all that a row may have, and on to a whole block of the softmax
};

// False: a position is outside of its row, or a block of the cache, and nothing was computed.
bool attend(Pool& pool, const AttendCall& call);

}  // namespace step
