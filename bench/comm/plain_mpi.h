// Open MPI's MPI_Allreduce, for comparison only. REQUIRES: MpiWorld has
// initialized MPI.
#pragma once

#include <span>

namespace remesh::bench {

void plain_all_reduce(std::span<float> data);

}  // namespace remesh::bench
