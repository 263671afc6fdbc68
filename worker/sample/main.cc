// remesh-sample: text from a model, and how well one predicts text. `remesh
// sample` runs it, and with "eval" as its first argument `remesh eval`.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <string_view>

#include "proto/base/process.h"
#include "proto/base/usage.h"
#include "proto/base/version.h"
#include "worker/sample/commands.h"

namespace remesh::sample {
namespace {

int sample_main(int argc, char** argv) {
  const bool eval = argc > 1 && std::string_view(argv[1]) == "eval";
  CLI::App app(eval ? "Scores how well a model predicts text."
                    : "Prints text that a model continues.");
  app.name(eval ? "remesh eval" : "remesh sample");
  app.set_version_flag("--version", version_line("remesh sample"));
  int code = 0;
  if (eval)
    add_eval_command(app, &code);
  else
    add_sample_command(app, &code);
  const int skip = eval ? 1 : 0;
  if (const auto ended = parse_arguments(app, argc - skip, argv + skip))
    return *ended;
  return check_output(app.get_name().c_str(), code);
}

}  // namespace
}  // namespace remesh::sample

int main(int argc, char** argv) {
  remesh::begin_program();
  remesh::raise_file_limit();  // a file per shard of a checkpoint
  // OpenMP reads it before main(). Its threads spin for some 30 us, as long as
  // the parts of a token follow each other, and leave the cores to others after
  // that.
  if (getenv("GOMP_SPINCOUNT") == nullptr &&
      getenv("OMP_WAIT_POLICY") == nullptr &&
      setenv("GOMP_SPINCOUNT", "10000", /*overwrite=*/0) == 0)
    (void)execv("/proc/self/exe", argv);
  return remesh::sample::sample_main(argc, argv);
}
