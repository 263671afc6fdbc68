#include "proto/base/process.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>

namespace remesh {

std::string host_name() {
  char name[256] = {};
  if (gethostname(name, sizeof(name) - 1) != 0 || name[0] == '\0')
    return "localhost";
  return name;
}

Result<std::string> program_beside(const std::string& name) {
  std::error_code error;
  const auto self = std::filesystem::read_symlink("/proc/self/exe", error);
  const std::string path = (self.parent_path() / name).string();
  if (error || access(path.c_str(), X_OK) != 0)
    return not_found(path + ": no such program; it belongs in the folder of " +
                     self.filename().string());
  return path;
}

std::string exit_text(int signal, int exit_code) {
  if (signal == 0) return fmt::format("exit code {}", exit_code);
  const char* const name = sigabbrev_np(signal);
  return name == nullptr ? fmt::format("signal {}", signal)
                         : fmt::format("signal {} (SIG{})", signal, name);
}

}  // namespace remesh
