#include "worker/train/batch_source.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "parallel/geometry/batch.h"

namespace remesh::train {
namespace {

// Microbatches: fills a pipeline, and is read in a moment.
constexpr int64_t kRound = 32;

int64_t divide_up(int64_t n, int64_t by) { return (n + by - 1) / by; }

}  // namespace

Result<BatchSource> BatchSource::make(data::Dataset dataset,
                                      const BatchOptions& o) {
  if (o.local_batch < 1 || o.global_batch < 1 ||
      o.global_batch % o.local_batch != 0)
    return invalid_argument(
        fmt::format("train.local_batch_size: {} must divide "
                    "train.global_batch_size, {}",
                    o.local_batch, o.global_batch));
  std::vector<data::Sampler::MixtureMember> mixture;
  std::vector<int64_t> val_windows;
  int64_t validated = 0;
  for (const data::Member& m : dataset.members()) {
    mixture.push_back({m.train.num_tokens(), m.weight});
    val_windows.push_back(data::num_windows(m.val.num_tokens(), o.seq_len));
    validated += val_windows.back() > 0 ? 1 : 0;
  }
  ASSIGN_OR_RETURN(data::Sampler sampler,
                   data::Sampler::make(o.seed, mixture, o.seq_len,
                                       o.global_batch, o.offset));
  auto shared = std::make_unique<Shared>(
      Shared{o, std::move(dataset), std::move(sampler), {}});
  std::vector<size_t> with_windows;
  for (size_t m = 0; m < val_windows.size(); ++m) {
    const int64_t wanted =
        divide_up(o.eval_sequences, std::max<int64_t>(1, validated));
    shared->eval_windows.push_back(
        data::validation_windows(val_windows[m], wanted));
    if (!shared->eval_windows.back().empty()) with_windows.push_back(m);
  }
  BatchSource out(std::move(shared));
  out.validated_ = std::move(with_windows);
  return out;
}

void BatchSource::read_step(const Shared& shared, int64_t step,
                            const std::stop_token& stop, Batch* out) {
  const BatchOptions& o = shared.options;
  const geometry::MicrobatchRange mine = geometry::share_of(
      o.global_batch / o.local_batch, o.shares, o.dp, o.dp_index);
  std::vector<Window> windows;
  for (int64_t i = mine.begin * o.local_batch; i < mine.end * o.local_batch;
       ++i) {
    const data::Sampler::Sequence s = shared.sampler.at(step, i);
    windows.push_back({&shared.dataset.members()[s.member].train, s.window});
  }
  out->status = read(o, windows, stop, out);
  out->step = step;
}

Result<std::span<const model::MicroBatch>> BatchSource::step(int64_t step) {
  if (reading_.valid()) reading_.get();
  if (next_->step != step) read_step(*shared_, step, {}, next_.get());
  std::swap(batch_, next_);
  reading_ = std::async(
      std::launch::async,
      [shared = shared_.get(), step, next = next_.get(),
       stop = stop_.get_token()] { read_step(*shared, step + 1, stop, next); });
  RETURN_IF_ERROR(batch_->status);
  return std::span<const model::MicroBatch>(batch_->microbatches);
}

int64_t BatchSource::validation_rounds(size_t member) const {
  const BatchOptions& o = shared_->options;
  const auto n = static_cast<int64_t>(shared_->eval_windows[member].size());
  const int64_t microbatches = divide_up(n, o.local_batch);
  return divide_up(geometry::even_share(microbatches, o.dp, 0).size(), kRound);
}

Result<std::span<const model::MicroBatch>> BatchSource::validation(
    size_t member, int64_t round) {
  const BatchOptions& o = shared_->options;
  const std::vector<int64_t>& all = shared_->eval_windows[member];
  const auto n = static_cast<int64_t>(all.size());
  const int64_t each = o.local_batch;
  const geometry::MicrobatchRange mine =
      geometry::even_share(divide_up(n, each), o.dp, o.dp_index);
  const int64_t first = std::min(mine.end, mine.begin + round * kRound);
  const int64_t last = std::min(mine.end, first + kRound);
  const auto begin = static_cast<size_t>(std::min(n, first * each));
  const auto end = static_cast<size_t>(std::min(n, last * each));
  std::vector<Window> windows;
  for (size_t i = begin; i < end; ++i)
    windows.push_back({&shared_->dataset.members()[member].val, all[i]});
  batch_->step = -1;
  RETURN_IF_ERROR(read(o, windows, {}, batch_.get()));
  return std::span<const model::MicroBatch>(batch_->microbatches);
}

Status BatchSource::read(const BatchOptions& o,
                         const std::vector<Window>& windows,
                         const std::stop_token& stop, Batch* out) {
  const auto T = static_cast<size_t>(o.seq_len);
  const auto each = static_cast<size_t>(o.local_batch);
  out->tokens.resize(windows.size() * T);
  out->targets.resize(windows.size() * T);
  out->document_starts.clear();
  out->microbatches.clear();
  std::vector<size_t> ends;  // in document_starts, by window
  std::vector<int64_t> starts;
  for (size_t w = 0; w < windows.size(); ++w) {
    if (stop.stop_requested()) return cancelled("nobody waits for the batch");
    if (o.before_sequence) o.before_sequence();
    RETURN_IF_ERROR(windows[w].split->read_window(
        windows[w].number, o.seq_len, std::span(out->tokens).subspan(w * T, T),
        std::span(out->targets).subspan(w * T, T), &starts));
    if (o.document_mask)
      for (const int64_t t : starts)
        out->document_starts.push_back(static_cast<int64_t>(w % each * T) + t);
    ends.push_back(out->document_starts.size());
  }
  for (size_t w = 0; w < windows.size(); w += each) {
    const size_t n = std::min(each, windows.size() - w);
    const size_t begin = w == 0 ? 0 : ends[w - 1];
    out->microbatches.push_back(
        {.tokens_BT = out->tokens.data() + w * T,
         .targets_BT = out->targets.data() + w * T,
         .B = static_cast<int64_t>(n),
         .T = o.seq_len,
         .document_starts = std::span(out->document_starts)
                                .subspan(begin, ends[w + n - 1] - begin)});
  }
  return ok_status();
}

}  // namespace remesh::train
