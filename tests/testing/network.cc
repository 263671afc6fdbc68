#include "tests/testing/network.h"

#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <sstream>

#include "tests/testing/process.h"

namespace remesh::testing {
namespace {

std::vector<std::string> words(const std::string& line) {
  std::istringstream in(line);
  std::vector<std::string> out;
  for (std::string w; in >> w;) out.push_back(w);
  return out;
}

Status ip(const std::string& arguments) {
  const Finished f = run_program(words("ip " + arguments), 10'000);
  if (f.exit.code == 0) return ok_status();
  return unavailable(fmt::format("ip {}: {}", arguments, f.output));
}

}  // namespace

Result<std::unique_ptr<Network>> Network::make(int hosts) {
  static std::atomic<int> count{0};
  if (geteuid() != 0) return unavailable("network namespaces need root");
  const int number = count++;
  std::unique_ptr<Network> out(new Network);
  for (int h = 0; h < hosts; ++h) {
    const std::string name =
        fmt::format("remesh-{}-{}-{}", getpid(), number, h);
    RETURN_IF_ERROR(ip("netns add " + name));
    out->names_.push_back(name);
    RETURN_IF_ERROR(out->add_host(h));
  }
  return out;
}

// Host 0 has the bridge, and an address on it.
Status Network::add_host(int host) {
  const std::string& name = names_[static_cast<size_t>(host)];
  const std::string& first = names_[0];
  RETURN_IF_ERROR(ip(fmt::format("-n {} link set lo up", name)));
  std::string device = "lan";
  if (host == 0) {
    RETURN_IF_ERROR(ip(fmt::format("-n {} link add lan type bridge", first)));
  } else {
    RETURN_IF_ERROR(
        ip(fmt::format("-n {} link add port{} type veth peer name lan netns {}",
                       first, host, name)));
    RETURN_IF_ERROR(
        ip(fmt::format("-n {} link set port{} master lan up", first, host)));
  }
  RETURN_IF_ERROR(ip(
      fmt::format("-n {} addr add {}/24 dev {}", name, address(host), device)));
  return ip(fmt::format("-n {} link set {} up", name, device));
}

Network::~Network() {
  for (const std::string& name : names_) {
    const Finished f = run_program({"ip", "netns", "pids", name});
    for (const std::string& pid : words(f.output))
      kill(std::atoi(pid.c_str()), SIGKILL);
    (void)ip("netns del " + name);
  }
}

std::vector<std::string> Network::on(int host) const {
  return {"ip", "netns", "exec", names_[static_cast<size_t>(host)]};
}

std::string Network::address(int host) {
  return fmt::format("10.77.0.{}", host + 1);
}

void Network::set_link(int host, bool up) {
  (void)ip(fmt::format("-n {} link set port{} {}", names_[0], host,
                       up ? "up" : "down"));
}

}  // namespace remesh::testing
