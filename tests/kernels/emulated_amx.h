// SPDX-License-Identifier: Apache-2.0
//
// The functions of native/vectors/amx.h without AMX, as the Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, has
// LDTILECFG, TILELOADD, TILESTORED, TDPBF16PS and TDPBSSD. What the hardware would raise an exception for ends the process. A compiler
// reads this file first (-include).
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace step {
namespace {

struct AmxShapes;

struct EmulatedTile {
  int64_t lines = 0, lineBytes = 0;
  alignas(64) uint8_t bytes[16][64] = {};
};

// Each thread's; not initialized without a configuration.
struct EmulatedAmx {
  bool configured = false;
  EmulatedTile tiles[8];
};
inline thread_local EmulatedAmx emulatedAmx;

inline void amxRequire(bool holds, const char* what) {
  if (!holds) {
    std::fprintf(stderr, "AMX: %s\n", what);
    std::abort();
  }
}

// A configuration that is still in use is one that a thread did not release.
inline void amxConfigure(const AmxShapes& shapes) {
  uint8_t bytes[64];
  std::memcpy(bytes, &shapes, sizeof(bytes));
  amxRequire(!emulatedAmx.configured, "the tiles in use were not released");
  amxRequire(bytes[0] == 1 && bytes[1] == 0, "an unknown palette, or a start row");
  for (int i = 2; i < 16; ++i) {
    amxRequire(bytes[i] == 0, "reserved bytes are not zero");
  }
  emulatedAmx.configured = true;
  for (int i = 0; i < 16; ++i) {
    uint16_t lineBytes;
    std::memcpy(&lineBytes, bytes + 16 + 2 * i, sizeof(lineBytes));
    const uint8_t lines = bytes[48 + i];
    amxRequire(i < 8 || (lineBytes == 0 && lines == 0), "there are 8 tiles");
    amxRequire(lineBytes <= 64 && lines <= 16 && (lineBytes == 0) == (lines == 0), "a shape that no tile has");
    if (i < 8) {
      emulatedAmx.tiles[i] = {lines, lineBytes, {}};
    }
  }
}

inline void amxRelease() { emulatedAmx = {}; }

inline EmulatedTile& amxTile(int number) {
  amxRequire(emulatedAmx.configured && number < 8 && emulatedAmx.tiles[number].lines > 0, "a tile without a shape");
  return emulatedAmx.tiles[number];
}

template <int Tile>
inline void amxZero() {
  EmulatedTile& tile = amxTile(Tile);
  std::memset(tile.bytes, 0, sizeof(tile.bytes));
}

template <int Tile>
inline void amxLoad(const void* from, int64_t stride) {
  amxZero<Tile>();
  EmulatedTile& tile = amxTile(Tile);
  for (int64_t line = 0; line < tile.lines; ++line) {
    std::memcpy(tile.bytes[line], static_cast<const uint8_t*>(from) + line * stride, tile.lineBytes);
  }
}

template <int Tile>
inline void amxStore(void* to, int64_t stride) {
  const EmulatedTile& tile = amxTile(Tile);
  for (int64_t line = 0; line < tile.lines; ++line) {
    std::memcpy(static_cast<uint8_t*>(to) + line * stride, tile.bytes[line], tile.lineBytes);
  }
}

// The control word of this thread's floating point; nothing is computed across it, as all operands are in memory.
inline void amxControl(uint32_t control) { asm volatile("ldmxcsr %0" ::"m"(control) : "memory"); }

typedef float AmxFloats __attribute__((vector_size(64)));
typedef uint32_t AmxPairs __attribute__((vector_size(64)));

// A line of sums at a time: the 16 sums of the even and of the odd members of pairs fill a vector each.
inline void amxMultiplyLine(EmulatedTile& sums, const EmulatedTile& a, const EmulatedTile& b, int64_t m) {
  AmxFloats even{}, odd{}, line;
  for (int64_t k = 0; k < a.lineBytes / 4; ++k) {
    uint32_t pair;
    AmxPairs right;
    std::memcpy(&pair, a.bytes[m] + 4 * k, sizeof(pair));
    std::memcpy(&right, b.bytes[k], sizeof(right));
    const AmxPairs left = pair | AmxPairs{};
    even = _mm512_fmadd_ps((AmxFloats)(left << 16), (AmxFloats)(right << 16), even);
    odd = _mm512_fmadd_ps((AmxFloats)(left & 0xffff0000u), (AmxFloats)(right & 0xffff0000u), odd);
  }
  std::memcpy(&line, sums.bytes[m], sizeof(line));
  line += even + odd;
  std::memcpy(sums.bytes[m], &line, sizeof(line));
}

inline void amxRequireAgree(const EmulatedTile& sums, const EmulatedTile& a, const EmulatedTile& b) {
  amxRequire(
      sums.lines == a.lines && a.lineBytes == 4 * b.lines && sums.lineBytes == b.lineBytes && a.lineBytes % 4 == 0 &&
          b.lineBytes % 4 == 0,
      "shapes that do not agree");
}

template <int Sums, int A, int B>
inline void amxMultiplyAdd() {
  static_assert(Sums != A && Sums != B && A != B);
  EmulatedTile &sums = amxTile(Sums), &a = amxTile(A), &b = amxTile(B);
  amxRequireAgree(sums, a, b);
  const uint32_t before = _mm_getcsr();
  amxControl(0x9fc0);  // to the nearest, subnormal operands and results are zero, no exceptions
  for (int64_t m = 0; m < sums.lines; ++m) {
    amxMultiplyLine(sums, a, b, m);
  }
  amxControl(before);
}

template <int Sums, int A, int B>
inline void amxMultiplyAddBytes() {
  static_assert(Sums != A && Sums != B && A != B);
  EmulatedTile &sums = amxTile(Sums), &a = amxTile(A), &b = amxTile(B);
  amxRequireAgree(sums, a, b);
  for (int64_t m = 0; m < sums.lines; ++m) {
    int32_t line[16];
    std::memcpy(line, sums.bytes[m], sizeof(line));
    for (int64_t k = 0; k < a.lineBytes; ++k) {
      const int32_t left = static_cast<int8_t>(a.bytes[m][k]);
      for (int64_t n = 0; n < sums.lineBytes / 4; ++n) {
        line[n] += left * static_cast<int8_t>(b.bytes[k / 4][4 * n + k % 4]);
      }
    }
    std::memcpy(sums.bytes[m], line, sizeof(line));
  }
}

}  // namespace
}  // namespace step
