// Three data sets mixed by weight, while workers join and are killed: every
// finished step was made of the sequences that the documentation lists for it.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "parallel/jobfile/jobfile.h"
#include "proto/data/index.h"
#include "tests/e2e/e2e.h"
#include "tests/testing/batch_order.h"
#include "tests/testing/expect.h"

namespace remesh::e2e {
namespace {

constexpr double kRounding = 5e-6;  // of a loss of about 5.6

// Words with that letter, which no other set has.
std::string text_of(char letter, int words) {
  std::string text;
  for (int i = 0; i < words; ++i)
    text += fmt::format("{}{}{}", letter, i * i % 7919,
                        i % 40 == 39 ? "\n<|endoftext|>\n" : " ");
  return text;
}

class MixtureTest : public E2e {
 protected:
  struct Set {
    char letter;
    int words;
    const char* weight;
  };
  // Of sizes and weights that end their passes at different steps.
  static constexpr Set kSets[] = {
      {'a', 640, "0.5"}, {'b', 210, "0.3"}, {'c', 420, "0.2"}};

  void SetUp() override {
    std::vector<std::string> mixed{"data", "mix"};
    for (const Set& s : kSets) {
      const std::string text = folder(s) + ".txt";
      testing::write_whole(text, text_of(s.letter, s.words));
      remesh_data({"data", "prepare", "--input", text, "--out", folder(s),
                   "--val-fraction", "0"});
      mixed.push_back(folder(s) + "=" + s.weight);
      sets_ += (sets_.empty() ? "" : ",") + mixed.back();
    }
    mixed.insert(mixed.end(), {"--out", mixture()});
    remesh_data(mixed);
  }
  std::string folder(const Set& s) const {
    return dir_ / std::string(1, s.letter);
  }
  std::string mixture() const { return dir_ / "mix"; }

  static void remesh_data(std::vector<std::string> command) {
    command.insert(command.begin(), testing::program("remesh"));
    const Finished f = testing::run_program(command);
    ASSERT_EQ(f.exit.code, 0) << f.output;
  }
  // The others, so many ranks, continue.
  void kill_worker(const std::string& name, int64_t others) {
    const int64_t at = c().last_step();
    c().worker(name).kill(SIGKILL);
    ASSERT_TRUE(c().wait_for_dp(others, at));
  }
  void join(const std::string& name, int64_t ranks) {
    const int64_t at = c().last_step();
    c().start_worker({.name = name});
    ASSERT_TRUE(c().wait_for_dp(ranks, at));
    ASSERT_TRUE(c().wait_for_step(c().last_step() + 20));
  }
  // In each pass over a set each of its sequences occurs once.
  void expect_each_once_a_pass(const std::vector<Sequence>& sequences,
                               int64_t seq_len) const;

  const testing::TempDir dir_;
  std::string sets_;  // for batch_order.py
};

void MixtureTest::expect_each_once_a_pass(
    const std::vector<Sequence>& sequences, int64_t seq_len) const {
  for (const Set& s : kSets) {
    std::map<Sequence, int64_t> used;
    int64_t all = 0;
    for (const Sequence& q : sequences) {
      if (std::find(q.begin(), q.end(), s.letter) == q.end()) continue;
      ++used[q];
      ++all;
    }
    ASSERT_OK_AND(const auto index, data::read_index(folder(s)));
    const int64_t windows = (index.train_tokens() - 1) / seq_len;
    EXPECT_EQ(static_cast<int64_t>(used.size()), windows) << s.letter;
    EXPECT_GT(all, windows) << s.letter;
    for (const auto& [sequence, times] : used) {
      EXPECT_GE(times, all / windows) << s.letter;
      EXPECT_LE(times, (all + windows - 1) / windows) << s.letter;
    }
  }
}

// With a learning rate of 0 a step's loss is that of the initial weights on its
// sequences, by which nearly all steps can be told apart.
TEST_F(MixtureTest, JoinsAndKillsChangeNoSequenceOfAStep) {
  make(endless({{"data.path", "\"" + mixture() + "\""},
                {"optimizer.lr", "0"},
                {"train.global_batch_size", "6"},
                {"train.local_batch_size", "2"},
                {"checkpoint.interval", "0"},
                {"elastic.dead_after_ms", "6000"}}));
  ASSERT_NO_FATAL_FAILURE(start_services(2));
  ASSERT_NO_FATAL_FAILURE(join("w3", 3));
  ASSERT_NO_FATAL_FAILURE(kill_worker("w1", 2));
  ASSERT_NO_FATAL_FAILURE(join("w4", 3));
  ASSERT_NO_FATAL_FAILURE(kill_worker("w3", 2));
  stop_and_check();
  EXPECT_GE(c().events_named("mesh").size(), 5U);

  ASSERT_OK_AND(const pb::Job job,
                jobfile::load_job(c().run_dir() + "/job.toml"));
  const auto batch = static_cast<size_t>(job.train().global_batch_size());
  const std::vector<Sequence> sequences =
      documented_sequences({.sets = sets_,
                            .seed = job.train().seed(),
                            .seq_len = job.train().seq_len(),
                            .global_batch = job.train().global_batch_size(),
                            .steps = c().last_step()});
  ASSERT_EQ(sequences.size(), batch * c().metrics().size());
  expect_each_once_a_pass(sequences, job.train().seq_len());
  InitialLoss initial(job);
  size_t step = 0, told_apart = 0;
  double before = 0;
  for (const Json& m : c().metrics()) {
    const double want =
        initial.of(std::span(sequences).subspan(step * batch, batch));
    EXPECT_NEAR(m["loss"].get<double>(), want, kRounding) << m;
    told_apart += std::abs(want - before) > 4 * kRounding ? 1 : 0;
    before = want;
    ++step;
  }
  EXPECT_GT(told_apart, step * 9 / 10);
}

}  // namespace
}  // namespace remesh::e2e
