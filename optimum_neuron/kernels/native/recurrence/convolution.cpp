// SPDX-License-Identifier: Apache-2.0
//
// convolve: short causal convolutions over the tokens of each slot, which keeps its last inputs.
//
// Contracts:
// - A token's output depends on the inputs of its slot up to it only, to the bit: products are added from its own input backwards,
//   each rounded, then the bias.
// - An idle token, and what a slot held before its token at position 0, has no effect, NaN included.
#include "recurrence/convolution.h"

#include <algorithm>
#include <cstring>

#include "vectors/elements.h"
#include "common/range.h"
#include "common/segments.h"

namespace step {

namespace {

// Channels of a task: their inputs and weights stay in the first-level cache from token to token.
constexpr int64_t kChannels = 512;
// Vectors of channels that are summed side by side.
constexpr int kTogether = 4;
// Products of some 5 us.
constexpr int64_t kTaskGrain = 1 << 16;

// Some channels of a slot.
template <class Kind>
class Convolver {
  using Element = typename Kind::Element;

 public:
  Convolver(const ConvolveCall& call, const Segment& segment, const int32_t* tokens, int64_t channel)
      : call_(call),
        tokens_(tokens),
        count_(segment.count),
        channel_(channel),
        width_(std::min(kChannels, call.channels - channel)),
        kept_(static_cast<Element*>(call.state) + segment.slot * call.past * call.channels + channel) {}

  void run() const {
    for (int64_t i = 0; i < count_; ++i) {
      convolveToken(i);
    }
    // The oldest first: what a place gets stands after it, or belongs to this step.
    for (int64_t place = 0; place < call_.past; ++place) {
      std::memmove(kept_ + place * call_.channels, input(count_ - call_.past + place), width_ * sizeof(Element));
    }
  }

 private:
  // The inputs of the slot's token `i` of this step, or where it is negative, of those before.
  const Element* input(int64_t i) const {
    return i < 0 ? kept_ + (call_.past + i) * call_.channels
                 : static_cast<const Element*>(call_.inputs) + tokens_[i] * call_.stride + channel_;
  }

  void convolveToken(int64_t i) const {
    int64_t at = 0;
    for (; at + kTogether * kLanes <= width_; at += kTogether * kLanes) {
      convolveVectors<kTogether, true>(i, at, kLanes);
    }
    for (; at + kLanes <= width_; at += kLanes) {
      convolveVectors<1, true>(i, at, kLanes);
    }
    if (at < width_) {
      convolveVectors<1, false>(i, at, width_ - at);
    }
  }

  // Vectors of channels from `at` on; where they are not whole, one with `lanes` channels.
  template <int Vectors, bool Whole>
  INLINE void convolveVectors(int64_t i, int64_t at, int64_t lanes) const {
    const int64_t token = tokens_[i];
    const int64_t before = std::min<int64_t>(call_.past, std::max(call_.positions[token], 0));
    Vec sums[Vectors];
    for (int64_t back = 0; back <= before; ++back) {
      const Element* from = input(i - back) + at;
      const float* weight = call_.weight + (call_.past - back) * call_.channels + channel_ + at;
      UNROLL for (int j = 0; j < Vectors; ++j) {
        const Vec product = read<Kind, Whole>(from + j * kLanes, lanes) * read<Float32, Whole>(weight + j * kLanes, lanes);
        sums[j] = back == 0 ? product : sums[j] + product;
      }
    }
    float* output = call_.output + token * call_.channels + channel_ + at;
    UNROLL for (int j = 0; j < Vectors; ++j) {
      if (call_.bias) {
        sums[j] = sums[j] + read<Float32, Whole>(call_.bias + channel_ + at + j * kLanes, lanes);
      }
      write<Whole>(output + j * kLanes, sums[j], lanes);
    }
  }

  template <class Of, bool Whole>
  static INLINE Vec read(const typename Of::Element* p, int64_t lanes) {
    if constexpr (Whole) {
      return Of::load(p);
    } else {
      return loadSome<Of>(p, lanes);
    }
  }

  template <bool Whole>
  static INLINE void write(float* p, Vec values, int64_t lanes) {
    if constexpr (Whole) {
      storeVec(p, values);
    } else {
      float all[kLanes];
      storeVec(all, values);
      std::memcpy(p, all, lanes * sizeof(float));
    }
  }

  const ConvolveCall& call_;
  const int32_t* tokens_;
  const int64_t count_, channel_, width_;
  Element* const kept_;
};

template <class Kind>
void convolveAll(Pool& pool, const ConvolveCall& call, const Segments& segments) {
  const int64_t blocks = divideUp(call.channels, kChannels), parts = segments.count * blocks;
  const int64_t products = segments.live() * call.channels * (call.past + 1);
  const int64_t tasks = std::min(parts, products / kTaskGrain + 1);
  pool.run(tasks, [&](int64_t task, int) {
    const Range own = part(parts, task, tasks);
    for (int64_t i = own.begin; i < own.end; ++i) {
      // The last segments first: those of chunks, which take longest.
      const Segment& segment = segments.list[segments.count - 1 - i / blocks];
      Convolver<Kind>(call, segment, segments.tokens + segment.first, i % blocks * kChannels).run();
    }
  });
}

}  // namespace

bool convolve(Pool& pool, const ConvolveCall& call) {
  Segments segments;
  if (!segments.find(pool.shared(Segments::bytes(call.tokens, call.slotCount)), call.slots, call.tokens, call.slotCount)) {
    return false;
  }
  for (int64_t t = 0; t < call.tokens; ++t) {
    if (call.slots[t] == call.slotCount) {
      std::fill_n(call.output + t * call.channels, call.channels, 0.0f);
    }
  }
  withKind(call.type, [&](auto kind) { convolveAll<decltype(kind)>(pool, call, segments); });
  return true;
}

}  // namespace step
