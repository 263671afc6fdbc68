// Mesh: the groups one rank belongs to under a layout.
//
// A group along an axis holds the ranks that differ from this one in that
// coordinate alone, ordered by it: tp() are the holders of the other shards of
// the same tensors, pp() the stages of this rank's pipeline, cp() the holders
// of the other parts of the sequences. data() is dp and cp together, ordered by
// dp_i * cp + cp_i: all ranks that hold the same parameters and a part of their
// gradient.
#pragma once

#include <memory>

#include "parallel/comm/comm.h"
#include "parallel/geometry/layout.h"
#include "proto/base/status.h"

namespace remesh::comm {

class Mesh {
 public:
  // Collective over `world`, which must outlive the mesh. Fails when the
  // world's size is not the layout's.
  static Result<std::unique_ptr<Mesh>> make(Comm& world,
                                            const geometry::Layout& layout);

  const geometry::Layout& layout() const { return layout_; }
  const geometry::Coord& coord() const { return coord_; }
  Comm& world() { return *world_; }
  Comm& pp() { return *pp_; }
  Comm& tp() { return *tp_; }
  Comm& cp() { return *cp_; }
  Comm& data() { return *data_; }

 private:
  Mesh() = default;
  geometry::Layout layout_;
  geometry::Coord coord_;
  Comm* world_ = nullptr;
  std::unique_ptr<Comm> pp_, tp_, cp_, data_;
};

}  // namespace remesh::comm
