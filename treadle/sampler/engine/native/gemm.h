// y = x W^T for a few dozen rows: weights are read once, so the layout serves their stream.
//
// Packed weights. Output columns are grouped by 32 (a unit), inputs by 32 (a block). One block
// of a unit is two tiles of 1 KiB, one per 16 columns: tile[i / 2][column][i % 2], the operand
// order of both TDPBF16PS and VDPBF16PS. A unit is contiguous and units follow one another.
//
// Activations. Blocks of 32 inputs, each [rows][32], so that 16 rows of a block are one tile.
// `stride` rows lie between blocks: a multiple of 16 plus 8, because a power of two would map
// all blocks to the same cache sets.
//
// Both kernels add the products of an element in the same order whatever the number of rows, so
// a row's result does not depend on its neighbours. (The two kernels differ from each other.)
#pragma once

#include <cstring>

#include "simd.h"
#include "team.h"

namespace treadle {

constexpr int kUnit = 32;   // output columns of a unit
constexpr int kBlock = 32;  // inputs of a block
constexpr int kRows = 32;   // rows of one kernel call at most
constexpr int kTileBytes = 1024;
constexpr int kBlockBytes = 2 * kTileBytes;

struct Matrix {
  std::uint8_t* data = nullptr;
  int units = 0;
  int blocks = 0;  // inputs / 32

  std::size_t unit_bytes() const { return std::size_t(blocks) * kBlockBytes; }
  std::size_t bytes() const { return unit_bytes() * units; }
};

struct Activations {
  bf16* data = nullptr;
  int stride = 0;  // rows between blocks

  static int stride_for(int rows) { return (rows + 15) / 16 * 16 + 8; }
  bf16* at(int row, int input) const {
    return data + (std::size_t(input / kBlock) * stride + row) * kBlock + input % kBlock;
  }
};

// ---------------------------------------------------------------------------- weight stream

// Fetches a thread's own weights into its second-level cache ahead of use, across matrices: the
// memory bus should never rest while a thread normalises, attends or waits.
class Stream {
 public:
  void add(const std::uint8_t* begin, const std::uint8_t* end) {
    segments_.push_back({begin, end});
  }

  void rewind() {
    segment_ = 0;
    cursor_ = segments_.empty() ? nullptr : segments_[0].begin;
    fetched_ = used_ = 0;
  }

  void use(std::size_t bytes) { used_ += bytes; }

  // The next at most `bytes` bytes as one run, or nothing if far enough ahead.
  struct Piece {
    const std::uint8_t* begin;
    std::size_t bytes;
  };
  Piece take(std::size_t bytes, std::size_t lead) {
    if (fetched_ > used_ + lead || segment_ >= segments_.size()) return {nullptr, 0};
    const std::size_t left = segments_[segment_].end - cursor_;
    const Piece piece{cursor_, bytes < left ? bytes : left};
    cursor_ += piece.bytes;
    fetched_ += piece.bytes;
    if (piece.bytes == left && ++segment_ < segments_.size()) cursor_ = segments_[segment_].begin;
    return piece;
  }

  void fetch(std::size_t bytes, std::size_t lead) {
    const Piece piece = take(bytes, lead);
    for (std::size_t i = 0; i < piece.bytes; i += 64) {
      _mm_prefetch(reinterpret_cast<const char*>(piece.begin + i), _MM_HINT_T1);
    }
  }

 private:
  struct Segment {
    const std::uint8_t* begin;
    const std::uint8_t* end;
  };
  std::vector<Segment> segments_;
  std::size_t segment_ = 0;
  const std::uint8_t* cursor_ = nullptr;
  std::size_t fetched_ = 0, used_ = 0;
};

// ---------------------------------------------------------------------------- kernels

// c[row][0..31] (row stride `ldc`) = rows [0, rows) of x times one unit; `x` points at the first
// row. Up to `ahead.bytes` of `ahead` are prefetched along the way.
using Kernel = void (*)(const std::uint8_t* unit, int blocks, const bf16* x, int stride, int rows,
                        float* c, int ldc, Stream::Piece ahead);

struct alignas(64) TileConfig {
  std::uint8_t palette = 0, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};
};

// GCC declares that the two instructions touch 8 of the 64 bytes, so it must be told of the rest.
inline void load_tile_config(const TileConfig& config) {
  asm volatile("" ::: "memory");
  _tile_loadconfig(&config);
}

inline void store_tile_config(TileConfig& config) {
  asm volatile("" ::: "memory");
  _tile_storeconfig(&config);
  asm volatile("" ::: "memory");
}

inline void configure_tiles() {
  TileConfig config;
  config.palette = 1;
  for (int i = 0; i < 8; i++) {
    config.row_bytes[i] = 64;
    config.rows[i] = 16;
  }
  load_tile_config(config);
}

// Tiles 0-3 hold 2 x 2 tiles of c, 4-5 weights, 6-7 activations. c has 32 rows to write to.
inline void kernel_amx(const std::uint8_t* unit, int blocks, const bf16* x, int stride, int rows,
                       float* c, int ldc, Stream::Piece ahead) {
  const std::size_t x_step = std::size_t(stride) * kBlock;
  const int ld_bytes = ldc * 4;
  const auto* next = reinterpret_cast<const char*>(ahead.begin);
  const std::size_t step = ahead.bytes / blocks;  // a multiple of 64 or prefetches overlap: fine
  if (rows > 16) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int k = 0; k < blocks; k++, unit += kBlockBytes, x += x_step, next += step) {
      for (std::size_t i = 0; i < step; i += 64) _mm_prefetch(next + i, _MM_HINT_T1);
      _tile_loadd(4, unit, 64);
      _tile_loadd(6, x, 64);
      _tile_dpbf16ps(0, 6, 4);
      _tile_loadd(5, unit + kTileBytes, 64);
      _tile_dpbf16ps(1, 6, 5);
      _tile_loadd(7, x + 16 * kBlock, 64);
      _tile_dpbf16ps(2, 7, 4);
      _tile_dpbf16ps(3, 7, 5);
    }
    _tile_stored(2, c + 16 * ldc, ld_bytes);
    _tile_stored(3, c + 16 * ldc + 16, ld_bytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    for (int k = 0; k < blocks; k++, unit += kBlockBytes, x += x_step, next += step) {
      for (std::size_t i = 0; i < step; i += 64) _mm_prefetch(next + i, _MM_HINT_T1);
      _tile_loadd(4, unit, 64);
      _tile_loadd(6, x, 64);
      _tile_dpbf16ps(0, 6, 4);
      _tile_loadd(5, unit + kTileBytes, 64);
      _tile_dpbf16ps(1, 6, 5);
    }
  }
  _tile_stored(0, c, ld_bytes);
  _tile_stored(1, c + 16, ld_bytes);
}

template <int R>
inline void rows_avx512(const std::uint8_t* unit, int blocks, const bf16* x, int stride, float* c,
                        int ldc, const char* next, std::size_t step) {
  __m512 sum[R][2];
  for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
  for (int k = 0; k < blocks; k++, unit += kBlockBytes, x += std::size_t(stride) * kBlock) {
    for (std::size_t i = 0; i < step; i += 64) _mm_prefetch(next + i, _MM_HINT_T1);
    next += step;
    for (int pair = 0; pair < kBlock / 2; pair++) {
      const auto w0 = (__m512bh)_mm512_load_si512(unit + pair * 64);
      const auto w1 = (__m512bh)_mm512_load_si512(unit + kTileBytes + pair * 64);
      for (int r = 0; r < R; r++) {
        int two;
        std::memcpy(&two, x + r * kBlock + 2 * pair, 4);
        const auto xs = (__m512bh)_mm512_set1_epi32(two);
        sum[r][0] = _mm512_dpbf16_ps(sum[r][0], xs, w0);
        sum[r][1] = _mm512_dpbf16_ps(sum[r][1], xs, w1);
      }
    }
  }
  for (int r = 0; r < R; r++) {
    _mm512_storeu_ps(c + r * ldc, sum[r][0]);
    _mm512_storeu_ps(c + r * ldc + 16, sum[r][1]);
  }
}

inline void kernel_avx512(const std::uint8_t* unit, int blocks, const bf16* x, int stride, int rows,
                          float* c, int ldc, Stream::Piece ahead) {
  const auto* next = reinterpret_cast<const char*>(ahead.begin);
  std::size_t step = ahead.bytes / blocks;
  for (; rows >= 8; rows -= 8, x += 8 * kBlock, c += 8 * ldc, step = 0) {
    rows_avx512<8>(unit, blocks, x, stride, c, ldc, next, step);
  }
  for (; rows > 0; rows--, x += kBlock, c += ldc, step = 0) {
    rows_avx512<1>(unit, blocks, x, stride, c, ldc, next, step);
  }
}

// ---------------------------------------------------------------------------- a whole product

// Calls done(unit, first_row, rows, c[32][32]) for every tile of the product.
template <class Done>
void multiply(const Matrix& w, const Activations& x, int rows, Kernel kernel, Phase& phase,
              Stream& stream, std::size_t lead, int thread, Done&& done) {
  alignas(64) float c[kRows * kUnit];
  const std::size_t bytes = w.unit_bytes();
  phase.each(thread, [&](int unit) {
    const int passes = rows > kRows ? 2 : 1;  // those that prefetch
    stream.use(bytes);
    for (int row = 0; row < rows; row += kRows) {
      const int n = rows - row < kRows ? rows - row : kRows;
      const auto ahead =
          row < passes * kRows ? stream.take(bytes / passes, lead) : Stream::Piece{nullptr, 0};
      kernel(w.data + bytes * unit, w.blocks, x.at(row, 0), x.stride, n, c, kUnit, ahead);
      done(unit, row, n, c);
    }
  });
}

// ---------------------------------------------------------------------------- packing

// One block of 16 output columns: the transpose of 16 rows of 16 input pairs. rows[i] may be null.
inline void pack_tile(std::uint8_t* tile, const bf16* const* rows, int input) {
  __m512i v[16], t[16];
  for (int i = 0; i < 16; i++) {
    v[i] = rows[i] == nullptr ? _mm512_setzero_si512() : _mm512_loadu_si512(rows[i] + input);
  }
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    v[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    v[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    v[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    v[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  // v[4 q + j] holds, in 128-bit lane l, pair 4 l + j of columns 4 q .. 4 q + 3.
  for (int j = 0; j < 4; j++) {
    const __m512i low02 = _mm512_shuffle_i32x4(v[j], v[4 + j], 0x88);
    const __m512i low13 = _mm512_shuffle_i32x4(v[j], v[4 + j], 0xdd);
    const __m512i high02 = _mm512_shuffle_i32x4(v[8 + j], v[12 + j], 0x88);
    const __m512i high13 = _mm512_shuffle_i32x4(v[8 + j], v[12 + j], 0xdd);
    auto* out = reinterpret_cast<__m512i*>(tile);
    _mm512_store_si512(out + j, _mm512_shuffle_i32x4(low02, high02, 0x88));
    _mm512_store_si512(out + 8 + j, _mm512_shuffle_i32x4(low02, high02, 0xdd));
    _mm512_store_si512(out + 4 + j, _mm512_shuffle_i32x4(low13, high13, 0x88));
    _mm512_store_si512(out + 12 + j, _mm512_shuffle_i32x4(low13, high13, 0xdd));
  }
}

// source(column) -> the weights of that output column, or null for padding.
template <class Source>
void pack_unit(const Matrix& w, int unit, Source&& source) {
  const bf16* rows[kUnit];
  for (int i = 0; i < kUnit; i++) rows[i] = source(unit * kUnit + i);
  std::uint8_t* out = w.data + w.unit_bytes() * unit;
  for (int k = 0; k < w.blocks; k++, out += kBlockBytes) {
    pack_tile(out, rows, k * kBlock);
    pack_tile(out + kTileBytes, rows + 16, k * kBlock);
  }
}

}  // namespace treadle
