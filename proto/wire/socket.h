// What the two ends of a channel share: frames, socket options, monitors.
// Private to this folder. A `void*` is a socket of libzmq.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "proto/base/status.h"
#include "proto/control.pb.h"

namespace remesh::wire {

// Messages that wait for an absent coordinator are stale on arrival.
inline constexpr int kClientQueue = 128;
inline constexpr int kServerQueue = 64;  // per peer, to it

// The head of a frame alone, which tells the version.
std::string bare_head();
// The version of a frame that has another one than ours.
std::optional<int> foreign_version_of(const void* frame, size_t size);
// A note between the channels themselves, which no program sees: a ticket, the
// answer to one, or the next key of a server (keys.h has the form of the text).
std::string encode_note(const std::string& text);
std::optional<std::string> decode_note(const void* frame, size_t size);

void set_common_options(void* socket, const std::string& address,
                        int64_t max_bytes, int silence_ms);
// Sends what a server sends before what else waits for this host's network, as
// the common options do for a client.
void prefer(int fd);
// Whether the other end takes a message of this size.
bool fits(const pb::Envelope& envelope, int64_t max_bytes);
bool has_input(void* socket);
// Skips the rest of a message with more parts than ours have.
void skip_parts(void* socket, bool more);

Status check_address(const std::string& address);
Status address_error(const char* what, const std::string& address, int error,
                     const char* text);

struct MonitorEvent {
  int number = 0;
  int value = 0;
};
// Reports `events` of `socket` on the PAIR socket `monitor`.
Status start_monitor(void* socket, void* monitor, int events);
std::optional<MonitorEvent> next_event(void* monitor);

}  // namespace remesh::wire
