// MPI_Allreduce as Open MPI has it, for comparison only. The world is the one
// that MpiWorld initialised.
#pragma once

#include <span>

namespace remesh::bench {

void plain_all_reduce(std::span<float> data);

}  // namespace remesh::bench
