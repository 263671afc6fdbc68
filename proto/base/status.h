// Status and Result<T>: how an operating failure is returned.
//
// A Status names what failed and what is allowed; its text is written for the
// user who has to act on it. Programming errors use CHECK (check.h) instead. No
// exception crosses a module boundary: an adapter that calls a throwing library
// catches the exception and returns a Status.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "proto/base/check.h"

namespace remesh {

enum class Code {
  kOk = 0,
  kInvalidArgument,  // input of the caller or user is wrong
  kNotFound,         // the named thing does not exist
  kAlreadyExists,
  kCorrupt,      // the data exist but do not verify
  kIo,           // the operating system reported an error
  kUnavailable,  // a peer or resource is not available now
  kExhausted,    // disk, memory, shared memory, slots
  kCancelled,
  kInternal,
  kDenied,  // the operating system does not permit it: permissions, read-only
  kEnded,   // what is asked for needs a run that has not ended
};

// Stable lower-case name, "invalid_argument" and so on.
const char* code_name(Code code);
// kUnavailable for a name that code_name() never returns.
Code code_named(std::string_view name);

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message)
      : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }
  // "corrupt: shard-0.h5: ..." or "ok".
  std::string to_string() const;
  // The same failure, with "context: " before its message.
  Status with_context(const std::string& context) const;

 private:
  Code code_ = Code::kOk;
  std::string message_;
};

// Whether a file that was there cannot be read now: the storage returned an
// error, or is not there, or does not permit it. Unlike damage, that may pass.
bool is_unreadable(Code code);

inline Status ok_status() { return {}; }
Status invalid_argument(std::string message);
Status not_found(std::string message);
Status already_exists(std::string message);
Status corrupt(std::string message);
Status io_error(std::string message);
// "what: strerror(err)", with what the user can do about it for some errors.
Status errno_error(const std::string& what, int err);
Status unavailable(std::string message);
Status exhausted(std::string message);
Status cancelled(std::string message);
Status internal(std::string message);
Status ended(std::string message);

// A value or a failed Status. REQUIRES: ok() before the value is accessed.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : v_(std::move(value)) {}        // NOLINT: implicit by design
  Result(Status status) : v_(std::move(status)) {  // NOLINT
    CHECK(!std::get<Status>(v_).ok());
  }
  bool ok() const { return v_.index() == 0; }
  Status status() const { return ok() ? Status() : std::get<1>(v_); }
  // The same value, or the failure with "context: " before its message.
  Result with_context(const std::string& context) && {
    if (!ok()) std::get<1>(v_) = std::get<1>(v_).with_context(context);
    return std::move(*this);
  }
  T& value() & {
    CHECK_MSG(ok(), status().to_string().c_str());
    return std::get<0>(v_);
  }
  const T& value() const& {
    CHECK_MSG(ok(), status().to_string().c_str());
    return std::get<0>(v_);
  }
  T&& value() && {
    CHECK_MSG(ok(), status().to_string().c_str());
    return std::move(std::get<0>(v_));
  }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }

 private:
  std::variant<T, Status> v_;
};

}  // namespace remesh

#define REMESH_CONCAT_(a, b) a##b
#define REMESH_CONCAT(a, b) REMESH_CONCAT_(a, b)

// Returns a failure from the enclosing function.
#define RETURN_IF_ERROR(expr)                        \
  do {                                               \
    ::remesh::Status remesh_status_ = (expr);        \
    if (!remesh_status_.ok()) return remesh_status_; \
  } while (0)

// ASSIGN_OR_RETURN(auto x, f()): assigns the value or returns the failure.
#define ASSIGN_OR_RETURN(lhs, expr) \
  ASSIGN_OR_RETURN_(REMESH_CONCAT(remesh_result_, __LINE__), lhs, expr)
// NOLINTBEGIN(bugprone-macro-parentheses): tmp is a name, lhs may declare one.
#define ASSIGN_OR_RETURN_(tmp, lhs, expr) \
  auto tmp = (expr);                      \
  if (!tmp.ok()) return tmp.status();     \
  lhs = std::move(tmp).value()
// NOLINTEND(bugprone-macro-parentheses)
