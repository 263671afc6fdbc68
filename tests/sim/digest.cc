// A digest of everything that the coordinator does, to compare two builds.
#include <string>
#include <utility>
#include <variant>

#include "proto/base/rng.h"
#include "tests/sim/cluster.h"
#include "tests/sim/sentences.h"

namespace remesh::sim {
namespace {

// A message without its sentences, if they do not count.
template <typename T>
std::string serialized(T message, bool sentences) {
  return sentences ? bytes_of(message) : without_sentences(std::move(message));
}

struct Serialized {
  std::string operator()(const core::Persist& a) const {
    return serialized(a.durable, sentences);
  }
  std::string operator()(const core::SendDirective& a) const {
    return serialized(a.with_assignment(), sentences);
  }
  std::string operator()(const core::SendFence& a) const {
    return a.worker + bytes_of(a.fence);
  }
  std::string operator()(const core::Respond& a) const {
    pb::Reply r = a.reply;
    if (!sentences) r.clear_status();
    return std::to_string(a.client) + serialized(std::move(r), sentences);
  }
  std::string operator()(const core::Refuse& a) const {
    return serialized(a.refusal, sentences);
  }
  std::string operator()(const core::EmitEvent& a) const {
    return serialized(a.record, sentences);
  }
  std::string operator()(const core::AppendMetrics& a) const {
    return bytes_of(a.metrics);
  }
  std::string operator()(const core::ScanCheckpoints&) const { return ""; }
  std::string operator()(const core::Exit& a) const {
    return std::to_string(a.code) + (sentences ? a.message : "");
  }

  bool sentences = true;
};

uint64_t add(uint64_t digest, int64_t now_ms, const core::Action& action,
             bool sentences) {
  const std::string header = std::to_string(digest) + " " +
                             std::to_string(now_ms) + " " +
                             std::to_string(action.index()) + " ";
  return hash64(header +
                std::visit(Serialized{.sentences = sentences}, action));
}

}  // namespace

void Cluster::add_to_digest(const core::Action& action) {
  stats_.digest = add(stats_.digest, now_, action, true);
  stats_.digest_of_decisions =
      add(stats_.digest_of_decisions, now_, action, false);
}

}  // namespace remesh::sim
