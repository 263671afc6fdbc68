#include "checkpoint/store/hdf5_driver.h"

#include <hdf5.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <iterator>
#include <type_traits>

namespace remesh::store {
namespace {

static_assert(std::is_same_v<hid_t, int64_t>);

// In the access list. HDF5 copies it bytewise, hence a plain pointer; it is
// read during H5Fopen/H5Fcreate only, while the owner holds the state.
struct DriverInfo {
  const std::shared_ptr<DriverState>* state;
};

struct DriverFile : H5FD_t {
  std::shared_ptr<DriverState> state;
  haddr_t end_of_address = 0;
};

DriverFile* cast(H5FD_t* file) { return static_cast<DriverFile*>(file); }
const DriverFile* cast(const H5FD_t* file) {
  return static_cast<const DriverFile*>(file);
}

H5FD_t* driver_open(const char*, unsigned, hid_t fapl, haddr_t) {
  const auto* info = static_cast<const DriverInfo*>(H5Pget_driver_info(fapl));
  if (info == nullptr) return nullptr;
  auto* file = new DriverFile();
  file->state = *info->state;
  return file;
}

herr_t driver_close(H5FD_t* file) {
  delete cast(file);
  return 0;
}

// HDF5 asks whether two handles are the same file.
int driver_compare(const H5FD_t* a, const H5FD_t* b) {
  const DriverState* x = cast(a)->state.get();
  const DriverState* y = cast(b)->state.get();
  return x == y ? 0 : (std::less<>()(x, y) ? -1 : 1);
}

herr_t driver_query(const H5FD_t*, unsigned long* flags) {
  if (flags != nullptr)
    *flags = H5FD_FEAT_AGGREGATE_METADATA | H5FD_FEAT_ACCUMULATE_METADATA |
             H5FD_FEAT_DATA_SIEVE | H5FD_FEAT_AGGREGATE_SMALLDATA |
             H5FD_FEAT_DEFAULT_VFD_COMPATIBLE;
  return 0;
}

haddr_t driver_get_eoa(const H5FD_t* file, H5FD_mem_t) {
  return cast(file)->end_of_address;
}

herr_t driver_set_eoa(H5FD_t* file, H5FD_mem_t, haddr_t address) {
  cast(file)->end_of_address = address;
  return 0;
}

haddr_t driver_get_eof(const H5FD_t* file, H5FD_mem_t) {
  return cast(file)->state->size;
}

herr_t driver_read(H5FD_t* file, H5FD_mem_t, hid_t, haddr_t address,
                   size_t size, void* buffer) {
  DriverState& state = *cast(file)->state;
  if (state.file == nullptr) return -1;
  // Reads beyond the end return zeros, as in HDF5's own driver: HDF5 probes.
  const uint64_t there = address >= state.size
                             ? 0
                             : std::min<uint64_t>(size, state.size - address);
  std::memset(static_cast<char*>(buffer) + there, 0, size - there);
  const Status s = state.file->read_at(
      address, {static_cast<std::byte*>(buffer), static_cast<size_t>(there)});
  if (s.ok()) return 0;
  if (state.error.ok()) state.error = s;
  return -1;
}

herr_t driver_write(H5FD_t* file, H5FD_mem_t, hid_t, haddr_t address,
                    size_t size, const void* buffer) {
  DriverState& state = *cast(file)->state;
  state.size = std::max<uint64_t>(state.size, address + size);
  if (state.file == nullptr || !state.error.ok()) return 0;
  state.error = state.file->write_at(
      address, {static_cast<const std::byte*>(buffer), size});
  return 0;
}

// HDF5 may allocate more than it writes; the file ends where it says.
herr_t driver_truncate(H5FD_t* file, hid_t, hbool_t) {
  const DriverFile& f = *cast(file);
  DriverState& state = *f.state;
  if (state.size == f.end_of_address) return 0;
  state.size = f.end_of_address;
  if (state.file == nullptr || !state.error.ok()) return 0;
  state.error = state.file->truncate(f.end_of_address);
  return 0;
}

H5FD_class_t driver_class() {
  H5FD_class_t c = {};
  c.name = "remesh";
  c.maxaddr = (haddr_t{1} << 62) - 1;
  c.fc_degree = H5F_CLOSE_STRONG;
  c.fapl_size = sizeof(DriverInfo);
  c.open = driver_open;
  c.close = driver_close;
  c.cmp = driver_compare;
  c.query = driver_query;
  c.get_eoa = driver_get_eoa;
  c.set_eoa = driver_set_eoa;
  c.get_eof = driver_get_eof;
  c.read = driver_read;
  c.write = driver_write;
  c.truncate = driver_truncate;
  // Metadata together, raw data together.
  constexpr H5FD_mem_t kMap[H5FD_MEM_NTYPES] = H5FD_FLMAP_DICHOTOMY;
  std::copy(std::begin(kMap), std::end(kMap), std::begin(c.fl_map));
  return c;
}

}  // namespace

int64_t set_driver(int64_t fapl, const std::shared_ptr<DriverState>& state) {
  const H5FD_class_t c = driver_class();  // HDF5 copies it
  const hid_t id = H5FDregister(&c);
  if (id < 0) return id;
  const DriverInfo info{.state = &state};
  if (H5Pset_driver(fapl, id, &info) >= 0) return id;
  H5FDunregister(id);
  return -1;
}

}  // namespace remesh::store
