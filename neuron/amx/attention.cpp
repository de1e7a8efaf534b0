// Attention of queries over the keys and values of their own sequence, which are read where they lie.
//
// A span is a sequence's queries, which follow one another, and its context. Scores are computed transposed, [keys,
// queries]: so is the softmax, 16 queries at a time, and its result is the right operand of the product with values.
#include <omp.h>

#include <algorithm>
#include <vector>

#include "functions.h"
#include "tiles.h"

using namespace amx;

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

namespace {

const float kLowest = -3.4e38f;
constexpr int64_t kAloneProducts = 1 << 19;         // that one thread computes faster than two wake up

// Memory of one thread, which grows and is kept.
template <typename T>
T* memory(std::vector<T>& held, int64_t size) {
  if ((int64_t)held.size() < size + 64) held.resize(size + 64);
  return (T*)(((uintptr_t)held.data() + 63) & ~(uintptr_t)63);
}

int up(int64_t n) { return (n + 31) / 32; }

// 32 values of a row, zeros behind its end.
inline __m512 part(const float* row, int at, int size) {
  return at < size ? _mm512_loadu_ps(row + at) : _mm512_setzero_ps();
}

// A value of each of 32 queries.
struct Queries {
  explicit Queries(float value) : half{_mm512_set1_ps(value), _mm512_set1_ps(value)} {}
  void raise(const float* to) {
    half[0] = _mm512_max_ps(half[0], _mm512_load_ps(to));
    half[1] = _mm512_max_ps(half[1], _mm512_load_ps(to + 16));
  }
  __m512 half[2];
};

class SpanOfHead {
 public:
  SpanOfHead(const Heads& heads, const Span& span, const int64_t* slots, int kv_head)
      : heads_(heads), span_(span), slots_(slots + span.slot), kv_head_(kv_head), dim_steps_(up(heads.dim)),
        key_steps_(up(span.num_slots)) {}

  // Keys as left operands, 32 keys each, and the values, transposed, as left operands of 32 dimensions each.
  void read() {
    thread_local std::vector<Half> keys, values;
    const int64_t size = (int64_t)key_steps_ * dim_steps_ * kStep;
    keys_ = memory(keys, size);
    values_ = memory(values, size);
    for (int step = 0; step < key_steps_; ++step) {
      const float *k[32], *v[32];
      for (int i = 0; i < 32; ++i) {
        const int64_t slot = slots_[std::min<int64_t>(step * 32 + i, span_.num_slots - 1)];
        k[i] = heads_.k + slot * heads_.k_stride + kv_head_ * heads_.dim;
        v[i] = heads_.v + slot * heads_.v_stride + kv_head_ * heads_.dim;
      }
      for (int dims = 0; dims < dim_steps_; ++dims) {
        Half* to = keys_ + (int64_t)step * dim_steps_ * kStep;
        for (int i = 0; i < 32; ++i)
          store_left(to, i, dims, part(k[i], dims * 32, heads_.dim), part(k[i], dims * 32 + 16, heads_.dim));
        for (int half = 0; half < 2; ++half)
          store_transposed(v, dims * 32 + half * 16, values_ + ((int64_t)dims * key_steps_ + step) * kStep + half * kTile);
      }
    }
  }

  // Up to 32 queries of one head, from `first` of the span on.
  void attend(int head, int64_t first) {
    const int count = std::min<int64_t>(32, span_.num_rows - first);
    const int64_t before = span_.num_slots - span_.num_rows;
    const int64_t seen = heads_.causal ? before + first + count : span_.num_slots;
    const int steps = up(seen);
    thread_local std::vector<Half> queries, weights;
    thread_local std::vector<float> scores;
    Half* q = memory(queries, dim_steps_ * kStep);
    Half* w = memory(weights, (int64_t)steps * kStep);
    float* s = memory(scores, (int64_t)steps * 1024);
    read_queries(head, first, count, q);
    Queries highest(kLowest), sums(0.f);
    for (int step = 0; step < steps; ++step) {
      multiply(keys_ + (int64_t)step * dim_steps_ * kStep, q, dim_steps_, s + step * 1024);
      hide(s + step * 1024, seen - step * 32, (heads_.causal ? before + first : seen) - step * 32);
      for (int key = 0; key < 32; ++key) highest.raise(s + step * 1024 + key * 32);
    }
    for (int step = 0; step < steps; ++step) weigh(s + step * 1024, highest, w + (int64_t)step * kStep, sums);
    alignas(64) float block[1024], total[32];
    _mm512_store_ps(total, sums.half[0]);
    _mm512_store_ps(total + 16, sums.half[1]);
    float* out = heads_.out + ((span_.row + first) * heads_.heads + head) * heads_.dim;
    for (int step = 0; step < dim_steps_; ++step) {
      multiply(values_ + (int64_t)step * key_steps_ * kStep, w, steps, block);
      const int size = std::min(32, heads_.dim - step * 32);
      for (int query = 0; query < count; ++query) {
        float* row = out + (int64_t)query * heads_.heads * heads_.dim + step * 32;
        const float share = 1.f / total[query];
        for (int i = 0; i < size; ++i) row[i] = block[i * 32 + query] * share;
      }
    }
  }

 private:
  void read_queries(int head, int64_t first, int count, Half* q) {
    const float* row = heads_.q + (span_.row + first) * heads_.q_stride + head * heads_.dim;
    const __m512 scale = _mm512_set1_ps(heads_.scale * kLog2E);       // the softmax takes powers of 2
    const __m512i lanes = _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                                             _mm512_set1_epi32(16));
    for (int query = 0; query < 32; ++query) {
      for (int step = 0; step < dim_steps_; ++step) {
        Half* to = q + step * kStep + (query >> 4) * kTile + (query & 15) * 2;
        __m512 a = _mm512_setzero_ps(), b = a;
        if (query < count) {
          a = _mm512_mul_ps(part(row, step * 32, heads_.dim), scale);
          b = _mm512_mul_ps(part(row, step * 32 + 16, heads_.dim), scale);
        }
        const Split first_half = split(a), second_half = split(b);
        _mm512_i32scatter_epi32(to, lanes, join(first_half.high, second_half.high), 4);
        _mm512_i32scatter_epi32(to + 2 * kTile, lanes, join(first_half.low, second_half.low), 4);
      }
      row += heads_.q_stride;
    }
  }

  // 16 dimensions of 32 rows as 16 rows of a left operand.
  void store_transposed(const float* const* rows, int dim, Half* to) const {
    __m512i high[16], low[16];
    for (int pair = 0; pair < 16; ++pair) {
      const Pairs halves = split_pairs(part(rows[2 * pair], dim, heads_.dim), part(rows[2 * pair + 1], dim, heads_.dim));
      high[pair] = halves.high, low[pair] = halves.low;
    }
    transpose(high);
    transpose(low);
    for (int i = 0; i < 16; ++i) {
      _mm512_storeu_si512(to + i * 32, high[i]);
      _mm512_storeu_si512(to + 2 * kTile + i * 32, low[i]);
    }
  }

  static __m512i join(__m256i a, __m256i b) { return _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1); }

  // Scores of a step, [32 keys][32], that a query does not see, to the lowest: query i sees `all` + i + 1 of the keys,
  // and no more than `seen`.
  static void hide(float* s, int64_t seen, int64_t all) {
    for (int64_t key = std::max<int64_t>(0, std::min(seen, all + 1)); key < 32; ++key) {
      const int64_t first = key < seen ? key - all : 32;                    // query that sees it
      const uint32_t hidden = first <= 0 ? 0 : first < 32 ? (1u << first) - 1 : ~0u;
      _mm512_mask_storeu_ps(s + key * 32, hidden & 0xffff, _mm512_set1_ps(kLowest));
      _mm512_mask_storeu_ps(s + key * 32 + 16, hidden >> 16, _mm512_set1_ps(kLowest));
    }
  }

  // Scores of a step to their powers of 2, less each query's highest, as a step of a right operand.
  static void weigh(const float* s, const Queries& highest, Half* w, Queries& sums) {
    for (int key = 0; key < 32; key += 2, s += 64)
      for (int half = 0; half < 2; ++half) {
        const __m512 even = exp2_16(_mm512_sub_ps(_mm512_load_ps(s + half * 16), highest.half[half]));
        const __m512 odd = exp2_16(_mm512_sub_ps(_mm512_load_ps(s + half * 16 + 32), highest.half[half]));
        sums.half[half] = _mm512_add_ps(sums.half[half], _mm512_add_ps(even, odd));
        store_right(w, key / 2, half, even, odd);
      }
  }

  const Heads& heads_;
  const Span& span_;
  const int64_t* slots_;
  const int kv_head_, dim_steps_, key_steps_;
  Half *keys_ = nullptr, *values_ = nullptr;
};

// One query of each head of a group over its context, in float32: all of it is reading keys and values once.
void attend_one(const Heads& heads, const Span& span, const int64_t* slots, int kv_head) {
  constexpr int kTogether = 4;                      // heads
  thread_local std::vector<float> scores;
  const int dim = heads.dim, group = heads.heads / heads.kv_heads;
  const int64_t count = span.num_slots;
  float* s = memory(scores, count * kTogether);
  for (int done = 0; done < group; done += kTogether) {
    const int together = std::min(kTogether, group - done), head = kv_head * group + done;
    const float* q = heads.q + span.row * heads.q_stride + head * dim;
    float* out = heads.out + (span.row * heads.heads + head) * dim;
    float highest[kTogether], sum[kTogether] = {};
    std::fill_n(highest, kTogether, kLowest);
    for (int64_t key = 0; key < count; ++key) {
      const float* k = heads.k + slots[span.slot + key] * heads.k_stride + kv_head * dim;
      __m512 dot[kTogether] = {};
      for (int i = 0; i < dim; i += 16) {
        const __m512 value = _mm512_loadu_ps(k + i);
        for (int h = 0; h < kTogether; ++h)
          if (h < together) dot[h] = _mm512_fmadd_ps(value, _mm512_loadu_ps(q + h * dim + i), dot[h]);
      }
      for (int h = 0; h < together; ++h) {
        const float score = _mm512_reduce_add_ps(dot[h]) * heads.scale * kLog2E;
        s[h * count + key] = score;
        highest[h] = std::max(highest[h], score);
      }
    }
    for (int h = 0; h < together; ++h) {
      __m512 total = _mm512_setzero_ps();
      for (int64_t key = 0; key < count; key += 16) {
        const __mmask16 mask = count - key < 16 ? (1u << (count - key)) - 1 : 0xffff;
        const __m512 score = _mm512_maskz_loadu_ps(mask, s + h * count + key);
        const __m512 weight = _mm512_maskz_mov_ps(mask, exp2_16(_mm512_sub_ps(score, _mm512_set1_ps(highest[h]))));
        _mm512_mask_storeu_ps(s + h * count + key, mask, weight);
        total = _mm512_add_ps(total, weight);
      }
      sum[h] = _mm512_reduce_add_ps(total);
    }
    for (int i = 0; i < dim; i += 16) {
      __m512 result[kTogether] = {};
      for (int64_t key = 0; key < count; ++key) {
        const __m512 v = _mm512_loadu_ps(heads.v + slots[span.slot + key] * heads.v_stride + kv_head * dim + i);
        for (int h = 0; h < kTogether; ++h)
          if (h < together) result[h] = _mm512_fmadd_ps(v, _mm512_set1_ps(s[h * count + key]), result[h]);
      }
      for (int h = 0; h < together; ++h)
        _mm512_storeu_ps(out + h * dim + i, _mm512_mul_ps(result[h], _mm512_set1_ps(1.f / sum[h])));
    }
  }
}

}  // namespace

// Rows of `out` that belong to no span are left as they are.
extern "C" void attention(const Heads* heads, const Span* spans, int num_spans, const int64_t* slots) {
  int64_t scores = 0;
  for (int which = 0; which < num_spans; ++which) scores += spans[which].num_rows * spans[which].num_slots;
#pragma omp parallel if (scores * heads->heads * heads->dim > kAloneProducts)
  {
    const Tiles tiles;
#pragma omp for schedule(dynamic) collapse(2)
    for (int which = 0; which < num_spans; ++which)
      for (int kv_head = 0; kv_head < heads->kv_heads; ++kv_head) {
        const Span& span = spans[which];
        if (span.num_rows == 1) {
          attend_one(*heads, span, slots, kv_head);
          continue;
        }
        SpanOfHead work(*heads, span, slots, kv_head);
        work.read();
        const int group = heads->heads / heads->kv_heads;
        for (int head = kv_head * group; head < (kv_head + 1) * group; ++head)
          for (int64_t first = 0; first < span.num_rows; first += 32) work.attend(head, first);
      }
  }
}
