#include "memory.hpp"

#include <cstring>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace aft {
namespace {

constexpr std::int64_t kLargePage = 2 << 20;
constexpr std::align_val_t kAlignment{64};

}  // namespace

void expect_writes(void* data, std::int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const auto begin = (reinterpret_cast<std::uintptr_t>(data) + kLargePage - 1) / kLargePage * kLargePage;
  const auto end = (reinterpret_cast<std::uintptr_t>(data) + bytes) / kLargePage * kLargePage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)data;
  (void)bytes;
#endif
}

Buffer::Buffer(std::int64_t bytes) : data_(::operator new(static_cast<std::size_t>(bytes), kAlignment)) {
#ifdef AFT_CHECKED
  std::memset(data_, 0xff, static_cast<std::size_t>(bytes));
#else
  expect_writes(data_, bytes);
#endif
}

Buffer::~Buffer() { ::operator delete(data_, kAlignment); }

}  // namespace aft
