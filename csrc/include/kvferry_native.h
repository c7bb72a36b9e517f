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
#define KVF_ABI 2

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

/* Read the memory of another process: length[i] bytes from its address remote[i] to local[i], for every i.
 *
 * result[i] becomes length[i] or -errno: -EFAULT where a part of the span is not mapped on either side,
 * -EOVERFLOW where it wraps around the address space, and for all that are left -ESRCH when the process is
 * gone, -EPERM when the system forbids it, -ENOSYS when it has no such call. Short transfers are continued.
 * Without success part of the bytes may have been moved. A process that is stopped is read all the same. */
void kvf_process_read(int pid, const uint64_t *local, const uint64_t *remote, const uint64_t *length,
                      int64_t *result, size_t count);

/* A ring of the kernel's io_uring, used for lists of reads or writes. Needs Linux 5.6. */
struct kvf_uring;
typedef struct kvf_uring kvf_uring;

/* How far kvf_uring_trial came. */
enum kvf_uring_step {
  KVF_URING_TRIED_OPEN = 0, /* the kernel gives no ring */
  KVF_URING_TRIED_RUN = 1,  /* there is a ring, but no write or read goes through it */
  KVF_URING_NOT_BUILT = 2,  /* made for a system without io_uring */
};

/* Open a ring and move a few bytes through it and a file in memory. 0 when all of it works. `step`
 * receives the step that failed, one of kvf_uring_step. */
int kvf_uring_trial(int *step);

/* Open a ring with at least `entries` places. ENOSYS also when the kernel is older than 5.6. */
int kvf_uring_open(unsigned entries, kvf_uring **ring);

/* Move length[i] bytes between address[i] and offset[i] of the file, for every i, in any order, with at
 * most `depth` items (and no more than the ring has places; 0 counts as 1) in flight at once. Returns
 * when nothing is in flight any more, whatever happened.
 *
 * result[i] becomes the number of bytes moved or -errno. Short transfers are continued, so it is
 * length[i], except that a read gives what there is before the end of the file. Without success part of
 * the bytes may have been moved. -EINVAL also when the range does not fit in a signed 64-bit position.
 *
 * Returns 0, or touches nothing and returns EBUSY (another thread is inside this function with this
 * ring), EBADF (the ring is closed) or EOWNERDEAD (the ring was opened before a fork, by the parent). */
int kvf_uring_run(kvf_uring *ring, int write, int fd, const uint64_t *offset, const uint64_t *address,
                  const uint64_t *length, int64_t *result, size_t count, unsigned depth);

/* Close the ring, after waiting for a run that is under way. Harmless when it is closed already. */
void kvf_uring_close(kvf_uring *ring);

/* Close the ring and forget it. Nobody may use it any more. */
void kvf_uring_free(kvf_uring *ring);

#ifdef __cplusplus
}
#endif

#endif
