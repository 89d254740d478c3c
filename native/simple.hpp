// AFT-simple: what its kernels are given. See aft/ops/native.py for the meaning of each tensor.
#pragma once

#include "tensors.hpp"

namespace aft {

// Positions summed in single precision before they are added to a sum in double precision, which is also
// saved for the backward pass.
constexpr std::int64_t kBlock = 32;

// The running sums of one channel, as saved before each block and after the last: doubles
// [batch, blocks + 1, kSavedFields, channels].
enum SavedField { kNum, kDen, kOrigin, kDouble, kSavedFields };

struct Simple {
  std::int64_t batches = 0;
  std::int64_t queries = 0;
  std::int64_t keys = 0;
  std::int64_t channels = 0;
  bool causal = false;
  bool gated = false;     // y = sigmoid(q) * mean, else y = mean in float32
  bool bfloat16 = false;  // of q, k, v, a gated y and all gradients; else float32
  Rows q, k, v;
  Rows hidden;            // bool [batch, keys, 1], or no data
  double* saved = nullptr;
  // A causal stream goes on from one state to another, all in double precision; else there are none.
  State before, after;
  State grad_after;              // backward: of num and den
  State grad_before;             // backward: written, but for max
  Rows y;                        // forward: written
  Rows grad;                     // backward: of y
  Rows grad_q, grad_k, grad_v;   // backward: written

  bool is_stream() const { return before.num != nullptr || grad_before.num != nullptr; }
  std::int64_t blocks() const { return causal ? (queries + kBlock - 1) / kBlock : 1; }
};

using SimpleKernel = void (*)(const Simple&, const Channels&);

// The most channels a task may have.
constexpr std::int64_t kMostChannels = 256;

void simple_forward(const Simple& problem, int threads);
void simple_backward(const Simple& problem, int threads);

}  // namespace aft
