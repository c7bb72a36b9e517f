// Reads of this very process, which the system always allows: what counts is which spans arrive, and that
// spans around one that cannot be read arrive all the same.
#include "driver.hpp"

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kvferry_native.h"

namespace {

uint64_t address_of(const void *pointer) { return reinterpret_cast<uint64_t>(pointer); }

// More spans than one system call takes, some of them empty.
void random_spans(std::mt19937_64 &random) {
  const size_t count = 1 + random() % 900;
  std::vector<uint64_t> length(count), local(count), remote(count);
  std::vector<int64_t> result(count, 77);
  size_t total = 0;
  for (uint64_t &n : length) total += n = random() % 5 == 0 ? 0 : random() % 3000;
  std::vector<unsigned char> from(total + 1), to(total + 1);
  for (unsigned char &byte : from) byte = static_cast<unsigned char>(random());
  size_t at = 0;
  for (size_t i = 0; i < count; ++i) {
    remote[i] = address_of(from.data()) + at;
    local[i] = address_of(to.data()) + at;
    at += length[i];
  }
  kvf_process_read(getpid(), local.data(), remote.data(), length.data(), result.data(), count);
  for (size_t i = 0; i < count; ++i) expect(result[i] == static_cast<int64_t>(length[i]), "read whole");
  expect(std::memcmp(from.data(), to.data(), total) == 0, "bytes that were read");
}

// Three pages of which the middle one is gone: a span before it, across its begin, inside, behind.
void holes() {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  void *memory = mmap(nullptr, 3 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  expect(memory != MAP_FAILED, "mmap");
  std::memset(memory, 9, 3 * page);
  expect(munmap(static_cast<char *>(memory) + page, page) == 0, "munmap");
  std::vector<unsigned char> to(4 * page);
  const uint64_t base = address_of(memory), far = UINT64_MAX - 4;
  const uint64_t remote[] = {base, base + page - 8, base + page, far, base + 2 * page, base};
  const uint64_t length[] = {page, 16, 8, 100, page, 5};
  uint64_t local[6];
  int64_t result[6];
  for (size_t i = 0, at = 0; i < 6; at += length[i++]) local[i] = address_of(to.data()) + at;
  kvf_process_read(getpid(), local, remote, length, result, 6);
  const int64_t wanted[] = {static_cast<int64_t>(page), -EFAULT, -EFAULT, -EOVERFLOW,
                            static_cast<int64_t>(page), 5};
  for (size_t i = 0; i < 6; ++i) expect(result[i] == wanted[i], "result beside a hole");
  munmap(memory, page);
  munmap(static_cast<char *>(memory) + 2 * page, page);
}

void nobody() {
  const pid_t child = fork();
  if (child == 0) _exit(0);
  waitpid(child, nullptr, 0);
  unsigned char byte = 0;
  const uint64_t here[] = {address_of(&byte), address_of(&byte)}, length[] = {1, 1};
  int64_t result[2];
  kvf_process_read(child, here, here, length, result, 2);
  expect(result[0] == -ESRCH && result[1] == -ESRCH, "a process that is gone");
  kvf_process_read(getpid(), nullptr, nullptr, nullptr, nullptr, 0);
}

}  // namespace

void process_memory_cases() {
  std::mt19937_64 random(20250608);
  for (int round = 0; round < 20; ++round) random_spans(random);
  holes();
  nobody();
}
