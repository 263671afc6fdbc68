// TrainLog: the log of a rank. Every line has generation, rank and step.
//
// Threads: any thread may log; the training thread sets the step.
#pragma once

#include <atomic>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "proto/base/log.h"

namespace remesh::train {

class TrainLog {
 public:
  TrainLog(std::shared_ptr<Logger> logger, int64_t generation, int rank)
      : logger_(std::move(logger)), generation_(generation), rank_(rank) {}
  void set_step(int64_t step) { step_.store(step); }
  void set_rank(int rank) { rank_ = rank; }  // before other threads log
  int64_t step() const { return step_.load(); }

  void log(LogLevel level, std::string_view event,
           const std::vector<Kv>& kvs = {}) {
    std::vector<Kv> all = {
        {"generation", generation_}, {"rank", rank_}, {"step", step_.load()}};
    all.insert(all.end(), kvs.begin(), kvs.end());
    logger_->log(level, event, all);
  }
  void info(std::string_view e, const std::vector<Kv>& kvs = {}) {
    log(LogLevel::kInfo, e, kvs);
  }
  void warn(std::string_view e, const std::vector<Kv>& kvs = {}) {
    log(LogLevel::kWarn, e, kvs);
  }
  void error(std::string_view e, const std::vector<Kv>& kvs = {}) {
    log(LogLevel::kError, e, kvs);
  }
  void flush() { logger_->flush(); }

 private:
  std::shared_ptr<Logger> logger_;
  int64_t generation_;
  int rank_;
  std::atomic<int64_t> step_{0};
};

}  // namespace remesh::train
