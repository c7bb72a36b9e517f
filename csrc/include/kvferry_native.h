/* The C interface of kvferry-native. No Python, no C++ types, no exceptions cross it.
 *
 * Addresses are plain 64-bit numbers of this process. Nothing here checks that they are mapped: who
 * calls has compared them with the regions that a plan may name. Every function may be called from any
 * thread, at the same time as any other. Functions that can fail return 0 or an errno value. */
#ifndef KVFERRY_NATIVE_H
#define KVFERRY_NATIVE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Grows when a signature or a meaning below changes. */
#define KVF_ABI 1

/* Copy `count` spans: length[i] bytes from src[i] to dst[i].
 *
 * No destination may overlap another destination or any source: the order of copies is not defined.
 * A length of zero is allowed, whatever the addresses. `threads` is how many threads may copy at once,
 * the caller's included; small copies use fewer. Nothing is copied when EOVERFLOW is returned: a span
 * wraps around the address space, or the lengths do not add up in 64 bits. */
int kvf_copy_spans(const uint64_t *dst, const uint64_t *src, const uint64_t *length, size_t count,
                   unsigned threads);

/* How kvf_populate did its work. */
enum kvf_populate_way {
  KVF_POPULATED = 0, /* the system did it in one call and reports a lack of memory as an error */
  KVF_TOUCHED = 1,   /* one byte per page was touched; a lack of memory then ends the process */
};

/* Make every page of a writable mapping present, without changing its content. Pages that the range
 * covers in part are included. `way` (may be null) receives one of kvf_populate_way. With
 * `allow_touch` 0 a system that lacks MADV_POPULATE_WRITE gives EOPNOTSUPP instead of touching. */
int kvf_populate(uint64_t address, uint64_t length, int allow_touch, int *way);

/* The touching alone: a write to one byte of every page that keeps whatever is there, also what another
 * thread writes at the same moment. */
void kvf_touch(uint64_t address, uint64_t length);

/* Ask for huge pages in the whole pages of a mapping. Returns 1 when the system accepted the advice
 * (which is no promise that it has any), 0 when not. */
int kvf_advise_hugepages(uint64_t address, uint64_t length);

#ifdef __cplusplus
}
#endif

#endif
