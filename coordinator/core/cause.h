// First causes: which rank of a generation failed or stood first, and in what
// words, as pure functions of what its workers tell of all its ranks.
//
// When one rank of a mesh dies, the others die of it or wait for it for ever;
// they are its victims and never named. Dead ones are told apart by how they
// ended, then by when. Ranks that stand are told apart by what each waits for:
// the one to blame is not waiting, or others wait for it and it for none.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "proto/control.pb.h"

namespace remesh::core {

// Why a generation ends early.
struct Failure {
  std::string text;
  int rank = -1;  // at fault; -1: none, or not known
  std::string worker;
  int64_t step = -1;       // that was being computed
  bool by_signal = false;  // died_of_itself()
  int exit_code = 0;
  bool is_fault = true;  // false: a change of plan before anything ran
};

// A rank as its worker told last. Borrows the status.
struct RankView {
  const pb::RankStatus* status = nullptr;
  std::string worker;
  std::string host;
  int64_t stood_ms = 0;  // without progress
};

// Killed by a signal that no peer's death explains.
bool died_of_itself(const pb::RankStatus& status);

// Of the ranks that ended out of order and were not killed in an abort, the one
// that failed first: a signal outweighs own words, these outweigh none, and an
// abort or a wordless exit while it waited for others comes last (that is how
// MPI ends the peers of a dead rank); then the earliest.
std::optional<size_t> first_death(const std::vector<RankView>& ranks);

// "rank 1 on worker w2: killed by signal 9 (SIGKILL); it was at step 12, ...".
std::string death_text(const RankView& rank);

struct Stuck {
  size_t rank = 0;  // the one to blame
  // Every rank waits for another: a message was lost. Then `rank` is the one
  // that waits for the earliest operation, a witness.
  bool lost_message = false;
};
// Of ranks that live and stand. REQUIRES: at least one.
Stuck find_stuck(const std::vector<RankView>& ranks);
std::string stuck_text(const std::vector<RankView>& ranks, const Stuck& stuck);

// What the event of a failure says of the rank that it names.
void fill_failure(const RankView& rank, pb::EventRecord* event);

}  // namespace remesh::core
