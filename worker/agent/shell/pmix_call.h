// Helpers for calls into PMIx: waits for the answer of an asynchronous call,
// and builds lists of pmix_info_t. Only pmix_daemon.cc includes it.
#pragma once

#include <pmix.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "proto/base/status.h"

namespace remesh::agent {

inline constexpr auto kAnswerTimeout = std::chrono::seconds(10);

// Whether PMIx has failed to answer a call; then later calls fail, too.
inline std::atomic<bool> g_stuck{false};

inline Status pmix_error(const std::string& what, pmix_status_t status) {
  return internal("PMIx: " + what + ": " + PMIx_Error_string(status));
}

// The answer to one asynchronous PMIx call. Shared with the callback, which may
// run after the caller has timed out.
class Answer {
 public:
  // A reference for PMIx, to be passed as the callback argument.
  void* share() { return new std::shared_ptr<Answer>(self_.lock()); }
  static std::shared_ptr<Answer> make() {
    auto a = std::make_shared<Answer>();
    a->self_ = a;
    return a;
  }
  static void set(pmix_status_t status, void* shared) {
    std::unique_ptr<std::shared_ptr<Answer>> held(
        static_cast<std::shared_ptr<Answer>*>(shared));
    Answer& a = **held;
    const std::lock_guard lock(a.mutex_);
    a.status_ = status;
    a.done_ = true;
    a.changed_.notify_all();
  }
  // `called` is what the call returned; there is a callback only after
  // PMIX_SUCCESS.
  pmix_status_t wait(pmix_status_t called, void* shared) {
    if (called != PMIX_SUCCESS) {
      delete static_cast<std::shared_ptr<Answer>*>(shared);
      return called == PMIX_OPERATION_SUCCEEDED ? PMIX_SUCCESS : called;
    }
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, kAnswerTimeout, [this] { return done_; })) {
      g_stuck.store(true);
      return PMIX_ERR_TIMEOUT;
    }
    return status_ == PMIX_OPERATION_SUCCEEDED ? PMIX_SUCCESS : status_;
  }

 private:
  std::weak_ptr<Answer> self_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  pmix_status_t status_ = PMIX_SUCCESS;
};

// Calls `start(callback, argument)` and waits for its answer.
template <typename F>
pmix_status_t call_and_wait(F&& start) {
  const auto answer = Answer::make();
  void* shared = answer->share();
  return answer->wait(start(&Answer::set, shared), shared);
}

// A list of pmix_info_t that frees what PMIx allocated in it.
class Infos {
 public:
  Infos() = default;
  Infos(const Infos&) = delete;
  Infos& operator=(const Infos&) = delete;
  ~Infos() {
    for (pmix_info_t& i : infos_) PMIX_INFO_DESTRUCT(&i);
  }
  template <typename T>
  void add(const char* key, const T& value, pmix_data_type_t type) {
    PMIX_INFO_LOAD(fresh(), key, &value, type);
  }
  void add(const char* key, const std::string& value) {
    PMIX_INFO_LOAD(fresh(), key, value.c_str(), PMIX_STRING);
  }
  // Takes ownership of `regex`, a result of PMIx_generate_*.
  void add_regex(const char* key, char* regex) {
    pmix_info_t* i = fresh();
    PMIX_LOAD_KEY(i->key, key);
    i->value.type = PMIX_REGEX;
    i->value.data.bo.bytes = regex;
    i->value.data.bo.size = std::strlen(regex) + 1;
  }
  void add_array(const char* key, pmix_data_array_t* array) {
    pmix_info_t* i = fresh();
    PMIX_LOAD_KEY(i->key, key);
    i->value.type = PMIX_DATA_ARRAY;
    i->value.data.darray = array;
  }
  pmix_info_t* data() { return infos_.data(); }
  size_t size() const { return infos_.size(); }

 private:
  pmix_info_t* fresh() {
    infos_.emplace_back();
    PMIX_INFO_CONSTRUCT(&infos_.back());
    return &infos_.back();
  }
  std::vector<pmix_info_t> infos_;
};

}  // namespace remesh::agent
