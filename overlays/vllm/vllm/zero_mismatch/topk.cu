// Exact Top-K of the sparse-attention indexer for GPUs with thread-block clusters. Contract and binding: topk_cuda.py.
//
// Each score becomes an unsigned key that orders as the score does; the pair (key, position) is unique, so the K largest
// pairs are too. Twelve bits at a time, counted in shared memory, narrow down the K-th pair: three digits of the key, two
// of the position. The pairs of a bin with few of them are listed, and the last few compared with each other. A row's
// CTAs (its cluster) count their parts of the row and add up each other's integer counts and lists, so neither their
// number nor their timing can change a result.
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
constexpr int GROUPS = 32;
constexpr int GROUP = BINS / GROUPS;
constexpr unsigned COMPARED = 64;  // pairs that are compared with each other
constexpr unsigned FULL = 0xffffffffu;
static_assert(KEYS % 4 == 0 && THREADS > 32 && GROUPS % WARPS == 0 && PART >= 8 * 4 && LISTED >= COMPARED);

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
  unsigned groups[2][GROUPS];
  unsigned chunks[2][CHUNKS];
  unsigned listed_count, finalist_count;
  Pair threshold;
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

  __device__ __forceinline__ void put(unsigned slot, int position, bool really) const {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0; @p st.global.u32 [%0], %1;}"
                 :: "l"(address + 4ull * slot), "r"(position), "r"(static_cast<unsigned>(really)) : "memory");
  }
};
#endif

// The CTAs that share a row, and this one's place among them.
template <int CLUSTER>
struct Team {
  int rank, parts;

  __device__ __forceinline__ bool alone() const { return CLUSTER == 1 || parts == 1; }

  __device__ __forceinline__ const Shared& member(Shared& mine, int part) const {
    return alone() ? mine : peer(mine, part);
  }

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

  __device__ __forceinline__ bool holds(unsigned other, unsigned position) const {
    return (other & key_mask) == key && (position & place_mask) == place;
  }

  __device__ __forceinline__ bool holds(Pair pair) const {
    return holds(static_cast<unsigned>(pair >> 32), static_cast<unsigned>(pair));
  }

  __device__ __forceinline__ bool chooses(unsigned other, unsigned position) const {
    return pair_of(other, position) >= pair_of(key, place);
  }
};

// A bit for each of a thread's keys.
struct Marks {
  static constexpr int WORDS = (KEYS + 31) / 32;
  unsigned words[WORDS] = {};

  __device__ __forceinline__ void set(int i, bool mark) { words[i / 32] |= mark ? 1u << i % 32 : 0; }

  __device__ __forceinline__ bool get(int i) const { return words[i / 32] >> i % 32 & 1; }

  __device__ __forceinline__ unsigned count() const {
    unsigned sum = 0;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) sum += __popc(words[i]);
    return sum;
  }
};

// One CTA's part of a row: indices low..high, counted from `base`, which is aligned to a vector. The row begins `shift`
// after it. A key of 0 is below every score's.
struct Part {
  const void* base;
  int shift, low, high, spans;
  int held = -1;
  unsigned keys[KEYS];

  __device__ __forceinline__ int index(int span, int vector) const {
    return low + span * SPAN + vector * TILE + static_cast<int>(threadIdx.x) * 4;
  }

  __device__ __forceinline__ bool reaches(int span, int vector) const {  // the same for the whole CTA
    return low + span * SPAN + vector * TILE < high;
  }

  __device__ __forceinline__ void hold(int span) {
    if (held == span) return;
    held = span;
    uint4 raw[VECTORS];
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) {
      raw[j] = make_uint4(0, 0, 0, 0);
      if (index(span, j) < high) raw[j] = load_four(base, index(span, j));
    }
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) {
      const int at = index(span, j);
      keys[4 * j] = ordered(raw[j].x);
      keys[4 * j + 1] = ordered(raw[j].y);
      keys[4 * j + 2] = ordered(raw[j].z);
      keys[4 * j + 3] = ordered(raw[j].w);
      if (at < shift || at + 4 > high)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (at + i < shift || at + i >= high) keys[4 * j + i] = 0;
    }
  }

  // visit(number, key, position) for every score that is held.
  template <class Visit>
  __device__ __forceinline__ void each(Visit visit) const {
#pragma unroll
    for (int j = 0; j < VECTORS; ++j)
      if (reaches(held, j))
#pragma unroll
        for (int i = 0; i < 4; ++i)
          visit(4 * j + i, keys[4 * j + i], static_cast<unsigned>(index(held, j) + i - shift));
  }
};

__device__ __forceinline__ unsigned sum_of(uint4 x) { return x.x + x.y + x.z + x.w; }

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

__device__ __forceinline__ void clear(unsigned* histogram, int first, int step) {
  for (int i = first; i < BINS / 4; i += step) reinterpret_cast<uint4*>(histogram)[i] = make_uint4(0, 0, 0, 0);
}

__device__ __forceinline__ void sum_groups(Shared& s, int side) {
#pragma unroll
  for (int i = 0; i < GROUPS / WARPS; ++i) {
    const int group = threadIdx.x / 32 + i * WARPS;
    const uint4* bins = reinterpret_cast<const uint4*>(s.histogram[side] + group * GROUP);
    const unsigned sum = __reduce_add_sync(FULL, sum_of(bins[threadIdx.x % 32]));
    if (threadIdx.x % 32 == 0) s.groups[side][group] = sum;
  }
}

// One warp finds the digit of the `wanted`-th pair from the top; its lanes hold groups, then bins, from the top down.
template <int CLUSTER>
__device__ __forceinline__ void find_digit(Shared& s, int side, unsigned wanted, Team<CLUSTER> team) {
  const int lane = threadIdx.x % 32;
  unsigned sum = 0, later = 0;
  for (int part = 0; part < team.parts; ++part) {
    const unsigned count = team.member(s, part).groups[side][GROUPS - 1 - lane];
    sum += count;
    later += part > team.rank ? count : 0;
  }
  unsigned reached = sum_up_to(sum);
  const int at = __ffs(__ballot_sync(FULL, reached >= wanted)) - 1;
  const unsigned above = __shfl_sync(FULL, reached - sum, at);
  unsigned later_above = CLUSTER == 1 ? 0 : __reduce_add_sync(FULL, lane < at ? later : 0);

  const int first = (GROUPS - 1 - at) * GROUP + (31 - lane) * 4;
  uint4 bins = make_uint4(0, 0, 0, 0), later_bins = make_uint4(0, 0, 0, 0);
  for (int part = 0; part < team.parts; ++part) {
    const uint4 count = *reinterpret_cast<const uint4*>(team.member(s, part).histogram[side] + first);
    bins.x += count.x, bins.y += count.y, bins.z += count.z, bins.w += count.w;
    if (part > team.rank)
      later_bins.x += count.x, later_bins.y += count.y, later_bins.z += count.z, later_bins.w += count.w;
  }
  reached = above + sum_up_to(sum_of(bins));
  const int last = __ffs(__ballot_sync(FULL, reached >= wanted)) - 1;
  if (CLUSTER > 1) later_above += __reduce_add_sync(FULL, lane < last ? sum_of(later_bins) : 0);
  if (lane != last) return;
  Found found = {first + 3u, reached - sum_of(bins), bins.w, later_above, later_bins.w};
  const auto step = [&](unsigned count, unsigned later_count) {
    if (found.above + found.count >= wanted) return;
    found = {found.digit - 1, found.above + found.count, count, found.later_above + found.later_count, later_count};
  };
  step(bins.z, later_bins.z);
  step(bins.y, later_bins.y);
  step(bins.x, later_bins.x);
  s.found = found;
}

// Appends the held pairs that share the prefix to `listed`; few do.
__device__ __forceinline__ void list_pairs(Shared& s, const Part& part, const Prefix& prefix) {
  Marks marks;
  part.each([&](int i, unsigned key, unsigned position) { marks.set(i, prefix.holds(key, position)); });
  const unsigned count = marks.count();
  if (count == 0) return;
  unsigned slot = atomicAdd(&s.listed_count, count);
  part.each([&](int i, unsigned key, unsigned position) {
    if (marks.get(i)) s.listed[slot++] = pair_of(key, position);
  });
}

// Positions of the held pairs that are chosen, in descending order from `slot` on; returns the slot after them.
__device__ __forceinline__ unsigned write_held(Shared& s, const Part& part, const Prefix& prefix, unsigned first_slot,
                                               Output out) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Marks marks;
  unsigned sums[(VECTORS + 3) / 4] = {}, from[(VECTORS + 3) / 4];  // four sums, of at most 128, to a word
  part.each([&](int i, unsigned key, unsigned position) {
    const bool chosen = prefix.chooses(key, position);
    marks.set(i, chosen);
    if (chosen) sums[i / 16] += 1u << i / 4 % 4 * 8;
  });
  unsigned* chunks = s.chunks[part.held % 2];
#pragma unroll
  for (int j = 0; j < VECTORS; ++j) {
    if (j % 4 == 0) from[j / 4] = sum_from(sums[j / 4]);
    if (lane == 0) chunks[j * WARPS + warp] = from[j / 4] >> j % 4 * 8 & 255;
  }
  __syncthreads();  // one is enough: the other side is written next
  unsigned total = 0, after[VECTORS] = {};
#pragma unroll
  for (int base = 0; base < CHUNKS; base += 32) {
    const unsigned count = base + lane < CHUNKS ? chunks[base + lane] : 0;
    total += count;
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) after[j] += base + lane > j * WARPS + warp ? count : 0;
  }
#pragma unroll
  for (int j = 0; j < VECTORS; ++j) {
    unsigned slot = first_slot + __reduce_add_sync(FULL, after[j]) + ((from[j / 4] - sums[j / 4]) >> j % 4 * 8 & 255);
    if (part.reaches(part.held, j))
#pragma unroll
      for (int i = 3; i >= 0; --i) {
        const bool chosen = marks.get(4 * j + i);
        out.put(slot, part.index(part.held, j) + i - part.shift, chosen);
        slot += chosen;
      }
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
    if (task == WRITE) {
      slot = write_held(s, part, prefix, slot, out);
    } else if (task == LIST) {
      list_pairs(s, part, prefix);
    } else if (level == 0) {
      part.each([&](int, unsigned key, unsigned) { counters.increment(key >> 20, true); });
    } else if (level < 3) {
      const int shift = level == 1 ? 8 : 0;
      part.each([&](int, unsigned key, unsigned) {
        counters.increment((key >> shift) % BINS, (key & prefix.key_mask) == prefix.key);
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
  for (unsigned t = threadIdx.x; t < count; t += THREADS) {
    unsigned larger = 0;
    for (unsigned i = 0; i < count; ++i) larger += pairs[i] > pairs[t];
    if (larger == wanted - 1) s.threshold = pairs[t];
  }
  __syncthreads();
  prefix.key = static_cast<unsigned>(s.threshold >> 32);
  prefix.place = static_cast<unsigned>(s.threshold);
}

// How many of the listed pairs that are chosen lie at `end` or behind.
__device__ __forceinline__ unsigned chosen_behind(const Pair* pairs, unsigned count, const Prefix& prefix, int end) {
  unsigned sum = 0;
  for (unsigned i = threadIdx.x % 32; i < count; i += 32) {
    const unsigned key = static_cast<unsigned>(pairs[i] >> 32), position = static_cast<unsigned>(pairs[i]);
    sum += prefix.chooses(key, position) && static_cast<int>(position) >= end;
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
      sum_groups(s, side);
      counted.join();
      if (threadIdx.x < 32) find_digit(s, side, wanted, counted);
      else clear(s.histogram[1 - side], threadIdx.x - 32, THREADS - 32);  // all who read it have joined since
      __syncthreads();
      found = s.found;
      prefix.extend(level++, found.digit);
      wanted -= found.above;
      later += found.later_above;
      found_all = found.count == wanted;
      if (found_all) later += found.later_count;
    }
    if (found_all) {
      if (!team.alone() && task == SOLVE) later += chosen_behind(pairs, listed, prefix, part.high - part.shift);
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
  const int rank = blockIdx.x % CLUSTER, row = blockIdx.x / CLUSTER;
  const int first = a.starts ? a.starts[row] : 0;
  int n = a.next_n == 1 ? a.lengths[row] : a.lengths[row / a.next_n] - (a.next_n - 1) + row % a.next_n;
  n = max(min(n, a.width) - first, 0);
  int* out = a.out + row * a.out_stride;
  if (n <= a.k) {
    if (rank == 0)
      for (int i = threadIdx.x; i < a.k; i += THREADS) out[i] = i < n ? n - 1 - i : -1;
    return;
  }
  constexpr int SIZE = BF16 ? 2 : 4;
  const unsigned long long address = reinterpret_cast<unsigned long long>(a.logits) + (row * a.stride + first) * SIZE;
  Part part;
  part.shift = static_cast<int>(address / SIZE % 4);
  part.base = reinterpret_cast<const void*>(address - part.shift * SIZE);
  const int end = n + part.shift;
  int halvings = 0;
  while ((1 << halvings) < CLUSTER && (PART << halvings) < end) ++halvings;
  const int parts = 1 << halvings;
  const int size = (((end + parts - 1) >> halvings) + 3) & ~3;
  if (rank >= parts) return;  // the cluster's barriers do not wait for CTAs that have left
  part.low = rank * size;
  part.high = min(part.low + size, end);
  part.spans = (part.high - part.low + SPAN - 1) / SPAN;
  clear(s.histogram[0], threadIdx.x, THREADS);
  if (threadIdx.x == 0) s.listed_count = s.finalist_count = 0;
  __syncthreads();
  select_part<CLUSTER>(s, part, a.k, {rank, parts}, Output(out));
}

#define TOP_K(cluster)                                                                            \
  extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) CLUSTER_OF(cluster)             \
  topk_exact_##cluster(const Arguments arguments) { select<cluster>(arguments); }

TOP_K(1)
TOP_K(2)
TOP_K(4)
TOP_K(8)
