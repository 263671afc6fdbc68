#include "tests/testing/network.h"

#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
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

Status run(const std::vector<std::string>& command) {
  const Finished f = run_program(command, 10'000);
  if (f.exit.code == 0) return ok_status();
  return unavailable(fmt::format("{}: {}", fmt::join(command, " "), f.output));
}

Status ip(const std::string& arguments) {
  return run(words("ip " + arguments));
}

}  // namespace

Result<std::unique_ptr<Network>> Network::make(int hosts, bool ipv6) {
  static std::atomic<int> count{0};
  if (geteuid() != 0) return unavailable("network namespaces need root");
  const int number = count++;
  std::unique_ptr<Network> out(new Network);
  out->ipv6_ = ipv6;
  for (int h = 0; h < hosts; ++h) {
    const std::string name =
        fmt::format("remesh-{}-{}-{}", getpid(), number, h);
    RETURN_IF_ERROR(ip("netns add " + name));
    out->names_.push_back(name);
    RETURN_IF_ERROR(out->add_host(h));
    // Some containers may add a namespace but not enter it.
    RETURN_IF_ERROR(ip("netns exec " + name + " true"));
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
  RETURN_IF_ERROR(ip(ipv6_ ? fmt::format("-n {} addr add {}/64 dev {} nodad",
                                         name, address6(host), device)
                           : fmt::format("-n {} addr add {}/24 dev {}", name,
                                         address(host), device)));
  return ip(fmt::format("-n {} link set {} up", name, device));
}

Network::~Network() {
  for (const std::string& name : names_) {
    const Finished f = run_program({"ip", "netns", "pids", name});
    if (f.exit.code == 0)
      for (const std::string& pid : words(f.output))
        send_signal(std::atoi(pid.c_str()), SIGKILL);
    (void)ip("netns del " + name);
  }
}

std::vector<std::string> Network::on(int host) const {
  return {"ip", "netns", "exec", names_[static_cast<size_t>(host)]};
}

std::string Network::address(int host) {
  return fmt::format("10.77.0.{}", host + 1);
}

std::string Network::address6(int host) {
  return fmt::format("fd77::{}", host + 1);
}

void Network::set_link(int host, bool up) {
  (void)ip(fmt::format("-n {} link set port{} {}", names_[0], host,
                       up ? "up" : "down"));
}

Status Network::set_loss(int from, int to, double share) {
  if (share > 0)
    losses_[{from, to}] = share;
  else
    losses_.erase({from, to});
  return apply_losses();
}

Status Network::cut_off(int host) {
  for (int other = 0; other < static_cast<int>(names_.size()); ++other)
    if (other != host) losses_[{host, other}] = losses_[{other, host}] = 1;
  return apply_losses();
}

Status Network::set_dropped(const std::string& match) {
  dropped_ = match + " drop;";
  return apply_losses();
}

// The bridge is on host 0, so that host's own packets enter or leave there.
std::string Network::rule(int from, int to, double share) const {
  std::string out;
  if (from != 0) out += fmt::format("iifname port{} ", from);
  if (to != 0) out += fmt::format("oifname port{} ", to);
  if (share < 1)
    out += fmt::format("numgen random mod 1000 < {} ",
                       static_cast<int>(share * 1000));
  return out + "drop;";
}

Status Network::apply_losses() {
  std::string input, output, forward = dropped_ + " ";
  for (const auto& [link, share] : losses_) {
    const auto [from, to] = link;
    std::string& chain = from == 0 ? output : to == 0 ? input : forward;
    chain += rule(from, to, share) + " ";
  }
  const auto chain = [](const char* hook, const std::string& rules) {
    return fmt::format("chain {0} {{ type filter hook {0} priority 0; {1} }}; ",
                       hook, rules);
  };
  std::vector<std::string> command = on(0);
  command.insert(command.end(),
                 {"nft",
                  "add table bridge loss; delete table bridge loss; "
                  "table bridge loss { " +
                      chain("input", input) + chain("output", output) +
                      chain("forward", forward) + "}"});
  return run(command);
}

Status Network::set_rate(int host, int64_t bits_per_second) {
  const auto tc = [&](int where, const std::string& arguments) -> Status {
    std::vector<std::string> command = on(where);
    for (std::string& w : words("tc " + arguments))
      command.push_back(std::move(w));
    return run(command);
  };
  // With the queues that Linux gives a network card: one for each priority.
  const auto limit = [&](int where, const std::string& dev) -> Status {
    if (bits_per_second == 0)
      return tc(where, fmt::format("qdisc del dev {} root", dev));
    // Of a millisecond, so that timers do not slow a fast link down.
    const int64_t burst = std::max<int64_t>(8192, bits_per_second / 8000);
    RETURN_IF_ERROR(tc(where, fmt::format("qdisc replace dev {} root handle 1: "
                                          "tbf rate {}bit burst {} latency "
                                          "200ms",
                                          dev, bits_per_second, burst)));
    return tc(where,
              fmt::format("qdisc replace dev {} parent 1: handle 2: pfifo_fast",
                          dev));
  };
  if (host != 0) RETURN_IF_ERROR(limit(0, fmt::format("port{}", host)));
  return limit(host, "lan");
}

void Network::heal() {
  losses_.clear();
  dropped_.clear();
  (void)apply_losses();
  for (int h = 0; h < static_cast<int>(names_.size()); ++h) {
    if (h > 0) set_link(h, true);
    (void)set_rate(h, 0);
  }
}

}  // namespace remesh::testing
