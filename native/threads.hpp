// Tasks shared out among threads: those of torch where they are known, else of a pool.
#pragma once

#include <cstdint>
#include <functional>

namespace aft {

// GNU OpenMP's GOMP_parallel, as torch's own threads are started: calls work(data) on so many of them.
using Team = void (*)(void (*work)(void*), void* data, unsigned threads, unsigned flags);

// Torch's threads wait for work without sleeping for a while, where a second pool's would have to share the
// cores with them.
void use_team(Team team);

// Calls run(task) for every task from 0 to tasks - 1, in any order, on the calling thread and up to
// threads - 1 others, and returns when all are done. While another call has the threads, or where there are
// no more of them to be had, the calling thread does more of its tasks itself. What a task throws is thrown on
// to the caller.
void parallel(std::int64_t tasks, int threads, const std::function<void(std::int64_t)>& run);

}  // namespace aft
