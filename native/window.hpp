// AFT-local and AFT-conv, whose keys have a bias inside a window around the query, and AFT-full, whose window
// holds all keys: what their kernels are given. See aft/ops/native.py for the meaning of each tensor.
#pragma once

#include <cstdint>

#include "tensors.hpp"

namespace aft {

// Whether the biases of a row's window are in single precision's range, and near enough to one another that its
// digits do for gradients.
enum RowOfBias : unsigned char { kTame, kSaturated, kLarge };

struct Window {
  std::int64_t batches = 0;
  std::int64_t queries = 0;
  std::int64_t keys = 0;
  std::int64_t channels = 0;  // of keys and of values
  bool causal = false;
  bool gated = false;     // y = sigmoid(q) * mean, else y = mean in float32
  bool bfloat16 = false;  // of q, k, v, a gated y and all gradients; else float32
  Rows q, k, v;
  Rows hidden;  // bool [batch, keys, 1], or no data

  // Query t stands at position t + offset of the keys, and its window reaches from `behind` positions before
  // that to `ahead` after it. In a causal sequence nothing is ahead, and the offset is `behind` at most.
  std::int64_t offset = 0;
  std::int64_t behind = 0;
  std::int64_t ahead = 0;

  // The bias of each pair of positions, float32 or float64: of (batch, query, key) at the sum of the products
  // with these strides. Or, without it, that of each distance: `kernel`, float32 [cells, channels].
  const void* bias = nullptr;
  bool has_wide_bias = false;
  bool has_bias_by_batch = false;  // each sequence has its own, and a slot of its own for the gradient
  std::int64_t bias_batch_stride = 0;
  std::int64_t bias_query_stride = 0;
  std::int64_t bias_key_stride = 0;
  const float* kernel = nullptr;

  // What all tasks want of the bias of places, in single precision: e^bias of each row's cells, and its kind,
  // for each sequence that has a bias of its own. Prepared by window_forward and window_backward.
  const float* weights = nullptr;
  const RowOfBias* kinds = nullptr;

  // Queries and keys are the cells of one grid, row after row, and so are those of the kernel, of which the
  // cell `anchor` lies on the query; a width of 0: they are a sequence, and the kernel has a single row.
  std::int64_t width = 0;
  std::int64_t kernel_height = 1;
  std::int64_t kernel_width = 0;
  std::int64_t anchor_row = 0;
  std::int64_t anchor_column = 0;

  // A causal stream goes on from a state; grad_before is of its num and den, written by the backward pass.
  State before, grad_before;

  Rows y;                       // forward: written
  Rows grad;                    // backward: of y
  Rows grad_q, grad_k, grad_v;  // backward: written
  // Gradients of keys are float32; float64 where those of several channels are yet to be added up.
  bool has_wide_grad_k = false;

  // Backward: tasks of one slot follow one another and add to the slot's share of the gradient of the bias,
  // float32 [slots, queries, behind + 1 + ahead], or of the kernel, float64 [slots, cells, channels].
  std::int64_t slots = 1;
  float* grad_bias = nullptr;
  double* grad_kernel = nullptr;

  // As many slots as have work, and no more than make the gradient's memory a few times that of y.
  std::int64_t most_slots() const;

  bool is_grid() const { return width > 0; }
  std::int64_t cells() const { return is_grid() ? kernel_height * kernel_width : behind + 1 + ahead; }
  bool is_stream() const { return before.num != nullptr; }
};

using WindowKernel = void (*)(const Window&, const Channels&, std::int64_t slot);

// Prepares row t of a sequence for single precision; the row has room for another vector.
using WeighKernel = RowOfBias (*)(const Window&, std::int64_t batch, std::int64_t t, float* row);

void window_forward(const Window& problem, int threads);
void window_backward(const Window& problem, int threads);

}  // namespace aft
