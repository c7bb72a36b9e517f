// The pybind11 skin: checks arguments, lets go of the GIL, calls the C interface.
#include <pybind11/pybind11.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>

#include "kvferry_native.h"
#include "pack_tokens.hpp"

namespace py = pybind11;

namespace {

// A one-dimensional, contiguous buffer of 64-bit numbers. Holds the exporter's buffer, so that the
// array cannot be resized while another thread uses it.
template <typename Item>
class Buffer {
 public:
  Buffer(const py::object &owner, const char *name, int access = 0) {
    if (PyObject_GetBuffer(owner.ptr(), &view_, PyBUF_STRIDES | PyBUF_FORMAT | access) != 0) {
      throw py::error_already_set();
    }
    const std::string problem = complaint();
    if (!problem.empty()) {
      const bool shape = view_.ndim != 1 || is_item();
      PyBuffer_Release(&view_);
      const std::string text = std::string(name) + " " + problem;
      if (shape) throw py::value_error(text);
      throw py::type_error(text);
    }
  }
  ~Buffer() { PyBuffer_Release(&view_); }
  Buffer(const Buffer &) = delete;
  Buffer &operator=(const Buffer &) = delete;

  Item *data() const { return static_cast<Item *>(view_.buf); }
  size_t size() const { return static_cast<size_t>(view_.shape[0]); }

 private:
  static constexpr bool kSigned = std::is_signed_v<Item>;

  bool is_item() const {
    const char *format = view_.format != nullptr ? view_.format : "B";
    const char native = *format == '@' || *format == '=' ? *format++ : '@';
    const bool wide = std::strcmp(format, kSigned ? "q" : "Q") == 0 ||
                      (native == '@' && sizeof(long) == 8 &&
                       std::strcmp(format, kSigned ? "l" : "L") == 0);
    return wide && view_.itemsize == sizeof(Item);
  }

  std::string complaint() const {
    if (view_.ndim != 1) return "must have one dimension";
    if (!is_item()) return kSigned ? "must hold int64" : "must hold uint64";
    const bool dense = view_.shape[0] < 2 || view_.strides == nullptr || view_.strides[0] == 8;
    if (!dense) return "must be contiguous";
    if (reinterpret_cast<uintptr_t>(view_.buf) % alignof(Item) != 0) return "must be aligned";
    return "";
  }

  Py_buffer view_{};
};

using Words = Buffer<const uint64_t>;
using Results = Buffer<int64_t>;

void raise(int code, const char *overflow) {
  if (code == 0) return;
  if (code == EOVERFLOW) throw py::value_error(overflow);
  errno = code;
  PyErr_SetFromErrno(PyExc_OSError);
  throw py::error_already_set();
}

constexpr const char *kWrapping = "a span wraps around the address space";

template <typename Left, typename Right>
void require_same(const Left &left, const char *left_name, const Right &right, const char *name) {
  if (left.size() != right.size()) {
    throw py::value_error(std::string(name) + " must have as many items as " + left_name + ": " +
                          std::to_string(right.size()) + " against " + std::to_string(left.size()));
  }
}

unsigned thread_count(int threads) {
  if (threads < 1) throw py::value_error("threads must be at least 1");
  return static_cast<unsigned>(threads);
}

void copy_spans(const py::object &dst, const py::object &src, const py::object &length,
                int threads) {
  const Words to(dst, "dst");
  const Words from(src, "src");
  const Words lengths(length, "length");
  require_same(to, "dst", from, "src");
  require_same(to, "dst", lengths, "length");
  const unsigned workers = thread_count(threads);
  int code = 0;
  {
    py::gil_scoped_release unlocked;
    code = kvf_copy_spans(to.data(), from.data(), lengths.data(), to.size(), workers);
  }
  raise(code, kWrapping);
}

bool populate(uint64_t address, uint64_t length, bool allow_touch) {
  int way = KVF_POPULATED;
  int code = 0;
  {
    py::gil_scoped_release unlocked;
    code = kvf_populate(address, length, allow_touch ? 1 : 0, &way);
  }
  raise(code, kWrapping);
  return way == KVF_POPULATED;
}

bool advise_hugepages(uint64_t address, uint64_t length) {
  py::gil_scoped_release unlocked;
  return kvf_advise_hugepages(address, length) == 1;
}

void process_read(int pid, const py::object &local, const py::object &remote, const py::object &lengths,
                  const py::object &results) {
  const Words here(local, "local");
  const Words there(remote, "remote");
  const Words sizes(lengths, "lengths");
  const Results moved(results, "results", PyBUF_WRITABLE);
  require_same(here, "local", there, "remote");
  require_same(here, "local", sizes, "lengths");
  require_same(here, "local", moved, "results");
  py::gil_scoped_release unlocked;
  kvf_process_read(pid, here.data(), there.data(), sizes.data(), moved.data(), here.size());
}

[[noreturn]] void raise_os_error(int code, const std::string &text) {
  PyErr_SetObject(PyExc_OSError, py::make_tuple(code, text).ptr());
  throw py::error_already_set();
}

// "EPERM (Operation not permitted)"
std::string name_of(int code) {
  const py::dict names = py::module_::import("errno").attr("errorcode");
  const std::string name = py::str(names.attr("get")(code, "error " + std::to_string(code)));
  return name + " (" + std::strerror(code) + ")";
}

std::string remedy_for(int code) {
  if (code == ENOSYS) return "; it takes Linux 5.6, and a sandbox may hide it";
  if (code == EPERM || code == EACCES) {
    return "; the sysctl kernel.io_uring_disabled or a sandbox such as a container's seccomp profile "
           "forbids it";
  }
  if (code == ENOMEM) return "; kernels before 5.12 count rings as locked memory (ulimit -l)";
  return "";
}

std::string io_uring_refusal() {
  int step = KVF_URING_TRIED_OPEN;
  int code = 0;
  {
    py::gil_scoped_release unlocked;
    code = kvf_uring_trial(&step);
  }
  if (code == 0) return "";
  if (step == KVF_URING_NOT_BUILT) return "kvferry-native was built for a system without io_uring";
  const std::string what = step == KVF_URING_TRIED_OPEN ? "the kernel gives no io_uring: "
                                                        : "the kernel's io_uring moves no bytes: ";
  return what + name_of(code) + remedy_for(code);
}

class IoUring {
 public:
  explicit IoUring(int entries) {
    if (entries < 1) throw py::value_error("entries must be at least 1");
    const int code = kvf_uring_open(static_cast<unsigned>(entries), &ring_);
    if (code != 0) raise_os_error(code, std::string("no io_uring: ") + std::strerror(code));
  }
  ~IoUring() { kvf_uring_free(ring_); }
  IoUring(const IoUring &) = delete;
  IoUring &operator=(const IoUring &) = delete;

  void run(bool write, int fd, const py::object &offsets, const py::object &addresses,
           const py::object &lengths, const py::object &results, int depth) {
    const Words at(offsets, "offsets");
    const Words memory(addresses, "addresses");
    const Words sizes(lengths, "lengths");
    const Results moved(results, "results", PyBUF_WRITABLE);
    require_same(at, "offsets", memory, "addresses");
    require_same(at, "offsets", sizes, "lengths");
    require_same(at, "offsets", moved, "results");
    if (depth < 1) throw py::value_error("depth must be at least 1");
    int code = 0;
    {
      py::gil_scoped_release unlocked;
      code = kvf_uring_run(ring_, write ? 1 : 0, fd, at.data(), memory.data(), sizes.data(),
                           moved.data(), at.size(), static_cast<unsigned>(depth));
    }
    if (code == EBADF) throw py::value_error("this ring is closed");
    if (code == EBUSY) {
      raise_os_error(code, "another thread is using this ring; give every thread one of its own");
    }
    if (code == EOWNERDEAD) {
      raise_os_error(code, "this ring belongs to the parent process; open one after the fork");
    }
    raise(code, "");
  }

  void close() {
    py::gil_scoped_release unlocked;
    kvf_uring_close(ring_);
  }

 private:
  kvf_uring *ring_ = nullptr;
};

py::bytes pack_tokens(const py::object &tokens) {
  PyObject *packed = kvferry::pack_tokens(tokens.ptr());
  if (packed == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::bytes>(packed);
}

constexpr const char *kCopySpansDoc = R"doc(
Copy length[i] bytes from address src[i] to address dst[i], for every i.

The three are one-dimensional contiguous buffers of uint64, of one size. Runs without the GIL, on up to
`threads` threads (the caller's included; small copies use fewer). No destination may overlap another
destination or any source. Zero lengths are allowed. Nobody may change the arrays until the call
returns. Raises TypeError for other item types, ValueError for other shapes and for a span that wraps
around the address space; nothing is copied then.)doc";

constexpr const char *kPopulateDoc = R"doc(
Make all pages of a writable mapping present and keep their content. Runs without the GIL.

True when the system did it in one call: a lack of memory then comes as OSError. False when it lacks
that call (Linux before 5.14) and one byte per page was touched: a lack of memory then ends the process,
so reserve the pages first. With allow_touch=False such a system gives OSError with EOPNOTSUPP.)doc";

constexpr const char *kAdviseDoc = R"doc(
Ask for huge pages in a mapping. True when the system accepted the advice, which is no promise that it
has any.)doc";

constexpr const char *kProcessReadDoc = R"doc(
Read the memory of process `pid`: lengths[i] bytes from its address remote[i] to our address local[i],
for every i.

The first three are one-dimensional contiguous buffers of uint64, `results` a writable one of int64, all
of one size. results[i] becomes lengths[i], or -errno: -EFAULT for a span that is not mapped as a whole,
and for all that are left -ESRCH when the process is gone, -EPERM when the system forbids it, -ENOSYS when
it has no such call. Where it is negative, a part may have been moved. Runs without the GIL; a process
that is stopped is read all the same. Raises TypeError and ValueError for wrong arrays.)doc";

constexpr const char *kRefusalDoc = R"doc(
Why the kernel's io_uring cannot be used, as one sentence without a full stop; "" when it can.

Found out by opening a ring and moving some bytes through it and a file in memory, so a sandbox that
lets only a part of it through is noticed too. Takes well under a millisecond.)doc";

constexpr const char *kRingDoc = R"doc(
A ring of the kernel's io_uring for lists of reads or writes, with raw system calls. Needs Linux 5.6.

`entries` is how many items can be in flight at once (the kernel rounds up to a power of two). Raises
OSError with the kernel's errno when it gives no ring, ValueError when `entries` is below one. A ring
serves one thread at a time, any thread, and only the process that opened it.)doc";

constexpr const char *kRunDoc = R"doc(
Move lengths[i] bytes between addresses[i] and offsets[i] of file `fd`, for every i, in any order.

The first three are one-dimensional contiguous buffers of uint64, `results` a writable one of int64, all
of one size. At most `depth` items (and no more than the ring has entries) are in flight at once. Runs
without the GIL and returns when nothing is in flight any more; signal handlers run after that. Nobody
may change the arrays or close `fd` until then.

results[i] becomes the number of bytes moved, or -errno. Short transfers are continued, so it is
lengths[i], except that a read gives what there is before the end of the file. Where it is negative, a
part may have been moved. A file without positions gives -ESPIPE, like os.pread.

Raises, and touches nothing then: TypeError and ValueError for wrong arrays, a depth below one and a
closed ring; OSError with EBUSY when another thread is inside, with EOWNERDEAD in a child of fork.)doc";

constexpr const char *kCloseDoc = R"doc(
Give the ring back, after waiting for a run that is under way. Harmless when it is closed already.)doc";

constexpr const char *kPackDoc = R"doc(
The tokens as little-endian uint32, one after the other. Fastest for a list or tuple.

Holds the GIL. Raises TypeError when `tokens` is no sequence or an item no integer, ValueError when an
item does not fit in 32 bits without a sign.)doc";

}  // namespace

PYBIND11_MODULE(_native, module) {
  using py::arg;
  py::options plain;
  plain.disable_function_signatures();
  module.attr("ABI") = KVF_ABI;
  module.def("copy_spans", &copy_spans, arg("dst"), arg("src"), arg("length"), arg("threads") = 1,
             kCopySpansDoc);
  module.def("populate", &populate, arg("address"), arg("length"), arg("allow_touch") = true,
             kPopulateDoc);
  module.def("advise_hugepages", &advise_hugepages, arg("address"), arg("length"), kAdviseDoc);
  module.def("process_read", &process_read, arg("pid"), arg("local"), arg("remote"), arg("lengths"),
             arg("results"), kProcessReadDoc);
  module.def("io_uring_refusal", &io_uring_refusal, kRefusalDoc);
  py::class_<IoUring>(module, "IoUring", kRingDoc)
      .def(py::init<int>(), arg("entries"))
      .def("run", &IoUring::run, arg("write"), arg("fd"), arg("offsets"), arg("addresses"),
           arg("lengths"), arg("results"), arg("depth"), kRunDoc)
      .def("close", &IoUring::close, kCloseDoc);
  module.def("pack_tokens", &pack_tokens, arg("tokens"), kPackDoc);
}
