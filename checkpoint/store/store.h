// Saving and loading the training state as sharded HDF5 files.
//
// Saving, by all ranks of a generation:
//   1. every rank: write_shard() writes its slices into the temporary
//      directory, syncs, then writes a sidecar file that marks the shard as
//      complete;
//   2. rank 0, when missing_shards() is empty: commit() writes index.h5 and the
//      manifest, syncs, renames to the final name and applies retention.
// A crash before the rename leaves nothing that counts, after it the complete
// checkpoint; older ones are not touched before the new one is durable.
//
// Loading is resharding: load() takes any rectangles of any parameters and
// reads only those from whichever shards hold them. Every byte it uses,
// metadata included, has been verified against the manifest (blocks.h), and it
// reads no other: N ranks that load a checkpoint read and verify it about once
// together.
//
// The state is three fp32 tensors per parameter: the master weight and AdamW's
// two moments.
//
// Threads: the functions share no state; any thread may call them, each with
// its own memory. HDF5's thread-safe build serialises its calls with a global
// lock, so concurrent savers in a process take turns. A background thread may
// write a shard while others compute; the memory it writes from must not change
// until write_shard returns.
//
// All bytes go through the FileSystem (HDF5's through our virtual file driver):
// a shard is streamed without a second copy in memory, a full disk is an
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
#include "parallel/geometry/state_vectors.h"
#include "proto/base/file_system.h"
#include "proto/base/status.h"

namespace remesh::store {

// Initializes HDF5, which reads the environment, before another thread changes
// that. Otherwise the first use does.
void initialize();

// --- saving ---------------------------------------------------------------

struct SaveId {
  int64_t step = 0;
  int64_t generation = 0;
};

// Byte shuffle and deflate of each chunk. The manifest's `compression` is only
// informative: a shard's HDF5 metadata says how to read it.
enum class Compression { kNone, kZlib };
// "none" (or nothing) and "zlib".
Result<Compression> parse_compression(const std::string& name);

struct WriteOptions {
  Compression compression = Compression::kNone;
  // For a shard that is not compressed. If there is room for all of it, the
  // elements are read once, at memory speed, and may change while the disk is
  // still busy.
  StreamOptions stream;
  // For a shard that is not compressed: called once the file is open, before
  // the first element is read. If it fails, so does the write.
  std::function<Status()> taking;
  // Called once no element will be read any more, before the write waits for
  // the disk. Not called if writing fails before.
  std::function<void()> taken;
};

// Writes shard `rank` (and its sidecar) of the checkpoint `id` below `folder`:
// `pieces`, whose places are in the vectors of `state`. Returns its name, size,
// checksum and slices. The shard's bytes are durable on return; its directory
// entry is once commit() returns. Makes the temporary directory if it does not
// exist. An empty shard is valid. Not collective: each rank calls it when it
// is ready.
Result<pb::ShardFile> write_shard(FileSystem& fs, const std::string& folder,
                                  const SaveId& id, int rank,
                                  const geometry::ParamTable& table,
                                  std::span<const geometry::Piece> pieces,
                                  const geometry::ConstStateView& state,
                                  const WriteOptions& options = {});

// Ranks of 0..num_shards-1 whose shard is not complete yet.
std::vector<int> missing_shards(FileSystem& fs, const std::string& folder,
                                const SaveId& id, int num_shards);

// Removes what generations older than `generation` began to save and did not
// finish: they cannot any more. Does nothing (Cancelled) if a newer one has
// claimed the folder. Returns the first failure.
Status remove_unfinished(FileSystem& fs, const std::string& folder,
                         int64_t generation);

struct Retention {
  int64_t keep_latest_k = 3;
  int64_t keep_every_n = 0;
};

struct CommitResult {
  std::string path;              // FOLDER/step-00000100
  pb::Manifest manifest;         // as written
  bool existed = false;          // a valid one was there and was kept
  std::vector<int64_t> removed;  // by retention
  Status cleanup;                // not ok: saved, but something old stayed
};

// Completes the checkpoint, unless a newer generation has claimed the folder
// (Cancelled; manifest/branch.h): collects the shards 0..num_shards-1
// (Unavailable, naming those missing), checks that they cover the table exactly
// once, writes index.h5 and the manifest, syncs and renames. `manifest` is
// complete except for format, shards and index; its step and generation name
// the temporary directory. A valid checkpoint of that step in the generation's
// past is kept instead; one of another run is a failure (Corrupt). Then applies
// retention to the run's checkpoints in its past and removes temporary
// directories of older generations; `cleanup` reports a failure there, and the
// checkpoint is valid nevertheless.
Result<CommitResult> commit(FileSystem& fs, const std::string& folder,
                            pb::Manifest manifest, int num_shards,
                            const geometry::ParamTable& table,
                            const Retention& retention,
                            const std::optional<manifest::Origin>& origin = {});

// Removes the temporary directory of a save that was given up. Ok when absent.
Status abandon(FileSystem& fs, const std::string& folder, const SaveId& id);

// --- loading --------------------------------------------------------------

// Fills every piece, whose places are in the vectors of `state`, from the
// checkpoint in `path` (as scan() found it, or as read_checkpoint() read it).
// A vector of `state` that is empty is not read. When this fails, the contents
// of the pieces are unspecified. Errors name file, place and dataset. Memory
// needed besides the state: a block, and two chunks (4 MiB each) of a
// compressed shard.
//
// Everything that is used is verified (see above).
Status load(FileSystem& fs, const std::string& path,
            const pb::Manifest& manifest, const geometry::ParamTable& table,
            std::span<const geometry::Piece> pieces,
            const geometry::StateView& state);

// The files of a checkpoint's shards. While they are open, retention takes
// nothing from a reader: a file that is removed keeps its bytes. (Not so on a
// network file system, if another host removes it.)
using OpenShards = std::vector<std::shared_ptr<File>>;
// Needs a descriptor for each shard. Fails like FileSystem::open().
Result<OpenShards> open_shards(FileSystem& fs, const std::string& path,
                               const pb::Manifest& manifest);
// Like load() above, from open_shards() of that checkpoint, whose `path` is for
// messages only. One load of the same files at a time.
Status load(const OpenShards& files, const std::string& path,
            const pb::Manifest& manifest, const geometry::ParamTable& table,
            std::span<const geometry::Piece> pieces,
            const geometry::StateView& state);

}  // namespace remesh::store
