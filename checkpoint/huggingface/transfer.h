// Models in and out: a Hugging Face folder becomes a checkpoint, and the other
// way round. Both work in blocks of some hundred MB, whatever the model's size,
// and the result appears complete or not at all.
//
// Threads: any, each with its own folders.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "checkpoint/huggingface/model_folder.h"
#include "checkpoint/store/store.h"

namespace remesh::huggingface {

// Bytes of weights moved so far, and in all.
using Progress = std::function<void(uint64_t done, uint64_t total)>;

// The job that the manifest of an imported checkpoint names.
inline constexpr char kImportJob[] = "import";

// Writes the weights as checkpoint OUT/step-00000000, with moments of zero, and
// returns it. AlreadyExists if `out` has anything in it.
Result<store::CommitResult> import_model(FileSystem& fs,
                                         const ModelFolder& model,
                                         const std::string& out,
                                         const Progress& progress);

struct ExportOptions {
  Dtype dtype = Dtype::kBf16;
  // Largest size of a file, unless a single tensor is larger.
  uint64_t shard_bytes = 5'000'000'000;
  // A Hugging Face folder whose tokenizer, settings for generation, special
  // tokens and context length are taken over. "": none; then no special tokens
  // are named, and the context length is that of the checkpoint's sequences.
  std::string like;
  // The model that a checkpoint of adapters belongs to. "": the one it names.
  std::string base;
  bool adapters = false;  // alone, as PEFT's files, not added to their base
};

// config.json of the Hugging Face folder `like`. InvalidArgument, naming the
// differences, if its family, width, number of layers or vocabulary are not
// those of `model`: its tokens would mean something else.
Result<Config> config_like(FileSystem& fs, const std::string& like,
                           const geometry::ModelConfig& model);

struct Exported {
  geometry::ModelConfig model;
  int64_t step = 0;
  int64_t parameters = 0;
  uint64_t bytes = 0;  // of weights
  int files = 0;       // that hold them
};

// Writes the weights of the checkpoint in directory `checkpoint` (of any mesh)
// to the folder `out`, which must not exist, or be empty (else AlreadyExists).
// Adapters are added to their base. InvalidArgument if a weight is too large
// for the type (check_range()), or like config_like().
Result<Exported> export_model(FileSystem& fs, const std::string& checkpoint,
                              const std::string& out,
                              const ExportOptions& options,
                              const Progress& progress);

}  // namespace remesh::huggingface
