#include "proto/base/status.h"

#include <cerrno>
#include <cstring>

namespace remesh {

const char* code_name(Code code) {
  switch (code) {
    case Code::kOk:
      return "ok";
    case Code::kInvalidArgument:
      return "invalid_argument";
    case Code::kNotFound:
      return "not_found";
    case Code::kAlreadyExists:
      return "already_exists";
    case Code::kCorrupt:
      return "corrupt";
    case Code::kIo:
      return "io";
    case Code::kUnavailable:
      return "unavailable";
    case Code::kExhausted:
      return "exhausted";
    case Code::kCancelled:
      return "cancelled";
    case Code::kInternal:
      return "internal";
    case Code::kDenied:
      return "denied";
    case Code::kEnded:
      return "ended";
  }
  return "unknown";
}

Code code_named(std::string_view name) {
  for (int i = 0; i <= static_cast<int>(Code::kEnded); ++i)
    if (name == code_name(static_cast<Code>(i))) return static_cast<Code>(i);
  return Code::kUnavailable;
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
