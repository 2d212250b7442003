// The structs that cross the C interface.
#pragma once

#include <cstdint>

extern "C" {

// Mirrored field by field in abi.py.
struct TreadleSpec {
  std::int32_t layers, hidden, heads, kv_heads, head_dim, intermediate, vocab;
  std::int32_t positions;  // rows of cos and sin
  std::int32_t threads;
  std::int32_t kernel;  // 0 best, 1 avx512_bf16, 2 amx
  float eps;
  float scale;  // of attention scores; keys are multiplied by it
  std::int64_t kv_blocks;
  void* k;
  void* v;
  const void* cos;  // bf16 [positions, head_dim / 2]
  const void* sin;
};

// Pointers to bf16; null where the model has no such tensor.
struct TreadleLayer {
  const void *norm1, *q, *k, *v, *q_bias, *k_bias, *v_bias, *q_norm, *k_norm, *o;
  const void *norm2, *gate, *up, *down;
};

struct TreadleWeights {
  const void *embedding, *norm, *head;
  const TreadleLayer* layers;
};

struct TreadleCall {
  std::int32_t rows, table_width;
  const std::int64_t* ids;
  const std::int32_t* positions;
  const std::int32_t* tables;   // [rows, table_width]
  std::int32_t num_outputs;     // rows that get logits
  const std::int64_t* outputs;  // which, or null for all in order
  float* logits;                // [num_outputs, vocab], or null
  const float* temperature;     // [num_outputs]; null = do not sample
  const double* uniform;
  std::int64_t* next;
  float* logprobs;
  float* entropies;
};

}  // extern "C"
