#include "tests/testing/leftovers.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <filesystem>
#include <set>
#include <sstream>

#include "proto/base/rng.h"
#include "tests/testing/files.h"

namespace remesh::testing {
namespace fs = std::filesystem;
namespace {

bool held_by_the_living(const std::string& lock) {
  const int fd = open(lock.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return false;
  const bool held = flock(fd, LOCK_EX | LOCK_NB) != 0;
  close(fd);
  return held;
}

}  // namespace

std::vector<std::string> worker_leftovers(
    const std::vector<std::string>& folders) {
  std::vector<std::string> out;
  std::error_code ignored;
  for (const std::string& folder : folders) {
    if (held_by_the_living(folder + "/lock")) continue;
    for (const std::string& path : {folder, shared_folder(folder)})
      if (fs::exists(path, ignored)) out.push_back(path);
  }
  return out;
}

std::string shared_folder(const std::string& folder) {
  return fmt::format("/dev/shm/remesh-{}-{:016x}", geteuid(), hash64(folder));
}

std::vector<std::string> listeners_of(pid_t pid) {
  const std::string proc = fmt::format("/proc/{}", pid);
  std::set<std::string> sockets;
  std::error_code ignored;
  for (const auto& fd : fs::directory_iterator(proc + "/fd", ignored))
    sockets.insert(fs::read_symlink(fd.path(), ignored).string());
  std::vector<std::string> out;
  for (const char* file : {"/net/tcp", "/net/tcp6"})
    for (const std::string& line : split_lines(read_whole(proc + file))) {
      std::istringstream in(line);
      std::vector<std::string> f(10);
      for (std::string& field : f) in >> field;
      const std::string& local = f[1];
      if (f[3] != "0A" || !sockets.contains("socket:[" + f[9] + "]")) continue;
      const size_t colon = local.find(':');
      uint32_t words[4] = {};
      for (size_t i = 0; i * 8 < colon; ++i)
        words[i] = static_cast<uint32_t>(
            std::stoul(local.substr(i * 8, 8), nullptr, 16));
      char text[INET6_ADDRSTRLEN] = {};
      inet_ntop(colon == 8 ? AF_INET : AF_INET6, words, text, sizeof(text));
      const std::string host =
          colon == 8 ? text : "[" + std::string(text) + "]";
      out.push_back(
          host + ":" +
          std::to_string(std::stoi(local.substr(colon + 1), nullptr, 16)));
    }
  return out;
}

}  // namespace remesh::testing
