// What every kernel is given: tensors, states, and its share of the work.
#pragma once

#include <cstdint>

namespace aft {

// A tensor [batch, time, channels]: strides in elements, channels next to one another.
struct Rows {
  void* data = nullptr;
  std::int64_t batch_stride = 0;
  std::int64_t time_stride = 0;
};

// Running sums [batch, channels], each in memory of its own; max is the largest key, -inf where there is
// none.
struct State {
  double* num = nullptr;
  double* den = nullptr;
  double* max = nullptr;
};

// Some channels of one sequence: a task of its own, independent of all others.
struct Channels {
  std::int64_t batch = 0;
  std::int64_t first = 0;
  std::int64_t count = 0;
};

}  // namespace aft
