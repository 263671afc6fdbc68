// The events of a run: all that RUN/events.jsonl may contain.
//
// To add one, add a row to events.inc, emit it, and run `tests/lint.sh docs
// --write`, which makes the table of proto/PROTOCOL.md.
// `remesh run` and `remesh status` print an event that they have no sentence
// for as its name and fields.
//
// Every event has the fields time (unix seconds), event (its name), generation
// (the newest one planned) and step (the last finished step); `fields` of an
// EventKind lists the others. pb::EventRecord (control.proto) declares them
// all.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "proto/control.pb.h"

namespace remesh::events {

// How an event is shown.
enum class Tone { kNotice, kGood, kBad };

struct EventKind {
  const char* name;
  Tone tone;
  std::string_view fields;   // beside time, event, generation and step
  std::string_view meaning;  // one sentence for people

  friend bool operator==(const std::string& event, const EventKind& kind) {
    return event == kind.name;
  }
};

// A constant for each row of the table.
#define EVENT(constant, name, tone, fields, meaning) \
  inline constexpr EventKind constant{name, Tone::tone, fields, meaning};
#include "proto/rundir/events.inc"
#undef EVENT

// All rows, in their order.
std::span<const EventKind> event_kinds();

// The tone of the event of that name; kNotice if it is unknown, which is how
// programs of different versions read each other's files.
Tone tone_of(std::string_view name);

// DONE, STOPPED or FAILED if this is the name of the event that ends a job, its
// last one; otherwise UNKNOWN.
pb::JobStatus::State outcome_of(const std::string& name);

// What a rank does, as in the field `doing`: "step 12, forward for 1.2 s".
std::string doing_text(const pb::RankStatus& status);

}  // namespace remesh::events
