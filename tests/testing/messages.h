// Messages of workers as the coordinator core receives them.
#pragma once

#include <string>
#include <utility>

#include "coordinator/core/api.h"

namespace remesh::core {

inline MessageReceived received(pb::Report report, std::string key = "") {
  MessageReceived out{.key = std::move(key)};
  *out.message.mutable_report() = std::move(report);
  return out;
}
inline MessageReceived received(pb::FenceIn fence) {
  MessageReceived out;
  *out.message.mutable_fence_in() = std::move(fence);
  return out;
}

}  // namespace remesh::core
