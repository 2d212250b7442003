// Attention of a pack of rows over their blocks of the KV cache.
//
// A pack is up to 16 query heads: those that share a KV head, of one or more rows. What rows have
// in common (the prompt of a group) is read once for all of them; from there on each row goes
// through its own blocks. Scores are rounded to bf16, the softmax is fp32, probabilities and
// outputs are rounded: all as in the training forward (models/attention.py). The order of
// additions depends on the row's own context alone, not on the pack.
#pragma once

#include <limits>

#include "gemm.h"
#include "kv.h"

namespace treadle {

constexpr int kHeads = 16;  // query heads of a pack at most

// Rows [first, first + rows) of a call; their first `shared` blocks are the same ones, and full.
struct Pack {
  int first = 0, rows = 0, shared = 0;
};

// A row's query heads of one KV head, one after another from `q`; their outputs go to columns
// `column`... of `row`.
struct Query {
  const bf16* q = nullptr;
  Span span;
  int row = 0, column = 0;
};

// The queries of a pack, in the order of its rows.
struct Queries {
  Query of[kHeads];
  int rows = 0, shared = 0;

  void fetch_keys(int row, int head_dim) const {
    const Span& span = of[row].span;
    for (int b = row == 0 ? 0 : shared; b < span.blocks(); b++) fetch(span.keys(b), head_dim);
  }
};

// Working memory of one thread. Scores and probabilities are kept by blocks, [16 heads][16
// positions] each: one tile.
struct Workspace {
  static std::size_t bytes(int context, int head_dim) {
    const std::size_t scores = std::size_t(blocks_of(context)) * kHeads * kPositions;
    const std::size_t dims = std::size_t(kHeads) * head_dim;
    return scores * (sizeof(float) + sizeof(bf16)) + dims * (2 * sizeof(float) + sizeof(bf16)) +
           kPositions * head_dim * sizeof(bf16);
  }

  Workspace(void* memory, int context, int head_dim) {
    const std::size_t size = std::size_t(blocks_of(context)) * kHeads * kPositions;
    const std::size_t dims = std::size_t(kHeads) * head_dim;
    scores = static_cast<float*>(memory);
    sums = scores + size;
    out = sums + dims;
    probabilities = reinterpret_cast<bf16*>(out + dims);
    queries = probabilities + size;
    last = queries + dims;
  }

  float* scores_of(int block, int head) const {
    return scores + (std::size_t(block) * kHeads + head) * kPositions;
  }
  bf16* probabilities_of(int block, int head) const {
    return probabilities + (std::size_t(block) * kHeads + head) * kPositions;
  }

  float* scores;
  float* sums;  // [heads, head_dim]: of the shared blocks
  float* out;   // [heads of a row, head_dim]
  bf16* probabilities;
  bf16* queries;  // [heads, head_dim]
  bf16* last;     // values of a row's last block
};

// In place over the scores of one head; writes the probabilities, 0 past the context.
inline void softmax(const Workspace& work, int head, const Span& span) {
  const int blocks = span.blocks();
  const auto valid = static_cast<__mmask16>((2u << span.last()) - 1);
  const __m512 nothing = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  __m512 top = nothing;
  for (int b = 0; b < blocks; b++) {
    __m512 s = round_bf16(_mm512_load_ps(work.scores_of(b, head)));
    if (b == blocks - 1) s = _mm512_mask_mov_ps(nothing, valid, s);
    _mm512_store_ps(work.scores_of(b, head), s);
    top = _mm512_max_ps(top, s);
  }
  const __m512 shift = _mm512_set1_ps(_mm512_reduce_max_ps(top));
  __m512 sum = _mm512_setzero_ps();
  for (int b = 0; b < blocks; b++) {
    const __m512 e = exp_ps(_mm512_sub_ps(_mm512_load_ps(work.scores_of(b, head)), shift));
    _mm512_store_ps(work.scores_of(b, head), e);
    sum = _mm512_add_ps(sum, e);
  }
  const __m512 scale = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(sum));
  for (int b = 0; b < blocks; b++) {
    store_bf16(work.probabilities_of(b, head),
               _mm512_mul_ps(_mm512_load_ps(work.scores_of(b, head)), scale));
  }
}

// The values of block b of a row, from its own copy where the context ends inside.
inline const bf16* values_of(const Span& span, int b, const Workspace& work) {
  return b < span.full_blocks() ? span.values(b) : work.last;
}

// ---------------------------------------------------------------------------- AMX

// Tiles 0-3 hold sums [heads, 16], 4 queries, 5 keys, 6 probabilities, 7 values.
inline void configure_attention_tiles(int heads) {
  TileConfig config;
  config.palette = 1;
  for (int i = 0; i < 8; i++) {
    config.row_bytes[i] = i == 6 ? 2 * kPositions : 64;
    config.rows[i] = static_cast<std::uint8_t>(i == 5 ? 16 : i == 7 ? kPositions / 2 : heads);
  }
  load_tile_config(config);
}

// Scores of as many heads from `head` on as tiles are configured for, against one block.
inline void scores_amx(const Workspace& work, int head, int, int head_dim, const bf16* keys,
                       int block) {
  const bf16* q = work.queries + std::size_t(head) * head_dim;
  _tile_zero(0);
  for (int d = 0; d < head_dim; d += 32) {
    _tile_loadd(4, q + d, head_dim * 2);
    _tile_loadd(5, keys + d * kPositions, 64);
    _tile_dpbf16ps(0, 4, 5);
  }
  _tile_stored(0, work.scores_of(block, head), kPositions * 4);
}

// Adds probabilities times values of blocks [from, to) to `sums`, or to 0 where that is null; N
// tiles of 16 dimensions from d on.
template <int N>
inline void values_amx(const Workspace& work, int head, int head_dim, const Span& span, int from,
                       int to, int d, const float* sums, float* out) {
  if (sums == nullptr) {
    _tile_zero(0);
    _tile_zero(1);
    if (N > 2) _tile_zero(2);
    if (N > 2) _tile_zero(3);
  } else {
    _tile_loadd(0, sums + d, head_dim * 4);
    _tile_loadd(1, sums + d + 16, head_dim * 4);
    if (N > 2) _tile_loadd(2, sums + d + 32, head_dim * 4);
    if (N > 2) _tile_loadd(3, sums + d + 48, head_dim * 4);
  }
  for (int b = from; b < to; b++) {
    const bf16* v = values_of(span, b, work) + 2 * d;
    _tile_loadd(6, work.probabilities_of(b, head), kPositions * 2);
    _tile_loadd(7, v, head_dim * 4);
    _tile_dpbf16ps(0, 6, 7);
    _tile_loadd(7, v + 32, head_dim * 4);
    _tile_dpbf16ps(1, 6, 7);
    if (N > 2) {
      _tile_loadd(7, v + 64, head_dim * 4);
      _tile_dpbf16ps(2, 6, 7);
      _tile_loadd(7, v + 96, head_dim * 4);
      _tile_dpbf16ps(3, 6, 7);
    }
  }
  _tile_stored(0, out + d, head_dim * 4);
  _tile_stored(1, out + d + 16, head_dim * 4);
  if (N > 2) _tile_stored(2, out + d + 32, head_dim * 4);
  if (N > 2) _tile_stored(3, out + d + 48, head_dim * 4);
}

inline void weighted_values_amx(const Workspace& work, int head, int, int head_dim,
                                const Span& span, int from, int to, const float* sums, float* out) {
  int d = 0;
  for (; d + 64 <= head_dim; d += 64) {
    values_amx<4>(work, head, head_dim, span, from, to, d, sums, out);
  }
  if (d < head_dim) values_amx<2>(work, head, head_dim, span, from, to, d, sums, out);
}

// ---------------------------------------------------------------------------- AVX-512

// Scores of `heads` heads from `head` on against one block.
inline void scores_avx512(const Workspace& work, int head, int heads, int head_dim,
                          const bf16* keys, int block) {
  for (int h = head; h < head + heads; h++) {
    const bf16* q = work.queries + std::size_t(h) * head_dim;
    __m512 sum[4] = {};
    for (int d = 0; d < head_dim; d += 8) {
      for (int i = 0; i < 4; i++) {
        int two;
        std::memcpy(&two, q + d + 2 * i, 4);
        const auto ks = (__m512bh)_mm512_loadu_si512(keys + (d + 2 * i) * kPositions);
        sum[i] = _mm512_dpbf16_ps(sum[i], (__m512bh)_mm512_set1_epi32(two), ks);
      }
    }
    _mm512_store_ps(work.scores_of(block, h),
                    _mm512_add_ps(_mm512_add_ps(sum[0], sum[1]), _mm512_add_ps(sum[2], sum[3])));
  }
}

template <int G>
inline void values_avx512(const Workspace& work, int head, int head_dim, const Span& span, int from,
                          int to, int d, const float* sums, float* out) {
  __m512 low[G], high[G];
  for (int g = 0; g < G; g++) {
    const float* at = sums == nullptr ? nullptr : sums + std::size_t(g) * head_dim + d;
    low[g] = at == nullptr ? _mm512_setzero_ps() : _mm512_loadu_ps(at);
    high[g] = at == nullptr ? _mm512_setzero_ps() : _mm512_loadu_ps(at + 16);
  }
  for (int b = from; b < to; b++) {
    const bf16* v = values_of(span, b, work) + 2 * d;
    for (int pair = 0; pair < kPositions / 2; pair++, v += 2 * head_dim) {
      const auto first = (__m512bh)_mm512_loadu_si512(v);
      const auto second = (__m512bh)_mm512_loadu_si512(v + 32);
      for (int g = 0; g < G; g++) {
        int two;
        std::memcpy(&two, work.probabilities_of(b, head + g) + 2 * pair, 4);
        const auto weight = (__m512bh)_mm512_set1_epi32(two);
        low[g] = _mm512_dpbf16_ps(low[g], weight, first);
        high[g] = _mm512_dpbf16_ps(high[g], weight, second);
      }
    }
  }
  for (int g = 0; g < G; g++) {
    _mm512_storeu_ps(out + std::size_t(g) * head_dim + d, low[g]);
    _mm512_storeu_ps(out + std::size_t(g) * head_dim + d + 16, high[g]);
  }
}

inline void weighted_values_avx512(const Workspace& work, int head, int heads, int head_dim,
                                   const Span& span, int from, int to, const float* sums,
                                   float* out) {
  constexpr decltype(&values_avx512<1>) kernels[] = {values_avx512<1>, values_avx512<2>,
                                                     values_avx512<3>, values_avx512<4>};
  for (int h = 0; h < heads; h += 4) {
    const auto kernel = kernels[std::min(heads - h, 4) - 1];
    const std::size_t at = std::size_t(h) * head_dim;
    for (int d = 0; d < head_dim; d += 32) {
      kernel(work, head + h, head_dim, span, from, to, d, sums == nullptr ? nullptr : sums + at,
             out + at);
    }
  }
}

// ---------------------------------------------------------------------------- a pack

// Heads [0, heads) of each query. The keys of `next`, if any, are fetched along the way.
inline void attend(const Queries& queries, int heads, int head_dim, bool amx, const Activations& to,
                   const Workspace& work, const Queries* next) {
  const int rows = queries.rows, shared = queries.shared;
  const std::size_t row_size = std::size_t(heads) * head_dim;
  const auto scores = amx ? scores_amx : scores_avx512;
  const auto weighted_values = amx ? weighted_values_amx : weighted_values_avx512;
  for (int r = 0; r < rows; r++) {
    std::memcpy(work.queries + r * row_size, queries.of[r].q, row_size * sizeof(bf16));
  }
  const auto score = [&](int head, int count, const Span& span, int block) {
    fetch(span.values(block), head_dim);
    scores(work, head, count, head_dim, span.keys(block), block);
  };

  if (amx && shared > 0) configure_attention_tiles(rows * heads);
  for (int b = 0; b < shared; b++) score(0, rows * heads, queries.of[0].span, b);
  if (amx) configure_attention_tiles(heads);
  for (int r = 0; r < rows; r++) {
    const Span& span = queries.of[r].span;
    for (int b = shared; b < span.blocks(); b++) score(r * heads, heads, span, b);
    for (int h = 0; h < heads; h++) softmax(work, r * heads + h, span);
  }

  if (shared > 0) {
    if (amx) configure_attention_tiles(rows * heads);
    weighted_values(work, 0, rows * heads, head_dim, queries.of[0].span, 0, shared, nullptr,
                    work.sums);
    if (amx) configure_attention_tiles(heads);
  }
  for (int r = 0; r < rows; r++) {
    const Query& query = queries.of[r];
    if (next != nullptr && r < next->rows) next->fetch_keys(r, head_dim);
    if (query.span.full_blocks() < query.span.blocks()) {
      query.span.copy_last_values(head_dim, work.last);
    }
    weighted_values(work, r * heads, heads, head_dim, query.span, shared, query.span.blocks(),
                    shared > 0 ? work.sums + r * row_size : nullptr, work.out);
    for (int h = 0; h < heads; h++) {
      const float* from = work.out + std::size_t(h) * head_dim;
      for (int d = 0; d < head_dim; d += 16) {
        store_bf16(to.at(query.row, query.column + h * head_dim + d), _mm512_loadu_ps(from + d));
      }
    }
  }
}

}  // namespace treadle
