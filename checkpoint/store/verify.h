// Inspection of a checkpoint: a description, and a check of every byte.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "checkpoint/manifest/manifest.h"
#include "proto/base/file_system.h"

namespace remesh::store {

struct VerifyReport {
  bool ok = false;
  std::vector<std::string> problems;  // each names the file; empty when ok
  std::vector<std::string> warnings;  // NaN or infinite elements, stray files
  int64_t step = 0;
  int64_t num_files = 0;
  uint64_t bytes = 0;         // of the files read
  int64_t num_elements = 0;   // of the parameters
  int64_t num_nonfinite = 0;  // weights that are NaN or infinite
  double seconds = 0;
};

// Bytes read so far and in all. Most count twice: as those of a file and as
// elements.
using VerifyProgress = std::function<void(uint64_t done, uint64_t total)>;

// Reads everything in the directory `path`: checks the manifest, sizes and
// checksums of all files, HDF5 contents, and that every parameter is stored
// exactly once. Damage is reported, never a failure of the call.
VerifyReport verify(FileSystem& fs, const std::string& path,
                    const VerifyProgress& progress = {});

// Several lines of text: step, mesh, model, adapters, data, parameters, shards.
std::string describe(const pb::Manifest& manifest);
std::string describe(const VerifyReport& report);
// The same, with all sizes of the model, as one JSON object.
std::string describe_json(const pb::Manifest& manifest);
std::string describe_json(const VerifyReport& report);

}  // namespace remesh::store
