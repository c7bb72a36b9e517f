#include "kvferry_native.h"

#include <algorithm>
#include <cerrno>
#include <limits>

#include <sys/uio.h>
#include <unistd.h>

namespace {

// The kernel takes 1024 items on either side (IOV_MAX). Whoever calls with more small spans than this
// pays one system call for each lot.
constexpr size_t kBatch = 256;

bool wraps(uint64_t address, uint64_t length) {
  return length > std::numeric_limits<uint64_t>::max() - address;
}

// Answers that are about the process and not about a span: no other span would do better.
bool is_final(int code) { return code == ESRCH || code == EPERM || code == ENOSYS || code == ENOMEM; }

struct Reader {
  int pid;
  const uint64_t *local;
  const uint64_t *remote;
  const uint64_t *length;
  int64_t *result;
  size_t count;

  size_t at = 0;       // the span that is next
  uint64_t begun = 0;  // bytes of it that are there

  // Spans that move nothing get their result here, so that the ones in a batch all move something.
  bool settles_alone(size_t i) {
    if (wraps(local[i], length[i]) || wraps(remote[i], length[i])) {
      result[i] = -EOVERFLOW;
      return true;
    }
    result[i] = 0;
    return length[i] == 0;
  }

  int read_batch() {
    iovec here[kBatch], there[kBatch];
    size_t spans[kBatch];
    size_t used = 0;
    size_t i = at;
    for (; i < count && used < kBatch; ++i) {
      const uint64_t skip = i == at ? begun : 0;
      if (skip == 0 && settles_alone(i)) continue;
      here[used] = {reinterpret_cast<void *>(local[i] + skip), static_cast<size_t>(length[i] - skip)};
      there[used] = {reinterpret_cast<void *>(remote[i] + skip), static_cast<size_t>(length[i] - skip)};
      spans[used++] = i;
    }
    if (used == 0) {
      at = i;
      begun = 0;
      return 0;
    }
    const ssize_t moved = process_vm_readv(pid, here, used, there, used, 0);
    const int code = moved < 0 ? errno : 0;
    if (code == EINTR || code == EAGAIN) return 0;
    if (code != 0 && is_final(code)) return code;
    uint64_t left = moved < 0 ? 0 : static_cast<uint64_t>(moved);
    for (size_t k = 0; k < used; ++k) {
      const uint64_t wanted = here[k].iov_len;
      if (left < wanted) return stopped_in(spans[k], left, k == 0, code);
      result[spans[k]] = static_cast<int64_t>(length[spans[k]]);
      left -= wanted;
    }
    at = i;
    begun = 0;
    return 0;
  }

  // The call ended inside of a span, or at its begin. It says why only when it moved nothing at all, so
  // it is asked once more, from there on.
  int stopped_in(size_t span, uint64_t moved, bool first, int code) {
    if (first && moved == 0) {
      result[span] = -(code != 0 ? code : EFAULT);
      at = span + 1;
      begun = 0;
      return 0;
    }
    begun = (span == at ? begun : 0) + moved;
    at = span;
    return 0;
  }
};

}  // namespace

extern "C" void kvf_process_read(int pid, const uint64_t *local, const uint64_t *remote,
                                 const uint64_t *length, int64_t *result, size_t count) {
  Reader reader{pid, local, remote, length, result, count};
  int code = 0;
  while (reader.at < count && code == 0) code = reader.read_batch();
  for (size_t i = reader.at; code != 0 && i < count; ++i) {
    result[i] = -code;
  }
}
