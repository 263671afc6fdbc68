// What a message of the control protocol may contain. Coordinator and workers
// check every message before it changes anything: a message that fails has no
// effect, whoever sent it. Pure.
//
// Numbers that a peer names are bounded well below the range of their type, so
// that arithmetic with an accepted number cannot overflow, and relative to what
// the receiver knows, so that one message cannot use up a range.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "proto/base/status.h"
#include "proto/control.pb.h"

namespace remesh::limits {

// Limits of workers, and of what they and their ranks are.
inline constexpr size_t kMaxWorkers = 16'384;
inline constexpr int kMaxSlots = 4096;  // of a worker
inline constexpr int kMaxCores = 65'536;
inline constexpr int kMaxRanks = 1 << 20;  // of a mesh
// Generations, epochs and steps: exact as double, for JSON.
inline constexpr int64_t kMaxNumber = int64_t{1} << 53;
// How far a worker may be ahead of a coordinator that lost its journal.
inline constexpr int64_t kMaxGenerationLead = 1 << 20;
inline constexpr uint64_t kMaxEpochLeadMs = uint64_t{1} << 31;  // 25 days
// An incarnation is the time in milliseconds and, below it, random bits. No
// clock is compared with another one: either may be wrong.
inline constexpr int kIncarnationBits = 20;
inline constexpr uint64_t kMaxIncarnation = (uint64_t{1} << 63) - 1;
inline constexpr size_t kMaxText = 1024;      // bytes of a string
inline constexpr size_t kMaxHost = 255;       // of the name of a host
inline constexpr size_t kMaxHardware = 4096;  // of its description
inline constexpr int kMaxLines = 64;          // of a log
inline constexpr int kMaxMetrics = 16'384;    // steps in a report
inline constexpr int kMaxValidated = 64;      // members of a mixture
inline constexpr int kMaxMembers = 1024;      // that a rank names of a group
inline constexpr int64_t kMaxFenceIndex = 2;
inline constexpr size_t kMaxFenceBytes = 64 << 10;  // of a rank
// An inventory: own states and replicas of several steps, of all slots that the
// worker has had.
inline constexpr int kMaxHoldings = 65'536;
inline constexpr int kMaxOrigins = 64;
inline constexpr int kMaxDamages = 1024;

// What the receiver of a report knows itself.
struct Known {
  int64_t generation = 0;
  uint64_t epoch = 0;
  int64_t steps = kMaxNumber;  // of the job
};

// Fails with invalid_argument, which names the field, its value and the limit.
Status check(const pb::Report& report, const Known& known);
// Of messages that workers send, all but the report.
Status check(const pb::Envelope& message);
Status check(const pb::Command& command);
Status check(const pb::Directive& directive);
// Every degree at least 1, and at most kMaxRanks ranks.
Status check(const pb::Mesh& mesh);

// Whether the message has a value of that field that this release does not
// know: protobuf keeps an enumerator of a later release as an unknown field,
// and the field reads as its default.
bool has_unknown_value(const google::protobuf::Message& message, int field);

// The texts of ranks come from logs and libraries, so they are cut and freed of
// control characters instead of being refused. What nobody reads, unknown
// fields among it, would be kept with the report, so it is removed.
void clean(pb::Report* report);

// Whether a worker or a key may have this name.
bool valid_name(std::string_view name);
inline constexpr char kNameRule[] =
    "must be 1 to 64 letters, digits, '.', '_' or '-', and begin with a letter "
    "or digit";

// Whether the text is UTF-8 without control characters, which a terminal would
// obey, and has at most `limit` bytes.
bool is_printable(std::string_view text, size_t limit = kMaxText);
// The text cut to `limit` bytes, with '?' for each byte that is not printable.
std::string printable(std::string_view text, size_t limit = kMaxText);

}  // namespace remesh::limits
