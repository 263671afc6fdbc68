#include "worker/kernels/backend.h"

#include <string>

namespace remesh::kernels {

Result<std::unique_ptr<Backend>> make_backend(std::string_view name,
                                              int threads) {
  if (name == "cpu") return make_cpu_backend(threads);
  if (name == "reference") return make_reference_backend();
  return invalid_argument("train.backend = \"" + std::string(name) +
                          "\": must be one of cpu, reference");
}

}  // namespace remesh::kernels
