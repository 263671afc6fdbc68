#include "proto/wire/zap.h"

#include <signal.h>

#include <array>
#include <utility>
#include <vector>
#include <zmq.hpp>

#include "proto/base/check.h"

namespace remesh::wire {
namespace {

constexpr const char* kEndpoint = "inproc://zeromq.zap.01";
constexpr const char* kStop = "stop";
constexpr size_t kRequestParts = 7;

bool receive_all(zmq::socket_ref socket, std::vector<std::string>* parts) {
  parts->clear();
  zmq::message_t part;
  do {
    if (!socket.recv(part)) return false;
    parts->push_back(part.to_string());
  } while (part.more());
  return true;
}

// The key of a CURVE request; "" if it is anything else.
std::string key_of(const std::vector<std::string>& request) {
  constexpr size_t kRawKey = 32;
  if (request.size() != kRequestParts || request[0] != "1.0" ||
      request[2] != kZapDomain || request[5] != "CURVE" ||
      request[6].size() != kRawKey)
    return "";
  std::array<char, 41> z85{};
  zmq_z85_encode(z85.data(),
                 reinterpret_cast<const uint8_t*>(request[6].data()), kRawKey);
  return z85.data();
}

}  // namespace

Zap::Zap(void* context) : context_(context) {
  void* socket = zmq_socket(context_, ZMQ_REP);
  CHECK(socket != nullptr && zmq_bind(socket, kEndpoint) == 0);
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this, socket] { serve(socket); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Zap::~Zap() {
  void* socket = zmq_socket(context_, ZMQ_REQ);
  CHECK(socket != nullptr && zmq_connect(socket, kEndpoint) == 0 &&
        zmq_send(socket, kStop, 4, 0) == 4);
  thread_.join();
  zmq_close(socket);
}

void Zap::allow(std::set<std::string> public_keys) {
  const std::lock_guard lock(mutex_);
  allowed_ = std::move(public_keys);
}

void Zap::admit(const std::string& public_key) {
  const std::lock_guard lock(mutex_);
  allowed_.insert(public_key);
}

bool Zap::allows(const std::string& public_key) const {
  const std::lock_guard lock(mutex_);
  return allowed_.count(public_key) > 0;
}

void Zap::serve(void* socket) const {
  const zmq::socket_ref s(zmq::from_handle, socket);
  std::vector<std::string> request;
  while (receive_all(s, &request) && request[0] != kStop) {
    const std::string key = key_of(request);
    const bool good = !key.empty() && allows(key);
    const std::string id = request.size() > 1 ? request[1] : "";
    const std::array<std::string, 6> reply = {
        "1.0", id, good ? "200" : "400", good ? "" : "key not allowed",
        key,   ""};
    for (size_t i = 0; i < reply.size(); ++i)
      zmq_send(socket, reply[i].data(), reply[i].size(),
               i + 1 < reply.size() ? ZMQ_SNDMORE : 0);
  }
  const int linger = 0;
  zmq_setsockopt(socket, ZMQ_LINGER, &linger, sizeof(linger));
  zmq_close(socket);
}

}  // namespace remesh::wire
