"""The few libbpf functions that qgpu uses, from its shared library, which a host may lack."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from cffi import FFI

from qgpu.errors import NotSupportedError

_LIBRARY = "libbpf.so.1"
_BPF_ANY = 0
_BPF_LSM_MAC = 27  # enum bpf_attach_type

_ffi = FFI()
_ffi.cdef("""
struct bpf_object *bpf_object__open(const char *path);
int bpf_object__load(struct bpf_object *);
void bpf_object__close(struct bpf_object *);
struct bpf_program *bpf_object__next_program(struct bpf_object *, struct bpf_program *);
const char *bpf_program__name(const struct bpf_program *);
const char *bpf_program__section_name(const struct bpf_program *);
int bpf_program__set_autoload(struct bpf_program *, _Bool);
struct bpf_link *bpf_program__attach(struct bpf_program *);
int bpf_link__pin(struct bpf_link *, const char *path);
int bpf_link__destroy(struct bpf_link *);
struct bpf_map *bpf_object__next_map(struct bpf_object *, struct bpf_map *);
const char *bpf_map__name(const struct bpf_map *);
int bpf_map__set_pin_path(struct bpf_map *, const char *path);
int libbpf_find_vmlinux_btf_id(const char *name, int attach_type);
void *libbpf_set_print(void *);
int bpf_obj_get(const char *path);
int bpf_map_update_elem(int fd, const void *key, const void *value, uint64_t flags);
int bpf_map_lookup_elem(int fd, const void *key, void *value);
int bpf_map_delete_elem(int fd, const void *key);
int bpf_map_get_next_key(int fd, const void *key, void *next);
""")


@cache
def library() -> Any:
    """Open the library. Raises NotSupportedError."""
    try:
        found: Any = _ffi.dlopen(_LIBRARY)
    except OSError as error:
        raise NotSupportedError(f"{_LIBRARY} is not here; install it (Debian: libbpf1)") from error
    found.libbpf_set_print(_ffi.NULL)  # it would write to our stderr in its own format
    return found


def check(result: int, what: str) -> int:
    """Return the result of a call. Raises OSError for a negative one."""
    if result < 0:
        raise OSError(-result, os.strerror(-result), what)
    return result


def _text(pointer: Any) -> str:
    return os.fsdecode(_ffi.string(pointer))


def _made(pointer: Any, what: str) -> Any:
    if pointer == _ffi.NULL:
        raise OSError(_ffi.errno, os.strerror(_ffi.errno), what)
    return pointer


class Object:
    """A compiled object: opened, loaded into the kernel, attached. Closing it leaves pinned objects in place."""

    def __init__(self, path: Path) -> None:
        self._lib = library()
        self._object = _made(self._lib.bpf_object__open(os.fsencode(path)), str(path))
        self._links: dict[str, Any] = {}

    def _programs(self) -> Iterator[tuple[str, Any]]:
        program = _ffi.NULL
        while (program := self._lib.bpf_object__next_program(self._object, program)) != _ffi.NULL:
            yield _text(self._lib.bpf_program__name(program)), program

    def skip_unknown_hooks(self) -> list[str]:
        """Leave out programs for hooks that this kernel lacks; return the names of the others, in order."""
        kept = []
        for name, program in self._programs():
            hook = _text(self._lib.bpf_program__section_name(program)).partition("/")[2]
            if self._lib.libbpf_find_vmlinux_btf_id(hook.encode(), _BPF_LSM_MAC) < 0:
                self._lib.bpf_program__set_autoload(program, False)
            else:
                kept.append(name)
        return kept

    def pin_maps(self, directory: Path) -> None:
        """Pin the maps when they are loaded, or use those that are pinned already."""
        map_ = _ffi.NULL
        while (map_ := self._lib.bpf_object__next_map(self._object, map_)) != _ffi.NULL:
            name = _text(self._lib.bpf_map__name(map_))
            check(self._lib.bpf_map__set_pin_path(map_, os.fsencode(directory / name)), name)

    def load(self) -> None:
        """Load it into the kernel, which verifies it. Raises OSError."""
        check(self._lib.bpf_object__load(self._object), "the programs, by the kernel")

    def attach(self, name: str, pin: Path) -> None:
        """Attach a program for as long as the pin exists. Raises OSError."""
        program = dict(self._programs())[name]
        self._links[name] = link = _made(self._lib.bpf_program__attach(program), name)
        check(self._lib.bpf_link__pin(link, os.fsencode(pin)), str(pin))

    def close(self) -> None:
        """Close it."""
        for link in self._links.values():
            self._lib.bpf_link__destroy(link)
        self._links.clear()
        self._lib.bpf_object__close(self._object)


@contextmanager
def opened(path: Path) -> Iterator[Object]:
    """Open a compiled object for the block."""
    found = Object(path)
    try:
        yield found
    finally:
        found.close()


class Map:
    """A pinned map with keys and values of fixed lengths."""

    def __init__(self, pin: Path, key_size: int, value_size: int) -> None:
        self._lib = library()
        self._key_size, self._value_size = key_size, value_size
        self.fd = check(self._lib.bpf_obj_get(os.fsencode(pin)), str(pin))

    def get(self, key: bytes) -> bytes | None:
        """Return a key's value, or None."""
        value = _ffi.new("char[]", self._value_size)
        if self._lib.bpf_map_lookup_elem(self.fd, key, value) < 0:
            return None
        return bytes(_ffi.buffer(value))

    def put(self, key: bytes, value: bytes) -> None:
        """Set a key's value. Raises OSError."""
        check(self._lib.bpf_map_update_elem(self.fd, key, value, _BPF_ANY), "BPF map")

    def drop(self, key: bytes) -> None:
        """Remove a key, if it is there."""
        self._lib.bpf_map_delete_elem(self.fd, key)

    def listed(self) -> list[bytes]:
        """List the keys."""
        found: list[bytes] = []
        before: Any = _ffi.NULL
        following = _ffi.new("char[]", self._key_size)
        while self._lib.bpf_map_get_next_key(self.fd, before, following) == 0:
            found.append(bytes(_ffi.buffer(following)))
            before = found[-1]
        return found

    def close(self) -> None:
        """Close it; it stays pinned."""
        os.close(self.fd)
