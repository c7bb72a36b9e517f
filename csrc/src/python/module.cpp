// The pybind11 skin: checks arguments, lets go of the GIL, calls the C interface.
#include <pybind11/pybind11.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>

#include "kvferry_native.h"
#include "pack_tokens.hpp"

namespace py = pybind11;

namespace {

// A one-dimensional, contiguous buffer of uint64. Holds the exporter's buffer, so that the array
// cannot be resized while another thread copies.
class Words {
 public:
  Words(const py::object &owner, const char *name) {
    if (PyObject_GetBuffer(owner.ptr(), &view_, PyBUF_STRIDES | PyBUF_FORMAT) != 0) {
      throw py::error_already_set();
    }
    const char *problem = complaint();
    if (problem != nullptr) {
      const bool shape = view_.ndim != 1 || is_uint64();
      PyBuffer_Release(&view_);
      const std::string text = std::string(name) + " " + problem;
      if (shape) throw py::value_error(text);
      throw py::type_error(text);
    }
  }
  ~Words() { PyBuffer_Release(&view_); }
  Words(const Words &) = delete;
  Words &operator=(const Words &) = delete;

  const uint64_t *data() const { return static_cast<const uint64_t *>(view_.buf); }
  size_t size() const { return static_cast<size_t>(view_.shape[0]); }

 private:
  bool is_uint64() const {
    const char *format = view_.format != nullptr ? view_.format : "B";
    const char native = *format == '@' || *format == '=' ? *format++ : '@';
    const bool wide = std::strcmp(format, "Q") == 0 ||
                      (native == '@' && sizeof(long) == 8 && std::strcmp(format, "L") == 0);
    return wide && view_.itemsize == 8;
  }

  const char *complaint() const {
    if (view_.ndim != 1) return "must have one dimension";
    if (!is_uint64()) return "must hold uint64";
    const bool dense = view_.shape[0] < 2 || view_.strides == nullptr || view_.strides[0] == 8;
    if (!dense) return "must be contiguous";
    if (reinterpret_cast<uintptr_t>(view_.buf) % alignof(uint64_t) != 0) return "must be aligned";
    return nullptr;
  }

  Py_buffer view_{};
};

void raise(int code, const char *overflow) {
  if (code == 0) return;
  if (code == EOVERFLOW) throw py::value_error(overflow);
  errno = code;
  PyErr_SetFromErrno(PyExc_OSError);
  throw py::error_already_set();
}

constexpr const char *kWrapping = "a span wraps around the address space";

void require_same(const Words &left, const Words &right, const char *what) {
  if (left.size() != right.size()) {
    throw py::value_error(std::string(what) + " must have as many items as dst: " +
                          std::to_string(right.size()) + " against " +
                          std::to_string(left.size()));
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
  require_same(to, from, "src");
  require_same(to, lengths, "length");
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
  module.def("pack_tokens", &pack_tokens, arg("tokens"), kPackDoc);
}
