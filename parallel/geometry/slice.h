// Slices: which part of which parameter a rank holds, and how parts overlap.
// Pure integer geometry; every mover of state (checkpoint, exchange, replicas)
// plans with it.
//
// Two ways to name a part of the model's state:
//   Box        a rectangle of one parameter (a hyperslab)
//   FlatRange  consecutive elements of the flat vector of a ParamTable
//
// Under pipeline parallelism a stage holds its own layers' parameters; under
// tensor parallelism a rank holds one box of each split parameter and all of
// the others. Data and context parallelism replicate.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "parallel/geometry/layout.h"
#include "parallel/geometry/param_table.h"

namespace remesh::geometry {

// start[d] .. start[d] + count[d] in each dim d of one parameter. Empty when a
// count is 0.
struct Box {
  std::vector<int64_t> start;
  std::vector<int64_t> count;

  int64_t numel() const;
  bool empty() const { return numel() == 0; }
  friend bool operator==(const Box&, const Box&) = default;
};

// The whole parameter.
Box whole(const ParamSpec& spec);

// The common part, or nullopt when there is none.
// REQUIRES: the same number of dims.
std::optional<Box> intersect(const Box& a, const Box& b);

// Calls f(outer_offset, inner_offset, length) for each stretch of elements of
// `inner` that is consecutive in `outer`: element offsets in the row-major
// buffers of the two boxes, in ascending order, as long as possible. What a
// copy between two boxes loops over. REQUIRES: inner lies inside outer.
void for_each_run(const Box& outer, const Box& inner,
                  const std::function<void(int64_t, int64_t, int64_t)>& f);

// --- tensor and pipeline parallelism ---------------------------------------

// First layer of each stage, and n_layers last: stage s has the blocks
// [first[s], first[s + 1]). Made by split_layers (schedule.h).
using StageBounds = std::vector<int64_t>;

// Whether the model can be cut that way: tp must divide n_heads, and divide
// n_kv_heads or be a multiple of it (so that a rank has whole groups of query
// heads with their key/value head, or a part of one group), and be at most
// hidden_dim and vocab_size; pp is at most n_layers. The message lists the
// allowed degrees.
Status validate_layout(const ModelConfig& config, const Layout& layout);

// Whether pipeline stage `stage` holds a parameter: embedding on the first,
// final norm and head on the last, blocks by `bounds`. A tied embedding is
// held by both ends.
bool on_stage(const ParamSpec& spec, bool tied, const StageBounds& bounds,
              int stage);

// The box of a parameter that tensor-parallel rank tp_index of tp holds: units
// of split_unit are dealt out in order, the first ranks one more when they do
// not divide (a vocabulary of 257 over 2 is 129 and 128 rows). Unsplit
// parameters are whole. REQUIRES: validate_layout passed.
Box tp_box(const ParamSpec& spec, int tp, int tp_index);

// --- flat ranges -----------------------------------------------------------

struct FlatRange {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
  friend bool operator==(const FlatRange&, const FlatRange&) = default;
};

// [0, num_elements) cut into `parts` consecutive ranges whose sizes differ by
// one at most, larger ones first. Some are empty when parts > num_elements.
std::vector<FlatRange> split_even(int64_t num_elements, int parts);

// A box of one parameter whose elements are consecutive in the flat vector,
// starting at flat_begin.
struct Piece {
  size_t param = 0;
  Box box;
  int64_t flat_begin = 0;
  friend bool operator==(const Piece&, const Piece&) = default;
};

// The pieces that make up [begin, end), in flat order: at most three a
// parameter (end of a row, whole rows, start of a row).
// REQUIRES: 0 <= begin <= end <= num_elements().
std::vector<Piece> boxes_of_range(const ParamTable& table, int64_t begin,
                                  int64_t end);

}  // namespace remesh::geometry
