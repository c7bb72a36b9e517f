#include "pack_tokens.hpp"

#include <cstdint>
#include <cstring>

namespace kvferry {
namespace {

constexpr long long kMaxToken = 0xFFFFFFFFLL;

// The value of a small non-negative int without a call, or -1 when it takes the general way.
inline long long small_value(PyObject *item) {
#if PY_VERSION_HEX >= 0x030C0000
  auto *number = reinterpret_cast<PyLongObject *>(item);
  if (PyUnstable_Long_IsCompact(number)) return PyUnstable_Long_CompactValue(number);
#else
  // Python 3.11: one digit of 30 bits, or none for zero; the sign is the sign of the size.
  const Py_ssize_t digits = Py_SIZE(item);
  if (digits == 1) return reinterpret_cast<PyLongObject *>(item)->ob_digit[0];
  if (digits == 0) return 0;
#endif
  return -1;
}

bool out_of_range(Py_ssize_t at, PyObject *item) {
  PyErr_Format(PyExc_ValueError, "token %zd is %R, which does not fit in 32 bits without a sign", at,
               item);
  return false;
}

bool general_value(PyObject *item, Py_ssize_t at, uint32_t *value) {
  if (!PyIndex_Check(item)) {
    PyErr_Format(PyExc_TypeError, "token %zd is a %s, not an int", at, Py_TYPE(item)->tp_name);
    return false;
  }
  PyObject *number = PyNumber_Index(item);  // numpy integers and other index-like objects
  if (number == nullptr) return false;
  int overflow = 0;
  const long long wide = PyLong_AsLongLongAndOverflow(number, &overflow);
  bool good = true;
  if (wide == -1 && overflow == 0 && PyErr_Occurred() != nullptr) {
    good = false;
  } else if (overflow != 0 || wide < 0 || wide > kMaxToken) {
    good = out_of_range(at, number);
  } else {
    *value = static_cast<uint32_t>(wide);
  }
  Py_DECREF(number);
  return good;
}

inline void put(unsigned char *out, uint32_t value) {
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  value = __builtin_bswap32(value);
#endif
  std::memcpy(out, &value, sizeof value);
}

// `items` is a list or tuple.
bool pack_into(PyObject *items, Py_ssize_t count, unsigned char *out) {
  for (Py_ssize_t i = 0; i < count; ++i, out += 4) {
    PyObject *item = PySequence_Fast_GET_ITEM(items, i);
    if (PyLong_CheckExact(item)) {
      const long long value = small_value(item);
      if (value >= 0 && value <= kMaxToken) {
        put(out, static_cast<uint32_t>(value));
        continue;
      }
    }
    // From here on Python code may run (an item's __index__), and change a list under our hands.
    Py_INCREF(item);
    uint32_t value = 0;
    const bool good = general_value(item, i, &value);
    Py_DECREF(item);
    if (!good) return false;
    if (PySequence_Fast_GET_SIZE(items) != count) {
      PyErr_SetString(PyExc_RuntimeError, "the tokens changed while they were packed");
      return false;
    }
    put(out, value);
  }
  return true;
}

}  // namespace

PyObject *pack_tokens(PyObject *tokens) {
  if (!PySequence_Check(tokens)) {
    PyErr_Format(PyExc_TypeError, "tokens must be a sequence of ints, not a %s",
                 Py_TYPE(tokens)->tp_name);
    return nullptr;
  }
  PyObject *items = PySequence_Fast(tokens, "tokens must be a sequence of ints");
  if (items == nullptr) return nullptr;
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(items);
  PyObject *packed = nullptr;
  if (count > PY_SSIZE_T_MAX / 4) {
    PyErr_NoMemory();
  } else {
    packed = PyBytes_FromStringAndSize(nullptr, count * 4);
  }
  if (packed != nullptr &&
      !pack_into(items, count, reinterpret_cast<unsigned char *>(PyBytes_AS_STRING(packed)))) {
    Py_CLEAR(packed);
  }
  Py_DECREF(items);
  return packed;
}

}  // namespace kvferry
