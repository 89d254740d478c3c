// Tensors as one task sees them.
#pragma once

#include "tensors.hpp"

namespace aft {
namespace AFT_LEVEL {
namespace {

// The rows of one task, by time.
template <class Element>
struct Track {
  Element* first;
  std::int64_t stride;

  Element* operator[](std::int64_t time) const { return first + time * stride; }
};

template <class Element>
inline Track<Element> track_of(const Rows& rows, const Channels& at) {
  return {static_cast<Element*>(rows.data) + at.batch * rows.batch_stride + at.first, rows.time_stride};
}

// Whether a padding mask, bool [batch, keys, 1] or no data, leaves this key to be seen.
inline bool is_visible(const Rows& hidden, const Channels& at, std::int64_t key) {
  if (hidden.data == nullptr) return true;
  return !static_cast<const bool*>(hidden.data)[at.batch * hidden.batch_stride + key * hidden.time_stride];
}

}  // namespace
}  // namespace AFT_LEVEL
}  // namespace aft
