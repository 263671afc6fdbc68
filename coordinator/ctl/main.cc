// remesh: the command line.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <string>

#include "coordinator/ctl/verbs.h"
#include "proto/base/process.h"
#include "proto/base/version.h"

namespace remesh::ctl {
namespace {

constexpr const char* kFooter = R"(
Examples:
  remesh data prepare --input books.txt.xz --out data/books
  remesh run job.toml --local 2          train on this machine, 2 workers
  remesh status -w                       watch the newest run
  remesh resume --local 3                continue it, with 3 workers

RUN is a run directory or an address (tcp://HOST:PORT or ipc:///PATH). Default:
the run that is training, else the newest in ./runs, else the one used last.
See `remesh COMMAND --help` for its options.
)";

// What to type in place of a verb that there is not.
std::string other_verb(const CLI::App& app, const std::string& word,
                       const std::string& rest) {
  if (word == "ckpt") return "type: remesh checkpoint" + rest;
  if (app.get_name() != "checkpoint" || word.starts_with("-")) return "";
  return fmt::format("to save one, type: remesh checkpoint save{}{}",
                     word.empty() ? "" : " " + word, rest);
}

// Refuses empty values of all verbs. They would mean that nothing is given: a
// RUN of "" is the run that trains, or the newest one.
void refuse_empty_values(CLI::App* verb) {
  const CLI::Validator check(
      [](const std::string& text) {
        return std::string(text.empty() ? "must not be empty" : "");
      },
      "");
  for (CLI::Option* o : verb->get_options())
    if (o->get_items_expected_min() > 0) o->check(check);
  for (CLI::App* below : verb->get_subcommands({})) refuse_empty_values(below);
}

}  // namespace

int main(int argc, char** argv) {
  begin_program();
  raise_file_limit();  // a file per shard of a checkpoint
  CLI::App app("remesh trains language models on machines that come and go.");
  app.name("remesh");
  app.footer(std::string(kFooter) + "\n" + std::string(kExitCodesHelp));
  app.set_version_flag("-V,--version", version_line("remesh"));
  app.require_subcommand(1);
  int code = kExitOk;
  for (AddVerbs* add : kVerbs) add(&app, &code);
  refuse_empty_values(&app);
  if (const auto ended = parse_arguments(app, argc, argv, other_verb))
    return *ended;
  // `remesh run` says so by itself, and its exit code tells how the job ended.
  if (app.got_subcommand("run") || app.got_subcommand("resume")) return code;
  return check_output("remesh", code);
}

}  // namespace remesh::ctl

int main(int argc, char** argv) { return remesh::ctl::main(argc, argv); }
