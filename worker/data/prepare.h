// prepare: converts text files to a data set of token shards (dataset.h).
//
// It streams, using some 100 MiB of memory for any input size, up to 40 MiB for
// each core, which encode text together, and a few times the longest line of
// JSON. Inputs are text or JSON lines, plain or compressed
// (text_reader.h). In text a line "<|endoftext|>" ends a document, as does the
// end of a file; of JSON lines each is one. Each document is followed by the
// tokenizer's end-of-text token; empty documents are skipped. Special tokens
// that are written out in a text are encoded as any other text.
//
// Conversations (`chat`) become text by a chat template, whose special tokens
// are encoded as such, and the loss counts the answers only. They are not
// followed by an end-of-text token: the shards' marks say where each begins.
//
// The held-out split is a systematic sample. The text is divided into blocks of
// about val_block_bytes; a block ends at a line end, at a document end if it is
// at least half full, or between words of a very long line. Every
// (1 / val_fraction)-th block, from an offset chosen by `seed`, goes to the
// validation split. So validation text is spread evenly over the input, whether
// that has a few large documents or many small ones, and the share is exact to
// one block. Where a document continues in the other split, an end-of-text
// token ends its first part, so that no sequence crosses a gap unmarked.
//
// Files are renamed into place after fsync, the index last. After a crash the
// folder has the old data set, the new one or none, never a mixture; running
// prepare again completes it.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "proto/base/file_system.h"
#include "proto/base/status.h"
#include "proto/data/index.h"
#include "worker/data/chat_template.h"

namespace remesh::data {

struct PrepareOptions {
  std::vector<std::string> inputs;  // as expand_inputs() takes them, in order
  std::string out_dir;              // created if missing
  std::string tokenizer = "bytes";  // as open_tokenizer() takes it
  double val_fraction = 0.01;       // 0 .. 0.5; 0: no held-out split;
                                    // 1: no training split
  int64_t val_block_bytes = 0;      // 64 .. 2^24; 0: 16 KiB, or less when the
                                    // input is small
  int64_t shard_tokens = int64_t{1} << 26;  // at most, per shard; >= 1
  uint64_t seed = 0;                        // of the held-out sample
  bool raw_bytes = false;                   // take the files as they are
  std::string field = "text";               // of JSON lines, with a document
  bool chat = false;                        // JSON lines have "messages"
  // As ChatTemplate::open() takes it; "": chat_template.jinja or
  // tokenizer_config.json beside the tokenizer.
  std::string chat_template;
  std::string chat_date =
      kChatDate;           // that strftime_now() of a template writes
  bool overwrite = false;  // replace a different data set in out_dir
};

struct Prepared {
  Index index;
  std::string changes;      // of the tokenizer (Tokenizer::changes())
  bool up_to_date = false;  // out_dir had this data set already
};

// Input bytes read so far and in total. Called at least once per MiB.
using PrepareProgress = std::function<void(uint64_t done, uint64_t total)>;

// Fails, without changing out_dir, on an invalid option, a missing or empty
// input, text that is not UTF-8 (naming file and byte offset), a damaged
// compressed file, a line that is no JSON (naming file and line), too little
// text for one of the splits, conversations without an answer, a disk without
// room for the new files, or a concurrent prepare in out_dir. (Where they
// cannot be renamed, the old data set is gone.) Fails with AlreadyExists if
// out_dir has other files; with `overwrite` a data set there is replaced, and
// other files are never touched. Writes through `fs`; reads the inputs
// directly.
Result<Prepared> prepare(const PrepareOptions& options, FileSystem& fs,
                         const PrepareProgress& progress = {});

}  // namespace remesh::data
