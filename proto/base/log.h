// Structured logging on spdlog: one line per event, "event key=value ...".
//
// A Logger is an object that its owner passes down; there is no global logger.
// Values with spaces, quotes or '=' are quoted. Thread-safe.
//
// Logging never waits: a thread of the logger writes the lines, and while a
// disk is stalled the newest two thousand are kept. What cannot be written is
// lost; stderr says so, at most once a minute. The lines before a regular exit,
// a flush() or a failed CHECK are written if that takes at most half a second.
#pragma once

#include <fmt/format.h>

#include <atomic>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "proto/base/status.h"

namespace spdlog {
class async_logger;
namespace details {
class thread_pool;
}
}  // namespace spdlog

namespace remesh {

enum class LogLevel { kInfo, kWarn, kError };

struct LogOptions {
  std::string name;             // program, e.g. "worker a"
  std::string path;             // of the file, rotated; empty: no file
  size_t max_bytes = 16 << 20;  // per file, before it is rotated
  size_t max_files = 4;         // with that one; at least 1
  bool to_stderr = false;
};

// One key=value of a log line.
struct Kv {
  template <typename T>
  requires requires(const T& v) { fmt::format("{}", v); }
  Kv(std::string_view k, const T& v) : key(k), value(fmt::format("{}", v)) {}
  std::string_view key;
  std::string value;
};

// "event k=v k=\"v v\"", as in every log line.
std::string format_event(std::string_view event, const std::vector<Kv>& kvs);

class Logger {
 public:
  // The file is opened with the first line, and tried again with each line as
  // long as that fails.
  static std::shared_ptr<Logger> open(const LogOptions& options);
  // Discards everything; for tests and tools.
  static std::shared_ptr<Logger> null();
  ~Logger();

  void log(LogLevel level, std::string_view event,
           const std::vector<Kv>& kvs = {});
  void info(std::string_view e, const std::vector<Kv>& kvs = {}) {
    log(LogLevel::kInfo, e, kvs);
  }
  void warn(std::string_view e, const std::vector<Kv>& kvs = {}) {
    log(LogLevel::kWarn, e, kvs);
  }
  void error(std::string_view e, const std::vector<Kv>& kvs = {}) {
    log(LogLevel::kError, e, kvs);
  }
  // False if the lines could not be written within half a second.
  bool flush();

 private:
  class Output;
  Logger() = default;
  std::shared_ptr<Output> output_;
  std::shared_ptr<spdlog::details::thread_pool> pool_;
  std::shared_ptr<spdlog::async_logger> impl_;
  std::atomic<size_t> posted_{0};
};

}  // namespace remesh
