// ScratchPool: reuses the scratch memory of reductions, because fresh pages
// cost more than the sums that use them. Private to parallel/comm.
//
// Threads: one. Keeps at most kKept released blocks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <new>
#include <utility>
#include <vector>

namespace remesh::comm {

class ScratchPool {
 public:
  // Memory that returns to the pool when destroyed; it keeps the pool alive.
  class Block {
   public:
    Block() = default;
    Block(std::shared_ptr<ScratchPool> pool, size_t bytes)
        : pool_(std::move(pool)), memory_(pool_->take(bytes)) {}
    Block(Block&& other) noexcept = default;
    Block& operator=(Block&& other) noexcept {
      std::swap(pool_, other.pool_);
      std::swap(memory_, other.memory_);
      return *this;
    }
    ~Block() {
      if (memory_.data != nullptr) pool_->give_back(std::move(memory_));
    }
    void* data() const { return memory_.data.get(); }
    explicit operator bool() const { return memory_.data != nullptr; }

   private:
    friend class ScratchPool;
    struct Free {
      void operator()(std::byte* p) const {
        ::operator delete[](p, std::align_val_t{kAlignment});
      }
    };
    struct Memory {
      std::unique_ptr<std::byte, Free> data;
      size_t bytes = 0;
    };
    std::shared_ptr<ScratchPool> pool_;
    Memory memory_;
  };

 private:
  static constexpr size_t kAlignment = 64;
  static constexpr size_t kKept = 16;

  Block::Memory take(size_t bytes) {
    const auto at =
        std::find_if(free_.begin(), free_.end(),
                     [&](const Block::Memory& m) { return m.bytes >= bytes; });
    if (at != free_.end()) {
      Block::Memory m = std::move(*at);
      free_.erase(at);
      return m;
    }
    auto* p = static_cast<std::byte*>(
        ::operator new[](bytes, std::align_val_t{kAlignment}));
    return {std::unique_ptr<std::byte, Block::Free>(p), bytes};
  }
  // A large block serves small requests too, so drop the smallest.
  void give_back(Block::Memory memory) {
    free_.push_back(std::move(memory));
    if (free_.size() <= kKept) return;
    free_.erase(std::min_element(
        free_.begin(), free_.end(),
        [](const auto& a, const auto& b) { return a.bytes < b.bytes; }));
  }

  std::vector<Block::Memory> free_;
};

}  // namespace remesh::comm
