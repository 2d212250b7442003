// What can be said of a call before it runs.
#pragma once

#include <cstdio>
#include <string>
#include <vector>

#include "attention.h"
#include "interface.h"

namespace treadle {

inline std::int32_t block_of(const TreadleCall& call, int row, int position) {
  return call.tables[std::size_t(row) * call.table_width + position / kPositions];
}

// What is wrong with a call, or "". Nothing past this reads outside of its buffers.
inline std::string check(const TreadleSpec& spec, const TreadleCall& call) {
  char text[160];
  for (int r = 0; r < call.rows; r++) {
    const std::int64_t id = call.ids[r];
    const int position = call.positions[r];
    if (id < 0 || id >= spec.vocab) {
      std::snprintf(text, sizeof text, "row %d of %d: id %lld is outside 0..%d", r, call.rows,
                    static_cast<long long>(id), spec.vocab - 1);
      return text;
    }
    if (position < 0 || position >= spec.positions || position / kPositions >= call.table_width) {
      std::snprintf(text, sizeof text,
                    "row %d of %d: position %d, but %d positions and a table of %d blocks", r,
                    call.rows, position, spec.positions, call.table_width);
      return text;
    }
    for (int b = 0; b <= position / kPositions; b++) {
      const int block = call.tables[std::size_t(r) * call.table_width + b];
      if (block < 0 || block >= spec.kv_blocks) {
        std::snprintf(text, sizeof text,
                      "row %d of %d: table entry %d is block %d, outside 0..%lld", r, call.rows, b,
                      block, static_cast<long long>(spec.kv_blocks - 1));
        return text;
      }
    }
  }
  if (call.num_outputs > call.rows) return "more outputs than rows";
  for (int i = 0; call.outputs != nullptr && i < call.num_outputs; i++) {
    if (call.outputs[i] < 0 || call.outputs[i] >= call.rows) return "an output row does not exist";
  }
  return "";
}

// Whether no row reads a block that another row writes: then a row may attend before the
// others have written their keys and values. True for decoding, false for prompts. `by_block` has
// one entry per block, all -1, and is left so.
inline bool independent(const TreadleCall& call, std::vector<std::int32_t>& by_block) {
  bool yes = true;
  for (int r = 0; r < call.rows; r++) {
    std::int32_t& writer = by_block[block_of(call, r, call.positions[r])];
    yes = yes && writer < 0;
    writer = r;
  }
  for (int r = 0; yes && r < call.rows; r++) {
    for (int p = 0; p <= call.positions[r]; p += kPositions) {
      const std::int32_t writer = by_block[block_of(call, r, p)];
      yes = yes && (writer < 0 || writer == r);
    }
  }
  for (int r = 0; r < call.rows; r++) by_block[block_of(call, r, call.positions[r])] = -1;
  return yes;
}

// The rows in packs of at most `size` that begin with the same block, e.g. the samples of a prompt
// or the positions of one; as even as can be.
inline std::vector<Pack> packs_of(const TreadleCall& call, int size) {
  const auto same = [&](int a, int b, int block) {
    return block_of(call, a, block * kPositions) == block_of(call, b, block * kPositions);
  };
  std::vector<Pack> packs;
  for (int first = 0, end; first < call.rows; first = end) {
    for (end = first + 1; end < call.rows && same(first, end, 0);) end++;
    const int count = (end - first + size - 1) / size;
    for (int i = 0; i < count; i++) {
      Pack pack{first + run_begin(end - first, i, count)};
      pack.rows = first + run_begin(end - first, i + 1, count) - pack.first;
      pack.shared = pack.rows == 1 ? 0 : (call.positions[pack.first] + 1) / kPositions;
      for (int r = pack.first + 1; r < pack.first + pack.rows; r++) {
        pack.shared = std::min(pack.shared, (call.positions[r] + 1) / kPositions);
        int common = 0;
        while (common < pack.shared && same(pack.first, r, common)) common++;
        pack.shared = common;
      }
      packs.push_back(pack);
    }
  }
  return packs;
}

}  // namespace treadle
