// SPDX-License-Identifier: Apache-2.0
#include "attention/matmul.h"

#include <algorithm>

#include "attention/tile_multiply.h"

namespace step {

namespace {

constexpr int64_t kGrain = 1 << 18;  // multiply-adds of a task, at least

// Rows of a matrix at a time. A matrix whose rows are no whole vectors is copied next to zeros.
class MatrixProduct {
 public:
  MatrixProduct(const MatMulCall& call, float* scratch)
      : call_(call), wide_(roundUp(call.columns, kLine)), sums_(scratch), right_(scratch + kRows * wide_) {}

  static constexpr int64_t kRows = kVectorRows;
  static int64_t floats(const MatMulCall& call) { return (kRows + call.inner) * roundUp(call.columns, kLine); }

  void run(int64_t matrix) {
    const float* right = call_.right + matrix * call_.inner * call_.columns;
    const bool whole = wide_ == call_.columns;
    for (int64_t k = 0; k < call_.inner && !whole; ++k) {
      std::copy_n(right + k * call_.columns, call_.columns, right_ + k * wide_);
      std::fill_n(right_ + k * wide_ + call_.columns, wide_ - call_.columns, 0.0f);
    }
    for (int64_t row = 0; row < call_.rows; row += kRows) {
      const int64_t rows = std::min(kRows, call_.rows - row), first = matrix * call_.rows + row;
      float* output = call_.output + first * call_.columns;
      multiply<Float32>(
          rows, wide_ / kLanes,
          {whole ? output : sums_, wide_, reinterpret_cast<const Word*>(call_.left + first * call_.inner), call_.inner,
           reinterpret_cast<const Word*>(whole ? right : right_), wide_, call_.inner, nullptr});
      for (int64_t i = 0; i < rows && !whole; ++i) {
        std::copy_n(sums_ + i * wide_, call_.columns, output + i * call_.columns);
      }
    }
  }

 private:
  const MatMulCall& call_;
  const int64_t wide_;
  float *sums_, *right_;
};

}  // namespace

void multiplyMatrices(Pool& pool, const MatMulCall& call) {
  const int64_t work = call.matrices * call.rows * call.inner * call.columns;
  const int64_t tasks = std::clamp<int64_t>(work / kGrain, 1, std::max<int64_t>(call.matrices, 1));
  pool.run(tasks, [&](int64_t task, int worker) {
    MatrixProduct product(
        call, static_cast<float*>(pool.scratch(worker, MatrixProduct::floats(call) * sizeof(float))));
    const Range own = part(call.matrices, task, tasks);
    for (int64_t matrix = own.begin; matrix < own.end; ++matrix) {
      product.run(matrix);
    }
  });
}

}  // namespace step
