// The scheduler: the threads of a cluster of blocks run one at a time, each until it waits for others, or
// until another thread is preferred when it signals something. All choices follow from one seed, so that
// failures can be repeated. Copies by TMA and cp.async and products by wgmma are executed immediately, at a
// random time, or as late as allowed.
#include "schedule.h"

#include <setjmp.h>
#include <ucontext.h>

#include <cstdarg>
#include <cstdio>
#include <deque>
#include <map>
#include <memory>
#include <queue>
#include <random>

#define STACK (128 << 10)  // bytes

Index threadIdx, blockIdx, blockDim, gridDim;
unsigned current, threads_of_block, blocks_of_cluster;
unsigned elected_lane;
alignas(1024) unsigned char dynamic_shared[LARGEST_CLUSTER][SHARED_MEMORY + SHARED_MEMORY_END];
alignas(1024) unsigned char async_memory[LARGEST_CLUSTER][SHARED_MEMORY + SHARED_MEMORY_END];
bool stores_need_fences;

struct Thread {
  ucontext_t start;
  jmp_buf next;  // where it resumes
  std::unique_ptr<char[]> stack{new char[STACK]};
  bool started, done, after_pdl_wait;
  const char* awaited;  // what it waits for, and below where, and the mbarrier and phase if it is one
  Line line;
  int barrier, phase;
  Pending pending;
};
static std::deque<Thread> all_threads;  // of the largest cluster so far
static jmp_buf scheduler;
static std::function<void()> kernel_of_all;
static std::mt19937 random_bits;
static unsigned thread_count, blocks_done[LARGEST_CLUSTER];
static unsigned first_block, block_row;  // of the cluster
static bool in_a_thread;
static std::string failure;  // why the launch was aborted
static unsigned poison;      // initial byte of shared memory, and of destinations of pending copies
static unsigned shared_bytes;

Pending& this_thread() { return all_threads[current].pending; }
bool& after_pdl_wait() { return all_threads[current].after_pdl_wait; }

std::string text_of(const char* format, ...) {
  char text[1000];
  va_list values;
  va_start(values, format);
  vsnprintf(text, sizeof(text), format, values);
  va_end(values);
  return text;
}
std::string text_of(const Line& line) {
  const std::string function = line.function_name();  // with its type and parameters
  const std::string before = function.substr(0, function.find('('));
  return text_of("%s:%u in %s", line.file_name(), (unsigned)line.line(),
                 before.substr(before.rfind(' ') + 1).c_str());
}

// Aborts the launch; does not return to a thread that calls it.
void give_up(const std::string& why) {
  if (failure.empty()) failure = why;
  if (in_a_thread) _longjmp(scheduler, 1);
}
void give_up_at(const std::string& why, const Line& line) {
  const std::string runnable =
      in_a_thread ? text_of("block (%u, %u), thread %u at ", blockIdx.x, blockIdx.y, threadIdx.x)
                  : std::string("a copy that was begun at ");
  give_up(runnable + text_of(line) + ": " + why);
}

// What code that is compiled with -fsanitize=alignment calls for a misaligned access, which fails on a GPU.
struct Misaligned {  // as in GCC's ubsan_type_mismatch_data
  const char* file;
  unsigned line, column;
};
extern "C" __attribute__((used)) void __ubsan_handle_type_mismatch_v1(const Misaligned* at,
                                                                      uintptr_t address) {
  give_up(text_of("block (%u, %u), thread %u at %s:%u: misaligned address %p", blockIdx.x, blockIdx.y,
                  threadIdx.x, at->file, at->line, (void*)address));
}

// The order of runnable threads. For every other cluster of blocks it is random in every step; for the others
// it follows ranks, which threads of a warp share, so that some warps lag as far behind as barriers allow.
// The running warp loses its rank from time to time (S. Burckhardt et al.: A randomized scheduler with
// probabilistic guarantees of finding bugs, 2010). Copies have ranks too, or none: then they run when no
// thread is runnable.
enum { IMMEDIATE, LATE, MIXED };
struct Schedule {
  bool by_rank;
  int copies;          // when they run
  unsigned preempted;  // without ranks, one in so many signals preempts the thread; 0: none
  unsigned long long lowest;
  std::vector<unsigned long long> ranks;
  long until_change;
  bool holds;  // in half of the cases a warp or a lane that waits or arrives is delayed for some time
  unsigned held_first, held_end, held_line;
  long until_held;
  std::vector<unsigned> lines;  // source lines at which threads have waited or arrived, which are equally
                                // likely to cause a delay
  std::priority_queue<std::pair<unsigned long long, unsigned>> runnable;
  static constexpr unsigned long long THREADS = 1ull << 32;  // lower ranks are copies that run last

  void begin(unsigned threads) {
    by_rank = random_bits() % 2, copies = (int)(random_bits() % 3), preempted = random_bits() % 2 ? 16 : 0;
    lowest = THREADS + (1ull << 31), runnable = {};
    holds = random_bits() % 2, held_first = held_end = held_line = 0, until_held = 16l << random_bits() % 9,
    lines.clear();
    until_change = 256l << random_bits() % 10;
    ranks.resize(threads);
    unsigned of_group = 0;  // four warps, which have similar ranks in half of the cases
    unsigned long long of_warp = 0;
    unsigned behind = 32;  // in some warps, a lane that runs after all warps; 32: none
    const bool lanes_apart = random_bits() % 2, groups_together = random_bits() % 2;
    for (unsigned t = 0; t < threads; ++t) {
      if (t % 128 == 0) of_group = random_bits();
      if (t % 32 == 0) {
        of_warp = groups_together ? of_group >> 16 << 16 | random_bits() >> 16 : random_bits();
        behind = lanes_apart && random_bits() % 2 ? random_bits() % 32 : 32;
      }
      ranks[t] = lowest + (lanes_apart ? of_warp >> 8 << 8 | random_bits() % 256 : of_warp);
      if (t % 32 == behind) ranks[t] = lowest - 1 - random_bits() % 256;
    }
    lowest -= 256;
  }
  bool held(unsigned t) const { return t >= held_first && t < held_end; }
  unsigned long long rank(unsigned t) {
    return held(t) ? THREADS + random_bits() % 256 : by_rank ? ranks[t] : THREADS + 256 + random_bits();
  }
  void reached_line(unsigned line, unsigned t) {
    if (!holds) return;
    if (std::find(lines.begin(), lines.end(), line) == lines.end()) lines.push_back(line);
    if (--until_held > 0) return;
    if (!held_line) held_line = lines[random_bits() % lines.size()];
    if (line != held_line) return;
    const bool alone = random_bits() % 2;
    held_first = alone ? t : t / 32 * 32, held_end = held_first + (alone ? 1 : 32);
    until_held = 16l << random_bits() % 9, held_line = 0;
  }
  void add(unsigned t) { runnable.push({rank(t), t}); }
  void add_copy(unsigned number) {
    const bool last = copies == LATE || random_bits() % 2;
    runnable.push({last ? random_bits() : THREADS + ((unsigned long long)random_bits() << 1), number});
  }
  bool at_once() { return copies == IMMEDIATE || (copies == MIXED && random_bits() % 2); }
  unsigned next() {
    const unsigned t = runnable.top().second;
    runnable.pop();
    return t;
  }
  // Whether the running thread is preempted, after it has signalled something.
  bool ends_turn(unsigned t) {
    if (held(t)) return true;
    if (!by_rank) return preempted && random_bits() % preempted == 0;
    if (--until_change == 0) {
      until_change = 256l << random_bits() % 10;
      const unsigned first = t / 32 * 32;
      for (unsigned of_warp = first; of_warp < first + 32 && of_warp < ranks.size(); ++of_warp)
        ranks[of_warp] = lowest - 1 - of_warp % 32;
      lowest -= 32;
    }
    return !runnable.empty() && runnable.top().first > ranks[t];
  }
};
static Schedule schedule;

void reached_line(unsigned line) { schedule.reached_line(line, current); }
bool runs_at_once() { return schedule.at_once(); }

// Lets other threads run; `schedule` decides whether and when this one resumes.
__attribute__((noinline)) void end_turn() {
  if (!_setjmp(all_threads[current].next)) _longjmp(scheduler, 1);
}
void end_turn_perhaps() {
  if (!schedule.ends_turn(current)) return;
  schedule.add(current);
  end_turn();
}
void wait_for(const char* awaited, const Line& line, int barrier = -1, int phase = 0) {
  Thread& thread = all_threads[current];
  thread.awaited = awaited, thread.line = line, thread.barrier = barrier, thread.phase = phase;
  end_turn();
}

// ---- operations of TMA and cp.async, which complete on mbarriers
static std::deque<std::function<void()>> operations;  // started operations
void begin_operation(const std::function<void()>& work) {
  if (schedule.at_once()) return work();
  schedule.add_copy(thread_count + (unsigned)operations.size());
  operations.push_back(work);
}
void poison_destination(void* to, size_t bytes) { memset(to, (int)poison, bytes); }

void written_by_async(const void* p, size_t bytes) {
  if (async_view(p) != p) memcpy((void*)async_view(p), p, bytes);
}
void publish_stores() {
  if (stores_need_fences)
    memcpy(async_memory[rank_of_block()], dynamic_shared[rank_of_block()], shared_bytes);
}

// ---- mbarriers
struct Barrier {
  const void* at;
  unsigned number, block, count, left;
  int bytes;      // expected bytes that have not been copied yet
  int completed;  // phases
  Line line;      // where it was initialised
  std::vector<unsigned> waiting;
  std::vector<int> observed;  // for each thread, the last phase that it has waited for
};
static std::deque<Barrier> barriers;
struct BarrierWord {  // the eight bytes of an mbarrier
  unsigned number, mark;
};
#define BARRIER_MARK 0xb0771e5u
std::string text_of(const Barrier& b) {
  return text_of("mbarrier %d of block (%u, %u), initialised at ", (int)b.number, first_block + b.block,
                 block_row) +
         text_of(b.line) +
         text_of(" (%u phases complete, %u of %u arrivals and %d bytes missing)", (unsigned)b.completed,
                 b.left, b.count, b.bytes);
}
Barrier& barrier_at(const void* at, const Line& line) {
  const BarrierWord word = *(const BarrierWord*)at;
  static Barrier none;
  if (word.mark == BARRIER_MARK && word.number < barriers.size() && barriers[word.number].at == at)
    return barriers[word.number];
  give_up_at("no mbarrier was initialised here, or it has been overwritten", line);
  return none;
}
void init_barrier(void* at, unsigned count, const Line& line) {
  barriers.push_back({at, (unsigned)barriers.size(), rank_of_block(), count, count, 0, 0, line, {}, {}});
  barriers.back().observed.assign(thread_count, -2);
  *(BarrierWord*)at = {(unsigned)barriers.size() - 1, BARRIER_MARK};
}
void complete_if_done(Barrier& b) {
  if (b.left || b.bytes) return;
  b.left = b.count, b.completed++;
  for (unsigned t : b.waiting) schedule.add(t);
  b.waiting.clear();
}
static void check_block_running(const Barrier& b, const Line& line) {
  if (blocks_done[b.block] == threads_of_block)
    give_up_at("signals a block that has ended: " + text_of(b), line);
}
int phase_now(const void* at, const Line& line) {
  const Barrier& b = barrier_at(at, line);
  check_block_running(b, line);
  return b.completed;
}
void arrive(void* at, int bytes, const Line& line) {
  Barrier& b = barrier_at(at, line);
  check_block_running(b, line);
  if (b.left == 0) give_up_at("more arrivals than the count of " + text_of(b), line);
  b.bytes += bytes, b.left--;
  complete_if_done(b);
}
void complete_bytes(void* at, int bytes, int phase, const Line& line) {
  Barrier& b = barrier_at(at, line);
  check_block_running(b, line);
  if (!failure.empty()) return;
  if (b.completed != phase)
    give_up("bytes came after their phase of " + text_of(b) + ", by " + text_of(line));
  b.bytes -= bytes;
  complete_if_done(b);
}

// The phase, of a parity, that this thread waits for: the one that it waited for last, or the next. A thread
// that is late by two phases would wait for a third, which may never complete.
int phase_of_parity(Barrier& b, unsigned parity, const Line& line) {
  const int last = b.observed[current];
  const int phase = last == -2 ? (parity ? -1 : 0) : ((unsigned)last & 1) == parity ? last : last + 1;
  if (b.completed > phase + 1)
    give_up_at(text_of("lapped: waits for phase %d, of parity %u, of ", phase, parity) + text_of(b), line);
  return phase;
}
void wait_for_phase(void* at, unsigned parity, const Line& line) {
  schedule.reached_line(line.line(), current);
  end_turn_perhaps();
  Barrier& b = barrier_at(at, line);
  for (;;) {
    const int phase = phase_of_parity(b, parity, line);
    if (b.completed == phase + 1) {
      b.observed[current] = phase;
      return;
    }
    b.waiting.push_back(current);
    wait_for("mbarrier", line, (int)b.number, phase);
  }
}
bool phase_is_complete(void* at, unsigned parity, const Line& line) {
  end_turn_perhaps();
  Barrier& b = barrier_at(at, line);
  const int phase = phase_of_parity(b, parity, line);
  if (b.completed != phase + 1) return false;
  b.observed[current] = phase;
  return true;
}

// ---- reusable barriers of a number of threads
struct ThreadBarrier {
  unsigned members;
  std::vector<unsigned> arrived;
  void release_if_complete() {
    if (arrived.size() < members) return;
    for (unsigned t : arrived) schedule.add(t);
    arrived.clear();
  }
  void wait(const char* name, const Line& line) {
    arrived.push_back(current);
    release_if_complete();
    wait_for(name, line);
  }
  void leave() {
    --members;
    release_if_complete();
  }
};
static ThreadBarrier of_block[LARGEST_CLUSTER], of_cluster;
static std::vector<ThreadBarrier> of_warp;
static std::map<unsigned, ThreadBarrier> named;  // by block, name and count

void wait_for_block(const Line& line) { of_block[rank_of_block()].wait("__syncthreads", line); }
void wait_for_warp(const Line& line) { of_warp[warp_of_cluster()].wait("the others of the warp", line); }
void wait_for_cluster(const Line& line) { of_cluster.wait("the other blocks of the cluster", line); }
void wait_for_named(unsigned name, unsigned count, const Line& line) {
  ThreadBarrier& meeting = named[rank_of_block() << 24 | name << 16 | count];
  meeting.members = count;
  meeting.wait("a named barrier", line);
}

// ---- launches
void run_thread() {
  kernel_of_all();
  Thread& thread = all_threads[current];
  if (!thread.pending.writes.empty()) give_up("a thread ends before what it writes has been read");
  for (const auto& group : thread.pending.copies)
    if (!group.empty()) give_up("a thread ends before its copies to shared memory have been waited for");
  for (const auto& group : thread.pending.products)
    if (!group.empty()) give_up("a thread ends before its products have been waited for");
  thread.done = true;
  ++blocks_done[rank_of_block()];
  of_warp[warp_of_cluster()].leave();
  of_block[rank_of_block()].leave();
  of_cluster.leave();
  _longjmp(scheduler, 1);
}

__attribute__((noinline)) void resume_thread() {
  Thread& thread = all_threads[current];
  in_a_thread = true;
  if (!_setjmp(scheduler)) {
    if (thread.started) _longjmp(thread.next, 1);
    thread.started = true;
    setcontext(&thread.start);
  }
  in_a_thread = false;
}

void choose(unsigned t) {
  current = t;
  threadIdx = {t % threads_of_block, 0, 0};
  blockIdx = {first_block + t / threads_of_block, block_row, 0};
}

// What blocked threads wait for, grouped by reason.
std::string text_of_waiting() {
  std::map<std::string, std::vector<unsigned>> by_reason;
  for (unsigned t = 0; t < thread_count; ++t) {
    const Thread& thread = all_threads[t];
    if (thread.done) continue;
    std::string reason = text_of("block (%u, %u), at ", first_block + t / threads_of_block, block_row) +
                         text_of(thread.line) + ", wait for ";
    reason += thread.barrier < 0 ? thread.awaited
                                 : text_of("phase %d of ", thread.phase) + text_of(barriers[thread.barrier]);
    by_reason[reason].push_back(t % threads_of_block);
  }
  std::string all = "deadlock";
  for (const auto& [reason, threads] : by_reason) {
    all += "; threads";
    for (size_t i = 0, end; i < threads.size(); i = end) {
      for (end = i + 1; end < threads.size() && threads[end] == threads[end - 1] + 1; ++end);
      all += text_of(end > i + 1 ? " %u-%u" : " %u", threads[i], threads[end - 1]);
    }
    all += " of " + reason;
  }
  return all;
}

void run_cluster() {
  const unsigned threads = thread_count;
  of_cluster = {threads, {}};
  of_warp.clear(), named.clear(), operations.clear(), barriers.clear();
  poison = random_bits() % 2 ? 0xff : 0x7f;  // NaN in every format, or NaN and large numbers
  elected_lane = random_bits() % 32;
  stores_need_fences = random_bits() % 2;
  schedule.begin(threads);
  for (unsigned b = 0; b < blocks_of_cluster; ++b) {
    memset(dynamic_shared[b], (int)poison, shared_bytes + SHARED_MEMORY_END);
    memset(async_memory[b], (int)poison, shared_bytes);
    of_block[b] = {threads_of_block, {}}, blocks_done[b] = 0;
    for (unsigned first = 0; first < threads_of_block; first += 32)
      of_warp.push_back({std::min(32u, threads_of_block - first), {}});
  }
  for (unsigned t = 0; t < threads; ++t) {
    Thread& thread = all_threads[t];
    getcontext(&thread.start);
    thread.start.uc_stack.ss_sp = thread.stack.get();
    thread.start.uc_stack.ss_size = STACK;
    makecontext(&thread.start, run_thread, 0);
    thread.started = thread.done = thread.after_pdl_wait = false;
    thread.pending.copies.assign(1, {}), thread.pending.products.assign(1, {}), thread.pending.writes.clear();
    schedule.add(t);
  }
  while (failure.empty() && !schedule.runnable.empty()) {
    const unsigned next = schedule.next();
    if (next < threads) {
      choose(next);
      resume_thread();
    } else
      operations[next - threads]();
  }
  if (!failure.empty()) return;
  for (unsigned t = 0; t < threads; ++t)
    if (!all_threads[t].done) return give_up(text_of_waiting());
  for (unsigned b = 0; b < blocks_of_cluster; ++b)
    if (std::none_of(all_threads.begin() + b * threads_of_block,
                     all_threads.begin() + (b + 1) * threads_of_block,
                     [](const Thread& thread) { return thread.after_pdl_wait; }))
      return give_up("the block ends, and no thread of it has called pdl_wait");
  for (const Barrier& b : barriers)
    if (b.left != b.count || b.bytes) return give_up("the block ends within a phase of " + text_of(b));
  for (unsigned b = 0; b < blocks_of_cluster; ++b)
    for (unsigned i = shared_bytes; i < shared_bytes + SHARED_MEMORY_END; ++i)
      if (dynamic_shared[b][i] != poison)
        return give_up(text_of("something was written %u bytes past the end of dynamic shared memory",
                               i - shared_bytes));
}

const char* run_grid(unsigned seed, unsigned cluster, unsigned blocks, unsigned blocks_y, unsigned threads,
                     unsigned shared, const std::function<void()>& kernel) {
  random_bits.seed(seed);
  failure.clear();
  gridDim = {blocks, blocks_y, 1};
  blockDim = {threads, 1, 1};
  threads_of_block = threads, blocks_of_cluster = cluster;
  thread_count = threads * cluster, shared_bytes = std::min(shared, (unsigned)SHARED_MEMORY);
  if (all_threads.size() < thread_count) all_threads.resize(thread_count);
  kernel_of_all = kernel;
  for (block_row = 0; block_row < blocks_y; ++block_row)
    for (first_block = 0; first_block < blocks; first_block += cluster) {
      run_cluster();
      if (!failure.empty()) {
        failure = text_of("blocks from (%u, %u) on: ", first_block, block_row) + failure;
        return failure.c_str();
      }
    }
  return nullptr;
}
