"""How many machine instructions a stretch of this process takes, if valgrind's callgrind runs it.

Valgrind is spoken to by "client requests": an instruction sequence that does nothing on a CPU, and that valgrind knows
(valgrind.h, callgrind.h). Python has no access to them, so they are put into memory here and called. x86-64 alone.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import re
import shutil
from pathlib import Path
from types import TracebackType

_FOLDER = "PDSERVE_CALLGRIND_FOLDER"
_REQUEST = bytes.fromhex(
    "4889f8"  # mov rax, rdi: the address of the request and its arguments
    "31d2"  # xor edx, edx: the answer of a CPU
    "48c1c703 48c1c70d 48c1c73d 48c1c733"  # rol rdi by 3, 13, 61 and 51: by 128 altogether
    "4887db"  # xchg rbx, rbx: the sequence before it makes it a request
    "4889d0"  # mov rax, rdx
    "c3"  # ret
)
_CALLGRIND = (ord("C") << 24) + (ord("T") << 16)
_DUMP, _ZERO, _TOGGLE, _START, _STOP = (_CALLGRIND + number for number in (0, 1, 2, 4, 5))


def available() -> bool:
    return platform.machine() == "x86_64" and shutil.which("valgrind") is not None


def command(python: list[str], folder: Path) -> tuple[list[str], dict[str, str]]:
    """What runs that Python so that a Collector works in it and in its forks, and its environment.

    `folder`: empty; for callgrind's files. The caller removes it.
    """
    valgrind = ["valgrind", "--quiet", "--tool=callgrind", "--instr-atstart=no", "--collect-atstart=no", "--vgdb=no"]
    return [*valgrind, f"--callgrind-out-file={folder}/%p", *python], {**os.environ, _FOLDER: str(folder)}


class Collector:
    """`with Collector() as collector`: counts between every other pair of calls of `toggle`, then is in `collected`."""

    def __init__(self) -> None:
        self.collected = 0
        self._folder = Path(os.environ[_FOLDER])
        # Never unmapped: the function below is a part of it.
        self._code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        self._code.write(_REQUEST)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._code))
        self._call = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p)(address)
        self._toggle_request = (ctypes.c_uint64 * 6)(_TOGGLE)

    def __enter__(self) -> Collector:
        self._ask(_START)
        self._ask(_ZERO)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ask(_STOP)
        self._ask(_DUMP)
        for dump in self._folder.glob(f"{os.getpid()}.*"):
            self.collected += int(re.findall(r"^totals: (\d+)", dump.read_text(), re.MULTILINE)[-1])
            dump.unlink()

    def toggle(self) -> int:
        """Begins or ends a stretch. Takes the place of a clock, so it answers with a number."""
        self._call(self._toggle_request)
        return 0

    def _ask(self, request: int) -> None:
        self._call((ctypes.c_uint64 * 6)(request))
