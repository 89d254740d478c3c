#include "simple.hpp"

#include <algorithm>

#include "levels.hpp"
#include "memory.hpp"
#include "threads.hpp"

namespace aft {
namespace {

// Elements of a task below which waking a thread costs more than it saves.
constexpr std::int64_t kShort = 1 << 15;
// A cache line of single precision: tasks never write to the same one.
constexpr std::int64_t kLine = 16;

struct Split {
  std::int64_t parts = 1;
  std::int64_t width = 0;
};

// Few parts, for long rows are read fastest, but enough of them for the threads.
Split split_channels(const Simple& problem, int threads) {
  const std::int64_t most = (problem.channels + kLine - 1) / kLine;
  std::int64_t parts = (problem.channels + kMostChannels - 1) / kMostChannels;
  const auto is_even = [&] {
    const std::int64_t tasks = problem.batches * parts;
    return tasks % threads == 0 || tasks >= 4 * threads;
  };
  while (parts < most && !is_even()) ++parts;
  const std::int64_t lines = (most + parts - 1) / parts;
  const std::int64_t width = std::max<std::int64_t>(lines, 1) * kLine;
  return {(problem.channels + width - 1) / width, width};
}

void share_out(const Simple& problem, SimpleKernel kernel, int threads) {
  if (problem.batches == 0 || problem.channels == 0) return;
  const std::int64_t elements = problem.batches * problem.channels * (problem.queries + problem.keys);
  if (elements < 2 * kShort) threads = 1;
  const Split split = split_channels(problem, std::max(threads, 1));
  parallel(problem.batches * split.parts, threads, [&](std::int64_t task) {
    const std::int64_t first = task % split.parts * split.width;
    const Channels channels{task / split.parts, first, std::min(split.width, problem.channels - first)};
    kernel(problem, channels);
  });
}

// Outputs are contiguous.
void expect_writes_to(const Simple& problem, const Rows& rows, bool in_bfloat16) {
  if (rows.data != nullptr) {
    expect_writes(rows.data, problem.batches * rows.batch_stride * (in_bfloat16 ? 2 : 4));
  }
}

}  // namespace

void simple_forward(const Simple& problem, int threads) {
  expect_writes_to(problem, problem.y, problem.bfloat16 && problem.gated);
  share_out(problem, level().simple_forward, threads);
}

void simple_backward(const Simple& problem, int threads) {
  for (const Rows* rows : {&problem.grad_q, &problem.grad_k, &problem.grad_v}) {
    expect_writes_to(problem, *rows, problem.bfloat16);
  }
  share_out(problem, level().simple_backward, threads);
}

}  // namespace aft
