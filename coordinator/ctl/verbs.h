// The verbs of `remesh`. Each group of verbs is declared (options and help) and
// implemented in one file. A verb stores the exit code of the process in *code
// and prints errors on stderr.
#pragma once

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "proto/base/exit_code.h"
#include "proto/base/json_output.h"
#include "proto/base/usage.h"

namespace remesh::ctl {

using AddVerbs = void(CLI::App* app, int* code);
AddVerbs add_run_verb;          // run.cc: run, resume
AddVerbs add_status_verb;       // status_command.cc
AddVerbs add_list_verbs;        // list_commands.cc
AddVerbs add_fork_verb;         // fork_command.cc
AddVerbs add_control_verbs;     // control_commands.cc
AddVerbs add_checkpoint_verbs;  // checkpoint_commands.cc
AddVerbs add_model_verbs;       // model_command.cc
AddVerbs add_trace_verb;        // trace_command.cc
AddVerbs add_plan_verb;         // plan_command.cc
AddVerbs add_tune_verb;         // tune_command.cc
AddVerbs add_job_verbs;         // job_commands.cc
AddVerbs add_key_verbs;         // key_command.cc

// The commands below `remesh plan`.
AddVerbs add_measure_command;  // measure_command.cc
AddVerbs add_project_command;  // project_command.cc
AddVerbs add_study_command;    // study_command.cc

// In the order of `remesh --help`.
inline constexpr AddVerbs* kVerbs[] = {
    add_run_verb,      add_status_verb,      add_list_verbs,  add_fork_verb,
    add_control_verbs, add_checkpoint_verbs, add_model_verbs, add_trace_verb,
    add_plan_verb,     add_tune_verb,        add_job_verbs,   add_key_verbs};

// What a verb returns: its exit code, or an error, which is printed on stderr.
inline int exit_code(const Result<int>& code) {
  return code.ok() ? *code : exit_with("remesh", code.status());
}

// Prints what a verb has done, as JSON or else as text.
inline int print_done(bool json, const nlohmann::ordered_json& object,
                      const std::string& text) {
  if (json)
    print_json(object);
  else
    fmt::print("{}", text);
  return kExitOk;
}

// Accepts numbers from `least` to `most`, of `kind`; not NaN, which is in every
// range of CLI::Range.
template <typename Number>
CLI::Validator in_range(const char* kind, Number least, Number most) {
  return CLI::Validator(
      [=](const std::string& text) {
        Number value = 0;
        const bool ok = CLI::detail::lexical_cast(text, value) &&
                        value >= least && value <= most;
        return ok ? ""
                  : fmt::format("'{}' is not {} from {} to {}", text, kind,
                                least, most);
      },
      fmt::format("{} to {}", least, most));
}
inline CLI::Validator integer_in(int least, int most) {
  return in_range("an integer", least, most);
}
inline CLI::Validator number_in(double least, double most) {
  return in_range("a number", least, most);
}

// Options that several verbs have.
inline void add_run_option(CLI::App* verb, std::string* run,
                           const char* name = "RUN",
                           const char* what = "Run directory or address") {
  verb->add_option(name, *run,
                   fmt::format("{}. Default: the run that is training, else "
                               "the newest in ./runs, else the one used last",
                               what));
}
// Options of verbs that talk to the coordinator (client.cc).
void add_client_options(CLI::App* verb, std::string* run);
inline void add_set_option(CLI::App* verb, std::vector<std::string>* set) {
  verb->add_option("--set", *set,
                   "section.key=value, overrides the job file; repeatable")
      ->allow_extra_args(false);
}
inline void add_job_options(CLI::App* verb, std::string* job_file,
                            std::vector<std::string>* set) {
  verb->add_option("JOB", *job_file, "Job file (TOML); -: the standard input")
      ->required();
  add_set_option(verb, set);
}

}  // namespace remesh::ctl
