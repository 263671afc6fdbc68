// What a rank was at: its flight record (worker/board/flight.h) in words for
// reports, and as a file of RUN/traces once it is dead.
//
//   RUN/traces/flight-g007-rank-3.json   Chrome trace JSON, opens in Perfetto;
//                                        "otherData" says who and how it ended
//
// Pure, but for write_flight().
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "proto/base/status.h"
#include "proto/control.pb.h"
#include "worker/board/board.h"

namespace remesh::agent {

// Sets doing, at, waits and operations. snapshot: of the board. now_ns:
// CLOCK_MONOTONIC, when it was seen like this; for a dead rank, when it died.
void fill_doing(const board::Board& board, const board::Snapshot& snapshot,
                int64_t now_ns, pb::RankStatus* status);

// "step 12, microbatch 3, backward, all_reduce of 8.0 MiB on data (ranks 0 2)
// for 1.2 s". under_way: innermost first; empty: `phase` is all that is known.
std::string doing_text(const std::vector<board::FlightOp>& under_way,
                       const board::FlightGroup& group,
                       const board::Snapshot& snapshot, int64_t now_ns);

struct FlightAbout {
  int64_t generation = 0;
  int rank = 0;
  int pid = 0;
  std::string worker;
  std::string host;
  std::string ended;  // exit_text()
  std::string doing;
  std::string error;                  // its own last words
  std::vector<std::string> log_tail;  // oldest first
};

std::string flight_name(int64_t generation, int rank);
// died_ns: monotonic; what was under way ends there, marked "unfinished".
// unix_minus_monotonic_ns: to give unix times.
std::string flight_json(const FlightAbout& about, const board::Flight& flight,
                        int64_t died_ns, int64_t unix_minus_monotonic_ns);

// Writes it to `folder` (made if need be) and removes the flight records of all
// but the newest `keep` generations. Other workers may do the same at once.
Status write_flight(const std::string& folder, const FlightAbout& about,
                    const std::string& json, int keep);

}  // namespace remesh::agent
