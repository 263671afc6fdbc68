#include "worker/train/batch_source.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "parallel/geometry/batch.h"

namespace remesh::train {

Result<BatchSource> BatchSource::make(data::Dataset dataset,
                                      const BatchOptions& o) {
  if (o.local_batch < 1 || o.global_batch < 1 ||
      o.global_batch % o.local_batch != 0)
    return invalid_argument(
        fmt::format("train.local_batch_size: {} must divide "
                    "train.global_batch_size, {}",
                    o.local_batch, o.global_batch));
  std::vector<data::Sampler::Source> sources;
  std::vector<int64_t> val_windows;
  int64_t validated = 0;
  for (const data::Member& m : dataset.members()) {
    sources.push_back({m.train.num_tokens(), m.weight});
    val_windows.push_back(data::num_windows(m.val.num_tokens(), o.seq_len));
    validated += val_windows.back() > 0 ? 1 : 0;
  }
  ASSIGN_OR_RETURN(data::Sampler sampler,
                   data::Sampler::make(o.seed, sources, o.seq_len,
                                       o.global_batch, o.offset));
  BatchSource source(std::move(dataset), std::move(sampler), o);
  for (size_t m = 0; m < val_windows.size(); ++m) {
    const int64_t wanted =
        (o.eval_sequences + validated - 1) / std::max<int64_t>(1, validated);
    source.eval_windows_.push_back(
        data::validation_windows(val_windows[m], wanted));
    if (!source.eval_windows_.back().empty()) source.validated_.push_back(m);
  }
  return source;
}

Result<std::span<const model::MicroBatch>> BatchSource::step(int64_t step) {
  const geometry::MicrobatchRange mine =
      geometry::share_of(options_.global_batch / options_.local_batch,
                         options_.shares, options_.dp, options_.dp_index);
  std::vector<Window> windows;
  for (int64_t i = mine.begin * options_.local_batch;
       i < mine.end * options_.local_batch; ++i) {
    const data::Sampler::Sequence s = sampler_.at(step, i);
    windows.push_back({&dataset_.members()[s.source].train, s.window});
  }
  RETURN_IF_ERROR(read(windows));
  return std::span<const model::MicroBatch>(microbatches_);
}

Result<std::span<const model::MicroBatch>> BatchSource::validation(
    size_t member) {
  const std::vector<int64_t>& all = eval_windows_[member];
  const auto n = static_cast<int64_t>(all.size());
  const int64_t each = options_.local_batch;
  const geometry::MicrobatchRange mine = geometry::even_share(
      (n + each - 1) / each, options_.dp, options_.dp_index);
  const auto begin = static_cast<size_t>(std::min(n, mine.begin * each));
  const auto end = static_cast<size_t>(std::min(n, mine.end * each));
  std::vector<Window> windows;
  for (size_t i = begin; i < end; ++i)
    windows.push_back({&dataset_.members()[member].val, all[i]});
  RETURN_IF_ERROR(read(windows));
  return std::span<const model::MicroBatch>(microbatches_);
}

Status BatchSource::read(const std::vector<Window>& windows) {
  const auto T = static_cast<size_t>(options_.seq_len);
  const auto each = static_cast<size_t>(options_.local_batch);
  tokens_.resize(windows.size() * T);
  targets_.resize(windows.size() * T);
  document_starts_.clear();
  std::vector<size_t> ends;  // in document_starts_, by window
  std::vector<int64_t> starts;
  for (size_t w = 0; w < windows.size(); ++w) {
    RETURN_IF_ERROR(windows[w].split->read_window(
        windows[w].number, options_.seq_len,
        std::span(tokens_).subspan(w * T, T),
        std::span(targets_).subspan(w * T, T), &starts));
    if (options_.document_mask)
      for (const int64_t t : starts)
        document_starts_.push_back(static_cast<int64_t>(w % each * T) + t);
    ends.push_back(document_starts_.size());
  }
  microbatches_.clear();
  for (size_t w = 0; w < windows.size(); w += each) {
    const size_t n = std::min(each, windows.size() - w);
    const size_t begin = w == 0 ? 0 : ends[w - 1];
    microbatches_.push_back(
        {.tokens_BT = tokens_.data() + w * T,
         .targets_BT = targets_.data() + w * T,
         .B = static_cast<int64_t>(n),
         .T = options_.seq_len,
         .document_starts = std::span(document_starts_)
                                .subspan(begin, ends[w + n - 1] - begin)});
  }
  return ok_status();
}

}  // namespace remesh::train
