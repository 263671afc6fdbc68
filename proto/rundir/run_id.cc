#include "proto/rundir/run_id.h"

#include <charconv>

#include "proto/rundir/paths.h"

namespace remesh::rundir {

uint64_t run_id_of(FileSystem& fs, const std::string& run) {
  constexpr uint64_t kMostBytes = uint64_t{16} << 20;
  const auto text = read_file(fs, job_path(run), kMostBytes);
  if (!text.ok()) return 0;
  const size_t at = text->rfind("\n" + std::string(kRunIdMark));
  if (at == std::string::npos) return 0;
  uint64_t id = 0;
  const char* from = text->data() + at + 1 + kRunIdMark.size();
  std::from_chars(from, text->data() + text->size(), id, 16);
  return id;
}

}  // namespace remesh::rundir
