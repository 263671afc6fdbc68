#include "proto/base/version.h"

#include <fmt/format.h>

namespace remesh {

std::string version() { return REMESH_VERSION; }

std::string build_id() {
  const std::string commit = REMESH_COMMIT;
  return commit.empty() ? version() : version() + "+" + commit;
}

std::string version_line(const std::string& program) {
  const std::string commit = REMESH_COMMIT;
  return fmt::format("{} {}{}", program, version(),
                     commit.empty() ? "" : " (commit " + commit + ")");
}

}  // namespace remesh
