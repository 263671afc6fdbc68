#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "checkpoint/store/verify.h"
#include "proto/base/text.h"

namespace remesh::store {
namespace {

// -1 when the manifest's model is not valid.
int64_t num_elements(const pb::Manifest& m) {
  const auto config = manifest::model_config(m.model());
  if (!config.ok()) return -1;
  return geometry::ParamTable::make(*config).num_elements();
}

// Of a manifest that lies, the sum may wrap.
uint64_t num_elements(const pb::ShardFile& shard) {
  uint64_t n = 0;
  for (const pb::Slice& s : shard.slices()) {
    uint64_t count = 1;
    for (const int64_t c : s.count()) count *= static_cast<uint64_t>(c);
    n += count;
  }
  return n;
}

std::string utc(double unix_seconds) {
  // Beyond year 9999 gmtime may fail; a manifest's time may be anything.
  return unix_seconds >= 0 && unix_seconds < 2.5e11
             ? time_text(unix_seconds, "%F %T UTC", /*utc=*/true)
             : "unknown";
}

// JSON must be UTF-8; a path or a name may be anything.
std::string dump(const nlohmann::json& j) {
  return j.dump(2, ' ', false, nlohmann::json::error_handler_t::replace);
}

nlohmann::json model_json(const pb::ModelInfo& c) {
  nlohmann::json j = {{"arch", c.arch()},
                      {"dim", c.dim()},
                      {"n_layers", c.n_layers()},
                      {"n_heads", c.n_heads()},
                      {"n_kv_heads", c.n_kv_heads()},
                      {"hidden_dim", c.hidden_dim()},
                      {"vocab_size", c.vocab_size()},
                      {"norm_eps", c.norm_eps()},
                      {"rope_theta", c.rope_theta()},
                      {"tie_embeddings", c.tie_embeddings()}};
  if (c.has_head_dim()) j["head_dim"] = c.head_dim();
  if (c.has_sliding_window()) j["sliding_window"] = c.sliding_window();
  if (c.lora_rank() == 0) return j;
  j["lora_rank"] = c.lora_rank();
  j["lora_alpha"] = c.lora_alpha();
  j["lora_targets"] = std::vector<std::string>(c.lora_targets().begin(),
                                               c.lora_targets().end());
  return j;
}

}  // namespace

std::string describe(const pb::Manifest& m) {
  const pb::ModelInfo& c = m.model();
  std::string text = fmt::format(
      "step {} of job '{}', generation {}, saved {}\n"
      "mesh      dp {} pp {} tp {} cp {}\n"
      "model     {} dim {} layers {} heads {}/{} hidden {} vocab {}{}\n"
      "params    {} elements; weights and two moments, fp32\n"
      "trained   {} tokens, {} sequences ({} a step, {} tokens each)\n"
      "seed      {}\n"
      "data      {}\n",
      m.step(), m.job(), m.generation(), utc(m.time()), m.mesh().dp(),
      m.mesh().pp(), m.mesh().tp(), m.mesh().cp(), c.arch(), c.dim(),
      c.n_layers(), c.n_heads(), c.n_kv_heads(), c.hidden_dim(), c.vocab_size(),
      c.tie_embeddings() ? " tied" : "", num_elements(m), m.tokens(),
      m.sequences(), m.global_batch_size(), m.seq_len(), m.seed(), m.data_id());
  if (c.lora_rank() > 0)
    text += fmt::format(
        "adapters  rank {} alpha {} on {}; of the model {}\n", c.lora_rank(),
        c.lora_alpha(),
        join({c.lora_targets().begin(), c.lora_targets().end()}), m.base());
  if (m.recent_size() > 0)
    text += fmt::format("loss      {:.6} at step {}\n",
                        m.recent(m.recent_size() - 1).loss(),
                        m.recent(m.recent_size() - 1).step());
  text += fmt::format(
      "code      {}\nfiles     {} shards, {} in all, format {}{}{}\n",
      m.code_version(), m.shards_size(), format_bytes(manifest::file_bytes(m)),
      m.format(), m.compression().empty() ? "" : ", ", m.compression());
  for (const pb::ShardFile& shard : m.shards())
    text +=
        fmt::format("  {}  {:>10}  {} slices, {} elements, xxh128 {}\n",
                    shard.name(), format_bytes(shard.bytes()),
                    shard.slices_size(), num_elements(shard), shard.xxh128());
  return text;
}

std::string describe(const VerifyReport& r) {
  std::string text;
  for (const std::string& p : r.problems) text += "problem: " + p + "\n";
  for (const std::string& w : r.warnings) text += "warning: " + w + "\n";
  // Without its manifest, or under the name of another step.
  if (r.num_files == 0) return text + "NOT USABLE\n";
  text +=
      fmt::format("{}: step {}, {} elements, {} files, {} read in {}\n",
                  r.ok ? "ok" : "DAMAGED", r.step, r.num_elements, r.num_files,
                  format_bytes(r.bytes), format_duration(r.seconds));
  return text;
}

std::string describe_json(const pb::Manifest& m) {
  nlohmann::json shards = nlohmann::json::array();
  for (const pb::ShardFile& shard : m.shards())
    shards.push_back({{"name", shard.name()},
                      {"bytes", shard.bytes()},
                      {"xxh128", shard.xxh128()},
                      {"slices", shard.slices_size()},
                      {"elements", num_elements(shard)}});
  nlohmann::json j = {
      {"step", m.step()},
      {"job", m.job()},
      {"generation", m.generation()},
      {"time", m.time()},
      {"mesh",
       {{"dp", m.mesh().dp()},
        {"pp", m.mesh().pp()},
        {"tp", m.mesh().tp()},
        {"cp", m.mesh().cp()}}},
      {"model", model_json(m.model())},
      {"elements", num_elements(m)},
      {"tokens", m.tokens()},
      {"sequences", m.sequences()},
      {"global_batch_size", m.global_batch_size()},
      {"seq_len", m.seq_len()},
      {"seed", m.seed()},
      {"data_id", m.data_id()},
      {"code_version", m.code_version()},
      {"format", m.format()},
      {"compression", m.compression().empty() ? "none" : m.compression()},
      {"bytes", manifest::file_bytes(m)},
      {"shards", shards}};
  if (!m.base().empty()) j["base"] = m.base();
  if (m.recent_size() > 0) j["loss"] = m.recent(m.recent_size() - 1).loss();
  return dump(j);
}

std::string describe_json(const VerifyReport& r) {
  return dump({{"ok", r.ok},
               {"problems", r.problems},
               {"warnings", r.warnings},
               {"step", r.step},
               {"files", r.num_files},
               {"bytes", r.bytes},
               {"elements", r.num_elements},
               {"nonfinite", r.num_nonfinite},
               {"seconds", r.seconds}});
}

}  // namespace remesh::store
