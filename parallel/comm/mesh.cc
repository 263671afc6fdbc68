#include "parallel/comm/mesh.h"

#include <fmt/format.h>

namespace remesh::comm {

Result<std::unique_ptr<Mesh>> Mesh::make(Comm& world,
                                         const geometry::Layout& layout) {
  if (world.size() != layout.world())
    return invalid_argument(
        fmt::format("mesh {}: needs {} ranks, the world has {}",
                    layout.to_string(), layout.world(), world.size()));
  auto mesh = std::unique_ptr<Mesh>(new Mesh());
  mesh->layout_ = layout;
  mesh->world_ = &world;
  const geometry::Coord me = layout.coord(world.rank());
  mesh->coord_ = me;
  // The group's color is the rank of its first member.
  geometry::Coord first = me;
  first.pp = 0;
  mesh->pp_ = world.split(layout.rank(first), me.pp);
  first = me;
  first.tp = 0;
  mesh->tp_ = world.split(layout.rank(first), me.tp);
  first = me;
  first.cp = 0;
  mesh->cp_ = world.split(layout.rank(first), me.cp);
  first.dp = 0;
  mesh->data_ = world.split(layout.rank(first), me.dp * layout.cp + me.cp);
  return mesh;
}

}  // namespace remesh::comm
