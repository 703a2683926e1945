// SPDX-License-Identifier: Apache-2.0
#include "cached_codes.h"
#include "rows.h"

namespace step {

namespace {

template <Coding C, class Kind>
void writeAs(Pool& pool, const WriteCodesCall& call) {
  constexpr int64_t kGrain = 1 << 15;  // numbers of a task, of about 10 us
  const auto* states = static_cast<const typename Kind::Element*>(call.states);
  const int64_t each = std::max<int64_t>(kGrain / std::max<int64_t>(call.heads * call.dim, 1), 1);
  pool.run(divideUp(call.tokens, each), [&](int64_t task, int) {
    for (int64_t t = task * each; t < call.tokens && t < (task + 1) * each; ++t) {
      for (int64_t head = 0; head < call.heads; ++head) {
        const int64_t place = (call.numbers[t] * call.heads + head) * call.length + call.columns[t];
        const auto* numbers = states + t * call.tokenStride + head * call.headStride;
        encodeAs<C, Kind>(call.codes + place * call.dim, call.scales + place, numbers, call.dim);
      }
    }
  });
}

}  // namespace

bool writeCodes(Pool& pool, const WriteCodesCall& call) {
  for (int64_t t = 0; t < call.tokens; ++t) {
    if (call.numbers[t] < 0 || call.numbers[t] >= call.blocks || call.columns[t] < 0 || call.columns[t] >= call.length) {
      return false;
    }
  }
  withKind(call.type, [&](auto kind) {
    if (call.coding == Coding::kInt8) {
      writeAs<Coding::kInt8, decltype(kind)>(pool, call);
    } else {
      writeAs<Coding::kFp8, decltype(kind)>(pool, call);
    }
  });
  return true;
}

}  // namespace step
