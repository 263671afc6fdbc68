#include "proto/limits/plausible.h"

#include <fmt/format.h>
#include <google/protobuf/unknown_field_set.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <set>

namespace remesh::limits {
namespace {

constexpr double kMaxSeconds = 1e10;
constexpr uint64_t kMaxBytes = uint64_t{1} << 56;

// Bytes of the character at `i`; 0 if it is a control character, which a
// terminal would obey (C0, DEL, C1), or not valid UTF-8 (RFC 3629).
size_t printable_at(std::string_view text, size_t i) {
  const auto byte = [&](size_t k) {
    return static_cast<unsigned char>(text[i + k]);
  };
  if (byte(0) < 0x80) return byte(0) >= 0x20 && byte(0) != 0x7f ? 1 : 0;
  const size_t n = byte(0) < 0xe0 ? 2 : byte(0) < 0xf0 ? 3 : 4;
  if (byte(0) < 0xc0 || byte(0) > 0xf4 || i + n > text.size()) return 0;
  uint32_t code = byte(0) & (0x7f >> n);
  for (size_t k = 1; k < n; ++k) {
    if (byte(k) >> 6 != 2) return 0;
    code = code << 6 | (byte(k) & 0x3f);
  }
  const uint32_t least = n == 2 ? 0xa0 : n == 3 ? 0x800 : 0x10000;
  const bool surrogate = 0xd800 <= code && code < 0xe000;
  return code < least || code > 0x10ffff || surrogate ? 0 : n;
}

template <typename T>
Status in_range(const char* field, T value, T least, T most) {
  if (least <= value && value <= most) return ok_status();
  return invalid_argument(
      fmt::format("{} = {}: must be from {} to {}", field, value, least, most));
}

Status number(const char* field, int64_t value, int64_t least = 0) {
  return in_range(field, value, least, kMaxNumber);
}

Status seconds(const char* field, double value) {
  if (std::isfinite(value) && 0 <= value && value <= kMaxSeconds)
    return ok_status();
  return invalid_argument(fmt::format("{} = {}: must be from 0 to {} seconds",
                                      field, value, kMaxSeconds));
}

Status at_most(const char* field, int count, int most) {
  if (count <= most) return ok_status();
  return invalid_argument(
      fmt::format("{} {}: at most {} are allowed", count, field, most));
}

Status text(const char* field, const std::string& value,
            size_t limit = kMaxText) {
  if (is_printable(value, limit)) return ok_status();
  return invalid_argument(
      fmt::format("{} = '{}': must be at most {} bytes without control "
                  "characters, in UTF-8",
                  field, printable(value, 64), limit));
}

Status name(const char* field, const std::string& value) {
  if (valid_name(value)) return ok_status();
  return invalid_argument(
      fmt::format("{} = '{}': {}", field, printable(value, 64), kNameRule));
}

// steps: of the job. A rank saves what it has committed.
Status check_rank(const pb::RankStatus& r, int64_t steps) {
  RETURN_IF_ERROR(in_range("ranks.rank", r.rank(), 0, kMaxRanks - 1));
  RETURN_IF_ERROR(in_range<int64_t>("ranks.step", r.step(), -1, steps + 1));
  RETURN_IF_ERROR(
      in_range<int64_t>("ranks.committed_step", r.committed_step(), -1, steps));
  RETURN_IF_ERROR(in_range<int64_t>("ranks.checkpoint_step",
                                    r.checkpoint_step(), -1,
                                    std::min(steps, r.committed_step() + 1)));
  RETURN_IF_ERROR(number("ranks.declined_stops", r.declined_stops()));
  RETURN_IF_ERROR(number("ranks.failed_saves", r.failed_saves()));
  RETURN_IF_ERROR(seconds("ranks.exit_time", r.exit_time()));
  RETURN_IF_ERROR(
      at_most("members of a group", r.at().ranks_size(), kMaxMembers));
  return at_most("lines of a log", r.log_tail_size(), kMaxLines);
}

Status check_metrics(const pb::StepMetrics& m, int64_t steps) {
  RETURN_IF_ERROR(in_range<int64_t>("metrics.step", m.step(), 1, steps));
  RETURN_IF_ERROR(number("metrics.generation", m.generation()));
  RETURN_IF_ERROR(number("metrics.tokens", m.tokens()));
  RETURN_IF_ERROR(seconds("metrics.step_s", m.step_s()));
  RETURN_IF_ERROR(seconds("metrics.time", m.time()));
  RETURN_IF_ERROR(
      at_most("validation losses", m.val_losses_size(), kMaxValidated));
  return check(m.mesh());
}

Status check_holding(const pb::StateHolding& h) {
  RETURN_IF_ERROR(number("holdings.step", h.step()));
  RETURN_IF_ERROR(number("holdings.generation", h.generation()));
  RETURN_IF_ERROR(number("holdings.elements", h.elements()));
  RETURN_IF_ERROR(number("holdings.tokens", h.tokens()));
  RETURN_IF_ERROR(number("holdings.sequences", h.sequences()));
  RETURN_IF_ERROR(in_range("holdings.rank", h.rank(), 0, kMaxRanks - 1));
  RETURN_IF_ERROR(text("holdings.segment", h.segment()));
  const pb::Sharding& s = h.sharding();
  RETURN_IF_ERROR(in_range("sharding.chunks", s.chunks(), 1, kMaxSlots));
  RETURN_IF_ERROR(at_most("bounds of stages", s.bounds_size(), kMaxCores));
  RETURN_IF_ERROR(
      in_range("sharding.shard_group", s.zero_shard_group(), 0, kMaxRanks));
  return check(s.mesh());
}

// What the worker is, without what it says of ranks and states.
Status check_worker(const pb::Report& r, const Known& known) {
  RETURN_IF_ERROR(name("worker", r.worker()));
  RETURN_IF_ERROR(text("host", r.host(), kMaxHost));
  RETURN_IF_ERROR(text("build", r.build()));
  RETURN_IF_ERROR(in_range<size_t>("bytes of hardware", r.hardware().size(), 0,
                                   kMaxHardware));
  RETURN_IF_ERROR(in_range("slots", r.slots(), 0, kMaxSlots));
  RETURN_IF_ERROR(in_range("cores", r.cores(), 0, kMaxCores));
  for (const uint64_t bytes : {r.memory_bytes(), r.state_room()})
    RETURN_IF_ERROR(in_range<uint64_t>("bytes", bytes, 0, kMaxBytes));
  RETURN_IF_ERROR(in_range<int64_t>(
      "generation", r.generation(), 0,
      std::min(known.generation, kMaxNumber - 2 * kMaxGenerationLead) +
          kMaxGenerationLead));
  RETURN_IF_ERROR(in_range<uint64_t>(
      "coordinator_epoch", r.coordinator_epoch(), 0,
      std::min(known.epoch, kMaxNumber - 2 * kMaxEpochLeadMs) +
          kMaxEpochLeadMs));
  return in_range<uint64_t>("incarnation", r.incarnation(), 0, kMaxIncarnation);
}

Status check_fence(const pb::FenceIn& f) {
  RETURN_IF_ERROR(name("worker", f.worker()));
  RETURN_IF_ERROR(number("generation", f.generation()));
  RETURN_IF_ERROR(in_range<int64_t>("index", f.index(), 0, kMaxFenceIndex));
  return in_range<size_t>("bytes of a fence", f.blob().size(), 0,
                          kMaxFenceBytes * kMaxSlots);
}

template <typename Message>
void clean_text(Message* message, const std::string& (Message::*get)() const,
                std::string* (Message::*change)()) {
  const std::string& value = (message->*get)();
  if (!is_printable(value)) *(message->*change)() = printable(value);
}

void clean_lines(google::protobuf::RepeatedPtrField<std::string>* lines) {
  for (std::string& line : *lines)
    if (!is_printable(line)) line = printable(line);
}

}  // namespace

Status check(const pb::Mesh& mesh) {
  int64_t world = 1;
  for (const int32_t degree : {mesh.dp(), mesh.pp(), mesh.tp(), mesh.cp()}) {
    RETURN_IF_ERROR(in_range("degree of a mesh", degree, 1, kMaxRanks));
    RETURN_IF_ERROR(
        in_range<int64_t>("ranks of a mesh", world *= degree, 1, kMaxRanks));
  }
  return ok_status();
}

Status check(const pb::Report& r, const Known& known) {
  RETURN_IF_ERROR(check_worker(r, known));
  RETURN_IF_ERROR(at_most("ranks", r.ranks_size(), r.slots()));
  RETURN_IF_ERROR(at_most("steps", r.metrics_size(), kMaxMetrics));
  RETURN_IF_ERROR(at_most("states", r.holdings_size(), kMaxHoldings));
  RETURN_IF_ERROR(at_most("damages", r.damaged_size(), kMaxDamages));
  std::set<int> ranks;
  for (const pb::RankStatus& s : r.ranks()) {
    RETURN_IF_ERROR(check_rank(s, known.steps));
    if (!ranks.insert(s.rank()).second)
      return invalid_argument(
          fmt::format("ranks.rank = {}: occurs twice", s.rank()));
  }
  for (const pb::StepMetrics& m : r.metrics())
    RETURN_IF_ERROR(check_metrics(m, known.steps));
  for (const pb::StateHolding& h : r.holdings())
    RETURN_IF_ERROR(check_holding(h));
  RETURN_IF_ERROR(at_most("origins", r.origins_size(), kMaxOrigins));
  for (const pb::Branches::Origin& o : r.origins()) {
    RETURN_IF_ERROR(in_range<int64_t>("origins.generation", o.generation(), 1,
                                      r.generation()));
    RETURN_IF_ERROR(
        in_range<int64_t>("origins.from", o.from(), 0, o.generation() - 1));
    RETURN_IF_ERROR(number("origins.step", o.step()));
  }
  return ok_status();
}

Status check(const pb::Envelope& m) {
  if (m.has_fence_in()) return check_fence(m.fence_in());
  return invalid_argument("not a message of a worker");
}

Status check(const pb::Command& c) {
  RETURN_IF_ERROR(text("worker", c.worker()));
  return text("layout", c.layout());
}

Status check(const pb::Directive& d) {
  RETURN_IF_ERROR(in_range<uint64_t>("epoch", d.epoch(), 0, kMaxNumber));
  RETURN_IF_ERROR(number("generation", d.generation()));
  RETURN_IF_ERROR(number("metrics_acked", d.metrics_acked()));
  RETURN_IF_ERROR(number("checkpoint_request", d.checkpoint_request()));
  RETURN_IF_ERROR(number("report_every_ms", d.report_every_ms()));
  RETURN_IF_ERROR(number("dead_after_ms", d.dead_after_ms()));
  RETURN_IF_ERROR(text("job", d.job()));
  RETURN_IF_ERROR(text("run_dir", d.run_dir(), 4 * kMaxText));
  const pb::Assignment& a = d.assignment();
  if (!d.has_assignment()) return ok_status();
  RETURN_IF_ERROR(check(a.mesh()));
  RETURN_IF_ERROR(in_range("ranks", a.ranks_size(), 0, kMaxRanks));
  for (const pb::RankPlace& p : a.ranks()) {
    RETURN_IF_ERROR(name("ranks.worker", p.worker()));
    RETURN_IF_ERROR(in_range("ranks.rank", p.rank(), 0, a.ranks_size() - 1));
    RETURN_IF_ERROR(
        in_range("ranks.local_slot", p.local_slot(), 0, kMaxSlots - 1));
    RETURN_IF_ERROR(in_range("ranks.threads", p.threads(), 0, kMaxCores));
  }
  for (const std::string& w : a.workers()) RETURN_IF_ERROR(name("workers", w));
  for (const std::string& h : a.hosts()) RETURN_IF_ERROR(text("hosts", h));
  RETURN_IF_ERROR(number("source.step", a.source().step()));
  if (has_unknown_value(a.source(), pb::Source::kKindFieldNumber))
    return invalid_argument("source.kind is of a later release");
  for (const pb::StateHolding& h : a.source().states())
    RETURN_IF_ERROR(check_holding(h));
  RETURN_IF_ERROR(text("prediction", a.prediction()));
  if (a.microbatches_size() != 0)
    RETURN_IF_ERROR(in_range("microbatches", a.microbatches_size(),
                             a.mesh().dp(), a.mesh().dp()));
  for (const int64_t n : a.microbatches())
    RETURN_IF_ERROR(number("microbatches", n));
  return text("run_dir", a.run_dir(), 4 * kMaxText);
}

bool has_unknown_value(const google::protobuf::Message& message, int field) {
  const auto& unknown = message.GetReflection()->GetUnknownFields(message);
  for (int i = 0; i < unknown.field_count(); ++i)
    if (unknown.field(i).number() == field) return true;
  return false;
}

void clean(pb::Report* report) {
  using R = pb::RankStatus;
  for (R& r : *report->mutable_ranks()) {
    clean_text(&r, &R::error, &R::mutable_error);
    clean_text(&r, &R::last_log, &R::mutable_last_log);
    clean_text(&r, &R::checkpoint_error, &R::mutable_checkpoint_error);
    clean_text(&r, &R::flight_record, &R::mutable_flight_record);
    clean_text(&r, &R::doing, &R::mutable_doing);
    clean_text(&r, &R::os_state, &R::mutable_os_state);
    if (r.has_at()) {
      using At = pb::RankOperation;
      clean_text(r.mutable_at(), &At::name, &At::mutable_name);
      clean_text(r.mutable_at(), &At::group, &At::mutable_group);
    }
    clean_lines(r.mutable_log_tail());
  }
  clean_text(report, &pb::Report::hardware_error,
             &pb::Report::mutable_hardware_error);
  clean_lines(report->mutable_damaged());
  for (pb::StateHolding& h : *report->mutable_holdings()) {
    h.clear_worker();
    h.clear_host();
  }
  report->DiscardUnknownFields();
}

bool valid_name(std::string_view name) {
  constexpr size_t kMaxName = 64;
  if (name.empty() || name.size() > kMaxName ||
      std::isalnum(static_cast<unsigned char>(name[0])) == 0)
    return false;
  return std::all_of(name.begin(), name.end(), [](unsigned char c) {
    return std::isalnum(c) != 0 || c == '-' || c == '_' || c == '.';
  });
}

bool is_printable(std::string_view text, size_t limit) {
  if (text.size() > limit) return false;
  for (size_t i = 0, n = 0; i < text.size(); i += n)
    if ((n = printable_at(text, i)) == 0) return false;
  return true;
}

std::string printable(std::string_view text, size_t limit) {
  std::string out(text.substr(0, limit));
  for (size_t i = 0; i < out.size();) {
    const size_t n = printable_at(out, i);
    if (n == 0) out[i] = '?';
    i += std::max<size_t>(n, 1);
  }
  return out;
}

}  // namespace remesh::limits
