// remesh: the command line.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <string>
#include <vector>

#include "coordinator/ctl/verbs.h"
#include "proto/base/text.h"
#include "proto/base/version.h"

namespace remesh::ctl {
namespace {

constexpr const char* kFooter = R"(
Examples:
  remesh data prepare --input books.txt.xz --out data/books
  remesh run job.toml --local 2          train on this machine, 2 workers
  remesh status -w                       watch the newest run
  remesh resume --local 3                continue it, with 3 workers

RUN is a run directory or an address (tcp://HOST:PORT). Default: the newest run
in ./runs. See `remesh COMMAND --help` for the options of a command.
)";

// What could have been typed in place of `word`, which `rest` follows.
std::string usage_hint(const CLI::App& app, const std::string& word,
                       const std::string& rest) {
  std::vector<std::string> names;
  if (word.starts_with("-")) {
    for (const CLI::Option* o : app.get_options())
      for (const std::string& name : o->get_lnames())
        names.push_back("--" + name);
  } else {
    for (const CLI::App* c : app.get_subcommands({}))
      names.push_back(c->get_name());
  }
  const std::string plain = word.substr(0, word.find('='));
  const bool known =
      std::find(names.begin(), names.end(), plain) != names.end();
  if (known || names.empty() || word == "-w") return "";
  std::string hint = word.empty() ? "expected one of: " + join(names)
                                  : fmt::format(
                                        "{}: unknown; expected one of: "
                                        "{}",
                                        word, join(names));
  const std::string near = nearest_name(plain, names);
  if (word == "ckpt") {
    hint += fmt::format("; type: remesh checkpoint{}", rest);
  } else if (!near.empty()) {
    hint += fmt::format("; did you mean {}?", near);
  } else if (app.get_name() == "checkpoint" && !word.starts_with("-")) {
    hint += fmt::format("; to save one, type: remesh checkpoint save{}{}",
                        word.empty() ? "" : " " + word, rest);
  }
  return hint;
}

// Explains the first argument that is not known.
int usage_error(const CLI::App& root, const CLI::ParseError& error, int argc,
                char** argv) {
  if (root.exit(error) == 0) return kExitOk;  // help
  const CLI::App* app = &root;
  std::string hint;
  int i = 1;
  for (; i < argc && hint.empty(); ++i) {
    const std::string word = argv[i];
    const auto inner = app->get_subcommands();
    if (!inner.empty() && inner[0]->get_name() == word) {
      app = inner[0];
      continue;
    }
    std::string rest;
    for (int k = i + 1; k < argc; ++k) rest += fmt::format(" {}", argv[k]);
    hint = usage_hint(*app, word, rest);
  }
  if (hint.empty() && app->get_subcommands().empty())
    hint = usage_hint(*app, "", "");
  if (!hint.empty()) fmt::print(stderr, "{}\n", hint);
  return kExitUsage;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("remesh trains language models on machines that come and go.");
  app.name("remesh");
  app.footer(std::string(kFooter) + "\n" + std::string(kExitCodesHelp));
  app.set_version_flag("-V,--version", version_line("remesh"));
  app.require_subcommand(1);
  int code = kExitOk;
  add_run_verb(&app, &code);
  add_status_verb(&app, &code);
  add_control_verbs(&app, &code);
  add_checkpoint_verbs(&app, &code);
  add_trace_verb(&app, &code);
  add_job_verbs(&app, &code);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return usage_error(app, e, argc, argv);
  }
  return code;
}

}  // namespace remesh::ctl

int main(int argc, char** argv) { return remesh::ctl::main(argc, argv); }
