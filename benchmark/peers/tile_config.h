// SPDX-License-Identifier: Apache-2.0
// Read before each file of llama.cpp. GCC 12's _tile_loadconfig names 8 of the 64 bytes that it reads, so what is written to the others is
// optimized away, and a CPU with AMX ends the process.
#ifdef __AMX_TILE__
#include <immintrin.h>
static inline void load_whole_tile_config(const void *config) {
    __asm__ volatile("ldtilecfg %0" ::"m"(*(const char(*)[64])config));
}
#define _tile_loadconfig(config) load_whole_tile_config(config)
#endif
