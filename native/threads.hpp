// Tasks shared out among threads that sleep while there are none.
#pragma once

#include <cstdint>
#include <functional>

namespace aft {

// Calls run(task) for every task from 0 to tasks - 1, in any order, on the calling thread and up to
// threads - 1 others, and returns when all are done. While another call has the threads, or where there are
// no more of them to be had, the calling thread does more of its tasks itself. What a task throws is thrown on
// to the caller.
void parallel(std::int64_t tasks, int threads, const std::function<void(std::int64_t)>& run);

}  // namespace aft
