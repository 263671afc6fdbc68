#include "tests/sim/cluster.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>

#include "coordinator/core/job_shape.h"
#include "proto/base/rng.h"
#include "tests/sim/parts.h"
#include "tests/testing/sentences.h"

namespace remesh::sim {
namespace {

constexpr int64_t kCoordinatorTickMs = 50;

const pb::Report* report_in(const core::Input& input) {
  const auto* m = std::get_if<core::MessageReceived>(&input);
  return m != nullptr && m->message.has_report() ? &m->message.report()
                                                 : nullptr;
}

}  // namespace

Cluster::Cluster(const SimOptions& options)
    : options_(options),
      random_(options.seed * 0x9E3779B97F4A7C15ULL + 1),
      hostile_rng_(options.seed * 0xD1B54A32D192ED03ULL + 1),
      later_random_(options.seed * 0x9E3779B97F4A7C15ULL + 2),
      upgrade_random_(options.seed * 0x8CB92BA72F3D8DD7ULL + 1),
      liveness_random_(options.seed * 0x9E3779B97F4A7C15ULL + 3),
      host_random_(options.seed * 0xA24BAED4963EE407ULL + 2),
      batch_random_(options.seed * 0x94D049BB133111EBULL + 1),
      disk_random_(options.seed * 0xBF58476D1CE4E5B9ULL + 1) {
  upgrades_ = upgrade_random_.below(6) == 0;
  hostile_ = hostile_rng_() % 8 == 0 ? 2 : 0;
  if (options.hostile >= 0) hostile_ = options.hostile;
  auto* e = job_.mutable_elastic();
  job_.mutable_job()->set_name("sim");
  job_.mutable_train()->set_steps(uniform(8, 25));
  job_.mutable_train()->set_global_batch_size(8);
  job_.mutable_train()->set_local_batch_size(1);
  job_.mutable_checkpoint()->set_interval(uniform(2, 8));
  e->set_join_window_ms(uniform(0, 600));
  e->set_dead_after_ms(chance(0.8) ? uniform(600, 1500) : 3500);
  e->set_report_every_ms(uniform(50, 200));
  e->set_hang_after_s(static_cast<double>(uniform(15, 30)) / 10);
  e->set_max_same_failures(1000);
  e->set_max_failures_without_progress(10000);
  e->set_min_slots(uniform(1, 2));
  pb::Model* m = job_.mutable_model();
  m->set_n_kv_heads(m->n_heads());
  m->set_hidden_dim(64);
  m->set_vocab_size(257);
  if (chance(0.3)) {
    // Degrees for which the workers present at the end suffice.
    pb::Parallel* p = job_.mutable_parallel();
    p->set_tensor_parallel_degree(chance(0.5) ? -1 : uniform(1, 2));
    p->set_pipeline_parallel_degree(chance(0.5) ? -1 : 1);
    p->set_context_parallel_degree(chance(0.5) ? -1 : 1);
  } else if (chance(0.3)) {
    e->add_layouts("dp3");
    e->add_layouts(chance(0.5) ? "tp2" : "pp2");
    if (e->min_slots() == 1) e->add_layouts("dp1");
  }
  e->set_keep_state(chance(0.8));
  e->set_replicas(chance(0.8) ? 1 : uniform(0, 2));
  e->set_replicate_every(chance(0.8) ? 1 : uniform(0, 3));
  e->set_rejoin_wait_ms(chance(0.5) ? 3000 : uniform(0, 1000));
  job_.mutable_parallel()->set_zero_stage(chance(0.5) ? 0 : 1);
  workers_a_host_ = chance(0.6) ? 1 : 2;
  table_ = geometry::ParamTable::make(core::shape_of(job_)->model);
  loss_ = chance(0.5) ? 0.0 : static_cast<double>(uniform(1, 30)) / 100;
  duplicate_ = chance(0.5) ? 0.0 : 0.1;
  max_latency_ms_ = chance(0.5) ? 2 : uniform(5, 200);
  crash_between_actions_ = chance(0.5) ? 0.0 : 0.001;
  stop_ = chance(0.2);
  chain_.push_back(hash64("initial weights"));
  choose_bad_host();
  choose_disk();
  if (batch_random_.below(2) == 0)
    max_batch_ms_ = batch_random_.below(2) == 0 ? 1 : 10;
}

Cluster::Cluster(pb::Job job) : scripted_(true), job_(std::move(job)) {
  table_ = geometry::ParamTable::make(core::shape_of(job_)->model);
  chain_.push_back(hash64("initial weights"));
  faults_on_ = false;
}

Cluster::~Cluster() = default;

void Cluster::at(int64_t delay_ms, std::function<void()> what) {
  queue_.push_back(
      {now_ + std::max<int64_t>(0, delay_ms), ++order_, std::move(what)});
  std::push_heap(queue_.begin(), queue_.end());
}

void Cluster::takes(int64_t ms, const std::function<void()>& what) {
  scripted_ ? what() : at(ms, what);
}

void Cluster::by_itself(int64_t delay_ms, const std::function<void()>& what) {
  if (!scripted_) at(delay_ms, what);
}

void Cluster::later(const Worker& w, int64_t delay_ms,
                    const std::function<void(Worker&)>& what) {
  at(delay_ms, [this, name = w.name, life = w.incarnation, what] {
    Worker& x = *workers_[name];
    if (x.agent && x.incarnation == life) what(x);
  });
}

void Cluster::violated(const std::string& what) {
  if (violation_.empty())
    violation_ = fmt::format("seed {}, t={} ms: {}", options_.seed, now_, what);
}

void Cluster::trace(const std::string& what) {
  if (options_.trace)
    std::printf("%8ld %s\n", static_cast<long>(now_), what.c_str());
}

std::string Cluster::run() {
  start_coordinator();
  const int64_t n = num_workers_ > 0 ? num_workers_ : uniform(1, 4);
  for (int64_t i = 0; i < n; ++i) {
    Worker& w = add_worker();
    at(uniform(0, 300), [this, &w] { start_worker(w); });
  }
  schedule_fault();
  if (!calm_) schedule_liveness_fault();
  if (stop_)
    at(uniform(500, options_.fault_ms), [this] {
      pb::Command c;
      c.set_kind(pb::Command::STOP);
      c.set_discard(chance(0.3));
      ask(c);
    });
  at(options_.fault_ms, [this] { heal(); });
  while (!queue_.empty() && violation_.empty() && !done_ && !inconclusive_ &&
         !rightly_failed_) {
    if (queue_.front().when > options_.end_ms) break;
    step_once();
  }
  stats_.end_ms = now_;
  stats_.steps = static_cast<int64_t>(metrics_.size());
  stats_.inconclusive = inconclusive_;
  if (!violation_.empty() || inconclusive_ || rightly_failed_)
    return violation_;
  if (!done_) {
    violated("faults stopped at {} ms and the job is not done: {}",
             options_.fault_ms,
             coordinator_ ? coordinator_->status().ShortDebugString()
                          : "no coordinator");
    return violation_;
  }
  if (exit_code_ != 0) violated("job ended with {}", exit_code_);
  if (stats_.gaps == 0 &&
      static_cast<int64_t>(metrics_.size()) != job_.train().steps())
    violated("{} steps in metrics, {} wanted", metrics_.size(),
             job_.train().steps());
  check_leftovers();
  return violation_;
}

void Cluster::step_once() {
  std::pop_heap(queue_.begin(), queue_.end());
  const Timed next = std::move(queue_.back());
  queue_.pop_back();
  now_ = std::max(now_, next.when);  // a script lets it pass
  next.what();
}

// Every worker that was up long enough has been told of the end of the job. A
// worker that could not be told kills its ranks eventually.
void Cluster::check_leftovers() {
  const bool quiet = now_ > options_.fault_ms + kSettledMs;
  faults_on_ = false;
  for (const auto& [name, w] : workers_)
    if (quiet && w->agent && w->trouble_until < now_ - kSettledMs)
      violated(name + " was not told that the job has ended");
  const auto left = [this]() -> std::string {
    for (const auto& [name, w] : workers_)
      for (const auto& [rank, r] : w->ranks)
        if (r.alive && w->agent) return fmt::format("{} on {}", rank, name);
    return "";
  };
  const int64_t until = now_ + 130'000;
  while (!queue_.empty() && violation_.empty() && !left().empty() &&
         now_ < until)
    step_once();
  if (!left().empty()) violated("a rank outlived the job: " + left());
}

// ------------------------------------------------------------- coordinator

void Cluster::start_coordinator(bool resume) {
  lose_unwritten();
  decided_ = adopted_ = journal_;
  // A resumed job does not wait for earlier workers.
  if (journal_ && !resume) restarted_ms_ = now_;
  resuming_ = resuming_ || resume;
  core::Options o;
  o.job = job_;
  o.run_dir = "/run";
  o.host = "c";
  if (!metrics_.empty()) {
    o.last_finished_step = metrics_.back().step();
    o.recent_metrics = metrics_;
  }
  for (const pb::StepMetrics& m : metrics_)
    if (std::none_of(o.first_steps.begin(), o.first_steps.end(),
                     [&](auto& f) { return f.generation == m.generation(); }))
      o.first_steps.push_back({m.generation(), m.step()});
  o.restored = journal_;
  o.resume = resuming_;
  o.epoch_floor = (scripted_ ? 1000 : 1) + static_cast<uint64_t>(now_ / 1000);
  // Epochs start from the time, so none is repeated after an old journal.
  if (forgot_ && journal_) o.epoch_floor = epoch_ + 1;
  // It starts on another host, or its clock has been set.
  if (!scripted_)
    o.unix_offset_s =
        1e6 + static_cast<double>(hash64(fmt::format("{} {}", options_.seed,
                                                     coordinator_life_)) %
                                  7200);
  told_saved_ = journal_ ? journal_->saved_step() : 0;
  lines_ = metrics_.size();
  coordinator_frozen_until_ = 0;
  newest_heard_.clear();
  heard_ms_.clear();
  connection_lost_ms_.clear();
  joined_ms_.clear();
  for (const auto& [name, w] : workers_)
    reconnected_at_[name] =
        faults_on_ && chance(0.3) ? now_ + uniform(0, 2000) : 0;
  excuse_slow_fences();
  coordinator_ = std::make_unique<core::Coordinator>(std::move(o));
  const uint64_t life = ++coordinator_life_;
  settling_ = false;
  trace("coordinator starts");
  for (const core::Action& a : coordinator_->start(now_)) {
    note(a);
    add_to_digest(a);
    do_action(a);
    if (coordinator_life_ != life || !coordinator_) return;
  }
  by_itself(uniform(0, kCoordinatorTickMs),
            [this, life] { coordinator_tick(life); });
}

void Cluster::crash_coordinator() {
  if (!coordinator_ || done_) return;
  trace("coordinator crashes");
  coordinator_.reset();
  ++coordinator_life_;
  lose_unwritten();
  // Rarely, the journal is deleted; the restart is then later.
  const bool forgets = faults_on_ && chance(0.03) && !calm_;
  if (forgets) trace("the journal is lost");
  if (forgets) journal_.reset();
  forgot_ = forgot_ || forgets;
  if (forgets) end_rival("its journal is gone");
  if (faults_on_ && !forgets && !calm_ && later_random_.chance(0.08))
    roll_journal_back();
  if (faults_on_ && later_random_.chance(0.2)) lose_unsynced_metrics();
  const uint64_t life = coordinator_life_;
  at(forgets ? uniform(1100, 2500) : uniform(10, 2500), [this, life] {
    when_disk_answers([this, life] {
      if (!coordinator_ && life == coordinator_life_) start_coordinator();
    });
  });
}

// The last step whose metrics are durable.
int64_t Cluster::sync_metrics() {
  constexpr int64_t kSyncMs = 300;
  if (now_ >= next_sync_ms_ && disk_ != Disk::kStalled) {
    synced_lines_ = metrics_.size() - unwritten_lines_;
    next_sync_ms_ = now_ + kSyncMs;
  }
  return synced_lines_ == 0 ? 0 : metrics_[synced_lines_ - 1].step();
}

// The coordinator's host crashes with it.
void Cluster::lose_unsynced_metrics() {
  trace(fmt::format("{} lines of metrics are lost",
                    metrics_.size() - synced_lines_));
  cut_metrics(synced_lines_);
  end_rival("it is on the same host");
}

// The journal is replaced by a backup.
void Cluster::roll_journal_back() {
  if (backups_.empty()) return;
  const int64_t last = static_cast<int64_t>(backups_.size()) - 1;
  const pb::Durable& backup =
      backups_[static_cast<size_t>(later_random_.uniform(0, last))];
  // The end in a backup is believed while no record goes beyond it.
  if (backup.phase() >= pb::Durable::DONE &&
      (synced_lines_ == 0 ||
       metrics_[synced_lines_ - 1].generation() <= backup.generation()))
    return;
  end_rival("its journal is gone");
  journal_ = backup;
  forgot_ = true;
  trace(fmt::format("the journal is rolled back to generation {}",
                    journal_->generation()));
}

void Cluster::coordinator_tick(uint64_t life) {
  if (life != coordinator_life_ || !coordinator_) return;
  if (now_ >= coordinator_frozen_until_) drive_coordinator(tick_of_disk());
  if (now_ >= coordinator_frozen_until_) poll_mail();
  if (now_ >= coordinator_frozen_until_) attack_coordinator();
  at(kCoordinatorTickMs, [this, life] { coordinator_tick(life); });
}

void Cluster::drive_coordinator(const core::Input& event) {
  if (!coordinator_ && rival_) rival_mail_.push_back(event);
  if (!coordinator_) return;
  const bool waits = waits_to_settle(event);
  const auto actions =
      waits ? coordinator_->take(event, now_) : coordinator_->on(event, now_);
  // As if the coordinator had just been restored.
  if (options_.reword)
    for_each_sentence(const_cast<pb::Durable*>(&coordinator_->durable()),
                      reworded);
  if (waits) settle_later();
  if (const pb::Report* r = report_in(event);
      r != nullptr && coordinator_->roster().newest_is(*r))
    note_place(*r);
  perform(actions);
}

// Like the daemon, which decides once for all messages that have arrived.
bool Cluster::waits_to_settle(const core::Input& event) const {
  return max_batch_ms_ > 0 &&
         std::holds_alternative<core::MessageReceived>(event);
}

void Cluster::settle_later() {
  if (settling_) return;
  settling_ = true;
  const int64_t delay_ms = batch_random_.below(max_batch_ms_ + 1);
  at(delay_ms, [this, life = coordinator_life_] { settle(life); });
}

void Cluster::settle(uint64_t life) {
  if (life != coordinator_life_ || !coordinator_) return;
  if (now_ < coordinator_frozen_until_)
    return at(coordinator_frozen_until_ - now_, [this, life] { settle(life); });
  settling_ = false;
  perform(coordinator_->settle(now_));
}

void Cluster::perform(const std::vector<core::Action>& actions) {
  const uint64_t life = coordinator_life_;
  for (const core::Action& a : actions) {
    note(a);
    if (const auto* e = std::get_if<core::EmitEvent>(&a);
        e != nullptr && e->record.event() == events::kReportRefused.name)
      trace("event " + e->record.ShortDebugString());
    if (answers_hostile(a)) continue;
    add_to_digest(a);
    if (faults_on_ && chance(crash_between_actions_)) {
      ++stats_.faults;
      return crash_coordinator();
    }
    do_action(a);
    if (life != coordinator_life_ || done_) return;
  }
}

// The listing may be a few seconds old, as from NFS. A checkpoint that the
// coordinator does not know of, either, would be missed, so the scanner changes
// the folder before it lists it.
core::CheckpointsScanned Cluster::scan() {
  core::CheckpointsScanned s;
  s.claimed = claimed_;
  newest_scanned_ = 0;
  const int64_t listed_ms = faults_on_ && later_random_.chance(0.2)
                                ? now_ - later_random_.uniform(0, 3000)
                                : now_;
  for (const auto& [step, saved] : checkpoints_) {
    if (saved.ms > listing_ms_ || (saved.ms > listed_ms && step <= told_saved_))
      continue;
    if (damaged_.contains(step)) {
      const std::string path = fmt::format("step-{}", step);
      s.invalid.push_back(
          {.step = step, .path = path, .why = path + ": checksum differs"});
      if (options_.reword)
        s.invalid.back().why = reworded(s.invalid.back().why);
      continue;
    }
    if (outage_.empty() && in_outage("")) {
      const std::string path = fmt::format("step-{}", step);
      s.invalid.push_back({.step = step,
                           .path = path,
                           .code = Code::kIo,
                           .why = path + ": " + kReadError});
      // What nobody knows of is not waited for: it may be of another branch.
      if (!abandoned(step, saved.generation) &&
          (step <= told_saved_ ||
           (!metrics_.empty() && step <= metrics_.back().step())))
        newest_scanned_ = step;
      continue;
    }
    s.valid.push_back({.step = step,
                       .generation = saved.generation,
                       .path = fmt::format("step-{}", step),
                       .recent = saved.recent});
    if (!abandoned(step, saved.generation)) newest_scanned_ = step;
  }
  return s;
}

void Cluster::do_action(const core::Action& action) {
  if (const auto* p = std::get_if<core::Persist>(&action)) {
    if (finds_lines_of_rival()) return;
    check_persist(p->durable);
    decided_ = p->durable;
    write([this, d = p->durable] { put_into_journal(d); });
  } else if (const auto* s = std::get_if<core::SendDirective>(&action)) {
    // A script may report a worker that does not exist.
    if (!workers_.contains(s->directive.worker())) return;
    check_directive(s->directive);
    pb::Directive directive = s->with_assignment();
    if (options_.reword) for_each_sentence(&directive, reworded);
    hold(directive);
  } else if (const auto* f = std::get_if<core::SendFence>(&action)) {
    deliver_to_worker(f->worker, agent::FenceOutReceived{f->fence});
  } else if (const auto* m = std::get_if<core::AppendMetrics>(&action)) {
    if (finds_lines_of_rival()) return;
    check_metrics(m->metrics);
    metrics_.push_back(m->metrics);
    ++lines_;
    ++unwritten_lines_;
    write([this] { --unwritten_lines_; });
  } else if (std::get_if<core::ScanCheckpoints>(&action) != nullptr) {
    then([this, life = coordinator_life_] {
      at(uniform(1, chance(0.9) ? 20 : 1000), [this, life] {
        when_disk_answers([this, life] {
          if (life == coordinator_life_) drive_coordinator(scan());
        });
      });
    });
  } else if (const auto* v = std::get_if<core::EmitEvent>(&action)) {
    if (options_.trace) trace("event " + v->record.ShortDebugString());
    pb::EventRecord record = v->record;
    for_each_sentence(&record, original);
    check_event(record);
    write([] {});
  } else if (const auto* x = std::get_if<core::Exit>(&action)) {
    then([this, exit = *x] {
      trace("coordinator exits " + exit.message);
      if (journal_->phase() == pb::Durable::STOPPED) {
        by_itself(uniform(0, 3000),
                  [this] { when_disk_answers([this] { resume(); }); });
      } else {
        done_ = true;
        exit_code_ = exit.code;
      }
    });
  }
}

// `remesh resume` of the stopped job.
void Cluster::resume() {
  trace("resumed");
  if (!stop_) violated("the job stopped without a request");
  stop_ = false;
  backups_.assign(1, *journal_);
  start_coordinator(/*resume=*/true);
  for (auto& [name, w] : workers_) w->left = w->left && w->terminated;
  for (auto& [name, w] : workers_) start_worker(*w);
  if (!faults_on_) start_worker(add_worker());
}

// A suspended coordinator receives its messages when it continues.
void Cluster::arrive(const std::string& from, const core::Input& event) {
  if (reconnected_at_[from] > now_) return;
  if (now_ < coordinator_frozen_until_)
    return at(coordinator_frozen_until_ - now_,
              [this, from, event] { arrive(from, event); });
  const pb::Report* r = report_in(event);
  const auto follows = [&] {
    return r != nullptr && coordinator_ && coordinator_->roster().newest_is(*r);
  };
  const bool again = follows();
  const bool known = r != nullptr && is_known(r->worker());
  drive_coordinator(event);
  if (!follows() || again) return;
  heard_ms_[from] = now_;
  connection_lost_ms_.erase(from);
  check_heard(*r);
  note_impostor(*r);
  if (known && r->incarnation() != workers_.at(from)->incarnation)
    violated("the name of a live worker was taken: " + from);
}

void Cluster::when_awake(const core::Input& event) {
  if (now_ >= coordinator_frozen_until_) return drive_coordinator(event);
  at(coordinator_frozen_until_ - now_, [this, event] { when_awake(event); });
}

void Cluster::ask(const pb::Command& command) {
  when_awake(core::CommandReceived{1, command});
}

}  // namespace remesh::sim
