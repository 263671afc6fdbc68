// Zap: decides which keys may connect to the sockets of one ZeroMQ context
// (RFC 27). A peer whose key is not allowed is refused during the handshake:
// none of its messages reaches the program.
//
// Threads: one of its own, which ZeroMQ asks; the methods may be called by any
// thread. Construct it before a socket of the context is bound.
#pragma once

#include <mutex>
#include <set>
#include <string>
#include <thread>

namespace remesh::wire {

class Zap {
 public:
  // `context`: of libzmq; outlives this object.
  explicit Zap(void* context);
  ~Zap();
  Zap(const Zap&) = delete;
  Zap& operator=(const Zap&) = delete;
  // Replaces the keys; at first there are none. Open connections stay.
  void allow(std::set<std::string> public_keys);
  void admit(const std::string& public_key);  // this one too
  bool allows(const std::string& public_key) const;

 private:
  void serve(void* socket) const;

  void* const context_;
  mutable std::mutex mutex_;
  std::set<std::string> allowed_;
  std::thread thread_;
};

// The domain of all sockets; see ServerImpl::start() in server.cc.
inline constexpr const char* kZapDomain = "remesh";

}  // namespace remesh::wire
