// `remesh checkpoint save|list|inspect|verify|keep|prune`
#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "checkpoint/manifest/manifest.h"
#include "checkpoint/manifest/scan.h"
#include "checkpoint/store/verify.h"
#include "coordinator/core/state_choice.h"
#include "coordinator/ctl/client.h"
#include "coordinator/ctl/find_checkpoint.h"
#include "coordinator/ctl/verbs.h"
#include "coordinator/rundir/job_files.h"
#include "coordinator/rundir/lines.h"
#include "coordinator/rundir/newest_state.h"
#include "coordinator/rundir/run_dir.h"
#include "coordinator/server/journal.h"
#include "proto/base/clock.h"
#include "proto/base/file_system.h"
#include "proto/base/progress_bar.h"
#include "proto/base/text.h"
#include "proto/limits/plausible.h"
#include "proto/rundir/run_id.h"

namespace remesh::ctl {
namespace {

constexpr size_t kMaxName = 64;

struct CheckpointOptions {
  std::string target;   // a run directory or one checkpoint
  long long step = -1;  // of a run; -1: the newest
  std::string name;     // keep
  bool undo = false;    // keep
  int64_t keep = 1;     // prune
  bool dry_run = false;
  bool json = false;
};

// The name that `keep --name` gave it; "": none.
std::string name_of(FileSystem& files, const manifest::Found& f) {
  if (!f.kept) return "";
  const auto text =
      read_file(files, path_join(f.path, manifest::kKeepName), 4096);
  return text.ok() ? text->substr(0, text->find('\n')) : "";
}

Result<int> list(const CheckpointOptions& options) {
  ASSIGN_OR_RETURN(const std::string folder,
                   checkpoint_folder_of(options.target));
  const auto system = posix_file_system();
  ASSIGN_OR_RETURN(auto found, manifest::scan(*system, folder));
  const auto run = rundir::find_run(options.target);
  const uint64_t id = run.ok() ? rundir::run_id_of(*system, *run) : 0;
  for (manifest::Found& f : found)
    if (f.status.ok()) f.status = manifest::check_run(f.manifest, id);
  if (options.json) {
    auto array = nlohmann::ordered_json::array();
    for (const auto& f : found) {
      array.push_back({{"step", f.step},
                       {"path", f.path},
                       {"complete", f.status.ok()},
                       {"kept", f.kept},
                       {"name", name_of(*system, f)},
                       {"problem", f.status.message()},
                       {"bytes", manifest::file_bytes(f.manifest)}});
    }
    print_json({{"checkpoints", std::move(array)}});
    return kExitOk;
  }
  if (found.empty()) fmt::print("no checkpoint in {}\n", folder);
  for (const auto& f : found) {
    if (!f.status.ok()) {
      fmt::print("{:>10}  not usable: {}\n", f.step, f.status.message());
      continue;
    }
    const std::string name = name_of(*system, f);
    fmt::print("{:>10}  {:>10}  {} of {}  {}{}\n", f.step,
               format_bytes(manifest::file_bytes(f.manifest)),
               plural(f.manifest.shards_size(), "shard"),
               rundir::mesh_text(f.manifest.mesh()), f.path,
               !f.kept        ? ""
               : name.empty() ? "  kept"
                              : "  kept as " + name);
  }
  return kExitOk;
}

Result<int> inspect(const CheckpointOptions& options) {
  ASSIGN_OR_RETURN(const std::string path,
                   one_checkpoint(options.target, options.step));
  const auto system = posix_file_system();
  ASSIGN_OR_RETURN(const pb::Manifest manifest,
                   manifest::read_checkpoint(*system, path));
  nlohmann::ordered_json json{{"path", path}};
  json.update(nlohmann::ordered_json::parse(store::describe_json(manifest)));
  return print_done(options.json, json,
                    path + "\n" + store::describe(manifest));
}

// The checkpoint that the options name, or all of the run, newest first.
Result<std::vector<std::string>> checkpoints_to_verify(
    const CheckpointOptions& options) {
  const bool one = options.step >= 0 ||
                   (!options.target.empty() && is_checkpoint(options.target));
  if (one) {
    ASSIGN_OR_RETURN(std::string path,
                     one_checkpoint(options.target, options.step));
    return std::vector<std::string>{std::move(path)};
  }
  ASSIGN_OR_RETURN(const std::string folder,
                   checkpoint_folder_of(options.target));
  const auto system = posix_file_system();
  ASSIGN_OR_RETURN(const auto found, manifest::scan(*system, folder));
  if (found.empty()) return not_found(folder + ": no checkpoint");
  std::vector<std::string> paths;
  for (const manifest::Found& f : found) paths.push_back(f.path);
  return paths;
}

store::VerifyReport verify_with_bar(FileSystem& fs, const std::string& path) {
  ProgressBar bar("verifying");
  return store::verify(
      fs, path, [&](uint64_t done, uint64_t total) { bar.show(done, total); });
}

Result<int> verify(const CheckpointOptions& options) {
  ASSIGN_OR_RETURN(const auto paths, checkpoints_to_verify(options));
  const auto system = posix_file_system();
  size_t damaged = 0;
  auto reports = nlohmann::ordered_json::array();
  for (const std::string& path : paths) {
    const store::VerifyReport report = verify_with_bar(*system, path);
    // A running job removes old checkpoints.
    if (!report.ok && !path_exists(path)) continue;
    if (!report.ok) ++damaged;
    if (options.json) {
      reports.push_back({{"path", path}});
      reports.back().update(
          nlohmann::ordered_json::parse(store::describe_json(report)));
    } else {
      fmt::print("{}\n{}", path, store::describe(report));
    }
  }
  if (options.json) {
    print_json({{"ok", damaged == 0}, {"checkpoints", std::move(reports)}});
  } else if (paths.size() > 1) {
    fmt::print("{} of {} checkpoints can be used\n", paths.size() - damaged,
               paths.size());
  }
  return damaged == 0 ? kExitOk : kExitFailed;
}

// Saves of the ranks that failed in this generation, and why the last of them
// did.
std::pair<int64_t, std::string> failed_saves(const pb::JobStatus& s) {
  std::pair<int64_t, std::string> out;
  for (const pb::WorkerStatus& w : s.workers())
    for (const pb::RankStatus& r : w.ranks()) {
      out.first += r.failed_saves();
      if (r.failed_saves() > 0 && !r.checkpoint_error().empty())
        out.second = r.checkpoint_error();
    }
  return out;
}

// Between two meshes nobody can save: the next one will.
Result<pb::JobStatus> request_save(const std::string& run) {
  const pb::Command command = command_of(pb::Command::CHECKPOINT);
  Result<pb::JobStatus> answer = send_command(run, command);
  for (const int64_t since_ms = monotonic_ms();
       answer.status().code() == Code::kUnavailable &&
       monotonic_ms() - since_ms < 10 * kReplyMs;) {
    wait_for_next_poll();
    answer = send_command(run, command);
  }
  return answer;
}

// Waits until a checkpoint is committed that is as new as the request; returns
// its path and step.
Result<std::pair<std::string, int64_t>> save_and_wait(const std::string& run) {
  ASSIGN_OR_RETURN(pb::JobStatus asked, request_save(run));
  int64_t heard_ms = monotonic_ms();
  for (;;) {
    wait_for_next_poll();
    const auto now = send_command(run, command_of(pb::Command::STATUS));
    if (!now.ok()) {
      // A coordinator that restarts answers again soon.
      if (monotonic_ms() - heard_ms < 10 * kReplyMs) continue;
      return now.status();
    }
    heard_ms = monotonic_ms();
    const pb::JobStatus& s = now.value();
    if (s.checkpoint_step() > asked.checkpoint_step() &&
        s.checkpoint_step() >= asked.step()) {
      // The run directory may be on another host.
      const auto folder = checkpoint_folder(s.run_dir());
      return std::pair(path_join(folder.ok() ? *folder
                                             : rundir::checkpoints_path(
                                                   s.run_dir(), "checkpoints"),
                                 manifest::step_name(s.checkpoint_step())),
                       s.checkpoint_step());
    }
    if (has_ended(s.state()))
      return ended("the job is " + rundir::state_text(s.state()) +
                   "; no new checkpoint was saved");
    if (s.generation() != asked.generation() || s.epoch() != asked.epoch()) {
      // A save that was not complete is forgotten there.
      if (s.state() != pb::JobStatus::RUNNING) continue;
      ASSIGN_OR_RETURN(asked, request_save(run));
      continue;
    }
    const auto [failed, why] = failed_saves(s);
    if (failed > failed_saves(asked).first)
      return io_error("the checkpoint was not saved: " + why);
  }
}

// Retention reads the file; nobody else writes to it.
Result<int> keep(const CheckpointOptions& o) {
  ASSIGN_OR_RETURN(const std::string path, one_checkpoint(o.target, o.step));
  const auto files = posix_file_system();
  if (!o.undo)  // a damaged one may go
    RETURN_IF_ERROR(manifest::read_checkpoint(*files, path).status());
  const std::string mark = path_join(path, manifest::kKeepName);
  RETURN_IF_ERROR(o.undo ? remove_all(*files, mark)
                         : write_file_atomically(*files, mark, o.name + "\n"));
  return print_done(
      o.json, {{"path", path}, {"kept", !o.undo}, {"name", o.name}},
      path + (o.undo ? " is removed when its turn comes\n" : " is kept\n"));
}

// Under the lock of the run: a coordinator's ranks remove checkpoints too.
Result<int> prune(const CheckpointOptions& o) {
  ASSIGN_OR_RETURN(const std::string run, rundir::find_run(o.target));
  const auto lock = rundir::RunLock::acquire(run);
  if (lock.status().code() == Code::kAlreadyExists)
    return Status(Code::kAlreadyExists,
                  lock.status().message() +
                      ". While it trains, checkpoint.keep_latest_k decides");
  RETURN_IF_ERROR(lock.status());
  const auto files = posix_file_system();
  ASSIGN_OR_RETURN(const std::string folder, checkpoint_folder(run));
  ASSIGN_OR_RETURN(const auto found, manifest::scan(*files, folder));
  ASSIGN_OR_RETURN(const pb::Job job, rundir::job_of_run(*files, run));
  const uint64_t id = rundir::run_id_of(*files, run);
  const auto journal = server::read_journal(*files, rundir::journal_path(run));
  const auto branches =
      rundir::branches_of(run, journal.ok() ? &*journal : nullptr);
  std::vector<int64_t> valid, invalid;
  std::set<int64_t> kept;
  for (const manifest::Found& f : found) {  // newest first
    if (f.kept) kept.insert(f.step);
    if (!f.status.ok()) {
      // One that cannot be read now may be good.
      if (f.status.code() == Code::kCorrupt ||
          f.status.code() == Code::kNotFound)
        invalid.push_back(f.step);
      continue;
    }
    if (!manifest::check_run(f.manifest, id).ok()) continue;
    // The job has continued without it.
    if (core::abandoned_by(branches, f.manifest.generation(), f.step) != 0) {
      invalid.push_back(f.step);
      continue;
    }
    // Those that stay as the newest must be good for a restart.
    if (std::ssize(valid) < o.keep && !verify_with_bar(*files, f.path).ok)
      print_error(
          fmt::format("{} is damaged: it does not count, and stays\n", f.path));
    else
      valid.push_back(f.step);
  }
  const auto gone = manifest::to_remove(valid, invalid, o.keep,
                                        job.checkpoint().keep_every_n(), kept);
  auto removed = nlohmann::ordered_json::array();
  for (const int64_t step : gone) {
    const std::string path = path_join(folder, manifest::step_name(step));
    const std::string old = path_join(folder, manifest::old_name(step));
    // One of that step was set aside before: the next save gives it a name.
    if (manifest::may_be_kept(*files, old)) continue;
    if (!o.dry_run) {
      RETURN_IF_ERROR(remove_all(*files, old));
      RETURN_IF_ERROR(files->rename(path, old));
      // Somebody has asked for it to be kept since it was looked at.
      if (manifest::may_be_kept(*files, old)) {
        RETURN_IF_ERROR(files->rename(old, path));
        continue;
      }
      RETURN_IF_ERROR(files->sync_dir(folder));
      RETURN_IF_ERROR(remove_all(*files, old));
    }
    removed.push_back(path);
    if (!o.json)
      fmt::print("{} {}\n", o.dry_run ? "would remove" : "removed", path);
  }
  if (o.json)
    print_json({{"removed", std::move(removed)}, {"dry_run", o.dry_run}});
  else if (gone.empty())
    fmt::print("nothing to remove in {}\n", folder);
  return kExitOk;
}

Result<int> save(const CheckpointOptions& options) {
  ASSIGN_OR_RETURN(const auto saved, save_and_wait(options.target));
  return print_done(options.json,
                    {{"path", saved.first}, {"step", saved.second}},
                    saved.first + "\n");
}

}  // namespace

void add_checkpoint_verbs(CLI::App* app, int* code) {
  CLI::App* checkpoint =
      app->add_subcommand("checkpoint", "Save, list or check checkpoints");
  checkpoint->require_subcommand(1);
  checkpoint->footer(R"(
Examples:
  remesh checkpoint save
  remesh checkpoint list runs/latest
  remesh checkpoint inspect runs/latest --step 100
  remesh checkpoint verify runs/latest/checkpoints/step-00000100)");
  auto o = std::make_shared<CheckpointOptions>();
  CLI::App* c = checkpoint->add_subcommand(
      "save", "Save after the current step; waits and prints the path");
  add_client_options(c, &o->target);
  add_json_option(c, &o->json);
  c->footer(R"(
Example:
  remesh checkpoint save runs/latest

It is removed like every other one when checkpoint.keep_latest_k newer ones
exist, unless `remesh checkpoint keep` or checkpoint.keep_every_n keeps it.)");
  c->callback([o, code] { *code = exit_code(save(*o)); });
  const auto add = [&](const char* name, const char* help, bool one,
                       Result<int> (*command)(const CheckpointOptions&)) {
    c = checkpoint->add_subcommand(name, help);
    // What cannot be undone is done to no run that nobody has named.
    if (command == prune)
      c->add_option("RUN", o->target, "Run directory")->required();
    else
      add_run_option(c, &o->target, "RUN_OR_CHECKPOINT",
                     "Run directory or one checkpoint");
    if (one) {
      c->add_option("--step", o->step,
                    fmt::format("Step of the checkpoint. Default: {}",
                                command == verify ? "all" : "the newest"))
          ->check(CLI::Range(int64_t{0}, INT64_MAX));
    }
    add_json_option(c, &o->json);
    c->footer(
        fmt::format("\nExample:\n  remesh checkpoint {} runs/latest", name));
    c->callback([o, code, command] { *code = exit_code(command(*o)); });
  };
  add("list",
      "List the checkpoints of a run; checks manifests and sizes, not contents",
      false, list);
  add("inspect", "Show what a checkpoint contains", true, inspect);
  add("verify", "Read and check every byte; exit code 3 if damaged", true,
      verify);
  add("keep", "Keep a checkpoint until this is undone", true, keep);
  c->add_option("--name", o->name, "What to call it, such as best")
      ->check([](const std::string& name) {
        return limits::is_printable(name, kMaxName)
                   ? std::string()
                   : fmt::format(
                         "must be at most {} bytes without control characters",
                         kMaxName);
      });
  c->add_flag("--undo", o->undo, "Let it be removed again");
  add("prune", "Remove old checkpoints of a run that is not training", false,
      prune);
  c->add_option("--keep", o->keep, "Number of newest ones to leave")
      ->check(CLI::Range(int64_t{1}, INT64_MAX))
      ->capture_default_str();
  c->add_flag("--dry-run", o->dry_run, "Only show what would be removed");
}

}  // namespace remesh::ctl
