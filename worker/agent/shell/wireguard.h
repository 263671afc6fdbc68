// WireGuard between the hosts of a mesh: encrypts and authenticates what MPI,
// which does neither, sends over the network.
//
// Each worker has an interface and a key pair of its own, made when it starts.
// Workers tell each other the public keys in the first fence of a generation,
// over the control plane, which is authenticated; then each allows the others'
// keys, and no other. The address of a worker in this network follows from its
// public key, so that nobody can claim another's. Source: J. Donenfeld,
// WireGuard: Next Generation Kernel Network Tunnel, NDSS 2017; wg(8).
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "proto/base/status.h"
#include "worker/agent/shell/mpi_network.h"

namespace remesh::agent {

class WireGuard {
 public:
  // The network of all workers (IPv6, RFC 4193); each has a /128 in it.
  static constexpr char kNetwork[] = "fd72:6d73::/32";

  // Makes an interface that listens on UDP port `port` (0: any). It is of the
  // kernel, or of wireguard-go where the kernel has none. Private files go to
  // `folder`, which also determines the name. Replaces what a predecessor left.
  // Unavailable, with what to install or to permit, if that fails.
  static Result<std::unique_ptr<WireGuard>> make(const std::string& folder,
                                                 int port);
  ~WireGuard();  // removes the interface
  WireGuard(const WireGuard&) = delete;
  WireGuard& operator=(const WireGuard&) = delete;

  // Makes the interface again, with the same keys and port, if it is gone or
  // down. Unavailable like make().
  Status restore();

  const std::string& interface() const { return interface_; }
  // The network that the ranks use. `underlay`: the one that carries the
  // packets, of which the first address is told to the others.
  MpiNetwork network(const MpiNetwork& underlay) const;
  // Exchanges packets with these ("KEY,ADDRESS:PORT", as in
  // MpiNetwork::tunnel) and nobody else.
  Status set_peers(const std::vector<std::string>& tunnels);
  // Calls peers again that have not answered: WireGuard waits 5 s, also for one
  // that was not told of this end yet. From the loop's tick.
  void call_again(int64_t now_ms);

 private:
  explicit WireGuard(const std::string& folder);
  Status start(int port);
  Status make_interface(int port);
  Status start_daemon();
  void stop_daemon();
  Status set(const std::vector<std::string>& changes);
  std::vector<std::string> peer(const std::string& tunnel) const;
  // One end calls, the other waits: two that call at once can miss each other's
  // answers time and again.
  bool calls(const std::string& tunnel) const { return public_key_ < tunnel; }
  Status run(const std::vector<std::string>& command,
             std::string* output = nullptr);

  std::string folder_;
  std::string interface_;
  std::string private_key_;  // base64, as all of them
  std::string public_key_;
  int port_ = 0;
  std::set<std::string> peers_;    // ends of tunnels
  std::set<std::string> calling_;  // those that have not answered yet
  int64_t wait_ms_ = 0;
  int64_t call_at_ms_ = 0;
  pid_t daemon_ = 0;  // wireguard-go
};

// The end of a tunnel as its worker tells it.
struct TunnelEnd {
  std::string key;       // public
  std::string endpoint;  // ADDRESS:PORT or [ADDRESS]:PORT
};
// InvalidArgument unless it is "KEY,ADDRESS:PORT".
Result<TunnelEnd> parse_tunnel(const std::string& text);
// The address in WireGuard::kNetwork of the holder of this key.
std::string tunnel_address(const std::string& public_key);

}  // namespace remesh::agent
