// Pre-norm transformer layers, one behind the other: the kernels in the order in which a layer calls them.
#include <cmath>
#include <cstring>

#include "kernels.h"

struct Layer {
  const Linear *qkv, *out, *up, *down;
  const float* norm;                                // of queries and keys, as Rotation has it; or null
  float eps;
  int32_t heads, kv_heads, dim;
  float *keys, *values;                             // [slots, kv heads, dim]; null: the rows' own, as many as queries
};

struct Pass {
  float *qkv, *attended, *up, *middle;              // [rows, outputs of what they are named for]; middle [rows, hidden]
  const float *cos, *sin;                           // [rows, dim]
  const int64_t* write_slots;                       // [rows]
  const Span* spans;
  const int64_t* slots;
  int32_t rows, num_spans, num_attended, causal;    // num_attended: rows before the first that belongs to no span
};

namespace {

void add(float* y, const float* x, int64_t count) {
  for (int64_t i = 0; i < count; ++i) y[i] += x[i];
}

void layer(const Layer& own, const Pass& pass, const float* x, float* y) {
  const int width = own.qkv->outputs, queries = own.heads * own.dim, hidden = own.qkv->inputs;
  const bool stores = own.keys != nullptr;
  linear(own.qkv, x, pass.rows, hidden, nullptr, pass.qkv);
  const Rotation rotation{own.norm, own.eps, stores ? own.heads : 2 * own.heads, stores ? own.kv_heads : 0, own.dim};
  rotate(&rotation, pass.qkv, pass.rows, width, pass.cos, pass.sin, own.keys, own.values, pass.write_slots);
  std::memset(pass.attended + (int64_t)pass.num_attended * queries, 0,
              (int64_t)(pass.rows - pass.num_attended) * queries * sizeof(float));
  const int64_t stride = stores ? own.kv_heads * own.dim : width;
  const Heads heads{pass.qkv,
                    stores ? own.keys : pass.qkv + queries,
                    stores ? own.values : pass.qkv + 2 * queries,
                    pass.attended,
                    width,
                    stride,
                    stride,
                    own.heads,
                    own.kv_heads,
                    own.dim,
                    pass.causal,
                    (float)(1 / std::sqrt((double)own.dim))};
  attention(&heads, pass.spans, pass.num_spans, pass.slots);
  linear(own.out, pass.attended, pass.rows, queries, x, pass.middle);
  linear(own.up, pass.middle, pass.rows, hidden, nullptr, pass.up);
  linear(own.down, pass.up, pass.rows, own.up->outputs, pass.middle, y);
}

}  // namespace

// x, y [rows, hidden]. added: of each layer what is added behind it, [rows, hidden] or null.
extern "C" void layers(const Layer* layers, int count, const Pass* pass, const float* x, const float* const* added,
                       float* y) {
  for (int index = 0; index < count; ++index) {
    layer(layers[index], *pass, index ? y : x, y);
    if (added[index]) add(y, added[index], (int64_t)pass->rows * layers[index].qkv->inputs);
  }
}
