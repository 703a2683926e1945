// SPDX-License-Identifier: Apache-2.0
//
// attend: attention of new tokens over a static key-value cache, for token generation (one token a row) and prompt
// chunks (many tokens of one slot) alike.
//
// A token at position p sees columns c <= p of its row and, with a window w > 0, only c > p - w. Position -1 is an
// idle token: its result is zero. Scores, softmax and sums are float32.
//
// Contracts, in one build of the library:
// - A token's result depends on its query, its position, the window and the columns it sees only, to the bit: not on
//   other tokens or rows, on how tokens are cut into chunks, on the size of the cache and of its blocks, on which of them
//   a row has, or on the number of threads. Columns
//   are taken in ascending order in blocks and sections at fixed places, and one code computes single tokens and chunks.
// - What a token does not see cannot reach its result, NaN and infinity included.
// - Where the CPU multiplies bfloat16 itself, probabilities are rounded to it before they meet the values, and
//   subnormal numbers count as zero, as the hardware has it.
#include <algorithm>
#include <limits>

#include "attention/attend_tile.h"

namespace step {

namespace {

// Queries that share a packed block, at most: they should stay in the second-level cache. Fewer, down to the tokens
// below, where all threads are then done sooner.
constexpr int64_t kTileQueries = 192;
constexpr int64_t kTilesPerThread = 4;      // where they are fewer, sections of a long context are shared out
constexpr int64_t kMostTilesPerThread = 8;
constexpr int64_t kMinTileTokens = 8;
// Multiply-adds of about 20 us: less is not worth waking another thread, and a task should have some part of it.
// Packing costs as much as some queries.
constexpr int64_t kGrain = 1 << 21;
constexpr int64_t kTaskGrain = kGrain / 8;
constexpr int64_t kPackCost = 8;
// Of a thread, for the states of sections that threads share out: where there are more, there is work enough without.
constexpr int64_t kStateFloats = 1 << 20;

// Tiles are cut out of a call's tokens, rows and kv heads, in this order.
class Tiling {
 public:
  // Results do not depend on the tokens of a tile.
  Tiling(const Layout& call, int threads) : call_(call) {
    const int64_t pairs = call.rows * call.kvHeads;
    const int64_t least = std::min<int64_t>(kMinTileTokens, call.tokens);
    const auto chunksOf = [&](int64_t tokens) { return divideUp(call.tokens, tokens); };
    const auto time = [&](int64_t tokens) {
      return divideUp(pairs * chunksOf(tokens), threads) * (tokens * call.group() + kPackCost);
    };
    tokens_ = std::clamp<int64_t>(kTileQueries / call.group(), least, call.tokens);
    for (int64_t chunks = chunksOf(tokens_) + 1; chunks * pairs <= kMostTilesPerThread * threads; ++chunks) {
      const int64_t tokens = divideUp(call.tokens, chunks);
      if (tokens >= least && time(tokens) < time(tokens_)) {
        tokens_ = tokens;
      }
    }
    chunks_ = chunksOf(tokens_);
  }

  int64_t count() const { return chunks_ * call_.rows * call_.kvHeads; }
  int64_t queries() const { return tokens_ * call_.group(); }

  // The last tokens first: they see most, and what is left at the end should be small.
  AttendTile tile(int64_t i) const {
    const int64_t row = i / call_.kvHeads % call_.rows;
    const int64_t first = (chunks_ - 1 - i / call_.kvHeads / call_.rows) * tokens_;
    const int64_t last = std::min(first + tokens_, call_.tokens);
    Range seen{call_.columns * call_.perRow, 0};
    Range common{0, call_.columns * call_.perRow};
    for (int64_t token = first; token < last; ++token) {
      const Range range = call_.visible(row, token);
      common = {std::max(common.begin, range.begin), std::min(common.end, range.end)};
      if (range.end > 0) {
        seen = {std::min(seen.begin, range.begin), std::max(seen.end, range.end)};
      }
    }
    return {row, i % call_.kvHeads, first, (last - first) * call_.group(), seen, common};
  }

  // Multiply-adds of all tiles: those of the rows' first kv heads, as many times as there are kv heads.
  int64_t cost() const {
    int64_t cost = 0;
    for (int64_t i = 0; i < count(); i += call_.kvHeads) {
      const AttendTile one = tile(i);
      cost += std::max<int64_t>(one.seen.end - one.seen.begin, 0) * (one.queries + kPackCost) * (call_.dim + call_.valueDim);
    }
    return cost * call_.kvHeads;
  }

 private:
  const Layout& call_;
  int64_t tokens_, chunks_;
};

// The states of all sections of all tiles, where threads share them out.
class Sections {
 public:
  Sections(const Tiling& tiling, int64_t dim) : tiles_(tiling.count()), queries_(tiling.queries()), dim_(dim) {
    for (int64_t i = 0; i < tiles_; ++i) {
      const Range own = tiling.tile(i).sections();
      if (own.begin < own.end) {
        all_ = {std::min(all_.begin, own.begin), std::max(all_.end, own.end)};
      }
    }
  }

  // Sections of every tile, of which it may not see all.
  int64_t perTile() const { return std::max<int64_t>(all_.end - all_.begin, 0); }
  int64_t count() const { return tiles_ * perTile(); }
  int64_t tile(int64_t part) const { return part % tiles_; }
  int64_t section(int64_t part) const { return all_.begin + part / tiles_; }
  int64_t floats() const { return count() * QueryState::floats(queries_, dim_); }
  QueryState state(float* memory, int64_t tile, int64_t section) const {
    const int64_t number = (section - all_.begin) * tiles_ + tile;
    return {memory + number * QueryState::floats(queries_, dim_), queries_};
  }

 private:
  int64_t tiles_, queries_, dim_;
  Range all_{std::numeric_limits<int64_t>::max(), 0};
};

template <class Kind>
void attendSections(Pool& pool, const Layout& call, const Tiling& tiling, const Sections& sections) {
  const int64_t bytes = Scratch::floats(tiling.queries(), call) * sizeof(float);
  float* states = static_cast<float*>(pool.shared(sections.floats() * sizeof(float)));
  const auto worker = [&](int64_t tile, int number, auto body) {
    const Scratch scratch(static_cast<float*>(pool.scratch(number, bytes)), tiling.queries(), call);
    const AttendTile own = tiling.tile(tile);
    body(own, TileWorker<Kind>(call, own, scratch));
  };
  pool.run(sections.count(), [&](int64_t part, int number) {
    const int64_t tile = sections.tile(part), section = sections.section(part);
    worker(tile, number, [&](const AttendTile& own, TileWorker<Kind> one) {
      if (section >= own.sections().begin && section < own.sections().end) {
        one.runSection(section, sections.state(states, tile, section));
      }
    });
  });
  const int64_t tiles = tiling.count(), tasks = std::min(tiles, sections.floats() / kTaskGrain + 1);
  pool.run(tasks, [&](int64_t task, int number) {
    const Range range = part(tiles, task, tasks);
    for (int64_t tile = range.begin; tile < range.end; ++tile) {
      worker(tile, number, [&](const AttendTile& own, TileWorker<Kind> one) {
        if (own.sections().begin < own.sections().end) {
          one.joinSections([&](int64_t section) { return sections.state(states, tile, section); });
        } else {
          one.run();  // idle tokens
        }
      });
    }
  });
}

template <class Kind>
void attendAll(Pool& pool, const Layout& call) {
  const Tiling tiling(call, pool.threads());
  const int64_t cost = tiling.cost(), count = tiling.count();
  // Tiles of one row's chunk cost nearly the same, so that as many for each thread are done at once without.
  const bool even = call.rows == 1 && call.tokens > 1 && count % pool.threads() == 0;
  if (cost > kGrain && pool.threads() > 1 && count < kTilesPerThread * pool.threads() && !even) {
    const Sections sections(tiling, call.wideValueDim());
    if (sections.perTile() > 1 && sections.floats() <= kStateFloats * pool.threads()) {
      attendSections<Kind>(pool, call, tiling, sections);
      return;
    }
  }
  const int64_t tasks = cost <= kGrain ? 1 : std::min(count, cost / kTaskGrain);
  const int64_t bytes = Scratch::floats(tiling.queries(), call) * sizeof(float);
  pool.run(tasks, [&](int64_t task, int worker) {
    const Scratch scratch(static_cast<float*>(pool.scratch(worker, bytes)), tiling.queries(), call);
    const Range tiles = part(count, task, tasks);
    for (int64_t i = tiles.begin; i < tiles.end; ++i) {
      TileWorker<Kind>(call, tiling.tile(i), scratch).run();
    }
  });
}

bool areInside(const int32_t* indices, int64_t count, int64_t begin, int64_t end) {
  return std::all_of(indices, indices + count, [&](int32_t index) { return index >= begin && index < end; });
}

}  // namespace

bool attend(Pool& pool, const AttendCall& call) {
  if (!areInside(call.positions, call.rows * call.tokens, -1, call.columns * call.perRow) ||
      (call.blocks ? !areInside(call.blocks, call.rows * call.perRow, 0, call.cacheBlocks) : call.rows > call.cacheBlocks)) {
    return false;
  }
  if (call.rows > 0 && call.tokens > 0) {
    withKind(call.type, [&](auto kind) { attendAll<decltype(kind)>(pool, Layout{call}); });
  }
  return true;
}

}  // namespace step
