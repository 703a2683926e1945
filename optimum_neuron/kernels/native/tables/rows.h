// SPDX-License-Identifier: Apache-2.0
//
// Rows of tables by number: embeddings, chosen tokens, and writing to the key-value cache.
#pragma once

#include <cstdint>

#include "common/kernels.h"

namespace step {

// to[o, i, :] = from[o, index[i], :], all contiguous.
struct SelectCall {
  const char* from;
  char* to;
  const void* index;
  Type indexType;  // kInt32 or kInt64
  int64_t outer, size, count, bytes;  // bytes of a row
  bool wraps;      // negative indices count from the end
};

// False: an index is outside of the table, and nothing was copied.
bool selectRows(Pool& pool, const SelectCall& call);

// cache[blocks[t], :, columns[t], :] = states[t]
struct WriteCall {
  char* cache;         // [blocks, heads, columns, dim], contiguous
  const char* states;  // [tokens, heads, dim] by strides; elements of a head are adjacent
  const int32_t *numbers, *columns;  // of blocks, and within them
  int64_t blocks, heads, length, bytes;  // bytes of a head's elements; length: columns of a block
  int64_t tokens, tokenStride, headStride;  // in bytes
};

// False: a block or column is outside of the cache, and nothing was written.
bool writeCache(Pool& pool, const WriteCall& call);

// Where each token's first head lies in a cache, in columns; null where a block or column is outside of it. Each index is read once: what
// is written then can change no place.
template <class Call>
const int64_t* placesOf(Pool& pool, const Call& call) {
  auto* places = static_cast<int64_t*>(pool.shared(call.tokens * sizeof(int64_t)));
  for (int64_t t = 0; t < call.tokens; ++t) {
    const int64_t block = call.numbers[t], column = call.columns[t];
    if (block < 0 || block >= call.blocks || column < 0 || column >= call.length) {
      return nullptr;
    }
    places[t] = block * call.heads * call.length + column;
  }
  return places;
}

// The same of a cache of codes with scales [blocks, heads, columns].
struct WriteCodesCall {
  Type type;      // of states: kFloat32, kBFloat16 or kFloat16
  Coding coding;  // kInt8 or kFp8
  uint8_t* codes;
  float* scales;
  const void* states;
  const int32_t *numbers, *columns;
  int64_t blocks, heads, length, dim;
  int64_t tokens, tokenStride, headStride;  // in elements
};

bool writeCodes(Pool& pool, const WriteCodesCall& call);

}  // namespace step
