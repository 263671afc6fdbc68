// A digest of everything that the coordinator does, to compare two builds.
#include <string>
#include <type_traits>
#include <variant>

#include "proto/base/rng.h"
#include "tests/sim/cluster.h"

namespace remesh::sim {
namespace {

struct Serialized {
  std::string operator()(const core::Persist& a) const {
    pb::Durable d = a.durable;
    if (!sentences) {
      d.clear_cause();
      d.clear_finish_reason();
      strip(d.mutable_assignment());
    }
    return d.SerializeAsString();
  }
  std::string operator()(const core::SendDirective& a) const {
    pb::Directive d = a.directive;
    if (!sentences) {
      d.clear_reason();
      if (d.has_assignment()) strip(d.mutable_assignment());
    }
    return d.SerializeAsString();
  }
  std::string operator()(const core::SendFence& a) const {
    return a.worker + a.fence.SerializeAsString();
  }
  std::string operator()(const core::Respond& a) const {
    pb::Reply r = a.reply;
    if (!sentences) {
      r.clear_error();
      r.clear_status();
    }
    return std::to_string(a.client) + r.SerializeAsString();
  }
  std::string operator()(const core::Refuse& a) const {
    return sentences ? a.refusal.SerializeAsString() : "";
  }
  std::string operator()(const core::EmitEvent& a) const {
    pb::EventRecord e = a.record;
    if (!sentences) {
      e.clear_cause();
      e.clear_detail();
      e.clear_source();
    }
    return e.SerializeAsString();
  }
  std::string operator()(const core::AppendMetrics& a) const {
    return a.metrics.SerializeAsString();
  }
  std::string operator()(const core::ScanCheckpoints&) const { return ""; }
  std::string operator()(const core::Exit& a) const {
    return std::to_string(a.code) + (sentences ? a.message : "");
  }

  static void strip(pb::Assignment* a) {
    if (a->has_source()) a->mutable_source()->clear_reason();
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
