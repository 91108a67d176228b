// The work of one attention step, cut into items once and used by every layer of the same shape.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

namespace blocktable {

// Keys [first, end) for the query tokens [token, token + tokens) of one row and one KV head. A part
// >= 0 means the keys were split: the item leaves an unnormalised result that is merged later.
struct Item {
  int32_t row, kv, token, tokens;
  int32_t position;  // of the first query token in its sequence
  int32_t part, merge;
  int64_t first, end;
};

// `parts` partial results of `rows` query rows each, from part index `first_part` on.
struct Merge {
  int32_t item, first_part, parts;
  int64_t first_row;  // of the partial result buffer
};

struct Shape {
  int64_t rows, tokens, width;  // table rows, query tokens, table entries a row
  int32_t heads, kv_heads, block_size;
  int64_t num_blocks;
  bool causal;
  int64_t window, sinks, chunk;  // 0 = none; `sinks` first positions are seen beside the window
  int32_t group() const { return heads / kv_heads; }
};

struct Range { int64_t first, end; };

// Keys a query sees: [0, head) and [first, end), head <= first.
struct Seen { int64_t head, first, end; };

static inline Seen visible(const Shape& s, int64_t position, int64_t seq_len) {
  int64_t first = 0, end = s.causal ? std::min(position + 1, seq_len) : seq_len;
  if (s.window) {
    first = std::max(first, position - s.window + 1);
    end = std::min(end, position + s.window);
  }
  if (s.chunk) {
    int64_t start = position >= 0 ? position / s.chunk * s.chunk : 0;
    first = std::max(first, start);
    end = std::min(end, start + s.chunk);
  }
  return {std::min(s.sinks, first), first, std::max(first, end)};
}

// Fixed lengths, so that a request's result does not depend on what else is in the batch.
constexpr int64_t kDecodeSplit = 512, kPrefillSplit = 4096;
constexpr int32_t kTileRows = 96, kDirectRows = 8;

struct Plan {
  Shape shape;
  std::vector<int32_t> starts, lens;
  std::vector<Item> items;
  std::vector<Merge> merges;
  std::vector<Range> pieces;  // scratch of add_tile
  std::vector<int32_t> idle;  // query tokens that see nothing: padded rows, behind the last row
  int64_t part_rows = 0;      // rows of the partial result buffer
  int32_t max_rows = 0;       // most query rows of an item
  int64_t work = 0;           // keys x query rows over all items

  void check(const int32_t* table, int64_t stride) const {
    char text[200];
    if (starts[0] < 0 || starts[shape.rows] > shape.tokens) {
      snprintf(text, sizeof text, "query_start_loc spans %d..%d of %lld query tokens", starts[0],
               starts[shape.rows], (long long)shape.tokens);
      throw std::invalid_argument(text);
    }
    for (int64_t row = 0; row < shape.rows; row++) {
      int64_t count = int64_t(starts[row + 1]) - starts[row], len = lens[row];
      if (count < 0 || len < 0 || len > shape.width * shape.block_size ||
          (shape.causal && len && count > len)) {
        snprintf(text, sizeof text,
                 "row %lld has %lld query tokens and seq_len %lld; its table holds %lld positions",
                 (long long)row, (long long)count, (long long)len,
                 (long long)(shape.width * shape.block_size));
        throw std::invalid_argument(text);
      }
      int64_t entries = (len + shape.block_size - 1) / shape.block_size;
      for (int64_t j = 0; j < entries; j++) {
        int32_t block = table[row * stride + j];
        if (block < 0 || block >= shape.num_blocks) {
          snprintf(text, sizeof text,
                   "block table row %lld entry %lld is %d, outside the cache of %lld blocks",
                   (long long)row, (long long)j, block, (long long)shape.num_blocks);
          throw std::invalid_argument(text);
        }
      }
    }
  }

  void add_tile(int32_t row, int32_t token, int32_t tokens) {
    int64_t len = lens[row], count = starts[row + 1] - starts[row];
    int64_t position = len - count + (token - starts[row]);
    Seen low = visible(shape, position, len), high = visible(shape, position + tokens - 1, len);
    int32_t rows = tokens * shape.group();
    int64_t split = rows <= kDirectRows ? kDecodeSplit : kPrefillSplit;
    cut({std::min(low.first, high.first), std::max(low.end, high.end)}, split);
    max_rows = std::max(max_rows, rows);
    for (const Range& keys : pieces) work += (keys.end - keys.first) * rows * shape.kv_heads;
    for (int32_t kv = 0; kv < shape.kv_heads; kv++) {
      Item item{row, kv, token, tokens, int32_t(position), -1, -1, 0, 0};
      bool split_up = pieces.size() > 1;
      if (split_up) {
        item.merge = int32_t(merges.size());
        merges.push_back({int32_t(items.size()), 0, int32_t(pieces.size()), part_rows});
        part_rows += int64_t(pieces.size()) * rows;
      }
      for (size_t p = 0; p < pieces.size(); p++) {
        item.part = split_up ? int32_t(p) : -1;
        item.first = pieces[p].first;
        item.end = pieces[p].end;
        items.push_back(item);
      }
    }
  }

  // Keys that some query of a tile sees: the sinks in front of `run`, and `run` cut at multiples of
  // `split`.
  void cut(Range run, int64_t split) {
    pieces.clear();
    if (shape.sinks && run.first) pieces.push_back({0, std::min(shape.sinks, run.first)});
    int64_t at = run.first;
    do {
      int64_t end = std::min(run.end, (at / split + 1) * split);
      pieces.push_back({at, end});
      at = end;
    } while (at < run.end);
  }

  void build() {
    int32_t tile = std::max(1, kTileRows / shape.group());
    int32_t next = 0;
    for (int64_t row = 0; row < shape.rows; row++) {
      for (; next < starts[row]; next++) idle.push_back(next);
      if (lens[row] == 0) continue;
      for (int32_t token = starts[row]; token < starts[row + 1]; token += tile)
        add_tile(int32_t(row), token, std::min(tile, starts[row + 1] - token));
      next = starts[row + 1];
    }
    for (; next < shape.tokens; next++) idle.push_back(next);
  }
};

}  // namespace blocktable
