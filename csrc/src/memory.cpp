#include "kvferry_native.h"

#include <cerrno>
#include <limits>

#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14; older headers lack the name
#endif

namespace {

uint64_t page_size() { return static_cast<uint64_t>(sysconf(_SC_PAGESIZE)); }

bool wraps(uint64_t address, uint64_t length) {
  return length > std::numeric_limits<uint64_t>::max() - address;
}

}  // namespace

extern "C" int kvf_populate(uint64_t address, uint64_t length, int allow_touch, int *way) {
  if (way != nullptr) *way = KVF_POPULATED;
  if (length == 0) return 0;
  if (wraps(address, length)) return EOVERFLOW;
  const uint64_t page = page_size();
  const uint64_t begin = address & ~(page - 1);
  const uint64_t end = address + length;
  for (;;) {
    if (madvise(reinterpret_cast<void *>(begin), end - begin, MADV_POPULATE_WRITE) == 0) return 0;
    // A signal or a page in motion: what was done stays done, so trying again makes progress.
    if (errno == EINTR || errno == EAGAIN) continue;
    break;
  }
  if (errno != EINVAL) return errno;
  if (allow_touch == 0) return EOPNOTSUPP;
  if (way != nullptr) *way = KVF_TOUCHED;
  kvf_touch(address, length);
  return 0;
}

extern "C" void kvf_touch(uint64_t address, uint64_t length) {
  const uint64_t page = page_size();
  const uint64_t end = address + length;
  for (uint64_t at = address & ~(page - 1); at < end; at += page) {
    __atomic_fetch_or(reinterpret_cast<unsigned char *>(at), static_cast<unsigned char>(0),
                      __ATOMIC_RELAXED);
  }
}

extern "C" int kvf_advise_hugepages(uint64_t address, uint64_t length) {
#ifdef MADV_HUGEPAGE
  if (wraps(address, length)) return 0;
  const uint64_t page = page_size();
  const uint64_t begin = (address + page - 1) & ~(page - 1);
  const uint64_t end = (address + length) & ~(page - 1);
  if (end <= begin) return 0;
  return madvise(reinterpret_cast<void *>(begin), end - begin, MADV_HUGEPAGE) == 0 ? 1 : 0;
#else
  (void)address;
  (void)length;
  return 0;
#endif
}
