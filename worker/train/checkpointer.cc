#include "worker/train/checkpointer.h"

#include <fmt/format.h>

#include <array>
#include <chrono>
#include <limits>
#include <thread>
#include <utility>

#include "checkpoint/manifest/scan.h"
#include "proto/base/clock.h"
#include "worker/train/watched_fs.h"

namespace remesh::train {
namespace {

// How long a disk operation may take before this rank stops reporting progress.
constexpr int64_t kQuietLimitMs = 600'000;

// After each write a background save idles this many times as long as the write
// took. With 1 GiB and two compute threads on two cores, steps take 5% longer
// (20% without idling), and the save has 1/8 of the rate of a plain write (2/5
// without idling).
constexpr double kIdleDuringTraining = 4;

// Number of steps whose metrics a checkpoint includes: enough for the steps
// that may finish while the coordinator is unreachable.
constexpr size_t kKeptMetrics = 1000;

}  // namespace

Checkpointer::Checkpointer(CheckpointerOptions options, FileSystem& fs,
                           const geometry::RankShard& rank,
                           kernels::Backend& backend, comm::Comm& world,
                           board::Board& board, TrainLog& log)
    : options_(std::move(options)),
      table_(rank.shard.table()),
      backend_(backend),
      world_(world),
      board_(board),
      log_(log),
      fs_(watched_file_system(
          fs, [this] { disk_moved_ms_.store(monotonic_ms()); }, &give_up_)),
      pieces_(pieces_to_save(rank)),
      packed_(packed(pieces_, &staged_elements_)),
      plan_({.interval = options_.interval,
             .world = world.size(),
             .saved_step = newest_saved()}) {
  if (world.rank() != 0) return;
  const Status s = claim();
  if (!s.ok()) log_.warn("checkpoints_not_claimed", {{"error", s.to_string()}});
}

// Without it an older generation that nobody reaches could remove what this one
// started from, so a save does not begin before.
Status Checkpointer::claim() {
  // A run directory that is gone is not made again.
  if (!fs_->exists(options_.folder) &&
      !fs_->exists(parent_path(options_.folder)))
    return not_found(options_.folder + ": the folder of checkpoints is gone");
  if (world_.rank() != 0 || claimed_) return ok_status();
  RETURN_IF_ERROR(
      manifest::claim(*fs_, options_.folder, options_.manifest.generation()));
  claimed_ = true;
  return ok_status();
}

Checkpointer::~Checkpointer() = default;

// The newest committed step up to the first step of this generation; -1: none.
// Rank 0 decides for all, since ranks might see different folder contents.
int64_t Checkpointer::newest_saved() const {
  int64_t step = -1;
  if (world_.rank() == 0 && options_.first_step > 0) {
    const auto names = fs_->list(options_.folder);
    for (size_t i = names.ok() ? names->size() : 0; i-- > 0 && step < 0;) {
      const auto found = manifest::parse_step_name((*names)[i]);
      if (!found || *found > options_.first_step) continue;
      const std::string path = path_join(options_.folder, (*names)[i]);
      const auto m = manifest::read_checkpoint(*fs_, path);
      if (m.ok() && manifest::check_run(*m, options_.manifest.run_id()).ok() &&
          manifest::of_branch(origin(), options_.manifest.generation(), *found,
                              m->generation()))
        step = *found;
    }
  }
  world_.all_reduce(std::span<int64_t>(&step, 1), comm::Op::kMax);
  return step;
}

void Checkpointer::add_metrics(const pb::StepMetrics& metrics) {
  if (world_.rank() != 0) return;
  recent_.push_back(metrics);
  if (recent_.size() > kKeptMetrics) recent_.pop_front();
}

engine::StepVotes Checkpointer::votes() const {
  engine::StepVotes f;
  const bool writing = plan_.phase() == SavePlan::Phase::kWriting;
  const bool ending = plan_.phase() == SavePlan::Phase::kEnding;
  if (writing) {
    // Without a job, staging has failed.
    if (!job_.busy() || job_.done()) {
      const Status& s = job_.busy() ? job_.result() : write_status_;
      (s.ok() ? f.shard_saved : f.shard_failed) = 1;
    }
  } else if (ending && world_.rank() == 0 && job_.done()) {
    (job_.result().ok() && write_status_.ok() ? f.committed : f.gave_up) = 1;
  }
  return f;
}

void Checkpointer::on_step(const engine::StepVotes& agreed, bool stops_here,
                           const RankState& state) {
  const SavePlan::Decision d = plan_.on_step(state.step, agreed, stops_here);
  if (d.commit || d.abandon) {
    if (job_.busy()) write_status_ = job_.take();
    if (!write_status_.ok()) report_failure(plan_.saving_step(), write_status_);
    if (world_.rank() == 0) {
      if (d.abandon && write_status_.ok())
        write_status_ = cancelled("another rank could not write its shard");
      if (d.commit) start_commit(std::move(manifest_));
      if (d.abandon) start_abandon(plan_.saving_step());
    }
  }
  if (d.ended) {
    if (job_.busy()) {
      const Status status = job_.take();
      if (!status.ok()) report_failure(d.ended_step, status);
    }
    note_end(d.ended_step, *d.ended);
  }
  if (d.skipped)
    log_.warn("checkpoint_skipped",
              {{"reason",
                "the previous one is still being written; this one follows it"},
               {"writing_step", plan_.saving_step()}});
  if (d.begin) {
    hurry_.store(false);
    start_save(state);
  }
}

void Checkpointer::start_save(const RankState& state) {
  reported_ = false;
  if (world_.rank() == 0) manifest_ = manifest_of(state.step);
  if (options_.double_buffered) {
    write_status_ = ok_status();
    start_copy_and_write(state);
    return;
  }
  write_status_ = stage(state);
  if (write_status_.ok())
    start_job([this, step = state.step] { return write_staged(step); });
}

Status Checkpointer::stage(const RankState& state) {
  if (!have_staging_) {
    for (engine::FlatBuffer& b : staged_) {
      ASSIGN_OR_RETURN(b,
                       engine::FlatBuffer::make(backend_, staged_elements_,
                                                "a copy of the state to save"));
    }
    have_staging_ = true;
  }
  for (size_t i = 0; i < geometry::kNumStateVectors; ++i)
    for (size_t k = 0; k < pieces_.size(); ++k) {
      const geometry::Piece& p = pieces_[k];
      // The rows of packed pieces are contiguous, like those of most pieces.
      const int64_t width = p.rect.cols;
      const int64_t rows = p.rect.rows;
      const bool dense = rows == 1 || p.row_stride == width;
      for (int64_t r = 0; r < (dense ? 1 : rows); ++r)
        backend_.copy(
            staged_[i].data() + packed_[k].at + r * width,
            state.vectors[i].data() + p.at + r * p.row_stride,
            static_cast<size_t>(dense ? rows * width : width) * sizeof(float));
    }
  backend_.synchronize();
  return ok_status();
}

// In a job.
Status Checkpointer::write(int64_t step,
                           const std::vector<geometry::Piece>& pieces,
                           const geometry::ConstStateView& vectors,
                           uint64_t room) {
  const store::SaveId id{.step = step,
                         .generation = options_.manifest.generation()};
  RETURN_IF_ERROR(claim());
  // Before the first save: it may need the room.
  if (world_.rank() == 0 && !std::exchange(unfinished_removed_, true)) {
    const Status removed =
        store::remove_unfinished(*fs_, options_.folder, id.generation);
    if (!removed.ok() && removed.code() != Code::kNotFound)
      log_.warn("checkpoint_cleanup", {{"error", removed.to_string()}});
  }
  // "" or "zlib".
  store::WriteOptions options;
  ASSIGN_OR_RETURN(options.compression,
                   store::parse_compression(options_.manifest.compression()));
  options.stream.room = room;
  if (room > 0) {
    options.stream.in_thread = lower_priority_of_this_thread;
    options.taking = [this] { return begin_copy(); };
    options.taken = [this] { end_copy(); };
  }
  options.stream.idle = kIdleDuringTraining;
  options.stream.hurry = &hurry_;
  return store::write_shard(*fs_, options_.folder, id, world_.rank(), table_,
                            pieces, vectors, options)
      .status();
}

void Checkpointer::start_job(std::function<Status()> job) {
  disk_moved_ms_.store(monotonic_ms());
  job_.start(std::move(job));
}

// The staged copy, at low priority.
Status Checkpointer::write_staged(int64_t step) {
  lower_priority_of_this_thread();
  Status written = write(
      step, packed_, {staged_[0].span(), staged_[1].span(), staged_[2].span()},
      /*room=*/0);
  // Other saves copy into the buffers of the file, which are kept as well.
  if (options_.double_buffered && options_.manifest.compression().empty()) {
    for (engine::FlatBuffer& b : staged_) b = {};
    have_staging_ = false;
  }
  return written;
}

// `state` stays unchanged only until before_update(): it is copied at full
// priority, into the buffers that the file is written from or, since
// compression is slow, into the staging buffers first.
void Checkpointer::start_copy_and_write(const RankState& state) {
  {
    const std::lock_guard lock(copy_mutex_);
    copy_ = Copy::kDue;
    copied_ = state;
  }
  start_job([this, state] {
    // Whatever happens: an update would wait for the copy.
    struct Guard {
      Checkpointer* owner;
      ~Guard() { owner->end_copy(); }
    } const guard{this};
    return copy_and_write(state);
  });
}

// In a job.
Status Checkpointer::copy_and_write(const RankState& state) {
  Status written;
  if (options_.manifest.compression().empty()) {
    written = write(state.step, pieces_, state.vectors,
                    std::numeric_limits<uint64_t>::max());
  } else {
    written = begin_copy();
    if (written.ok()) {
      written = stage(state);
      end_copy();
      return written.ok() ? write_staged(state.step) : written;
    }
  }
  {
    const std::lock_guard lock(copy_mutex_);
    if (copy_ != Copy::kStaged) return written;
    RETURN_IF_ERROR(staged_status_);
  }
  return write_staged(state.step);
}

// In a job. Cancelled if before_update() has made the copy.
Status Checkpointer::begin_copy() {
  const std::lock_guard lock(copy_mutex_);
  if (copy_ == Copy::kStaged)
    return cancelled("the update of the next step but one came first");
  copy_ = Copy::kUnderWay;
  return ok_status();
}

void Checkpointer::end_copy() {
  {
    const std::lock_guard lock(copy_mutex_);
    copy_ = Copy::kNone;
  }
  copy_done_.notify_all();
}

void Checkpointer::before_update(int64_t step) {
  std::unique_lock lock(copy_mutex_);
  if (copy_ == Copy::kNone || copy_ == Copy::kStaged || copied_.step > step - 2)
    return;
  const int64_t since = monotonic_ms();
  const bool begun = copy_ == Copy::kUnderWay;
  ++copy_waits_;
  if (!begun) {
    staged_status_ = stage(copied_);
    copy_ = Copy::kStaged;
  }
  while (copy_ == Copy::kUnderWay) {
    copy_done_.wait_for(lock, std::chrono::milliseconds(10));
    // The copy may wait for buffers that the disk has not written yet.
    if (monotonic_ms() - disk_moved_ms_.load() < kQuietLimitMs) board_.tick();
  }
  const int64_t waited_ms = monotonic_ms() - since;
  copy_waited_ms_ += waited_ms;
  log_.warn("checkpoint_copy_late",
            {{"reason", begun ? "the copy took longer than a step"
                              : "the file is not open yet"},
             {"waited_ms", waited_ms},
             {"waits", copy_waits_.load()},
             {"waited_ms_total", copy_waited_ms_}});
}

void Checkpointer::abandon_for_handoff() {
  give_up_.store(true);
  if (plan_.phase() == SavePlan::Phase::kIdle) return;
  log_.info("checkpoint_abandoned", {{"checkpoint", plan_.saving_step()},
                                     {"reason", "in-memory handoff"}});
}

void Checkpointer::start_commit(pb::Manifest manifest) {
  start_job([this, manifest = std::move(manifest)] {
    lower_priority_of_this_thread();
    const int64_t step = manifest.step();
    const store::SaveId id{.step = step, .generation = manifest.generation()};
    auto done = store::commit(*fs_, options_.folder, manifest, world_.size(),
                              table_, options_.retention, origin());
    if (!done.ok()) {
      const Status removed = store::abandon(*fs_, options_.folder, id);
      if (!removed.ok())
        log_.warn("checkpoint_left_behind", {{"error", removed.to_string()}});
      return done.status();
    }
    if (!done->cleanup.ok())
      log_.warn("checkpoint_cleanup", {{"error", done->cleanup.to_string()}});
    board_.set_checkpoint_step(step);
    return ok_status();
  });
}

void Checkpointer::start_abandon(int64_t step) {
  start_job([this, step] {
    lower_priority_of_this_thread();
    return store::abandon(
        *fs_, options_.folder,
        {.step = step, .generation = options_.manifest.generation()});
  });
}

pb::Manifest Checkpointer::manifest_of(int64_t step) const {
  pb::Manifest m = options_.manifest;
  m.set_step(step);
  m.set_tokens(options_.first_tokens +
               (step - options_.first_step) * options_.tokens_per_step);
  m.set_sequences(options_.sequence_offset +
                  step * options_.sequences_per_step);
  m.set_time(unix_seconds());
  for (const pb::StepMetrics& r : recent_)
    if (r.step() <= step) *m.add_recent() = r;
  return m;
}

void Checkpointer::report_failure(int64_t step, const Status& status) {
  if (std::exchange(reported_, true)) return;
  log_.error("checkpoint_failed",
             {{"checkpoint", step}, {"error", status.to_string()}});
  board_.fail_save(status);
  board_.tick();
}

void Checkpointer::note_end(int64_t step, bool committed) {
  if (!committed) return;
  board_.set_checkpoint_error(lasting_error_);
  board_.tick();
  log_.info("checkpoint_saved", {{"checkpoint", step}});
}

bool Checkpointer::all_agree(bool ok) {
  float count = ok ? 1 : 0;
  const comm::RequestPtr r =
      world_.start_all_reduce(std::span<float>(&count, 1), comm::Op::kSum);
  const int64_t since = monotonic_ms();
  while (!r->test()) {
    if (monotonic_ms() - since < kQuietLimitMs) board_.tick();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return count == static_cast<float>(world_.size());
}

// Until the disk work of every rank is done. A rank whose own work does not
// move stops reporting progress first, so that it is the one that hangs; the
// others wait as long as any work moves, and then as long again.
void Checkpointer::wait_for_disks() {
  int64_t moved_ms = monotonic_ms();  // some work did
  for (;;) {
    const bool busy = job_.busy() && !job_.done();
    const bool moves = monotonic_ms() - disk_moved_ms_.load() < kQuietLimitMs;
    std::array<float, 2> all{busy ? 1.0F : 0.0F, busy && moves ? 1.0F : 0.0F};
    const comm::RequestPtr r =
        world_.start_all_reduce(std::span<float>(all), comm::Op::kSum);
    while (!r->test())
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (all[0] == 0) return;
    if (all[1] > 0) moved_ms = monotonic_ms();
    if (busy ? moves : monotonic_ms() - moved_ms < kQuietLimitMs) board_.tick();
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

// Completes the current save while all ranks wait.
Status Checkpointer::finish_save() {
  const int64_t step = plan_.saving_step();
  if (plan_.phase() == SavePlan::Phase::kWriting) {
    wait_for_disks();
    if (job_.busy()) write_status_ = job_.take();
    if (!write_status_.ok()) report_failure(step, write_status_);
    const bool all_written = all_agree(write_status_.ok());
    plan_.written();
    if (world_.rank() == 0) {
      if (all_written) {
        start_commit(std::move(manifest_));
      } else {
        start_abandon(step);
      }
    }
  }
  Status status = write_status_;
  wait_for_disks();
  if (world_.rank() == 0) {
    const Status ended = job_.busy() ? job_.take() : ok_status();
    if (status.ok()) status = ended;
    if (!status.ok()) report_failure(step, status);
  }
  const bool committed = all_agree(status.ok());
  plan_.ended(committed);
  note_end(step, committed);
  if (committed) return ok_status();
  return first_failure(status);
}

// That of the lowest rank that could not save itself; the same on all ranks.
Status Checkpointer::first_failure(const Status& own) {
  const bool failed = !own.ok() && own.code() != Code::kCancelled;
  int64_t from_last = failed ? world_.size() - world_.rank() : 0;
  world_.all_reduce(std::span<int64_t>(&from_last, 1), comm::Op::kMax);
  if (from_last == 0) return unavailable("another rank could not save");
  const auto rank = static_cast<int>(world_.size() - from_last);
  std::array<char, 256> text{};
  if (rank == world_.rank()) own.message().copy(text.data(), text.size() - 1);
  world_.broadcast(std::as_writable_bytes(std::span(text)), rank);
  return unavailable(fmt::format("rank {}: {}", rank, text.data()));
}

Status Checkpointer::save_and_wait(const RankState& state) {
  board_.set_phase(pb::RankStatus::CHECKPOINT);
  hurry_.store(true);
  // A failed save of an older step does not matter any more.
  if (plan_.phase() != SavePlan::Phase::kIdle) {
    const Status before = finish_save();
    if (!before.ok())
      log_.warn("previous_checkpoint_failed", {{"error", before.to_string()}});
  }
  if (plan_.saved_step() == state.step) return ok_status();
  reported_ = false;
  write_status_ = ok_status();
  plan_.begin(state.step);
  if (world_.rank() == 0) manifest_ = manifest_of(state.step);
  // The state does not change meanwhile, so it is written without a copy.
  start_job([this, state] {
    return write(state.step, pieces_, state.vectors, /*room=*/0);
  });
  return finish_save();
}

}  // namespace remesh::train
