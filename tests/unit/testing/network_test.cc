// The simulated network does what a test asks of it.
#include "tests/testing/network.h"

#include "tests/testing/expect.h"
#include "tests/testing/process.h"

namespace remesh::testing {
namespace {

class NetworkTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto made = Network::make(3);
    if (!made.ok()) GTEST_SKIP() << "needs netns: " << made.status().message();
    network_ = std::move(*made);
  }
  // Whether a packet gets from one host to the other and back in that time.
  bool reaches(int from, int to, const char* seconds = "10") {
    std::vector<std::string> command = network_->on(from);
    const std::string probe =
        "import socket,sys\n"
        "s=socket.socket(socket.AF_INET,socket.SOCK_STREAM)\n"
        "s.settimeout(float(sys.argv[2]))\n"
        "try: s.connect((sys.argv[1],9))\n"
        "except ConnectionRefusedError: sys.exit(0)\n"
        "except OSError: sys.exit(1)\n";
    command.insert(command.end(),
                   {"python3", "-c", probe, Network::address(to), seconds});
    return run_program(command, 10'000).exit.code == 0;
  }
  std::unique_ptr<Network> network_;
};

TEST_F(NetworkTest, CutsOneDirectionOfOneLink) {
  EXPECT_TRUE(reaches(1, 2));
  for (const auto& [from, to] :
       {std::pair{1, 2}, std::pair{0, 1}, std::pair{1, 0}}) {
    ASSERT_OK(network_->set_loss(from, to, 1));
    EXPECT_FALSE(reaches(from, to, "0.5")) << from << " to " << to;
    EXPECT_FALSE(reaches(to, from, "0.5")) << "no answer comes back";
    EXPECT_TRUE(reaches(0, 2));
    ASSERT_OK(network_->set_loss(from, to, 0));
    EXPECT_TRUE(reaches(from, to));
  }
}

TEST_F(NetworkTest, LimitsTheRateAndHeals) {
  ASSERT_OK(network_->set_rate(1, 1'000'000));
  EXPECT_TRUE(reaches(1, 2)) << "small packets pass";
  network_->set_link(2, false);
  ASSERT_OK(network_->set_loss(0, 1, 1));
  EXPECT_FALSE(reaches(1, 2, "0.5"));
  network_->heal();
  EXPECT_TRUE(reaches(1, 2));
  EXPECT_TRUE(reaches(0, 1));
}

}  // namespace
}  // namespace remesh::testing
