// Buffers on 2 MiB pages: a step walks all weights once, and with 4 KiB pages the address
// translation alone costs more than the arithmetic.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <new>

namespace treadle {

constexpr std::size_t kHugePage = std::size_t{2} << 20;

// Asks for huge pages on the whole 2 MiB frames inside [p, p + bytes); a refusal is harmless.
inline void advise_huge(void* p, std::size_t bytes) {
  const auto begin = (reinterpret_cast<std::uintptr_t>(p) + kHugePage - 1) & ~(kHugePage - 1);
  const auto end = (reinterpret_cast<std::uintptr_t>(p) + bytes) & ~(kHugePage - 1);
  if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

// Zeroed on first allocation, aligned to 2 MiB, never shrinks. Contents are lost on growth.
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { release(); }

  void reserve(std::size_t bytes) {
    if (bytes <= size_) return;
    release();
    mapped_ = bytes + 2 * kHugePage;
    map_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map_ == MAP_FAILED) {
      map_ = nullptr;
      throw std::bad_alloc();
    }
    const auto at = (reinterpret_cast<std::uintptr_t>(map_) + kHugePage - 1) & ~(kHugePage - 1);
    data_ = reinterpret_cast<void*>(at);
    size_ = bytes;
    advise_huge(data_, (bytes + kHugePage - 1) & ~(kHugePage - 1));
  }

  template <class T>
  T* as(std::size_t byte_offset = 0) const {
    return reinterpret_cast<T*>(static_cast<char*>(data_) + byte_offset);
  }

 private:
  void release() {
    if (map_ != nullptr) munmap(map_, mapped_);
    map_ = data_ = nullptr;
    size_ = mapped_ = 0;
  }

  void* map_ = nullptr;
  void* data_ = nullptr;
  std::size_t size_ = 0;
  std::size_t mapped_ = 0;
};

}  // namespace treadle
