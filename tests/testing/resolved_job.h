// A job of these settings ("train.steps=9") and a vocabulary of 257 tokens.
#pragma once

#include <string>
#include <vector>

#include "parallel/jobfile/jobfile.h"
#include "tests/testing/expect.h"

namespace remesh {

inline pb::Job resolved_job(const std::vector<std::string>& settings) {
  const auto parsed = jobfile::parse_job("", {}, settings);
  EXPECT_OK(parsed);
  const auto resolved = jobfile::resolve(*parsed, {.vocab_size = 257});
  EXPECT_OK(resolved);
  return *resolved;
}

}  // namespace remesh
