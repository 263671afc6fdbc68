// Presents a rank's flight record (worker/board/flight.h): as a line of text in
// reports, and as a trace file once the rank is dead.
//
//   RUN/traces/flight-g007-rank-3.json   Chrome trace JSON, opens in Perfetto;
//                                        "otherData" has the rank, the worker
//                                        and how the rank ended
//
// Pure, except for the functions that take a folder.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "proto/base/status.h"
#include "proto/control.pb.h"
#include "worker/board/board.h"

namespace remesh::agent {

// Sets the fields doing, at, waits and operations of a snapshot of `board`.
// `now_ns` (CLOCK_MONOTONIC) is when it was taken, or when the rank died.
void fill_doing(const board::Board& board, int64_t now_ns,
                pb::RankStatus* status);

struct FlightAbout {
  int64_t generation = 0;
  int rank = 0;
  int pid = 0;
  std::string worker;
  std::string host;
  std::string ended;  // exit_text()
  std::string doing;
  std::string error;                  // from the board
  std::vector<std::string> log_tail;  // oldest first
};

// Operations under way end at `died_ns` (CLOCK_MONOTONIC) and are marked
// "unfinished". `unix_minus_monotonic_ns` converts to unix time.
std::string flight_json(const FlightAbout& about, const board::Flight& flight,
                        int64_t died_ns, int64_t unix_minus_monotonic_ns);

// Removes the flight records and traces of all but the newest `keep`
// generations that have any.
void remove_old_traces(const std::string& folder, int keep);
// Writes the file to `folder`, which is created if missing, and removes old
// ones. Other workers may do so concurrently.
Status write_flight(const std::string& folder, const FlightAbout& about,
                    const std::string& json, int keep);

}  // namespace remesh::agent
