// Linear maps with what usually stands before and behind them: y = residual + before(x) * W^T + bias.
#include <omp.h>

#include <algorithm>
#include <vector>

#include "functions.h"
#include "kernels.h"
#include "tiles.h"

using namespace amx;

namespace {

constexpr int kFewRows = 16;
constexpr int64_t kAloneBytes = 1 << 20;            // weights that one thread reads faster than two wake up
constexpr int kStripBytes = 3 << 18;                // of weights that stay in its second cache

// before(x) of one row as a row of left operands.
void prepare(const Linear& map, const float* x, Half* left, int row) {
  const int n = map.inputs;
  auto load = [&](int i) { return _mm512_loadu_ps(x + i); };
  auto store = [&](auto value) {
    for (int i = 0; i < n; i += 32) store_left(left, row, i / 32, value(i), value(i + 16));
  };
  auto sum_of = [&](auto value) {
    __m512 sum = _mm512_setzero_ps();
    for (int i = 0; i < n; i += 16) sum = _mm512_add_ps(sum, value(i));
    return _mm512_reduce_add_ps(sum);
  };
  switch (map.before) {
    case kNothing: store(load); break;
    case kGelu: store([&](int i) { return gelu16(load(i)); }); break;
    case kErfGelu: store([&](int i) { return erf_gelu16(load(i)); }); break;
    case kSwiGlu: store([&](int i) { return _mm512_mul_ps(silu16(load(i)), load(n + i)); }); break;
    case kRmsNorm: {
      const float squares = sum_of([&](int i) { return _mm512_mul_ps(load(i), load(i)); });
      const __m512 scale = _mm512_set1_ps(1.f / __builtin_sqrtf(squares / n + map.eps));
      store([&](int i) { return _mm512_mul_ps(_mm512_mul_ps(load(i), scale), _mm512_loadu_ps(map.norm_weight + i)); });
      break;
    }
    case kLayerNorm: {
      const __m512 mean = _mm512_set1_ps(sum_of(load) / n);
      auto centred = [&](int i) { return _mm512_sub_ps(load(i), mean); };
      const float squares = sum_of([&](int i) { return _mm512_mul_ps(centred(i), centred(i)); });
      const __m512 scale = _mm512_set1_ps(1.f / __builtin_sqrtf(squares / n + map.eps));
      store([&](int i) {
        const __m512 weight = _mm512_mul_ps(scale, _mm512_loadu_ps(map.norm_weight + i));
        return _mm512_fmadd_ps(centred(i), weight, _mm512_loadu_ps(map.norm_bias + i));
      });
    }
  }
}

// A block of results, with bias and residual, to its place.
void finish(const Linear& map, const float* block, int rows, int column, const float* residual, float* y) {
  auto at = [](const float* values, int64_t i) { return values ? _mm512_loadu_ps(values + i) : _mm512_setzero_ps(); };
  const __m512 bias[2] = {at(map.bias, column), at(map.bias, column + 16)};
  for (int row = 0; row < rows; ++row)
    for (int half = 0; half < 2; ++half) {
      const int64_t place = (int64_t)row * map.outputs + column + half * 16;
      const __m512 value = _mm512_add_ps(_mm512_loadu_ps(block + row * 32 + half * 16), bias[half]);
      _mm512_storeu_ps(y + place, _mm512_add_ps(value, at(residual, place)));
    }
}

Half* scratch(int64_t values) {
  thread_local std::vector<Half> memory;
  if ((int64_t)memory.size() < values + 32) memory.resize(values + 32);
  return (Half*)(((uintptr_t)memory.data() + 63) & ~(uintptr_t)63);
}

template <int kHalves>
void few_rows(const Linear& map, const float* x, int rows, int stride, const float* residual, float* y) {
  const int steps = map.inputs / 32, blocks = map.outputs / 32;
  const int64_t column_values = (int64_t)steps * kHalves * 2 * kTile;
  Half* left = scratch(steps * kStep);
  for (int row = 0; row < rows; ++row) prepare(map, x + (int64_t)row * stride, left, row);
#pragma omp parallel if (column_values * blocks * 2 > kAloneBytes)
  {
    const Tiles tiles(rows);
    alignas(64) float block[16 * 32];
#pragma omp for schedule(dynamic, 1 + blocks / 16)
    for (int column = 0; column < blocks; ++column) {
      multiply<1, 2, kHalves>(left, map.weight + column * column_values, steps, block);
      finish(map, block, rows, column * 32, residual, y);
    }
  }
}

template <int kHalves>
void many_rows(const Linear& map, const float* x, int rows, int stride, const float* residual, float* y) {
  const int steps = map.inputs / 32, blocks = map.outputs / 32, row_blocks = (rows + 31) / 32;
  const int64_t operand = (int64_t)steps * kStep, column_values = (int64_t)steps * kHalves * 2 * kTile;
  Half* left = scratch(row_blocks * operand);
  const int tasks = 8 * omp_get_max_threads();                              // enough that no thread waits long
  const int fitting = std::max<int64_t>(1, kStripBytes / (column_values * 2));
  const int width = std::max(1, std::min({blocks, fitting, blocks * row_blocks / tasks}));
  const int strips = (blocks + width - 1) / width;
  const int height = std::max(1, row_blocks * strips / tasks), groups = (row_blocks + height - 1) / height;
#pragma omp parallel
  {
    const Tiles tiles;
    alignas(64) float block[32 * 32];
#pragma omp for schedule(dynamic, 16)
    for (int row = 0; row < rows; ++row) prepare(map, x + (int64_t)row * stride, left + row / 32 * operand, row % 32);
#pragma omp for schedule(dynamic)
    for (int task = 0; task < strips * groups; ++task) {
      const int begin = task / groups * width, end = std::min(begin + width, blocks);
      const int first = task % groups * height, last = std::min(first + height, row_blocks);
      for (int at = first; at < last; ++at)
        for (int column = begin; column < end; ++column) {
          multiply<2, 2, kHalves>(left + at * operand, map.weight + column * column_values, steps, block);
          const int64_t offset = (int64_t)at * 32 * map.outputs;
          finish(map, block, std::min(32, rows - at * 32), column * 32, residual ? residual + offset : nullptr, y + offset);
        }
    }
  }
}

template <int kHalves>
void compute(const Linear& map, const float* x, int rows, int stride, const float* residual, float* y) {
  (rows <= kFewRows ? few_rows<kHalves> : many_rows<kHalves>)(map, x, rows, stride, residual, y);
}

}  // namespace

extern "C" void linear(const Linear* map, const float* x, int rows, int stride, const float* residual, float* y) {
  (map->halves == 1 ? compute<1> : compute<2>)(*map, x, rows, stride, residual, y);
}
