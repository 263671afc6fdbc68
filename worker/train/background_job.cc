#include "worker/train/background_job.h"

#ifdef __linux__
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <chrono>
#include <exception>
#include <future>
#include <string>
#include <system_error>
#include <utility>

#include "proto/base/check.h"

namespace remesh::train {

// Lowers the priority for the processor (nice 15) and the disk (the lowest
// best-effort level; the idle class might never be served). On Linux both are
// per thread and inherited by the threads it starts. Failures are ignored: they
// cost only speed.
void lower_priority_of_this_thread() {
#ifdef __linux__
  constexpr int kNice = 15;
  constexpr int kWhoProcess = 1, kBestEffort = 2, kLowest = 7;  // ioprio.h
  const auto id = static_cast<id_t>(::syscall(SYS_gettid));
  (void)::setpriority(PRIO_PROCESS, id, kNice);
  (void)::syscall(SYS_ioprio_set, kWhoProcess, static_cast<int>(id),
                  kBestEffort << 13 | kLowest);
#endif
}

void BackgroundJob::start(std::function<Status()> job) {
  CHECK(!busy());
  const auto failed = [](const std::exception& e) {
    return unavailable(std::string("background work: ") + e.what());
  };
  try {
    job_ = std::async(std::launch::async, [failed, job = std::move(job)] {
      try {
        return job();
      } catch (const std::exception& e) {
        return failed(e);
      }
    });
  } catch (const std::system_error& e) {
    std::promise<Status> now;
    now.set_value(failed(e));
    job_ = now.get_future();
  }
}

bool BackgroundJob::done() const {
  return job_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

Status BackgroundJob::take(const std::function<void()>& tick) {
  CHECK(busy());
  while (job_.wait_for(std::chrono::milliseconds(10)) !=
         std::future_status::ready)
    tick();
  return std::exchange(job_, {}).get();
}

}  // namespace remesh::train
