// Runs a CUDA kernel's threads on the CPU, one at a time, so that its algorithm can be tested without a GPU.
//
// Each thread is a coroutine that runs until it must wait for others: at a warp's exchange of values, at a block's or a
// cluster's barrier. The order in which threads run is shuffled from a seed, some warps and one CTA run seldom, and
// shared memory starts as garbage, so that a missing barrier or an unset word shows as a wrong result. Reading the
// shared memory of a CTA that has not begun or has left, reading scores out of bounds, and waiting for ever end the
// program with a message.
// Not a model of the hardware: nothing runs at the same time, memory is consistent, and nothing here is about speed.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define CLUSTER_OF(size)
#define SHARED_MEMORY(name) Shared& name = *static_cast<Shared*>(emulator::here->block->shared)

struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
using std::max;
using std::min;

namespace emulator {

[[noreturn]] inline void fail(const char* message) {
  std::fprintf(stderr, "emulated kernel: %s\n", message);
  std::_Exit(3);
}

// Waits for `expected` arrivals; a wait may come later than its arrival, as a cluster's does.
struct Barrier {
  int expected = 0, arrived = 0;
  unsigned generation = 0;

  void arrive() { ++arrived, release(); }
  void leave() { --expected, release(); }
  void release() {
    if (expected && arrived == expected) arrived = 0, ++generation;
  }
};

struct Block;

struct Warp {
  Barrier barrier{32};
  uint64_t values[2][32];
};

struct Thread {
  ucontext_t context;
  std::vector<char> stack;
  Block* block = nullptr;
  int index = 0;
  unsigned cluster_generation = 0;
  const Barrier* waiting = nullptr;
  unsigned slowness = 1;
  unsigned since = 0;
  bool done = false;
};

struct Block {
  int index = 0, rank = 0;
  std::vector<Block*> cluster;
  Barrier barrier, *cluster_barrier = nullptr;
  std::vector<Warp> warps;
  std::vector<Thread> threads;
  void* shared = nullptr;
  int running = 0;
  bool begun = false;
};

inline Thread* here;
inline ucontext_t scheduler;
inline std::function<void()> body;
inline const char *readable_from, *readable_to;

inline void wait_for(const Barrier& barrier, unsigned since) {
  if (barrier.generation != since) return;
  here->waiting = &barrier;
  here->since = since;
  Thread* me = here;
  swapcontext(&me->context, &scheduler);
}

inline void join(Barrier& barrier) {
  const unsigned since = barrier.generation;
  barrier.arrive();
  wait_for(barrier, since);
}

// Every lane's value, until this warp's exchange after the next.
inline const uint64_t* exchange(uint64_t value) {
  Warp& warp = here->block->warps[here->index / 32];
  uint64_t* values = warp.values[warp.barrier.generation % 2];
  values[here->index % 32] = value;
  join(warp.barrier);
  return values;
}

inline void run_thread() {
  body();
  here->done = true;
  --here->block->running;
  here->block->barrier.leave();
  here->block->cluster_barrier->leave();
  swapcontext(&here->context, &scheduler);
}

// One cluster at a time; `kernel` is called by every thread.
inline void launch(int grid, int cluster, int threads, size_t shared_bytes, unsigned seed,
                   std::function<void()> kernel) {
  std::mt19937 random(seed);
  body = std::move(kernel);
  for (int first = 0; first < grid; first += cluster) {
    std::vector<Block> blocks(cluster);
    std::vector<std::unique_ptr<char[]>> memory;
    std::vector<Thread*> order;
    Barrier cluster_barrier{cluster * threads};
    const int slow_rank = static_cast<int>(random() % cluster);
    for (int rank = 0; rank < cluster; ++rank) {
      Block& block = blocks[rank];
      block.index = first + rank, block.rank = rank, block.running = threads;
      block.barrier.expected = threads, block.cluster_barrier = &cluster_barrier;
      block.warps = std::vector<Warp>(threads / 32);
      block.threads = std::vector<Thread>(threads);
      memory.emplace_back(new char[shared_bytes + 16]);
      block.shared = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(memory.back().get()) + 15) & ~uintptr_t{15});
      for (size_t i = 0; i < shared_bytes; ++i) static_cast<char*>(block.shared)[i] = static_cast<char>(random());
      for (Block& other : blocks) block.cluster.push_back(&other);
      for (int t = 0; t < threads; ++t) {
        Thread& thread = block.threads[t];
        thread.block = &block, thread.index = t;
        const bool slow = random() % 4 == 0 || (rank == slow_rank && cluster > 1);
        thread.slowness = t % 32 ? block.threads[t - 1].slowness : slow ? 16 : 1;
        thread.stack.resize(1 << 15);
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = thread.stack.data();
        thread.context.uc_stack.ss_size = thread.stack.size();
        thread.context.uc_link = nullptr;
        makecontext(&thread.context, run_thread, 0);
        order.push_back(&thread);
      }
    }
    while (!order.empty()) {
      std::shuffle(order.begin(), order.end(), random);
      bool stuck = true;
      for (Thread* thread : order) {
        if (thread->waiting && thread->waiting->generation == thread->since) continue;
        stuck = false;
        if (random() % thread->slowness) continue;
        thread->waiting = nullptr;
        thread->block->begun = true;
        here = thread;
        swapcontext(&scheduler, &thread->context);
      }
      if (stuck) fail("threads wait for ever");
      order.erase(std::remove_if(order.begin(), order.end(), [](Thread* t) { return t->done; }), order.end());
    }
  }
}

struct ThreadIndex {
  struct { operator unsigned() const { return static_cast<unsigned>(here->index); } } x;
};
struct BlockIndex {
  struct { operator unsigned() const { return static_cast<unsigned>(here->block->index); } } x;
};

}  // namespace emulator

inline emulator::ThreadIndex threadIdx;
inline emulator::BlockIndex blockIdx;

inline void __syncthreads() { emulator::join(emulator::here->block->barrier); }

inline void cluster_arrive() {
  emulator::here->cluster_generation = emulator::here->block->cluster_barrier->generation;
  emulator::here->block->cluster_barrier->arrive();
}

inline void cluster_wait() {
  emulator::wait_for(*emulator::here->block->cluster_barrier, emulator::here->cluster_generation);
}

template <class T>
const T& peer(T&, int rank) {
  const emulator::Block& block = *emulator::here->block->cluster.at(rank);
  if (!block.begun || !block.running) emulator::fail("the other CTA's shared memory is not there");
  return *static_cast<const T*>(block.shared);
}

inline unsigned __shfl_sync(unsigned, unsigned value, int lane) { return emulator::exchange(value)[lane & 31]; }

inline unsigned __shfl_up_sync(unsigned, unsigned value, int step) {
  const int lane = emulator::here->index % 32;
  return emulator::exchange(value)[lane < step ? lane : lane - step];
}

inline unsigned __shfl_down_sync(unsigned, unsigned value, int step) {
  const int lane = emulator::here->index % 32;
  return emulator::exchange(value)[lane + step > 31 ? lane : lane + step];
}

inline unsigned __shfl_xor_sync(unsigned, unsigned value, int step) {
  return emulator::exchange(value)[(emulator::here->index % 32) ^ step];
}

inline bool __any_sync(unsigned, bool vote) {
  const uint64_t* votes = emulator::exchange(vote);
  return std::any_of(votes, votes + 32, [](uint64_t v) { return v != 0; });
}

inline unsigned __ballot_sync(unsigned, bool vote) {
  const uint64_t* votes = emulator::exchange(vote);
  unsigned all = 0;
  for (int lane = 0; lane < 32; ++lane) all |= static_cast<unsigned>(votes[lane]) << lane;
  return all;
}

inline unsigned __reduce_add_sync(unsigned, unsigned value) {
  const uint64_t* values = emulator::exchange(value);
  unsigned sum = 0;
  for (int lane = 0; lane < 32; ++lane) sum += static_cast<unsigned>(values[lane]);
  return sum;
}

inline int __ffs(unsigned word) { return __builtin_ffs(static_cast<int>(word)); }
inline int __popc(unsigned word) { return __builtin_popcount(word); }

inline unsigned atomicAdd(unsigned* word, unsigned value) {
  const unsigned before = *word;
  *word += value;
  return before;
}

struct Counters {
  unsigned* histogram;
  explicit Counters(unsigned* shared) : histogram(shared) {}
  void increment(unsigned digit, bool really) const { histogram[digit] += really; }
};

struct Output {
  int* row;
  explicit Output(int* global) : row(global) {}
  void append(unsigned& slot, int position, unsigned really) const {
    if (really) row[slot++] = position;
  }
};

inline float __uint_as_float(unsigned bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

inline unsigned __float_as_uint(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

// As the GPU rounds: to nearest, and every NaN is the one with all bits but the sign.
inline float __fadd_rn(float a, float b) {
  const float sum = a + b;
  return sum == sum ? sum : __uint_as_float(0x7fffffffu);
}

template <class T>
T __ldg(const T* from) {
  const char* address = reinterpret_cast<const char*>(from);
  if (reinterpret_cast<uintptr_t>(address) % sizeof(T)) emulator::fail("a vector load is not aligned");
  if (address < emulator::readable_from || address + sizeof(T) > emulator::readable_to)
    emulator::fail("a score is read out of bounds");
  return *from;
}
