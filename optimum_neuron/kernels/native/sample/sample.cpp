// SPDX-License-Identifier: Apache-2.0
//
// Rows and parts of the vocabulary are tasks. A greedy row is done after its argmax; one without top-k, top-p reads its logits
// twice, to sum weights and to find the block of the token; any other one also for bins of scores.
#include "sample/sample.h"

#include <cmath>

#include "common/range.h"
#include "sample/reached.h"

namespace step {

namespace {

constexpr int64_t kPart = 65536;   // tokens of a task
constexpr int64_t kBlock = 1024;   // tokens that share a sum of weights
constexpr int64_t kChunk = 1024;   // tokens after which the largest logit is compared
constexpr int kTopK = 0, kTopP = 1, kTemperature = 2, kMinP = 3, kParams = 4;

struct Largest {
  float logit;
  int64_t token;
};

// NaN is the largest; of equal ones the first.
bool isLarger(float a, float b) { return a > b || (a != a && b == b); }

Largest largestOf(const TokenRow& row, int64_t begin, int64_t end) {
  constexpr int kWays = 4;  // a maximum takes some cycles
  float best = -kInfinity;
  int64_t chunk = begin;
  for (int64_t start = begin; start < end; start += kChunk) {
    const int64_t stop = std::min(start + kChunk, end);
    Vec largest[kWays];
    BitVec nan[kWays] = {};
    std::fill(largest, largest + kWays, broadcast(-kInfinity));
    const auto take = [&](int way, Vec logits) {
      largest[way] = max(logits, largest[way]);
      nan[way] |= (BitVec)(logits != logits);
    };
    int64_t token = start;
    for (; token + kWays * kLanes <= stop; token += kWays * kLanes) {
      UNROLL
      for (int way = 0; way < kWays; ++way) {
        take(way, loadVec(row.logits + token + way * kLanes));
      }
    }
    for (; token < stop; token += kLanes) {
      take(0, logitsFrom(row, token));
    }
    if (orOf(nan[0] | nan[1] | nan[2] | nan[3])) {
      best = std::numeric_limits<float>::quiet_NaN();
      chunk = start;
      break;
    }
    const float own = maximumOf(max(max(largest[0], largest[1]), max(largest[2], largest[3])));
    if (own > best) {
      best = own;
      chunk = start;
    }
  }
  int64_t token = chunk;
  while (best != best ? row.logits[token] == row.logits[token] : row.logits[token] != best) {
    ++token;
  }
  return {row.logits[token], token};
}

// A row that is drawn, with the sums of its blocks, and bins of its parts where tokens are chosen by score.
struct Draw {
  TokenRow row;
  int64_t number;
  uint64_t* sums;
  Bins* bins;
  bool byScore;
};

// The first token at which the sum of kept weights exceeds `uniform` of all.
int64_t drawn(const Draw& draw, float uniform) {
  const int64_t blocks = divideUp(draw.row.vocab, kBlock);
  uint64_t whole = 0;
  for (int64_t i = 0; i < blocks; ++i) {
    whole += draw.sums[i];
  }
  const float target = std::floor(uniform * rounded(whole));
  // Rounding may have it reach the end. Written so that NaN is 0.
  uint64_t rest = target > 0.0f ? std::min(static_cast<uint64_t>(std::min(target, 0x1p62f)), whole - 1) : 0;
  int64_t block = 0;
  for (; block < blocks - 1 && draw.sums[block] <= rest; ++block) {
    rest -= draw.sums[block];
  }
  const int64_t end = std::min((block + 1) * kBlock, draw.row.vocab);
  for (int64_t token = block * kBlock; token < end; token += kLanes) {
    const Vec weights = keptWeightsFrom(draw.row, token);
    for (int i = 0; i < kLanes; ++i) {
      const uint64_t weight = static_cast<uint64_t>(weights[i]);
      if (weight > rest) {
        return token + i;
      }
      rest -= weight;
    }
  }
  return end - 1;
}

class Sampler {
 public:
  Sampler(Pool& pool, const SampleCall& call)
      : pool_(pool), call_(call), parts_(divideUp(call.vocab, kPart)), blocks_(divideUp(call.vocab, kBlock)) {
    const int64_t rows = call.rows;
    const size_t bytes = rows * (parts_ * (sizeof(Bins) + sizeof(Largest)) + blocks_ * sizeof(uint64_t) + sizeof(Draw));
    char* memory = static_cast<char*>(pool.shared(bytes));
    bins_ = reinterpret_cast<Bins*>(memory);
    largest_ = reinterpret_cast<Largest*>(bins_ + rows * parts_);
    sums_ = reinterpret_cast<uint64_t*>(largest_ + rows * parts_);
    draws_ = reinterpret_cast<Draw*>(sums_ + rows * blocks_);
  }

  void run() {
    pool_.run(call_.rows * parts_, [&](int64_t task, int) {
      const TokenRow row{call_.logits + task / parts_ * call_.stride, call_.vocab, 1.0f, 0.0f};
      const int64_t begin = task % parts_ * kPart;
      largest_[task] = largestOf(row, begin, std::min(begin + kPart, call_.vocab));
    });
    for (int64_t number = 0; number < call_.rows; ++number) {
      begin(number);
    }
    forParts([&](const Draw& draw, int64_t part) { draw.byScore ? fill(draw, part) : sum(draw, part); });
    pool_.run(count_, [&](int64_t task, int worker) { choose(draws_[task], worker); });
    forParts([&](const Draw& draw, int64_t part) { draw.byScore ? sum(draw, part) : void(); });
    for (const Draw* draw = draws_; draw < draws_ + count_; ++draw) {
      call_.tokens[draw->number] = static_cast<int32_t>(drawn(*draw, call_.uniforms[draw->number]));
    }
  }

 private:
  // The token of a greedy row; any other one is drawn later.
  void begin(int64_t number) {
    Largest best = largest_[number * parts_];
    for (int64_t part = 1; part < parts_; ++part) {
      const Largest& other = largest_[number * parts_ + part];
      best = isLarger(other.logit, best.logit) ? other : best;
    }
    call_.tokens[number] = static_cast<int32_t>(best.token);
    const float* params = call_.params + number * kParams;
    const float score = best.logit / params[kTemperature];
    if (params[kTemperature] <= 0.0f || !std::isfinite(score)) {
      return;
    }
    const TokenRow row{
        call_.logits + number * call_.stride, call_.vocab, params[kTemperature], score, -kInfinity, params[kMinP] * kWhole};
    const bool byScore = params[kTopK] >= 1.0f || params[kTopP] < 1.0f;
    draws_[count_++] = {row, number, sums_ + number * blocks_, bins_ + number * parts_, byScore};
  }

  template <class Body>
  void forParts(Body body) {
    pool_.run(count_ * parts_, [&](int64_t task, int) { body(draws_[task / parts_], task % parts_); });
  }

  void fill(const Draw& draw, int64_t part) {
    fillBins(draw.bins[part], draw.row, part * kPart, std::min((part + 1) * kPart, call_.vocab));
  }

  void sum(const Draw& draw, int64_t part) {
    constexpr int64_t kBlocks = kPart / kBlock;
    for (int64_t block = part * kBlocks; block < std::min((part + 1) * kBlocks, blocks_); ++block) {
      draw.sums[block] = keptWeight(draw.row, block * kBlock, std::min((block + 1) * kBlock, call_.vocab));
    }
  }

  // Which scores top-k and top-p keep.
  void choose(Draw& draw, int worker) {
    if (!draw.byScore) {
      return;
    }
    for (int64_t part = 1; part < parts_; ++part) {
      join(draw.bins[0], draw.bins[part]);
    }
    const float* params = call_.params + draw.number * kParams;
    auto* scratch = static_cast<Candidate*>(pool_.scratch(worker, call_.vocab * sizeof(Candidate)));
    if (params[kTopK] >= 1.0f && params[kTopK] < static_cast<float>(call_.vocab)) {
      keepLargest(draw.row, static_cast<uint64_t>(std::ceil(params[kTopK])), draw.bins[0], scratch);
    }
    if (params[kTopP] < 1.0f) {
      keepNucleus(draw.row, params[kTopP], draw.bins[0], scratch);
    }
  }

  Pool& pool_;
  const SampleCall& call_;
  const int64_t parts_, blocks_;
  Bins* bins_;
  Largest* largest_;
  uint64_t* sums_;
  Draw* draws_;
  int64_t count_ = 0;
};

}  // namespace

void sample(Pool& pool, const SampleCall& call) { Sampler(pool, call).run(); }

}  // namespace step
