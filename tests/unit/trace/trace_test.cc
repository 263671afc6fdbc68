#include <unistd.h>

#include <array>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>

#include "parallel/comm/mesh.h"
#include "tests/testing/expect.h"
#include "tests/testing/local_comm.h"
#include "tests/testing/seed.h"
#include "worker/board/board.h"
#include "worker/trace/trace_file.h"
#include "worker/trace/traced_comm.h"

namespace remesh::trace {
namespace {

using Json = nlohmann::json;

// Returns the spans of a trace after checking what viewers rely on: it is JSON,
// spans of a lane nest or are disjoint, none is negative, and lanes and
// processes have names.
std::vector<Json> checked_spans(const std::string& text) {
  std::vector<Json> spans;
  const Json trace = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  EXPECT_TRUE(trace.is_object()) << text.substr(0, 300);
  if (!trace.is_object()) return spans;
  std::map<std::pair<int, int>, std::string> lanes;
  std::map<std::pair<int, int>, std::vector<std::pair<int64_t, int64_t>>> by;
  for (const Json& e : trace.at("traceEvents")) {
    const std::pair lane(e.at("pid").get<int>(), e.at("tid").get<int>());
    if (e.at("ph") == "M") {
      if (e.at("name") == "thread_name")
        lanes[lane] = e.at("args").at("name").get<std::string>();
      continue;
    }
    EXPECT_EQ(e.at("ph"), "X");
    EXPECT_TRUE(e.at("ts").is_number_integer());
    EXPECT_TRUE(e.at("dur").is_number_integer());
    EXPECT_GE(e.at("dur").get<int64_t>(), 0);
    EXPECT_FALSE(e.at("name").get<std::string>().empty());
    EXPECT_TRUE(e.at("args").is_object());
    const auto ts = e.at("ts").get<int64_t>();
    by[lane].emplace_back(ts, ts + e.at("dur").get<int64_t>());
    spans.push_back(e);
  }
  for (auto& [lane, of_lane] : by) {
    EXPECT_TRUE(lanes.contains(lane)) << "a lane without a name";
    std::vector<int64_t> open;                  // ends, outermost first
    for (const auto& [begin, end] : of_lane) {  // written in this order
      while (!open.empty() && open.back() <= begin) open.pop_back();
      EXPECT_TRUE(open.empty() || end <= open.back())
          << "spans overlap in lane " << lane.second;
      open.push_back(end);
    }
  }
  return spans;
}

TracerOptions rank_options(int rank) {
  return {.generation = 3,
          .rank = rank,
          .mesh = "dp1,pp2",
          .schedule = "1f1b",
          .chunks = 1,
          .microbatches = 4};
}

TEST(Tracer, RecordsNothingWhenOff) {
  Tracer tracer(rank_options(0));
  for (Tracer* t : {&tracer, static_cast<Tracer*>(nullptr)}) {
    const Span span(t, Category::kForward, {{"microbatch", 1}});
  }
  tracer.add(Lane::kCompute, Category::kData, "x", 1, 2);
  EXPECT_EQ(tracer.num_spans(), 0U);
  // An operation that began while it was off is not recorded.
  {
    const int64_t from = tracer.now();
    tracer.set_on(true);
    tracer.add(Lane::kCompute, Category::kData, "x", from, tracer.now());
  }
  EXPECT_EQ(tracer.num_spans(), 0U);
}

TEST(Tracer, SpansAreNestedNamedAndTimedInUnixMicroseconds) {
  Tracer tracer(rank_options(5));
  tracer.set_on(true);
  const double before = unix_seconds();
  {
    const Span step(&tracer, Category::kStep, {{"step", 7}});
    for (int64_t i = 0; i < 2; ++i) {
      const Span f(&tracer, Category::kForward, {{"microbatch", i}});
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    const Span u(&tracer, {.kind = Category::kOptimizer, .name = "adam\"w\\\n"},
                 {});
  }
  const auto spans = checked_spans(tracer.to_json());
  ASSERT_EQ(spans.size(), 4U);
  EXPECT_EQ(spans[0].at("name"), "step");
  EXPECT_EQ(spans[0].at("cat"), "step");
  EXPECT_EQ(spans[0].at("args").at("step"), 7);
  EXPECT_EQ(spans[0].at("pid"), 5);
  EXPECT_EQ(spans[1].at("args").at("microbatch"), 0);
  EXPECT_EQ(spans[2].at("args").at("microbatch"), 1);
  EXPECT_GE(spans[1].at("dur"), 2000);
  EXPECT_EQ(spans[3].at("name"), "adam\"w\\\n");
  const double ts = spans[0].at("ts").get<double>() / 1e6;
  EXPECT_GE(ts, before - 0.01);
  EXPECT_LE(ts, unix_seconds() + 0.01);
  const Json about = Json::parse(tracer.to_json()).at("otherData");
  EXPECT_EQ(about.at("generation"), 3);
  EXPECT_EQ(about.at("mesh"), "dp1,pp2");
  EXPECT_EQ(about.at("microbatches"), 4);
}

TEST(Tracer, MemoryIsBounded) {
  TracerOptions o = rank_options(0);
  o.max_spans = 10;
  Tracer tracer(o);
  tracer.set_on(true);
  for (int i = 0; i < 25; ++i) const Span s(&tracer, Category::kData);
  EXPECT_EQ(tracer.num_spans(), 10U);
  EXPECT_EQ(tracer.dropped(), 15U);
  EXPECT_EQ(Json::parse(tracer.to_json()).at("otherData").at("dropped"), 15);
}

TEST(Tracer, ConcurrentSpansGetLanesOfTheirOwn) {
  const uint64_t seed = test_seed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 rng(seed);
  Tracer tracer(rank_options(1));
  tracer.set_on(true);
  const int64_t base = monotonic_ns();
  for (int i = 0; i < 300; ++i) {
    const int64_t from = base + static_cast<int64_t>(rng() % 1'000'000);
    tracer.add(i % 3 == 0 ? Lane::kBackground : Lane::kCommunication,
               Category::kCollective, "x", from,
               from + static_cast<int64_t>(rng() % 50'000), {{"bytes", i}},
               "dp");
  }
  EXPECT_EQ(checked_spans(tracer.to_json()).size(), 300U);
}

TEST(Tracer, WritesAFileAtOnceAndSaysWhereItCannot) {
  namespace fs = std::filesystem;
  const fs::path dir =
      fs::temp_directory_path() / ("trace_test." + std::to_string(getpid()));
  fs::create_directory(dir);
  Tracer tracer(rank_options(2));
  tracer.set_on(true);
  { const Span s(&tracer, Category::kData); }
  ASSERT_OK(tracer.write((dir / "traces").string()));
  std::ifstream in(dir / "traces" / "gen-3-rank-2.json");
  const std::string text((std::istreambuf_iterator<char>(in)), {});
  EXPECT_EQ(text, tracer.to_json());
  EXPECT_EQ(std::distance(fs::directory_iterator(dir / "traces"), {}), 1);
  std::ofstream(dir / "file") << "x";
  const Status s = tracer.write((dir / "file").string());
  EXPECT_EQ(s.code(), Code::kAlreadyExists);
  EXPECT_SAYS(s, "file");
  fs::remove_all(dir);
}

// Ranks as threads, each with a tracer, on the groups of a mesh.
TEST(TracedComm, RecordsEveryOperationWithBytesAndGroup) {
  constexpr int kRanks = 4;
  std::vector<std::unique_ptr<Tracer>> tracers;
  for (int r = 0; r < kRanks; ++r)
    tracers.push_back(std::make_unique<Tracer>(rank_options(r)));
  std::array<std::atomic<int64_t>, 2> sent_ns{};
  comm::on_ranks(kRanks, [&](comm::Comm& comm) {
    const int r = comm.rank();
    Tracer& t = *tracers[static_cast<size_t>(r)];
    TracedComm world(comm, t, "world", mesh_group_names());
    ASSERT_OK_AND(auto mesh, comm::Mesh::make(world, {.dp = 2, .pp = 2}));
    std::vector<float> x(8, static_cast<float>(r));
    mesh->data().all_reduce(x, comm::Op::kSum);  // not traced yet
    t.set_on(true);
    mesh->data().all_reduce(x, comm::Op::kSum);
    auto again = mesh->data().split(0, r);
    auto reduce = again->start_all_reduce(x, comm::Op::kMax);
    std::vector<std::byte> bytes(16);
    comm::Comm& pp = mesh->pp();
    if (pp.rank() == 0) {
      sent_ns.at(static_cast<size_t>(r)) = t.now();
      pp.start_send(bytes, 1, 7)->wait();
    } else {
      pp.recv(bytes, 0, 7);
      const int64_t sent = sent_ns.at(static_cast<size_t>(r - 2));
      t.add(Lane::kCommunication, Category::kData, "sent", sent, sent);
    }
    reduce->wait();
    world.barrier();
  });
  for (int r = 0; r < kRanks; ++r) {
    const auto spans =
        checked_spans(tracers[static_cast<size_t>(r)]->to_json());
    const auto find = [&](const std::string& name, int tid) {
      for (const Json& s : spans)
        if (s.at("name") == name && (s.at("tid") == 0) == (tid == 0)) return s;
      ADD_FAILURE() << "no " << name << " of rank " << r;
      return Json();
    };
    const Json blocking = find("all_reduce", 0);
    EXPECT_EQ(blocking.at("args").at("group"), "data");
    EXPECT_EQ(blocking.at("args").at("bytes"), 32);
    EXPECT_EQ(blocking.at("args").at("ranks"), 2);
    EXPECT_EQ(blocking.at("cat"), "collective");
    EXPECT_EQ(find("all_reduce", 1).at("args").at("group"), "data");
    EXPECT_EQ(find("wait all_reduce", 0).at("cat"), "wait");
    EXPECT_EQ(find("barrier", 0).at("args").at("group"), "world");
    if (r >= 2) {  // the second stage
      const Json waited = find("recv", 0);
      EXPECT_EQ(waited.at("cat"), "bubble");
      EXPECT_EQ(waited.at("args").at("bytes"), 16);
      EXPECT_GE(
          waited.at("ts").get<int64_t>() + waited.at("dur").get<int64_t>(),
          find("sent", 1).at("ts").get<int64_t>());
    } else {
      EXPECT_EQ(find("send", 1).at("args").at("group"), "pp");
      EXPECT_EQ(find("wait send", 0).at("cat"), "bubble");
    }
  }
}

// With tracing off, the flight record has the same operations, and also members
// and peers as world ranks and the sequence numbers of collectives.
TEST(TracedComm, TheFlightRecordIsWrittenEvenWhileTheTracerIsOff) {
  constexpr int kRanks = 4;
  std::vector<std::unique_ptr<board::Board>> boards;
  for (int r = 0; r < kRanks; ++r)
    boards.push_back(std::move(board::Board::create(1, r)).value());
  comm::on_ranks(kRanks, [&](comm::Comm& comm) {
    Tracer t;
    board::Board& b = *boards[static_cast<size_t>(comm.rank())];
    t.set_flight(&b.flight());
    TracedComm world(comm, t, "world", mesh_group_names());
    ASSERT_OK_AND(auto mesh, comm::Mesh::make(world, {.dp = 2, .pp = 2}));
    b.set_step(5);
    const Span step(&t, Category::kStep, {{"step", 5}});
    std::vector<float> x(8, 1);
    mesh->data().all_reduce(x, comm::Op::kSum);
    auto reduce = mesh->data().start_all_reduce(x, comm::Op::kMax);
    std::vector<std::byte> bytes(16);
    comm::Comm& pp = mesh->pp();
    if (pp.rank() == 0)
      pp.start_send(bytes, 1, 7)->wait();
    else
      pp.recv(bytes, 0, 7);
    reduce->wait();
    EXPECT_EQ(t.num_spans(), 0U);
  });
  for (int r = 0; r < kRanks; ++r) {
    const board::Flight f = boards[static_cast<size_t>(r)]->flight().read();
    const auto find = [&](const std::string& name, const std::string& group) {
      for (const board::FlightOp& op : f.ops)
        if (op.name == name && op.group >= 0 &&
            f.groups[static_cast<size_t>(op.group)].name == group)
          return op;
      ADD_FAILURE() << "no " << name << " on " << group << " of rank " << r;
      return board::FlightOp{.group = 0};
    };
    const board::FlightOp sum = find("all_reduce", "data");
    EXPECT_EQ(sum.kind, Category::kCollective);
    EXPECT_EQ(sum.bytes, 32);
    EXPECT_EQ(sum.number, 1);
    EXPECT_EQ(sum.step, 5);
    EXPECT_NE(sum.end_ns, 0);
    EXPECT_EQ(f.groups[static_cast<size_t>(sum.group)].ranks,
              (std::vector<int>{r / 2 * 2, r / 2 * 2 + 1}));
    const board::FlightOp wait = find("wait all_reduce", "data");
    EXPECT_EQ(wait.kind, Category::kWait);
    EXPECT_EQ(wait.number, 2);
    const board::FlightOp& step = f.ops[0];
    EXPECT_EQ(step.kind, Category::kStep);
    EXPECT_EQ(wait.outer, step.id);
    EXPECT_NE(step.end_ns, 0);
    const bool first = r < 2;  // stage
    const board::FlightOp message = find(first ? "wait send" : "recv", "pp");
    EXPECT_EQ(message.kind, Category::kBubble);
    EXPECT_EQ(message.peer, first ? r + 2 : r - 2);
    EXPECT_EQ(message.number, -1);
    EXPECT_EQ(f.current, 0U);
  }
}

TEST(TraceFile, InvalidTextIsReplaced) {
  EXPECT_EQ(json_text("a\"b\\c\nd"), R"("a\"b\\c\nd")");
  const std::string good = "\u00e4 \u20ac \U0001F600";
  EXPECT_EQ(Json::parse(json_text(good)), good);
  for (const char* bad :
       {"\xff", "\xc3", "\xc3(", "\xe2\x82", "\xed\xa0\x80", "\xc0\x80",
        "\xf0\x80\x80\x80", "\xf5\x80\x80\x80", "\x80"}) {
    const Json j = Json::parse(json_text(std::string(bad) + "x"), nullptr,
                               /*allow_exceptions=*/false);
    ASSERT_TRUE(j.is_string()) << bad;
    EXPECT_EQ(j.get<std::string>().back(), 'x');
  }
}

}  // namespace
}  // namespace remesh::trace
