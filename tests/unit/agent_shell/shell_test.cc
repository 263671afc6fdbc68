// Parts of the worker's shell that need no MPI.
#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <thread>

#include "proto/base/child.h"
#include "proto/base/machine.h"
#include "proto/base/process.h"
#include "proto/base/socket_guard.h"
#include "tests/testing/expect.h"
#include "tests/testing/small_disk.h"
#include "tests/testing/temp_dir.h"
#include "tests/unit/agent_shell/num_entries.h"
#include "worker/agent/shell/hardware.h"
#include "worker/agent/shell/probe.h"
#include "worker/agent/shell/process_control.h"
#include "worker/agent/shell/scratch.h"

namespace remesh::agent {
namespace {

// Runs in the restarted process: is the file still open?
constexpr char kRestarted[] = "REMESH_TEST_RESTARTED";
[[maybe_unused]] const bool was_restarted = [] {
  if (const char* fd = std::getenv(kRestarted))
    _exit(fcntl(std::atoi(fd), F_GETFD) == -1 ? 42 : 43);
  return false;
}();

TEST(Process, RestartsWithoutOpenDescriptors) {
  const pid_t child = fork();
  if (child == 0) {
    // Would be inherited; not a standard one, if that is closed.
    const int fd = fcntl(open("/dev/null", O_RDONLY), F_DUPFD, 3);
    setenv(kRestarted, std::to_string(fd).c_str(), 1);
    (void)restart_process().ok();
    _exit(1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 42);
}

// --------------------------------------------------------------- processes

ChildOptions shell(const TempDir& dir, const std::string& script) {
  ChildOptions c;
  c.argv = {"/bin/sh", "-c", script};
  c.env = {"PATH=/usr/bin:/bin"};
  c.output = dir / "out";
  return c;
}

std::string output_of(const ChildOptions& options) {
  auto child = start_child(options);
  EXPECT_OK(child);
  if (!child.ok()) return "";
  close(child->pidfd);
  waitpid(child->pid, nullptr, 0);
  std::ifstream in(options.output);
  return {std::istreambuf_iterator<char>(in), {}};
}

TEST(Process, ChildHasNoDescriptorsButItsOwn) {
  TempDir dir;
  const int leaky = dup(1);  // not close-on-exec
  ChildOptions c = shell(dir, "");
  c.argv = {"/bin/ls", "/proc/self/fd"};
  EXPECT_EQ(output_of(c), "0\n1\n2\n3\n");  // 3: the folder that ls reads
  c.pass_fd = leaky;
  EXPECT_EQ(output_of(c), "0\n1\n2\n3\n4\n");
  close(leaky);
}

TEST(Process, ChildHasItsOwnGroupCleanSignalsAndDiesFirst) {
  TempDir dir;
  sigset_t set, before;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &set, &before);
  signal(SIGPIPE, SIG_IGN);
  ChildOptions c = shell(dir, "");
  c.argv = {"/bin/grep", "-hE", "Sig(Blk|Ign)|^-?[0-9]+$", "/proc/self/status",
            "/proc/self/oom_score_adj"};
  const std::string out = output_of(c);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  signal(SIGPIPE, SIG_DFL);
  // A larger score than 500 is kept.
  int score = 0;
  std::ifstream("/proc/self/oom_score_adj") >> score;
  EXPECT_EQ(out, fmt::format("SigBlk:\t{0:016x}\nSigIgn:\t{0:016x}\n{1}\n", 0,
                             std::max(score, 500)));
  std::istringstream ids(
      output_of(shell(dir, "cut -d' ' -f1,5 /proc/$$/stat")));
  int pid = 0, group = 1;
  ids >> pid >> group;
  EXPECT_EQ(pid, group);
}

TEST(Process, AProgramThatFailsToStartLateIsNotEndedBySigpipe) {
  TempDir dir;
  ChildOptions c = shell(dir, "");
  c.argv = {"/no/such/program"};
  c.output = dir / "pipe";  // opens when somebody reads it
  ASSERT_EQ(mkfifo(c.output.c_str(), 0600), 0);
  ASSERT_OK_AND(auto child, start_child(c));
  const int reader = open(c.output.c_str(), O_RDONLY);
  int status = 0;
  ASSERT_EQ(waitpid(child.pid, &status, 0), child.pid);
  close(reader);
  close(child.pidfd);
  ASSERT_TRUE(WIFEXITED(status)) << status;
  EXPECT_EQ(WEXITSTATUS(status), 127);
}

TEST(Hardware, WhatTheProgramPrintsIsADescriptionOnlyIfItSucceeds) {
  TempDir dir;
  const std::string program = dir / "measure";
  const auto measured = [&](int code) {
    std::ofstream(program) << "#!/bin/sh\nprintf %s \"$1\"\nexit " << code;
    chmod(program.c_str(), 0700);
    return describe_hardware(program);
  };
  EXPECT_EQ(measured(0).description, "--core");
  EXPECT_EQ(measured(0).error, "");
  EXPECT_EQ(measured(1).description, "");
  EXPECT_EQ(measured(1).error, program + " failed: --core");
}

TEST(Process, ProgramThatCannotRunIsNamed) {
  TempDir dir;
  ChildOptions c = shell(dir, "");
  c.argv = {"/no/such/program"};
  EXPECT_SAYS(start_child(c), "/no/such/program");
  c = shell(dir, "");
  c.output = "/no/such/folder/out";
  EXPECT_FALSE(start_child(c).ok());
}

TEST(Process, APidfdReportsTheEnd) {
  TempDir dir;
  ASSERT_OK_AND(auto child, start_child(shell(dir, "exit 5")));
  ASSERT_GE(child.pidfd, 0);
  int status = 0;
  waitpid(child.pid, &status, 0);
  EXPECT_EQ(WEXITSTATUS(status), 5);
  close(child.pidfd);
}

TEST(Process, StatOfNamesWithParenthesesIsRead) {
  const auto s = parse_proc_stat(
      "17 (a) R (b c) S 1 17 17 0 -1 4194560 1 0 0 0 5 6 0 0 20 0 1 0 4711 "
      "1000 25 184467");
  ASSERT_TRUE(s);
  EXPECT_EQ(s->state, 'S');
  EXPECT_EQ(s->start_time, 4711u);
  EXPECT_EQ(s->rss_bytes, 25u * static_cast<uint64_t>(sysconf(_SC_PAGESIZE)));
  EXPECT_FALSE(parse_proc_stat("17 (a"));
  EXPECT_FALSE(parse_proc_stat("17 (a) S 1 2"));
  EXPECT_TRUE(read_proc_stat(getpid()));
}

sockaddr_in loopback(uint32_t last, in_port_t port) {
  sockaddr_in a{};
  a.sin_family = AF_INET;
  a.sin_addr.s_addr = last == 0 ? 0 : htonl(0x7F000000 | last);
  a.sin_port = port;
  return a;
}

// Accepts connections as a rank that listens on these addresses, until one has
// sent "q". Its process is a new one, because guards are never taken off.
pid_t guarded(const char* listen_on, int fd) {
  const pid_t child = fork();
  if (child != 0) return child;
  setenv(kListenVariable, listen_on, 1);
  guard_sockets();
  sockaddr_in any = loopback(0, 0);
  const int server = socket(AF_INET, SOCK_STREAM, 0);
  socklen_t size = sizeof(any);
  auto* at = reinterpret_cast<sockaddr*>(&any);
  bool ok = bind(server, at, size) == 0 && listen(server, 8) == 0 &&
            getsockname(server, at, &size) == 0 &&
            write(fd, &any, sizeof(any)) == sizeof(any);
  for (char said = 0; ok && said != 'q';) {
    const int accepted = accept(server, nullptr, nullptr);
    ok = accepted >= 0 && read(accepted, &said, 1) == 1 &&
         write(accepted, &said, 1) == 1;
    close(accepted);
  }
  _exit(ok ? 0 : 1);
}

// What comes back from 127.0.0.LAST; 0: nothing.
char answer(uint32_t last, in_port_t port, char say) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const sockaddr_in to = loopback(last, port);
  char got = 0;
  if (connect(fd, reinterpret_cast<const sockaddr*>(&to), sizeof(to)) != 0 ||
      send(fd, &say, 1, MSG_NOSIGNAL) != 1 || read(fd, &got, 1) != 1)
    got = 0;
  close(fd);
  return got;
}

TEST(SocketGuard, ConnectionsToOtherAddressesAreClosed) {
  for (const char* on : {"127.0.0.2,127.0.0.3", "127.0.0.2"}) {
    int ends[2];
    ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
    const pid_t child = guarded(on, ends[1]);
    sockaddr_in bound{};
    ASSERT_EQ(read(ends[0], &bound, sizeof(bound)), ssize_t{sizeof(bound)});
    const in_port_t port = bound.sin_port;
    const bool several = std::string(on).find(',') != std::string::npos;
    EXPECT_EQ(bound.sin_addr.s_addr == INADDR_ANY, several);
    EXPECT_EQ(answer(2, port, 'a'), 'a');
    EXPECT_EQ(answer(3, port, 'b'), several ? 'b' : 0);
    EXPECT_EQ(answer(4, port, 'c'), 0);
    EXPECT_EQ(answer(2, port, 'q'), 'q');
    int status = 0;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
    close(ends[0]);
    close(ends[1]);
  }
}

TEST(Process, KillsForLackOfMemoryAreCountedByTheNearestCgroup) {
  TempDir dir;
  const auto put = [&](const std::string& file, const std::string& text) {
    const std::filesystem::path path = dir / file;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
  };
  const auto count = [&](const std::string& own) {
    return oom_kills(own, dir.path(), dir / "vmstat");
  };
  EXPECT_EQ(count("0::/a/b\n"), 0u);
  put("vmstat", "nr_free_pages 7\noom_kill 5\n");
  EXPECT_EQ(count("0::/a/b\n"), 5u);
  put("a/memory.events", "low 1\noom 3\noom_kill 2\n");
  EXPECT_EQ(count("0::/a/b\n"), 2u);
  put("a/b/memory.events", "oom 3\noom_kill 1\n");
  EXPECT_EQ(count("0::/a/b\n"), 1u);
  put("memory/c/memory.oom_control", "oom_kill_disable 0\noom_kill 4\n");
  EXPECT_EQ(count("7:cpu,memory:/c\n0::/\n"), 4u);
}

TEST(Process, MemoryIsLimitedByTheCgroupAndItsParents) {
  TempDir dir;
  const auto limit = [&](const std::string& folder, const std::string& value) {
    std::filesystem::create_directories(dir / folder);
    const bool v1 = folder.starts_with("memory");
    std::ofstream(dir / folder +
                  (v1 ? "/memory.limit_in_bytes" : "/memory.max"))
        << value << "\n";
  };
  const std::string v2 = "0::/user.slice/me.scope\n";
  EXPECT_EQ(cgroup_memory_limit(v2, dir.path()), 0u);
  limit("user.slice/me.scope", "max");
  EXPECT_EQ(cgroup_memory_limit(v2, dir.path()), 0u);
  limit("user.slice", "4096");
  EXPECT_EQ(cgroup_memory_limit(v2, dir.path()), 4096u);
  limit("user.slice/me.scope", "8192");
  EXPECT_EQ(cgroup_memory_limit(v2, dir.path()), 4096u);
  limit("user.slice", "16384");
  EXPECT_EQ(cgroup_memory_limit(v2, dir.path()), 8192u);
  // In a container the path is that of the host.
  limit("", "2048");
  EXPECT_EQ(cgroup_memory_limit("0::/docker/x\n", dir.path()), 2048u);
  limit("memory/batch/job", "1024");
  limit("memory", "9223372036854771712");
  EXPECT_EQ(
      cgroup_memory_limit("4:cpu:/x\n9:blkio,memory:/batch/job\n", dir.path()),
      1024u);
  EXPECT_EQ(cgroup_memory_limit("4:cpu:/batch/job\n", dir.path()), 0u);
}

TEST(Process, ProcessorsAreLimitedByTheCgroupAndItsParents) {
  TempDir dir;
  const auto put = [&](const std::string& file, const std::string& value) {
    const auto path = std::filesystem::path(dir / file);
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << value << "\n";
  };
  const std::string v2 = "0::/user.slice/me.scope\n";
  EXPECT_EQ(cgroup_cpu_limit(v2, dir.path()), 0);
  put("user.slice/me.scope/cpu.max", "max 100000");
  EXPECT_EQ(cgroup_cpu_limit(v2, dir.path()), 0);
  put("user.slice/cpu.max", "150000 100000");
  EXPECT_EQ(cgroup_cpu_limit(v2, dir.path()), 1.5);
  const std::string v1 = "9:blkio,memory:/x\n4:cpu,cpuacct:/batch/job\n";
  EXPECT_EQ(cgroup_cpu_limit(v1, dir.path()), 0);
  put("cpu/cpu.cfs_quota_us", "-1");
  put("cpu/cpu.cfs_period_us", "100000");
  EXPECT_EQ(cgroup_cpu_limit(v1, dir.path()), 0);
  put("cpu/batch/cpu.cfs_quota_us", "50000");
  put("cpu/batch/cpu.cfs_period_us", "25000");
  EXPECT_EQ(cgroup_cpu_limit(v1, dir.path()), 2);
}

TEST(Process, LeftoversAreKilledButNeverAStranger) {
  TempDir dir;
  ASSERT_OK_AND(auto child, start_child(shell(dir, "sleep 100")));
  close(child.pidfd);
  const auto stat = read_proc_stat(child.pid);
  ASSERT_TRUE(stat);
  EXPECT_EQ(kill_leftovers({{child.pid, stat->start_time + 1}}, 100), 0);
  EXPECT_EQ(waitpid(child.pid, nullptr, WNOHANG), 0);
  EXPECT_EQ(kill_leftovers({{child.pid, stat->start_time}}, 60'000), 1);
  int status = 0;
  EXPECT_EQ(waitpid(child.pid, &status, 0), child.pid);
  EXPECT_EQ(WTERMSIG(status), SIGKILL);
}

// ------------------------------------------------------------------ scratch

// A service manager starts the next worker while the kernel is still freeing
// the memory of the killed one.
TEST(Scratch, WaitsForADyingPredecessor) {
  TempDir dir;
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t child = fork();
  if (child == 0) {
    auto s = Scratch::open(dir / "s", "a");
    (void)!write(ready[1], "x", 1);
    usleep(200'000);
    kill(getpid(), SIGKILL);
  }
  std::thread reaper([child] { waitpid(child, nullptr, 0); });
  char byte = 0;
  EXPECT_EQ(read(ready[0], &byte, 1), 1);
  auto s = Scratch::open(dir / "s", "a", 60'000);
  EXPECT_OK(s);
  reaper.join();
  close(ready[0]);
  close(ready[1]);
}

TEST(Scratch, SecondHolderOfANameIsRefusedAndTheFolderGoesAtTheEnd) {
  TempDir dir;
  {
    ASSERT_OK_AND(auto first, Scratch::open(dir / "s", "a"));
    EXPECT_EQ(first->cleaned(), "");
    auto second = Scratch::open(dir / "s", "a");
    EXPECT_EQ(second.status().code(), Code::kAlreadyExists);
    EXPECT_SAYS(second, std::to_string(getpid()));
    EXPECT_OK(Scratch::open(dir / "s", "b"));
    ASSERT_OK_AND(auto g, first->make_generation(7, 1 << 20));
    std::ofstream(g.shared + "/segment") << "x";
    EXPECT_EQ(g.shared.rfind("/dev/shm/remesh-", 0), 0u);
    first->remove_generation(7);
    EXPECT_FALSE(std::filesystem::exists(g.folder));
    EXPECT_FALSE(std::filesystem::exists(g.shared));
    ASSERT_OK_AND(auto huge, first->make_generation(8, uint64_t{1} << 60));
    EXPECT_EQ(huge.shared.rfind(dir.path(), 0), 0u);
  }
  EXPECT_EQ(num_entries(dir / "s"), 0);
}

// Nobody would know a folder with an empty lock file for that of a worker.
TEST(Scratch, AFullDiskLeavesNoFolder) {
  TempDir dir;
  const testing::SmallDisk disk(dir / "s", 64 << 10);
  if (!disk.mounted()) GTEST_SKIP() << "needs mount";
  disk.fill(0);
  const auto full = Scratch::open(disk.path(), "a");
  EXPECT_EQ(full.status().code(), Code::kExhausted);
  disk.free();
  EXPECT_EQ(num_entries(disk.path()), 0);
  EXPECT_OK(Scratch::open(disk.path(), "a"));
}

// The clock of the host went back while the worker was down.
TEST(Scratch, IncarnationsGrowWhateverTheClockSays) {
  TempDir dir;
  constexpr uint64_t kNow = uint64_t{1'800'000'000'000} << 20;
  const pid_t child = fork();
  if (child == 0) {
    auto s = Scratch::open(dir / "s", "a");
    const bool by_clock = (*s)->new_incarnation(kNow) == kNow;
    if (by_clock) kill(getpid(), SIGKILL);
    _exit(1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFSIGNALED(status));
  ASSERT_OK_AND(auto s, Scratch::open(dir / "s", "a", 60'000));
  constexpr uint64_t kHour = uint64_t{3'600'000} << 20;
  EXPECT_EQ(s->new_incarnation(kNow - kHour), kNow + 1);
  EXPECT_EQ(s->new_incarnation(kNow - kHour), kNow + 2);
  // A clock that is decades ahead, and right again.
  EXPECT_EQ(s->new_incarnation(2 * kNow), 2 * kNow);
  EXPECT_EQ(s->new_incarnation(kNow + kHour), kNow + kHour);
}

// As by a job that cleans /tmp.
TEST(Scratch, WhatSomebodyRemovesIsMadeAgain) {
  TempDir dir;
  ASSERT_OK_AND(auto s, Scratch::open(dir / "s", "a"));
  std::filesystem::remove_all(dir / "s");
  EXPECT_OK(s->make_generation(1, 0));
  EXPECT_TRUE(std::filesystem::exists(s->pmix_folder()));
  EXPECT_EQ(Scratch::open(dir / "s", "a").status().code(),
            Code::kAlreadyExists);
}

TEST(Scratch, LeftoversOfAnyDeadWorkerAreSwept) {
  TempDir dir;
  const pid_t child = fork();
  if (child == 0) {
    auto s = Scratch::open(dir / "s", "dead");
    auto g = (*s)->make_generation(3, 1 << 20);
    std::ofstream(g->shared + "/segment") << "x";
    kill(getpid(), SIGKILL);
  }
  waitpid(child, nullptr, 0);
  EXPECT_TRUE(std::filesystem::exists(dir / "s/dead/g3"));
  const std::string shared = shared_root_of(dir / "s/dead");
  EXPECT_TRUE(std::filesystem::exists(shared + "/g3/segment"));
  auto s = Scratch::open(dir / "s", "alive");
  ASSERT_OK(s);
  EXPECT_EQ(num_entries(dir / "s"), 1);
  EXPECT_FALSE(std::filesystem::exists(shared));
}

TEST(Scratch, WorkerThatEndsSweepsUpAfterOneThatWasKilled) {
  TempDir dir;
  {
    auto alive = Scratch::open(dir / "s", "alive");
    const pid_t child = fork();
    if (child == 0) {
      auto s = Scratch::open(dir / "s", "dead");
      (void)(*s)->make_generation(3, 1 << 20);
      kill(getpid(), SIGKILL);
    }
    waitpid(child, nullptr, 0);
    EXPECT_EQ(num_entries(dir / "s"), 2);
  }
  EXPECT_FALSE(std::filesystem::exists(dir / "s"));
  EXPECT_FALSE(std::filesystem::exists(shared_root_of(dir / "s/dead")));
}

TEST(Scratch, ManyWorkersComeAndGoAtOnce) {
  TempDir dir;
  std::atomic<int> failed{0};
  std::vector<std::thread> threads;
  threads.reserve(4);
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < 40; ++i)
        if (!Scratch::open(dir / "s", std::string(1, 'a' + t)).ok()) ++failed;
    });
  for (auto& t : threads) t.join();
  EXPECT_EQ(failed, 0);
  EXPECT_FALSE(std::filesystem::exists(dir / "s"));
}

TEST(Scratch, RanksOfAKilledPredecessorDie) {
  TempDir dir;
  ASSERT_OK_AND(auto orphan, start_child(shell(dir, "sleep 100")));
  close(orphan.pidfd);
  const pid_t child = fork();
  if (child == 0) {
    auto s = Scratch::open(dir / "s", "a");
    (*s)->note_rank(orphan.pid);
    kill(getpid(), SIGKILL);
  }
  waitpid(child, nullptr, 0);
  ASSERT_OK_AND(auto s, Scratch::open(dir / "s", "a"));
  EXPECT_HAS(s->cleaned(), "1 ranks killed");
  int status = 0;
  EXPECT_EQ(waitpid(orphan.pid, &status, 0), orphan.pid);
  EXPECT_EQ(WTERMSIG(status), SIGKILL);
}

TEST(Scratch, ARootOfAnotherUserIsRefused) {
  TempDir dir;
  std::ofstream(dir / "file") << "x";
  EXPECT_SAYS(Scratch::open(dir / "file", "a"), "--scratch");
  std::filesystem::create_symlink(dir.path(), dir / "link");
  EXPECT_FALSE(Scratch::open(dir / "link", "a").ok());
  for (const char* shared : {"root", "root/a"}) {
    std::filesystem::create_directories(dir / "root/a");
    ASSERT_EQ(chmod((dir / shared).c_str(), 0770), 0);
    EXPECT_SAYS(Scratch::open(dir / "root", "a"),
                dir / shared + ": others may write");
    ASSERT_EQ(chmod((dir / shared).c_str(), 0755), 0);
  }
  EXPECT_OK(Scratch::open(dir / "root", "a"));
}

TEST(WhyRefused, OnlyAWorkerOfAnotherJobIsToldToConnectElsewhere) {
  pb::Refusal no;
  no.set_reason("no");
  no.set_kind(pb::Refusal::OTHER_JOB);
  const std::string advice = "connect to the coordinator of \"mine\"";
  EXPECT_HAS(why_refused("tcp://h:1", no, "mine"), advice);
  no.set_kind(pb::Refusal::PERMANENT);
  EXPECT_EQ(why_refused("tcp://h:1", no, "mine"),
            "the coordinator at tcp://h:1 refuses this worker: no");
}

}  // namespace
}  // namespace remesh::agent
