#include "tests/testing/leftovers.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
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

std::vector<std::string> temporary_entries() {
  std::vector<std::string> out;
  std::error_code ignored;
  for (const char* folder : {"/tmp", "/dev/shm"})
    for (const auto& e : fs::directory_iterator(folder, ignored)) {
      const std::string name = e.path().filename().string();
      for (const char* prefix :
           {"ompi", "openmpi", "pmix", "PMIx", "vader", "sm_segment", "prte"})
        if (name.starts_with(prefix)) out.push_back(e.path().string());
    }
  std::sort(out.begin(), out.end());
  return out;
}

std::vector<std::string> temporary_leftovers(
    const std::vector<std::string>& before) {
  std::vector<std::string> out;
  for (const std::string& e : temporary_entries())
    if (!std::binary_search(before.begin(), before.end(), e)) out.push_back(e);
  return out;
}

std::vector<std::string> worker_leftovers(
    const std::string& scratch, const std::vector<std::string>& names) {
  std::vector<std::string> out;
  std::error_code ignored;
  const std::string common = fmt::format("/tmp/remesh-{}", geteuid());
  for (const std::string& root : {scratch, common})
    for (const std::string& name : names) {
      const std::string folder = fmt::format("{}/{}", root, name);
      if (held_by_the_living(folder + "/lock")) continue;
      for (const std::string& path : {folder, shared_folder(root, name)})
        if (fs::exists(path, ignored)) out.push_back(path);
    }
  return out;
}

std::string shared_folder(const std::string& scratch, const std::string& name) {
  return fmt::format("/dev/shm/remesh-{}-{:016x}", geteuid(),
                     hash64(scratch + "/" + name));
}

bool listens(int port) {
  constexpr const char* kListen = "0A";
  const std::string wanted = fmt::format(":{:04X}", port);
  for (const char* file : {"/proc/net/tcp", "/proc/net/tcp6"})
    for (const std::string& line : split_lines(read_whole(file))) {
      std::istringstream in(line);
      std::string number;
      std::string local;
      std::string remote;
      std::string state;
      in >> number >> local >> remote >> state;
      if (state == kListen && local.ends_with(wanted)) return true;
    }
  return false;
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
