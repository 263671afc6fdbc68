// measure_link: how fast hosts exchange data through MPI.
#pragma once

#include <string>
#include <vector>

#include "parallel/comm/comm.h"

namespace remesh::train {

// Bytes per second that the first rank of each host receives while those of all
// hosts gather, the least of any host; 0 if there is one host. Takes a fifth of
// a second or a few messages, whichever is longer. Collective. hosts: of each
// rank of the world.
double measure_link(comm::Comm& world, const std::vector<std::string>& hosts);

}  // namespace remesh::train
