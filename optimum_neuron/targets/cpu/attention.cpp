// SPDX-License-Identifier: Apache-2.0
//
// attend(query, keys, values, seq_ids, position_ids, scaling, sliding_window): attention of new tokens over a static
// key-value cache, for token generation (one token a row) and prompt chunks (many tokens of one slot) alike.
//
//   query [rows, heads, tokens, dim], keys and values [slots, kv_heads, columns, dim], seq_ids [rows] (the slot of each
//   row; None: row i is slot i), position_ids [rows, tokens]; result [rows, tokens, heads, dim].
//
// A token at position p sees columns c <= p of its slot and, with a sliding window w > 0, only c > p - w. Position -1
// is an idle token: its result is zero. bfloat16 and float32; scores, softmax and sums are float32.
//
// Contracts:
// - A token's result depends on its query, its position, the window and the columns it sees only, to the bit: not on
//   other tokens or rows, on how tokens are cut into chunks, on the size of the cache or the number of threads. Columns
//   are taken in ascending order in blocks at fixed places, and one code computes single tokens and chunks.
// - What a token does not see cannot reach its result, NaN and infinity included.
// - In bfloat16, probabilities are rounded to bfloat16 before they meet the values, and subnormal numbers count as
//   zero, as the hardware instruction has it.
// - No autograd formula: for inference.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <vector>

#include "attend_tile.h"
#include "attention_call.h"
#include "simd.h"

namespace {

constexpr int64_t kMaxDim = 256;
// Queries that share a packed block, at most: they should stay in the second-level cache. Fewer, down to the tokens
// below, where there would be too few tiles to balance the threads.
constexpr int64_t kTileQueries = 192;
constexpr int64_t kTilesPerThread = 4;
constexpr int64_t kMinTileTokens = 8;
// Multiply-adds of about 20 us: less is not worth waking another thread. Packing costs as much as some queries.
constexpr int64_t kGrain = 1 << 21;
constexpr int64_t kPackCost = 8;

// The last tokens first: they see most, and what is left at the end should be small.
std::vector<Tile> makeTiles(const Call& call, int64_t tileTokens) {
  std::vector<Tile> tiles;
  for (int64_t first = (call.tokens - 1) / tileTokens * tileTokens; first >= 0; first -= tileTokens) {
    const int64_t last = std::min(first + tileTokens, call.tokens);
    for (int64_t row = 0; row < call.rows; ++row) {
      Range seen{call.columns, 0};
      Range common{0, call.columns};
      for (int64_t token = first; token < last; ++token) {
        const Range range = call.visible(row, token);
        common = {std::max(common.begin, range.begin), std::min(common.end, range.end)};
        if (range.end > 0) {
          seen = {std::min(seen.begin, range.begin), std::max(seen.end, range.end)};
        }
      }
      for (int64_t kvHead = 0; kvHead < call.kvHeads; ++kvHead) {
        tiles.push_back({row, kvHead, first, (last - first) * call.group(), seen, common});
      }
    }
  }
  return tiles;
}

// Tokens of a tile. Results do not depend on it.
int64_t chooseTileTokens(const Call& call) {
  const int64_t pairs = call.rows * call.kvHeads;
  const int64_t tiles = (kTilesPerThread * at::get_num_threads() + pairs - 1) / pairs;
  const int64_t tokens = std::min(kTileQueries / call.group(), (call.tokens + tiles - 1) / tiles);
  return std::clamp<int64_t>(tokens, std::min<int64_t>(kMinTileTokens, call.tokens), call.tokens);
}

template <class Type>
void attendAll(const Call& call) {
  const int64_t tileTokens = chooseTileTokens(call);
  const std::vector<Tile> tiles = makeTiles(call, tileTokens);
  int64_t cost = 0;
  for (const Tile& tile : tiles) {
    cost += std::max<int64_t>(tile.seen.end - tile.seen.begin, 0) * (tile.queries + kPackCost) * 2 * call.dim;
  }
  const int64_t count = tiles.size();
  const int64_t threads = std::clamp<int64_t>(cost / kGrain, 1, std::min<int64_t>(at::get_num_threads(), count));
  const int64_t floats = Scratch::floats(tileTokens * call.group(), call.dim);
  const at::Tensor memory = at::empty({threads, floats}, at::kFloat);
  std::atomic<int64_t> next{0};
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; ++thread) {
      const Scratch scratch(memory.mutable_data_ptr<float>() + thread * floats, tileTokens * call.group(), call.dim);
      for (int64_t i = next++; i < count; i = next++) {
        TileWorker<Type>(call, tiles[i], scratch).run();
      }
    }
  });
}

void checkCaches(const at::Tensor& query, const at::Tensor& keys, const at::Tensor& values) {
  TORCH_CHECK(query.dim() == 4 && keys.dim() == 4, "attend: query and keys must have 4 dimensions");
  const auto type = query.scalar_type();
  const int64_t heads = query.size(1), kvHeads = keys.size(1), dim = query.size(3);
  TORCH_CHECK(type == at::kBFloat16 || type == at::kFloat, "attend: bfloat16 or float32 expected, not ", type);
  TORCH_CHECK(
      dim > 0 && dim % kLanes == 0 && dim <= kMaxDim, "attend: head dimension ", dim, " is not a multiple of ", kLanes,
      " up to ", kMaxDim);
  TORCH_CHECK(
      keys.sizes() == values.sizes() && keys.size(3) == dim, "attend: query ", query.sizes(), ", keys ", keys.sizes(),
      ", values ", values.sizes());
  TORCH_CHECK(kvHeads > 0 && heads % kvHeads == 0, "attend: ", heads, " heads, ", kvHeads, " kv heads");
  TORCH_CHECK(
      keys.scalar_type() == type && values.scalar_type() == type && keys.is_contiguous() && values.is_contiguous(),
      "attend: keys and values must be contiguous and ", type);
  TORCH_CHECK(query.stride(3) == 1, "attend: the last dimension of query must be contiguous");
}

void checkIndices(const at::Tensor& indices, at::IntArrayRef sizes, int64_t begin, int64_t end, const char* name) {
  TORCH_CHECK(
      indices.scalar_type() == at::kInt && indices.sizes() == sizes, "attend: ", name, " must be int32 ", sizes,
      ", not ", indices.scalar_type(), " ", indices.sizes());
  const auto* index = indices.const_data_ptr<int32_t>();
  for (int64_t i = 0; i < indices.numel(); ++i) {
    TORCH_CHECK(index[i] >= begin && index[i] < end, "attend: ", name, " ", index[i], ", cache size ", end);
  }
}

at::Tensor attend(
    const at::Tensor& query, const at::Tensor& keys, const at::Tensor& values, const std::optional<at::Tensor>& seqIds,
    const at::Tensor& positionIds, double scaling, int64_t slidingWindow) {
  checkInstructions();
  checkCaches(query, keys, values);
  const at::Tensor positions = positionIds.contiguous();
  const std::optional<at::Tensor> slots = seqIds ? std::optional(seqIds->contiguous()) : std::nullopt;
  checkIndices(positions, {query.size(0), query.size(2)}, -1, keys.size(2), "position_ids");
  if (slots) {
    checkIndices(*slots, {query.size(0)}, 0, keys.size(0), "seq_ids");
  } else {
    TORCH_CHECK(query.size(0) <= keys.size(0), "attend: ", query.size(0), " rows, cache size ", keys.size(0));
  }
  at::Tensor output = at::empty({query.size(0), query.size(2), query.size(1), query.size(3)}, query.options());
  if (output.numel() == 0) {
    return output;
  }
  const Call call{
      query.const_data_ptr(), keys.const_data_ptr(), values.const_data_ptr(), output.mutable_data_ptr(),
      slots ? slots->const_data_ptr<int32_t>() : nullptr, positions.const_data_ptr<int32_t>(),
      query.size(0), query.size(1), query.size(2), query.size(3), keys.size(1), keys.size(2), slidingWindow,
      query.stride(0), query.stride(1), query.stride(2), static_cast<float>(scaling)};
  query.scalar_type() == at::kFloat ? attendAll<Float32>(call) : attendAll<BFloat16>(call);
  return output;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(OPTIMUM_NEURON_NAMESPACE, m) {
  m.def(
      "attend(Tensor query, Tensor keys, Tensor values, Tensor? seq_ids, Tensor position_ids, float scaling, "
      "int sliding_window) -> Tensor");
}

TORCH_LIBRARY_IMPL(OPTIMUM_NEURON_NAMESPACE, CPU, m) {
  m.impl("attend", &attend);
}
