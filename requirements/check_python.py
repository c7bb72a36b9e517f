"""Stops the set-up early, with the remedy, on an interpreter that is too old or lacks its headers."""

import pathlib
import shutil
import sys
import sysconfig

problems = []
if sys.version_info < (3, 11):
    problems.append(
        f"this is Python {sys.version.split()[0]}, kvferry needs 3.11 or newer: make PYTHON=python3.11 ..."
    )
if not (pathlib.Path(sysconfig.get_path("include")) / "Python.h").exists():
    problems.append("the Python headers are missing: install your system's python3-dev package")
if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
    problems.append("there is no C++ compiler: install g++ or clang++ (C++17)")
sys.exit("\n".join(problems) or 0)
