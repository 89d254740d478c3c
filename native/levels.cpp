#include "levels.hpp"

#include <atomic>
#include <cstdlib>

namespace aft {

// Each is defined by the kernels' sources, compiled for that level.
namespace portable {
extern const Level kLevel;
}
#ifdef AFT_X86_LEVELS
namespace avx2 {
extern const Level kLevel;
}
namespace avx512 {
extern const Level kLevel;
}
#endif

namespace {

std::vector<const Level*> runnable() {
  std::vector<const Level*> found{&portable::kLevel};
#ifdef AFT_X86_LEVELS
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    found.push_back(&avx2::kLevel);
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      found.push_back(&avx512::kLevel);
    }
  }
#endif
  return found;
}

std::atomic<const Level*>& chosen() {
  static std::atomic<const Level*> level{runnable().back()};
  return level;
}

}  // namespace

std::vector<std::string> levels() {
  std::vector<std::string> names;
  for (const Level* level : runnable()) names.emplace_back(level->name);
  return names;
}

const Level& level() { return *chosen(); }

bool use_level(const std::string& name) {
  static const std::vector<const Level*> choices = runnable();
  for (const Level* level : choices) {
    if (level->name == name || (name.empty() && level == choices.back())) {
      chosen() = level;
      return true;
    }
  }
  return false;
}

}  // namespace aft
