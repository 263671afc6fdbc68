// An HDF5 virtual file driver over File, so that HDF5's bytes go
// through the same seam as everything else in a checkpoint.
//
// The driver records the first failed write and discards all later ones: HDF5
// cannot close a file whose flushes fail (it leaks it and retries at exit). The
// caller checks DriverState::error after closing. Reads fail at once.
//
// hid_t is int64_t here, since <hdf5.h> stays inside .cc files.
#pragma once

#include <cstdint>
#include <memory>

#include "proto/base/file_system.h"
#include "proto/base/status.h"

namespace remesh::store {

// Shared by the driver and the owner of the file. Outlives the owner if HDF5
// keeps the file open, so that it does not touch freed memory.
struct DriverState {
  std::unique_ptr<File> file;  // null: the owner is gone
  uint64_t size = 0;
  Status error;  // first failure
};

// Registers the driver for one file and sets it in the access list `fapl`.
// Returns its identifier, to be passed to H5FDunregister once the file is
// closed: HDF5 1.10 calls a driver's close after it released the driver, so the
// file must not be its last user. Negative when HDF5 fails.
int64_t set_driver(int64_t fapl, const std::shared_ptr<DriverState>& state);

}  // namespace remesh::store
