#include "kvferry_native.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

// The numbers are the same on every architecture that came after 2019 or takes part in the common table.
#if defined(SYS_io_uring_setup) && defined(SYS_io_uring_enter)
#define KVF_URING_SETUP SYS_io_uring_setup
#define KVF_URING_ENTER SYS_io_uring_enter
#elif defined(__linux__) && (defined(__x86_64__) || defined(__aarch64__))
#define KVF_URING_SETUP 425
#define KVF_URING_ENTER 426
#endif

#ifdef KVF_URING_SETUP

#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#define KVF_CAN_COMPARE 1
#endif

namespace {

// The kernel's interface in our own words, because the header of a build machine is often older than the
// kernel of the machine that runs the result. It never changes; where the header is there, the compiler
// compares the two below.
constexpr off_t kRingsOffset = 0;
constexpr off_t kRequestsOffset = 0x10000000;
constexpr unsigned kWaitForCompletions = 1u << 0;
constexpr uint8_t kRead = 22;
constexpr uint8_t kWrite = 23;

// One mapping for both rings (5.4), no completion is ever lost (5.5), and the last of what came with the
// two operations above (5.6).
constexpr uint32_t kNeeded = 1u << 0 | 1u << 1 | 1u << 3;

struct Request {
  uint8_t opcode;
  uint8_t flags;
  uint16_t priority;
  int32_t fd;
  uint64_t offset;
  uint64_t address;
  uint32_t length;
  uint32_t how;
  uint64_t tag;
  uint64_t unused[3];
};

struct Completion {
  uint64_t tag;
  int32_t result;
  uint32_t flags;
};

struct RequestOffsets {
  uint32_t head, tail, mask, entries, flags, dropped, array, reserved;
  uint64_t address;
};

struct CompletionOffsets {
  uint32_t head, tail, mask, entries, overflow, completions, flags, reserved;
  uint64_t address;
};

struct Parameters {
  uint32_t request_entries, completion_entries, flags, cpu, idle, features, workers, reserved[3];
  RequestOffsets requests;
  CompletionOffsets completions;
};

static_assert(sizeof(Request) == 64 && sizeof(Completion) == 16 && sizeof(Parameters) == 120);
#ifdef KVF_CAN_COMPARE
static_assert(sizeof(Request) == sizeof(io_uring_sqe) && sizeof(Parameters) == sizeof(io_uring_params));
static_assert(offsetof(Request, offset) == offsetof(io_uring_sqe, off));
static_assert(offsetof(Request, address) == offsetof(io_uring_sqe, addr));
static_assert(offsetof(Request, length) == offsetof(io_uring_sqe, len));
static_assert(offsetof(Request, tag) == offsetof(io_uring_sqe, user_data));
static_assert(offsetof(Completion, result) == offsetof(io_uring_cqe, res));
static_assert(offsetof(RequestOffsets, array) == offsetof(io_sqring_offsets, array));
static_assert(offsetof(CompletionOffsets, completions) == offsetof(io_cqring_offsets, cqes));
static_assert(offsetof(Parameters, completions) == offsetof(io_uring_params, cq_off));
#endif

// A request carries its length in 32 bits, and the kernel moves less than 2 GiB at once.
constexpr uint64_t kMostAtOnce = uint64_t{1} << 30;

// How often the kernel may answer "try again" without any progress before that is the answer. With the
// pauses below it has about two seconds to find memory.
constexpr unsigned kMostTries = 200;

void pause_after(unsigned tries) {
  const timespec pause{0, std::clamp(tries, 1u, 10u) * 1000000L};
  nanosleep(&pause, nullptr);
}

bool may_pass(int code) { return code == EAGAIN || code == EINTR || code == EBUSY || code == ENOMEM; }

uint32_t load_acquire(const uint32_t *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
void store_release(uint32_t *word, uint32_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

// Positions in a file are signed, and the highest one has a meaning of its own in a request.
constexpr uint64_t kFarthest = std::numeric_limits<int64_t>::max();

struct Items {
  bool write;
  int fd;
  const uint64_t *offset;
  const uint64_t *address;
  const uint64_t *length;
  int64_t *result;
  size_t count;
};

// Whether `position` is at or behind the end of a regular file. Direct reads must not be continued there:
// the position is usually not a multiple of a sector any more, which is an error of its own.
bool is_end(int fd, uint64_t position) {
  struct stat facts;
  return fstat(fd, &facts) == 0 && S_ISREG(facts.st_mode) &&
         position >= static_cast<uint64_t>(facts.st_size);
}

// Memory shared with the kernel. A child of fork gets nothing of it (MADV_DONTFORK): what lies at the
// address there belongs to somebody else, so only the process that mapped it takes it away.
class Mapping {
 public:
  int map(int fd, size_t size, off_t offset) {
    void *memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, offset);
    if (memory == MAP_FAILED) return errno;
    base_ = static_cast<unsigned char *>(memory);
    size_ = size;
    return madvise(base_, size_, MADV_DONTFORK) == 0 ? 0 : errno;
  }
  void unmap() {
    if (base_ != nullptr) munmap(base_, size_);
    base_ = nullptr;
  }
  template <typename T>
  T *at(uint32_t offset) const {
    return reinterpret_cast<T *>(base_ + offset);
  }

 private:
  unsigned char *base_ = nullptr;
  size_t size_ = 0;
};

}  // namespace

struct kvf_uring {
 public:
  int open(unsigned entries);
  int run(const Items &items, unsigned depth);
  void close();

 private:
  struct Slot {  // an item under way; the number of its slot is the tag of its request
    size_t item;
    uint64_t done;
    uint32_t asked;
    unsigned tries;
  };

  bool inherited() const { return getpid() != owner_; }
  void release();
  int prepare(unsigned entries);
  void work(const Items &items, unsigned depth);
  void start(const Items &items, size_t item);
  void ask(const Items &items, uint32_t number);
  int enter(unsigned submit);
  bool reap(const Items &items);
  void settle(const Items &items, uint32_t number, int32_t result);
  void finish(const Items &items, uint32_t number, int64_t result);
  void withdraw(const Items &items);

  std::mutex mutex_;  // held by whoever runs or closes
  std::atomic<bool> closed_{false};
  int fd_ = -1;
  pid_t owner_ = 0;
  Mapping rings_, requests_;
  Request *request_ = nullptr;
  uint32_t *order_ = nullptr;
  uint32_t *request_tail_ = nullptr;
  uint32_t request_mask_ = 0;
  Completion *completion_ = nullptr;
  uint32_t *completion_head_ = nullptr;
  uint32_t *completion_tail_ = nullptr;
  uint32_t completion_mask_ = 0;

  // Room for every item that can be under way is taken beforehand: nothing of ours can fail while the
  // kernel holds buffers.
  std::vector<Slot> slots_;
  std::vector<uint32_t> free_;
  uint32_t tail_ = 0;       // of the request ring
  unsigned queued_ = 0;     // requests written into the ring that the kernel has not taken yet
  unsigned in_flight_ = 0;  // requests that it has taken and not completed
  unsigned again_ = 0;      // most tries of an item that has just been told to try again
  int refusal_ = 0;         // why no further request is made in this run
};

int kvf_uring::open(unsigned entries) {
  owner_ = getpid();
  const int code = prepare(entries);
  if (code != 0) release();
  return code;
}

int kvf_uring::prepare(unsigned entries) {
  Parameters parameters{};
  const long fd = syscall(KVF_URING_SETUP, entries, &parameters);
  if (fd < 0) return errno;
  fd_ = static_cast<int>(fd);
  if ((parameters.features & kNeeded) != kNeeded) return ENOSYS;
  const RequestOffsets &sq = parameters.requests;
  const CompletionOffsets &cq = parameters.completions;
  const size_t rings = std::max(sq.array + parameters.request_entries * sizeof(uint32_t),
                                cq.completions + parameters.completion_entries * sizeof(Completion));
  int code = rings_.map(fd_, rings, kRingsOffset);
  if (code == 0) {
    code = requests_.map(fd_, parameters.request_entries * sizeof(Request), kRequestsOffset);
  }
  if (code != 0) return code;
  request_ = requests_.at<Request>(0);
  order_ = rings_.at<uint32_t>(sq.array);
  request_tail_ = rings_.at<uint32_t>(sq.tail);
  request_mask_ = *rings_.at<uint32_t>(sq.mask);
  completion_ = rings_.at<Completion>(cq.completions);
  completion_head_ = rings_.at<uint32_t>(cq.head);
  completion_tail_ = rings_.at<uint32_t>(cq.tail);
  completion_mask_ = *rings_.at<uint32_t>(cq.mask);
  tail_ = *request_tail_;
  try {
    slots_.resize(parameters.request_entries);
    free_.reserve(parameters.request_entries);
  } catch (const std::bad_alloc &) {
    return ENOMEM;
  }
  return 0;
}

void kvf_uring::release() {
  if (!inherited()) {
    rings_.unmap();
    requests_.unmap();
  }
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

void kvf_uring::close() {
  closed_ = true;
  // In a child of fork the mutex may be held for ever, by a thread that is not there.
  if (inherited()) {
    release();
    return;
  }
  const std::lock_guard<std::mutex> alone(mutex_);
  release();
}

int kvf_uring::run(const Items &items, unsigned depth) {
  if (inherited()) return EOWNERDEAD;
  const std::unique_lock<std::mutex> alone(mutex_, std::try_to_lock);
  if (closed_) return EBADF;
  if (!alone.owns_lock()) return EBUSY;
  work(items, depth);
  return 0;
}

void kvf_uring::work(const Items &items, unsigned depth) {
  const size_t most = std::min<size_t>({std::max(1u, depth), slots_.size(), items.count});
  free_.clear();
  for (size_t number = most; number > 0; --number) free_.push_back(static_cast<uint32_t>(number - 1));
  // What has no positions (a pipe, a socket, a terminal) could keep us waiting for ever.
  refusal_ = lseek(items.fd, 0, SEEK_CUR) < 0 ? errno : 0;

  size_t next = 0;
  unsigned tries = 0;
  for (;;) {
    while (refusal_ == 0 && next < items.count && !free_.empty()) start(items, next++);
    for (; refusal_ != 0 && next < items.count; ++next) items.result[next] = -refusal_;
    if (free_.size() == most) {
      if (next == items.count) return;
      continue;
    }
    const int code = enter(queued_);
    if (reap(items) || code == 0) {
      tries = 0;
      if (again_ > 0) pause_after(again_);
      continue;
    }
    if (code == EINTR) continue;
    if (refusal_ == 0 && (!may_pass(code) || ++tries == kMostTries)) {
      // The kernel takes no more from this ring. What it has taken still uses our buffers, so that is
      // waited for; the rest is never begun.
      refusal_ = code;
      withdraw(items);
      continue;
    }
    // While something is in flight, its end gives back what the kernel lacks. Where not even waiting is
    // allowed, completions still arrive in the ring.
    if (in_flight_ == 0 || enter(0) != 0) pause_after(tries);
  }
}

void kvf_uring::start(const Items &items, size_t item) {
  if (items.offset[item] > kFarthest || items.length[item] > kFarthest - items.offset[item]) {
    items.result[item] = -EINVAL;
    return;
  }
  const uint32_t number = free_.back();
  free_.pop_back();
  slots_[number] = Slot{item, 0, 0, 0};
  ask(items, number);
}

// Write the request for what is missing of an item. There is room: a slot has at most one request in
// the ring, and the ring as many places as there are slots.
void kvf_uring::ask(const Items &items, uint32_t number) {
  Slot &slot = slots_[number];
  const uint64_t missing = items.length[slot.item] - slot.done;
  slot.asked = static_cast<uint32_t>(std::min(missing, kMostAtOnce));
  const uint32_t place = tail_ & request_mask_;
  Request request{};
  request.opcode = items.write ? kWrite : kRead;
  request.fd = items.fd;
  request.offset = items.offset[slot.item] + slot.done;
  request.address = items.address[slot.item] + slot.done;
  request.length = slot.asked;
  request.tag = number;
  request_[place] = request;
  order_[place] = place;
  store_release(request_tail_, ++tail_);  // the kernel sees the request before it sees the tail
  ++queued_;
}

// Hand `submit` requests to the kernel and wait until at least one is complete. 0 or an errno value.
int kvf_uring::enter(unsigned submit) {
  const long taken = syscall(KVF_URING_ENTER, fd_, submit, 1u, kWaitForCompletions, nullptr, size_t{0});
  if (taken < 0) return errno;
  queued_ -= static_cast<unsigned>(taken);
  in_flight_ += static_cast<unsigned>(taken);
  return 0;
}

// Settle all requests that are complete; whether there was any.
bool kvf_uring::reap(const Items &items) {
  again_ = 0;
  uint32_t head = *completion_head_;  // written by us alone
  const uint32_t tail = load_acquire(completion_tail_);
  const bool any = head != tail;
  for (; head != tail; ++head) {
    const Completion &completion = completion_[head & completion_mask_];
    const uint32_t number = static_cast<uint32_t>(completion.tag);
    const int32_t result = completion.result;
    store_release(completion_head_, head + 1);  // the kernel may use the place again
    --in_flight_;
    settle(items, number, result);
  }
  return any;
}

void kvf_uring::settle(const Items &items, uint32_t number, int32_t result) {
  Slot &slot = slots_[number];
  if (result < 0) {
    if (!may_pass(-result) || refusal_ != 0 || ++slot.tries == kMostTries) {
      finish(items, number, result);
      return;
    }
    again_ = std::max(again_, slot.tries);
    ask(items, number);
    return;
  }
  slot.tries = 0;
  slot.done += static_cast<uint32_t>(result);
  const uint64_t length = items.length[slot.item];
  if (slot.done == length) {
    finish(items, number, static_cast<int64_t>(length));
  } else if (result == 0 && items.write) {
    finish(items, number, -EIO);
  } else if (result == 0 || (static_cast<uint32_t>(result) < slot.asked && !items.write &&
                             is_end(items.fd, items.offset[slot.item] + slot.done))) {
    finish(items, number, static_cast<int64_t>(slot.done));
  } else if (refusal_ != 0) {
    finish(items, number, -refusal_);
  } else {
    ask(items, number);
  }
}

void kvf_uring::finish(const Items &items, uint32_t number, int64_t result) {
  items.result[slots_[number].item] = result;
  free_.push_back(number);
}

// Take back the requests that the kernel has not taken. It looks at the tail only while we are inside
// `enter`.
void kvf_uring::withdraw(const Items &items) {
  for (; queued_ > 0; --queued_) {
    const Request &request = request_[--tail_ & request_mask_];
    finish(items, static_cast<uint32_t>(request.tag), -refusal_);
  }
  store_release(request_tail_, tail_);
}

namespace {

// A pattern written to a file in memory and read back: proves that the two operations exist and that
// nothing (a sandbox, a setting) stands between us and them.
int try_out(kvf_uring *ring) {
  const long fd = syscall(SYS_memfd_create, "kvferry-io-uring", 1u /* close on exec */);
  if (fd < 0) return errno;
  uint64_t pattern[64], back[64] = {};
  for (size_t i = 0; i < 64; ++i) pattern[i] = 0x9e3779b97f4a7c15u * (i + 1);
  const uint64_t offset = 4096, length = sizeof pattern;
  const uint64_t from = reinterpret_cast<uint64_t>(pattern), to = reinterpret_cast<uint64_t>(back);
  int64_t moved = 0;
  const int file = static_cast<int>(fd);
  int code = kvf_uring_run(ring, 1, file, &offset, &from, &length, &moved, 1, 1);
  if (code == 0 && moved < 0) code = static_cast<int>(-moved);
  if (code == 0) code = kvf_uring_run(ring, 0, file, &offset, &to, &length, &moved, 1, 1);
  if (code == 0 && moved < 0) code = static_cast<int>(-moved);
  if (code == 0 && std::memcmp(pattern, back, sizeof back) != 0) code = EIO;
  close(file);
  return code;
}

}  // namespace

extern "C" int kvf_uring_open(unsigned entries, kvf_uring **ring) {
  *ring = nullptr;
  std::unique_ptr<kvf_uring> made(new (std::nothrow) kvf_uring);
  if (made == nullptr) return ENOMEM;
  const int code = made->open(entries);
  if (code == 0) *ring = made.release();
  return code;
}

extern "C" int kvf_uring_run(kvf_uring *ring, int write, int fd, const uint64_t *offset,
                             const uint64_t *address, const uint64_t *length, int64_t *result,
                             size_t count, unsigned depth) {
  return ring->run(Items{write != 0, fd, offset, address, length, result, count}, depth);
}

extern "C" void kvf_uring_close(kvf_uring *ring) { ring->close(); }

extern "C" void kvf_uring_free(kvf_uring *ring) {
  ring->close();
  delete ring;
}

extern "C" int kvf_uring_trial(int *step) {
  *step = KVF_URING_TRIED_OPEN;
  kvf_uring *ring = nullptr;
  int code = kvf_uring_open(1, &ring);
  if (code != 0) return code;
  *step = KVF_URING_TRIED_RUN;
  code = try_out(ring);
  kvf_uring_free(ring);
  return code;
}

#else

extern "C" int kvf_uring_open(unsigned, kvf_uring **ring) {
  *ring = nullptr;
  return ENOSYS;
}

extern "C" int kvf_uring_run(kvf_uring *, int, int, const uint64_t *, const uint64_t *,
                             const uint64_t *, int64_t *, size_t, unsigned) {
  return EBADF;
}

extern "C" void kvf_uring_close(kvf_uring *) {}
extern "C" void kvf_uring_free(kvf_uring *) {}

extern "C" int kvf_uring_trial(int *step) {
  *step = KVF_URING_NOT_BUILT;
  return ENOSYS;
}

#endif
