// float32 functions of 16 values, to about one unit in the last place or two.
#pragma once

#include <immintrin.h>

namespace amx {

constexpr float kLog2E = 1.44269504f;

// 2^x: 2^n * 2^r, r within 1/2 of 0, 2^r by the series of exp(r * ln 2). Below the smallest normal number: 0.
inline __m512 exp2_16(__m512 x) {
  x = _mm512_max_ps(x, _mm512_set1_ps(-150.f));
  const __m512 n = _mm512_roundscale_ps(x, 8), r = _mm512_sub_ps(x, n);
  __m512 p = _mm512_set1_ps(1.540353e-4f);
  for (const float factor : {1.333356e-3f, 9.618129e-3f, 5.550411e-2f, 2.402265e-1f, 6.931472e-1f, 1.f})
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(factor));
  return _mm512_scalef_ps(p, n);
}

inline __m512 sigmoid16(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.f);
  return _mm512_div_ps(one, _mm512_add_ps(one, exp2_16(_mm512_mul_ps(x, _mm512_set1_ps(-kLog2E)))));
}

inline __m512 silu16(__m512 x) { return _mm512_mul_ps(x, sigmoid16(x)); }

// GELU's approximation by tanh, x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 * x^3)).
inline __m512 gelu16(__m512 x) {
  const __m512 inner = _mm512_fmadd_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(0.0713548163f), _mm512_set1_ps(1.5957691216f));
  return _mm512_mul_ps(x, sigmoid16(_mm512_mul_ps(x, inner)));
}

}  // namespace amx
