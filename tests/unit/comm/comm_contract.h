// What every Comm promises, checked by random operations against a naive
// computation: inputs are functions of (seed, operation, rank, element), so
// each rank works out alone what it must see.
//
// Used with threads (local_comm_test) and with processes (mpi_comm_test).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "parallel/comm/comm.h"

namespace remesh::comm {

// Called by every rank of `comm` with the same arguments; vectors have up to
// `max_length` (at least 1000) elements. Returns what did not hold, empty when
// all did.
std::vector<std::string> check_contract(Comm& comm, uint64_t seed, int rounds,
                                        size_t max_length);

}  // namespace remesh::comm
