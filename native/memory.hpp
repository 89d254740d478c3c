// Fresh memory.
#pragma once

#include <cstdint>

namespace aft {

// Asks for large pages where a tensor of this many bytes is about to be written for the first time: one page
// fault for 2 MiB instead of 512 of them, which cost more than the arithmetic. A hint, which may do nothing.
void expect_writes(void* data, std::int64_t bytes);

// A task's own memory, not yet written, aligned to the largest vectors. Throws std::bad_alloc.
class Buffer {
 public:
  explicit Buffer(std::int64_t bytes);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  void* data() const { return data_; }

 private:
  void* data_;
};

}  // namespace aft
