// ShardTable: the parameters that one rank of a mesh holds, and where they
// lie in its flat vectors. Pure; the mesh-dependent twin of ParamTable, which
// stays the single source of names and full shapes.
//
// A rank holds, for each of its model chunks (schedule.h), the chunk's layers,
// and of each parameter the rectangle that its tensor-parallel index selects
// (slice.h). These are laid out densely, chunk by chunk, in the order of the
// ParamTable, so that q, k, v and gate, up remain neighbours. With pp = tp = 1
// the shard table is the ParamTable.
//
// A unit is gathered, computed with, reduced and freed as one: the
// embedding, one block, or final norm and head (the FSDP unit of Zhao et al.
// 2023). Units are consecutive in the flat vector and cover it.
//
// Gradients that several ranks have parts of:
//   norms under sequence parallelism, and keys and values that tensor-parallel
//   ranks share (tp > n_kv_heads): summed over ShardParam::tp_group ranks;
//   a tied embedding held by the first and the last stage: summed over both;
//   every parameter: summed over data- and context-parallel ranks.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "parallel/geometry/slice.h"

namespace remesh::geometry {

enum class UnitKind { kEmbedding, kBlock, kHead };

struct Unit {
  UnitKind kind = UnitKind::kBlock;
  int chunk = 0;               // of this rank
  int64_t layer = -1;          // of a block
  size_t first = 0, last = 0;  // parameters [first, last) of the shard table
  int64_t begin = 0, end = 0;  // elements [begin, end) of its flat vectors
  int64_t numel() const { return end - begin; }
};

struct ShardParam {
  size_t param = 0;    // in the ParamTable
  Rect rect;           // what of it this rank holds
  int64_t offset = 0;  // of the rectangle's first element in the flat vectors
  int unit = 0;
  // This many neighbouring tensor-parallel ranks, beginning at a multiple of
  // it, hold the same rectangle, and the gradient is the sum of theirs. 1: only
  // this rank.
  int tp_group = 1;
  // The other end of the pipeline holds it as well (tied embedding, pp > 1).
  bool tied_copy = false;
  // Among all ranks with one data-parallel coordinate that hold this rectangle,
  // this one counts it (gradient norm) and saves it.
  bool owner = true;
  int64_t numel() const { return rect.numel(); }
};

class ShardTable {
 public:
  // bounds: layers of all pp * chunks virtual stages (stage_bounds()). `table`
  // must outlive the shard table. Fails like validate_layout(), and unless the
  // pp * chunks + 1 bounds ascend from 0 to the number of layers.
  static Result<ShardTable> make(const ParamTable& table, const Layout& layout,
                                 const Coord& coord, const StageBounds& bounds,
                                 int chunks = 1);

  const ParamTable& table() const { return *table_; }
  const Layout& layout() const { return layout_; }
  const Coord& coord() const { return coord_; }
  int chunks() const { return chunks_; }
  // Layers [first, last) of a chunk, and whether it is an end of the model.
  int64_t first_layer(int chunk) const;
  int64_t last_layer(int chunk) const;
  bool has_embedding(int chunk) const;
  bool has_head(int chunk) const;

  size_t size() const { return params_.size(); }
  const ShardParam& operator[](size_t i) const { return params_[i]; }
  const ParamSpec& spec(size_t i) const { return (*table_)[params_[i].param]; }
  int64_t num_elements() const { return num_elements_; }
  // Index of the first parameter with that role (and layer) here, or -1.
  int find(Role role, int64_t layer = -1) const;
  // The parameter that holds flat element e, 0 <= e < num_elements().
  size_t param_at(int64_t e) const;

  const std::vector<Unit>& units() const { return units_; }
  // The unit of a chunk's embedding, block or head, or -1.
  int find_unit(UnitKind kind, int chunk, int64_t layer = -1) const;

  // Flat elements [begin, end) as rectangles, in flat order: at most three per
  // parameter (end of a row, full rows, start of a row). owned: only of the
  // parameters that this rank owns.
  std::vector<Piece> pieces(int64_t begin, int64_t end,
                            bool owned = false) const;

  // Initial weights of [begin, begin + out.size()): of each a function of the
  // seed, its parameter's name and its place in it, so the same on any mesh.
  void initial_values(uint64_t seed, int64_t begin, std::span<float> out) const;

 private:
  const ParamTable* table_ = nullptr;
  Layout layout_;
  Coord coord_;
  StageBounds bounds_;
  int chunks_ = 1;
  std::vector<ShardParam> params_;
  std::vector<Unit> units_;
  int64_t num_elements_ = 0;
};

// Layers of each of `stages` virtual stages, balanced by the work of a token at
// sequence length T (model_work.h); the embedding costs next to nothing.
// Fails when there are fewer layers than stages.
Result<StageBounds> stage_bounds(const ModelConfig& config, int stages,
                                 int64_t T);

}  // namespace remesh::geometry
