// Attention of queries over the keys and values of their own sequence, which are read where they lie.
//
// A span is a sequence's queries, which follow one another, and its context. Scores are computed transposed, [keys,
// queries]: so is the softmax, 16 queries at a time, and its result is the right operand of the product with values.
#include <omp.h>

#include <algorithm>
#include <vector>

#include "functions.h"
#include "kernels.h"
#include "tiles.h"

using namespace amx;

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

// Queries that are computed together, at most 32, each q_step values behind the one before, its result out_step.
struct Queries {
  const float* q;
  float* out;
  int64_t q_step, out_step;
  int count;
  int64_t seen, more;                               // keys that the first query sees, and more that each next one does
};

// A value of each query: 16 times kHalf of them.
template <int kHalf>
struct PerQuery {
  explicit PerQuery(float value) {
    for (__m512& each : half) each = _mm512_set1_ps(value);
  }
  void raise(const float* to) {
    for (int i = 0; i < kHalf; ++i) half[i] = _mm512_max_ps(half[i], _mm512_load_ps(to + i * 16));
  }
  __m512 half[kHalf];
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

  // 16 queries in half the time of 32, to the same bits.
  void attend(const Queries& queries) { queries.count > 16 ? attend<2>(queries) : attend<1>(queries); }

 private:
  template <int kHalf>
  void attend(const Queries& queries) {
    const int64_t seen = queries.seen + (queries.count - 1) * queries.more;
    const int steps = up(seen);
    thread_local std::vector<Half> operand, weights;
    thread_local std::vector<float> scores, results;
    Half* q = memory(operand, dim_steps_ * kStep);
    Half* w = memory(weights, kStep);
    float* s = memory(scores, (int64_t)steps * 1024);
    float* result = memory(results, dim_steps_ * 1024);
    read_queries<kHalf>(queries, q);
    PerQuery<kHalf> highest(kLowest), sums(0.f);
    for (int step = 0; step < steps; ++step) {
      float* score = s + (int64_t)step * 1024;
      multiply<2, kHalf>(keys_ + (int64_t)step * dim_steps_ * kStep, q, dim_steps_, score);
      hide(score, seen - step * 32, queries.seen - 1 - step * 32, queries.more);
      for (int key = 0; key < 32; ++key) highest.raise(score + key * 32);
    }
    const bool stay = dim_steps_ == 1;              // the results, in tiles
    for (int step = 0; step < steps; ++step) {      // the tiles' products and the next step's powers overlap
      weigh(s + (int64_t)step * 1024, highest, w, sums);
      for (int dims = 0; dims < dim_steps_; ++dims) {
        if (step == 0) zero_sums<2, kHalf>();
        else if (!stay) load_sums<2, kHalf>(result + dims * 1024);
        add_products<2, kHalf>(values_ + ((int64_t)dims * key_steps_ + step) * kStep, w, 1);
        if (!stay || step == steps - 1) store_sums<2, kHalf>(result + dims * 1024);
      }
    }
    for (int half = 0; half < kHalf; ++half) {
      const __m512 share = _mm512_div_ps(_mm512_set1_ps(1.f), sums.half[half]);
      const int count = std::min(16, queries.count - half * 16);
      for (int dim = 0; dim < heads_.dim; dim += 16) {
        __m512i rows[16];
        for (int i = 0; i < 16; ++i) {
          const __m512 row = _mm512_load_ps(result + (dim + i) * 32 + half * 16);
          rows[i] = _mm512_castps_si512(_mm512_mul_ps(row, share));
        }
        transpose(rows);
        float* out = queries.out + half * 16 * queries.out_step + dim;
        for (int i = 0; i < count; ++i) _mm512_storeu_si512(out + i * queries.out_step, rows[i]);
      }
    }
  }

  template <int kHalf>
  void read_queries(const Queries& queries, Half* q) {
    const __m512 scale = _mm512_set1_ps(heads_.scale * kLog2E);       // the softmax takes powers of 2
    for (int half = 0; half < kHalf; ++half)
      for (int step = 0; step < dim_steps_; ++step) {
        __m512i high[16], low[16];
        for (int i = 0; i < 16; ++i) {
          const int query = std::min(half * 16 + i, queries.count - 1);
          const float* row = queries.q + query * queries.q_step;
          const Halves halves = split(_mm512_mul_ps(part(row, step * 32, heads_.dim), scale),
                                      _mm512_mul_ps(part(row, step * 32 + 16, heads_.dim), scale));
          high[i] = halves.high, low[i] = halves.low;
        }
        store_columns(high, low, q + step * kStep + half * kTile);
      }
  }

  // 16 dimensions of 32 rows as 16 rows of a left operand.
  void store_transposed(const float* const* rows, int dim, Half* to) const {
    __m512i high[16], low[16];
    for (int pair = 0; pair < 16; ++pair) {
      const Halves halves = split_pairs(part(rows[2 * pair], dim, heads_.dim), part(rows[2 * pair + 1], dim, heads_.dim));
      high[pair] = halves.high, low[pair] = halves.low;
    }
    store_columns(high, low, to);
  }

  // 16 rows of 16 pairs, of both halves, as the columns of a tile each.
  static void store_columns(__m512i* high, __m512i* low, Half* to) {
    transpose(high);
    transpose(low);
    for (int i = 0; i < 16; ++i) {
      _mm512_store_si512(to + i * 32, high[i]);
      _mm512_store_si512(to + 2 * kTile + i * 32, low[i]);
    }
  }

  // Scores of a step, [32 keys][32], that a query does not see, to the lowest: query i sees keys up to last + i * more,
  // and less than `seen`.
  static void hide(float* s, int64_t seen, int64_t last, int64_t more) {
    for (int64_t key = std::max<int64_t>(0, std::min(seen, last + 1)); key < 32; ++key) {
      const int64_t first = key < seen && more ? key - last : 32;           // query that sees it
      const uint32_t hidden = first <= 0 ? 0 : first < 32 ? (1u << first) - 1 : ~0u;
      _mm512_mask_storeu_ps(s + key * 32, hidden & 0xffff, _mm512_set1_ps(kLowest));
      _mm512_mask_storeu_ps(s + key * 32 + 16, hidden >> 16, _mm512_set1_ps(kLowest));
    }
  }

  // Scores of a step to their powers of 2, less each query's highest, as a step of a right operand.
  template <int kHalf>
  static void weigh(const float* s, const PerQuery<kHalf>& highest, Half* w, PerQuery<kHalf>& sums) {
    for (int key = 0; key < 32; key += 2, s += 64)
      for (int half = 0; half < kHalf; ++half) {
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

}  // namespace

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
        SpanOfHead work(*heads, span, slots, kv_head);
        work.read();
        const int64_t out_stride = heads->heads * heads->dim, before = span.num_slots - span.num_rows;
        const int group = heads->heads / heads->kv_heads;
        const float* q = heads->q + span.row * heads->q_stride;
        float* out = heads->out + span.row * out_stride;
        if (span.num_rows == 1) {                   // the heads of its group together
          for (int head = kv_head * group; head < (kv_head + 1) * group; head += 32) {
            const int count = std::min(32, (kv_head + 1) * group - head);
            work.attend({q + head * heads->dim, out + head * heads->dim, heads->dim, heads->dim, count, span.num_slots, 0});
          }
          continue;
        }
        for (int head = kv_head * group; head < (kv_head + 1) * group; ++head)
          for (int64_t row = 0; row < span.num_rows; row += 32) {
            const int count = std::min<int64_t>(32, span.num_rows - row);
            const int64_t seen = heads->causal ? before + row + 1 : span.num_slots;
            work.attend({q + row * heads->q_stride + head * heads->dim, out + row * out_stride + head * heads->dim,
                         heads->q_stride, out_stride, count, seen, heads->causal});
          }
      }
  }
}
