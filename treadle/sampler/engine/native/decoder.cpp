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
#include "gemm.h"
#include "layers.h"
#include "memory.h"
#include "sample.h"
#include "team.h"

extern "C" {

// Mirrored field by field in decoder.py.
struct TreadleSpec {
  std::int32_t layers, hidden, heads, kv_heads, head_dim, intermediate, vocab;
  std::int32_t positions;  // rows of cos and sin
  std::int32_t threads;
  std::int32_t kernel;  // 0 best, 1 avx512_bf16, 2 amx
  float eps;
  float scale;  // of attention scores
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

namespace treadle {
namespace {

enum Section { kNorm, kQkv, kAttend, kO, kGateUp, kDown, kHead, kSample, kSections };

constexpr int kChunkUnits = kChunk / kUnit;

bool amx_permitted() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const bool has = (d >> 22 & 1) != 0 && (d >> 24 & 1) != 0;  // AMX-BF16, AMX-TILE
  // The kernel saves tile state only for processes that asked: ARCH_REQ_XCOMP_PERM, XTILEDATA.
  return has && syscall(SYS_arch_prctl, 0x1023, 18) == 0;
}

struct Layer {
  Matrix qkv, o, gate_up, down;
  std::vector<bf16> norm1, norm2, bias, q_norm, k_norm;
};

class Decoder {
 public:
  explicit Decoder(const TreadleSpec& spec)
      : s_(spec), team_(spec.threads), layers_(spec.layers), streams_(spec.threads) {
    amx_ = spec.kernel != 1 && amx_permitted();
    if (spec.kernel == 2 && !amx_) throw std::string("this machine does not permit AMX");
    kernel_ = amx_ ? kernel_amx : kernel_avx512;
    q_width_ = s_.heads * s_.head_dim;
    kv_width_ = s_.kv_heads * s_.head_dim;
    cache_ = {static_cast<bf16*>(s_.k), static_cast<bf16*>(s_.v), std::size_t(s_.kv_blocks),
              s_.kv_heads, s_.head_dim};
    const std::size_t cache_bytes = cache_.block_size() * s_.kv_blocks * s_.layers * 2;
    advise_huge(s_.k, cache_bytes);
    advise_huge(s_.v, cache_bytes);
    const std::size_t table = std::size_t(s_.positions) * s_.head_dim / 2;
    cos_.assign(static_cast<const bf16*>(s_.cos), static_cast<const bf16*>(s_.cos) + table);
    sin_.assign(static_cast<const bf16*>(s_.sin), static_cast<const bf16*>(s_.sin) + table);
    const std::size_t scratch =
        std::max(attention_scratch(s_.positions), sizeof(float) * kRows * kChunk);
    scratch_step_ = (scratch + 4095) / 4096 * 4096;
    scratch_.reserve(scratch_step_ * s_.threads);
    const long l2 = sysconf(_SC_LEVEL2_CACHE_SIZE);
    lead_ = l2 > 0 ? std::size_t(l2) / 4 : std::size_t{256} << 10;
    for (int i = 0; i < 8 * s_.layers + 4; i++) phases_.emplace_back(s_.threads);
    lay_out();
  }

  void pack(const TreadleWeights& w) {
    const std::lock_guard<std::mutex> lock(mutex_);
    embedding_ = static_cast<const bf16*>(w.embedding);
    norm_.assign(static_cast<const bf16*>(w.norm), static_cast<const bf16*>(w.norm) + s_.hidden);
    for (int i = 0; i < s_.layers; i++) pack_small(layers_[i], w.layers[i]);
    std::vector<Phase> phases;
    for (int i = 0; i < 4 * s_.layers + 1; i++) phases.emplace_back(s_.threads);
    for (int i = 0; i < s_.layers; i++) {
      phases[4 * i].deal(layers_[i].qkv.units);
      phases[4 * i + 1].deal(layers_[i].o.units);
      phases[4 * i + 2].deal(layers_[i].gate_up.units);
      phases[4 * i + 3].deal(layers_[i].down.units);
    }
    phases.back().deal(head_.units);
    team_.run([&](int thread) {
      for (int i = 0; i < s_.layers; i++) {
        const TreadleLayer& from = w.layers[i];
        const Layer& to = layers_[i];
        const auto rows = [](const void* p, int inputs) {
          return
              [p, inputs](int n) { return static_cast<const bf16*>(p) + std::size_t(n) * inputs; };
        };
        const void* qkv[] = {from.q, from.k, from.v};
        const auto gate = rows(from.gate, s_.hidden), up = rows(from.up, s_.hidden);
        phases[4 * i].each(thread, [&](int unit) {
          pack_unit(to.qkv, unit, [&](int n) {
            const Column column = qkv_column(n);
            return rows(qkv[column.part], s_.hidden)(column.index);
          });
        });
        phases[4 * i + 1].each(thread,
                               [&](int unit) { pack_unit(to.o, unit, rows(from.o, q_width_)); });
        // A unit is 16 columns of gate beside the same 16 of up, so that one call sees both.
        phases[4 * i + 2].each(thread, [&](int unit) {
          pack_unit(to.gate_up, unit, [&](int n) {
            const int column = n / kUnit * 16 + n % 16;
            return n % kUnit < 16 ? gate(column) : up(column);
          });
        });
        phases[4 * i + 3].each(
            thread, [&](int unit) { pack_unit(to.down, unit, rows(from.down, s_.intermediate)); });
      }
      phases.back().each(thread, [&](int unit) {
        pack_unit(head_, unit, [&](int n) {
          return n < s_.vocab ? static_cast<const bf16*>(w.head) + std::size_t(n) * s_.hidden
                              : nullptr;
        });
      });
    });
  }

  // Returns an error message, or "" when done.
  std::string run(const TreadleCall& call) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::string error = check(call);
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
  // ------------------------------------------------------------------------ weights

  void lay_out() {
    std::size_t bytes = 0;
    std::vector<Matrix*> all;
    const auto add = [&](Matrix& m, int outputs, int inputs, int multiple) {
      m.units = ((outputs + kUnit - 1) / kUnit + multiple - 1) / multiple * multiple;
      m.blocks = inputs / kBlock;
      bytes += m.bytes();
      all.push_back(&m);
    };
    for (Layer& layer : layers_) {
      add(layer.qkv, q_width_ + 2 * kv_width_, s_.hidden, 1);
      add(layer.o, s_.hidden, q_width_, 1);
      add(layer.gate_up, 2 * s_.intermediate, s_.hidden, 1);
      add(layer.down, s_.hidden, s_.intermediate, 1);
    }
    add(head_, s_.vocab, s_.hidden, kChunkUnits);
    packed_.reserve(bytes);
    std::size_t offset = 0;
    for (Matrix* m : all) {
      m->data = packed_.as<std::uint8_t>(offset);
      offset += m->bytes();
      const int group = m == &head_ ? kChunkUnits : 1;
      for (int t = 0; t < s_.threads; t++) {
        const auto at = [&](int thread) {
          return m->data +
                 m->unit_bytes() * group * run_begin(m->units / group, thread, s_.threads);
        };
        streams_[t].add(at(t), at(t + 1));
      }
    }
  }

  // The columns of qkv go by KV head: its queries, its key, its value.
  struct Column {
    int part;  // 0 q, 1 k, 2 v
    int index;
  };
  Column qkv_column(int n) const {
    const int kv_head = n / group_width(), inside = n % group_width();
    const int queries = group() * s_.head_dim;
    if (inside < queries) return {0, kv_head * queries + inside};
    const int part = inside < queries + s_.head_dim ? 1 : 2;
    return {part, kv_head * s_.head_dim + inside - queries - (part - 1) * s_.head_dim};
  }
  int group() const { return s_.heads / s_.kv_heads; }
  int group_width() const { return (group() + 2) * s_.head_dim; }

  void pack_small(Layer& to, const TreadleLayer& from) {
    const auto copy = [](std::vector<bf16>& out, const void* p, int n) {
      const auto* begin = static_cast<const bf16*>(p);
      if (p != nullptr) out.insert(out.end(), begin, begin + n);
    };
    for (auto* v : {&to.norm1, &to.norm2, &to.bias, &to.q_norm, &to.k_norm}) v->clear();
    copy(to.norm1, from.norm1, s_.hidden);
    copy(to.norm2, from.norm2, s_.hidden);
    const void* bias[] = {from.q_bias, from.k_bias, from.v_bias};
    for (int n = 0; from.q_bias != nullptr && n < q_width_ + 2 * kv_width_; n++) {
      const Column column = qkv_column(n);
      to.bias.push_back(static_cast<const bf16*>(bias[column.part])[column.index]);
    }
    copy(to.q_norm, from.q_norm, s_.head_dim);
    copy(to.k_norm, from.k_norm, s_.head_dim);
  }

  // ------------------------------------------------------------------------ a step

  std::string check(const TreadleCall& call) const {
    char text[160];
    for (int r = 0; r < call.rows; r++) {
      const std::int64_t id = call.ids[r];
      const int position = call.positions[r];
      if (id < 0 || id >= s_.vocab) {
        std::snprintf(text, sizeof text, "row %d of %d: id %lld is outside 0..%d", r, call.rows,
                      static_cast<long long>(id), s_.vocab - 1);
        return text;
      }
      if (position < 0 || position >= s_.positions || position / kPositions >= call.table_width) {
        std::snprintf(text, sizeof text,
                      "row %d of %d: position %d, but %d positions and a table of %d blocks", r,
                      call.rows, position, s_.positions, call.table_width);
        return text;
      }
      for (int b = 0; b <= position / kPositions; b++) {
        const int block = call.tables[std::size_t(r) * call.table_width + b];
        if (block < 0 || block >= s_.kv_blocks) {
          std::snprintf(text, sizeof text,
                        "row %d of %d: table entry %d is block %d, outside 0..%lld", r, call.rows,
                        b, block, static_cast<long long>(s_.kv_blocks - 1));
          return text;
        }
      }
    }
    for (int i = 0; call.outputs != nullptr && i < call.num_outputs; i++) {
      if (call.outputs[i] < 0 || call.outputs[i] >= call.rows)
        return "an output row does not exist";
    }
    return "";
  }

  void prepare(const TreadleCall& call) {
    const int stride = Activations::stride_for(call.rows);
    std::size_t bytes = 0;
    const auto place = [&](std::size_t size) {
      const std::size_t at = bytes;
      bytes += (size + 4095) / 4096 * 4096;
      return at;
    };
    const std::size_t x = place(std::size_t(stride) * s_.hidden * 2);
    const std::size_t attended = place(std::size_t(stride) * q_width_ * 2);
    const std::size_t act = place(std::size_t(stride) * s_.intermediate * 2);
    const int padded = (call.rows + 15) / 16 * 16, blocks = s_.hidden / kBlock;
    const std::size_t h = place(std::size_t(stride) * s_.hidden * 2);
    const std::size_t squares = place(sizeof(float) * padded * blocks);
    const std::size_t qkv = place(std::size_t(call.rows) * group_width() * s_.kv_heads * 2);
    const bool sampling = call.temperature != nullptr;
    const std::size_t stats =
        place(sampling ? sizeof(ChunkStats) * chunks() * call.num_outputs : 0);
    const std::size_t logits =
        place(sampling ? sizeof(float) * kChunk * chunks() * call.num_outputs : 0);
    work_.reserve(bytes);
    rows_ = call.rows;
    independent_ = independent(call);
    x_ = {work_.as<bf16>(x), stride};
    attended_ = {work_.as<bf16>(attended), stride};
    act_ = {work_.as<bf16>(act), stride};
    residual_ = {{work_.as<bf16>(h), stride}, work_.as<float>(squares), padded, blocks};
    qkv_ = work_.as<bf16>(qkv);
    stats_ = work_.as<ChunkStats>(stats);
    logits_ = sampling ? work_.as<float>(logits) : call.logits;
    logits_stride_ = sampling ? std::size_t(kChunk) * chunks() : std::size_t(s_.vocab);

    outputs_.clear();
    for (int i = 0; call.outputs != nullptr && i < (call.num_outputs + 15) / 16 * 16; i++) {
      outputs_.push_back(i < call.num_outputs ? static_cast<std::int32_t>(call.outputs[i]) : 0);
    }
    auto phase = phases_.begin();
    (phase++)->deal(blocks);
    for (const Layer& layer : layers_) {
      const int heads = call.rows * s_.kv_heads;
      for (const int items : {blocks, layer.qkv.units, independent_ ? 0 : heads, heads,
                              layer.o.units, blocks, layer.gate_up.units, layer.down.units}) {
        (phase++)->deal(items);
      }
    }
    for (const int items : {blocks, chunks(), call.num_outputs}) (phase++)->deal(items);
    for (double& section : sections_) section = 0.0;
  }

  // Whether no row reads a block that another row writes: then a row may attend before the
  // others have written their keys and values. True for decoding, false for prompts.
  bool independent(const TreadleCall& call) {
    writer_.resize(std::size_t(s_.kv_blocks), -1);
    bool yes = true;
    for (int r = 0; r < call.rows; r++) {
      std::int32_t& writer = writer_[block_of(call, r, call.positions[r])];
      yes = yes && writer < 0;
      writer = r;
    }
    for (int r = 0; yes && r < call.rows; r++) {
      for (int p = 0; p <= call.positions[r]; p += kPositions) {
        const std::int32_t writer = writer_[block_of(call, r, p)];
        yes = yes && (writer < 0 || writer == r);
      }
    }
    for (int r = 0; r < call.rows; r++) writer_[block_of(call, r, call.positions[r])] = -1;
    return yes;
  }

  int chunks() const { return head_.units / kChunkUnits; }

  void step(int thread, const TreadleCall& call) {
    const int rows = call.rows;
    Stream& stream = streams_[thread];
    stream.rewind();
    stream.fetch(lead_, lead_);
    void* scratch = scratch_.as<char>(scratch_step_ * thread);
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
      const Layer& layer = layers_[index];
      phase->each(thread, [&](int block) {
        residual_.norm(block, rows, nullptr, layer.norm1.data(), s_.eps, x_);
      });
      finish(kNorm);

      product(layer.qkv, x_, [&](int unit, int first, int n, const float* c) {
        const int column = unit * kUnit;
        bf16* out = projected(column / group_width(), first) + column % group_width();
        for (int r = 0; r < n; r++, out += group_width()) {
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
        phase->each(thread, [&](int item) { write_kv(layer, index, call, item); });
      }
      finish(kAttend);
      phase->each(thread, [&](int item) {
        if (independent_) write_kv(layer, index, call, item);
        const int row = item % rows, kv_head = item / rows;
        const bool more = item + 1 < rows * s_.kv_heads;
        const Span next = more ? span_of(index, call, item + 1) : Span{};
        attend(projected(kv_head, row), group(), s_.head_dim, s_.scale, span_of(index, call, item),
               attended_, row, kv_head * group() * s_.head_dim, scratch, more ? &next : nullptr);
        stream.fetch(4096, lead_);
      });
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
                     norm_.data(), s_.eps, x_);
    });
    finish(kNorm);
    phase->each(thread,
                [&](int chunk) { head_chunk(call, chunk, stream, static_cast<float*>(scratch)); });
    finish(kHead);
    if (call.temperature == nullptr) return;
    phase->each(thread, [&](int i) {
      const Draw drawn =
          draw(logits_ + logits_stride_ * i, s_.vocab, stats_ + std::size_t(chunks()) * i,
               call.temperature[i], call.uniform[i]);
      call.next[i] = drawn.id;
      call.logprobs[i] = drawn.logprob;
      call.entropies[i] = drawn.entropy;
    });
    finish(kSample);
  }

  void embed(const TreadleCall& call, int block) const {
    for (int row = 0; row < call.rows; row++) {
      std::memcpy(residual_.at(row, block),
                  embedding_ + std::size_t(call.ids[row]) * s_.hidden + block * kBlock, kBlock * 2);
    }
    for (int row = 0; row < call.rows; row += 16) {
      residual_.sum_squares(block, row, std::min(16, call.rows - row));
    }
  }

  // Queries, key and value of a row for one KV head.
  bf16* projected(int kv_head, int row) const {
    return qkv_ + (std::size_t(kv_head) * rows_ + row) * group_width();
  }

  // Head norms and rotation of one row's queries and key of one KV head; key and value go to
  // the cache.
  void write_kv(const Layer& layer, int index, const TreadleCall& call, int item) const {
    const int row = item % rows_, kv_head = item / rows_;
    const int dim = s_.head_dim, position = call.positions[row];
    const bf16* cos = cos_.data() + std::size_t(position) * dim / 2;
    const bf16* sin = sin_.data() + std::size_t(position) * dim / 2;
    bf16* x = projected(kv_head, row);
    for (int head = 0; head <= group(); head++, x += dim) {
      const auto& norm = head < group() ? layer.q_norm : layer.k_norm;
      if (!norm.empty()) head_norm(x, norm.data(), dim, s_.eps);
      rotate(x, cos, sin, dim);
    }
    const std::size_t block = block_of(call, row, position);
    const std::size_t to = cache_.at(index, kv_head) + block * cache_.block_size() +
                           std::size_t(position % kPositions) * dim;
    std::memcpy(cache_.k + to, x - dim, std::size_t(dim) * 2);
    std::memcpy(cache_.v + to, x, std::size_t(dim) * 2);
  }

  static std::int32_t block_of(const TreadleCall& call, int row, int position) {
    return call.tables[std::size_t(row) * call.table_width + position / kPositions];
  }

  Span span_of(int index, const TreadleCall& call, int item) const {
    const int row = item % rows_;
    const std::size_t at = cache_.at(index, item / rows_);
    return {cache_.k + at, cache_.v + at, cache_.block_size(),
            call.tables + std::size_t(row) * call.table_width, call.positions[row] + 1};
  }

  // 256 logits of all output rows: stored, and summed up for sampling.
  void head_chunk(const TreadleCall& call, int chunk, Stream& stream, float* c) {
    const std::size_t bytes = head_.unit_bytes();
    const int rows = call.num_outputs, passes = rows > kRows ? 2 : 1;
    const int valid = std::min(kChunk, s_.vocab - chunk * kChunk);
    for (int first = 0; first < rows; first += kRows) {
      const int n = std::min(kRows, rows - first);
      for (int u = 0; u < kChunkUnits; u++) {
        if (first == 0) stream.use(bytes);
        const auto ahead =
            first < passes * kRows ? stream.take(bytes / passes, lead_) : Stream::Piece{nullptr, 0};
        kernel_(head_.data + bytes * (std::size_t(chunk) * kChunkUnits + u), head_.blocks,
                x_.at(first, 0), x_.stride, n, c + u * kUnit, kChunk, ahead);
      }
      for (int r = 0; r < n; r++) {
        const int i = first + r;
        const float* from = c + r * kChunk;
        copy_logits(logits_ + logits_stride_ * i + std::size_t(chunk) * kChunk, from, valid);
        if (call.temperature == nullptr) continue;
        const float temperature = call.temperature[i];
        stats_[std::size_t(chunks()) * i + chunk] =
            chunk_stats(from, valid, temperature == 0.0f ? 1.0f : 1.0f / temperature);
      }
    }
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
  int q_width_ = 0, kv_width_ = 0;
  std::size_t lead_ = 0;

  const bf16* embedding_ = nullptr;
  std::vector<bf16> norm_, cos_, sin_;
  std::vector<Layer> layers_;
  Matrix head_;
  Buffer packed_;
  std::vector<Stream> streams_;

  Cache cache_;
  std::vector<Phase> phases_;
  Buffer work_, scratch_;
  std::size_t scratch_step_ = 0;
  Activations x_, attended_, act_;
  Residual residual_;
  int rows_ = 0;
  bool independent_ = false;
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
