#pragma once

#include <Python.h>

namespace kvferry {

// New reference to bytes with the items of `tokens` as little-endian uint32, or null with a Python
// error set: TypeError (not a sequence, or an item is no integer), ValueError (out of range).
PyObject *pack_tokens(PyObject *tokens);

}  // namespace kvferry
