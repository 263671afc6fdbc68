#include "coordinator/server/journal.h"

#include <fmt/format.h>

#include <algorithm>
#include <span>
#include <utility>

#include "proto/base/rng.h"
#include "proto/base/text.h"
#include "proto/limits/plausible.h"

namespace remesh::server {
namespace {

constexpr uint64_t kMagic = 0x31304c4e524a4d52;  // "RMJRNL01"
constexpr uint64_t kMarkBytes = 4096;
constexpr int kMarkCopies = 2;
constexpr uint64_t kSlotsAt = 2 * kMarkCopies * kMarkBytes;
constexpr uint64_t kLeastSlotBytes = uint64_t{128} << 10;
constexpr uint64_t kMostSlotBytes = uint64_t{1} << 30;

uint64_t mark_at(int slot, int copy) { return (2 * copy + slot) * kMarkBytes; }

std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text));
}

}  // namespace

struct Journal::Header {
  uint64_t magic = 0;
  uint64_t sequence = 0;
  uint64_t epoch = 0;
  uint64_t slot_bytes = 0;
  uint64_t length = 0;    // of the state
  uint64_t checksum = 0;  // of the state
  uint64_t own = 0;       // checksum of the words before

  uint64_t sum() const {
    return hash64(
        {reinterpret_cast<const char*>(this), sizeof(Header) - sizeof(own)});
  }
  bool valid() const {
    return magic == kMagic && own == sum() && slot_bytes >= kLeastSlotBytes &&
           slot_bytes <= kMostSlotBytes &&
           length <= slot_bytes - sizeof(Header);
  }
  static Header of(const std::string& state, uint64_t sequence, uint64_t epoch,
                   uint64_t slot_bytes) {
    Header h{.magic = kMagic,
             .sequence = sequence,
             .epoch = epoch,
             .slot_bytes = slot_bytes,
             .length = state.size(),
             .checksum = hash64(state)};
    h.own = h.sum();
    return h;
  }
  std::string text() const {
    return {reinterpret_cast<const char*>(this), sizeof(Header)};
  }
};

Status Journal::damaged(const std::string& what) const {
  return corrupt(fmt::format(
      "{}: the journal is damaged: {}. It was not modified. To continue from "
      "the newest checkpoint, stop all workers of this run, move the file "
      "away (mv {} {}.damaged) and restart with --resume",
      path_, what, shell_quoted(path_), shell_quoted(path_)));
}

uint64_t Journal::slot_at(int slot) const {
  return kSlotsAt + slot * slot_bytes_;
}

Result<std::unique_ptr<Journal>> Journal::open(FileSystem& fs,
                                               const std::string& path) {
  std::unique_ptr<Journal> journal(new Journal(fs, path, /*writes=*/true));
  const Status there = fs.look_up(path);
  if (there.code() == Code::kNotFound)
    RETURN_IF_ERROR(journal->put_file(kLeastSlotBytes, ""));
  else
    RETURN_IF_ERROR(there);
  RETURN_IF_ERROR(journal->load());
  // It may have been written by a process that was killed before it was synced.
  RETURN_IF_ERROR(journal->file_->sync());
  return journal;
}

// Replaces the file by one with the newest state in slot 0. It is complete from
// the moment that `path_` is it.
Status Journal::put_file(uint64_t slot_bytes, const std::string& state) {
  const std::string temporary = temporary_path(fs_, path_);
  ASSIGN_OR_RETURN(const auto file, fs_.create_new(temporary));
  const std::string head =
      Header::of(state, sequence_, epoch_, slot_bytes).text();
  // Every byte is written, so that its room is there for good.
  std::string all(kSlotsAt + 2 * slot_bytes, '\0');
  for (int copy = 0; copy < kMarkCopies; ++copy)
    all.replace(mark_at(0, copy), head.size(), head);
  all.replace(kSlotsAt, head.size() + state.size(), head + state);
  RETURN_IF_ERROR(file->write_at(0, bytes_of(all)));
  RETURN_IF_ERROR(file->sync());
  RETURN_IF_ERROR(file->close());
  renamed_ = true;
  RETURN_IF_ERROR(fs_.rename(temporary, path_));
  RETURN_IF_ERROR(fs_.sync_dir(parent_path(path_)));
  renamed_ = false;
  return ok_status();
}

Status Journal::open_file() {
  ASSIGN_OR_RETURN(file_, writes_ ? fs_.open_to_write(path_) : fs_.open(path_));
  ASSIGN_OR_RETURN(const uint64_t bytes, file_->size());
  slot_bytes_ = bytes < kSlotsAt ? 0 : (bytes - kSlotsAt) / 2;
  if (slot_bytes_ < kLeastSlotBytes || bytes != kSlotsAt + 2 * slot_bytes_)
    return corrupt(fmt::format("it has {} bytes", bytes));
  return ok_status();
}

Result<Journal::Header> Journal::read_header(uint64_t offset) const {
  Header h;
  RETURN_IF_ERROR(file_->read_at(
      offset, std::as_writable_bytes(std::span<Header, 1>(&h, 1))));
  return h.slot_bytes == slot_bytes_ ? h : Header();
}

// Corrupt if it does not verify.
Result<std::string> Journal::read_state(int slot, const Header& h) const {
  std::string state(h.length, '\0');
  RETURN_IF_ERROR(file_->read_at(slot_at(slot) + sizeof(Header),
                                 std::as_writable_bytes(std::span(state))));
  if (hash64(state) != h.checksum)
    return corrupt("the state does not match its checksum");
  return state;
}

Status Journal::load() {
  Status taken = open_file();
  if (taken.ok()) taken = take_newest();
  return taken.code() == Code::kCorrupt ? damaged(taken.message()) : taken;
}

Status Journal::take_newest() {
  uint64_t complete = 0;  // sequence number of the newest mark
  std::optional<std::string> newest;
  Status unread;  // a read error says nothing about the bytes
  for (int slot = 0; slot < 2; ++slot) {
    for (int copy = 0; copy < kMarkCopies; ++copy) {
      ASSIGN_OR_RETURN(const Header mark, read_header(mark_at(slot, copy)));
      if (mark.valid()) complete = std::max(complete, mark.sequence);
    }
    ASSIGN_OR_RETURN(const Header h, read_header(slot_at(slot)));
    if (!h.valid() || (newest && sequence_ > h.sequence)) continue;
    auto state = read_state(slot, h);
    if (!state.ok()) {
      if (state.status().code() != Code::kCorrupt) unread = state.status();
      continue;
    }
    newest = std::move(*state);
    slot_ = slot;
    sequence_ = h.sequence;
    epoch_ = h.epoch;
  }
  if (!newest || sequence_ < complete) RETURN_IF_ERROR(unread);
  if (!newest) return corrupt("no slot verifies");
  if (sequence_ < complete)
    return corrupt(fmt::format("state {} does not verify, the one before is {}",
                               complete, sequence_));
  if (sequence_ == 0) return ok_status();
  pb::Durable durable;
  if (!durable.ParseFromString(*newest))
    return corrupt("the state cannot be decoded");
  if (limits::has_unknown_value(durable, pb::Durable::kPhaseFieldNumber))
    return invalid_argument(
        path_ +
        ": the phase of the job is of a later release of remesh; continue with "
        "that release");
  restored_ = std::move(durable);
  return ok_status();
}

// Finds the newest durable state in the file as it is now. Cancelled if another
// coordinator wrote it whose epoch is not smaller.
Status Journal::take_others(uint64_t epoch) {
  const uint64_t known = sequence_, mine = epoch_;
  for (int slot = 0; slot < 2; ++slot) {
    ASSIGN_OR_RETURN(const Header h, read_header(slot_at(slot)));
    if (!h.valid() || h.sequence < sequence_) continue;
    // This object began to write it, and failed.
    const bool own = h.sequence == known + 1 && h.epoch == epoch &&
                     h.checksum == tried_checksum_;
    if (own) continue;
    const Status read = read_state(slot, h).status();
    if (h.sequence > known && h.epoch >= epoch && read.code() != Code::kCorrupt)
      RETURN_IF_ERROR(read);
    if (!read.ok()) continue;
    if (h.sequence > known && h.epoch >= epoch)
      return cancelled(fmt::format(
          "{}: another coordinator, of epoch {}, has written to the journal; "
          "this one, of epoch {}, is not in charge any more",
          path_, h.epoch, epoch));
    slot_ = slot;
    sequence_ = h.sequence;
    epoch_ = h.epoch;
  }
  if (sequence_ == known && epoch_ == mine) return ok_status();
  return file_->sync();  // that one may have been killed before it did so
}

Status Journal::persist(const pb::Durable& durable) {
  RETURN_IF_ERROR(put_back().status());
  // Whatever the path leads to now: another coordinator may have replaced it.
  Status ready = open_file();
  if (ready.ok()) ready = take_others(durable.epoch());
  if (ready.code() == Code::kCorrupt) return damaged(ready.message());
  RETURN_IF_ERROR(ready);
  if (renamed_) RETURN_IF_ERROR(fs_.sync_dir(parent_path(path_)));
  renamed_ = false;
  const std::string state = durable.SerializeAsString();
  RETURN_IF_ERROR(make_room(sizeof(Header) + state.size()));
  const int slot = 1 - slot_;
  RETURN_IF_ERROR(write(slot, state, durable.epoch()));
  slot_ = slot;
  ++sequence_;
  epoch_ = durable.epoch();
  return ok_status();
}

Status Journal::write(int slot, const std::string& state, uint64_t epoch) {
  const Header header = Header::of(state, sequence_ + 1, epoch, slot_bytes_);
  const std::string head = header.text();
  tried_checksum_ = header.checksum;
  RETURN_IF_ERROR(file_->write_at(slot_at(slot), bytes_of(head + state)));
  RETURN_IF_ERROR(file_->sync());
  // Another coordinator may have written at the same time.
  ASSIGN_OR_RETURN(const Header there, read_header(slot_at(slot)));
  if (there.text() != head)
    return cancelled(path_ + ": another coordinator writes to the journal");
  for (int copy = 0; copy < kMarkCopies; ++copy)
    RETURN_IF_ERROR(file_->write_at(mark_at(slot, copy), bytes_of(head)));
  return file_->sync();
}

Status Journal::make_room(uint64_t bytes) {
  if (bytes <= slot_bytes_) return ok_status();
  uint64_t slot_bytes = slot_bytes_;
  while (slot_bytes < bytes) slot_bytes *= 2;
  if (slot_bytes > kMostSlotBytes)
    return invalid_argument(
        fmt::format("{}: a state of {} bytes is too large", path_, bytes));
  return replace(slot_bytes);
}

Status Journal::replace(uint64_t slot_bytes) {
  ASSIGN_OR_RETURN(const Header h, read_header(slot_at(slot_)));
  ASSIGN_OR_RETURN(const std::string newest, read_state(slot_, h));
  RETURN_IF_ERROR(put_file(slot_bytes, newest));
  slot_ = 0;
  return open_file();
}

Result<bool> Journal::put_back() {
  if (fs_.look_up(path_).code() != Code::kNotFound) return false;
  RETURN_IF_ERROR(replace(slot_bytes_));
  return true;
}

Result<pb::Durable> read_journal(FileSystem& fs, const std::string& path) {
  Journal journal(fs, path, /*writes=*/false);
  RETURN_IF_ERROR(journal.load());
  if (!journal.restored()) return not_found(path + ": no state yet");
  return *journal.restored();
}

}  // namespace remesh::server
