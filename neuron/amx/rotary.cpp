// Rotary positions: heads that are normed and turned, in place, and keys and values that go to their slots.
#include <omp.h>

#include <cstdint>
#include <cstring>

#include <immintrin.h>

#include "kernels.h"

namespace {

constexpr int64_t kAloneValues = 1 << 15;           // that one thread turns faster than two wake up

// One head: the pairs (i, i + dim / 2); `sin` is negative in its first half.
void turn(float* x, int dim, const float* norm, float eps, const float* cos, const float* sin) {
  const int middle = dim / 2;
  __m512 scale = _mm512_set1_ps(1.f);
  if (norm) {
    __m512 squares = _mm512_setzero_ps();
    for (int i = 0; i < dim; i += 16) {
      const __m512 value = _mm512_loadu_ps(x + i);
      squares = _mm512_fmadd_ps(value, value, squares);
    }
    scale = _mm512_set1_ps(1.f / __builtin_sqrtf(_mm512_reduce_add_ps(squares) / dim + eps));
  }
  auto value = [&](int i) {
    const __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(x + i), scale);
    return norm ? _mm512_mul_ps(scaled, _mm512_loadu_ps(norm + i)) : scaled;
  };
  for (int i = 0; i < middle; i += 16) {
    const __m512 first = value(i), second = value(middle + i);
    auto turned = [&](__m512 own, __m512 other, int at) {
      return _mm512_fmadd_ps(other, _mm512_loadu_ps(sin + at), _mm512_mul_ps(own, _mm512_loadu_ps(cos + at)));
    };
    _mm512_storeu_ps(x + i, turned(first, second, i));
    _mm512_storeu_ps(x + middle + i, turned(second, first, middle + i));
  }
}

}  // namespace

extern "C" void rotate(const Rotation* rotation, float* qkv, int rows, int64_t stride, const float* cos,
                       const float* sin, float* keys, float* values, const int64_t* slots) {
  const int dim = rotation->dim, heads = rotation->heads, width = rotation->kv_heads * dim;
#pragma omp parallel for schedule(static) if ((int64_t)rows * (heads * dim + width) > kAloneValues)
  for (int row = 0; row < rows; ++row) {
    float* x = qkv + row * stride;
    for (int head = 0; head < heads + rotation->kv_heads; ++head)
      turn(x + head * dim, dim, rotation->norm ? rotation->norm + head * dim : nullptr, rotation->eps, cos + row * dim,
           sin + row * dim);
    if (width) {
      std::memcpy(keys + slots[row] * width, x + heads * dim, width * sizeof(float));
      std::memcpy(values + slots[row] * width, x + heads * dim + width, width * sizeof(float));
    }
  }
}
