#include "tests/unit/model/model_fixture.h"

#include "tests/testing/local_comm.h"

namespace remesh::model {

Passed run_split(const Model& m, const Pipeline& p, const StageOptions& options,
                 const geometry::Layout& layout) {
  const int ranks = layout.tp * layout.cp;
  std::vector<Passed> parts(static_cast<size_t>(ranks));
  comm::on_ranks(ranks, [&](comm::Comm& comm) {
    const int rank = comm.rank();
    const geometry::Coord coord{.tp = rank % layout.tp, .cp = rank / layout.tp};
    const auto tp = comm.split(coord.cp, coord.tp);
    const auto cp = comm.split(coord.tp, coord.cp);
    const auto backend = kernels::make_cpu_backend(1);
    StageOptions o = options;
    o.tp = layout.tp > 1 ? tp.get() : nullptr;
    o.cp = layout.cp > 1 ? cp.get() : nullptr;
    parts[static_cast<size_t>(rank)] =
        run_pipeline(m, p, o, *backend, layout, coord);
  });
  Passed out{.loss = std::vector<double>(parts[0].loss.size()),
             .grads = m.zeros()};
  for (size_t r = 0; r < parts.size(); ++r) {
    const size_t first =
        r / static_cast<size_t>(layout.tp) * static_cast<size_t>(layout.tp);
    CHECK_MSG(parts[r].loss == parts[first].loss,
              "tensor-parallel ranks differ in their loss");
    for (size_t i = 0; i < out.loss.size(); ++i)
      if (r == first) out.loss[i] += parts[r].loss[i];
    for (size_t i = 0; i < out.grads.size(); ++i)
      out.grads[i] += parts[r].grads[i];
  }
  return out;
}

}  // namespace remesh::model
