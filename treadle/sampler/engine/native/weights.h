// The weights of a model as the step wants them: packed, fused, on huge pages.
//
// Fused: q, k and v by KV head (its queries, its key, its value), so that the thread that computes
// a head's columns is mostly the one that attends with them; gate and up by 16 columns, so that
// one unit holds both operands of the activation.
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "gemm.h"
#include "interface.h"
#include "memory.h"
#include "sample.h"
#include "team.h"

namespace treadle {

constexpr int kChunkUnits = kChunk / kUnit;

struct Layer {
  Matrix qkv, o, gate_up, down;
  std::vector<bf16> norm1, norm2, bias, q_norm, k_norm;  // empty where the model has none
};

class Weights {
 public:
  explicit Weights(const TreadleSpec& spec) : layers(spec.layers), streams(spec.threads), s_(spec) {
    std::vector<Matrix*> all;
    std::size_t bytes = 0;
    const auto add = [&](Matrix& m, int outputs, int inputs) {
      m.units = (outputs + kUnit - 1) / kUnit;
      m.blocks = inputs / kBlock;
      if (&m == &head) m.units = (m.units + kChunkUnits - 1) / kChunkUnits * kChunkUnits;
      bytes += m.bytes();
      all.push_back(&m);
    };
    for (Layer& layer : layers) {
      add(layer.qkv, s_.kv_heads * group_width(), s_.hidden);
      add(layer.o, s_.hidden, s_.heads * s_.head_dim);
      add(layer.gate_up, 2 * s_.intermediate, s_.hidden);
      add(layer.down, s_.hidden, s_.intermediate);
    }
    add(head, s_.vocab, s_.hidden);
    packed_.reserve(bytes);
    std::size_t offset = 0;
    for (Matrix* m : all) {
      m->data = packed_.as<std::uint8_t>(offset);
      offset += m->bytes();
      const int items = m == &head ? chunks() : m->units;
      for (int t = 0; t < s_.threads; t++) {
        const auto at = [&](int thread) {
          return m->data + m->bytes() / items * run_begin(items, thread, s_.threads);
        };
        streams[t].add(at(t), at(t + 1));
      }
    }
  }

  // Query heads per KV head, and columns of qkv per KV head.
  int group() const { return s_.heads / s_.kv_heads; }
  int group_width() const { return (group() + 2) * s_.head_dim; }
  int chunks() const { return head.units / kChunkUnits; }

  // Copies everything but the embedding, which is only pointed to.
  void pack(const TreadleWeights& from, Team& team) {
    embedding = static_cast<const bf16*>(from.embedding);
    assign(norm, from.norm, s_.hidden);
    std::vector<std::pair<const Matrix*, Source>> sources;
    for (int i = 0; i < s_.layers; i++) {
      Layer& to = layers[i];
      const TreadleLayer& layer = from.layers[i];
      assign(to.norm1, layer.norm1, s_.hidden);
      assign(to.norm2, layer.norm2, s_.hidden);
      assign(to.q_norm, layer.q_norm, s_.head_dim);
      assign(to.k_norm, layer.k_norm, s_.head_dim);
      to.bias.clear();
      const void* bias[] = {layer.q_bias, layer.k_bias, layer.v_bias};
      for (int n = 0; layer.q_bias != nullptr && n < s_.kv_heads * group_width(); n++) {
        const Column column = qkv_column(n);
        to.bias.push_back(static_cast<const bf16*>(bias[column.part])[column.index]);
      }
      const Source parts[] = {rows_of(layer.q, s_.hidden), rows_of(layer.k, s_.hidden),
                              rows_of(layer.v, s_.hidden)};
      sources.emplace_back(&to.qkv, [this, parts](int n) {
        const Column column = qkv_column(n);
        return parts[column.part](column.index);
      });
      sources.emplace_back(&to.o, rows_of(layer.o, s_.heads * s_.head_dim));
      const Source gate = rows_of(layer.gate, s_.hidden), up = rows_of(layer.up, s_.hidden);
      sources.emplace_back(&to.gate_up, [gate, up](int n) {
        const int column = n / kUnit * 16 + n % 16;
        return n % kUnit < 16 ? gate(column) : up(column);
      });
      sources.emplace_back(&to.down, rows_of(layer.down, s_.intermediate));
    }
    const Source rows = rows_of(from.head, s_.hidden);
    const int vocab = s_.vocab;
    sources.emplace_back(&head, [rows, vocab](int n) { return n < vocab ? rows(n) : nullptr; });

    std::vector<std::pair<int, int>> units;
    for (int i = 0; i < int(sources.size()); i++) {
      for (int unit = 0; unit < sources[i].first->units; unit++) units.emplace_back(i, unit);
    }
    Phase phase(s_.threads);
    phase.deal(int(units.size()));
    team.run([&](int thread) {
      phase.each(thread, [&](int item) {
        const auto& [matrix, source] = sources[units[item].first];
        pack_unit(*matrix, units[item].second, source);
      });
    });
  }

  std::vector<Layer> layers;
  std::vector<bf16> norm;
  Matrix head;
  const bf16* embedding = nullptr;
  std::vector<Stream> streams;  // of each thread, its own units in the order of a step

 private:
  using Source = std::function<const bf16*(int)>;  // weights of an output column

  static Source rows_of(const void* weights, int inputs) {
    return [weights, inputs](int n) {
      return static_cast<const bf16*>(weights) + std::size_t(n) * inputs;
    };
  }

  static void assign(std::vector<bf16>& to, const void* from, int n) {
    const auto* begin = static_cast<const bf16*>(from);
    to.assign(begin, begin + (from == nullptr ? 0 : n));
  }

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

  const TreadleSpec s_;
  Buffer packed_;
};

}  // namespace treadle
