#include "proto/base/status.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

namespace remesh {

namespace {

constexpr std::array kNames = {"ok",          "invalid_argument",
                               "not_found",   "already_exists",
                               "corrupt",     "io",
                               "unavailable", "exhausted",
                               "cancelled",   "internal",
                               "denied",      "ended"};
static_assert(kNames.size() == static_cast<size_t>(Code::kEnded) + 1);

}  // namespace

const char* code_name(Code code) {
  return kNames.at(static_cast<size_t>(code));
}

Code code_named(std::string_view name) {
  const auto it = std::find(kNames.begin(), kNames.end(), name);
  return it == kNames.end() ? Code::kUnavailable
                            : static_cast<Code>(it - kNames.begin());
}

std::string Status::to_string() const {
  if (ok()) return "ok";
  return std::string(code_name(code_)) + ": " + message_;
}

Status Status::with_context(const std::string& context) const {
  if (ok()) return *this;
  return {code_, context + ": " + message_};
}

Status invalid_argument(std::string m) {
  return {Code::kInvalidArgument, std::move(m)};
}
Status not_found(std::string m) { return {Code::kNotFound, std::move(m)}; }
Status already_exists(std::string m) {
  return {Code::kAlreadyExists, std::move(m)};
}
Status corrupt(std::string m) { return {Code::kCorrupt, std::move(m)}; }
Status io_error(std::string m) { return {Code::kIo, std::move(m)}; }

namespace {

// What the user can do about it; "" if the error says enough.
const char* advice(int err) {
  switch (err) {
    case EISDIR:
      return " (expected a file; move the folder away)";
    case ENOTDIR:
      return " (expected a folder; move the file away)";
    case ELOOP:
      return " (nothing is written through a link here; move it away)";
    case EACCES:
    case EPERM:
      return " (see the owner and the permissions)";
    case EROFS:
      return " (use a folder elsewhere, or mount it for writing)";
    default:
      return "";
  }
}

}  // namespace

bool is_unreadable(Code code) {
  return code == Code::kIo || code == Code::kDenied || code == Code::kNotFound;
}

Status errno_error(const std::string& what, int err) {
  const Code code = err == ENOENT                    ? Code::kNotFound
                    : err == EEXIST                  ? Code::kAlreadyExists
                    : err == ENOSPC || err == ENOMEM ? Code::kExhausted
                    : err == EROFS || err == EACCES || err == EPERM
                        ? Code::kDenied
                        : Code::kIo;
  return {code, what + ": " + std::strerror(err) + advice(err)};
}
Status unavailable(std::string m) { return {Code::kUnavailable, std::move(m)}; }
Status exhausted(std::string m) { return {Code::kExhausted, std::move(m)}; }
Status cancelled(std::string m) { return {Code::kCancelled, std::move(m)}; }
Status internal(std::string m) { return {Code::kInternal, std::move(m)}; }
Status ended(std::string m) { return {Code::kEnded, std::move(m)}; }

}  // namespace remesh
