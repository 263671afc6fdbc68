#include "coordinator/ctl/render.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cmath>

#include "coordinator/rundir/lines.h"
#include "coordinator/rundir/run_dir.h"
#include "proto/base/text.h"
#include "proto/limits/plausible.h"

namespace remesh::ctl {
namespace {

// " (text)", or "" if there is no text.
std::string in_brackets(const std::string& text) {
  return text.empty() ? "" : " (" + text + ")";
}

std::string after_colon(const std::string& text) {
  return text.empty() ? "" : ": " + text;
}

// "continues at step 1184 from memory", "starts from initial weights".
std::string source_text(const pb::EventRecord& e) {
  if (e.has_source_kind() && e.source_kind() == pb::Source::INIT)
    return "starts from " + e.source();
  return fmt::format("continues at step {} from {}",
                     e.step() - e.lost_steps() + 1,
                     e.source_kind() == pb::Source::MEMORY
                         ? "memory"
                         : e.source().substr(e.source().rfind('/') + 1));
}

// The reason of the choice is in events.jsonl, and here if steps are lost.
std::string mesh_event(const pb::EventRecord& e) {
  std::string mesh = rundir::mesh_text(e.mesh());
  if (e.has_from() && rundir::mesh_text(e.from()) != mesh)
    mesh = rundir::mesh_text(e.from()) + " -> " + mesh;
  std::string out = fmt::format("generation {}: {}, {}", e.generation(), mesh,
                                source_text(e));
  if (e.lost_steps() > 0)
    out += fmt::format(", {} recomputed", plural(e.lost_steps(), "step")) +
           in_brackets(e.detail());
  return out;
}

std::string failure_event(const pb::EventRecord& e) {
  std::string where;
  if (e.has_rank())
    where = fmt::format(" of rank {} on worker {}", e.rank(), e.worker());
  else if (!e.worker().empty())
    where = " of worker " + e.worker();
  if (!where.empty()) where += in_brackets(e.host());
  std::string out = "failure" + where + after_colon(e.cause());
  if (!e.flight_record().empty()) out += "; see traces/" + e.flight_record();
  return out;
}

std::string sentence_of(const pb::EventRecord& e) {
  if (e.event() == events::kMesh) return mesh_event(e);
  if (e.event() == events::kFailure) return failure_event(e);
  const std::string worker = "worker " + e.worker();
  const std::string where =
      (e.worker().empty() ? "" : worker + " of ") + "host " + e.host();
  const std::pair<const events::EventKind*, std::string> sentences[] = {
      {&events::kWorkerJoined, worker + " joined"},
      {&events::kWorkerBack, worker + " returned"},
      {&events::kWorkerLeft, worker + " left"},
      {&events::kWorkerLeaving, worker + " is leaving"},
      {&events::kWorkerLost, worker + " lost"},
      {&events::kDrain, "draining " + worker},
      {&events::kHostCordoned, where + " cordoned"},
      {&events::kHostUncordoned, where + " used again"},
      {&events::kMeshAsked, "mesh requested"},
      {&events::kScaleAsked, "slot limit changed"},
      {&events::kMeshReleased, "requested mesh released"},
      {&events::kTraining,
       fmt::format("training resumed on {} after {}",
                   rundir::mesh_text(e.mesh()), format_duration(e.seconds()))},
      {&events::kStepSkipped, fmt::format("step {} made no update", e.step())},
      {&events::kGenerationEnded,
       fmt::format("generation {} stopped cleanly", e.generation())},
      {&events::kCheckpoint,
       fmt::format("checkpoint of step {} saved", e.step())},
      {&events::kCheckpointFailed, "checkpoint not saved"},
      {&events::kCheckpointDamaged, "unusable checkpoint skipped"},
      // For slots, or for a worker that holds the newest state.
      {&events::kWaiting, "waiting"},
      {&events::kWaitingForState, "waiting"},
      {&events::kWaitingForRoom, "waiting for room"},
      {&events::kWaitingForInputs, "waiting for storage"},
      {&events::kStopRequested, "stop requested"},
      {&events::kStopDeclined, "not stopped"},
      {&events::kJobDone, fmt::format("done at step {}", e.step())},
      {&events::kJobStopped, fmt::format("stopped at step {}", e.step())},
      {&events::kJobFailed, "the job failed"}};
  const bool ended = events::outcome_of(e.event()) != pb::JobStatus::UNKNOWN;
  const std::string why =
      after_colon(e.cause()) +
      after_colon(ended ? rundir::end_detail(e) : e.detail());
  for (const auto& [kind, sentence] : sentences)
    if (e.event() == *kind) return sentence + why;
  std::string name = e.event();
  std::replace(name.begin(), name.end(), '_', ' ');
  return name + (e.worker().empty() ? "" : " " + e.worker()) + why;
}

// A byte that does not continue a character of UTF-8.
bool begins_character(char c) {
  return (static_cast<unsigned char>(c) & 0xc0) != 0x80;
}

std::string fold_line(std::string_view line, size_t columns) {
  std::string out;
  size_t column = 0, indent = line.find_first_not_of(' ') + 2;
  bool second = false;  // whether its second column was seen
  for (bool begun = false; !line.empty(); begun = true) {
    const size_t gap = std::min(line.find_first_not_of(' '), line.size());
    line.remove_prefix(gap);
    // A command at the end stays in one piece, to be copied.
    const bool command = out.ends_with(':') && line.starts_with("remesh");
    const std::string_view word =
        command ? line : line.substr(0, line.find(' '));
    line.remove_prefix(word.size());
    if (begun && gap > 1 && !std::exchange(second, true) &&
        column + gap <= columns / 2)
      indent = column + gap;
    if (begun && column + gap + display_width(word) > columns) {
      out += "\n" + std::string(indent, ' ');
      column = indent;
    } else {
      out += std::string(gap, ' ');
      column += gap;
    }
    out += word;
    column += display_width(word);
  }
  return out;
}

}  // namespace

std::string toned(const std::string& text, Tone tone, const Style& style) {
  if (!style.color) return text;
  const char* code = tone == Tone::kGood  ? "32"
                     : tone == Tone::kBad ? "31"
                                          : "36";
  return fmt::format("\x1b[{}m{}\x1b[0m", code, text);
}

std::string short_number(double value) {
  if (!std::isfinite(value)) return "-";
  if (std::fabs(value) < 1000) return fmt::format("{:.0f}", value);
  static constexpr const char* kUnits[] = {"k", "M", "G", "T"};
  size_t unit = 0;
  value /= 1000;
  while (std::fabs(value) >= 999.5 && unit + 1 < std::size(kUnits)) {
    value /= 1000;
    ++unit;
  }
  const int decimals = std::fabs(value) < 9.995   ? 2
                       : std::fabs(value) < 99.95 ? 1
                                                  : 0;
  return fmt::format("{:.{}f}{}", value, decimals, kUnits[unit]);
}

std::string step_line(const pb::StepMetrics& m, int64_t steps, int width) {
  const std::string total = fmt::format("{}", steps);
  // In their order, with the rank in which they are left out; 0 is always kept.
  std::vector<std::pair<int, std::string>> parts = {
      {0, fmt::format("step {:>{}}/{}", m.step(), total.size(), total)},
      {0, fmt::format("loss {:.4f}", m.loss())},
      {2, fmt::format("|g| {:.3f}", m.grad_norm())},
      {4, fmt::format("lr {:.2e}", m.lr())},
      {6, fmt::format("{:>5} tok/s", short_number(m.tokens_per_s()))},
      {5, fmt::format("{:.3f} s", m.step_s())},
      {3, rundir::mesh_text(m.mesh())},
      {1, fmt::format("gen {}", m.generation())}};
  if (m.has_val_loss())
    parts.emplace_back(0, fmt::format("val {:.4f}", m.val_loss()));
  for (int next = 1;; ++next) {
    std::string out;
    for (const auto& [rank, text] : parts)
      if (rank == 0 || rank >= next) out += (out.empty() ? "" : "  ") + text;
    if (width <= 0 || display_width(out) <= static_cast<size_t>(width) ||
        next > 6)
      return out;
  }
}

std::string event_text(const pb::EventRecord& e) {
  return limits::printable(sentence_of(e), std::string::npos);
}

std::string progress_line(const Progress& p, const Style& style) {
  const double share = p.steps > 0
                           ? std::clamp(static_cast<double>(p.step) /
                                            static_cast<double>(p.steps),
                                        0.0, 1.0)
                           : 0.0;
  std::string tail = fmt::format(" {:>3.0f}%  step {}/{}",
                                 std::floor(share * 100), p.step, p.steps);
  if (!p.note.empty()) {
    tail += "  " + p.note;
  } else if (p.step > 0) {
    tail += fmt::format("  loss {:.4f}", p.loss);
  }
  const std::string elapsed =
      p.elapsed_s >= 0 ? format_duration(p.elapsed_s) : "";
  const std::string left = p.note.empty() && p.step > 0 && p.left_s >= 0
                               ? format_duration(p.left_s) + " left"
                               : "";
  const size_t width = std::max(style.width, 1);
  const std::string both =
      elapsed + (elapsed.empty() || left.empty() ? "" : ", ") + left;
  for (const std::string& times : {both, left}) {
    if (times.empty() || tail.size() + 1 + times.size() > width) continue;
    tail += "  " + times;
    break;
  }
  constexpr size_t kMaxBar = 40;
  constexpr size_t kMinBar = 5;
  const size_t taken = display_width(tail) + 2;
  if (taken + kMinBar > width) {
    // Too narrow for a bar. The tail is ASCII, so bytes are columns.
    return tail.substr(1, width);
  }
  const size_t bar = std::min(kMaxBar, width - taken);
  const auto full = static_cast<size_t>(share * static_cast<double>(bar));
  std::string out;
  for (size_t i = 0; i < bar; ++i) {
    if (style.unicode) {
      out += i < full ? "\u2588" : "\u2591";
    } else {
      out += i < full ? "=" : (i == full ? ">" : ".");
    }
  }
  return "[" + out + "]" + tail;
}

size_t display_width(std::string_view text) {
  size_t width = 0;
  bool escape = false;
  for (const char c : text) {
    if (c == '\x1b') escape = true;
    if (!escape && begins_character(c)) ++width;
    // "ESC [ numbers letter"
    if (std::isalpha(static_cast<unsigned char>(c))) escape = false;
  }
  return width;
}

std::string fold(const std::string& text, int columns) {
  if (columns <= 0) return text;
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    const std::string_view line = std::string_view(text).substr(at, end - at);
    out += display_width(line) <= static_cast<size_t>(columns)
               ? std::string(line)
               : fold_line(line, static_cast<size_t>(columns));
    if (end < text.size()) out += '\n';
    at = end + 1;
  }
  return out;
}

std::string fit(const std::string& text, int columns, int rows,
                const std::string& last) {
  std::string out;
  int row = 1, column = 0;
  bool escape = false;
  const auto put_last = [&] {
    for (const char c : last.substr(0, static_cast<size_t>(columns))) out += c;
    return out;
  };
  for (const char c : text) {
    if (row >= rows) return put_last();
    if (c == '\n') {
      ++row;
      column = 0;
      out += c;
      continue;
    }
    if (c == '\x1b') escape = true;
    if (!escape && begins_character(c)) ++column;
    if (escape || column <= columns) out += c;
    // "ESC [ numbers letter"
    if (escape && std::isalpha(static_cast<unsigned char>(c))) escape = false;
  }
  return put_last();
}

}  // namespace remesh::ctl
