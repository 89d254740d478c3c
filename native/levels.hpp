// The levels of vector instructions that the kernels are compiled for, and the one in use.
#pragma once

#include <string>
#include <vector>

#include "simple.hpp"
#include "window.hpp"

namespace aft {

struct Level {
  const char* name;
  SimpleKernel simple_forward;
  SimpleKernel simple_backward;
  WindowKernel window_forward;
  WindowKernel window_backward;
  WeighKernel weigh;
};

// What this processor can run, the best last.
std::vector<std::string> levels();

const Level& level();

// The best one where the name is empty. False where there is none of that name here.
bool use_level(const std::string& name);

}  // namespace aft
