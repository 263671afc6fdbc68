// HDF5 files, written and read through a FileSystem. Every failure is a Status
// with HDF5's own reason; HDF5 prints nothing.
//
// Files have the 1.10 format, in which all metadata is checksummed, without
// time stamps: the same state gives the same bytes. blocks.h protects the data.
//
// Threads: one object belongs to one thread at a time; different objects in
// different threads are serialised by HDF5's global lock.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "parallel/geometry/rect.h"
#include "proto/base/file_system.h"
#include "proto/base/status.h"

namespace remesh::store {

using Dims = std::vector<int64_t>;

// The most elements in a chunk of a compressed slice: 4 MiB of fp32.
inline constexpr int64_t kChunkElements = int64_t{1} << 20;
// The chunk of a dataset: full rows where they fit, balanced so that little of
// the last one is empty. Same number of dims as `dims`.
Dims chunk_of(const Dims& dims);

// An integer attribute of a dataset.
struct Attribute {
  const char* name;
  Dims values;
};

// A stored dataset seen through a virtual one.
struct VirtualPart {
  Dims start, count;    // its place in the virtual dataset
  std::string file;     // in the directory of the virtual file
  std::string dataset;  // path in that file
};

class Hdf5Writer {
 public:
  // Writes into `file`, which is empty; `path` is for messages only.
  static Result<std::unique_ptr<Hdf5Writer>> create(std::unique_ptr<File> file,
                                                    const std::string& path);
  // Abandons the file unless it was finished.
  ~Hdf5Writer();
  Hdf5Writer(const Hdf5Writer&) = delete;
  Hdf5Writer& operator=(const Hdf5Writer&) = delete;

  // Of the file.
  Status set_attribute(const std::string& name,
                       std::span<const int64_t> values);
  Status set_attribute(const std::string& name, double value);
  Status set_attribute(const std::string& name, const std::string& value);
  // Makes the group at `path`, whose parent exists.
  Status make_group(const std::string& path);
  // fp32, chunked, byte shuffle and deflate. Row i (dim 0; one dim is one row)
  // begins at data + i * row_stride. The parent group exists.
  Status write_compressed(const std::string& path, const Dims& dims,
                          std::span<const Attribute> attributes,
                          const float* data, int64_t row_stride);
  // fp32, contiguous, not written: returns the offset in the file where the
  // caller has to write the elements, row by row, after finish().
  Result<uint64_t> reserve_floats(const std::string& path, const Dims& dims,
                                  std::span<const Attribute> attributes);
  // fp32 of shape dims; elements that no part covers read as NaN.
  Status write_virtual(const std::string& path, const Dims& dims,
                       const std::vector<VirtualPart>& parts);
  // Flushes into the file and returns it, not synced. The file is valid only if
  // this succeeds.
  Result<std::unique_ptr<File>> finish();

 private:
  Hdf5Writer();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The place of a part of a dataset in the file.
struct StoredPart {
  uint64_t begin = 0, end = 0;  // bytes
  geometry::Rect rect;          // of the dataset
};

class Hdf5Reader {
 public:
  // Reads from `file`; `path` is for messages only.
  static Result<std::unique_ptr<Hdf5Reader>> open(std::unique_ptr<File> file,
                                                  const std::string& path);
  ~Hdf5Reader();
  Hdf5Reader(const Hdf5Reader&) = delete;
  Hdf5Reader& operator=(const Hdf5Reader&) = delete;

  // The dataset's shape. Corrupt when it is missing or not fp32.
  Result<Dims> dims(const std::string& path);
  // Reads `rect` (in coordinates of the dataset) so that its row i begins at
  // out + i * row_stride. REQUIRES: dims(path) holds the rect.
  Status read_floats(const std::string& path, const geometry::Rect& rect,
                     float* out, int64_t row_stride);
  Result<std::vector<int64_t>> attribute(const std::string& object,
                                         const std::string& name);
  // The dataset's chunks, or the single part of a contiguous one.
  Result<std::vector<StoredPart>> parts(const std::string& path);

 private:
  Hdf5Reader();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace remesh::store
