// SPDX-License-Identifier: Apache-2.0
//
// The tile registers of AMX, each of 16 lines of 64 bytes, and the product of pairs of bfloat16 that they have. The
// instructions are written out: the tile numbers of g++'s intrinsics cannot be template arguments, and g++ 12 takes the
// memory that they read and write for unused.
#pragma once

#include <cstdint>

namespace step {
namespace {

constexpr int64_t kAmxLines = 16, kAmxLineBytes = 64, kAmxBytes = kAmxLines * kAmxLineBytes;
constexpr int kAmxTiles = 8;

// What LDTILECFG reads; all tiles are whole.
struct alignas(64) AmxShapes {
  uint8_t palette = 1, startRow = 0, reserved[14] = {};
  uint16_t lineBytes[16] = {};
  uint8_t lines[16] = {};

  AmxShapes() {
    for (int tile = 0; tile < kAmxTiles; ++tile) {
      set(tile, kAmxLines, kAmxLineBytes);
    }
  }
  void set(int tile, int64_t count, int64_t bytes) {
    lines[tile] = static_cast<uint8_t>(count);
    lineBytes[tile] = static_cast<uint16_t>(bytes);
  }
};
static_assert(sizeof(AmxShapes) == 64);

// tests/targets/cpu has the same functions without AMX.
#if !defined(STEP_AMX_EMULATED)
inline void amxConfigure(const AmxShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
inline void amxRelease() { asm volatile("tilerelease"); }

template <int Tile>
inline void amxZero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(Tile));
}

// Lines are `stride` bytes apart.
template <int Tile>
inline void amxLoad(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(Tile) : "memory");
}
template <int Tile>
inline void amxStore(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(Tile) : "memory");
}

// sums[m][n] += the sum over k of a[m][k] * b[k][n], with a and b pairs of bfloat16 and sums float32. Even and odd
// members of pairs are summed apart and then added up.
template <int Sums, int A, int B>
inline void amxMultiplyAdd() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(A), "i"(B));
}
// The same with a and b four numbers of int8 and sums int32.
template <int Sums, int A, int B>
inline void amxMultiplyAddBytes() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(A), "i"(B));
}
#endif

// Tile registers for a thread's use. Released they cost nothing when the thread is switched.
class AmxTiles {
 public:
  explicit AmxTiles(const AmxShapes& shapes = {}) { amxConfigure(shapes); }
  ~AmxTiles() { amxRelease(); }
  AmxTiles(const AmxTiles&) = delete;
  AmxTiles& operator=(const AmxTiles&) = delete;
};

}  // namespace
}  // namespace step
