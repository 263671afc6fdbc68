// Counts what a program takes by `new`: one that links remesh_allocations has
// its operators. Threads: any.
#pragma once

#include <cstddef>

namespace remesh {

// Begins to measure.
void reset_allocations();
// The most bytes at a time since then, beyond those of that moment. A request
// that failed counts.
size_t most_allocated();

}  // namespace remesh
