#include <fmt/format.h>

#include <algorithm>

#include "parallel/geometry/lora.h"
#include "parallel/geometry/mesh_check.h"
#include "parallel/geometry/schedule.h"
#include "parallel/jobfile/jobfile.h"
#include "parallel/jobfile/param_groups.h"
#include "parallel/jobfile/schema.h"
#include "proto/base/check.h"
#include "proto/base/text.h"

namespace remesh::jobfile {
namespace {

// tiny to 110m: the sizes of the golden files and of llama2.c's models.
// 1b: Llama 3.2 1B; 8b, 70b: Llama 3.1 (config.json of each on Hugging Face).
struct Flavor {
  const char* name;
  int64_t dim, n_layers, n_heads, n_kv_heads, hidden_dim;
  double rope_theta;
  bool tie_embeddings;
  double rope_scaling_factor;
};
constexpr Flavor kFlavors[] = {
    {"tiny", 64, 4, 8, 4, 192, 1e4, false, 1},
    {"15m", 288, 6, 6, 6, 768, 1e4, false, 1},
    {"42m", 512, 8, 8, 8, 1376, 1e4, false, 1},
    {"110m", 768, 12, 12, 12, 2048, 1e4, false, 1},
    {"1b", 2048, 16, 32, 8, 8192, 5e5, true, 32},
    {"8b", 4096, 32, 32, 8, 14336, 5e5, false, 8},
    {"70b", 8192, 80, 64, 8, 28672, 5e5, false, 8},
};

void expand_flavor(pb::Model& m) {
  for (const Flavor& f : kFlavors) {
    if (m.flavor() != f.name) continue;
    if (!m.has_dim()) m.set_dim(f.dim);
    if (!m.has_n_layers()) m.set_n_layers(f.n_layers);
    if (!m.has_n_heads()) m.set_n_heads(f.n_heads);
    if (!m.has_n_kv_heads()) m.set_n_kv_heads(f.n_kv_heads);
    if (!m.has_hidden_dim()) m.set_hidden_dim(f.hidden_dim);
    if (!m.has_rope_theta()) m.set_rope_theta(f.rope_theta);
    if (!m.has_tie_embeddings()) m.set_tie_embeddings(f.tie_embeddings);
    if (!m.has_rope_scaling_factor())
      m.set_rope_scaling_factor(f.rope_scaling_factor);
  }
}

}  // namespace

void clear_flavor_keys(pb::Model& m) {
  m.clear_dim();
  m.clear_n_layers();
  m.clear_n_heads();
  m.clear_n_kv_heads();
  m.clear_head_dim();
  m.clear_hidden_dim();
  m.clear_rope_theta();
  m.clear_tie_embeddings();
  m.clear_rope_scaling_factor();
}

namespace {

// The keys of [model] that describe `c`.
pb::Model model_keys(const geometry::ModelConfig& c) {
  pb::Model m;
  m.set_arch(c.arch);
  sizes_to_message(c, &m);
  m.set_head_dim(c.head_dim());
  m.set_sliding_window(c.sliding_window);
  m.set_rope_scaling_factor(c.rope_scaled ? c.rope_scaling.factor : 1);
  m.set_rope_low_freq_factor(c.rope_scaling.low_freq_factor);
  m.set_rope_high_freq_factor(c.rope_scaling.high_freq_factor);
  m.set_rope_original_max_position(c.rope_scaling.original_max_position);
  return m;
}

void fill_in(pb::Job& job, const DataInfo& data) {
  pb::Model& m = *job.mutable_model();
  if (data.init_model) {
    pb::Model whole = model_keys(*data.init_model);
    whole.MergeFrom(m);
    m = whole;
  }
  expand_flavor(m);
  if (m.n_kv_heads() == -1) m.set_n_kv_heads(m.n_heads());
  if (m.head_dim() == -1 && m.dim() % m.n_heads() == 0)
    m.set_head_dim(m.dim() / m.n_heads());
  if (m.hidden_dim() == -1) m.set_hidden_dim((8 * m.dim() / 3 + 31) / 32 * 32);
  if (m.vocab_size() == -1) m.set_vocab_size(data.vocab_size);
  pb::Schedule& s = *job.mutable_schedule();
  if (s.total_steps() == -1) s.set_total_steps(job.train().steps());
  // Defaults adapt to a short run and to a data set without held-out text; the
  // same values given by the user are errors (check_*).
  if (!s.has_warmup_steps())
    s.set_warmup_steps(std::min(s.warmup_steps(), s.total_steps()));
  pb::Train& t = *job.mutable_train();
  if (!t.has_eval_sequences() && data.val_tokens >= 0 &&
      data.val_tokens <= t.seq_len())
    t.set_eval_sequences(0);
  for (const Field* section : sections())
    for (const Field* key : keys(*section))
      if (!has_key(job, *key)) {
        const std::string problem = set_key(job, *key, get_key(job, *key));
        CHECK_MSG(problem.empty() || full_name(*key) == "data.path",
                  "job.proto: a default that is not allowed");
      }
}

using Problems = std::vector<std::string>;

// A -1 leaves the size to the model of init_from.
void clear_open_sizes(pb::Model& m) {
  if (m.n_kv_heads() == -1) m.clear_n_kv_heads();
  if (m.head_dim() == -1) m.clear_head_dim();
  if (m.hidden_dim() == -1) m.clear_hidden_dim();
  if (m.vocab_size() == -1) m.clear_vocab_size();
}

// Keys that have no effect because another one was forgotten.
void check_forgotten(const pb::Job& given, Problems& out) {
  const pb::Lora& lora = given.lora();
  if (!lora.has_rank() && (!lora.targets().empty() || lora.has_alpha()))
    out.emplace_back(
        "lora.rank: must be given with lora.targets or lora.alpha; 0 trains "
        "all weights");
  const pb::Train& t = given.train();
  if (t.spike_factor() > 0 && !t.has_max_skipped_steps())
    out.push_back(fmt::format(
        "train.max_skipped_steps: must be given with train.spike_factor = {}; "
        "0 skips no step",
        t.spike_factor()));
}

// Keys that contradict the model of init_from.
void check_init(const pb::Job& given, const DataInfo& data, Problems& out) {
  if (!data.init_model) return;
  if (given.model().flavor() != "custom")
    out.push_back(fmt::format(
        "model.flavor = \"{}\": must be \"custom\" where model.init_from has "
        "the sizes",
        given.model().flavor()));
  pb::Job held;
  *held.mutable_model() = model_keys(*data.init_model);
  const Field* const section = pb::Job::descriptor()->FindFieldByName("model");
  for (const Field* key : keys(*section))
    if (has_key(held, *key) && has_key(given, *key) &&
        get_key(held, *key) != get_key(given, *key))
      out.push_back(fmt::format("{} = {}: the model of model.init_from has {}",
                                full_name(*key),
                                to_toml_value(get_key(given, *key)),
                                to_toml_value(get_key(held, *key))));
}

void check_model(const pb::Job& job, const DataInfo& data, Problems& out) {
  const pb::Model& m = job.model();
  const Status status = model_config(job).validate();
  if (!status.ok()) out.push_back(status.message());
  if (job.lora().rank() > 0 && m.init_from().empty())
    out.push_back(
        fmt::format("lora.rank = {}: needs model.init_from, the model to adapt",
                    job.lora().rank()));
  if (m.rope_high_freq_factor() <= m.rope_low_freq_factor())
    out.push_back(
        fmt::format("model.rope_high_freq_factor = {}: must be above "
                    "model.rope_low_freq_factor = {}",
                    m.rope_high_freq_factor(), m.rope_low_freq_factor()));
  const bool known = data.largest_token >= 0;
  const int64_t least = known ? data.largest_token + 1 : data.vocab_size;
  if (m.vocab_size() < least)
    out.push_back(fmt::format(
        "model.vocab_size = {}: the data set at {} has a vocabulary of {}{}; "
        "must be at least {}, or -1",
        m.vocab_size(), job.data().path(), data.vocab_size,
        known ? fmt::format(" and tokens up to {}", data.largest_token)
              : ", and its index does not say which tokens it uses (`remesh "
                "data prepare --overwrite` adds that)",
        least));
}

void check_train(const pb::Job& job, const DataInfo& data, Problems& out) {
  const pb::Train& t = job.train();
  const pb::Schedule& s = job.schedule();
  if (t.global_batch_size() % t.local_batch_size() != 0)
    out.push_back(fmt::format(
        "train.local_batch_size = {}: must divide train.global_batch_size = {}",
        t.local_batch_size(), t.global_batch_size()));
  const int64_t least = data.least_train_tokens >= 0 ? data.least_train_tokens
                                                     : data.train_tokens;
  if (data.train_tokens == 0)
    out.push_back(fmt::format(
        "data.path = \"{}\": has text for validation only; mix it with data to "
        "train on: `remesh data mix DATA=1 {}=0 --out FOLDER`",
        job.data().path(), job.data().path()));
  else if (least >= 0 && least <= t.seq_len())
    out.push_back(fmt::format(
        "train.seq_len = {}: the data set at {} has {} training tokens{}; must "
        "be below that",
        t.seq_len(), job.data().path(), least,
        least < data.train_tokens ? " in a member" : ""));
  if (t.eval_sequences() > 0 && data.val_tokens >= 0 &&
      data.val_tokens <= t.seq_len())
    out.push_back(fmt::format(
        "train.eval_sequences = {}: the data set at {} has {} held-out tokens "
        "and a sequence has {}: must be 0, or prepare the data with a "
        "validation split",
        t.eval_sequences(), job.data().path(), data.val_tokens, t.seq_len()));
  if (t.eval_every() > 0 && t.eval_sequences() == 0)
    out.push_back(fmt::format(
        "train.eval_every = {}: must be 0 where train.eval_sequences is 0 or "
        "the data set has no validation split",
        t.eval_every()));
  if (s.warmup_steps() > s.total_steps())
    out.push_back(fmt::format(
        "schedule.warmup_steps = {}: must be at most the {} steps of the "
        "schedule",
        s.warmup_steps(), s.total_steps()));
}

// Why no slots in the world make the layout run, or "". What depends on how
// the microbatches are distributed is the coordinator's to check.
std::string layout_problem(const pb::Job& job, const geometry::Layout& l) {
  const pb::Train& t = job.train();
  const int64_t chunks = l.pp == 1 ? 1 : job.parallel().pipeline_chunks();
  return geometry::check_mesh(model_config(job), t.seq_len(),
                              t.global_batch_size() / t.local_batch_size(),
                              static_cast<int>(chunks), l)
      .message();
}

void check_groups(const pb::Job& job, Problems& out) {
  if (job.optimizer().groups().empty()) return;
  const auto groups = param_groups(job.optimizer(), model_config(job));
  if (!groups.ok())
    out.push_back("optimizer.groups: " + groups.status().message());
}

void check_degrees(const pb::Job& job, Problems& out) {
  const pb::Parallel& p = job.parallel();
  const struct {
    const char* key;
    int64_t degree;
    int geometry::Layout::*axis;
  } axes[] = {{"data", p.data_parallel_degree(), &geometry::Layout::dp},
              {"tensor", p.tensor_parallel_degree(), &geometry::Layout::tp},
              {"pipeline", p.pipeline_parallel_degree(), &geometry::Layout::pp},
              {"context", p.context_parallel_degree(), &geometry::Layout::cp}};
  for (const auto& a : axes) {
    geometry::Layout alone;
    // -1: the coordinator chooses; every model admits 1.
    if (a.degree != -1) alone.*a.axis = static_cast<int>(a.degree);
    if (const std::string why = layout_problem(job, alone); !why.empty())
      out.push_back(fmt::format("parallel.{}_parallel_degree = {}: {}", a.key,
                                a.degree, why));
  }
  for (const std::string& text : job.elastic().layouts()) {
    const auto layout = geometry::Layout::parse(text);
    CHECK(layout.ok());  // check_key()
    if (const std::string why = layout_problem(job, *layout); !why.empty())
      out.push_back(fmt::format("elastic.layouts: '{}': {}", text, why));
  }
}

void check_pipeline(const pb::Job& job, Problems& out) {
  const pb::Parallel& p = job.parallel();
  const auto schedule = geometry::parse_schedule(p.pipeline_schedule());
  CHECK(schedule.ok());  // check_key()
  if (p.pipeline_chunks() > 1 && !geometry::traits_of(*schedule).interleaved)
    out.push_back(fmt::format(
        "parallel.pipeline_chunks = {}: must be 1 where "
        "parallel.pipeline_schedule is \"{}\"; only \"interleaved\" has more",
        p.pipeline_chunks(), p.pipeline_schedule()));
  if (p.zero_shard_group() != 0 && p.zero_stage() == 0)
    out.push_back(fmt::format(
        "parallel.zero_shard_group = {}: must be 0 where parallel.zero_stage "
        "is 0",
        p.zero_shard_group()));
}

void check_slots(const pb::Job& job, Problems& out) {
  const pb::Elastic& e = job.elastic();
  if (e.max_slots() != -1 && e.max_slots() < e.min_slots())
    out.push_back(fmt::format(
        "elastic.max_slots = {}: must be -1 or at least elastic.min_slots = {}",
        e.max_slots(), e.min_slots()));
  const int64_t ranks = ranks_of_degrees(job.parallel());
  if (e.layouts().empty() && e.max_slots() != -1 && ranks > e.max_slots())
    out.push_back(fmt::format(
        "elastic.max_slots = {}: must be -1 or at least {}, the ranks of the "
        "degrees in [parallel]",
        e.max_slots(), ranks));
  for (const std::string& text : e.layouts()) {
    const int64_t world = geometry::Layout::parse(text)->world();
    if (world < e.min_slots() || (e.max_slots() != -1 && world > e.max_slots()))
      out.push_back(fmt::format(
          "elastic.layouts: '{}': has {}; must be from "
          "elastic.min_slots = {} to elastic.max_slots = {}",
          text, plural(world, "rank"), e.min_slots(), e.max_slots()));
  }
  if (e.dead_after_ms() <= e.report_every_ms())
    out.push_back(fmt::format(
        "elastic.dead_after_ms = {}: must be above elastic.report_every_ms = "
        "{}",
        e.dead_after_ms(), e.report_every_ms()));
}

// Each target once, in the order of lora_targets().
geometry::Lora lora_of(const pb::Lora& lora) {
  if (lora.rank() == 0) return {};
  geometry::Lora out{.rank = lora.rank(), .alpha = lora.alpha(), .targets = {}};
  const auto& given = lora.targets();
  for (const std::string& target : geometry::lora_targets())
    if (given.empty() || std::ranges::find(given, target) != given.end())
      out.targets.push_back(target);
  return out;
}

}  // namespace

bool has_every_size(const pb::Model& model) {
  pb::Job given, all;
  *given.mutable_model() = model;
  *all.mutable_model() = model_keys({.n_heads = 1});
  for (const Field* section : sections())
    for (const Field* key : keys(*section))
      if (has_key(all, *key) && !has_key(given, *key)) return false;
  return true;
}

const std::string& init_path(const pb::Model& model) {
  return model.init_checkpoint().empty() ? model.init_from()
                                         : model.init_checkpoint();
}

int64_t ranks_of_degrees(const pb::Parallel& p) {
  int64_t ranks = 1;
  for (const int64_t degree :
       {p.data_parallel_degree(), p.tensor_parallel_degree(),
        p.pipeline_parallel_degree(), p.context_parallel_degree()})
    ranks *= std::max<int64_t>(degree, 1);
  return ranks;
}

geometry::ModelConfig model_config(const pb::Job& resolved) {
  const pb::Model& m = resolved.model();
  geometry::ModelConfig c = geometry::config_of(m);
  if (m.head_dim() > 0) c.set_head_dim(m.head_dim());
  c.rope_scaled = m.rope_scaling_factor() != 1;
  if (c.rope_scaled)
    c.rope_scaling = {m.rope_scaling_factor(), m.rope_low_freq_factor(),
                      m.rope_high_freq_factor(),
                      m.rope_original_max_position()};
  c.lora = lora_of(resolved.lora());
  return c;
}

pb::Job without_derived(pb::Job resolved) {
  pb::Schedule& s = *resolved.mutable_schedule();
  if (s.total_steps() != resolved.train().steps()) return resolved;
  const int64_t warmup = pb::Schedule::default_instance().warmup_steps();
  if (s.warmup_steps() == std::min(warmup, s.total_steps()))
    s.clear_warmup_steps();
  s.clear_total_steps();
  return resolved;
}

Result<pb::Job> resolve(const pb::Job& job, const DataInfo& data) {
  if (data.vocab_size < 1)
    return invalid_argument(fmt::format(
        "the data set's vocab_size = {}: must be at least 1", data.vocab_size));
  Problems problems;
  for (const Field* section : sections())
    for (const Field* key : keys(*section))
      if (const std::string p = check_key(job, *key); !p.empty())
        problems.push_back(fmt::format("{} = {}: {}", full_name(*key),
                                       to_toml_value(get_key(job, *key)), p));
  if (!problems.empty()) return invalid_argument(join(problems, "\n"));
  pb::Job resolved = job;
  if (data.init_model) clear_open_sizes(*resolved.mutable_model());
  check_forgotten(job, problems);
  check_init(resolved, data, problems);
  if (!problems.empty()) return invalid_argument(join(problems, "\n"));
  fill_in(resolved, data);
  check_model(resolved, data, problems);
  check_train(resolved, data, problems);
  check_slots(resolved, problems);
  check_pipeline(resolved, problems);
  if (problems.empty()) check_groups(resolved, problems);
  if (problems.empty()) check_degrees(resolved, problems);
  if (!problems.empty()) return invalid_argument(join(problems, "\n"));
  return resolved;
}

}  // namespace remesh::jobfile
