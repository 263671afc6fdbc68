#include "proto/base/check.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>

#include "proto/base/check_hook.h"

namespace remesh {
namespace {
std::atomic<void (*)()> last_act{nullptr};
}  // namespace

void before_check_aborts(void (*hook)()) { last_act.store(hook); }

void check_failed(const char* file, int line, const char* condition,
                  const char* message) {
  std::fprintf(stderr, "%s:%d: CHECK failed: %s %s\n", file, line, condition,
               message);
  std::fflush(stderr);
  if (auto* const hook = last_act.exchange(nullptr)) hook();
  std::abort();
}

}  // namespace remesh
