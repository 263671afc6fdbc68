// The commands below `remesh plan`. Each is declared and implemented in one
// file.
#pragma once

#include "coordinator/ctl/verbs.h"

namespace remesh::ctl {

void add_measure_command(CLI::App* plan, int* code);  // measure_command.cc
void add_project_command(CLI::App* plan, int* code);  // project_command.cc
void add_study_command(CLI::App* plan, int* code);    // study_command.cc

}  // namespace remesh::ctl
