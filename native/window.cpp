#include "window.hpp"

#include <algorithm>
#include <vector>

#include "levels.hpp"
#include "memory.hpp"
#include "threads.hpp"

namespace aft {
namespace {

constexpr std::int64_t kLine = 32;
constexpr std::int64_t kMost = 128;
// Products of queries, channels and cells below which waking a thread costs more than it saves.
constexpr std::int64_t kShort = 1 << 18;
constexpr std::int64_t kMostSlots = 8;

// Channels of a task. They must not depend on the threads: biases add up over the channels of each task.
std::int64_t width_of(const Window& problem) {
  const std::int64_t half = (problem.channels / 2 + kLine - 1) / kLine * kLine;
  return std::clamp(half, kLine, kMost);
}

std::int64_t groups_of(const Window& problem) {
  return (problem.channels + width_of(problem) - 1) / width_of(problem);
}

Channels channels_of(const Window& problem, std::int64_t batch, std::int64_t group) {
  const std::int64_t width = width_of(problem), first = group * width;
  return {batch, first, std::min(width, problem.channels - first)};
}

int useful(const Window& problem, int threads) {
  const std::int64_t cells = problem.cells();
  const bool is_short = problem.batches * problem.queries * problem.channels * cells < kShort;
  return is_short ? 1 : std::max(threads, 1);
}

// The weights of the bias of places, for all tasks.
class Weights {
 public:
  Weights(Window& problem, int threads)
      : rows_(problem.kernel != nullptr ? 0 : count_rows(problem)),
        weights_((rows_ * problem.cells() + kRoom) * std::int64_t(sizeof(float))),
        kinds_(rows_ + 1) {
    if (problem.kernel != nullptr) return;
    const std::int64_t cells = problem.cells(), blocks = (rows_ + kRowsOfTask - 1) / kRowsOfTask;
    float* const weights = static_cast<float*>(weights_.data());
    RowOfBias* const kinds = static_cast<RowOfBias*>(kinds_.data());
    parallel(blocks, useful(problem, threads), [&](std::int64_t block) {
      std::vector<float> row(std::size_t(cells + kRoom));
      const std::int64_t end = std::min((block + 1) * kRowsOfTask, rows_);
      for (std::int64_t at = block * kRowsOfTask; at < end; ++at) {
        kinds[at] = level().weigh(problem, at / problem.queries, at % problem.queries, row.data());
        std::copy_n(row.data(), cells, weights + at * cells);
      }
    });
    problem.weights = weights;
    problem.kinds = kinds;
  }

 private:
  static constexpr std::int64_t kRoom = 16;  // floats of the largest vector
  static constexpr std::int64_t kRowsOfTask = 256;

  static std::int64_t count_rows(const Window& problem) {
    return problem.queries * (problem.has_bias_by_batch ? problem.batches : 1);
  }

  const std::int64_t rows_;
  const Buffer weights_, kinds_;
};

bool is_empty(const Window& problem) { return problem.batches == 0 || problem.channels == 0; }

}  // namespace

std::int64_t Window::most_slots() const {
  if (kernel != nullptr) return std::clamp<std::int64_t>(batches, 1, kMostSlots);
  const std::int64_t affordable = std::max<std::int64_t>(2 * batches * channels / cells(), 1);
  return std::clamp<std::int64_t>(batches * groups_of(*this), 1, std::min(affordable, kMostSlots));
}

void window_forward(const Window& given, int threads) {
  if (is_empty(given)) return;
  Window problem = given;
  const Weights weights(problem, threads);
  const std::int64_t bytes = problem.bfloat16 && problem.gated ? 2 : 4;
  expect_writes(problem.y.data, problem.batches * problem.y.batch_stride * bytes);
  const std::int64_t groups = groups_of(problem);
  parallel(problem.batches * groups, useful(problem, threads), [&](std::int64_t task) {
    level().window_forward(problem, channels_of(problem, task / groups, task % groups), 0);
  });
}

void window_backward(const Window& given, int threads) {
  if (is_empty(given)) return;
  Window problem = given;
  const Weights weights(problem, threads);
  const std::int64_t bytes = problem.bfloat16 ? 2 : 4;
  for (const Rows* rows : {&problem.grad_q, &problem.grad_v}) {
    if (rows->data != nullptr) expect_writes(rows->data, problem.batches * rows->batch_stride * bytes);
  }
  expect_writes(problem.grad_k.data, problem.batches * problem.grad_k.batch_stride * (problem.has_wide_grad_k ? 8 : 4));
  const std::int64_t groups = groups_of(problem), slots = problem.slots;
  if (problem.kernel != nullptr) {  // groups add to channels of their own, batches to the same ones
    parallel(slots * groups, useful(problem, threads), [&](std::int64_t task) {
      const std::int64_t slot = task / groups;
      for (std::int64_t batch = slot; batch < problem.batches; batch += slots) {
        level().window_backward(problem, channels_of(problem, batch, task % groups), slot);
      }
    });
  } else if (problem.has_bias_by_batch) {  // a slot for each sequence
    parallel(slots, useful(problem, threads), [&](std::int64_t slot) {
      for (std::int64_t group = 0; group < groups; ++group) {
        level().window_backward(problem, channels_of(problem, slot, group), slot);
      }
    });
  } else {
    parallel(slots, useful(problem, threads), [&](std::int64_t slot) {
      for (std::int64_t task = slot; task < problem.batches * groups; task += slots) {
        level().window_backward(problem, channels_of(problem, task / groups, task % groups), slot);
      }
    });
  }
}

}  // namespace aft
