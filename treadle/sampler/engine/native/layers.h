// What lies between the products: normalisation, rotary positions, the gated activation.
//
// Each function rounds to bf16 exactly where the library's modules do when they run in bf16.
#pragma once

#include <cmath>

#include "gemm.h"

namespace treadle {

inline float inverse_rms(const bf16* x, int n, float eps) {
  __m512 sum = _mm512_setzero_ps();
  for (int i = 0; i < n; i += 16) {
    const __m512 v = load_bf16(x + i);
    sum = _mm512_fmadd_ps(v, v, sum);
  }
  return 1.0f / std::sqrt(_mm512_reduce_add_ps(sum) / static_cast<float>(n) + eps);
}

inline __m512 norm16(const bf16* x, const bf16* weight, __m512 scale) {
  return round_bf16(
      _mm512_mul_ps(load_bf16(weight), round_bf16(_mm512_mul_ps(load_bf16(x), scale))));
}

// RMSNorm of one row into row `row` of `out`; n is a multiple of 32.
inline void rms_norm(const bf16* x, const bf16* weight, int n, float eps, const Activations& out,
                     int row) {
  const __m512 scale = _mm512_set1_ps(inverse_rms(x, n, eps));
  for (int i = 0; i < n; i += 16) store_bf16(out.at(row, i), norm16(x + i, weight + i, scale));
}

// RMSNorm of one head in place (Qwen3).
inline void head_norm(bf16* x, const bf16* weight, int head_dim, float eps) {
  const __m512 scale = _mm512_set1_ps(inverse_rms(x, head_dim, eps));
  for (int i = 0; i < head_dim; i += 16) store_bf16(x + i, norm16(x + i, weight + i, scale));
}

// Rotates one head in place. cos and sin hold head_dim / 2 values of the row's position: the two
// halves of the library's tables are equal for every rotary type that is accepted.
inline void rotate(bf16* x, const bf16* cos, const bf16* sin, int head_dim) {
  const int half = head_dim / 2;
  for (int i = 0; i < half; i += 16) {
    const __m512 a = load_bf16(x + i), b = load_bf16(x + half + i);
    const __m512 c = load_bf16(cos + i), s = load_bf16(sin + i);
    const __m512 first = _mm512_sub_ps(round_bf16(_mm512_mul_ps(a, c)),
                                       round_bf16(_mm512_mul_ps(b, s)));
    const __m512 second = _mm512_add_ps(round_bf16(_mm512_mul_ps(b, c)),
                                        round_bf16(_mm512_mul_ps(a, s)));
    store_bf16(x + i, first);
    store_bf16(x + half + i, second);
  }
}

// silu(gate) * up of 16 fp32 sums.
inline __m512 gated(__m512 gate, __m512 up) {
  const __m512 g = round_bf16(gate);
  const __m512 one = _mm512_set1_ps(1.0f);
  const __m512 minus = _mm512_sub_ps(_mm512_setzero_ps(), g);
  const __m512 silu = _mm512_div_ps(g, _mm512_add_ps(one, exp_ps(minus)));
  return _mm512_mul_ps(round_bf16(silu), round_bf16(up));
}

// h[0..31] += one row of a product.
inline void add_residual(bf16* h, const float* c) {
  for (int i = 0; i < kUnit; i += 16) {
    store_bf16(h + i, _mm512_add_ps(load_bf16(h + i), round_bf16(_mm512_load_ps(c + i))));
  }
}

}  // namespace treadle
