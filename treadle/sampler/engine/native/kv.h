// The KV cache: blocks of 16 positions, laid out as the operands of bf16 dot products.
//
//   keys    [layers, blocks, kv_heads][head_dim / 2][16 positions][2]  scaled: see interface.h
//   values  [layers, blocks, kv_heads][8 pairs of positions][head_dim][2]
//
// A dot product takes pairs: two dimensions of a key, two positions of a value. 16 dimension
// pairs of keys are one tile (gemm.h), and so are 8 position pairs of 16 dimensions of values.
// Neighbouring positions share the words of a value; they may be written at the same time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "simd.h"

namespace treadle {

constexpr int kPositions = 16;  // of a block

inline int blocks_of(int positions) { return (positions + kPositions - 1) / kPositions; }

struct Cache {
  bf16* k = nullptr;
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

  // Key and value of one head at `position` of a block that begins at `offset`.
  void write(std::size_t offset, int position, const bf16* key, const bf16* value,
             float scale) const {
    const __m512 by = _mm512_set1_ps(scale);
    const __m512i steps = _mm512_mullo_epi32(
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
        _mm512_set1_epi32(kPositions));
    for (int d = 0; d < head_dim; d += 32) {
      const __m256i low = to_bf16(_mm512_mul_ps(load_bf16(key + d), by));
      const __m256i high = to_bf16(_mm512_mul_ps(load_bf16(key + d + 16), by));
      const __m512i pairs = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
      _mm512_i32scatter_epi32(k + offset + d * kPositions + 2 * position, steps, pairs, 4);
    }
    const __mmask32 own = position % 2 == 0 ? 0x55555555u : 0xaaaaaaaau;
    bf16* to = v + offset + position / 2 * 2 * head_dim;
    for (int d = 0; d < head_dim; d += 16) {
      const __m512i wide =
          _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(value + d)));
      _mm512_mask_storeu_epi16(to + 2 * d, own, _mm512_or_si512(wide, _mm512_slli_epi32(wide, 16)));
    }
  }
};

// One sequence's view of one KV head.
struct Span {
  const bf16* k = nullptr;  // of the layer and KV head, block 0
  const bf16* v = nullptr;
  std::size_t block_step = 0;  // elements from block to block
  const std::int32_t* table = nullptr;
  int context = 0;  // valid positions

  const bf16* keys(int block) const { return k + block_step * table[block]; }
  const bf16* values(int block) const { return v + block_step * table[block]; }
  int blocks() const { return blocks_of(context); }
  int full_blocks() const { return context / kPositions; }
  int last() const { return (context - 1) % kPositions; }  // position in the last block

  // The values of the last block with zeros past the context: memory that nobody wrote may hold
  // a NaN, and 0 * NaN is NaN.
  void copy_last_values(int head_dim, bf16* to) const {
    const bf16* from = values(blocks() - 1);
    for (int pair = 0; pair < kPositions / 2; pair++) {
      const __mmask32 valid = 2 * pair + 1 <= last() ? ~0u : 2 * pair <= last() ? 0x55555555u : 0u;
      for (int d = 0; d < head_dim; d += 16, from += 32, to += 32) {
        _mm512_storeu_si512(to, _mm512_maskz_loadu_epi16(valid, from));
      }
    }
  }
};

inline void fetch(const bf16* block, int head_dim) {
  const auto* p = reinterpret_cast<const char*>(block);
  for (int i = 0; i < kPositions * head_dim * 2; i += 64) _mm_prefetch(p + i, _MM_HINT_T0);
}

}  // namespace treadle
