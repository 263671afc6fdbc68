#include "worker/agent/shell/wireguard.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <net/if.h>
#include <signal.h>
#include <sodium.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdint>
#include <fstream>
#include <set>
#include <sstream>

#include "proto/base/child.h"
#include "proto/base/clock.h"
#include "proto/base/number.h"
#include "proto/base/rng.h"
#include "proto/base/sharing.h"
#include "proto/base/text.h"
#include "proto/wire/keys.h"

namespace remesh::agent {
namespace {

constexpr size_t kKeyBytes = 32;
constexpr size_t kKeyText = 44;  // base64
constexpr size_t kNetworkBytes = 4;
constexpr int kPrefix = 32;
constexpr int64_t kStartMs = 5000;
constexpr int64_t kStopMs = 2000;    // each, by SIGTERM and SIGKILL
constexpr int64_t kCommandMs = 500;  // less than a silence that counts as death
constexpr int kAttempts = 3;
constexpr int64_t kCallMs = 200;
constexpr int64_t kMostCallMs = 5000;  // WireGuard itself calls again then
constexpr int kKeepaliveS = 5;
constexpr char kWhat[] =
    "WireGuard needs the capability CAP_NET_ADMIN, ip(8), wg(8), and a kernel "
    "with WireGuard or the program wireguard-go";

std::string base64_of(const std::array<uint8_t, kKeyBytes>& key) {
  std::array<char, kKeyText + 1> text{};
  return sodium_bin2base64(text.data(), text.size(), key.data(), key.size(),
                           sodium_base64_VARIANT_ORIGINAL);
}

bool is_key(std::string_view text) {
  std::array<uint8_t, kKeyBytes> key{};
  size_t size = 0;
  return sodium_base642bin(key.data(), key.size(), text.data(), text.size(),
                           nullptr, &size, nullptr,
                           sodium_base64_VARIANT_ORIGINAL) == 0 &&
         size == key.size();
}

// The program on the PATH, or in a folder of system programs.
std::string find_program(const std::string& name) {
  for (const char* folder : {"/usr/sbin", "/usr/bin", "/sbin", "/bin",
                             "/usr/local/sbin", "/usr/local/bin"}) {
    std::string path = std::string(folder) + "/" + name;
    if (access(path.c_str(), X_OK) == 0) return path;
  }
  return "";
}

}  // namespace

Result<TunnelEnd> parse_tunnel(const std::string& text) {
  const size_t comma = text.find(',');
  const size_t colon = text.rfind(':');
  const bool shape =
      comma == kKeyText && colon != std::string::npos && colon > comma + 1;
  if (shape && is_key(text.substr(0, comma))) {
    TunnelEnd out{text.substr(0, comma), text.substr(comma + 1)};
    std::string host = text.substr(comma + 1, colon - comma - 1);
    const auto port = parse_number<uint16_t>(text.substr(colon + 1));
    const bool v6 = host.starts_with('[') && host.ends_with(']');
    if (v6) host = host.substr(1, host.size() - 2);
    in6_addr ignored{};
    if (inet_pton(v6 ? AF_INET6 : AF_INET, host.c_str(), &ignored) == 1 &&
        port.value_or(0) > 0)
      return out;
  }
  return invalid_argument("'" + text.substr(0, 100) +
                          "' is not the end of a tunnel");
}

std::string tunnel_address(const std::string& public_key) {
  in6_addr address{};
  inet_pton(AF_INET6, std::string(WireGuard::kNetwork).substr(0, 11).c_str(),
            &address);
  // As much of the key as there is room for: 12 bytes, 16 digits.
  constexpr size_t kRoom = sizeof(address) - kNetworkBytes;
  (void)sodium_base642bin(address.s6_addr + kNetworkBytes, kRoom,
                          public_key.data(), kRoom / 3 * 4, nullptr, nullptr,
                          nullptr, sodium_base64_VARIANT_ORIGINAL);
  std::array<char, INET6_ADDRSTRLEN> text{};
  inet_ntop(AF_INET6, &address, text.data(), text.size());
  return text.data();
}

WireGuard::WireGuard(const std::string& folder)
    : folder_(folder),
      interface_(fmt::format("rm{:012x}", hash64(folder) & 0xFFFFFFFFFFFF)) {
  const wire::KeyPair pair = wire::new_key_pair();
  private_key_ = base64_of(wire::key_bytes(pair.secret_key));
  public_key_ = base64_of(wire::key_bytes(pair.public_key));
}

WireGuard::~WireGuard() {
  stop_daemon();
  (void)run({"ip", "link", "del", interface_});
  unlink((folder_ + "/wireguard.out").c_str());
  unlink((folder_ + "/wireguard.log").c_str());
}

Result<std::unique_ptr<WireGuard>> WireGuard::make(const std::string& folder,
                                                   int port) {
  std::unique_ptr<WireGuard> out(new WireGuard(folder));
  RETURN_IF_ERROR(out->start(port));
  return out;
}

Status WireGuard::restore() {
  if (!mpi_network(interface_).addresses.empty()) return ok_status();
  stop_daemon();
  peers_.clear();
  return start(port_);
}

Status WireGuard::start(int port) {
  Status s = make_interface(port);
  if (s.ok()) return s;
  return unavailable(fmt::format("{} ({})", s.message(), kWhat));
}

// Runs a program that ends at once.
Status WireGuard::run(const std::vector<std::string>& command,
                      std::string* output) {
  ChildOptions child{.argv = command};
  child.argv[0] = find_program(command[0]);
  child.output = folder_ + "/wireguard.out";
  if (child.argv[0].empty()) return not_found(command[0] + " is not installed");
  ASSIGN_OR_RETURN(const Child started, start_child(child));
  const int status = wait_or_kill(started, kCommandMs);
  std::ifstream in(child.output);
  std::string text{std::istreambuf_iterator<char>(in), {}};
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.back())))
    text.pop_back();
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
    return unavailable(join(command, " ") + ": " + text);
  if (output != nullptr) *output = text;
  return ok_status();
}

Status WireGuard::make_interface(int port) {
  (void)run({"ip", "link", "del", interface_});
  Status made = run({"ip", "link", "add", interface_, "type", "wireguard"});
  // Two that start at once may collide in the folder of their sockets.
  for (int attempt = 0; !made.ok() && attempt < kAttempts; ++attempt) {
    const Status started = start_daemon();
    if (started.code() == Code::kNotFound) break;
    made = started;
  }
  RETURN_IF_ERROR(made);
  const std::string path = folder_ + "/wireguard.key";
  unlink(path.c_str());
  RETURN_IF_ERROR(create_private_file(path, private_key_));
  made = run({"wg", "set", interface_, "listen-port", std::to_string(port),
              "private-key", path});
  unlink(path.c_str());
  RETURN_IF_ERROR(made);
  std::string listens;
  RETURN_IF_ERROR(run({"wg", "show", interface_, "listen-port"}, &listens));
  port_ = std::atoi(listens.c_str());
  RETURN_IF_ERROR(
      run({"ip", "addr", "add",
           fmt::format("{}/{}", tunnel_address(public_key_), kPrefix), "dev",
           interface_, "nodad"}));
  return run({"ip", "link", "set", interface_, "up"});
}

// Starts wireguard-go and waits for its interface.
Status WireGuard::start_daemon() {
  ChildOptions child{.argv = {find_program("wireguard-go"), "-f", interface_},
                     .output = folder_ + "/wireguard.log"};
  if (child.argv[0].empty()) return not_found("wireguard-go");
  ASSIGN_OR_RETURN(const Child started, start_child(child));
  if (started.pidfd >= 0) close(started.pidfd);
  daemon_ = started.pid;
  for (const int64_t end = monotonic_ms() + kStartMs; monotonic_ms() < end;) {
    if (run({"wg", "show", interface_}).ok()) return ok_status();
    if (waitpid(daemon_, nullptr, WNOHANG) != 0) {
      daemon_ = 0;
      break;
    }
    usleep(10'000);
  }
  std::string last;
  std::ifstream in(child.output);
  for (std::string line; std::getline(in, line);)
    if (line.find("ERROR") != std::string::npos) last = line;
  return unavailable("wireguard-go: " + (last.empty() ? "no interface" : last));
}

void WireGuard::stop_daemon() {
  if (daemon_ <= 0) return;
  // With SIGTERM it removes its interface and its socket.
  for (const int signal : {SIGTERM, SIGKILL}) {
    kill(daemon_, signal);
    const int64_t end = monotonic_ms() + kStopMs;
    while (daemon_ > 0 && monotonic_ms() < end) {
      if (waitpid(daemon_, nullptr, WNOHANG) != 0) daemon_ = 0;
      if (daemon_ > 0) usleep(5'000);
    }
    if (daemon_ == 0) return;
  }
  daemon_ = 0;
}

MpiNetwork WireGuard::network(const MpiNetwork& underlay) const {
  MpiNetwork out = mpi_network(interface_);
  out.peers_within = kNetwork;
  if (underlay.addresses.empty()) return out;
  const std::string& cidr = underlay.addresses.front();
  const std::string address = cidr.substr(0, cidr.find('/'));
  const bool v6 = address.find(':') != std::string::npos;
  out.tunnel = fmt::format("{},{}:{}", public_key_,
                           v6 ? "[" + address + "]" : address, port_);
  return out;
}

std::vector<std::string> WireGuard::peer(const std::string& tunnel) const {
  const std::string key = tunnel.substr(0, kKeyText);
  std::vector<std::string> out = {"peer", key, "allowed-ips",
                                  tunnel_address(key) + "/128"};
  if (calls(tunnel))
    out.insert(out.end(),
               {"endpoint", tunnel.substr(kKeyText + 1), "persistent-keepalive",
                std::to_string(kKeepaliveS)});
  return out;
}

// Leaves those that stay alone, with their sessions.
Status WireGuard::set_peers(const std::vector<std::string>& tunnels) {
  std::vector<std::string> command;
  const std::set<std::string> wanted(tunnels.begin(), tunnels.end());
  for (const std::string& tunnel : peers_)
    if (!wanted.contains(tunnel))
      command.insert(command.end(),
                     {"peer", tunnel.substr(0, kKeyText), "remove"});
  calling_.clear();
  for (const std::string& tunnel : wanted) {
    RETURN_IF_ERROR(parse_tunnel(tunnel).status());
    if (calls(tunnel)) calling_.insert(tunnel);
    if (peers_.contains(tunnel)) continue;
    const std::vector<std::string> added = peer(tunnel);
    command.insert(command.end(), added.begin(), added.end());
  }
  wait_ms_ = kCallMs;
  call_at_ms_ = monotonic_ms() + wait_ms_;
  RETURN_IF_ERROR(set(command));
  peers_ = wanted;
  return ok_status();
}

Status WireGuard::set(const std::vector<std::string>& changes) {
  if (changes.empty()) return ok_status();
  std::vector<std::string> command = {"wg", "set", interface_};
  command.insert(command.end(), changes.begin(), changes.end());
  return run(command);
}

void WireGuard::call_again(int64_t now_ms) {
  if (calling_.empty() || now_ms < call_at_ms_) return;
  wait_ms_ = std::min(2 * wait_ms_, kMostCallMs);
  call_at_ms_ = now_ms + wait_ms_;
  std::string text;
  if (!run({"wg", "show", interface_, "latest-handshakes"}, &text).ok()) return;
  std::istringstream lines(text);
  int64_t time = 0;
  for (std::string key; lines >> key >> time;)
    if (time != 0)
      std::erase_if(calling_,
                    [&key](const auto& t) { return t.starts_with(key); });
  std::vector<std::string> changes;
  for (const std::string& tunnel : calling_) {
    const std::vector<std::string> again = peer(tunnel);
    changes.insert(changes.end(), {"peer", again[1], "remove"});
    changes.insert(changes.end(), again.begin(), again.end());
  }
  (void)set(changes);  // tried again
  call_at_ms_ = now_ms + wait_ms_;
}

}  // namespace remesh::agent
