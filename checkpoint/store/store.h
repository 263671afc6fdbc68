// Saving and loading the training state as sharded HDF5 files.
//
// Saving, by all ranks of a generation:
//   1. every rank: write_shard() -- its slices into the temporary directory,
//      synced, then a sidecar note that says the shard is complete;
//   2. rank 0, when missing_shards() is empty: commit() -- index.h5, manifest,
//      sync, rename to its final name, retention.
// A crash before the rename leaves nothing that counts, after it the whole
// checkpoint; older ones are not touched before the new one is durable.
//
// Loading is resharding: load() takes any boxes of any parameters and reads
// just those from whichever shards hold them. Every byte it uses, metadata
// included, was checked against the manifest first (blocks.h), and no other is
// read: N ranks that load a checkpoint read and check it about once together.
//
// The state is three fp32 tensors a parameter: the master weight and Adam's two
// moments. The caller says where a slice's elements stand in its memory.
//
// Threads: functions are free of shared state and may be called from any
// thread, each with its own memory. Calls into HDF5 are serialised by its
// thread-safe build's global lock: two savers in a process take turns and both
// finish right. So a background thread may write a shard while others compute;
// the memory it writes from must not change until write_shard returns.
//
// All bytes go through the FileSystem (HDF5's by a virtual file driver of
// ours): a shard is streamed (no second copy in memory), a full disk is an
// ordinary Status, and tests can fail any write. HDF5 never prints.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/manifest/branch.h"
#include "checkpoint/manifest/manifest.h"
#include "parallel/geometry/param_table.h"
#include "proto/base/file_system.h"
#include "proto/base/status.h"

namespace remesh::store {

// A slice and where its elements stand. T is `const float` to save from, float
// to load into. Row i of the slice (dim 0; a slice of one dim is one row)
// starts at pointer + i * row_stride, in elements. When loading, a null pointer
// means that this tensor is not wanted; when saving all three are given.
template <typename T>
struct Piece {
  pb::Slice slice;
  T* weights = nullptr;
  T* exp_avg = nullptr;
  T* exp_avg_sq = nullptr;
  int64_t row_stride = 0;
};

// A window of the flat state in the table's canonical order: elements
// [begin, begin + size). Spans are of equal size, or empty when not wanted.
template <typename T>
struct FlatState {
  int64_t begin = 0;
  std::span<T> weights;
  std::span<T> exp_avg;
  std::span<T> exp_avg_sq;
};

// Pieces of flat elements [begin, end) inside the window `state`.
// REQUIRES: [begin, end) inside the window and the table.
template <typename T>
std::vector<Piece<T>> pieces_of_range(const geometry::ParamTable& table,
                                      int64_t begin, int64_t end,
                                      const FlatState<T>& state);

// --- saving ---------------------------------------------------------------

struct SaveId {
  int64_t step = 0;
  int64_t generation = 0;
};

// Byte shuffle and deflate of each chunk. The manifest's `compression` is for
// people: what a shard needs to be read stands in its HDF5 metadata.
enum class Compression { kNone, kZlib };
// "none" (or nothing) and "zlib".
Result<Compression> parse_compression(const std::string& name);

// Remembers, from one save of a rank to its next, how the files were laid out.
// Where the next are alike but for the step, a few numbers change; HDF5 takes a
// tenth of a second to lay out a few hundred parameters. The bytes are the same
// either way. Threads: one at a time.
class Layouts {
 public:
  Layouts();
  ~Layouts();
  Layouts(const Layouts&) = delete;
  Layouts& operator=(const Layouts&) = delete;
  struct Impl;
  Impl& impl() { return *impl_; }

 private:
  std::unique_ptr<Impl> impl_;
};

// How a shard comes to the disk beside other work.
struct Beside {
  // For a shard that is not compressed. With room for all of it the elements
  // are read once, as fast as memory goes, and then are free to change while
  // the disk is still at work.
  StreamOptions stream;
  // Called once no element will be read any more, before the disk is waited
  // for. Not called when writing fails before.
  std::function<void()> taken;
  Layouts* layouts = nullptr;
};

// Writes shard `rank` (and its sidecar) of the checkpoint `id` below `folder`
// and returns its name, size, checksum and slices. The shard's bytes are
// durable then; its name is with commit(). Makes the temporary directory when
// it is not there. Pieces may be none (an empty shard).
// Kept free of collective calls: each rank calls it when it likes.
Result<pb::ShardFile> write_shard(FileSystem& fs, const std::string& folder,
                                  const SaveId& id, int rank,
                                  const geometry::ParamTable& table,
                                  const std::vector<Piece<const float>>& pieces,
                                  Compression compression = Compression::kNone,
                                  const Beside& beside = {});

// Ranks of 0..num_shards-1 whose shard is not complete yet.
std::vector<int> missing_shards(FileSystem& fs, const std::string& folder,
                                const SaveId& id, int num_shards);

struct Retention {
  int64_t keep_latest_k = 3;
  int64_t keep_every_n = 0;
};

struct Committed {
  std::string path;              // FOLDER/step-00000100
  pb::Manifest manifest;         // as written
  bool existed = false;          // a valid one was there and was kept
  std::vector<int64_t> removed;  // by retention
  Status cleanup;                // not ok: saved, but something old stayed
};

// Completes the checkpoint, unless a newer generation goes on in the folder
// (Cancelled; manifest/branch.h): collects the shards 0..num_shards-1
// (Unavailable, naming those missing), checks that they cover the table
// exactly, writes index.h5 and the manifest, syncs and renames. `manifest` is
// complete but for format, shards, index; its step and generation name the
// temporary directory. One of that step that is valid and in the generation's
// past is kept instead. Then retention among those in its past, and removal of
// temporary directories of older generations; a failure there is reported in
// `cleanup`, the checkpoint stands.
Result<Committed> commit(FileSystem& fs, const std::string& folder,
                         pb::Manifest manifest, int num_shards,
                         const geometry::ParamTable& table,
                         const Retention& retention, Layouts* layouts = nullptr,
                         const std::optional<manifest::Origin>& origin = {});

// Removes the temporary directory of a save that was given up. Ok when absent.
Status abandon(FileSystem& fs, const std::string& folder, const SaveId& id);

// --- loading --------------------------------------------------------------

// Fills every piece from the checkpoint in `path` (as scan() found it, or as
// read_checkpoint() read it). Not ok: the pieces' memory is unspecified and
// must not be used. Errors name file, place and dataset. Memory needed beside
// the pieces: a block, and of a compressed shard two chunks (4 MiB each).
//
// Nothing that is used goes unchecked (see above). A shard of format 1 has one
// checksum, so all of it is read first.
Status load(FileSystem& fs, const std::string& path,
            const pb::Manifest& manifest, const geometry::ParamTable& table,
            const std::vector<Piece<float>>& pieces);

}  // namespace remesh::store
