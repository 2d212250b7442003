// A Llama-like decoder for CPUs with bf16 dot products: one parallel region per step.
//
//   embed -> [ norm -> qkv -> rotate, write KV, attend -> o + residual
//              norm -> gate, up -> silu * -> down + residual ] x layers
//         -> norm -> head -> (sample)
//
// An arrow starts a phase (team.h). Weights (gemm.h) pass through once; activations stay in the
// second-level caches, and phases are dealt so that a thread mostly finds there what it wrote
// itself: columns of products and of the residual stream, KV heads of attention. The C interface
// at the end is all that Python sees.

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <mutex>
#include <string>

#include "attention.h"
#include "call.h"
#include "gemm.h"
#include "interface.h"
#include "layers.h"
#include "memory.h"
#include "sample.h"
#include "team.h"
#include "weights.h"

namespace treadle {
namespace {

enum Section { kNorm, kQkv, kAttend, kO, kGateUp, kDown, kHead, kSample, kSections };

bool amx_permitted() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const bool has = (d >> 22 & 1) != 0 && (d >> 24 & 1) != 0;  // AMX-BF16, AMX-TILE
  // The kernel saves tile state only for processes that asked: ARCH_REQ_XCOMP_PERM, XTILEDATA.
  return has && syscall(SYS_arch_prctl, 0x1023, 18) == 0;
}

class Decoder {
 public:
  explicit Decoder(const TreadleSpec& spec)
      : s_(spec), team_(spec.threads), weights_(spec), group_(weights_.group()) {
    amx_ = spec.kernel != 1 && amx_permitted();
    if (spec.kernel == 2 && !amx_) throw std::string("this machine does not permit AMX");
    kernel_ = amx_ ? kernel_amx : kernel_avx512;
    cache_ = {static_cast<bf16*>(s_.k), static_cast<bf16*>(s_.v), std::size_t(s_.kv_blocks),
              s_.kv_heads, s_.head_dim};
    const std::size_t cache_bytes = cache_.block_size() * s_.kv_blocks * s_.layers * 2;
    advise_huge(s_.k, cache_bytes);
    advise_huge(s_.v, cache_bytes);
    const std::size_t table = std::size_t(s_.positions) * s_.head_dim / 2;
    cos_.assign(static_cast<const bf16*>(s_.cos), static_cast<const bf16*>(s_.cos) + table);
    sin_.assign(static_cast<const bf16*>(s_.sin), static_cast<const bf16*>(s_.sin) + table);
    const std::size_t scratch = std::max(Workspace::bytes(s_.positions, s_.head_dim),
                                         sizeof(float) * kRows * kChunk);
    scratch_step_ = (scratch + 4095) / 4096 * 4096;
    scratch_.reserve(scratch_step_ * s_.threads);
    const long l2 = sysconf(_SC_LEVEL2_CACHE_SIZE);
    lead_ = l2 > 0 ? std::size_t(l2) / 4 : std::size_t{256} << 10;
    for (int i = 0; i < 8 * s_.layers + 4; i++) phases_.emplace_back(s_.threads);
  }

  void pack(const TreadleWeights& from) {
    const std::lock_guard<std::mutex> lock(mutex_);
    weights_.pack(from, team_);
  }

  // Returns an error message, or "" when done.
  std::string run(const TreadleCall& call) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::string error = check(s_, call);
    if (!error.empty()) return error;
    prepare(call);
    team_.run([&](int thread) {
      TileConfig before;  // of the caller's own code; all zero = none
      if (amx_) {
        store_tile_config(before);
        configure_tiles();
      }
      step(thread, call);
      if (amx_) {
        if (before.palette != 0) {
          load_tile_config(before);
        } else {
          _tile_release();
        }
      }
    });
    return "";
  }

  const double* sections() const { return sections_; }
  const char* kernel() const { return amx_ ? "amx_bf16" : "avx512_bf16"; }

 private:
  // ------------------------------------------------------------------------ a step

  void prepare(const TreadleCall& call) {
    const int stride = Activations::stride_for(call.rows);
    std::size_t bytes = 0;
    const auto place = [&](std::size_t size) {
      const std::size_t at = bytes;
      bytes += (size + 4095) / 4096 * 4096;
      return at;
    };
    const std::size_t x = place(std::size_t(stride) * s_.hidden * 2);
    const std::size_t attended = place(std::size_t(stride) * s_.heads * s_.head_dim * 2);
    const std::size_t act = place(std::size_t(stride) * s_.intermediate * 2);
    const int padded = (call.rows + 15) / 16 * 16, blocks = s_.hidden / kBlock;
    const std::size_t h = place(std::size_t(stride) * s_.hidden * sizeof(float));
    const std::size_t squares = place(sizeof(float) * padded * blocks);
    const std::size_t qkv =
        place(std::size_t(call.rows) * weights_.group_width() * s_.kv_heads * 2);
    const bool sampling = call.temperature != nullptr;
    const std::size_t stats =
        place(sampling ? sizeof(ChunkStats) * weights_.chunks() * call.num_outputs : 0);
    const std::size_t logits =
        place(sampling ? sizeof(float) * kChunk * weights_.chunks() * call.num_outputs : 0);
    work_.reserve(bytes);
    rows_ = call.rows;
    writer_.resize(std::size_t(s_.kv_blocks), -1);
    independent_ = independent(call, writer_);
    packs_ = packs_of(call, std::max(1, kHeads / group_));
    x_ = {work_.as<bf16>(x), stride};
    attended_ = {work_.as<bf16>(attended), stride};
    act_ = {work_.as<bf16>(act), stride};
    residual_ = {work_.as<float>(h), stride, work_.as<float>(squares), padded, blocks};
    qkv_ = work_.as<bf16>(qkv);
    stats_ = work_.as<ChunkStats>(stats);
    logits_ = sampling ? work_.as<float>(logits) : call.logits;
    logits_stride_ = sampling ? std::size_t(kChunk) * weights_.chunks() : std::size_t(s_.vocab);

    outputs_.clear();
    for (int i = 0; call.outputs != nullptr && i < (call.num_outputs + 15) / 16 * 16; i++) {
      outputs_.push_back(i < call.num_outputs ? static_cast<std::int32_t>(call.outputs[i]) : 0);
    }
    auto phase = phases_.begin();
    (phase++)->deal(blocks);
    for (const Layer& layer : weights_.layers) {
      const int writes = independent_ ? 0 : call.rows * s_.kv_heads;
      for (const int items : {blocks, layer.qkv.units, writes, int(packs_.size()) * s_.kv_heads,
                              layer.o.units, blocks, layer.gate_up.units, layer.down.units}) {
        (phase++)->deal(items);
      }
    }
    for (const int items : {blocks, weights_.chunks(), call.num_outputs}) (phase++)->deal(items);
    for (double& section : sections_) section = 0.0;
  }

  void step(int thread, const TreadleCall& call) {
    const int rows = call.rows;
    Stream& stream = weights_.streams[thread];
    stream.rewind();
    stream.fetch(lead_, lead_);
    void* scratch = scratch_.as<char>(scratch_step_ * thread);
    const Workspace work(scratch, s_.positions, s_.head_dim);
    auto phase = phases_.begin();
    auto clock = std::chrono::steady_clock::now();
    // Ends a phase; thread 0 books its time.
    const auto finish = [&](Section section) {
      ++phase;
      if (thread != 0) return;
      const auto now = std::chrono::steady_clock::now();
      sections_[section] += std::chrono::duration<double>(now - clock).count();
      clock = now;
    };
    const auto product = [&](const Matrix& w, const Activations& x, auto&& done) {
      multiply(w, x, rows, kernel_, *phase, stream, lead_, thread, done);
    };

    phase->each(thread, [&](int block) { embed(call, block); });
    finish(kNorm);
    for (int index = 0; index < s_.layers; index++) {
      const Layer& layer = weights_.layers[index];
      phase->each(thread, [&](int block) {
        residual_.norm(block, rows, nullptr, layer.norm1.data(), s_.eps, x_);
      });
      finish(kNorm);

      product(layer.qkv, x_, [&](int unit, int first, int n, const float* c) {
        const int column = unit * kUnit, width = weights_.group_width();
        bf16* out = projected(column / width, first) + column % width;
        for (int r = 0; r < n; r++, out += width) {
          for (int i = 0; i < kUnit; i += 16) {
            __m512 y = _mm512_load_ps(c + r * kUnit + i);
            if (!layer.bias.empty())
              y = _mm512_add_ps(y, load_bf16(layer.bias.data() + column + i));
            store_bf16(out + i, y);
          }
        }
      });
      finish(kQkv);

      if (!independent_) {
        phase->each(thread, [&](int item) {
          write_kv(layer, index, call, item % rows, item / rows);
        });
      }
      finish(kAttend);
      phase->each(thread, [&](int item) {
        attend_pack(layer, index, call, item, work);
        stream.fetch(4096, lead_);
      });
      if (amx_) configure_tiles();
      finish(kAttend);

      const auto into_residual = [&](int unit, int first, int n, const float* c) {
        for (int r = 0; r < n; r++) add_residual(residual_.at(first + r, unit), c + r * kUnit);
        for (int r = 0; r < n; r += 16) {
          residual_.sum_squares(unit, first + r, std::min(16, n - r));
        }
      };
      product(layer.o, attended_, into_residual);
      finish(kO);

      phase->each(thread, [&](int block) {
        residual_.norm(block, rows, nullptr, layer.norm2.data(), s_.eps, x_);
      });
      finish(kNorm);

      product(layer.gate_up, x_, [&](int unit, int first, int n, const float* c) {
        for (int r = 0; r < n; r++) {
          store_bf16(act_.at(first + r, unit * 16),
                     gated(_mm512_load_ps(c + r * kUnit), _mm512_load_ps(c + r * kUnit + 16)));
        }
      });
      finish(kGateUp);

      product(layer.down, act_, into_residual);
      finish(kDown);
    }

    phase->each(thread, [&](int block) {
      residual_.norm(block, call.num_outputs, outputs_.empty() ? nullptr : outputs_.data(),
                     weights_.norm.data(), s_.eps, x_);
    });
    finish(kNorm);
    phase->each(thread,
                [&](int chunk) { head_chunk(call, chunk, stream, static_cast<float*>(scratch)); });
    finish(kHead);
    if (call.temperature == nullptr) return;
    phase->each(thread, [&](int i) {
      const Draw drawn =
          draw(logits_ + logits_stride_ * i, s_.vocab, stats_ + std::size_t(weights_.chunks()) * i,
               call.temperature[i], call.uniform[i]);
      call.next[i] = drawn.id;
      call.logprobs[i] = drawn.logprob;
      call.entropies[i] = drawn.entropy;
    });
    finish(kSample);
  }

  void embed(const TreadleCall& call, int block) const {
    for (int row = 0; row < call.rows; row++) {
      const bf16* from =
          weights_.embedding + std::size_t(call.ids[row]) * s_.hidden + block * kBlock;
      float* to = residual_.at(row, block);
      for (int i = 0; i < kBlock; i += 16) _mm512_storeu_ps(to + i, load_bf16(from + i));
    }
    for (int row = 0; row < call.rows; row += 16) {
      residual_.sum_squares(block, row, std::min(16, call.rows - row));
    }
  }

  // Queries, key and value of a row for one KV head.
  bf16* projected(int kv_head, int row) const {
    return qkv_ + (std::size_t(kv_head) * rows_ + row) * weights_.group_width();
  }

  // Head norms and rotation of one row's queries and key of one KV head; key and value go to the
  // cache.
  void write_kv(const Layer& layer, int index, const TreadleCall& call, int row,
                int kv_head) const {
    const int dim = s_.head_dim, position = call.positions[row];
    const bf16* cos = cos_.data() + std::size_t(position) * dim / 2;
    const bf16* sin = sin_.data() + std::size_t(position) * dim / 2;
    bf16* x = projected(kv_head, row);
    for (int head = 0; head <= group_; head++, x += dim) {
      const auto& norm = head < group_ ? layer.q_norm : layer.k_norm;
      if (!norm.empty()) head_norm(x, norm.data(), dim, s_.eps);
      rotate(x, cos, sin, dim);
    }
    const std::size_t block = block_of(call, row, position);
    cache_.write(cache_.at(index, kv_head) + block * cache_.block_size(), position % kPositions,
                 x - dim, x, s_.scale);
  }

  // Item = KV head by pack, all packs of a KV head after one another.
  void attend_pack(const Layer& layer, int index, const TreadleCall& call, int item,
                   const Workspace& work) const {
    const bool more = item + 1 < int(packs_.size()) * s_.kv_heads;
    Queries queries = queries_of(index, call, item);
    const Queries next = more ? queries_of(index, call, item + 1) : Queries{};
    if (independent_) {
      for (int r = 0; r < queries.rows; r++) {
        write_kv(layer, index, call, queries.of[r].row, item / int(packs_.size()));
      }
    }
    for (int head = 0; head < group_; head += kHeads) {
      attend(queries, std::min(kHeads, group_ - head), s_.head_dim, amx_, attended_, work,
             more ? &next : nullptr);
      for (int r = 0; r < queries.rows; r++) {
        queries.of[r].q += kHeads * s_.head_dim;
        queries.of[r].column += kHeads * s_.head_dim;
      }
    }
  }

  Queries queries_of(int index, const TreadleCall& call, int item) const {
    const int kv_head = item / int(packs_.size());
    const Pack& pack = packs_[item % packs_.size()];
    Queries queries;
    queries.rows = pack.rows;
    queries.shared = pack.shared;
    for (int r = 0; r < pack.rows; r++) {
      const int row = pack.first + r;
      queries.of[r] = {projected(kv_head, row), span_of(index, call, row, kv_head), row,
                       kv_head * group_ * s_.head_dim};
    }
    return queries;
  }

  Span span_of(int index, const TreadleCall& call, int row, int kv_head) const {
    const std::size_t at = cache_.at(index, kv_head);
    return {cache_.k + at, cache_.v + at, cache_.block_size(),
            call.tables + std::size_t(row) * call.table_width, call.positions[row] + 1};
  }

  // 256 logits of all output rows: stored, and summed up for sampling.
  void head_chunk(const TreadleCall& call, int chunk, Stream& stream, float* c) {
    const std::size_t bytes = weights_.head.unit_bytes();
    const int rows = call.num_outputs, passes = rows > kRows ? 2 : 1;
    const int valid = std::min(kChunk, s_.vocab - chunk * kChunk);
    for (int first = 0; first < rows; first += kRows) {
      const int n = std::min(kRows, rows - first);
      for (int u = 0; u < kChunkUnits; u++) {
        if (first == 0) stream.use(bytes);
        const auto ahead =
            first < passes * kRows ? stream.take(bytes / passes, lead_) : Stream::Piece{nullptr, 0};
        kernel_(weights_.head.data + bytes * (std::size_t(chunk) * kChunkUnits + u),
                weights_.head.blocks, x_.at(first, 0), x_.stride, n, c + u * kUnit, kChunk, ahead);
      }
      for (int r = 0; r < n; r++) {
        const int i = first + r;
        const float* from = c + r * kChunk;
        copy_logits(logits_ + logits_stride_ * i + std::size_t(chunk) * kChunk, from, valid);
        if (call.temperature == nullptr) continue;
        const float temperature = call.temperature[i];
        stats_[std::size_t(weights_.chunks()) * i + chunk] =
            chunk_stats(from, valid, temperature == 0.0f ? 1.0f : 1.0f / temperature);
      }
    }
    _mm_sfence();  // streamed stores are not ordered by the end of a phase
  }

  // Past the caches where alignment allows: nobody reads most of them again.
  static void copy_logits(float* to, const float* from, int valid) {
    if (valid == kChunk && reinterpret_cast<std::uintptr_t>(to) % 64 == 0) {
      for (int i = 0; i < kChunk; i += 16) _mm512_stream_ps(to + i, _mm512_load_ps(from + i));
    } else {
      std::memcpy(to, from, sizeof(float) * valid);
    }
  }

  const TreadleSpec s_;
  Team team_;
  std::mutex mutex_;
  Kernel kernel_ = nullptr;
  bool amx_ = false;
  std::size_t lead_ = 0;

  Weights weights_;
  const int group_;  // query heads per KV head
  std::vector<bf16> cos_, sin_;

  Cache cache_;
  std::vector<Phase> phases_;
  Buffer work_, scratch_;
  std::size_t scratch_step_ = 0;
  Activations x_, attended_, act_;
  Residual residual_;
  int rows_ = 0;
  bool independent_ = false;
  std::vector<Pack> packs_;
  std::vector<std::int32_t> outputs_, writer_;
  bf16* qkv_ = nullptr;
  ChunkStats* stats_ = nullptr;
  float* logits_ = nullptr;
  std::size_t logits_stride_ = 0;
  double sections_[kSections] = {};
};

// Runs body and turns whatever it throws into a message of at most `size` bytes; 0 = success.
template <class F>
int guarded(char* error, int size, F&& body) {
  std::string text;
  try {
    text = body();
  } catch (const std::string& message) {
    text = message;
  } catch (const std::exception& e) {
    text = e.what();
  }
  std::snprintf(error, std::size_t(size), "%s", text.c_str());
  return text.empty() ? 0 : 1;
}

}  // namespace
}  // namespace treadle

// ---------------------------------------------------------------------------- C interface

using treadle::Decoder;

extern "C" {

Decoder* treadle_create(const TreadleSpec* spec, char* error, int size) {
  Decoder* decoder = nullptr;
  treadle::guarded(error, size, [&] {
    decoder = new Decoder(*spec);
    return std::string();
  });
  return decoder;
}

void treadle_destroy(Decoder* decoder) { delete decoder; }

int treadle_pack(Decoder* decoder, const TreadleWeights* weights, char* error, int size) {
  return treadle::guarded(error, size, [&] {
    decoder->pack(*weights);
    return std::string();
  });
}

int treadle_run(Decoder* decoder, const TreadleCall* call, char* error, int size) {
  return treadle::guarded(error, size, [&] { return decoder->run(*call); });
}

const double* treadle_sections(const Decoder* decoder) { return decoder->sections(); }

const char* treadle_kernel(const Decoder* decoder) { return decoder->kernel(); }

}  // extern "C"
