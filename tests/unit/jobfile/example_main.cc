// Prints the commented example that deploy/examples/defaults.toml holds.
#include <cstdio>

#include "proto/jobfile/jobfile.h"

int main() {
  std::fputs(remesh::jobfile::commented_example().c_str(), stdout);
  return 0;
}
