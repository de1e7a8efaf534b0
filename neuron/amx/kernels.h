// The kernels, and what they are told.
#pragma once

#include <cstdint>

namespace amx {
using Half = uint16_t;                              // a bfloat16
}

enum Before { kNothing, kRmsNorm, kLayerNorm, kGelu, kSwiGlu, kErfGelu };

struct Linear {
  const amx::Half* weight;                          // [N / 32] right operands of K
  const float *bias, *norm_weight, *norm_bias;      // [N], [K], [K], or null
  float eps;
  int32_t inputs, outputs, before;                  // K, N: multiples of 32
  int32_t halves;                                   // of a weight: 1 where all are bfloat16 numbers
};

struct Rotation {
  const float* norm;                                // [turned heads, dim]: an RMS norm before; or null
  float eps;
  int32_t heads, kv_heads, dim;                     // queries; keys and as many values behind them. dim: times 32
};

struct Heads {
  const float *q, *k, *v;                           // [rows, heads, dim], [slots, kv heads, dim]
  float* out;                                       // [rows, heads, dim]
  int64_t q_stride, k_stride, v_stride;             // values from one row, or slot, to the next
  int32_t heads, kv_heads, dim;                     // dim: a multiple of 16
  int32_t causal;                                   // the queries are the context's last tokens
  float scale;
};

struct Span {
  int64_t row, num_rows, slot, num_slots;           // of q; of the list of slots
};

extern "C" {

// y = residual + before(x) * W^T + bias. x [rows, K] with `stride` values between rows, [rows, 2 * K] for SwiGLU: gate,
// up. residual, y: [rows, N].
void linear(const Linear* map, const float* x, int rows, int stride, const float* residual, float* y);

// Heads are normed and turned in place, keys and values go to their slots. qkv: `stride` values from one row to the next.
// cos, sin [rows, dim]. keys, values [slots, kv heads, dim].
void rotate(const Rotation* rotation, float* qkv, int rows, int64_t stride, const float* cos, const float* sin,
            float* keys, float* values, const int64_t* slots);

// Rows that belong to no span are not written.
void attention(const Heads* heads, const Span* spans, int num_spans, const int64_t* slots);
}
