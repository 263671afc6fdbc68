// `remesh model import|export`: models from and to Hugging Face's format.
#include <fmt/format.h>

#include <memory>

#include "checkpoint/huggingface/transfer.h"
#include "coordinator/ctl/find_checkpoint.h"
#include "coordinator/ctl/verbs.h"
#include "coordinator/rundir/run_dir.h"
#include "proto/base/file_system.h"
#include "proto/base/progress_bar.h"
#include "proto/base/sharing.h"
#include "proto/base/text.h"

namespace remesh::ctl {
namespace {

struct ModelOptions {
  std::string from, out;
  int64_t step = -1;
  std::string dtype = "bf16";
  huggingface::ExportOptions to;
  bool json = false;
};

Status check_there(const std::string& path) {
  return path.empty() || path_exists(path)
             ? ok_status()
             : not_found(path + ": no such file or folder");
}

Result<int> import_from_folder(const ModelOptions& o) {
  RETURN_IF_ERROR(check_there(o.from));
  RETURN_IF_ERROR(share_new_files(/*group=*/""));
  const auto files = posix_file_system();
  ASSIGN_OR_RETURN(const auto model, huggingface::ModelFolder::open(
                                         *files, absolute_path(o.from)));
  Result<store::CommitResult> done = cancelled("");
  {
    ProgressBar bar("importing");
    done = huggingface::import_model(
        *files, model, absolute_path(o.out),
        [&](uint64_t now, uint64_t all) { bar.show(now, all); });
  }
  RETURN_IF_ERROR(done.status());
  const geometry::ModelConfig& c = model.config().model;
  const int64_t parameters = model.table().num_elements();
  return print_done(
      o.json,
      {{"path", done->path}, {"arch", c.arch}, {"parameters", parameters}},
      fmt::format("{}: {} model of {} parameters\n", done->path, c.arch,
                  parameters));
}

Result<int> export_to_folder(ModelOptions o) {
  for (const std::string& path : {o.to.like, o.to.base})
    RETURN_IF_ERROR(check_there(path));
  RETURN_IF_ERROR(share_new_files(/*group=*/""));
  if (!o.to.base.empty()) o.to.base = absolute_path(o.to.base);
  ASSIGN_OR_RETURN(o.to.dtype, huggingface::parse_dtype(o.dtype));
  ASSIGN_OR_RETURN(const std::string from, one_checkpoint(o.from, o.step));
  const std::string out = absolute_path(o.out);
  const auto files = posix_file_system();
  if (o.to.like.empty() && !o.to.adapters) {
    o.to.like = model_continued(*files, o.from, from);
    if (o.to.like.empty())
      print_error(
          "note: the export has no tokenizer and no bos_token_id and "
          "eos_token_id, and its context length is that of training; --like "
          "takes them from a Hugging Face folder\n");
  }
  Result<huggingface::Exported> done = cancelled("");
  {
    ProgressBar bar("exporting");
    done = huggingface::export_model(
        *files, from, out, o.to,
        [&](uint64_t now, uint64_t all) { bar.show(now, all); });
  }
  RETURN_IF_ERROR(done.status());
  return print_done(
      o.json,
      {{"path", out},
       {"checkpoint", from},
       {"step", done->step},
       {"arch", done->model.arch},
       {"parameters", done->parameters},
       {"dtype", o.dtype},
       {"bytes", done->bytes},
       {"files", done->files}},
      fmt::format("{}: {} model of {} parameters, step {}, {} in {} ({})\n",
                  out, done->model.arch, done->parameters, done->step,
                  format_bytes(done->bytes), plural(done->files, "file"),
                  o.dtype));
}

void add_export(CLI::App* model, const std::shared_ptr<ModelOptions>& o,
                int* code) {
  CLI::App* c = model->add_subcommand(
      "export", "Write the weights of a checkpoint in Hugging Face's format");
  add_run_option(c, &o->from, "RUN_OR_CHECKPOINT",
                 "Run directory or one checkpoint, of any mesh");
  c->add_option("--step", o->step,
                "Step of the checkpoint. Default: the newest")
      ->check(CLI::Range(int64_t{0}, INT64_MAX));
  c->add_option("--out", o->out, "New folder for config.json and the weights")
      ->required();
  c->add_option("--dtype", o->dtype, "Type of the weights: fp32, bf16 or fp16")
      ->check(CLI::IsMember({"fp32", "bf16", "fp16"}))
      ->capture_default_str();
  c->add_option("--shard-size", o->to.shard_bytes,
                "Largest size of a file, such as 5GB")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/true))
      ->default_str("5GB");
  c->add_option("--like", o->to.like,
                "Hugging Face folder from which to take the tokenizer, special "
                "tokens and context length. Default: the one that the run "
                "started from");
  c->add_flag(
      "--adapters", o->to.adapters,
      "Adapters alone, in PEFT's format, instead of the model that they "
      "are added to");
  c->add_option("--base", o->to.base,
                "Model that the adapters belong to, if it is not where the run "
                "had it");
  add_json_option(c, &o->json);
  c->footer(R"(
Examples:
  remesh model export runs/latest --out my-model --like Llama-3.2-1B
  remesh model export step-00001000 --out exact --dtype fp32

The run may be training meanwhile.)");
  c->callback([o, code] { *code = exit_code(export_to_folder(*o)); });
}

}  // namespace

void add_model_verbs(CLI::App* app, int* code) {
  CLI::App* model = app->add_subcommand(
      "model", "Bring models in and out in Hugging Face's format");
  model->require_subcommand(1);
  model->footer(R"(
Examples:
  remesh model import Llama-3.2-1B --out imported
  remesh model export runs/latest --out my-model)");
  auto o = std::make_shared<ModelOptions>();
  CLI::App* c = model->add_subcommand(
      "import", "Make a checkpoint from a model of another program");
  c->add_option("MODEL", o->from,
                "Hugging Face folder (config.json and safetensors), Meta's "
                "(params.json and consolidated.safetensors), or a .bin file of "
                "llama2.c")
      ->required();
  c->add_option("--out", o->out, "New folder for the checkpoint")->required();
  add_json_option(c, &o->json);
  c->footer(R"(
Example:
  remesh model import Llama-3.2-1B --out imported

The checkpoint is that of step 0, with moments of zero, and loads under any
mesh.)");
  c->callback([o, code] { *code = exit_code(import_from_folder(*o)); });
  add_export(model, o, code);
}

}  // namespace remesh::ctl
