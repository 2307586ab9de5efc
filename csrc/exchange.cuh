// What kernels of several GPUs share: the workspace that every rank maps, bounded waits, and faults.
//
// Each rank owns one workspace, laid out alike, and has mapped the others'. A kernel waits on words of its own
// workspace alone; peers write them. A kernel that waits too long, or meets a peer that does something else, records
// the fault in pinned memory, prints it, and traps: nothing hangs, and no wrong row is handed out.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>

#include "launch.cuh"

namespace moe_ops::exchange {

constexpr int kMaxRanks = 8;
constexpr int kMaxTopK = 32;
constexpr int kIdSenders = 32;    // CTAs that send ids; a lane looks at the word of each
constexpr int64_t kNowhere = -1;  // instead of a place in a workspace

// Settings that ranks must share, and how many exchanges came before: (digest << 32) | epoch.
using Tag = uint64_t;

// A word that says that a CTA's part of a rank's ids is here.
struct IdsArrived {
  static constexpr int kEpochBits = 16, kDigestBits = 24;  // then the tokens, in 24

  __host__ __device__ static uint64_t word(uint32_t epoch, uint32_t digest, int64_t tokens) {
    return (epoch & ((1u << kEpochBits) - 1)) | (uint64_t{digest & ((1u << kDigestBits) - 1)} << kEpochBits) |
           (static_cast<uint64_t>(tokens) << (kEpochBits + kDigestBits));
  }
  __device__ static uint32_t epoch(uint64_t word) { return word & ((1u << kEpochBits) - 1); }
  __device__ static uint32_t digest(uint64_t word) { return (word >> kEpochBits) & ((1u << kDigestBits) - 1); }
  __device__ static int tokens(uint64_t word) { return static_cast<int>(word >> (kEpochBits + kDigestBits)); }
};

// From one rank to another: where in the sender's workspace the receiver writes rows (dispatch) or reads them
// (combine).
struct Mail {
  int64_t offset;  // kNowhere: combine's rows are not there
  int64_t limit;   // how many rows there are at most
  Tag tag;
};

// How often each rank has said that it is through with something, and how often it had before the running exchange.
struct Tally {
  uint32_t said[kMaxRanks];
  uint32_t expected;
};

struct Control {
  // By parity of the epoch: a CTA that is late must not read what the next exchange says. The one after that waits.
  Mail mail[2][kMaxRanks];
  uint32_t epoch, ctas_done;                       // of exchanges of rows; CTAs of the running one that are through
  uint32_t plan_epoch, plan_ctas_done;             // of plans; CTAs that have counted, of all plans so far
  uint64_t ids_arrived[2][kMaxRanks][kIdSenders];  // by parity of the epoch; an IdsArrived from each CTA that delivers
  Tally weights;                                   // of CTAs that have delivered weights
  Tally rows;       // of warps that have delivered their rows (dispatch), of CTAs that have pulled theirs (combine)
  uint32_t faulty;  // whether a thread has taken charge of the fault
};

// Three counts of a chunk of tokens, and of which plan they are: written and read as one, so that they need no flag.
struct alignas(16) ChunkCounts {
  static constexpr int kSize = 3;
  int values[kSize];
  uint32_t epoch;

  static __device__ ChunkCounts load(const ChunkCounts* from) {
    ulonglong2 words;
    asm volatile("{ .reg .b128 word; ld.relaxed.gpu.global.b128 word, [%2]; mov.b128 {%0, %1}, word; }"
                 : "=l"(words.x), "=l"(words.y)
                 : "l"(from)
                 : "memory");
    return reinterpret_cast<const ChunkCounts&>(words);
  }
  static __device__ void store(ChunkCounts* to, ChunkCounts counts) {
    const ulonglong2 words = reinterpret_cast<const ulonglong2&>(counts);
    asm volatile("{ .reg .b128 word; mov.b128 word, {%1, %2}; st.relaxed.gpu.global.b128 [%0], word; }" ::"l"(to),
                 "l"(words.x), "l"(words.y)
                 : "memory");
  }
};

enum FaultCode : int64_t { kLate = 1, kOtherSettings = 2, kTooManyTokens = 3, kBadIds = 4 };

// Kernel parameter. The tensor `world` of Python (moe_ops/comm/nvlink.py) holds the same numbers.
struct World {
  int64_t rank, num_ranks, max_tokens, max_row_bytes, num_sms, num_plan_ctas, timeout_ns;
  int64_t* fault;  // pinned: code, peer, expected, seen
  uint8_t* bases[kMaxRanks];

  static constexpr int kMaxColumns = 1024;
  static constexpr int kMaxVectors = (kMaxColumns + ChunkCounts::kSize - 1) / ChunkCounts::kSize;

  // The workspace: Control | counts [kMaxVectors][num_plan_ctas] | flags uint32 [P * max_tokens] | ids int16
  // [2][P][max_tokens][kMaxTopK] | weights float, room for [P * max_tokens][kMaxTopK], rows of K | inbox [P *
  // max_tokens] rows | window. Flags, weights and inbox: by copy in dispatch, by [rank][token] in combine.
  __host__ __device__ static int64_t round_up(int64_t bytes) { return (bytes + 511) / 512 * 512; }
  __host__ __device__ int64_t max_copies() const { return num_ranks * max_tokens; }
  __host__ __device__ static int64_t counts_at() { return round_up(sizeof(Control)); }
  __host__ __device__ int64_t flags_at() const {
    return round_up(counts_at() + kMaxVectors * num_plan_ctas * sizeof(ChunkCounts));
  }
  __host__ __device__ int64_t ids_at() const { return round_up(flags_at() + max_copies() * sizeof(uint32_t)); }
  __host__ __device__ int64_t weights_at() const { return ids_at() + 2 * max_copies() * kMaxTopK * sizeof(int16_t); }
  __host__ __device__ int64_t inbox_at() const { return weights_at() + max_copies() * kMaxTopK * sizeof(float); }
  __host__ __device__ int64_t num_bytes() const { return round_up(inbox_at() + max_copies() * max_row_bytes); }

  __device__ Control& control(int peer) const { return *reinterpret_cast<Control*>(bases[peer]); }
  __device__ Control& control() const { return control(rank); }
  // This rank's, of columns kSize * vector and on, by CTA.
  __device__ ChunkCounts* counts(int vector) const {
    return reinterpret_cast<ChunkCounts*>(bases[rank] + counts_at()) + vector * num_plan_ctas;
  }
  // One word a row that a peer delivers: the epoch of the exchange that delivered it last.
  __device__ uint32_t* flags(int peer) const { return reinterpret_cast<uint32_t*>(bases[peer] + flags_at()); }
  // Experts [max_tokens, K] of each rank, 16 bits each, two sets by the parity of the plan's epoch.
  __device__ int16_t* ids(int peer, uint32_t epoch, int source) const {
    return reinterpret_cast<int16_t*>(bases[peer] + ids_at()) +
           ((epoch & 1) * num_ranks + source) * max_tokens * kMaxTopK;
  }
  __device__ float* weights(int peer) const { return reinterpret_cast<float*>(bases[peer] + weights_at()); }
  __device__ uint8_t* inbox(int peer) const { return bases[peer] + inbox_at(); }
};

__device__ inline uint64_t nanoseconds() {
  uint64_t time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}

__device__ inline uint32_t load_acquire(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

__device__ inline uint64_t load_acquire(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

__device__ inline void store_release(uint64_t* word, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

__device__ inline void store_relaxed(uint32_t* word, uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

__device__ inline void add_release(uint32_t* word, uint32_t value) {
  asm volatile("red.release.sys.global.add.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

// Whether `seen` counts as many exchanges as `epoch`, or more.
__device__ inline bool reached(uint32_t seen, uint32_t epoch) { return static_cast<int32_t>(seen - epoch) >= 0; }

__device__ inline void fail(const World& world, const char* what, FaultCode code, int peer, uint64_t expected,
                            uint64_t seen) {
  if (atomicExch(&world.control().faulty, 1) == 0) {
    world.fault[1] = peer;
    world.fault[2] = static_cast<int64_t>(expected);
    world.fault[3] = static_cast<int64_t>(seen);
    __threadfence_system();
    *static_cast<volatile int64_t*>(world.fault) = code;
    const char* const why = code == kLate            ? "waited too long for"
                            : code == kOtherSettings ? "was called with other settings by"
                            : code == kTooManyTokens ? "got more tokens than the group was set up for from"
                                                     : "got ids that are no experts from";
    printf("moe_ops: %s on rank %d %s rank %d: expected %llu, seen %llu\n", what, int(world.rank), why, peer,
           static_cast<unsigned long long>(expected), static_cast<unsigned long long>(seen));
    __threadfence_system();
  } else {
    const uint64_t start = nanoseconds();  // for the thread that reports
    while (nanoseconds() - start < 100'000'000) __nanosleep(1000);
  }
  __trap();
}

// Until `done()`; `late()`, which fails, once that takes longer than the workspace allows.
template <typename Done, typename Late>
__device__ void wait_until(const World& world, Done done, Late late) {
  constexpr int kPolls = 16;  // between two looks at the clock
  uint64_t start = 0;
  while (true) {
    for (int i = 0; i < kPolls; ++i) {
      if (done()) return;
    }
    const uint64_t now = nanoseconds();
    if (start == 0) start = now;
    if (now - start > static_cast<uint64_t>(world.timeout_ns)) late();
  }
}

// For `number_of(*word)`, which a peer sets, to be `epoch`.
template <typename Word, typename NumberOf>
__device__ void wait_for(const World& world, const char* what, int peer, const Word* word, uint32_t epoch,
                         NumberOf number_of) {
  wait_until(
      world, [=] { return number_of(load_acquire(word)) == epoch; },
      [=] { fail(world, what, kLate, peer, epoch, number_of(load_acquire(word))); });
}

__device__ inline void wait_for(const World& world, const char* what, int peer, const uint32_t* word, uint32_t epoch) {
  wait_for(world, what, peer, word, epoch, [](uint32_t number) { return number; });
}

// Says to a peer that a part of this rank is through.
__device__ inline void say(const World& world, int peer, Tally Control::* tally) {
  add_release(&(world.control(peer).*tally).said[world.rank], 1);
}

// For `parts` of a peer to have said so in the running exchange.
__device__ inline void wait_for_all(const World& world, const char* what, int peer, Tally Control::* which, int parts) {
  const Tally& tally = world.control().*which;
  const uint32_t* const said = &tally.said[peer];
  const uint32_t expected = tally.expected + parts;
  wait_until(
      world, [=] { return reached(load_acquire(said), expected); },
      [=] { fail(world, what, kLate, peer, expected, load_acquire(said)); });
}

// For a peer's tag of this epoch, which must be this rank's.
__device__ inline void wait_for_tag(const World& world, const char* what, int peer, const Tag* word, Tag tag) {
  const auto epoch_of = [](Tag number) { return static_cast<uint32_t>(number); };
  wait_for(world, what, peer, word, epoch_of(tag), epoch_of);
  const Tag seen = load_acquire(word);
  if (seen != tag) fail(world, what, kOtherSettings, peer, tag >> 32, seen >> 32);
}

}  // namespace moe_ops::exchange
