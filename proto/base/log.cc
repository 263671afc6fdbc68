#include "proto/base/log.h"

#include <signal.h>
#include <spdlog/async.h>
#include <spdlog/sinks/rotating_file_sink.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <sys/stat.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <mutex>
#include <optional>

#include "proto/base/check_hook.h"
#include "proto/base/clock.h"
#include "proto/base/file_system.h"

namespace remesh {
namespace {

constexpr size_t kQueuedLines = 2048;
constexpr std::chrono::milliseconds kFlushPatience(500);
constexpr int64_t kComplaintMs = 60'000;
constexpr const char* kPattern = "%Y-%m-%dT%H:%M:%S.%e %L %n: %v";

spdlog::level::level_enum to_spdlog(LogLevel level) {
  switch (level) {
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarn:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
  }
  return spdlog::level::info;
}

void append_value(std::string& out, const std::string& value) {
  const bool quote =
      value.empty() || value.find_first_of(" \t\n\"=") != std::string::npos;
  if (!quote) {
    out += value;
    return;
  }
  out += '"';
  for (char c : value) {
    if (c == '\n') {
      out += "\\n";
      continue;
    }
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  out += '"';
}

// Nothing is written through a link that somebody else may have left in a
// folder that a group shares. `file` is null before the path is opened.
void refuse_link(const std::string& path, std::FILE* file) {
  struct stat there {};
  if ((file != nullptr && !is_at(fileno(file), path)) ||
      (lstat(path.c_str(), &there) == 0 && S_ISLNK(there.st_mode)))
    throw spdlog::spdlog_ex(
        path + ": nothing is written through a link here; move it away");
}

// The thread of a logger must leave signals to the threads that handle them.
void block_signals() {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
}

}  // namespace

// Where the lines of a logger go. Everything that may wait for a disk or a
// terminal happens here, in the logger's own thread.
class Logger::Output final : public spdlog::sinks::sink {
 public:
  explicit Output(LogOptions options) : options_(std::move(options)) {
    if (options_.to_stderr)
      stderr_ = std::make_shared<spdlog::sinks::stderr_sink_st>();
    if (stderr_) stderr_->set_pattern(kPattern);
  }

  void log(const spdlog::details::log_msg& line) override {
    ++taken_;
    attempt([&] {
      if (stderr_) stderr_->log(line);
      if (options_.path.empty()) return;
      if (!file_) open();
      file_->log(line);
    });
  }

  void flush() override {
    attempt([&] {
      if (stderr_) stderr_->flush();
      if (file_) file_->flush();
    });
    const std::lock_guard lock(mutex_);
    written_ = taken_;
    changed_.notify_all();
  }

  void set_pattern(const std::string&) override {}
  void set_formatter(std::unique_ptr<spdlog::formatter>) override {}

  // Whether, soon, that many lines are written or, as overrun() says, dropped.
  template <typename Overrun>
  bool wait_for(size_t posted, const Overrun& overrun) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, kFlushPatience,
                             [&] { return written_ + overrun() >= posted; });
  }

 private:
  void open() {
    spdlog::file_event_handlers handlers;
    handlers.before_open = [](const std::string& path) {
      refuse_link(path, nullptr);
    };
    handlers.after_open = refuse_link;
    auto file = std::make_shared<spdlog::sinks::rotating_file_sink_st>(
        options_.path, options_.max_bytes, options_.max_files - 1,
        /*rotate_on_open=*/false, handlers);
    file->set_pattern(kPattern);
    file_ = std::move(file);
  }

  template <typename Write>
  void attempt(const Write& write) {
    try {
      write();
    } catch (const std::exception& e) {
      file_.reset();  // the next line opens it again
      const int64_t now = monotonic_ms();
      if (complained_ms_ && now - *complained_ms_ < kComplaintMs) return;
      complained_ms_ = now;
      std::fprintf(stderr, "%s: lines of the log are lost: %s\n",
                   options_.name.c_str(), e.what());
    }
  }

  const LogOptions options_;
  spdlog::sink_ptr stderr_;
  spdlog::sink_ptr file_;  // opened with the first line
  size_t taken_ = 0;
  std::optional<int64_t> complained_ms_;
  std::mutex mutex_;
  std::condition_variable changed_;
  size_t written_ = 0;
};

std::string format_event(std::string_view event, const std::vector<Kv>& kvs) {
  std::string out(event);
  for (const Kv& kv : kvs) {
    out += ' ';
    out += kv.key;
    out += '=';
    append_value(out, kv.value);
  }
  return out;
}

namespace {

// The loggers there are, for a CHECK that fails.
struct Loggers {
  std::mutex mutex;
  std::vector<Logger*> all;
  // Their threads may wait for a disk for ever: nobody waits for them.
  std::vector<std::shared_ptr<spdlog::details::thread_pool>> stuck;
};

Loggers& loggers() {
  static auto* const instance = new Loggers;  // outlives every thread
  return *instance;
}

void flush_all() {
  const std::unique_lock lock(loggers().mutex, std::try_to_lock);
  if (!lock.owns_lock()) return;
  for (Logger* logger : loggers().all) (void)logger->flush();
}

}  // namespace

std::shared_ptr<Logger> Logger::open(const LogOptions& options) {
  std::shared_ptr<Logger> logger(new Logger);
  logger->output_ = std::make_shared<Output>(options);
  logger->pool_ = std::make_shared<spdlog::details::thread_pool>(
      kQueuedLines, 1, block_signals);
  logger->impl_ = std::make_shared<spdlog::async_logger>(
      options.name, logger->output_, logger->pool_,
      spdlog::async_overflow_policy::overrun_oldest);
  logger->impl_->flush_on(spdlog::level::info);
  const std::lock_guard lock(loggers().mutex);
  loggers().all.push_back(logger.get());
  before_check_aborts(flush_all);
  return logger;
}

std::shared_ptr<Logger> Logger::null() {
  return std::shared_ptr<Logger>(new Logger);
}

Logger::~Logger() {
  if (!impl_) return;
  const bool written = flush();
  const std::lock_guard lock(loggers().mutex);
  std::erase(loggers().all, this);
  if (!written) loggers().stuck.push_back(std::move(pool_));
}

void Logger::log(LogLevel level, std::string_view event,
                 const std::vector<Kv>& kvs) {
  if (!impl_) return;
  ++posted_;
  impl_->log(to_spdlog(level), format_event(event, kvs));
}

bool Logger::flush() {
  if (!impl_) return true;
  impl_->flush();
  return output_->wait_for(posted_,
                           [this] { return pool_->overrun_counter(); });
}

}  // namespace remesh
