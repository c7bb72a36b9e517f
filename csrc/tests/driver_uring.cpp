// The ring under a kernel that misbehaves: `syscall` is replaced by one of our own, which shortens
// transfers, takes fewer requests than offered, answers "try again", and at last refuses everything. What
// counts is that bytes and results are right all the same, and that nothing moves after the return.
#include "driver.hpp"

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "kvferry_native.h"

namespace {

using Call = long (*)(long, long, long, long, long, long, long);

long real_call(long number, long a, long b, long c, long d, long e, long f) {
  static std::atomic<Call> real{nullptr};
  Call call = real.load();
  if (call == nullptr) {
    call = reinterpret_cast<Call>(dlsym(RTLD_NEXT, "syscall"));
    real.store(call);
  }
  return call(number, a, b, c, d, e, f);
}

constexpr long kSetup = 425, kEnter = 426;

// What the replaced system call does to the one ring under test. Used from one thread.
struct Kernel {
  bool meddles = false;
  int answer = 0;        // to every call from the one numbered `after` on
  unsigned after = 0;
  std::mt19937_64 random{7};

  unsigned calls = 0;
  long taken = 0;
  long most_in_flight = 0;
  uint32_t first_completion = 0;
  unsigned char *rings = nullptr;
  unsigned char *requests = nullptr;
  uint32_t parameters[30] = {};

  // Positions in io_uring_params: sq_off begins at word 10, cq_off at word 20.
  uint32_t *word(int at) const { return reinterpret_cast<uint32_t *>(rings + parameters[at]); }
  uint32_t value(int at) const { return __atomic_load_n(word(at), __ATOMIC_ACQUIRE); }

  void watch(int fd, const uint32_t *given) {
    std::memcpy(parameters, given, sizeof parameters);
    const size_t size = parameters[25] + parameters[1] * 16 + parameters[0] * 4 + 4096;
    const int both = PROT_READ | PROT_WRITE;
    rings = static_cast<unsigned char *>(mmap(nullptr, size, both, MAP_SHARED, fd, 0));
    requests = static_cast<unsigned char *>(
        mmap(nullptr, parameters[0] * 64, both, MAP_SHARED, fd, 0x10000000));
    if (rings == MAP_FAILED || requests == MAP_FAILED) std::abort();
  }

  void begin() {
    calls = 0;
    taken = 0;
    most_in_flight = 0;
    first_completion = value(21);
  }

  bool chance(unsigned one_in) { return random() % one_in == 0; }

  void shorten_requests() {
    for (uint32_t at = value(10); at != value(11); ++at) {
      unsigned char *request = requests + (at & value(12)) * 64;
      request[1] |= 1u << 4;  // always on a thread of the kernel, so that it is really under way
      uint32_t length;
      std::memcpy(&length, request + 24, 4);
      if (length > 1 && chance(3)) length = 1 + static_cast<uint32_t>(random() % length);
      std::memcpy(request + 24, &length, 4);
    }
  }

  void spoil_completions() {
    for (uint32_t at = value(20); at != value(21); ++at) {
      const int32_t again = chance(2) ? -EAGAIN : -EINTR;
      unsigned char *completion = rings + parameters[25] + (at & value(22)) * 16;
      if (chance(12)) std::memcpy(completion + 8, &again, 4);
    }
  }

  long enter(long fd, long submit, long wanted, long flags) {
    if (answer != 0 && calls++ >= after) return fail(answer);
    if (chance(10)) return fail(EINTR);
    if (chance(10)) return fail(chance(2) ? EAGAIN : EBUSY);
    shorten_requests();
    if (submit > 0 && chance(4)) {
      submit = static_cast<long>(random() % static_cast<uint64_t>(submit));
      wanted = 0;
    }
    const long result = real_call(kEnter, fd, submit, wanted, flags, 0, 0);
    if (result > 0) taken += result;
    // Counted from below: what completed since the call began has left already.
    most_in_flight = std::max(most_in_flight, taken - long{value(21) - first_completion});
    spoil_completions();
    return result;
  }

  static long fail(int code) {
    errno = code;
    return -1;
  }
};

Kernel kernel;

}  // namespace

extern "C" long syscall(long number, ...) noexcept {
  long a[6];
  va_list given;
  va_start(given, number);
  for (long &word : a) word = va_arg(given, long);
  va_end(given);
  if (kernel.meddles && number == kEnter) return kernel.enter(a[0], a[1], a[2], a[3]);
  const long result = real_call(number, a[0], a[1], a[2], a[3], a[4], a[5]);
  if (kernel.meddles && number == kSetup && result >= 0) {
    kernel.watch(static_cast<int>(result), reinterpret_cast<const uint32_t *>(a[1]));
  }
  return result;
}

namespace {

struct File {
  File() : stream(std::tmpfile()), fd(fileno(stream)) {}
  ~File() { std::fclose(stream); }
  std::FILE *stream;
  int fd;
};

// Items of random lengths, one behind the other in the file and, each in a block of its own, in memory.
struct Batch {
  Batch(std::mt19937_64 &random, size_t most) {
    const size_t count = 1 + random() % 30;
    for (size_t i = 0; i < count; ++i) {
      const size_t n = random() % 8 == 0 ? 0 : random() % most;
      blocks.emplace_back(new unsigned char[n]);
      for (size_t at = 0; at < n; ++at) {
        blocks.back()[at] = static_cast<unsigned char>(random());
        content.push_back(blocks.back()[at]);
      }
      offset.push_back(content.size() - n);
      address.push_back(reinterpret_cast<uint64_t>(blocks.back().get()));
      length.push_back(n);
    }
    result.assign(count, 0);
  }

  int run(kvf_uring *ring, bool write, int fd, unsigned depth) {
    return kvf_uring_run(ring, write ? 1 : 0, fd, offset.data(), address.data(), length.data(),
                         result.data(), length.size(), depth);
  }
  void clear() {
    for (size_t i = 0; i < length.size(); ++i) std::memset(blocks[i].get(), 0, length[i]);
  }
  std::vector<unsigned char> memory() const {
    std::vector<unsigned char> all;
    for (size_t i = 0; i < length.size(); ++i) {
      all.insert(all.end(), blocks[i].get(), blocks[i].get() + length[i]);
    }
    return all;
  }
  bool all_moved() const {
    for (size_t i = 0; i < length.size(); ++i) {
      if (result[i] != static_cast<int64_t>(length[i])) return false;
    }
    return true;
  }

  std::vector<std::unique_ptr<unsigned char[]>> blocks;
  std::vector<unsigned char> content;
  std::vector<uint64_t> offset, address, length;
  std::vector<int64_t> result;
};

void under_faults(kvf_uring *ring, std::mt19937_64 &random) {
  for (int round = 0; round < 30; ++round) {
    File file;
    Batch batch(random, 20000);
    const unsigned depth = 1 + static_cast<unsigned>(random() % 12);
    kernel.begin();
    expect(batch.run(ring, true, file.fd, depth) == 0 && batch.all_moved(), "writes under faults");
    batch.clear();
    expect(batch.run(ring, false, file.fd, depth) == 0 && batch.all_moved(), "reads under faults");
    expect(batch.memory() == batch.content, "bytes under faults");
    expect(kernel.most_in_flight <= static_cast<long>(depth), "depth");
  }
}

// From some call on the kernel answers only `code`. Every item is done or fails with it, and what was
// under way at that moment is over when the run returns.
void under_refusal(kvf_uring *ring, std::mt19937_64 &random, int code, int rounds) {
  for (int round = 0; round < rounds; ++round) {
    File file;
    Batch batch(random, 200000);
    expect(pwrite(file.fd, batch.content.data(), batch.content.size(), 0) >= 0, "prepare");
    batch.clear();
    kernel.begin();
    kernel.answer = code;
    kernel.after = static_cast<unsigned>(random() % 8);
    expect(batch.run(ring, false, file.fd, 6) == 0, "a run that is refused midway");
    const std::vector<unsigned char> at_return = batch.memory();
    usleep(3000);
    expect(batch.memory() == at_return, "nothing moves after the return");
    size_t at = 0;
    for (size_t i = 0; i < batch.length.size(); at += batch.length[i++]) {
      const bool moved = batch.result[i] == static_cast<int64_t>(batch.length[i]);
      const bool right = std::equal(at_return.begin() + static_cast<long>(at),
                                    at_return.begin() + static_cast<long>(at + batch.length[i]),
                                    batch.content.begin() + static_cast<long>(at));
      const bool known = batch.result[i] == -code || batch.result[i] == -EAGAIN ||
                         batch.result[i] == -EINTR;
      expect(moved ? right : known, "a result after a refusal");
    }
    kernel.answer = 0;
    expect(batch.run(ring, false, file.fd, 6) == 0 && batch.all_moved(), "the ring works again");
    expect(batch.memory() == batch.content, "bytes after a refusal");
  }
}

void without_faults() {
  kvf_uring *ring = nullptr;
  expect(kvf_uring_open(4, &ring) == 0, "open");
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int number = 0; number < 3; ++number) {  // they share a ring: each is served or told to wait
    threads.emplace_back([&wrong, ring, number] {
      std::mt19937_64 random(static_cast<uint64_t>(number));
      for (int round = 0; round < 20; ++round) {
        File file;
        Batch batch(random, 20000);
        int code;
        while ((code = batch.run(ring, true, file.fd, 3)) == EBUSY) std::this_thread::yield();
        if (code != 0 || !batch.all_moved()) ++wrong;
        std::vector<unsigned char> back(batch.content.size());
        const ssize_t there = pread(file.fd, back.data(), back.size(), 0);
        if (there != static_cast<ssize_t>(back.size()) || back != batch.content) ++wrong;
      }
    });
  }
  for (std::thread &thread : threads) thread.join();
  expect(wrong == 0, "threads that share a ring");
  kvf_uring_close(ring);
  kvf_uring_close(ring);
  Batch batch(*std::make_unique<std::mt19937_64>(1), 10);
  expect(batch.run(ring, false, 0, 1) == EBADF, "a closed ring");
  kvf_uring_free(ring);
}

}  // namespace

void uring_cases() {
  int step = -1;
  const int code = kvf_uring_trial(&step);
  if (code != 0) {
    std::printf("no io_uring here: step %d, %s\n", step, std::strerror(code));
    return;
  }
  without_faults();
  std::mt19937_64 random(99);
  kernel.meddles = true;
  kvf_uring *ring = nullptr;
  expect(kvf_uring_open(8, &ring) == 0, "open under watch");
  under_faults(ring, random);
  under_refusal(ring, random, EPERM, 10);
  under_refusal(ring, random, ENOMEM, 1);  // takes its time: it might pass
  kvf_uring_free(ring);
  kernel.meddles = false;
}
