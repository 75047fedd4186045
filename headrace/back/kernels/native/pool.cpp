// A small pool of persistent threads: claim chunks, spin for a bounded time, then sleep.
//
// Why not OpenMP: its barrier waits for every thread, so with one core taken by another process each op loses a
// scheduler slice (0.3 ms became 12-24 ms on two cores). Here the caller never waits for a thread that has claimed
// nothing: late threads find no chunk left and the call is already over.
//
// State is one 64-bit word: generation << 32 | chunks left to claim. A claim is a compare-and-swap on that word, so a
// thread that read a job's fields holds that job's chunk or nothing: the fields change only after every chunk of the
// job is done, and then the word holds 0 chunks or another generation.

#include "pool.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace {

constexpr int kMaxThreads = 256;
// Longer than the gap between two ops of a step (some 20 us of Python), far below a scheduler slice (3 ms).
constexpr auto kSpin = std::chrono::microseconds(60);

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("yield");
#endif
}

struct Pool {
  alignas(64) std::atomic<uint64_t> state{0};
  alignas(64) std::atomic<int64_t> unfinished{0};
  alignas(64) std::atomic<HrTask> task{nullptr};
  std::atomic<void*> context{nullptr};
  std::atomic<int64_t> chunks{0};
  alignas(64) std::atomic<bool> busy{false};
  std::atomic<int> sleepers{0};
  std::atomic<bool> caller_sleeps{false};
  std::atomic<int> wanted{0};  // helpers with an index at or above this one leave
  std::mutex mutex;
  std::condition_variable work, done;
  int helpers = 0;
};

// Leaked on purpose: threads may sleep in it while the process ends.
std::atomic<Pool*> g_pool{nullptr};
std::mutex g_resize;

// Claims and runs one chunk; false when none is left.
bool run_one(Pool& pool) {
  uint64_t seen = pool.state.load(std::memory_order_acquire);
  while (uint32_t(seen) != 0) {
    HrTask task = pool.task.load(std::memory_order_relaxed);
    void* context = pool.context.load(std::memory_order_relaxed);
    int64_t chunk = pool.chunks.load(std::memory_order_relaxed) - int64_t(uint32_t(seen));
    if (!pool.state.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel)) continue;
    task(context, chunk);
    if (pool.unfinished.fetch_sub(1) == 1 && pool.caller_sleeps.load()) {
      std::lock_guard<std::mutex> lock(pool.mutex);
      pool.done.notify_one();
    }
    return true;
  }
  return false;
}

// Spins until `ready()` or for kSpin of wall time, whichever is first.
template <class Ready>
bool spin(Ready ready) {
  const auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 32; ++i) {
      if (ready()) return true;
      relax();
    }
  } while (std::chrono::steady_clock::now() < end);
  return ready();
}

// Pins a thread before it has done anything, so that its first chunk runs where it belongs.
void pin(std::thread& thread, int cpu) {
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  pthread_setaffinity_np(thread.native_handle(), sizeof set, &set);
#else
  (void)thread, (void)cpu;
#endif
}

void helper(Pool* pool, int index) {
  auto waiting = [&] {
    return uint32_t(pool->state.load()) != 0 || index >= pool->wanted.load();
  };
  while (index < pool->wanted.load()) {
    while (run_one(*pool)) {
    }
    if (spin(waiting)) continue;
    std::unique_lock<std::mutex> lock(pool->mutex);
    pool->sleepers.fetch_add(1);
    pool->work.wait(lock, waiting);
    pool->sleepers.fetch_sub(1);
  }
}

void wake(Pool& pool) {
  if (pool.sleepers.load() == 0) return;
  std::lock_guard<std::mutex> lock(pool.mutex);
  pool.work.notify_all();
}

void wait_done(Pool& pool) {
  auto finished = [&] { return pool.unfinished.load() == 0; };
  if (finished() || spin(finished)) return;
  std::unique_lock<std::mutex> lock(pool.mutex);
  pool.caller_sleeps.store(true);
  pool.done.wait(lock, finished);
  pool.caller_sleeps.store(false);
}

// A forked child has none of the parent's threads: it starts without a pool and runs on its caller alone.
void forget_pool() { g_pool.store(nullptr); }

}  // namespace

void hr_parallel(HrTask task, void* context, int64_t chunks) {
  Pool* pool = g_pool.load(std::memory_order_acquire);
  const bool alone = chunks <= 1 || pool == nullptr || pool->helpers == 0 || chunks > INT32_MAX ||
                     pool->busy.exchange(true, std::memory_order_acquire);
  if (alone) {
    for (int64_t chunk = 0; chunk < chunks; ++chunk) task(context, chunk);
    return;
  }
  pool->task.store(task, std::memory_order_relaxed);
  pool->context.store(context, std::memory_order_relaxed);
  pool->chunks.store(chunks, std::memory_order_relaxed);
  pool->unfinished.store(chunks, std::memory_order_relaxed);
  const uint64_t generation = (pool->state.load(std::memory_order_relaxed) >> 32) + 1;
  pool->state.store(generation << 32 | uint64_t(chunks));
  wake(*pool);
  while (run_one(*pool)) {
  }
  wait_done(*pool);
  pool->busy.store(false, std::memory_order_release);
}

void* hr_scratch(int64_t bytes, int slot) {
  struct Buffer {
    void* memory = nullptr;
    int64_t bytes = 0;
    ~Buffer() { std::free(memory); }
  };
  static thread_local Buffer buffers[4];
  Buffer& buffer = buffers[slot];
  if (buffer.bytes < bytes) {
    std::free(buffer.memory);
    buffer.bytes = (bytes + 4095) / 4096 * 4096;
    buffer.memory = std::aligned_alloc(64, size_t(buffer.bytes));
    if (buffer.memory == nullptr) buffer.bytes = 0;
  }
  return buffer.memory;
}

int hr_pool_threads() {
  Pool* pool = g_pool.load(std::memory_order_acquire);
  return pool == nullptr ? 1 : pool->helpers + 1;
}

HR_PUBLIC int32_t hr_pool_size() { return hr_pool_threads(); }

// Makes the pool `threads` wide (the caller counts as one). cpus: null, or threads-1 CPU numbers to pin the helpers to.
// Returns the width reached: fewer when the system refuses threads. Waits for a call that is running.
HR_PUBLIC int32_t hr_pool_resize(int32_t threads, const int32_t* cpus) {
  std::lock_guard<std::mutex> resize(g_resize);
#if defined(__linux__)
  static const int registered = pthread_atfork(nullptr, nullptr, forget_pool);
  (void)registered;
#endif
  if (threads < 1) threads = 1;
  if (threads > kMaxThreads) threads = kMaxThreads;
  Pool* old = g_pool.exchange(nullptr);
  if (old != nullptr) {
    while (old->busy.load(std::memory_order_acquire)) std::this_thread::yield();
    std::lock_guard<std::mutex> lock(old->mutex);
    old->wanted.store(0);
    old->work.notify_all();  // its helpers leave; the struct stays, a late caller may still hold it
  }
  if (threads == 1) return 1;
  Pool* pool = new (std::nothrow) Pool;
  if (pool == nullptr) return 1;
  pool->wanted.store(threads - 1);
  for (int i = 0; i < threads - 1; ++i) {
    try {
      std::thread thread(helper, pool, i);
      if (cpus != nullptr) pin(thread, cpus[i]);
      thread.detach();
    } catch (const std::system_error&) {
      break;
    }
    pool->helpers = i + 1;
  }
  g_pool.store(pool, std::memory_order_release);
  return pool->helpers + 1;
}

#define HR_STRING2(x) #x
#define HR_STRING(x) HR_STRING2(x)

// The digest of the sources this library was built from; the loader refuses another.
HR_PUBLIC const char* hr_source_digest() { return HR_STRING(HR_DIGEST); }

#if defined(__x86_64__)
// Whether the CPU has matrix tiles for bf16 and int8, products of bits (GFNI), and the system lets this process use them.
static bool may_use_tiles() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  if (!(c >> 8 & 1)) return false;  // GFNI: every CPU with tiles has it
  if (!(d >> 22 & 1) || !(d >> 24 & 1) || !(d >> 25 & 1)) return false;  // AMX-BF16, -TILE, -INT8
#if defined(__linux__)
  constexpr long request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM: for all threads, at first use
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
  return false;
#endif
}
#endif

// Bit i set: this CPU and operating system run instruction set i of build.py's ISAS.
HR_PUBLIC uint32_t hr_cpu_isas() {
  uint32_t isas = 1;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                  __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2");
  const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool dot = v4 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
  if (v3) isas |= 2;
  if (v4) isas |= 4;
  if (dot) isas |= 8;
  if (dot && may_use_tiles()) isas |= 16;
#elif defined(__aarch64__) && defined(__linux__)
  const bool dot_product = getauxval(AT_HWCAP) & 1ul << 20, bf16 = getauxval(AT_HWCAP2) & 1ul << 14;  // ASIMDDP, BF16
  if (dot_product) isas |= 32;
  if (dot_product && bf16) isas |= 64;
#endif
  return isas;
}

// One kernel call of a recorded step.
struct HrCall {
  int32_t (*kernel)(const uint64_t* slots);
  const uint64_t* slots;
};

// Runs the calls in order; the index of the first that refuses, whose status is written, or -1.
HR_PUBLIC int64_t hr_replay(const HrCall* calls, int64_t count, int32_t* status) {
  for (int64_t i = 0; i < count; ++i)
    if ((*status = calls[i].kernel(calls[i].slots)) != HR_OK) return i;
  return -1;
}

// For the self-test of the pool: counts how often each chunk runs.
static void count_chunk(void* context, int64_t chunk) {
  static_cast<std::atomic<int32_t>*>(context)[chunk].fetch_add(1);
}

HR_PUBLIC void hr_pool_count(int32_t* hits, int64_t chunks) {
  static_assert(sizeof(std::atomic<int32_t>) == sizeof(int32_t), "atomics without a lock");
  hr_parallel(count_chunk, hits, chunks);
}
