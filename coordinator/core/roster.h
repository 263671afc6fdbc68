// Roster: the workers that the coordinator knows, as their reports describe
// them. The one place where a worker is declared dead (expire()).
//
// A value without I/O. Methods that change the membership return the changes;
// the caller announces them. Queries that concern a generation take the durable
// state, which names the generation and its participants.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "proto/control.pb.h"

namespace remesh::core {

class Roster {
 public:
  // When a rank's progress counter last moved.
  struct Progress {
    uint64_t value = 0;
    int64_t since_ms = 0;
  };
  struct Member {
    pb::Report report;  // the newest
    int64_t heard_ms = 0;
    int64_t disconnected_ms = -1;  // connection broke and nothing came since
    bool alive = true;
    bool draining = false;             // a command asked it to leave
    bool sent_away = false;            // a LEAVE directive was sent
    bool reported = false;             // to this life of the coordinator
    int reports_in_phase = 0;          // since the current phase began
    std::string death;                 // why it is not alive
    int64_t directive_ms = -1;         // when the last directive was sent
    std::string directive_key;         // what it said, to notice a change
    std::map<int, Progress> progress;  // by rank

    bool leaving() const { return draining || report.leaving(); }
    // Its list of states in memory is complete and nothing can change it: no
    // rank of it is alive, and none can be started by a directive in flight.
    bool inventory_known(int64_t generation) const;
    // All its ranks of `generation` are dead.
    bool quiesced(int64_t generation) const;
  };
  using Members = std::map<std::string, Member>;

  struct Change {
    enum class Kind { kLost, kJoined, kReturned, kLeaving };
    Kind kind = Kind::kJoined;
    std::string worker;
    std::string detail;        // kLost: why; kJoined, kReturned: what it offers
    uint64_t incarnation = 0;  // of the worker that was lost
    bool leaving = false;      // the lost worker was about to leave
  };
  using Changes = std::vector<Change>;

  explicit Roster(int64_t now_ms = 0) : last_loss_ms_(now_ms) {}

  // Takes the participants of a generation of an earlier life of the
  // coordinator for alive until `until_ms`.
  void adopt(const pb::Durable& durable, int64_t until_ms);

  // Nothing if the report is stale, that is, not newer than what is known.
  // silent_ms: after a longer silence, what the ranks did during it is unknown,
  // so their progress clocks start again.
  std::optional<Changes> on_report(const pb::Report& report,
                                   const pb::Durable& durable,
                                   int64_t silent_ms, int64_t now_ms);
  void on_disconnect(const std::string& worker, int64_t now_ms);
  // The coordinator itself did not run for gap_ms, so nobody was silent.
  void on_own_absence(int64_t gap_ms);

  // Declares workers dead that were silent for dead_after_ms or whose
  // connection stays broken, and forgets the dead. A dead participant is kept
  // until its generation has ended, for its last report.
  Changes expire(const pb::Durable& durable, int64_t dead_after_ms,
                 int64_t now_ms);

  void begin_generation();  // clears the progress clocks
  void begin_phase();       // counts reports from 0 again
  void drain(const std::string& worker) { members_.at(worker).draining = true; }
  void note_directive(const std::string& worker, std::string key, bool leave,
                      int64_t now_ms);

  const Members& members() const { return members_; }
  const Member* find(const std::string& worker) const;
  const Member* find_alive(const std::string& worker) const;
  // The member if it is alive and the participant itself, not a later
  // incarnation of it.
  const Member* live_participant(const pb::Durable& durable,
                                 const std::string& worker) const;
  bool considers_live(const std::string& worker, uint64_t incarnation) const;
  bool none_alive() const;

  // Every live member has reported to this life of the coordinator.
  bool all_heard() const;
  // No rank of the generation is alive on a live participant.
  bool all_quiesced(const pb::Durable& durable) const;
  // Every live participant has received RUN.
  bool all_started(const pb::Durable& durable) const;
  // Every live member, participant or not, is fenced at the generation and has
  // no rank alive; participants are PREPARED.
  bool all_prepared(const pb::Durable& durable) const;
  bool inventories_known(int64_t generation) const;
  // The step that every rank of the generation has committed; -1 if not all
  // ranks have reported.
  int64_t committed_step(const pb::Durable& durable) const;
  // Digest of the state that the generation began with, if it was asked for.
  std::optional<uint64_t> restored_digest(int64_t generation) const;

  int64_t last_join_ms() const { return last_join_ms_; }
  // When expire() last declared a worker dead; at first the start.
  int64_t last_loss_ms() const { return last_loss_ms_; }

 private:
  Members members_;
  // Newest incarnation and sequence number of every name, including workers
  // that were declared dead.
  std::map<std::string, std::pair<uint64_t, uint64_t>> newest_;
  int64_t last_join_ms_ = 0;
  int64_t last_loss_ms_ = 0;
};

}  // namespace remesh::core
