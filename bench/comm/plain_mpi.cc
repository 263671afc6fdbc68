#include "bench/comm/plain_mpi.h"

#define OMPI_SKIP_MPICXX 1
#include <mpi.h>

namespace remesh::bench {

void plain_all_reduce(std::span<float> data) {
  MPI_Allreduce(MPI_IN_PLACE, data.data(), static_cast<int>(data.size()),
                MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

}  // namespace remesh::bench
