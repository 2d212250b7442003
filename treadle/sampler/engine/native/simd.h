// Shorthand for 16 fp32 lanes that live in memory as bf16. Every rounding is to nearest even.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace treadle {

using bf16 = std::uint16_t;

inline __m512 load_bf16(const bf16* p) {
  const __m512i wide =
      _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

inline __m256i to_bf16(__m512 v) { return (__m256i)_mm512_cvtneps_pbh(v); }

inline void store_bf16(bf16* p, __m512 v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bf16(v));
}

// The value that a bf16 tensor would hold: where the library's modules round, so do we.
inline __m512 round_bf16(__m512 v) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(to_bf16(v)), 16));
}

constexpr float kExpLowest = -86.0f;

// e^x, about 1 ulp; 0 below kExpLowest (a result that is not a normal number costs the processor
// 100 ns) and for -inf, NaN for NaN. Cephes' expf polynomial.
inline __m512 exp_ps(__m512 x) {
  const __m512 low = _mm512_set1_ps(kExpLowest);
  // Operand order matters: max/min return the second operand when one of them is NaN.
  const __m512 clipped = _mm512_min_ps(_mm512_set1_ps(88.7f), _mm512_max_ps(low, x));
  const __m512 n =
      _mm512_roundscale_ps(_mm512_mul_ps(clipped, _mm512_set1_ps(1.44269504088896341f)),
                           _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), clipped);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  const __m512 y = _mm512_scalef_ps(p, n);
  return _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(x, low, _CMP_LT_OQ), _mm512_setzero_ps());
}

// The sums of 16 vectors, vector i in lane i.
inline __m512 sum_each(const __m512 (&v)[16]) {
  __m512 quad[4];
  for (int i = 0; i < 4; i++) {
    const __m512 a = v[4 * i], b = v[4 * i + 1], c = v[4 * i + 2], d = v[4 * i + 3];
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512d x = _mm512_castps_pd(ab), y = _mm512_castps_pd(cd);
    quad[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)),
                            _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  }
  const __m512 low = _mm512_add_ps(_mm512_shuffle_f32x4(quad[0], quad[1], 0x88),
                                   _mm512_shuffle_f32x4(quad[0], quad[1], 0xdd));
  const __m512 high = _mm512_add_ps(_mm512_shuffle_f32x4(quad[2], quad[3], 0x88),
                                    _mm512_shuffle_f32x4(quad[2], quad[3], 0xdd));
  return _mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88),
                       _mm512_shuffle_f32x4(low, high, 0xdd));
}

}  // namespace treadle
