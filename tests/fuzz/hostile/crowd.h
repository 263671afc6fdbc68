// Many connections that never say who they are: to one port, where they stay
// silent or send the greeting of ZMTP a byte at a time ("slow loris"), and to
// every port of this machine, one after the other ("port scan").
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace remesh::testing {

class Crowd {
 public:
  // Connects to 127.0.0.1. Needs as many open files.
  Crowd(int port, size_t connections);
  ~Crowd();
  Crowd(const Crowd&) = delete;
  Crowd& operator=(const Crowd&) = delete;

  // Every second one sends a byte; those that were closed connect again.
  void step();
  // Knocks at the next `ports` ports, with an HTTP request.
  void scan(int ports);

  size_t open() const;  // connections now, without those under way
  size_t most() const { return most_; }
  int64_t opened() const { return opened_; }  // connections ever
  int64_t scanned() const { return scanned_; }
  int64_t answered() const { return answered_; }  // ports that took one

 private:
  struct Connection {
    int fd = -1;
    bool established = false;
    size_t sent = 0;
  };
  static int connect_to(int port);
  void drop(Connection& c);

  int port_;
  int next_port_ = 1;
  std::vector<Connection> all_;
  size_t most_ = 0;
  int64_t opened_ = 0;
  int64_t scanned_ = 0;
  int64_t answered_ = 0;
};

}  // namespace remesh::testing
