// Sampling by inverse CDF in vocabulary order, in two levels.
//
// The product with the head leaves, per row and chunk of 256 logits, what a softmax needs: the
// largest scaled logit, the sum of exponentials relative to it, and their sum weighted by the
// scaled logits (for the entropy). A draw then finds its chunk among those sums and its token
// inside the chunk, so the vocabulary is walked once.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "simd.h"

namespace treadle {

constexpr int kChunk = 256;  // logits

struct ChunkStats {
  float top;       // largest scaled logit
  float sum;       // of e = exp(scaled - top)
  float weighted;  // sum of e (scaled - top)
};

inline __mmask16 lanes(int left) {
  return left >= 16 ? 0xffff : left <= 0 ? 0 : static_cast<__mmask16>((1u << left) - 1);
}

// Logits i..i+15 of a chunk with `valid` of them real, scaled; -inf in the others.
inline __m512 scaled16(const float* logits, int i, int valid, __m512 inverse_temperature) {
  const __m512 nothing = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  const __mmask16 mask = lanes(valid - i);
  return _mm512_mask_mul_ps(nothing, mask, _mm512_maskz_loadu_ps(mask, logits + i),
                            inverse_temperature);
}

inline ChunkStats chunk_stats(const float* logits, int valid, float inverse_temperature) {
  const __m512 factor = _mm512_set1_ps(inverse_temperature);
  __m512 v[kChunk / 16];
  __m512 top = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  for (int i = 0; i < kChunk / 16; i++) {
    v[i] = scaled16(logits, 16 * i, valid, factor);
    top = _mm512_max_ps(top, v[i]);
  }
  const float largest = _mm512_reduce_max_ps(top);
  const __m512 shift = _mm512_set1_ps(largest);
  const __m512 zero = _mm512_setzero_ps();
  __m512 sum = zero, weighted = zero;
  for (int i = 0; i < kChunk / 16; i++) {
    const __m512 x = _mm512_sub_ps(v[i], shift);
    const __m512 e = exp_ps(x);
    sum = _mm512_add_ps(sum, e);
    // Not where e is 0: 0 * -inf would be NaN.
    const __mmask16 some = _mm512_cmp_ps_mask(e, zero, _CMP_NEQ_UQ);
    weighted = _mm512_mask3_fmadd_ps(e, x, weighted, some);
  }
  return {largest, _mm512_reduce_add_ps(sum), _mm512_reduce_add_ps(weighted)};
}

struct Draw {
  std::int64_t id;
  float logprob;  // nats, at the row's temperature
  float entropy;  // nats
};

// e^gap of a chunk's top below the row's; 0 where `exp_ps` gives 0, so that a chunk has mass only
// if one of its tokens has.
inline double relative(float chunk_top, float top) {
  const double gap = double(chunk_top) - top;
  return gap < kExpLowest ? 0.0 : std::exp(gap);
}

// `uniform` in [0, 1) picks the first token whose cumulated probability exceeds it. Temperature 0
// picks the first largest logit; logprob and entropy are then those of temperature 1. NaN logits
// give a NaN logprob.
inline Draw draw(const float* logits, int vocab, const ChunkStats* chunks, float temperature,
                 double uniform) {
  const int count = (vocab + kChunk - 1) / kChunk;
  const bool greedy = temperature == 0.0f;
  const float inverse = greedy ? 1.0f : 1.0f / temperature;
  float top = -std::numeric_limits<float>::infinity();
  for (int c = 0; c < count; c++) top = std::fmax(top, chunks[c].top);
  double total = 0.0, weighted = 0.0;
  for (int c = 0; c < count; c++) {
    const double factor = relative(chunks[c].top, top);
    total += factor * chunks[c].sum;  // also where factor is 0: a NaN must show
    if (factor == 0.0) continue;
    const double gap = double(chunks[c].top) - top;
    weighted += factor * (chunks[c].weighted + gap * chunks[c].sum);
  }
  if (!std::isfinite(total)) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    return {0, nan, nan};
  }

  // The chunk, and what of the target is left for its tokens.
  int chunk = -1;
  double left = 0.0;
  if (greedy) {
    for (chunk = 0; chunks[chunk].top != top;) chunk++;
  } else {
    double cumulated = 0.0;
    for (int c = 0; c < count && cumulated <= uniform * total; c++) {
      const double mass = relative(chunks[c].top, top) * chunks[c].sum;
      if (mass == 0.0) continue;
      chunk = c;
      left = uniform * total - cumulated;
      cumulated += mass;
    }
  }

  const std::int64_t start = std::int64_t(chunk) * kChunk;
  const int valid = int(std::min<std::int64_t>(kChunk, vocab - start));
  std::int64_t id = start;
  double cumulated = 0.0;
  bool found = false;
  for (int i = 0; i < valid && !found; i += 16) {
    const __m512 scaled = scaled16(logits + start, i, valid, _mm512_set1_ps(inverse));
    alignas(64) float e[16];
    _mm512_store_ps(e, exp_ps(_mm512_sub_ps(scaled, _mm512_set1_ps(top))));
    for (int lane = 0; lane < std::min(16, valid - i) && !found; lane++) {
      if (greedy) {
        found = logits[start + i + lane] * inverse == top;
      } else {
        if (e[lane] == 0.0f) continue;  // a token of probability 0 is never drawn
        cumulated += e[lane];
        found = cumulated > left;
      }
      id = start + i + lane;
    }
  }
  // Not found: the two ways of summing the chunk differ in the last bit; take its last token.
  const double log_total = std::log(total);
  const double scaled = double(logits[id] * inverse);
  return {id, float(scaled - top - log_total), float(log_total - weighted / total)};
}

}  // namespace treadle
