// Fresh memory of the size of a tensor.
#pragma once

#include <cstdint>

namespace aft {

// Asks for large pages where a tensor of this many bytes is about to be written for the first time: one page
// fault for 2 MiB instead of 512 of them, which cost more than the arithmetic. A hint, which may do nothing.
void expect_writes(void* data, std::int64_t bytes);

}  // namespace aft
