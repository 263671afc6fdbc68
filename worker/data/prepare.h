// prepare: text files to a data set of token shards (dataset.h).
//
// Streams: memory is a few MiB whatever the size of the input. Inputs are
// plain text or .xz (told by their first bytes). A line "<|endoftext|>" ends
// a document, as does the end of a file; each document is followed by the
// tokenizer's end-of-text token. Empty documents are skipped.
//
// The held-out split. The text is cut into blocks of about val_block_bytes
// (a block ends at a line's end, a document's end when it is at least half
// full, or a word's end in a very long line). One in 1 / val_fraction of them,
// at equal distances from a start that `seed` chooses, goes to the validation
// split. So validation text comes evenly from the whole input, whether it has
// few large documents or many small ones, and the share is exact to one block
// (systematic sampling). Where a document is cut because the split changes, an
// end-of-text token closes the piece, so no sequence runs over a gap unmarked.
//
// Files get their names by rename after fsync, the index last: whatever the
// moment of a crash, the folder holds the old data set, the new one, or none
// (never a mixture), and running prepare again mends it.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "proto/base/status.h"

namespace remesh::data {

struct PrepareOptions {
  std::vector<std::string> inputs;  // read in this order
  std::string out_dir;              // made if it does not exist
  std::string tokenizer = "bytes";
  double val_fraction = 0.01;   // 0 .. 0.5; 0: no held-out split
  int64_t val_block_bytes = 0;  // 64 .. 2^24; 0: 16 KiB, or less when the
                                // input is small
  int64_t shard_tokens = int64_t{1} << 26;  // most tokens a shard, >= 1
  uint64_t seed = 0;                        // of the held-out choice
  bool raw_bytes = false;  // do not require the text to be valid UTF-8
  bool overwrite = false;  // replace another data set in out_dir
};

struct PrepareSummary {
  bool up_to_date = false;  // nothing done: out_dir already holds just this
  std::string data_id;
  std::string tokenizer;
  int64_t vocab_size = 0;
  uint64_t input_bytes = 0;  // as stored (compressed)
  uint64_t text_bytes = 0;   // of text, separators included
  int64_t documents = 0;
  int64_t train_tokens = 0;  // end-of-text tokens included
  int64_t val_tokens = 0;
  int64_t train_shards = 0;
  int64_t val_shards = 0;
};

// Input bytes read so far, and in all. Called at least once a MiB.
using PrepareProgress = std::function<void(uint64_t done, uint64_t total)>;

// Fails, leaving out_dir as it was, on: a bad option, a missing or empty
// input, text that is not UTF-8 (file and byte offset), a truncated or
// corrupt .xz, no text for one of the splits, a full disk, another prepare at
// work in out_dir, or an out_dir that has other files in it (already_exists;
// with `overwrite` a data set there is replaced, other files never touched).
Result<PrepareSummary> prepare(const PrepareOptions& options,
                               const PrepareProgress& progress = {});

}  // namespace remesh::data
