// Why a coordinator does not answer: ZeroMQ reconnects without a word.
#pragma once

#include <string>

namespace remesh::agent {

// Resolves the address (tcp://HOST:PORT) and connects to it once. Returns one
// sentence. Blocks for some seconds, longer if a name server is slow: call it
// in a thread of its own.
std::string why_no_answer(const std::string& address);

}  // namespace remesh::agent
