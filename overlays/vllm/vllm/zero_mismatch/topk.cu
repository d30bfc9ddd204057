// Exact Top-K of the sparse-attention indexer for GPUs with thread-block clusters. Contract and binding: topk_cuda.py.
//
// Each score becomes an unsigned key that orders as the score does; the pair (key, position) is unique, so the K
// largest pairs are too. Twelve bits at a time, counted in shared memory, narrow down the K-th pair: three digits of
// the key, two of the position. The pairs of a bin with few of them are listed, and the last few compared with each
// other. A row's CTAs (its cluster) count their parts of the row and add up each other's integer counts and lists, so
// neither their number nor their timing can change a result.
//
// The host compiles this with BF16 (the scores' type, else fp32), THREADS, KEYS (keys a thread holds in registers),
// RESIDENT (CTAs an SM must hold), PART (the fewest scores for which a row gets another CTA) and LISTED (the most pairs
// to list). None of the last five can change a result.

constexpr int VECTORS = KEYS / 4;
constexpr int TILE = 4 * THREADS;
constexpr int SPAN = KEYS * THREADS;  // scores a CTA holds at a time; a longer part is read again in each pass
constexpr int WARPS = THREADS / 32;
constexpr int CHUNKS = VECTORS * WARPS;  // 128 consecutive positions, a warp's vector loads
constexpr int BINS = 4096;
constexpr int OWN = BINS / THREADS;  // bins that a thread adds up
constexpr int COMPARED = 64;         // pairs that are compared with each other
constexpr int RIVALS = THREADS / COMPARED < 32 ? THREADS / COMPARED : 32;  // threads that share one's comparisons
constexpr int SUM_WORDS = VECTORS <= 4 ? 1 : 2;
constexpr unsigned FULL = 0xffffffffu;
static_assert(KEYS % 4 == 0 && KEYS <= 32 && THREADS >= COMPARED && BINS % (4 * THREADS) == 0);
static_assert(PART >= 8 * 4 && LISTED >= COMPARED);

enum Task { COUNT, LIST, SOLVE, WRITE };

using Pair = unsigned long long;

__device__ __forceinline__ Pair pair_of(unsigned key, unsigned position) {
  return static_cast<Pair>(key) << 32 | position;
}

struct Found {
  unsigned digit, above, count;       // the digit of the wanted pair; pairs of the row above it, and in its bin
  unsigned later_above, later_count;  // of those, how many lie in later parts of the row
};

struct alignas(16) Shared {
  unsigned histogram[2][BINS];
  Pair listed[LISTED];    // this CTA's pairs of the last bin
  Pair gathered[LISTED];  // the row's
  Pair finalists[COMPARED];
  unsigned totals[2][WARPS];
  unsigned chunks[2][CHUNKS];
  unsigned listed_count, finalist_count;
  Pair threshold, next;
  Found found;
};

#ifdef __CUDACC__
#define SHARED_MEMORY(name) __shared__ Shared name
#define CLUSTER_OF(size) __attribute__((cluster_dims(size, 1, 1)))

__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }

__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

__device__ __forceinline__ const Shared& peer(Shared& mine, int rank) {
  const Shared* there;
  asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(&mine), "r"(rank));
  return *there;
}

// A shared histogram by its address. The compiler must not see where that comes from, or it computes it again for each
// of many copies; and a predicate is cheaper than its branches.
struct Counters {
  unsigned address;

  __device__ __forceinline__ explicit Counters(unsigned* histogram)
      : address(static_cast<unsigned>(__cvta_generic_to_shared(histogram))) {
    asm volatile("" : "+r"(address));
  }

  __device__ __forceinline__ void increment(unsigned digit, bool really) const {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %1, 0; @p red.shared.add.u32 [%0], 1;}"
                 :: "r"(address + digit * 4), "r"(static_cast<unsigned>(really)) : "memory");
  }
};

// A row of the output by its address, for the same reasons.
struct Output {
  unsigned long long address;

  __device__ __forceinline__ explicit Output(int* row) : address(__cvta_generic_to_global(row)) {
    asm volatile("" : "+l"(address));
  }

  __device__ __forceinline__ void append(unsigned& slot, int position, unsigned really) const {  // if it is not zero
    asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0; @p st.global.u32 [%0], %1;}"
                 :: "l"(address + 4ull * slot), "r"(position), "r"(really) : "memory");
    if (really != 0) ++slot;
  }
};
#endif

// The CTAs that share a row, and this one's place among them.
template <int CLUSTER>
struct Team {
  int rank, parts;

  __device__ __forceinline__ bool alone() const { return CLUSTER == 1 || parts == 1; }

  __device__ __forceinline__ void join() const {
    if (alone()) {
      __syncthreads();
    } else {
      cluster_arrive();
      cluster_wait();
    }
  }
};

// Adding zero makes -0 +0 and every NaN the one with bits 0x7fffffff; then the sign decides which way the bits order.
__device__ __forceinline__ unsigned ordered(unsigned bits) {
  bits = __float_as_uint(__fadd_rn(__uint_as_float(bits), 0.0f));
  return bits ^ (static_cast<unsigned>(static_cast<int>(bits) >> 31) | 0x80000000u);
}

__device__ __forceinline__ uint4 load_four(const void* base, int index) {
  if constexpr (BF16) {
    const uint2 raw = __ldg(reinterpret_cast<const uint2*>(static_cast<const unsigned short*>(base) + index));
    return make_uint4(raw.x << 16, raw.x & 0xffff0000u, raw.y << 16, raw.y & 0xffff0000u);
  } else {
    return __ldg(reinterpret_cast<const uint4*>(static_cast<const float*>(base) + index));
  }
}

// The pairs still in question: those that share the digits found so far, the bits under the masks, with (key, place).
struct Prefix {
  unsigned key = 0, place = 0, key_mask = 0, place_mask = 0;

  __device__ __forceinline__ void extend(int level, unsigned digit) {  // at level 2 four bits of it are known already
    if (level < 3) {
      const int shift = level == 0 ? 20 : level == 1 ? 8 : 0;
      key |= digit << shift;
      key_mask = FULL << shift;
    } else {
      const int shift = level == 3 ? 12 : 0;
      place |= digit << shift;
      place_mask = FULL << shift;
    }
  }

  __device__ __forceinline__ bool holds(unsigned other) const { return ((other ^ key) & key_mask) == 0; }

  __device__ __forceinline__ bool holds(unsigned other, unsigned position) const {
    return holds(other) && ((position ^ place) & place_mask) == 0;
  }

  __device__ __forceinline__ bool holds(Pair pair) const {
    return holds(static_cast<unsigned>(pair >> 32), static_cast<unsigned>(pair));
  }
};

// One CTA's part of a row, its positions below `end`. The row begins `shift` after `base`, which is aligned to a
// vector. A thread holds vectors of four positions, TILE apart. A key of 0 is below every score's.
struct Part {
  const void* base;
  int shift, low, end, spans;
  int held = -1;
  int first, vectors;  // this thread's first position, which may lie before the row; vectors that reach into the part
  unsigned keys[KEYS];

  __device__ __forceinline__ void hold(int span) {
    if (held == span) return;
    held = span;
    first = low + span * SPAN + static_cast<int>(threadIdx.x) * 4;
    vectors = (end - (low + span * SPAN) + TILE - 1) / TILE;
    uint4 raw[VECTORS];
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) {
      raw[j] = make_uint4(0, 0, 0, 0);
      if (first + j * TILE < end) raw[j] = load_four(base, shift + first + j * TILE);
    }
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) {
      keys[4 * j] = ordered(raw[j].x);
      keys[4 * j + 1] = ordered(raw[j].y);
      keys[4 * j + 2] = ordered(raw[j].z);
      keys[4 * j + 3] = ordered(raw[j].w);
      const int position = first + j * TILE;
      if (position < 0 || position + 4 > end)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (static_cast<unsigned>(position + i) >= static_cast<unsigned>(end)) keys[4 * j + i] = 0;
    }
  }

  // visit(number, key, position) for every score that is held.
  template <class Visit>
  __device__ __forceinline__ void each(Visit visit) const {
#pragma unroll
    for (int j = 0; j < VECTORS; ++j)
      if (j < vectors)
#pragma unroll
        for (int i = 0; i < 4; ++i) visit(4 * j + i, keys[4 * j + i], static_cast<unsigned>(first + j * TILE + i));
  }
};

// Inclusive sum over this lane and the lanes before it.
__device__ __forceinline__ unsigned sum_up_to(unsigned x) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const unsigned other = __shfl_up_sync(FULL, x, step);
    if (lane >= step) x += other;
  }
  return x;
}

__device__ __forceinline__ unsigned sum_from(unsigned x) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const unsigned other = __shfl_down_sync(FULL, x, step);
    if (lane + step < 32) x += other;
  }
  return x;
}

__device__ __forceinline__ void clear(unsigned* histogram) {
#pragma unroll
  for (int i = 0; i < OWN / 4; ++i)
    reinterpret_cast<uint4*>(histogram)[i * THREADS + threadIdx.x] = make_uint4(0, 0, 0, 0);
}

__device__ __forceinline__ void add_bins(unsigned (&sums)[OWN], const unsigned* histogram, bool really) {
#pragma unroll
  for (int i = 0; i < OWN / 4; ++i) {
    const uint4 bins = reinterpret_cast<const uint4*>(histogram)[i];
    sums[4 * i] += really ? bins.x : 0;
    sums[4 * i + 1] += really ? bins.y : 0;
    sums[4 * i + 2] += really ? bins.z : 0;
    sums[4 * i + 3] += really ? bins.w : 0;
  }
}

__device__ __forceinline__ unsigned sum_of(const unsigned (&bins)[OWN]) {
  unsigned sum = 0;
#pragma unroll
  for (int i = 0; i < OWN; ++i) sum += bins[i];
  return sum;
}

// Finds the digit of the `wanted`-th pair from the top: threads hold bins from the top down.
template <int CLUSTER>
__device__ __forceinline__ void find_digit(Shared& s, int side, unsigned wanted, Team<CLUSTER> team) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first = BINS - (static_cast<int>(threadIdx.x) + 1) * OWN;
  unsigned bins[OWN] = {}, later_bins[OWN] = {}, later_above = 0;
  add_bins(bins, s.histogram[side] + first, true);
  unsigned sum = sum_of(bins), reached = sum_up_to(sum);
  if (lane == 31) s.totals[side][warp] = reached;
  team.join();
  unsigned above = 0;
  if (team.alone()) {
    above = __reduce_add_sync(FULL, lane < warp ? s.totals[side][lane] : 0);
  } else {
    unsigned mine = 0;
#pragma unroll
    for (int i = 0; i < CLUSTER * WARPS; i += 32) {
      const int part = (i + lane) / WARPS, place = (i + lane) % WARPS;
      const unsigned count = part < team.parts ? peer(s, part).totals[side][place] : 0;
      above += place < warp ? count : 0;
      mine += place == warp ? count : 0;
      later_above += place < warp && part > team.rank ? count : 0;
    }
    above = __reduce_add_sync(FULL, above);
    mine = __reduce_add_sync(FULL, mine);
    sum = reached = 0;
    if (above < wanted && wanted <= above + mine) {  // in this warp's bins
      later_above = __reduce_add_sync(FULL, later_above);
#pragma unroll
      for (int i = 0; i < OWN; ++i) bins[i] = 0;
#pragma unroll
      for (int part = 0; part < CLUSTER; ++part) {  // without branches, so that all are being read at once
        const unsigned* theirs = peer(s, part < team.parts ? part : 0).histogram[side] + first;
        add_bins(bins, theirs, part < team.parts);
        add_bins(later_bins, theirs, part < team.parts && part > team.rank);
      }
      sum = sum_of(bins), reached = sum_up_to(sum);
      later_above += sum_up_to(sum_of(later_bins)) - sum_of(later_bins);
    }
  }
  above += reached - sum;
  if (above >= wanted || above + sum < wanted) return;
  bool done = false;
#pragma unroll
  for (int i = OWN - 1; i >= 0; --i) {
    if (!done && above + bins[i] >= wanted) {
      done = true;
      s.found = {static_cast<unsigned>(first + i), above, bins[i], later_above, later_bins[i]};
    }
    above += bins[i];
    later_above += later_bins[i];
  }
}

// Appends the held pairs that share the prefix to `listed`; few do.
__device__ __forceinline__ void list_pairs(Shared& s, const Part& part, const Prefix& prefix) {
  unsigned marks = 0;
  if (prefix.place_mask == 0)
    part.each([&](int i, unsigned key, unsigned) { marks |= prefix.holds(key) ? 1u << i : 0; });
  else
    part.each([&](int i, unsigned key, unsigned position) { marks |= prefix.holds(key, position) ? 1u << i : 0; });
  if (marks == 0) return;
  unsigned slot = atomicAdd(&s.listed_count, static_cast<unsigned>(__popc(marks)));
  part.each([&](int i, unsigned key, unsigned position) {
    if (marks >> i & 1) s.listed[slot++] = pair_of(key, position);
  });
}

// The marks of each vector counted, a byte for each: those of even and odd vectors in two words, or halves of one.
__device__ __forceinline__ void count_marks(unsigned marks, unsigned (&sums)[SUM_WORDS]) {
  marks -= marks >> 1 & 0x55555555u;
  marks = (marks & 0x33333333u) + (marks >> 2 & 0x33333333u);
  sums[0] = marks & 0x0f0f0f0fu;
  const unsigned odd = marks >> 4 & 0x0f0f0f0fu;
  if constexpr (SUM_WORDS == 1) sums[0] |= odd << 16;
  else sums[1] = odd;
}

__device__ __forceinline__ unsigned sum_at(const unsigned (&sums)[SUM_WORDS], int vector) {
  if constexpr (SUM_WORDS == 1) return sums[0] >> (vector / 2 + vector % 2 * 2) * 8 & 255;
  else return sums[vector % 2] >> vector / 2 * 8 & 255;
}

// Positions of the held pairs that are chosen, in descending order from `first_slot` on; returns the slot after them.
__device__ __forceinline__ unsigned write_held(Shared& s, const Part& part, const Prefix& prefix, unsigned first_slot,
                                               Output out) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  unsigned marks = 0;
  if (prefix.place == 0)
    part.each([&](int i, unsigned key, unsigned) { marks |= key >= prefix.key ? 1u << i : 0; });
  else
    part.each([&](int i, unsigned key, unsigned position) {
      marks |= pair_of(key, position) >= pair_of(prefix.key, prefix.place) ? 1u << i : 0;
    });
  unsigned sums[SUM_WORDS], later[SUM_WORDS];  // of a vector's chosen, and of those in the lanes behind
  count_marks(marks, sums);
#pragma unroll
  for (int i = 0; i < SUM_WORDS; ++i) later[i] = sum_from(sums[i]);
  unsigned* chunks = s.chunks[part.held % 2];
#pragma unroll
  for (int j = 0; j < VECTORS; ++j)
    if (lane == 0) chunks[j * WARPS + warp] = sum_at(later, j);  // at most 128, which is why a byte does
#pragma unroll
  for (int i = 0; i < SUM_WORDS; ++i) later[i] -= sums[i];
  __syncthreads();  // one is enough: the other side is written next
  unsigned total = 0, behind[VECTORS] = {};
#pragma unroll
  for (int base = 0; base < CHUNKS; base += 32) {
    const unsigned count = base + lane < CHUNKS ? chunks[base + lane] : 0;
    total += count;
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) behind[j] += base + lane > j * WARPS + warp ? count : 0;
  }
#pragma unroll
  for (int j = 0; j < VECTORS; ++j) {
    if (!__any_sync(FULL, marks >> 4 * j & 15)) continue;
    unsigned slot = first_slot + __reduce_add_sync(FULL, behind[j]) + sum_at(later, j);
#pragma unroll
    for (int i = 3; i >= 0; --i) out.append(slot, part.first + j * TILE + i, marks & 1u << (4 * j + i));
  }
  return part.spans > 1 ? first_slot + __reduce_add_sync(FULL, total) : 0;
}

// Counts a digit of the part's pairs that share the prefix, or lists those pairs, or writes the chosen ones from `slot`
// on. A pass begins with the span that the last one held; writing begins with the last span.
__device__ __forceinline__ void pass(Shared& s, Part& part, const Prefix& prefix, Task task, int level, unsigned slot,
                                     Output out) {
  const Counters counters(s.histogram[level % 2]);
  const bool down = task == WRITE || part.held == part.spans - 1;
  for (int turn = 0; turn < part.spans; ++turn) {
    part.hold(down ? part.spans - 1 - turn : turn);
    if (task == COUNT && level == 0 && turn == 0) __syncthreads();  // the histogram was cleared while scores came
    if (task == WRITE) {
      slot = write_held(s, part, prefix, slot, out);
    } else if (task == LIST) {
      list_pairs(s, part, prefix);
    } else if (level == 0) {
      part.each([&](int, unsigned key, unsigned) { counters.increment(key >> 20, true); });
    } else if (level < 3) {
      const int shift = level == 1 ? 8 : 0;
      part.each([&](int, unsigned key, unsigned) {
        counters.increment((key >> shift) % BINS, prefix.holds(key));
      });
    } else {
      const int shift = level == 3 ? 12 : 0;
      part.each([&](int, unsigned key, unsigned position) {
        counters.increment((position >> shift) % BINS, prefix.holds(key, position));
      });
    }
  }
}

// The row's `count` listed pairs, in each of its CTAs.
template <int CLUSTER>
__device__ __forceinline__ const Pair* gather(Shared& s, unsigned count, Team<CLUSTER> team) {
  team.join();
  if (team.alone()) return s.listed;
  unsigned counts[CLUSTER];
#pragma unroll
  for (int part = 0; part < CLUSTER; ++part) counts[part] = part < team.parts ? peer(s, part).listed_count : 0;
  for (unsigned t = threadIdx.x; t < count; t += THREADS) {
    int from = 0;
    unsigned i = t;
#pragma unroll
    for (int part = 0; part < CLUSTER - 1; ++part)
      if (from == part && i >= counts[part]) i -= counts[part], ++from;
    s.gathered[t] = peer(s, from).listed[i];
  }
  __syncthreads();
  return s.gathered;
}

__device__ __forceinline__ void count_listed(Shared& s, const Pair* pairs, unsigned count, const Prefix& prefix,
                                             int level) {
  const Counters counters(s.histogram[level % 2]);
  const int shift = level == 1 ? 40 : level == 2 ? 32 : level == 3 ? 12 : 0;
  for (unsigned t = threadIdx.x; t < count; t += THREADS)
    counters.increment(static_cast<unsigned>(pairs[t] >> shift) % BINS, prefix.holds(pairs[t]));
}

// The `wanted`-th of the listed pairs that share the prefix, at most COMPARED, becomes the prefix.
__device__ __forceinline__ void compare(Shared& s, const Pair* pairs, unsigned count, Prefix& prefix, unsigned wanted) {
  if (count > COMPARED) {
    for (unsigned t = threadIdx.x; t < count; t += THREADS)
      if (prefix.holds(pairs[t])) s.finalists[atomicAdd(&s.finalist_count, 1u)] = pairs[t];
    __syncthreads();
    pairs = s.finalists;
    count = s.finalist_count;
  }
  for (unsigned base = 0; base < count; base += THREADS / RIVALS) {
    const unsigned mine = base + threadIdx.x / RIVALS;
    unsigned larger = 0;
    if (mine < count)
      for (unsigned i = threadIdx.x % RIVALS; i < count; i += RIVALS) larger += pairs[i] > pairs[mine];
#pragma unroll
    for (int step = 1; step < RIVALS; step *= 2) larger += __shfl_xor_sync(FULL, larger, step);
    if (mine < count && larger == wanted - 1) s.threshold = pairs[mine];
    if (mine < count && larger == wanted) s.next = pairs[mine];  // there is one: not all of them are wanted
  }
  __syncthreads();
  prefix.key = static_cast<unsigned>(s.threshold >> 32);
  prefix.place = s.threshold >> 32 == s.next >> 32 ? static_cast<unsigned>(s.threshold) : 0;
}

// How many of the listed pairs that are chosen lie at `end` or behind.
__device__ __forceinline__ unsigned chosen_behind(const Pair* pairs, unsigned count, const Prefix& prefix, int end) {
  unsigned sum = 0;
  for (unsigned i = threadIdx.x % 32; i < count; i += 32) {
    sum += pairs[i] >= pair_of(prefix.key, prefix.place) && static_cast<int>(pairs[i] & FULL) >= end;
  }
  return __reduce_add_sync(FULL, sum);
}

template <int CLUSTER>
__device__ __forceinline__ void select_part(Shared& s, Part& part, unsigned k, Team<CLUSTER> team, Output out) {
  Prefix prefix;
  unsigned wanted = k, later = 0;  // of the pairs that share the prefix; and the chosen ones of later parts
  const Pair* pairs = nullptr;
  unsigned listed = 0;
  Found found = {};
  int level = 0;
  for (Task task = COUNT;;) {
    if (task != SOLVE) pass(s, part, prefix, task, level, later, out);
    if (task == WRITE) break;
    if (task == LIST) {
      listed = found.count;
      pairs = gather(s, listed, team);
      task = SOLVE;
    }
    bool found_all = true;
    if (task == SOLVE && found.count <= COMPARED) {
      compare(s, pairs, listed, prefix, wanted);
    } else {
      const Team<CLUSTER> counted = task == SOLVE ? Team<CLUSTER>{0, 1} : team;
      const int side = level % 2;
      if (task == SOLVE) count_listed(s, pairs, listed, prefix, level);
      __syncthreads();
      find_digit(s, side, wanted, counted);
      clear(s.histogram[1 - side]);  // all who read it have joined since
      __syncthreads();
      found = s.found;
      prefix.extend(level++, found.digit);
      wanted -= found.above;
      later += found.later_above;
      found_all = found.count == wanted || level == 5;  // five are enough, unless the scores change meanwhile
      if (found_all) later += found.later_count;
    }
    if (found_all) {
      if (!team.alone() && task == SOLVE) later += chosen_behind(pairs, listed, prefix, part.end);
      if (!team.alone()) cluster_arrive();  // no more reading of the others' memory
      task = WRITE;
    } else if (task == COUNT && found.count <= LISTED) {
      task = LIST;
    }
  }
  if (!team.alone()) cluster_wait();  // nobody reads this CTA's any more
}

struct Arguments {  // topk_cuda.py packs them
  const void* logits;
  const int* starts;  // or none
  const int* lengths;
  int* out;
  long long stride, out_stride;
  int width, k, next_n;
};

template <int CLUSTER>
__device__ __forceinline__ void select(const Arguments& a) {
  SHARED_MEMORY(s);
  clear(s.histogram[0]);
  if (threadIdx.x == 0) s.listed_count = s.finalist_count = 0;
  const int rank = blockIdx.x % CLUSTER, row = blockIdx.x / CLUSTER;
  const int start = a.starts ? a.starts[row] : 0;
  int n = a.next_n == 1 ? a.lengths[row] : a.lengths[row / a.next_n] - (a.next_n - 1) + row % a.next_n;
  n = max(min(n, a.width) - start, 0);
  int* out = a.out + row * a.out_stride;
  if (n <= a.k) {
    if (rank == 0)
      for (int i = threadIdx.x; i < a.k; i += THREADS) out[i] = i < n ? n - 1 - i : -1;
    return;
  }
  constexpr int SIZE = BF16 ? 2 : 4;
  const unsigned long long address = reinterpret_cast<unsigned long long>(a.logits) + (row * a.stride + start) * SIZE;
  Part part;
  part.shift = static_cast<int>(address / SIZE % 4);
  part.base = reinterpret_cast<const void*>(address - part.shift * SIZE);
  int halvings = 0;
  while ((1 << halvings) < CLUSTER && (PART << halvings) < n) ++halvings;
  const int parts = 1 << halvings;
  if (rank >= parts) return;  // the cluster's barriers do not wait for CTAs that have left
  const int size = (((n + part.shift + parts - 1) >> halvings) + 3) & ~3;
  part.low = rank * size - part.shift;  // aligned; the first part begins before the row
  part.end = min(part.low + size, n);
  part.spans = (part.end - part.low + SPAN - 1) / SPAN;
  select_part<CLUSTER>(s, part, a.k, {rank, parts}, Output(out));
}

#define TOP_K(cluster, cluster_attribute)                                                  \
  extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) cluster_attribute        \
  topk_exact_##cluster(const Arguments arguments) { select<cluster>(arguments); }

TOP_K(1, )
TOP_K(2, CLUSTER_OF(2))
TOP_K(4, CLUSTER_OF(4))
TOP_K(8, CLUSTER_OF(8))
