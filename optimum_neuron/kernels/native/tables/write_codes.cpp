// SPDX-License-Identifier: Apache-2.0
#include "tables/cached_codes.h"
#include "tables/rows.h"

namespace step {

namespace {

template <Coding C, class Kind>
void writeAs(Pool& pool, const WriteCodesCall& call, const int64_t* places) {
  constexpr int64_t kGrain = 1 << 15;  // numbers of a task, of about 10 us
  const auto* states = static_cast<const typename Kind::Element*>(call.states);
  const int64_t each = std::max<int64_t>(kGrain / std::max<int64_t>(call.heads * call.dim, 1), 1);
  pool.run(divideUp(call.tokens, each), [&](int64_t task, int) {
    for (int64_t t = task * each; t < call.tokens && t < (task + 1) * each; ++t) {
      for (int64_t head = 0; head < call.heads; ++head) {
        const int64_t place = places[t] + head * call.length;
        const auto* numbers = states + t * call.tokenStride + head * call.headStride;
        encodeAs<C, Kind>(call.codes + place * call.dim, call.scales + place, numbers, call.dim);
      }
    }
  });
}

}  // namespace

bool writeCodes(Pool& pool, const WriteCodesCall& call) {
  const int64_t* places = placesOf(pool, call);
  if (!places) {
    return false;
  }
  withKind(call.type, [&](auto kind) {
    if (call.coding == Coding::kInt8) {
      writeAs<Coding::kInt8, decltype(kind)>(pool, call, places);
    } else {
      writeAs<Coding::kFp8, decltype(kind)>(pool, call, places);
    }
  });
  return true;
}

}  // namespace step
