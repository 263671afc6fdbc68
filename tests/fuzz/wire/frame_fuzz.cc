// Decodes random and mutated frames: nothing crashes, and accepted frames
// survive another encoding unchanged.
//
//   wire_fuzz [rounds=20000] [seed]
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>

#include "proto/base/check.h"
#include "proto/wire/channel.h"
#include "tests/testing/mutator.h"
#include "tests/testing/seed.h"

namespace remesh::wire {
namespace {

using Rng = std::mt19937_64;

std::string random_bytes(Rng& rng, size_t max) {
  std::string s(rng() % (max + 1), '\0');
  for (char& c : s) c = static_cast<char>(rng());
  return s;
}

pb::Envelope random_envelope(Rng& rng) {
  pb::Envelope e;
  e.set_job(random_bytes(rng, 8));
  switch (rng() % 5) {
    case 0: {
      auto* r = e.mutable_report();
      r->set_worker(random_bytes(rng, 20));
      r->set_incarnation(rng());
      for (uint64_t n = rng() % 4; n > 0; --n) {
        auto* rank = r->add_ranks();
        rank->set_rank(static_cast<int>(rng()));
        rank->set_last_log(random_bytes(rng, 100));
        r->add_metrics()->set_step(static_cast<int64_t>(rng()));
      }
      break;
    }
    case 1: {
      auto* a = e.mutable_directive()->mutable_assignment();
      a->set_generation(static_cast<int64_t>(rng()));
      a->mutable_mesh()->set_dp(3);
      for (int i = 0; i < 3; ++i) a->add_ranks()->set_rank(i);
      a->mutable_job()->mutable_data()->set_path(random_bytes(rng, 30));
      break;
    }
    case 2:
      e.mutable_fence_in()->set_blob(random_bytes(rng, 300));
      break;
    case 3:
      e.mutable_command()->set_worker(random_bytes(rng, 10));
      break;
    default:
      e.mutable_reply()->mutable_status()->add_events()->set_cause(
          random_bytes(rng, 40));
  }
  return e;
}

// Returns whether the frame was accepted.
bool try_frame(const std::string& frame) {
  const auto e = decode_frame(frame.data(), frame.size());
  if (!e) return false;
  const std::string once = encode_frame(*e);
  const auto again = decode_frame(once.data(), once.size());
  CHECK_MSG(again && encode_frame(*again) == once, "frame is not stable");
  return true;
}

int run(int64_t rounds, uint64_t seed) {
  std::printf("wire_fuzz: %lld rounds, seed %llu\n",
              static_cast<long long>(rounds),
              static_cast<unsigned long long>(seed));
  Rng rng(seed);
  Mutator mutate(seed);
  int64_t accepted = 0;
  for (int64_t i = 0; i < rounds; ++i) {
    const std::string good = encode_frame(random_envelope(rng));
    CHECK_MSG(try_frame(good), "a good frame was refused");
    CHECK_MSG(!try_frame(random_bytes(rng, 200)), "noise was accepted");
    std::string head = good.substr(0, 8);
    head[rng() % 8] ^= static_cast<char>(1 << (rng() % 8));
    CHECK_MSG(!try_frame(head + good.substr(8)), "a wrong head was accepted");
    accepted += try_frame(mutate(good, good)) ? 1 : 0;
    accepted += try_frame(good.substr(0, 8) + random_bytes(rng, 100)) ? 1 : 0;
  }
  std::printf("wire_fuzz: ok, %lld of %lld mutants accepted\n",
              static_cast<long long>(accepted),
              2 * static_cast<long long>(rounds));
  return 0;
}

}  // namespace
}  // namespace remesh::wire

int main(int argc, char** argv) {
  const int64_t rounds = argc > 1 ? std::atoll(argv[1]) : 20000;
  const uint64_t seed =
      argc > 2 ? std::strtoull(argv[2], nullptr, 10) : remesh::test_seed();
  return remesh::wire::run(rounds, seed);
}
