// Roster: the workers that the coordinator knows, as their reports describe
// them. The one place where a worker is declared dead (expire(), in
// roster_expiry.cc).
//
// A value without I/O. Methods that change the membership return the changes;
// the caller announces them. Queries that concern a generation take the durable
// state, which names the generation and its participants.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "parallel/planner/description.h"
#include "proto/control.pb.h"

namespace remesh::core {

// A closed connection is no proof of death: firewalls and switches close them,
// too. elastic.closed_after_ms says how long it may stay closed; -1: an eighth
// of dead_after_ms, and at least 250 ms, in which a transport connects again.
int64_t closed_after_ms(int64_t configured_ms, int64_t dead_after_ms);

// A rank that the kernel cannot kill must not stop the others for ever.
inline constexpr int64_t kAwaitedMs = 30'000;
inline constexpr int64_t kEarlierLifeMs = 10'000;
inline constexpr int64_t kIsolatedLimits = 10;

class Roster {
 public:
  // When a rank's progress counter last moved, and when its end was first
  // reported; 0: not yet.
  struct Progress {
    uint64_t value = 0;
    int64_t since_ms = 0;
    int64_t exited_ms = 0;
  };
  // What a directive says; it is sent at once when that changes.
  struct DirectiveKey {
    uint64_t incarnation = 0;
    int64_t generation = 0;
    pb::Directive::Goal goal = pb::Directive::IDLE;
    bool save = false;
    bool want_fences = false;
    int64_t checkpoint_request = 0;
    friend bool operator==(const DirectiveKey&, const DirectiveKey&) = default;
  };
  struct Member {
    pb::Report report;  // the newest
    int64_t joined_ms = 0;
    int64_t heard_ms = 0;
    int64_t disconnected_ms = -1;  // connection broke and nothing came since
    int64_t closed_at_ms = -1;  // when it first broke; absences do not move it
    // The coordinator was cut off and has not heard this member since. Its old
    // connection may end late, and the next one takes as long as TCP has backed
    // off, so only silence counts.
    bool cut_off = false;
    bool alive = true;
    bool draining = false;         // a command asked it to leave
    bool sent_away = false;        // a LEAVE directive was sent
    bool leave_announced = false;  // that it asks to leave
    bool reported = false;         // to this life of the coordinator
    int reports_in_phase = 0;      // since the current phase began
    std::string revoked;           // why it will not be heard again
    std::string death;             // why it is not alive
    // It reports, and does not do what the phase waits for; or has done it
    // since then, but for too short a time to count.
    int64_t awaited_since_ms = -1;
    int64_t done_since_ms = -1;
    bool given_up = false;             // for that; not alive
    int64_t directive_ms = -1;         // when the last directive was sent
    DirectiveKey last_sent;            // its key
    std::map<int, Progress> progress;  // by rank
    // A core of its host, if it has reported measurements that can be used; and
    // whether it has reported any, or why there are none.
    std::optional<planner::Machine> core;
    bool hardware_known = false;

    void take(const pb::Report& newest, int64_t now_ms);
    bool leaving() const { return draining || report.leaving(); }
    // Whether it is told what to do: a given-up worker still has to be fenced.
    bool reachable() const { return reported && (alive || given_up); }
    // Its list of states in memory is complete and nothing can change it: no
    // rank of it is alive, and none can be started by a directive in flight.
    bool inventory_known(int64_t generation) const;
    // All its ranks of `generation` are dead.
    bool quiesced(int64_t generation) const;
    // What the phase waits for the live member of that name to do, as text:
    // "end its ranks".
    std::optional<std::string> awaited(const pb::Durable& durable,
                                       const std::string& name) const;
  };
  using Members = std::map<std::string, Member>;

  struct MembershipChange {
    // kCutOff, kReconnected: no worker is heard any more, and some is again.
    enum class Kind {
      kLost,
      kJoined,
      kReturned,
      kLeaving,
      kCutOff,
      kReconnected
    };
    Kind kind = Kind::kJoined;
    std::string worker;
    std::string detail;        // kLost: why; kJoined, kReturned: what it offers
    uint64_t incarnation = 0;  // of the worker that was lost
    bool leaving = false;      // the lost worker was about to leave
    bool sent_away = false;    // it was told to
  };
  using Changes = std::vector<MembershipChange>;

  // Whether a report is taken. It is not if it is stale, comes from an earlier
  // life of the worker (for kEarlierLifeMs after the end of the last one, in
  // case the clock of its host went back), or if the name belongs to a live
  // worker of another host.
  enum class Verdict { kTaken, kStale, kEarlierLife, kNameInUse };

  explicit Roster(int64_t now_ms = 0)
      : last_lost_ms_(now_ms), started_ms_(now_ms) {}

  // Takes the participants of a generation of an earlier life of the
  // coordinator for alive until `until_ms`.
  void adopt(const pb::Durable& durable, int64_t until_ms);

  // The name of the reporter's host here: the one that it gives or, if another
  // machine (Report.host_id) has that already, with a number: "node-1a2b3c4d".
  std::string host_of(const pb::Report& report) const;
  Verdict judge(const pb::Report& report, int64_t now_ms) const;
  // Why the report is not taken; "" if it is, or is only stale.
  std::string refusal(const pb::Report& report, int64_t now_ms) const;
  // Nothing if the report is not taken.
  // silent_ms: of a longer silence, only so much counts as time without
  // progress of the ranks: the host may have been paused.
  std::optional<Changes> on_report(const pb::Report& report,
                                   const pb::Durable& durable,
                                   int64_t silent_ms, int64_t now_ms);
  // revoked: why the worker will not be heard again, so that expire() declares
  // it dead at once; "": it may be.
  void on_disconnect(const std::string& worker, int64_t now_ms,
                     const std::string& revoked = "");
  // The coordinator itself did not run for gap_ms, so nobody was silent.
  void on_own_absence(int64_t gap_ms);
  // Nobody could be told what the phase waits for.
  void on_unwritten(int64_t ms);

  // Declares workers dead that were silent for dead_after_ms or whose
  // connection stays closed for closed_after_ms(), and forgets the dead. A dead
  // participant is kept until its generation has ended, for its last report.
  // When the workers of several hosts fall silent at once, or all connections
  // are closed at once, it is the coordinator that is cut off: then nobody is
  // dead until one of them is heard again or, if the job is to stop, for
  // kIsolatedLimits times dead_after_ms. Gives up live workers for which the
  // phase waits longer than kAwaitedMs. Such a worker is as good as dead until
  // it is fenced with no rank alive: its states and its claim to the
  // checkpoints are of an older generation.
  Changes expire(const pb::Durable& durable, int64_t dead_after_ms,
                 int64_t now_ms, int64_t closed_after_ms = -1);

  void begin_generation();  // clears the progress clocks
  void begin_phase();       // counts reports from 0 again
  // Notes which workers with ranks of the generation are lost: until they are
  // heard again, their ranks may run.
  void end_generation(const pb::Durable& durable);
  // Until then, after a start or an absence, workers may exist that were not
  // heard yet.
  void expect_unheard(int64_t until_ms) { unheard_until_ms_ = until_ms; }
  void drain(const std::string& worker) { members_.at(worker).draining = true; }
  void note_directive(const std::string& worker, const DirectiveKey& key,
                      int64_t now_ms);

  const Members& members() const { return members_; }
  const Member* find(const std::string& worker) const;
  const Member* find_alive(const std::string& worker) const;
  // The member if it is alive and the participant itself, not a later
  // incarnation of it.
  const Member* live_participant(const pb::Durable& durable,
                                 const std::string& worker) const;
  bool considers_live(const std::string& worker, uint64_t incarnation) const;
  // Whether the member's newest report is this one, so that what is sent to it
  // goes to the connection that the report came from.
  bool newest_is(const pb::Report& report) const;
  bool none_alive() const;

  // Every live member has reported to this life of the coordinator.
  bool all_heard() const;
  // No rank of the generation is alive on a live participant.
  bool all_quiesced(const pb::Durable& durable) const;
  // Every live participant has received RUN.
  bool all_started(const pb::Durable& durable) const;
  // Every live member, participant or not, that had joined by then is fenced at
  // the generation and has no rank alive; participants are PREPARED.
  bool all_prepared(const pb::Durable& durable, int64_t joined_by_ms) const;
  // A live participant with ranks that was told to run the generation before,
  // although it is only being prepared: the journal is older than that. "" if
  // there is none.
  // late: one that is fenced and idle would have prepared it by now, so it has
  // also ended it before.
  std::string started_early(const pb::Durable& durable, bool late) const;
  // Of those who had joined by then.
  bool inventories_known(int64_t generation, int64_t joined_by_ms) const;
  // Whether the phase has waited for some time for anybody, and what those have
  // to do.
  struct Awaited {
    bool any = false;
    std::string text;
  };
  Awaited awaited(const pb::Durable& durable, int64_t now_ms) const;
  // The step that every rank of the generation has committed; -1 if not all
  // ranks have reported, or if its plan is not known.
  int64_t committed_step(const pb::Durable& durable) const;
  // Digest of the state that the generation began with, if it was asked for.
  std::optional<uint64_t> restored_digest(int64_t generation) const;
  // Bytes per second of the slowest link between hosts that a rank of the
  // generation has measured; 0: none has.
  double link_bytes_per_s(int64_t generation) const;

  // When this life of the coordinator began.
  int64_t started_ms() const { return started_ms_; }
  int64_t last_join_ms() const { return last_join_ms_; }
  // When expire() last declared a worker dead, at first the start; later by the
  // time in which nobody could be heard since.
  int64_t last_lost_ms() const { return last_lost_ms_; }
  bool awaits_unheard(int64_t now_ms) const {
    return now_ms < unheard_until_ms_;
  }
  // Whether workers may return: this coordinator was just started, or one was
  // lost less than wait_ms ago.
  bool others_may_return(int64_t wait_ms, int64_t now_ms) const;
  // The workers that the end of the last generation did not reach, for people;
  // "" if it reached all.
  std::string unreached_text() const;
  // For how long in total nobody could be heard (on_own_absence()).
  int64_t absent_ms() const { return absent_ms_; }

 private:
  struct Newest {
    uint64_t incarnation = 0;
    uint64_t seq = 0;
    int64_t since_ms = 0;  // when the incarnation was first heard
    int64_t gone_ms = -1;  // when the worker was declared dead
  };
  // Whether the coordinator seems to be cut off from all workers, and whether
  // the connections that are closed were closed by that.
  struct CutOff {
    bool from_all = false;
    bool closed = false;
  };
  CutOff cut_off(const pb::Durable& durable, int64_t dead_after_ms,
                 int64_t now_ms) const;
  int64_t last_heard_ms() const;
  void note_heard(int64_t now_ms);
  void note_gone(const std::string& worker, int64_t now_ms);
  static MembershipChange lost(const std::string& worker, const Member& m,
                               const std::string& why);
  static std::string death_of(const Member& m, int64_t dead_after_ms,
                              int64_t closed_ms, int64_t now_ms);
  void watch_wait(const pb::Durable& durable, const std::string& name,
                  int64_t now_ms, Member* m) const;

  Members members_;
  // The newest report of every name (its life and number), for some time also
  // of dead workers.
  std::map<std::string, Newest> newest_;
  bool cut_off_ = false;   // as of the last expire()
  bool isolated_ = false;  // for so long that it was announced
  int64_t last_join_ms_ = 0;
  int64_t last_lost_ms_ = 0;
  int64_t absent_ms_ = 0;
  int64_t started_ms_ = 0;
  int64_t unheard_until_ms_ = 0;
  std::set<std::string> unreached_;  // by the end of the last generation
};

}  // namespace remesh::core
