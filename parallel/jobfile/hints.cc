// Names from TorchTitan (v0.2) and Hugging Face configurations, and the keys
// that correspond to them.

#include "parallel/jobfile/schema.h"

namespace remesh::jobfile {
namespace {

struct Hint {
  std::string_view section;  // with a key, as named in this schema
  std::string_view key;      // empty: the whole section
  std::string_view text;
};

constexpr Hint kHints[] = {
    {"training", "", "the section is [train] here"},
    {"parallelism", "", "the section is [parallel] here"},
    {"experimental", "", "degrees are in [parallel] here"},
    {"lr_scheduler", "", "the section is [schedule] here"},
    {"scheduler", "", "the section is [schedule] here"},
    {"activation_checkpoint", "", "use train.recompute"},
    {"validation", "", "use train.eval_every and train.eval_sequences"},
    {"metrics", "", "use train.log_every; metrics.jsonl has every step"},
    {"fault_tolerance", "", "every run is fault tolerant; see [elastic]"},
    {"tokenizer", "", "`remesh data prepare --tokenizer` chooses it"},
    {"dataset", "", "use data.path, a folder from `remesh data prepare`"},
    {"debug", "", "the seed is train.seed; every run is deterministic"},
    {"profiling", "", "the section is [profile] here"},
    {"compile", "", "there is nothing to compile here"},
    {"comm", "", "see [elastic] for time limits"},
    {"train", "batch_size", "use train.local_batch_size"},
    {"train", "micro_batch_size", "use train.local_batch_size"},
    {"train", "microbatch_size", "use train.local_batch_size"},
    {"train", "dataset", "use data.path, from `remesh data prepare`"},
    {"train", "dataset_path", "use data.path, from `remesh data prepare`"},
    {"train", "mixed_precision_param", "use train.dtype"},
    {"train", "mixed_precision_reduce", "reductions are always fp32"},
    {"train", "precision", "use train.dtype"},
    {"train", "max_steps", "use train.steps"},
    {"train", "num_steps", "use train.steps"},
    {"train", "sequence_length", "use train.seq_len"},
    {"train", "grad_clip", "use train.max_norm"},
    {"train", "gradient_clip", "use train.max_norm"},
    {"train", "warmup_steps", "use schedule.warmup_steps"},
    {"train", "lr", "use optimizer.lr"},
    {"train", "compile", "there is nothing to compile here"},
    {"train", "deterministic", "every run is deterministic"},
    {"train", "data_parallel_degree", "use parallel.data_parallel_degree"},
    {"train", "data_parallel_shard_degree",
     "use parallel.data_parallel_degree"},
    {"train", "tensor_parallel_degree", "use parallel.tensor_parallel_degree"},
    {"train", "gradient_accumulation_steps",
     "a step has global_batch_size / local_batch_size micro-batches, "
     "distributed over the ranks"},
    {"parallel", "data_parallel_shard_degree",
     "use parallel.data_parallel_degree"},
    {"parallel", "data_parallel_replicate_degree",
     "use parallel.data_parallel_degree"},
    {"parallel", "pipeline_parallel_microbatch_size",
     "use train.local_batch_size"},
    {"parallel", "pipeline_parallel_schedule",
     "use parallel.pipeline_schedule"},
    {"parallel", "pipeline_parallel_split_points",
     "layers are divided among the stages by cost"},
    {"parallel", "virtual_pipeline_degree", "use parallel.pipeline_chunks"},
    {"parallel", "fsdp_reshard_after_forward",
     "use parallel.zero_stage = 2 or 3"},
    {"parallel", "layouts", "use elastic.layouts"},
    {"profile", "enable_profiling", "use profile.enable"},
    {"profile", "profile_freq", "use profile.first_step and profile.num_steps"},
    {"profile", "save_traces_folder", "traces are in RUN/traces"},
    {"activation_checkpoint", "selective_ac_option",
     "use train.recompute = \"selective\" and train.recompute_every"},
    {"parallel", "dp", "use parallel.data_parallel_degree"},
    {"parallel", "tp", "use parallel.tensor_parallel_degree"},
    {"parallel", "pp", "use parallel.pipeline_parallel_degree"},
    {"parallel", "cp", "use parallel.context_parallel_degree"},
    {"optimizer", "learning_rate", "use optimizer.lr"},
    {"optimizer", "betas", "use optimizer.beta1 and optimizer.beta2"},
    {"optimizer", "implementation", "there is one implementation"},
    {"schedule", "lr_min", "use schedule.min_lr_factor, a fraction of lr"},
    {"schedule", "min_lr", "use schedule.min_lr_factor, a fraction of lr"},
    {"optimizer", "min_lr", "use schedule.min_lr_factor, a fraction of lr"},
    {"model", "name", "use model.flavor and model.arch"},
    {"model", "tokenizer_path", "`remesh data prepare` chooses it"},
    {"model", "hf_assets_path", "`remesh data prepare` chooses it"},
    {"model", "hidden_size", "use model.dim"},
    {"model", "intermediate_size", "use model.hidden_dim"},
    {"model", "num_hidden_layers", "use model.n_layers"},
    {"model", "num_layers", "use model.n_layers"},
    {"model", "num_attention_heads", "use model.n_heads"},
    {"model", "num_key_value_heads", "use model.n_kv_heads"},
    {"model", "rms_norm_eps", "use model.norm_eps"},
    {"model", "tie_word_embeddings", "use model.tie_embeddings"},
    {"model", "max_seq_len", "use train.seq_len"},
    {"checkpoint", "enable", "checkpoints are always on; see interval"},
    {"checkpoint", "enable_checkpoint",
     "checkpoints are always on; see interval"},
    {"checkpoint", "async_mode", "checkpoints are always in the background"},
    {"checkpoint", "load_step", "`remesh run --resume` takes the newest"},
    {"checkpoint", "keep_last", "use checkpoint.keep_latest_k"},
    {"metrics", "log_freq", "use train.log_every"},
    {"activation_checkpoint", "mode", "use train.recompute"},
    {"validation", "freq", "use train.eval_every"},
    {"validation", "steps", "use train.eval_sequences"},
    {"debug", "seed", "use train.seed"},
};

std::string_view our_section(std::string_view section) {
  if (section == "training") return "train";
  if (section == "parallelism" || section == "experimental") return "parallel";
  if (section == "profiling") return "profile";
  if (section == "lr_scheduler" || section == "scheduler") return "schedule";
  return section;
}

}  // namespace

std::string hint(std::string_view section, std::string_view key) {
  if (!key.empty()) section = our_section(section);
  for (const Hint& h : kHints)
    if (h.section == section && h.key == key) return std::string(h.text);
  return "";
}

}  // namespace remesh::jobfile
