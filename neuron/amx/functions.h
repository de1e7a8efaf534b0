// float32 functions of 16 values, to about one unit in the last place or two.
#pragma once

#include <immintrin.h>

namespace amx {

constexpr float kLog2E = 1.44269504f;

// 2^x: 2^n * 2^r, n the integer below x, 2^r by a polynomial (relative error 1.5e-7). Far below 0: 0.
inline __m512 exp2_16(__m512 x) {
  const __m512 r = _mm512_reduce_ps(x, 1);          // x less the integer below it
  __m512 p = _mm512_set1_ps(1.87757658e-3f);
  for (const float factor : {8.98934063e-3f, 5.58263175e-2f, 2.40153611e-1f, 6.93153083e-1f, 9.99999940e-1f})
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(factor));
  return _mm512_scalef_ps(p, x);                    // p * 2^n
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

// GELU itself, x / 2 * (1 + erf(x / sqrt(2))). The error function to 1.5e-7: 1 less a polynomial in 1 / (1 + p * |x|) times
// e^(-x^2).
inline __m512 erf_gelu16(__m512 x) {
  const __m512 half = _mm512_mul_ps(x, _mm512_set1_ps(0.5f)), one = _mm512_set1_ps(1.f);
  const __m512 z = _mm512_mul_ps(_mm512_abs_ps(x), _mm512_set1_ps(0.707106781f));
  const __m512 t = _mm512_div_ps(one, _mm512_fmadd_ps(z, _mm512_set1_ps(0.3275911f), one));
  __m512 p = _mm512_set1_ps(1.061405429f);
  for (const float factor : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f})
    p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(factor));
  const __m512 tail = _mm512_mul_ps(_mm512_mul_ps(p, t), exp2_16(_mm512_mul_ps(_mm512_mul_ps(z, z), _mm512_set1_ps(-kLog2E))));
  return _mm512_fmadd_ps(_mm512_abs_ps(half), _mm512_sub_ps(one, tail), half);
}

}  // namespace amx
