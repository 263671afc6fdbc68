// Progress: reports to the rank's status page; without one it does nothing.
#pragma once

#include <cstdint>

#include "worker/board/board.h"

namespace remesh::engine {

class Progress {
 public:
  Progress() = default;
  explicit Progress(board::Board* board) : board_(board) {}
  void phase(RankPhase p) const {
    if (board_ != nullptr) board_->set_phase(p);
  }
  void microbatch(int64_t i) const {
    if (board_ != nullptr) board_->set_microbatch(i);
  }
  void tick() const {
    if (board_ != nullptr) board_->tick();
  }

 private:
  board::Board* board_ = nullptr;
};

}  // namespace remesh::engine
