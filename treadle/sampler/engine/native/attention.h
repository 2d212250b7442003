// Attention of one row over its blocks of the KV cache.
//
// One call serves the query heads that share a KV head, so K and V are read once for all of them.
// Keys lie in the cache already multiplied by the scale of the scores. Scores are rounded to bf16,
// the softmax is fp32, probabilities and outputs are rounded: all as in the training forward
// (models/attention.py). The order of additions depends on the row's own context alone.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "gemm.h"

namespace treadle {

constexpr int kPositions = 16;  // positions of a KV block
constexpr int kHeads = 4;       // query heads of one pass at most

struct Cache {
  bf16* k = nullptr;  // [layers, blocks, kv_heads, 16, head_dim], scaled
  bf16* v = nullptr;
  std::size_t blocks = 0;
  int kv_heads = 0;
  int head_dim = 0;

  std::size_t head_size() const { return std::size_t(kPositions) * head_dim; }
  std::size_t block_size() const { return head_size() * kv_heads; }
  // Offset of a KV head of a layer in block 0.
  std::size_t at(int layer, int kv_head) const {
    return block_size() * blocks * layer + head_size() * kv_head;
  }
};

// One row's view of one KV head.
struct Span {
  const bf16* k = nullptr;  // of the layer and KV head, block 0
  const bf16* v = nullptr;
  std::size_t block_step = 0;  // elements from block to block
  const std::int32_t* table = nullptr;
  int context = 0;  // valid positions

  const bf16* keys(int block) const { return k + block_step * table[block]; }
  const bf16* values(int block) const { return v + block_step * table[block]; }
  int blocks() const { return (context + kPositions - 1) / kPositions; }
};

inline void fetch(const bf16* block, int head_dim) {
  const auto* p = reinterpret_cast<const char*>(block);
  for (int i = 0; i < kPositions * head_dim * 2; i += 64) _mm_prefetch(p + i, _MM_HINT_T0);
}

// Scores of one query head against one block.
inline __m512 block_scores(const bf16* q, const bf16* k, int head_dim) {
  __m512 sum[kPositions];
  for (int p = 0; p < kPositions; p++) sum[p] = _mm512_setzero_ps();
  for (int d = 0; d < head_dim; d += 32) {
    const auto qs = (__m512bh)_mm512_loadu_si512(q + d);
    for (int p = 0; p < kPositions; p++) {
      const auto ks = (__m512bh)_mm512_loadu_si512(k + p * head_dim + d);
      sum[p] = _mm512_dpbf16_ps(sum[p], qs, ks);
    }
  }
  return sum_each(sum);
}

// In place over n scores padded with -inf to a multiple of 16; writes the bf16 probabilities.
inline void softmax(float* scores, int padded, bf16* probabilities) {
  __m512 top = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  for (int i = 0; i < padded; i += 16) top = _mm512_max_ps(top, _mm512_load_ps(scores + i));
  const __m512 shift = _mm512_set1_ps(_mm512_reduce_max_ps(top));
  __m512 sum = _mm512_setzero_ps();
  for (int i = 0; i < padded; i += 16) {
    const __m512 e = exp_ps(_mm512_sub_ps(_mm512_load_ps(scores + i), shift));
    _mm512_store_ps(scores + i, e);
    sum = _mm512_add_ps(sum, e);
  }
  const __m512 scale = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(sum));
  for (int i = 0; i < padded; i += 16) {
    store_bf16(probabilities + i, _mm512_mul_ps(_mm512_load_ps(scores + i), scale));
  }
}

// Columns d .. d+31 of the outputs of G heads: probabilities (row stride `padded`) times V.
// The keys of `next`, if any, are fetched along the way.
template <int G>
inline void weighted_values(const Span& span, int head_dim, const bf16* probabilities, int padded,
                            int d, bf16* const* out, const Span* next) {
  __m512 low[G], high[G];
  for (int g = 0; g < G; g++) low[g] = high[g] = _mm512_setzero_ps();
  for (int block = 0; block < span.blocks(); block++) {
    if (next != nullptr && block < next->blocks()) fetch(next->keys(block), head_dim);
    const bf16* v = span.values(block) + d;
    const int n = std::min(span.context - block * kPositions, kPositions);
    for (int p = 0; p < n; p += 2) {
      // Past the context lies memory that nobody wrote, and 0 * NaN would be NaN.
      const __m512i even = _mm512_loadu_si512(v + p * head_dim);
      const __m512i odd =
          p + 1 < n ? _mm512_loadu_si512(v + (p + 1) * head_dim) : _mm512_setzero_si512();
      const auto pairs_low = (__m512bh)_mm512_unpacklo_epi16(even, odd);
      const auto pairs_high = (__m512bh)_mm512_unpackhi_epi16(even, odd);
      for (int g = 0; g < G; g++) {
        int two;
        std::memcpy(&two, probabilities + g * padded + block * kPositions + p, 4);
        const auto weight = (__m512bh)_mm512_set1_epi32(two);
        low[g] = _mm512_dpbf16_ps(low[g], weight, pairs_low);
        high[g] = _mm512_dpbf16_ps(high[g], weight, pairs_high);
      }
    }
  }
  // unpacklo/hi left dims 8 l .. 8 l + 3 in 128-bit lane l of `low` and the next four in `high`.
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second =
      _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  for (int g = 0; g < G; g++) {
    store_bf16(out[g], _mm512_permutex2var_ps(low[g], first, high[g]));
    store_bf16(out[g] + 16, _mm512_permutex2var_ps(low[g], second, high[g]));
  }
}

// Bytes of scratch that `attend` needs for contexts up to `context`.
inline std::size_t attention_scratch(int context) {
  const std::size_t padded = (context + kPositions - 1) / kPositions * kPositions;
  return kHeads * padded * (sizeof(float) + sizeof(bf16));
}

// Heads [0, heads) at q (one after another) of row `row`; outputs go to columns `column`... of
// `out`. `scratch` is aligned to 64 bytes.
inline void attend(const bf16* q, int heads, int head_dim, const Span& span, const Activations& out,
                   int row, int column, void* scratch, const Span* next) {
  const int padded = span.blocks() * kPositions;
  auto* scores = static_cast<float*>(scratch);
  auto* probabilities = reinterpret_cast<bf16*>(scores + kHeads * padded);
  const __m512 nothing = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  for (int head = 0; head < heads; head += kHeads) {
    const int n = std::min(kHeads, heads - head);
    for (int block = 0; block < span.blocks(); block++) {
      fetch(span.values(block), head_dim);
      const int valid = std::min(span.context - block * kPositions, kPositions);
      const auto mask = static_cast<__mmask16>((1u << valid) - 1);
      for (int g = 0; g < n; g++) {
        const __m512 dots = block_scores(q + (head + g) * head_dim, span.keys(block), head_dim);
        _mm512_store_ps(scores + g * padded + block * kPositions,
                        _mm512_mask_mov_ps(nothing, mask, round_bf16(dots)));
      }
    }
    for (int g = 0; g < n; g++) {
      softmax(scores + g * padded, padded, probabilities + g * padded);
    }
    for (int d = 0; d < head_dim; d += 32) {
      bf16* at[kHeads];
      for (int g = 0; g < n; g++) at[g] = out.at(row, column + (head + g) * head_dim + d);
      const Span* ahead = d == 0 && head + n == heads ? next : nullptr;
      switch (n) {
        case 1:
          weighted_values<1>(span, head_dim, probabilities, padded, d, at, ahead);
          break;
        case 2:
          weighted_values<2>(span, head_dim, probabilities, padded, d, at, ahead);
          break;
        case 3:
          weighted_values<3>(span, head_dim, probabilities, padded, d, at, ahead);
          break;
        default:
          weighted_values<4>(span, head_dim, probabilities, padded, d, at, ahead);
      }
    }
  }
}

}  // namespace treadle
