// Operands of the AMX products, and the one product that everything here is made of.
//
// A float32 value x is kept as the sum of two bfloat16 values, high = round(x) and low = round(x - high): 16 bits of
// mantissa. A product of two values is high * high + high * low + low * high, summed in float32; what is left out is
// below 2^-16 of the product.
//
// Operands lie in memory as tiles read them. K is the dimension that is summed over, in steps of 32:
//   left   [K / 32][high, low][2][16 rows][32 of K]                 32 rows
//   right  [K / 32][high, low][2][16 pairs of K][16 columns][2]     32 columns
// A step is 4,096 bytes of each, as many as 32 x 32 values in float32; 2,048 of a right operand without low halves, whose
// values are bfloat16 numbers.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace amx {

constexpr int kTile = 512;                          // values of a tile
constexpr int kStep = 4 * kTile;                    // values of a step

// The halves of two vectors.
struct Halves {
  __m512i high, low;
};

namespace detail {

inline __m512i upper() { return _mm512_set1_epi32(0xffff0000); }

// Its upper half is x as a bfloat16: ties go away from 0, and NaN stays NaN unless its highest 7 bits of payload are all
// set, which no operation makes.
inline __m512i rounded(__m512 x) { return _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000)); }

template <typename Join>
inline Halves split(__m512 a, __m512 b, Join join) {
  const __m512i high_a = rounded(a), high_b = rounded(b);
  auto rest = [](__m512 x, __m512i high) {
    return rounded(_mm512_sub_ps(x, _mm512_castsi512_ps(_mm512_and_si512(high, upper()))));
  };
  return {join(high_a, high_b), join(rest(a, high_a), rest(b, high_b))};
}

}  // namespace detail

// One vector's values behind the other's.
inline Halves split(__m512 first, __m512 second) {
  const __m512i odd = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25, 23,
                                       21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  return detail::split(first, second, [=](__m512i a, __m512i b) { return _mm512_permutex2var_epi16(a, odd, b); });
}

// Each value beside the other vector's.
inline Halves split_pairs(__m512 even, __m512 odd) {
  return detail::split(even, odd, [](__m512i a, __m512i b) {
    return _mm512_ternarylogic_epi32(_mm512_srli_epi32(a, 16), b, detail::upper(), 0xf8);
  });
}

// One row of a left operand: 32 of K at a time.
inline void store_left(Half* operand, int row, int step, __m512 first, __m512 second) {
  Half* at = operand + step * kStep + (row >> 4) * kTile + (row & 15) * 32;
  const Halves halves = split(first, second);
  _mm512_storeu_si512(at, halves.high);
  _mm512_storeu_si512(at + 2 * kTile, halves.low);
}

// Two rows of K of a right operand, `pair` and the next: 16 columns.
inline void store_right(Half* operand, int pair, int half, __m512 even, __m512 odd) {
  Half* at = operand + (pair >> 4) * kStep + half * kTile + (pair & 15) * 32;
  const Halves halves = split_pairs(even, odd);
  _mm512_storeu_si512(at, halves.high);
  _mm512_storeu_si512(at + 2 * kTile, halves.low);
}

// 16 rows of 16 values of 4 bytes become its columns.
inline void transpose(__m512i* rows) {
  __m512i a[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      rows[i + 2 * j] = _mm512_unpacklo_epi64(a[i + j], a[i + j + 2]);
      rows[i + 2 * j + 1] = _mm512_unpackhi_epi64(a[i + j], a[i + j + 2]);
    }
  for (int i = 0; i < 8; ++i) {                     // lanes of 4 values, as a 4 x 4 matrix for each row of a quarter
    const int from = i / 4 * 8 + i % 4, to = from;
    a[to] = _mm512_shuffle_i32x4(rows[from], rows[from + 4], 0x88);
    a[to + 4] = _mm512_shuffle_i32x4(rows[from], rows[from + 4], 0xdd);
  }
  for (int i = 0; i < 8; ++i) {
    rows[i] = _mm512_shuffle_i32x4(a[i], a[i + 8], 0x88);
    rows[i + 8] = _mm512_shuffle_i32x4(a[i], a[i + 8], 0xdd);
  }
}

struct alignas(64) TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

// Tiles of this thread while the object lives, in which it takes denormal numbers for 0, as the tiles do. rows: of left
// operands, 1 to 16.
class Tiles {
 public:
  explicit Tiles(int rows = 16) : control_(_mm_getcsr()) {
    _mm_setcsr(control_ | 0x8040);
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) {
      config.bytes[tile] = 64;
      config.rows[tile] = tile < 6 ? rows : 16;     // 0 to 3 sums, 4 and 5 left, 6 and 7 right
    }
    _tile_loadconfig(&config);
  }
  ~Tiles() {
    _tile_release();
    _mm_setcsr(control_);
  }
  Tiles(const Tiles&) = delete;

 private:
  const unsigned control_;
};

// Sums of products stay in tiles between these calls: kRows and kColumns are tiles of 16 rows and of 16 columns, 1 or 2,
// and where they lie in memory is [16 * kRows][32]. kHalves: of the right operand. How many there are of each changes
// no bit of a sum.
template <int kRows = 2, int kColumns = 2>
inline void zero_sums() {
  _tile_zero(0);
  if constexpr (kColumns == 2) _tile_zero(1);
  if constexpr (kRows == 2) _tile_zero(2);
  if constexpr (kRows == 2 && kColumns == 2) _tile_zero(3);
}

template <int kRows = 2, int kColumns = 2>
inline void load_sums(const float* sums) {
  _tile_loadd(0, sums, 128);
  if constexpr (kColumns == 2) _tile_loadd(1, sums + 16, 128);
  if constexpr (kRows == 2) _tile_loadd(2, sums + 512, 128);
  if constexpr (kRows == 2 && kColumns == 2) _tile_loadd(3, sums + 528, 128);
}

template <int kRows = 2, int kColumns = 2>
inline void store_sums(float* sums) {
  _tile_stored(0, sums, 128);
  if constexpr (kColumns == 2) _tile_stored(1, sums + 16, 128);
  if constexpr (kRows == 2) _tile_stored(2, sums + 512, 128);
  if constexpr (kRows == 2 && kColumns == 2) _tile_stored(3, sums + 528, 128);
}

template <int kRows = 2, int kColumns = 2, int kHalves = 2>
inline void add_products(const Half* left, const Half* right, int steps) {
  asm volatile("" ::: "memory");  // tile loads do not tell the compiler that they read memory
  auto load_left = [](const Half* at) {
    _tile_loadd(4, at, 64);
    if constexpr (kRows == 2) _tile_loadd(5, at + kTile, 64);
  };
  auto load_right = [](const Half* at) {
    _tile_loadd(6, at, 64);
    if constexpr (kColumns == 2) _tile_loadd(7, at + kTile, 64);
  };
  auto multiply = [] {
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kColumns == 2) _tile_dpbf16ps(1, 4, 7);
    if constexpr (kRows == 2) _tile_dpbf16ps(2, 5, 6);
    if constexpr (kRows == 2 && kColumns == 2) _tile_dpbf16ps(3, 5, 7);
  };
  for (int step = 0; step < steps; ++step, left += kStep, right += kHalves * 2 * kTile) {
    load_left(left);                                // high
    if constexpr (kHalves == 2) {
      load_right(right + 2 * kTile);                // low
      multiply();
    }
    load_right(right);                              // high
    multiply();
    load_left(left + 2 * kTile);                    // low
    multiply();
  }
}

// sums = left [16 * kRows, K] * right [K, 16 * kColumns].
template <int kRows = 2, int kColumns = 2, int kHalves = 2>
inline void multiply(const Half* left, const Half* right, int steps, float* sums) {
  zero_sums<kRows, kColumns>();
  add_products<kRows, kColumns, kHalves>(left, right, steps);
  store_sums<kRows, kColumns>(sums);
}

}  // namespace amx
