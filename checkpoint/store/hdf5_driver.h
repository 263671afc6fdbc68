// An HDF5 virtual file driver over File, so that HDF5's bytes go
// through the same seam as everything else of a checkpoint.
//
// A failed write is remembered and, from then on, writes are swallowed: HDF5
// cannot close a file whose flushes fail (it leaks it and tries again at exit).
// So HDF5 tears down in peace, and the caller asks error() whether the file is
// any good. Reads report their failure at once.
//
// hid_t is int64_t here, since <hdf5.h> stays inside .cc files.
#pragma once

#include <cstdint>
#include <memory>

#include "proto/base/file_system.h"
#include "proto/base/status.h"

namespace remesh::store {

// What the driver and the owner of the file share. Outlives the owner when
// HDF5 should keep the file open (it must not touch freed memory then).
struct DriverState {
  std::unique_ptr<File> file;  // null: owner has gone
  uint64_t size = 0;
  Status error;  // first failure
};

// Registers the driver for one file and sets it in the access list `fapl`.
// Returns its identifier, to be given to H5FDunregister once the file is
// closed: HDF5 1.10 calls a driver's close after it let go of the driver, so
// the file must not be its last user. Negative when HDF5 refuses.
int64_t set_driver(int64_t fapl, const std::shared_ptr<DriverState>& state);

}  // namespace remesh::store
