// What lies between the products: normalisation, rotary positions, the gated activation.
//
// Each function rounds to bf16 exactly where the training forward does (models/fuse.py): the same
// bits then come out but for the order of additions inside a sum.
#pragma once

#include <algorithm>
#include <cmath>

#include "gemm.h"

namespace treadle {

// x * scale, then times the weight: 16 values of a row.
inline __m512 norm16(__m512 x, const bf16* weight, __m512 scale) {
  return _mm512_mul_ps(load_bf16(weight), _mm512_mul_ps(x, scale));
}

// RMSNorm of one head in place (Qwen3).
inline void head_norm(bf16* x, const bf16* weight, int head_dim, float eps) {
  __m512 sum = _mm512_setzero_ps();
  for (int i = 0; i < head_dim; i += 16) {
    const __m512 v = load_bf16(x + i);
    sum = _mm512_fmadd_ps(v, v, sum);
  }
  const float mean = _mm512_reduce_add_ps(sum) / static_cast<float>(head_dim);
  const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(mean + eps));
  for (int i = 0; i < head_dim; i += 16) store_bf16(x + i, norm16(load_bf16(x + i), weight + i, scale));
}

// The residual stream, in fp32. It is kept by blocks of 32 columns like all activations, and a
// thread that adds a product's columns to it also normalises them: what crosses between cores is one
// sum of squares per row and block instead of the stream itself.
struct Residual {
  float* h = nullptr;
  int stride = 0;  // rows between blocks
  float* squares = nullptr;  // [blocks][padded rows]
  int padded = 0;            // rows, a multiple of 16
  int blocks = 0;

  float* at(int row, int block) const {
    return h + (std::size_t(block) * stride + row) * kBlock;
  }

  // Call after the block's columns of rows [first, first + n), n <= 16, have changed.
  void sum_squares(int block, int first, int n) const {
    __m512 sums[16];
    for (int r = 0; r < 16; r++) {
      const float* x = at(first + r, block);
      const __m512 a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + 16);
      sums[r] = r < n ? _mm512_fmadd_ps(a, a, _mm512_mul_ps(b, b)) : _mm512_setzero_ps();
    }
    _mm512_store_ps(squares + std::size_t(block) * padded + first, sum_each(sums));
  }

  // 1 / rms of 16 rows; `rows` picks them from all, null = first .. first + 15.
  __m512 scales(int first, const std::int32_t* rows, float eps) const {
    __m512 sum = _mm512_setzero_ps();
    for (int block = 0; block < blocks; block++) {
      const float* s = squares + std::size_t(block) * padded;
      sum = _mm512_add_ps(sum, rows == nullptr
                                   ? _mm512_load_ps(s + first)
                                   : _mm512_i32gather_ps(_mm512_loadu_si512(rows + first), s, 4));
    }
    const __m512 mean = _mm512_div_ps(sum, _mm512_set1_ps(static_cast<float>(blocks * kBlock)));
    const __m512 root = _mm512_sqrt_ps(_mm512_add_ps(mean, _mm512_set1_ps(eps)));
    return _mm512_div_ps(_mm512_set1_ps(1.0f), root);
  }

  // RMSNorm of one block of `n` rows into rows 0 .. n-1 of `out`. `rows` has a multiple of 16
  // entries.
  void norm(int block, int n, const std::int32_t* rows, const bf16* weight, float eps,
            const Activations& out) const {
    const bf16* w = weight + block * kBlock;
    for (int first = 0; first < n; first += 16) {
      alignas(64) float scale[16];
      _mm512_store_ps(scale, scales(first, rows, eps));
      for (int i = first; i < std::min(n, first + 16); i++) {
        const float* x = at(rows == nullptr ? i : rows[i], block);
        bf16* to = out.at(i, block * kBlock);
        const __m512 s = _mm512_set1_ps(scale[i - first]);
        store_bf16(to, norm16(_mm512_loadu_ps(x), w, s));
        store_bf16(to + 16, norm16(_mm512_loadu_ps(x + 16), w + 16, s));
      }
    }
  }
};

// Rotates one head in place. cos and sin hold head_dim / 2 values of the row's position: the two
// halves of the library's tables are equal for every rotary type that is accepted.
inline void rotate(bf16* x, const bf16* cos, const bf16* sin, int head_dim) {
  const int half = head_dim / 2;
  for (int i = 0; i < half; i += 16) {
    const __m512 a = load_bf16(x + i), b = load_bf16(x + half + i);
    const __m512 c = load_bf16(cos + i), s = load_bf16(sin + i);
    store_bf16(x + i, _mm512_fnmadd_ps(b, s, _mm512_mul_ps(a, c)));
    store_bf16(x + half + i, _mm512_fmadd_ps(a, s, _mm512_mul_ps(b, c)));
  }
}

// silu(gate) * up of 16 fp32 sums, which the training forward has as bf16.
inline __m512 gated(__m512 gate, __m512 up) {
  const __m512 g = round_bf16(gate);
  const __m512 e = exp_ps(_mm512_sub_ps(_mm512_setzero_ps(), g));
  const __m512 silu = _mm512_div_ps(g, _mm512_add_ps(_mm512_set1_ps(1.0f), e));
  return _mm512_mul_ps(silu, round_bf16(up));
}

// h[0..31] += one row of a product.
inline void add_residual(float* h, const float* c) {
  for (int i = 0; i < kUnit; i += 16) {
    const __m512 sum = _mm512_add_ps(_mm512_loadu_ps(h + i), round_bf16(_mm512_load_ps(c + i)));
    _mm512_storeu_ps(h + i, sum);
  }
}

}  // namespace treadle
