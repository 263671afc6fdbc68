// Over 500 lines because writer and reader share the wrappers of HDF5 handles.
#include "checkpoint/store/hdf5_file.h"

#include <hdf5.h>
#include <zlib.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <utility>

#include "checkpoint/store/hdf5_driver.h"
#include "checkpoint/store/store.h"

namespace remesh::store {
namespace {

using geometry::Rect;

// Suppresses HDF5's own printing in this thread during its lifetime.
class QuietErrors {
 public:
  QuietErrors() {
    // After a damaged file HDF5 1.10 fails to clean up at exit and prints
    // "infinite loop closing library". We close what we open, so its exit
    // handler has nothing to do. This must precede the first use of HDF5 in the
    // process and is ignored later.
    H5dont_atexit();
    // A data set may name a filter, for which HDF5 would load a shared library
    // from a folder of its choice or of HDF5_PLUGIN_PATH.
    static const bool no_plugins = H5PLset_loading_state(0) >= 0;
    CHECK(no_plugins);
    H5Eget_auto2(H5E_DEFAULT, &print_, &data_);
    H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
  }
  ~QuietErrors() { H5Eset_auto2(H5E_DEFAULT, print_, data_); }
  QuietErrors(const QuietErrors&) = delete;
  QuietErrors& operator=(const QuietErrors&) = delete;

 private:
  H5E_auto2_t print_ = nullptr;
  void* data_ = nullptr;
};

// An HDF5 identifier with the function that closes it.
class Id {
 public:
  using Close = herr_t (*)(hid_t);
  Id() = default;
  Id(hid_t id, Close close) : id_(id), close_(close) {}
  Id(Id&& other) noexcept { *this = std::move(other); }
  Id& operator=(Id&& other) noexcept {
    std::swap(id_, other.id_);
    std::swap(close_, other.close_);
    return *this;
  }
  ~Id() { close(); }
  bool close() {
    const hid_t id = std::exchange(id_, -1);
    return id < 0 || close_(id) >= 0;
  }
  bool ok() const { return id_ >= 0; }
  hid_t get() const { return id_; }

 private:
  hid_t id_ = -1;
  Close close_ = nullptr;
};

// The innermost reason on HDF5's error stack of this thread.
std::string reason() {
  std::string text;
  const auto take = [](unsigned n, const H5E_error2_t* e, void* out) -> herr_t {
    if (n == 0 && e->desc != nullptr) *static_cast<std::string*>(out) = e->desc;
    return 0;
  };
  H5Ewalk2(H5E_DEFAULT, H5E_WALK_UPWARD, take, &text);
  H5Eclear2(H5E_DEFAULT);
  return text.empty() ? "HDF5 gave no reason" : text;
}

std::vector<hsize_t> sizes(const Dims& dims) {
  return {dims.begin(), dims.end()};
}

Id simple_space(const Dims& dims) {
  return {H5Screate_simple(static_cast<int>(dims.size()), sizes(dims).data(),
                           nullptr),
          H5Sclose};
}

// `driver` must live until the file is closed.
Id access_list(const std::shared_ptr<DriverState>& state, Id& driver) {
  Id fapl(H5Pcreate(H5P_FILE_ACCESS), H5Pclose);
  if (!fapl.ok()) return {};
  driver = Id(set_driver(fapl.get(), state), H5FDunregister);
  if (!driver.ok() ||
      H5Pset_libver_bounds(fapl.get(), H5F_LIBVER_V110, H5F_LIBVER_V110) < 0 ||
      // Closing the file closes what a failure left open in it.
      H5Pset_fclose_degree(fapl.get(), H5F_CLOSE_STRONG) < 0)
    return {};
  return fapl;
}

// A creation list of that class whose objects carry no time stamps.
Id creation_list(hid_t cls) {
  Id list(H5Pcreate(cls), H5Pclose);
  if (!list.ok() || H5Pset_obj_track_times(list.get(), false) < 0) return {};
  return list;
}

// On an open object, which is cheaper than a lookup by path each time.
bool put_attribute(hid_t object, const std::string& name, hid_t stored,
                   const Id& space, hid_t given, const void* values) {
  const Id attr(H5Acreate2(object, name.c_str(), stored, space.get(),
                           H5P_DEFAULT, H5P_DEFAULT),
                H5Aclose);
  return attr.ok() && H5Awrite(attr.get(), given, values) >= 0;
}

bool put_attribute(hid_t object, const std::string& name,
                   std::span<const int64_t> values) {
  return put_attribute(object, name, H5T_STD_I64LE,
                       simple_space({static_cast<int64_t>(values.size())}),
                       H5T_NATIVE_INT64, values.data());
}

bool put_attributes(hid_t object, std::span<const Attribute> attributes) {
  return std::all_of(attributes.begin(), attributes.end(), [&](const auto& a) {
    return put_attribute(object, a.name, a.values);
  });
}

// Memory in which row i begins at i * stride, the rect selected.
Id memory_space(int64_t rows, int64_t cols, int64_t stride) {
  stride = rows == 1 ? cols : stride;
  Id space = simple_space({rows, stride});
  const hsize_t start[2] = {0, 0};
  const hsize_t count[2] = {static_cast<hsize_t>(rows),
                            static_cast<hsize_t>(cols)};
  if (!space.ok() || H5Sselect_hyperslab(space.get(), H5S_SELECT_SET, start,
                                         nullptr, count, nullptr) < 0)
    return {};
  return space;
}

bool select(hid_t space, const Dims& start, const Dims& count) {
  return H5Sselect_hyperslab(space, H5S_SELECT_SET, sizes(start).data(),
                             nullptr, sizes(count).data(), nullptr) >= 0;
}

// A chunk of `tile` elements, zeros beyond `part` at the edges, its bytes
// shuffled: the first of every element, then the second of every element ...
// (HDF5's filter of that name.)
void shuffle_chunk(const float* data, int64_t row_stride, const Rect& part,
                   const Rect& tile, std::vector<std::byte>& out) {
  const auto n = static_cast<size_t>(tile.numel());
  out.assign(n * sizeof(float), std::byte{0});
  for (int64_t r = 0; r < part.rows; ++r) {
    const auto* row = reinterpret_cast<const std::byte*>(data + r * row_stride);
    for (size_t k = 0; k < sizeof(float); ++k) {
      std::byte* to = out.data() + k * n + r * tile.cols;
      for (int64_t c = 0; c < part.cols; ++c)
        to[c] = row[static_cast<size_t>(c) * sizeof(float) + k];
    }
  }
}

// Deflates `raw` into `out`. Returns false if it would not get smaller; the
// chunk is then marked as not deflated.
bool deflate_chunk(const std::vector<std::byte>& raw,
                   std::vector<std::byte>& out) {
  // Trained weights are noise except for their exponents: a higher level gains
  // little.
  constexpr int kLevel = 1;
  out.resize(raw.size());
  uLongf size = out.size();
  const int rc =
      compress2(reinterpret_cast<Bytef*>(out.data()), &size,
                reinterpret_cast<const Bytef*>(raw.data()), raw.size(), kLevel);
  if (rc != Z_OK) return false;
  out.resize(size);
  return true;
}

// Room for one of our chunks, so that each is unpacked once.
Id chunk_cache() {
  Id dapl(H5Pcreate(H5P_DATASET_ACCESS), H5Pclose);
  if (!dapl.ok() || H5Pset_chunk_cache(dapl.get(), 1,
                                       kChunkElements * sizeof(float), 1.0) < 0)
    return {};
  return dapl;
}

}  // namespace

Dims chunk_of(const Dims& dims) {
  const auto balanced = [](int64_t n, int64_t most) {
    const int64_t parts = (n + most - 1) / most;
    return (n + parts - 1) / parts;
  };
  if (dims.size() == 1) return {balanced(dims[0], kChunkElements)};
  const int64_t cols = balanced(dims[1], kChunkElements);
  const int64_t rows = std::max<int64_t>(1, kChunkElements / cols);
  return {balanced(dims[0], rows), cols};
}

// --- writer ---------------------------------------------------------------

struct Hdf5Writer::Impl {
  std::string path;
  std::shared_ptr<DriverState> state = std::make_shared<DriverState>();
  Id driver;  // outlives the file
  Id file;
  std::vector<std::byte> shuffled, deflated;  // reused

  // The file's own error takes precedence over HDF5's.
  Status failed(const std::string& what) {
    const std::string why = reason();
    if (!state->error.ok()) return state->error;
    return internal("write " + path + ": " + what + ": " + why);
  }
  Status check() { return state->error; }
  // A dataset of fp32.
  Id create_set(const std::string& name, const Id& space, const Id& dcpl) {
    return {H5Dcreate2(file.get(), name.c_str(), H5T_IEEE_F32LE, space.get(),
                       H5P_DEFAULT, dcpl.get(), H5P_DEFAULT),
            H5Dclose};
  }
};

void initialize() {
  const QuietErrors quiet;
  CHECK(H5open() >= 0);
}

Hdf5Writer::Hdf5Writer() : impl_(std::make_unique<Impl>()) {}

Hdf5Writer::~Hdf5Writer() {
  const QuietErrors quiet;
  // Unfinished means abandoned: nothing more needs to reach the disk.
  if (impl_->file.ok() && impl_->state->error.ok())
    impl_->state->error = cancelled("write " + impl_->path);
  impl_->file.close();
  impl_->state->file.reset();
}

Result<std::unique_ptr<Hdf5Writer>> Hdf5Writer::create(
    std::unique_ptr<File> file, const std::string& path) {
  const QuietErrors quiet;
  std::unique_ptr<Hdf5Writer> w(new Hdf5Writer());
  Impl& m = *w->impl_;
  m.path = path;
  m.state->file = std::move(file);
  const Id fapl = access_list(m.state, m.driver);
  const Id fcpl = creation_list(H5P_FILE_CREATE);
  if (!fapl.ok() || !fcpl.ok()) return m.failed("set up");
  m.file = Id(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, fcpl.get(), fapl.get()),
              H5Fclose);
  if (!m.file.ok()) return m.failed("create");
  return w;
}

Status Hdf5Writer::set_attribute(const std::string& name,
                                 std::span<const int64_t> values) {
  const QuietErrors quiet;
  if (!put_attribute(impl_->file.get(), name, values))
    return impl_->failed("attribute " + name);
  return impl_->check();
}

Status Hdf5Writer::set_attribute(const std::string& name, double value) {
  const QuietErrors quiet;
  const Id space(H5Screate(H5S_SCALAR), H5Sclose);
  if (!put_attribute(impl_->file.get(), name, H5T_IEEE_F64LE, space,
                     H5T_NATIVE_DOUBLE, &value))
    return impl_->failed("attribute " + name);
  return impl_->check();
}

Status Hdf5Writer::set_attribute(const std::string& name,
                                 const std::string& value) {
  const QuietErrors quiet;
  const Id space(H5Screate(H5S_SCALAR), H5Sclose);
  const Id type(H5Tcopy(H5T_C_S1), H5Tclose);
  // An empty string is not allowed; the terminating zero is stored.
  if (!type.ok() || H5Tset_size(type.get(), value.size() + 1) < 0 ||
      H5Tset_cset(type.get(), H5T_CSET_UTF8) < 0 ||
      !put_attribute(impl_->file.get(), name, type.get(), space, type.get(),
                     value.c_str()))
    return impl_->failed("attribute " + name);
  return impl_->check();
}

Status Hdf5Writer::make_group(const std::string& path) {
  const QuietErrors quiet;
  const Id gcpl = creation_list(H5P_GROUP_CREATE);
  const Id group(H5Gcreate2(impl_->file.get(), path.c_str(), H5P_DEFAULT,
                            gcpl.get(), H5P_DEFAULT),
                 H5Gclose);
  if (!group.ok()) return impl_->failed("group " + path);
  return impl_->check();
}

// Chunks are filtered here, outside of HDF5's lock and without its copies, and
// written directly.
Status Hdf5Writer::write_compressed(const std::string& path, const Dims& dims,
                                    std::span<const Attribute> attributes,
                                    const float* data, int64_t row_stride) {
  static_assert(std::endian::native == std::endian::little);
  constexpr uint32_t kWithoutDeflate = 1U << 1;  // the second of two filters
  const QuietErrors quiet;
  const Dims chunk = chunk_of(dims);
  const Id space = simple_space(dims);
  const Id dcpl = creation_list(H5P_DATASET_CREATE);
  if (!space.ok() || !dcpl.ok() ||
      H5Pset_chunk(dcpl.get(), static_cast<int>(dims.size()),
                   sizes(chunk).data()) < 0 ||
      H5Pset_shuffle(dcpl.get()) < 0 || H5Pset_deflate(dcpl.get(), 1) < 0)
    return impl_->failed(path);
  const Id set = impl_->create_set(path, space, dcpl);
  if (!set.ok() || !put_attributes(set.get(), attributes))
    return impl_->failed(path);
  const bool flat = dims.size() == 1;
  const int64_t rows = flat ? 1 : dims[0], cols = dims.back();
  const Rect tile{.rows = flat ? 1 : chunk[0], .cols = chunk.back()};
  for (int64_t r = 0; r < rows; r += tile.rows)
    for (int64_t c = 0; c < cols; c += tile.cols) {
      shuffle_chunk(data + r * row_stride + c, row_stride,
                    {.rows = std::min(tile.rows, rows - r),
                     .cols = std::min(tile.cols, cols - c)},
                    tile, impl_->shuffled);
      const bool smaller = deflate_chunk(impl_->shuffled, impl_->deflated);
      const auto& bytes = smaller ? impl_->deflated : impl_->shuffled;
      const Dims at = flat ? Dims{c} : Dims{r, c};
      if (H5Dwrite_chunk(set.get(), H5P_DEFAULT, smaller ? 0 : kWithoutDeflate,
                         sizes(at).data(), bytes.size(), bytes.data()) < 0)
        return impl_->failed(path);
      RETURN_IF_ERROR(impl_->check());
    }
  return ok_status();
}

Result<uint64_t> Hdf5Writer::reserve_floats(
    const std::string& path, const Dims& dims,
    std::span<const Attribute> attributes) {
  const QuietErrors quiet;
  const Id space = simple_space(dims);
  const Id dcpl = creation_list(H5P_DATASET_CREATE);
  if (!space.ok() || !dcpl.ok() ||
      H5Pset_layout(dcpl.get(), H5D_CONTIGUOUS) < 0 ||
      H5Pset_alloc_time(dcpl.get(), H5D_ALLOC_TIME_EARLY) < 0 ||
      H5Pset_fill_time(dcpl.get(), H5D_FILL_TIME_NEVER) < 0)
    return impl_->failed(path);
  const Id set = impl_->create_set(path, space, dcpl);
  const haddr_t place = set.ok() ? H5Dget_offset(set.get()) : HADDR_UNDEF;
  if (place == HADDR_UNDEF || !put_attributes(set.get(), attributes))
    return impl_->failed(path);
  RETURN_IF_ERROR(impl_->check());
  return place;
}

Status Hdf5Writer::write_virtual(const std::string& path, const Dims& dims,
                                 const std::vector<VirtualPart>& parts) {
  const QuietErrors quiet;
  const Id space = simple_space(dims);
  const Id dcpl = creation_list(H5P_DATASET_CREATE);
  const float fill = std::numeric_limits<float>::quiet_NaN();
  if (!space.ok() || !dcpl.ok() ||
      H5Pset_fill_value(dcpl.get(), H5T_NATIVE_FLOAT, &fill) < 0)
    return impl_->failed(path);
  for (const VirtualPart& part : parts) {
    const Id source = simple_space(part.count);
    const Id target = simple_space(dims);
    if (!source.ok() || !target.ok() ||
        !select(target.get(), part.start, part.count) ||
        H5Pset_virtual(dcpl.get(), target.get(), part.file.c_str(),
                       part.dataset.c_str(), source.get()) < 0)
      return impl_->failed(path);
  }
  Id set = impl_->create_set(path, space, dcpl);
  if (!set.ok() || !set.close()) return impl_->failed(path);
  return impl_->check();
}

Result<std::unique_ptr<File>> Hdf5Writer::finish() {
  const QuietErrors quiet;
  if (!impl_->file.close()) return impl_->failed("close");
  RETURN_IF_ERROR(impl_->check());
  return std::move(impl_->state->file);
}

// --- reader ---------------------------------------------------------------

struct Hdf5Reader::Impl {
  std::string path;
  std::shared_ptr<DriverState> state = std::make_shared<DriverState>();
  Id driver;  // outlives the file
  Id file;
  std::string open_path;  // of the dataset kept open
  Id set;

  Status failed(const std::string& what) {
    const std::string why = reason();
    if (!state->error.ok()) return state->error;
    return corrupt(path + ": " + what + ": " + why);
  }

  Status open_set(const std::string& name) {
    if (set.ok() && name == open_path) return ok_status();
    const Id dapl = chunk_cache();
    set = Id(H5Dopen2(file.get(), name.c_str(), dapl.get()), H5Dclose);
    open_path = name;
    if (!set.ok()) return failed(name);
    const Id type(H5Dget_type(set.get()), H5Tclose);
    if (!type.ok()) return failed(name);
    if (H5Tequal(type.get(), H5T_IEEE_F32LE) <= 0)
      return corrupt(path + ": " + name + " is not float32");
    return check_here(name);
  }

  // Elements in other files would not be those that are verified, and could be
  // of any file that this user may read.
  Status check_here(const std::string& name) {
    const Id plist(H5Dget_create_plist(set.get()), H5Pclose);
    const H5D_layout_t layout =
        plist.ok() ? H5Pget_layout(plist.get()) : H5D_LAYOUT_ERROR;
    H5O_info_t here{}, there{};
    if ((layout != H5D_CONTIGUOUS && layout != H5D_CHUNKED) ||
        H5Pget_external_count(plist.get()) != 0 ||
        H5Oget_info2(file.get(), &here, H5O_INFO_BASIC) < 0 ||
        H5Oget_info2(set.get(), &there, H5O_INFO_BASIC) < 0 ||
        here.fileno != there.fileno)
      return corrupt(path + ": " + name + " has its elements elsewhere");
    return ok_status();
  }
};

Hdf5Reader::Hdf5Reader() : impl_(std::make_unique<Impl>()) {}

Hdf5Reader::~Hdf5Reader() {
  const QuietErrors quiet;
  impl_->set.close();
  impl_->file.close();
  impl_->state->file.reset();
}

Result<std::unique_ptr<Hdf5Reader>> Hdf5Reader::open(std::unique_ptr<File> file,
                                                     const std::string& path) {
  const QuietErrors quiet;
  std::unique_ptr<Hdf5Reader> r(new Hdf5Reader());
  Impl& m = *r->impl_;
  m.path = path;
  m.state->file = std::move(file);
  ASSIGN_OR_RETURN(m.state->size, m.state->file->size());
  const Id fapl = access_list(m.state, m.driver);
  if (!fapl.ok()) return m.failed("set up");
  m.file = Id(H5Fopen(path.c_str(), H5F_ACC_RDONLY, fapl.get()), H5Fclose);
  if (!m.file.ok()) return m.failed("open");
  return r;
}

Result<Dims> Hdf5Reader::dims(const std::string& path) {
  const QuietErrors quiet;
  RETURN_IF_ERROR(impl_->open_set(path));
  const Id space(H5Dget_space(impl_->set.get()), H5Sclose);
  const int rank = space.ok() ? H5Sget_simple_extent_ndims(space.get()) : -1;
  if (rank != 1 && rank != 2)
    return corrupt(impl_->path + ": " + path + " has not 1 or 2 dims");
  hsize_t extent[2] = {};
  if (H5Sget_simple_extent_dims(space.get(), extent, nullptr) != rank)
    return impl_->failed(path);
  Dims dims;
  for (int d = 0; d < rank; ++d) {
    if (extent[d] < 1 || extent[d] > (hsize_t{1} << 62))
      return corrupt(impl_->path + ": " + path + " has no elements");
    dims.push_back(static_cast<int64_t>(extent[d]));
  }
  return dims;
}

Status Hdf5Reader::read_floats(const std::string& path, const Rect& rect,
                               float* out, int64_t row_stride) {
  const QuietErrors quiet;
  RETURN_IF_ERROR(impl_->open_set(path));
  const Id space(H5Dget_space(impl_->set.get()), H5Sclose);
  const Id memory = memory_space(rect.rows, rect.cols, row_stride);
  if (!space.ok() || !memory.ok()) return impl_->failed(path);
  const bool flat = H5Sget_simple_extent_ndims(space.get()) == 1;
  if (!(flat ? select(space.get(), {rect.col}, {rect.cols})
             : select(space.get(), {rect.row, rect.col},
                      {rect.rows, rect.cols})))
    return impl_->failed(path);
  if (H5Dread(impl_->set.get(), H5T_NATIVE_FLOAT, memory.get(), space.get(),
              H5P_DEFAULT, out) < 0)
    return impl_->failed(path);
  return ok_status();
}

Result<std::vector<int64_t>> Hdf5Reader::attribute(const std::string& object,
                                                   const std::string& name) {
  const QuietErrors quiet;
  const std::string what = "attribute " + name + " of " + object;
  const Id attr(H5Aopen_by_name(impl_->file.get(), object.c_str(), name.c_str(),
                                H5P_DEFAULT, H5P_DEFAULT),
                H5Aclose);
  if (!attr.ok()) return impl_->failed(what);
  const Id space(H5Aget_space(attr.get()), H5Sclose);
  const hssize_t n =
      space.ok() ? H5Sget_simple_extent_npoints(space.get()) : -1;
  constexpr hssize_t kMost = 64;
  if (n < 0 || n > kMost) return corrupt(impl_->path + ": " + what);
  std::vector<int64_t> values(static_cast<size_t>(n));
  if (H5Aread(attr.get(), H5T_NATIVE_INT64, values.data()) < 0)
    return impl_->failed(what);
  return values;
}

Result<std::vector<StoredPart>> Hdf5Reader::parts(const std::string& path) {
  ASSIGN_OR_RETURN(const Dims whole, dims(path));
  const QuietErrors quiet;
  const hid_t set = impl_->set.get();
  const bool flat = whole.size() == 1;
  const Rect all{.rows = flat ? 1 : whole[0], .cols = whole.back()};
  std::vector<StoredPart> parts;
  const Id dcpl(H5Dget_create_plist(set), H5Pclose);
  if (!dcpl.ok()) return impl_->failed(path);
  if (H5Pget_layout(dcpl.get()) == H5D_CONTIGUOUS) {
    const haddr_t at = H5Dget_offset(set);
    if (at == HADDR_UNDEF) return impl_->failed(path);
    parts.push_back({at, at + H5Dget_storage_size(set), all});
    return parts;
  }
  hsize_t chunk[2] = {}, count = 0;
  const Id space(H5Dget_space(set), H5Sclose);
  if (H5Pget_chunk(dcpl.get(), 2, chunk) != static_cast<int>(whole.size()) ||
      H5Dget_num_chunks(set, space.get(), &count) < 0)
    return impl_->failed(path);
  for (hsize_t i = 0; i < count; ++i) {
    hsize_t start[2] = {}, bytes = 0;
    haddr_t at = HADDR_UNDEF;
    unsigned skipped = 0;
    if (H5Dget_chunk_info(set, space.get(), i, start, &skipped, &at, &bytes) <
        0)
      return impl_->failed(path);
    const auto n = [](hsize_t x) { return static_cast<int64_t>(x); };
    const Rect rect =
        flat ? Rect{0, n(start[0]), 1, n(chunk[0])}
             : Rect{n(start[0]), n(start[1]), n(chunk[0]), n(chunk[1])};
    parts.push_back({at, at + bytes, geometry::intersect(rect, all)});
  }
  return parts;
}

}  // namespace remesh::store
