// Runs the C interface without Python, so that sanitizers see nothing but our own code. Prints what
// went wrong and returns 1, or returns 0.
#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include <sys/mman.h>
#include <unistd.h>

#include "driver.hpp"
#include "kvferry_native.h"

namespace {
int failures = 0;
}

void expect(bool good, const char *what) {
  if (good) return;
  std::printf("failed: %s\n", what);
  ++failures;
}

namespace {

uint64_t address_of(const void *pointer) { return reinterpret_cast<uint64_t>(pointer); }

// Copies of random, mostly unaligned lengths between two heap blocks that end exactly where their data
// ends: a single byte read or written too far is an error of the address sanitizer.
void random_plans(std::mt19937_64 &random, size_t most, unsigned threads) {
  const size_t count = 1 + random() % 40;
  std::vector<uint64_t> length(count);
  size_t total = 0;
  for (uint64_t &n : length) total += n = random() % 8 == 0 ? 0 : random() % most;
  std::vector<size_t> order(count);
  for (size_t i = 0; i < count; ++i) order[i] = i;
  if (random() % 2 == 0) std::shuffle(order.begin(), order.end(), random);

  const size_t skew = random() % 64;
  std::unique_ptr<unsigned char[]> from(new unsigned char[total + skew]);
  std::unique_ptr<unsigned char[]> to(new unsigned char[total]());
  for (size_t i = 0; i < total + skew; ++i) from[i] = static_cast<unsigned char>(random());
  std::vector<unsigned char> wanted(total);
  std::vector<uint64_t> dst(count), src(count);
  size_t at = 0;
  for (size_t i = 0; i < count; ++i) {
    src[i] = address_of(from.get()) + skew + at;
    at += length[i];
  }
  at = 0;
  for (const size_t i : order) {
    dst[i] = address_of(to.get()) + at;
    std::memcpy(wanted.data() + at, reinterpret_cast<const void *>(src[i]), length[i]);
    at += length[i];
  }
  expect(kvf_copy_spans(dst.data(), src.data(), length.data(), count, threads) == 0, "copy");
  expect(total == 0 || std::memcmp(to.get(), wanted.data(), total) == 0, "bytes of a random plan");
}

void refusals() {
  const uint64_t far = UINT64_MAX - 10, near = 16, length = 100, none = 0;
  expect(kvf_copy_spans(&far, &near, &length, 1, 1) == EOVERFLOW, "destination wraps");
  expect(kvf_copy_spans(&near, &far, &length, 1, 1) == EOVERFLOW, "source wraps");
  expect(kvf_copy_spans(&far, &far, &none, 1, 4) == 0, "empty span anywhere");
  expect(kvf_copy_spans(nullptr, nullptr, nullptr, 0, 1) == 0, "empty plan");
  expect(kvf_populate(far, length, 1, nullptr) == EOVERFLOW, "populate wraps");
  expect(kvf_advise_hugepages(far, length) == 0, "advice wraps");
}

size_t size_of_page() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

size_t pages_present(void *memory, size_t size) {
  std::vector<unsigned char> present(size / size_of_page());
  if (mincore(memory, size, present.data()) != 0) return SIZE_MAX;
  size_t count = 0;
  for (const unsigned char page : present) count += page & 1;
  return count;
}

void population() {
  const size_t size = 3 << 20;
  void *memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  expect(memory != MAP_FAILED, "mmap");
  auto *bytes = static_cast<unsigned char *>(memory);
  bytes[5000] = 77;
  int way = -1;
  expect(kvf_populate(address_of(bytes) + 100, size - 200, 1, &way) == 0, "populate");
  expect(way == KVF_POPULATED || way == KVF_TOUCHED, "way");
  expect(bytes[5000] == 77, "populate keeps content");
  expect(madvise(memory, size, MADV_DONTNEED) == 0 && madvise(memory, size, MADV_REMOVE) == 0, "empty");
  expect(pages_present(bytes, size) == 0, "nothing present before the touch");
  bytes[size / 2] = 55;
  kvf_touch(address_of(bytes) + size_of_page() - 1, size - size_of_page());
  expect(pages_present(bytes, size) == size / size_of_page(), "touch reaches all pages");
  expect(bytes[size / 2] == 55, "touch keeps content");
  kvf_advise_hugepages(address_of(bytes), size);
  munmap(memory, size);
}

}  // namespace

int main() {
  std::mt19937_64 random(20240229);
  for (int round = 0; round < 40; ++round) random_plans(random, 5000, 1);
  // Above 2 MiB in all, so that threads and streamed stores take part.
  for (int round = 0; round < 4; ++round) random_plans(random, 700000, 4);
  refusals();
  population();
  process_memory_cases();
  uring_cases();
  return failures == 0 ? 0 : 1;
}
