#include "proto/base/log.h"

#include <spdlog/sinks/rotating_file_sink.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

namespace remesh {
namespace {

spdlog::level::level_enum to_spdlog(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return spdlog::level::debug;
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

}  // namespace

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

Result<std::shared_ptr<Logger>> Logger::open(const LogOptions& options) {
  std::vector<spdlog::sink_ptr> sinks;
  try {
    if (!options.path.empty())
      sinks.push_back(std::make_shared<spdlog::sinks::rotating_file_sink_mt>(
          options.path, options.max_bytes, options.max_files));
    if (options.to_stderr)
      sinks.push_back(std::make_shared<spdlog::sinks::stderr_sink_mt>());
  } catch (const spdlog::spdlog_ex& e) {
    return io_error("log file " + options.path + ": " + e.what());
  }
  std::shared_ptr<Logger> logger(new Logger);
  logger->impl_ = std::make_shared<spdlog::logger>(options.name, sinks.begin(),
                                                   sinks.end());
  logger->impl_->set_level(to_spdlog(options.level));
  logger->impl_->set_pattern("%Y-%m-%dT%H:%M:%S.%e %L %n: %v");
  logger->impl_->flush_on(spdlog::level::info);
  return logger;
}

std::shared_ptr<Logger> Logger::null() {
  return std::shared_ptr<Logger>(new Logger);
}

Logger::~Logger() = default;

void Logger::log(LogLevel level, std::string_view event,
                 const std::vector<Kv>& kvs) {
  if (!impl_ || !impl_->should_log(to_spdlog(level))) return;
  impl_->log(to_spdlog(level), format_event(event, kvs));
}

void Logger::flush() {
  if (impl_) impl_->flush();
}

}  // namespace remesh
