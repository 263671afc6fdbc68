#include "bench/targets.h"

#include <fmt/format.h>

namespace remesh::bench {

int failed(const std::string& what, const std::string& why) {
  fmt::print(stderr, "{}: {}\n", what, why);
  return kExitFailed;
}

void Targets::at_most(const std::string& what, double limit, double actual) {
  judged_.push_back({what, fmt::format("<= {:.3f}", limit),
                     fmt::format("{:.3f}", actual), actual <= limit});
}

void Targets::at_least(const std::string& what, double limit, double actual) {
  judged_.push_back({what, fmt::format(">= {:.3f}", limit),
                     fmt::format("{:.3f}", actual), actual >= limit});
}

void Targets::require(const std::string& what, bool holds) {
  if (!holds) broken_.push_back(what);
}

int Targets::report(std::FILE* out) const {
  bool missed = false;
  if (smoke_) {
    fmt::print(out, "\nsmoke run: targets not judged\n");
  } else if (!judged_.empty()) {
    fmt::print(out, "\n{:<62} {:>9} {:>9}\n", "target", "limit", "actual");
    for (const Target& t : judged_) {
      fmt::print(out, "{:<62} {:>9} {:>9}   {}\n", t.what, t.limit, t.actual,
                 t.met ? "met" : "NOT MET");
      missed = missed || !t.met;
    }
  }
  for (const std::string& what : broken_) fmt::print(out, "WRONG: {}\n", what);
  std::fflush(out);
  return missed || !broken_.empty() ? kExitMissed : 0;
}

}  // namespace remesh::bench
