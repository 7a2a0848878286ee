"""The ABI of /dev/qgpu, read from the module's own header: structs through cffi, numbers by arithmetic.

Nothing from the header is typed again here. The header documents the calls; ``qgpu/planes/kmod/`` uses them.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import MappingProxyType
from typing import Final

from cffi import FFI

_NUMBER = re.compile(r"^#define (QGPU_\w+) (0x[0-9a-f]+|\d+)$", re.MULTILINE)
_COMMAND = re.compile(r"^#define (QGPU_IOC_\w+) _IO(W?R?|RW?)\('(.)', (\d+), struct (\w+)\)$", re.MULTILINE)
_DIRECTIVE = re.compile(r"^#.*$", re.MULTILINE)
_KERNEL_TYPES = """
typedef uint32_t __u32; typedef int32_t __s32; typedef uint64_t __u64;
"""
#: asm-generic/ioctl.h: direction bits as user space sees them, the same on x86-64 and arm64.
_WRITE, _READ = 1, 2


def _header() -> Path:
    """Find the header: beside the package in an installed wheel, in kmod/ of a source tree."""
    package = Path(__file__).resolve().parents[2]
    installed = package / "data" / "qgpu.h"
    return installed if installed.exists() else package.parent / "kmod" / "uapi" / "qgpu.h"


_TEXT = _header().read_text(encoding="utf-8")

#: The integer constants of the header by name.
NUMBERS: Final = MappingProxyType({name: int(value, 0) for name, value in _NUMBER.findall(_TEXT)})

ffi: Final = FFI()
ffi.cdef(
    _KERNEL_TYPES
    + "".join(f"#define {name} {value}\n" for name, value in NUMBERS.items())
    + re.sub(r"/\*.*?\*/", "", _DIRECTIVE.sub("", _TEXT), flags=re.DOTALL)
)


def _command(direction: str, letter: str, number: str, struct: str) -> int:
    bits = (_WRITE if "W" in direction else 0) | (_READ if "R" in direction else 0)
    return bits << 30 | ffi.sizeof(f"struct {struct}") << 16 | ord(letter) << 8 | int(number)


#: The ioctl numbers of the header by name.
COMMANDS: Final = MappingProxyType({name: _command(*rest) for name, *rest in _COMMAND.findall(_TEXT)})
#: The struct each ioctl takes, by the ioctl's name.
STRUCTS: Final = MappingProxyType({name: f"struct {struct}" for name, _, _, _, struct in _COMMAND.findall(_TEXT)})
