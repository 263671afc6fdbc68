// The contract of Comm, checked by random operations against a naive
// computation: inputs are functions of (seed, operation, rank, element), so
// each rank computes alone what it must receive.
//
// Used with threads (local_comm_test) and with processes (mpi_comm_test).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "parallel/comm/comm.h"

namespace remesh::comm {

// Called by every rank of `comm` with the same arguments; vectors have up to
// `max_length` (at least 1000) elements. Returns the first violation, or an
// empty text.
std::vector<std::string> check_contract(Comm& comm, uint64_t seed, int rounds,
                                        size_t max_length);

}  // namespace remesh::comm
