#include "threads.hpp"

#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>

#if !defined(_WIN32)
#include <pthread.h>
#endif

namespace aft {
namespace {

class Pool {
 public:
  // False, with nothing done, while another call has the pool.
  bool run(std::int64_t tasks, int threads, const std::function<void(std::int64_t)>& task) {
    std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
    if (!turn.owns_lock()) return false;
    grow(threads - 1);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      task_ = &task;
      tasks_ = tasks;
      next_ = 0;
      error_ = nullptr;
      invited_ = threads - 1 < workers_ ? threads - 1 : workers_;
    }
    wake_.notify_all();
    work(task, tasks);
    std::unique_lock<std::mutex> lock(mutex_);
    invited_ = 0;
    done_.wait(lock, [this] { return busy_ == 0; });
    if (error_ != nullptr) std::rethrow_exception(error_);
    return true;
  }

 private:
  void grow(int wanted) {
    try {
      for (; workers_ < wanted; ++workers_) std::thread(&Pool::serve, this).detach();
    } catch (const std::system_error&) {
      // The system has no thread to spare: those there are do the work.
    }
  }

  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return invited_ > 0; });
      --invited_;
      ++busy_;
      const auto& task = *task_;
      const std::int64_t tasks = tasks_;
      lock.unlock();
      work(task, tasks);
      lock.lock();
      if (--busy_ == 0) done_.notify_one();
    }
  }

  void work(const std::function<void(std::int64_t)>& task, std::int64_t tasks) {
    try {
      for (std::int64_t i; (i = next_.fetch_add(1)) < tasks;) task(i);
    } catch (...) {
      std::lock_guard<std::mutex> lock(mutex_);
      error_ = std::current_exception();
    }
  }

  std::mutex turn_;   // held by the call whose tasks these are
  std::mutex mutex_;  // guards what follows
  std::condition_variable wake_, done_;
  const std::function<void(std::int64_t)>* task_ = nullptr;
  std::int64_t tasks_ = 0;
  int workers_ = 0;  // only the holder of turn_ touches it
  int invited_ = 0;
  int busy_ = 0;
  std::exception_ptr error_;
  std::atomic<std::int64_t> next_{0};
};

std::atomic<Pool*> current{nullptr};
std::atomic<Team> team{nullptr};

// A forked child has the memory of its parent's threads but none of them: it begins with a pool of its own.
void forget_at_fork() {
#if !defined(_WIN32)
  static const int registered = pthread_atfork(nullptr, nullptr, [] {
    current.store(nullptr);
    team.store(nullptr);
  });
  (void)registered;
#endif
}

// Never destroyed: its threads run until the process ends.
Pool& pool() {
  Pool* existing = current.load();
  if (existing != nullptr) return *existing;
  forget_at_fork();
  Pool* fresh = new Pool;
  if (current.compare_exchange_strong(existing, fresh)) return *fresh;
  delete fresh;
  return *existing;
}

// Tasks that a team's threads take one after another.
struct Job {
  const std::function<void(std::int64_t)>& run;
  const std::int64_t tasks;
  std::atomic<std::int64_t> next{0};
  std::mutex mutex;
  std::exception_ptr error;

  static void work(void* data) {
    Job& job = *static_cast<Job*>(data);
    try {
      for (std::int64_t i; (i = job.next.fetch_add(1)) < job.tasks;) job.run(i);
    } catch (...) {
      std::lock_guard<std::mutex> lock(job.mutex);
      job.error = std::current_exception();
    }
  }
};

}  // namespace

void use_team(Team given) {
  forget_at_fork();
  team.store(given);
}

void parallel(std::int64_t tasks, int threads, const std::function<void(std::int64_t)>& run) {
  const int useful = tasks < threads ? static_cast<int>(tasks) : threads;
  if (useful > 1) {
    if (const Team start = team.load()) {
      Job job{run, tasks};
      start(Job::work, &job, static_cast<unsigned>(useful), 0);
      if (job.error != nullptr) std::rethrow_exception(job.error);
      return;
    }
    if (pool().run(tasks, useful, run)) return;
  }
  for (std::int64_t i = 0; i < tasks; ++i) run(i);
}

}  // namespace aft
