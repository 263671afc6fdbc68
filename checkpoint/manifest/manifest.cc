#include "checkpoint/manifest/manifest.h"

#include <fmt/format.h>
#include <google/protobuf/util/json_util.h>

#include <set>

#include "proto/base/file_system.h"
#include "proto/base/number.h"
#include "proto/base/text.h"
#include "proto/base/xxh3.h"

namespace remesh::manifest {
namespace {

// The frame around the body: the text is one JSON object, and the bytes of the
// body are known without parsing.
constexpr char kTail[] = "}\n";
std::string header(std::string_view checksum, size_t body_bytes) {
  return fmt::format("{{\"xxh128\":\"{}\",\"bytes\":{},\"manifest\":\n",
                     checksum, body_bytes);
}

// Digits only: no sign, no leading zeros beyond `min_digits`.
std::optional<int64_t> parse_digits(std::string_view text, size_t min_digits) {
  const auto value = parse_number<int64_t>(text);
  if (!value || *value < 0 || fmt::format("{:0{}}", *value, min_digits) != text)
    return std::nullopt;
  return value;
}

// Of a size that any model may have, so that no product of two overflows.
Status check_slice(const pb::Slice& s, const std::string& shard) {
  constexpr int64_t kMost = int64_t{1} << 31;
  const int dims = s.start_size();
  bool good = (dims == 1 || dims == 2) && s.count_size() == dims;
  for (int d = 0; good && d < dims; ++d)
    good = s.start(d) >= 0 && s.start(d) <= kMost && s.count(d) >= 1 &&
           s.count(d) <= kMost;
  if (good) return ok_status();
  return corrupt(shard + ": malformed slice of " + s.param());
}

// Bounds within which nothing computed from them overflows.
Status check_blocks(const pb::ShardFile& f) {
  constexpr uint64_t kLeast = 64, kMost = uint64_t{1} << 30;
  constexpr uint64_t kMostData = uint64_t{1} << 60;
  if (f.block_bytes() >= kLeast && f.block_bytes() <= kMost &&
      f.data_bytes() <= kMostData)
    return ok_status();
  return corrupt(fmt::format("{}: {} bytes in blocks of {}", f.name(),
                             f.data_bytes(), f.block_bytes()));
}

// Invariants that every reader relies on, beyond the checksum.
Status check_content(const pb::Manifest& m) {
  if (m.format() != kFormat)
    return corrupt(fmt::format("format {}, this version reads format {}",
                               m.format(), kFormat));
  if (m.step() < 0 || m.generation() < 0)
    return corrupt("negative step or generation");
  for (int i = 0; i < m.shards_size(); ++i) {
    const pb::ShardFile& f = m.shards(i);
    // The name becomes part of a path: only our own form is accepted.
    if (f.name() != shard_name(i) || f.rank() != i)
      return corrupt(fmt::format("shard {} is called '{}' rank {}, not '{}'", i,
                                 f.name(), f.rank(), shard_name(i)));
    if (!is_hex_hash(f.xxh128()))
      return corrupt(f.name() + ": its checksum is not 32 hex digits");
    RETURN_IF_ERROR(check_blocks(f));
    for (const pb::Slice& s : f.slices())
      RETURN_IF_ERROR(check_slice(s, f.name()));
  }
  if (m.has_index() &&
      (m.index().name() != kIndexName || !is_hex_hash(m.index().xxh128()) ||
       m.index().block_bytes() != 0))
    return corrupt("malformed entry of the index");
  return ok_status();
}

}  // namespace

std::string step_name(int64_t step) {
  CHECK(step >= 0);
  return fmt::format("step-{:08}", step);
}

std::optional<int64_t> parse_step_name(std::string_view name) {
  if (name.substr(0, 5) != "step-") return std::nullopt;
  return parse_digits(name.substr(5), 8);
}

std::string tmp_name(const TmpName& name) {
  return fmt::format(".tmp-{}.g{}", step_name(name.step), name.generation);
}

std::optional<TmpName> parse_tmp_name(std::string_view name) {
  if (name.substr(0, 5) != ".tmp-") return std::nullopt;
  const size_t dot = name.find(".g", 5);
  if (dot == std::string_view::npos) return std::nullopt;
  const auto step = parse_step_name(name.substr(5, dot - 5));
  const auto generation = parse_digits(name.substr(dot + 2), 1);
  if (!step || !generation) return std::nullopt;
  return TmpName{.step = *step, .generation = *generation};
}

std::string old_name(int64_t step) { return ".old-" + step_name(step); }

std::optional<int64_t> parse_old_name(std::string_view name) {
  if (name.substr(0, 5) != ".old-") return std::nullopt;
  return parse_step_name(name.substr(5));
}

std::string shard_name(int rank) { return fmt::format("shard-{:05}.h5", rank); }
std::string sidecar_name(int rank) {
  return fmt::format("shard-{:05}.meta", rank);
}

std::string encode(const pb::Manifest& manifest) {
  google::protobuf::util::JsonPrintOptions options;
  options.add_whitespace = true;
  options.preserve_proto_field_names = true;
  std::string body;
  const auto status =
      google::protobuf::util::MessageToJsonString(manifest, &body, options);
  CHECK_MSG(status.ok(), status.ToString().c_str());
  return header(xxh128_text(body), body.size()) + body + kTail;
}

Result<pb::Manifest> decode(std::string_view text) {
  const size_t line = text.find('\n');
  const std::string_view tail = kTail;
  if (line == std::string_view::npos || text.size() < line + 1 + tail.size())
    return corrupt("not a manifest, or cut short");
  const std::string_view body =
      text.substr(line + 1, text.size() - line - 1 - tail.size());
  // Rebuilds the frame and compares it, so that every byte is checked.
  if (text.substr(0, line + 1) != header(xxh128_text(body), body.size()))
    return corrupt("the checksum in the first line does not match the content");
  if (text.substr(line + 1 + body.size()) != tail)
    return corrupt("the end is damaged");
  pb::Manifest manifest;
  const auto status = google::protobuf::util::JsonStringToMessage(
      {body.data(), body.size()}, &manifest);
  if (!status.ok())
    return corrupt("written by another version? " + status.ToString());
  RETURN_IF_ERROR(check_content(manifest));
  return manifest;
}

pb::ModelInfo model_info(const geometry::ModelConfig& c) {
  pb::ModelInfo info;
  // What is the default is left out.
  if (c.arch != info.arch()) info.set_arch(c.arch);
  sizes_to_message(c, &info);
  if (c.head_size != 0) info.set_head_dim(c.head_size);
  if (c.sliding_window != 0) info.set_sliding_window(c.sliding_window);
  info.set_rope_scaled(c.rope_scaled);
  if (c.rope_scaled) {
    info.set_rope_factor(c.rope_scaling.factor);
    info.set_rope_low_freq_factor(c.rope_scaling.low_freq_factor);
    info.set_rope_high_freq_factor(c.rope_scaling.high_freq_factor);
    info.set_rope_original_max_position(c.rope_scaling.original_max_position);
  }
  if (c.lora.rank > 0) {
    info.set_lora_rank(c.lora.rank);
    info.set_lora_alpha(c.lora.alpha);
    for (const std::string& t : c.lora.targets) info.add_lora_targets(t);
  }
  return info;
}

Result<geometry::ModelConfig> model_config(const pb::ModelInfo& info) {
  geometry::ModelConfig c = geometry::config_of(info);
  c.head_size = info.head_dim();
  c.rope_scaled = info.rope_scaled();
  if (c.rope_scaled)
    c.rope_scaling = {
        .factor = info.rope_factor(),
        .low_freq_factor = info.rope_low_freq_factor(),
        .high_freq_factor = info.rope_high_freq_factor(),
        .original_max_position = info.rope_original_max_position()};
  if (info.lora_rank() != 0)
    c.lora = {
        .rank = info.lora_rank(),
        .alpha = info.lora_alpha(),
        .targets = {info.lora_targets().begin(), info.lora_targets().end()}};
  const Status valid = c.validate();
  if (!valid.ok()) return corrupt("model in the manifest: " + valid.message());
  return c;
}

uint64_t file_bytes(const pb::Manifest& m) {
  uint64_t bytes = m.index().bytes();
  for (const pb::ShardFile& shard : m.shards()) bytes += shard.bytes();
  return bytes;
}

Status check_run(const pb::Manifest& m, uint64_t run_id) {
  if (m.run_id() == 0 || run_id == 0 || m.run_id() == run_id)
    return ok_status();
  return corrupt(fmt::format(
      "belongs to another run ({:016x}); `remesh fork` starts a run from it",
      m.run_id()));
}

namespace {

template <typename T>
void compare(const char* what, const T& saved, const T& wanted,
             std::vector<std::string>& found) {
  if (saved != wanted)
    found.push_back(
        fmt::format("{}: checkpoint {}, job {}", what, saved, wanted));
}

std::string texts(const google::protobuf::RepeatedPtrField<std::string>& list) {
  return join({list.begin(), list.end()});
}

}  // namespace

std::vector<std::string> model_differences(const pb::ModelInfo& a,
                                           const pb::ModelInfo& b) {
  std::vector<std::string> found;
  compare("model.arch", a.arch(), b.arch(), found);
  compare("model.dim", a.dim(), b.dim(), found);
  compare("model.n_layers", a.n_layers(), b.n_layers(), found);
  compare("model.n_heads", a.n_heads(), b.n_heads(), found);
  compare("model.n_kv_heads", a.n_kv_heads(), b.n_kv_heads(), found);
  // 0: as dim and n_heads imply.
  compare("model.head_dim", a.head_dim(), b.head_dim(), found);
  compare("model.sliding_window", a.sliding_window(), b.sliding_window(),
          found);
  compare("model.hidden_dim", a.hidden_dim(), b.hidden_dim(), found);
  compare("model.vocab_size", a.vocab_size(), b.vocab_size(), found);
  compare("model.norm_eps", a.norm_eps(), b.norm_eps(), found);
  compare("model.rope_theta", a.rope_theta(), b.rope_theta(), found);
  compare("model.tie_embeddings", a.tie_embeddings(), b.tie_embeddings(),
          found);
  // Without scaling the factor is 1 and the other three are unused.
  compare("model.rope_scaling_factor", a.rope_scaled() ? a.rope_factor() : 1.0,
          b.rope_scaled() ? b.rope_factor() : 1.0, found);
  if (a.rope_scaled() && b.rope_scaled()) {
    compare("model.rope_low_freq_factor", a.rope_low_freq_factor(),
            b.rope_low_freq_factor(), found);
    compare("model.rope_high_freq_factor", a.rope_high_freq_factor(),
            b.rope_high_freq_factor(), found);
    compare("model.rope_original_max_position", a.rope_original_max_position(),
            b.rope_original_max_position(), found);
  }
  compare("lora.rank", a.lora_rank(), b.lora_rank(), found);
  compare("lora.alpha", a.lora_alpha(), b.lora_alpha(), found);
  compare("lora.targets", texts(a.lora_targets()), texts(b.lora_targets()),
          found);
  return found;
}

std::vector<std::string> differences(const pb::Manifest& manifest,
                                     const JobIdentity& job) {
  auto found = model_differences(manifest.model(), model_info(job.model));
  compare("train.seed", manifest.seed(), job.seed, found);
  compare("data set", manifest.data_id(), job.data_id, found);
  compare("train.global_batch_size", manifest.global_batch_size(),
          job.global_batch_size, found);
  compare("train.seq_len", manifest.seq_len(), job.seq_len, found);
  if (!manifest.base_fingerprint().empty() && !job.base_fingerprint.empty())
    compare(
        "weights of the frozen model (put back what was at model.init_from)",
        manifest.base_fingerprint(), job.base_fingerprint, found);
  return found;
}

std::vector<int64_t> to_remove(const std::vector<int64_t>& valid,
                               const std::vector<int64_t>& invalid,
                               int64_t keep_latest_k, int64_t keep_every_n,
                               const std::set<int64_t>& kept) {
  CHECK(keep_latest_k >= 1 && keep_every_n >= 0);
  const std::set<int64_t, std::greater<>> newest_first(valid.begin(),
                                                       valid.end());
  std::set<int64_t> removed;
  int64_t rank = 0;
  for (auto it = newest_first.begin(); it != newest_first.end(); ++it) {
    const bool latest = rank++ < keep_latest_k;
    const auto before = std::next(it);
    const int64_t last = before == newest_first.end() ? 0 : *before;
    const bool milestone =
        keep_every_n > 0 && *it / keep_every_n > last / keep_every_n;
    if (!latest && !milestone && !kept.contains(*it)) removed.insert(*it);
  }
  for (const int64_t step : invalid)
    if (!newest_first.empty() && step < *newest_first.begin() &&
        newest_first.count(step) == 0 && !kept.contains(step))
      removed.insert(step);
  return {removed.begin(), removed.end()};
}

}  // namespace remesh::manifest
