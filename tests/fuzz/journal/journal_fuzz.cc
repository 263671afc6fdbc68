// Damaged journals: truncated, flipped, spliced. Opening one returns an error
// or exactly the persisted state, and never crashes.

#include <fstream>
#include <random>

#include "coordinator/rundir/lines.h"
#include "coordinator/rundir/run_dir.h"
#include "coordinator/server/journal.h"
#include "tests/testing/expect.h"
#include "tests/testing/seed.h"
#include "tests/testing/temp_dir.h"

namespace remesh::server {
namespace {

std::string mutate(std::string bytes, std::mt19937_64& random) {
  const auto below = [&](size_t n) {
    return random() % std::max<size_t>(n, 1);
  };
  switch (below(4)) {
    case 0:
      bytes.resize(below(bytes.size()));
      break;
    case 1:
      for (size_t n = 1 + below(4); n > 0 && !bytes.empty(); --n) {
        bytes[below(bytes.size())] ^= static_cast<char>(1 << below(8));
      }
      break;
    case 2: {  // zero about a page, as after a crash
      const size_t at = below(bytes.size());
      const size_t n = std::min(bytes.size() - at, below(5000));
      std::fill_n(bytes.begin() + static_cast<std::ptrdiff_t>(at), n, '\0');
      break;
    }
    default: {  // copy a piece to another place
      const size_t from = below(bytes.size());
      const size_t to = below(bytes.size());
      const size_t n =
          std::min({bytes.size() - from, bytes.size() - to, below(2000)});
      bytes.replace(to, n, bytes.substr(from, n));
    }
  }
  return bytes;
}

TEST(JournalFuzz, DamageIsAStatusNeverAnotherState) {
  const TempDir dir;
  const std::string path = dir / "journal";
  const auto files = posix_file_system();
  pb::Durable truth;
  {
    ASSERT_OK_AND(auto j, Journal::open(*files, path));
    for (int i = 1; i <= 30; ++i) {
      truth.set_generation(i);
      truth.set_phase(pb::Durable::RUNNING);
      truth.mutable_cause()->set_what(
          std::string(300 * i, static_cast<char>('a' + i % 26)));
      ASSERT_OK(j->persist(truth));
    }
  }
  const std::string sound = read_whole(path);
  std::mt19937_64 random(test_seed());
  int refused = 0;
  for (int i = 0; i < 300; ++i) {
    std::ofstream(path, std::ios::binary | std::ios::trunc)
        << mutate(sound, random);
    auto j = Journal::open(*files, path);
    if (!j.ok()) {
      ++refused;
      EXPECT_FALSE(j.status().message().empty());
      continue;
    }
    ASSERT_TRUE((*j)->restored().has_value()) << "round " << i;
    EXPECT_EQ((*j)->restored()->SerializeAsString(), truth.SerializeAsString())
        << "round " << i;
    (void)(*j)->persist(truth).ok();
  }
  EXPECT_GT(refused, 50);
}

TEST(LinesFuzz, AnyBytesAreALineOrAStatus) {
  pb::StepMetrics m;
  m.set_step(3);
  m.set_loss(2.5);
  m.mutable_mesh()->set_dp(2);
  pb::EventRecord e;
  e.set_event("mesh");
  e.set_time(12.5);
  e.set_cause("signal 9");
  const std::string texts[] = {
      rundir::metrics_line(m), rundir::event_line(e),
      rundir::endpoint_text({"tcp://h:1", "h", 3, "tcp://h:1"})};
  std::mt19937_64 random(test_seed());
  for (int i = 0; i < 20'000; ++i) {
    const std::string bytes = mutate(texts[i % 3], random);
    if (const auto p = rundir::parse_metrics_line(bytes); p.ok()) {
      // Accepted input can be written and read again.
      EXPECT_OK(rundir::parse_metrics_line(rundir::metrics_line(p.value())));
    }
    if (const auto p = rundir::parse_event_line(bytes); p.ok()) {
      EXPECT_OK(rundir::parse_event_line(rundir::event_line(p.value())));
    }
    (void)rundir::parse_endpoint(bytes).ok();
  }
}

}  // namespace
}  // namespace remesh::server
