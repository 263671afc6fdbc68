// A digest of everything that the coordinator does, to compare two builds.
#include <string>
#include <utility>
#include <variant>

#include "proto/base/rng.h"
#include "tests/sim/cluster.h"
#include "tests/testing/sentences.h"

namespace remesh::sim {
namespace {

template <typename... Ts>
struct Overloaded : Ts... {
  using Ts::operator()...;
};
template <typename... Ts>
Overloaded(Ts...) -> Overloaded<Ts...>;

std::string serialized(const core::Action& action, bool sentences) {
  // Without its sentences, if they do not count.
  const auto bytes = [&](auto message) {
    return sentences ? bytes_of(message)
                     : without_sentences(std::move(message));
  };
  return std::visit(
      Overloaded{
          [&](const core::Persist& a) { return bytes(a.durable); },
          [&](const core::SendDirective& a) {
            return bytes(a.with_assignment());
          },
          [&](const core::SendFence& a) {
            return a.worker + bytes_of(a.fence);
          },
          [&](const core::Respond& a) {
            pb::Reply r = a.reply;
            if (!sentences) r.clear_status();
            return std::to_string(a.client) + bytes(std::move(r));
          },
          [&](const core::Refuse& a) { return bytes(a.refusal); },
          [&](const core::EmitEvent& a) { return bytes(a.record); },
          [&](const core::AppendMetrics& a) { return bytes_of(a.metrics); },
          [&](const core::ScanCheckpoints&) { return std::string(); },
          [&](const core::Exit& a) {
            return std::to_string(a.code) + (sentences ? a.message : "");
          }},
      action);
}

uint64_t add(uint64_t digest, int64_t now_ms, const core::Action& action,
             bool sentences) {
  const std::string header = std::to_string(digest) + " " +
                             std::to_string(now_ms) + " " +
                             std::to_string(action.index()) + " ";
  return hash64(header + serialized(action, sentences));
}

}  // namespace

void Cluster::add_to_digest(const core::Action& action) {
  stats_.digest = add(stats_.digest, now_, action, true);
  stats_.digest_of_decisions =
      add(stats_.digest_of_decisions, now_, action, false);
}

}  // namespace remesh::sim
