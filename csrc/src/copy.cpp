#include "kvferry_native.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace {

constexpr uint64_t kMax = std::numeric_limits<uint64_t>::max();

constexpr uint64_t kLine = 64;

// Measured on pages scattered over 512 MiB (see docs/decisions/0003): the hardware notices a new page
// only after some misses, so the first lines of the next one are asked for while this one is copied.
constexpr uint64_t kLinesAhead = 8;

// Stores that go past the cache save reading the destination first: a fifth to a third faster for long
// runs. For short ones only where the destination jumps too; where it runs on, the ordinary stores of
// the C library win. Small copies stay in the cache for whoever reads them next.
constexpr uint64_t kLongRun = uint64_t{32} << 10;
constexpr uint64_t kShortestStreamed = uint64_t{1} << 10;
constexpr uint64_t kSmallCopy = uint64_t{2} << 20;

// Starting a thread costs some tens of microseconds, in which one thread copies a few hundred KiB.
constexpr uint64_t kBytesWorthAThread = uint64_t{2} << 20;

struct Spans {
  const uint64_t *dst;
  const uint64_t *src;
  const uint64_t *length;
  size_t count;
};

// Sum of all lengths in `total`; false when a span or the sum does not fit in 64 bits.
bool measure(const Spans &spans, uint64_t *total) {
  uint64_t sum = 0;
  for (size_t i = 0; i < spans.count; ++i) {
    const uint64_t n = spans.length[i];
    if (n > kMax - sum || n > kMax - spans.dst[i] || n > kMax - spans.src[i]) return false;
    sum += n;
  }
  *total = sum;
  return true;
}

void copy_cached(uint64_t dst, uint64_t src, uint64_t length) {
  std::memmove(reinterpret_cast<void *>(dst), reinterpret_cast<const void *>(src), length);
}

#if defined(__SSE2__)

constexpr bool kCanStream = true;

void copy_streamed(uint64_t dst, uint64_t src, uint64_t length) {
  const uint64_t head = std::min(length, (kLine - dst % kLine) % kLine);
  copy_cached(dst, src, head);
  const uint64_t body = (length - head) / kLine * kLine;
  auto *to = reinterpret_cast<__m128i *>(dst + head);
  const auto *from = reinterpret_cast<const __m128i *>(src + head);
  for (uint64_t done = 0; done < body; done += kLine, to += 4, from += 4) {
    const __m128i a = _mm_loadu_si128(from);
    const __m128i b = _mm_loadu_si128(from + 1);
    const __m128i c = _mm_loadu_si128(from + 2);
    const __m128i d = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, a);
    _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c);
    _mm_stream_si128(to + 3, d);
  }
  copy_cached(dst + head + body, src + head + body, length - head - body);
}

// Streamed stores are weakly ordered: without this another thread could see "done" before the bytes.
void order_streamed_stores() { _mm_sfence(); }

#else

constexpr bool kCanStream = false;
void copy_streamed(uint64_t dst, uint64_t src, uint64_t length) { copy_cached(dst, src, length); }
void order_streamed_stores() {}

#endif

// Ask for the beginning of the source after next, and for the page of the one after that, whose address
// has to be looked up first. Inlined by force: GCC deletes calls of a function that does nothing but
// prefetch, because it has no result.
[[gnu::always_inline]] inline void look_ahead(const Spans &spans, size_t next) {
  if (next + 2 < spans.count) {
    __builtin_prefetch(reinterpret_cast<const char *>(spans.src[next + 2]));
  }
  if (next < spans.count) {
    for (uint64_t line = 0; line < kLinesAhead; ++line) {
      __builtin_prefetch(reinterpret_cast<const char *>(spans.src[next] + line * kLine));
    }
  }
}

// Copy the bytes [low, high) of the spans laid end to end, so that shares are equal however unequal
// the spans are. Spans that join on both sides become one run: blocks in a row on both sides, as in a
// fresh cache, cost one call.
void copy_share(const Spans &spans, uint64_t low, uint64_t high, bool streams) {
  uint64_t previous_end = 0;
  uint64_t end = 0;
  for (size_t i = 0; i < spans.count && end < high;) {
    const uint64_t begin = end, dst = spans.dst[i], src = spans.src[i];
    uint64_t run = 0;
    do {
      run += spans.length[i++];
    } while (i < spans.count && spans.dst[i] == dst + run && spans.src[i] == src + run);
    end = begin + run;
    const uint64_t skip = std::max(low, begin) - begin;
    const uint64_t stop = std::min(high, end) - begin;
    if (skip >= stop) continue;
    look_ahead(spans, i);
    const uint64_t length = stop - skip;
    const bool jumps = dst + skip != previous_end;
    previous_end = dst + stop;
    if (streams && (length >= kLongRun || (jumps && length >= kShortestStreamed))) {
      copy_streamed(dst + skip, src + skip, length);
    } else {
      copy_cached(dst + skip, src + skip, length);
    }
  }
  if (streams) order_streamed_stores();
}

int copy(const Spans &spans, unsigned threads) {
  uint64_t total = 0;
  if (!measure(spans, &total)) return EOVERFLOW;
  const bool streams = kCanStream && total >= kSmallCopy;
  const uint64_t useful = std::max<uint64_t>(1, total / kBytesWorthAThread);
  const uint64_t shares = std::min<uint64_t>(std::max(1u, threads), useful);
  const uint64_t share = total / shares;
  std::vector<std::thread> helpers;
  uint64_t low = 0;
  try {
    helpers.reserve(shares - 1);
    for (uint64_t i = 1; i < shares; ++i) {
      helpers.emplace_back(copy_share, spans, low, low + share, streams);
      low += share;
    }
  } catch (const std::system_error &) {
    // The system gives no more threads: the caller's own copies what is left.
  } catch (const std::bad_alloc &) {
  }
  copy_share(spans, low, total, streams);
  for (std::thread &helper : helpers) helper.join();
  return 0;
}

}  // namespace

extern "C" int kvf_copy_spans(const uint64_t *dst, const uint64_t *src, const uint64_t *length,
                              size_t count, unsigned threads) {
  if (count == 0) return 0;
  return copy(Spans{dst, src, length, count}, threads);
}
