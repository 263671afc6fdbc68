// remesh plan study: published studies beside the planner's predictions.
#include <fmt/format.h>

#include <memory>

#include "coordinator/ctl/descriptions.h"
#include "coordinator/ctl/study.h"
#include "coordinator/ctl/verbs.h"
#include "parallel/jobfile/jobfile.h"
#include "proto/base/file_system.h"

namespace remesh::ctl {
namespace {

struct StudyOptions {
  std::string name, html;
  bool json = false;
};

Result<int> study(const StudyOptions& o) {
  ASSIGN_OR_RETURN(const std::string path,
                   description_path("study", o.name, "a study"));
  ASSIGN_OR_RETURN(const std::string text, jobfile::read_text(path));
  ASSIGN_OR_RETURN(const Study s, evaluate_study(text, path));
  fmt::print("{}", o.json ? study_json(s) : study_text(s));
  if (o.html.empty()) return kExitOk;
  RETURN_IF_ERROR(write_output(o.html, study_page(s)));
  if (!o.json) fmt::print("charts: {}\n", o.html);
  return kExitOk;
}

}  // namespace

void add_study_command(CLI::App* plan, int* code) {
  auto o = std::make_shared<StudyOptions>();
  CLI::App* c = plan->add_subcommand(
      "study", "Reproduce a published study of training at scale");
  c->add_option("NAME", o->name,
                "frontier, torchtitan, scaling, or a file like those in "
                "deploy/studies")
      ->required();
  c->add_option("--html", o->html,
                "Also write a page with charts, which needs no other file");
  add_json_option(c, &o->json);
  c->footer(R"(
Every published figure is shown beside the planner's, with the error, and every
claim with whether it holds for the planner.

Example:
  remesh plan study torchtitan --html torchtitan.html)");
  c->callback([o, code] { *code = exit_code(study(*o)); });
}

}  // namespace remesh::ctl
