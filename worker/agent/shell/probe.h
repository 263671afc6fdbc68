// Why a coordinator does not answer, as ZeroMQ reconnects without a word, or
// does not take this worker.
#pragma once

#include <string>

#include "proto/control.pb.h"

namespace remesh::agent {

// Resolves the address (tcp://HOST:PORT) and connects to it once. Returns one
// sentence. Blocks for some seconds, longer if a name server is slow: call it
// in a thread of its own.
std::string why_no_answer(const std::string& address);

// A Refusal as a sentence, for a worker of that job.
std::string why_refused(const std::string& address, const pb::Refusal& refusal,
                        const std::string& job);

}  // namespace remesh::agent
