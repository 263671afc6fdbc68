// What a user points to: a run directory, a checkpoint or a model of another
// program, and the tokenizer that belongs to it.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "parallel/geometry/model_config.h"
#include "proto/base/file_system.h"
#include "proto/base/status.h"
#include "worker/tokenizer/tokenizer.h"

namespace remesh::sample {

struct ModelFiles {
  std::string weights;  // as WeightSource::open() takes it
  // Of the tokenizer and what describes its text; "" if it is no folder's.
  std::string folder;
  // Of a run whose newest weights are wanted, which may be in memory: its
  // number and model; else 0.
  uint64_t run_id = 0;
  geometry::ModelConfig model;
  // The model that its adapters belong to, and its fingerprint.
  std::string base, base_fingerprint;
  std::unique_ptr<tokenizer::Tokenizer> tokenizer;
  // What precedes the first token that is predicted of a text, one token: that
  // which the files of the model name, or where they name none, as of an
  // imported checkpoint or one of Meta's models, those of the tokenizer; of a
  // run those of the model that it continues. Where none is named, the end of
  // another text, as in training.
  std::vector<int32_t> begin;
  // The same or nothing: what the model's tokenizer puts in front of a prompt.
  std::vector<int32_t> text_begin;
  std::set<int32_t> end;  // tokens that end a text
  // Tokens of the sequences that it was trained with; 0: not known.
  int64_t trained_length = 0;
};

struct ModelChoice {
  std::string path;
  int64_t step = -1;      // of the checkpoint of a run; -1: the newest
  std::string tokenizer;  // as open_tokenizer() takes it; "": the model's own
};

// NotFound if there is no model (but a run that has saved none may have its
// weights in memory), or no tokenizer and none was given; InvalidArgument if
// the one given is not the one of the training data.
Result<ModelFiles> find_model(FileSystem& fs, const ModelChoice& choice);

// InvalidArgument, naming the token, if one is not in the model's vocabulary.
Status check_vocabulary(const std::vector<int32_t>& tokens, int64_t vocab_size);

}  // namespace remesh::sample
