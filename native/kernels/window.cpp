// AFT-local and AFT-conv: float, else double, else element by element.
#include "exact.hpp"
#include "grid.hpp"
#include "sequence.hpp"

namespace aft {
namespace AFT_LEVEL {
namespace {

// Whether all of y is written, and right; is_written says whether it is written at all.
template <class Pass>
bool forward_pass(const Window& problem, const Channels& at, bool& is_written) {
  Pass pass(problem, at, false);
  if (!pass.is_usable()) return false;
  const bool is_done = pass.forward(is_written);
  is_written = true;
  return is_done;
}

template <class Pass>
bool backward_pass(const Window& problem, const Channels& at, std::int64_t slot) {
  Pass pass(problem, at, true);
  return pass.is_usable() && pass.backward(slot);
}

template <class Element, template <class, class> class Pass>
void forward_by(const Window& problem, const Channels& at) {
  bool is_written = false;
  if (forward_pass<Pass<Element, float>>(problem, at, is_written)) return;
  if (forward_pass<Pass<Element, double>>(problem, at, is_written)) return;
  Exact<Element>(problem, at).forward(is_written);
}

template <class Element, template <class, class> class Pass>
void backward_by(const Window& problem, const Channels& at, std::int64_t slot) {
  const std::int64_t products = problem.batches * problem.queries * problem.keys * problem.channels;
  if (products > kSmall && backward_pass<Pass<Element, float>>(problem, at, slot)) return;
  if (backward_pass<Pass<Element, double>>(problem, at, slot)) return;
  Exact<Element>(problem, at).backward(slot);
}

template <class Element>
void forward(const Window& problem, const Channels& at) {
  problem.is_grid() ? forward_by<Element, Grid>(problem, at) : forward_by<Element, Sequence>(problem, at);
}

template <class Element>
void backward(const Window& problem, const Channels& at, std::int64_t slot) {
  if (!problem.is_grid()) return backward_by<Element, Sequence>(problem, at, slot);
  for (std::int64_t c = 0; c < at.count; c += kLanes<float>) {
    const std::int64_t left = at.count - c, count = left < kLanes<float> ? left : kLanes<float>;
    backward_by<Element, Grid>(problem, {at.batch, at.first + c, count}, slot);
  }
}

}  // namespace

void window_forward(const Window& problem, const Channels& at, std::int64_t) {
  (problem.bfloat16 ? forward<Bfloat16> : forward<float>)(problem, at);
}

void window_backward(const Window& problem, const Channels& at, std::int64_t slot) {
  (problem.bfloat16 ? backward<Bfloat16> : backward<float>)(problem, at, slot);
}

RowOfBias weigh(const Window& problem, std::int64_t batch, std::int64_t t, float* row) {
  return weigh_row<float>(problem, batch, t, row);
}

}  // namespace AFT_LEVEL
}  // namespace aft
