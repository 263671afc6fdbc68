// What a rank reads and computes with, and whether its peers do the same.
#include <fmt/format.h>

#include <array>
#include <utility>

#include "parallel/jobfile/jobfile.h"
#include "proto/base/check.h"
#include "worker/train/trainer.h"

namespace remesh::train {
namespace {

// Not permanent: another host may have the right one.
Status check_data(const data::Dataset& here, const std::string& id,
                  const std::string& whose) {
  if (here.data_id() == id) return ok_status();
  return unavailable(
      fmt::format("data.path: {} on this host is data set {}, but that of {} "
                  "is {}; put the same folder there",
                  here.dir(), here.data_id(), whose, id));
}

}  // namespace

// Collective: every rank reads the data and the frozen weights, and at first
// the initial ones, that rank 0 reads.
Status Trainer::check_inputs() {
  std::array<char, 256> first{};
  const std::string& id = data_id();
  const std::string& mine =
      engine_->base() != nullptr ? base_fingerprint_ : init_fingerprint_;
  CHECK(id.size() + mine.size() + 2 < first.size());
  if (world_->rank() == 0) {
    id.copy(first.data(), id.size());
    mine.copy(&first.at(id.size() + 1), mine.size());
  }
  world_->broadcast(std::as_writable_bytes(std::span(first)), 0);
  const std::string data(first.data());
  const std::string weights(&first.at(data.size() + 1));
  if (batches_)
    RETURN_IF_ERROR(check_data(batches_->dataset(), data, "rank 0"));
  if (assignment_.rescue()) {
    int64_t lacking = can_train_ ? 0 : 1;
    world_->all_reduce(std::span<int64_t>(&lacking, 1), comm::Op::kMax);
    can_train_ = lacking == 0;
  }
  if (weights == mine) return ok_status();
  return unavailable(fmt::format(
      "model.init_from: {} on this host has the weights {}, that of rank 0 {}; "
      "put the same ones there",
      jobfile::init_path(job_.model()), mine, weights));
}

// The state of a rescue can be saved without what only steps need, if it is
// known which one that is.
Status Trainer::or_rescue(Status opened, const std::string& known) {
  if (opened.ok() || !assignment_.rescue() || known.empty()) return opened;
  can_train_ = false;
  log_.warn("rescue_without_inputs", {{"error", opened.to_string()}});
  return ok_status();
}

Status Trainer::open_data(int dp_index) {
  ASSIGN_OR_RETURN(data::Dataset dataset,
                   data::Dataset::open(job_.data().path()));
  if (dataset.token_limit() > job_.model().vocab_size())
    return invalid_argument(fmt::format(
        "model.vocab_size: {}, but the tokens of the data set {} are up to {}; "
        "allowed: above that",
        job_.model().vocab_size(), dataset.dir(), dataset.token_limit() - 1));
  if (!assignment_.data_id().empty())
    RETURN_IF_ERROR(check_data(dataset, assignment_.data_id(), "the run"));
  const pb::Train& t = job_.train();
  const int64_t offset = job_.data().sequence_offset();
  if (offset + assignment_.source().step() * t.global_batch_size() < 0)
    return invalid_argument(fmt::format(
        "data.sequence_offset = {}: step {} would use sequences before the "
        "first",
        offset, assignment_.source().step() + 1));
  ASSIGN_OR_RETURN(
      batches_, BatchSource::make(std::move(dataset),
                                  {.seed = t.seed(),
                                   .seq_len = t.seq_len(),
                                   .global_batch = t.global_batch_size(),
                                   .local_batch = t.local_batch_size(),
                                   .offset = job_.data().sequence_offset(),
                                   .eval_sequences = t.eval_sequences(),
                                   .document_mask = job_.data().document_mask(),
                                   .shares = shares(),
                                   .dp = layout_.dp,
                                   .dp_index = dp_index}));
  return ok_status();
}

model::Dtype Trainer::dtype() {
  if (job_.train().dtype() != "bf16") return model::Dtype::kFp32;
  const bool has = backend_->supports_bf16();
  if (has && peers_have_bf16_) return model::Dtype::kBf16;
  log_.warn("dtype", {{"requested", "bf16"},
                      {"used", "fp32"},
                      {"reason", has ? "another rank's processor has no bf16 "
                                       "instructions"
                                     : "this processor has no bf16 "
                                       "instructions"},
                      {"processor", backend_->description()}});
  return model::Dtype::kFp32;
}

// Tensor and context parallel ranks exchange activations of the compute type:
// all use fp32 if one processor has no bf16. Returns whether this rank would
// have used bf16. Collective.
bool Trainer::agree_on_dtype() {
  if (job_.train().dtype() != "bf16") return false;
  const bool has = backend_->supports_bf16();
  int64_t lacking = has ? 0 : 1;
  world_->all_reduce(std::span<int64_t>(&lacking, 1), comm::Op::kMax);
  peers_have_bf16_ = lacking == 0;
  return has && !peers_have_bf16_;
}

}  // namespace remesh::train
