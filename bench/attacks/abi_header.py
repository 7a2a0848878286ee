"""Write RM's ABI as a C header for the attackers, from its one declaration in ``qgpu/nvidia/abi.py``."""

from __future__ import annotations

from qgpu.guardian.rules import controls
from qgpu.guardian.rules.rows import Why
from qgpu.nvidia import abi


def header() -> str:
    """Return structures, numbers and the list of refused controls as C."""
    typedefs, _, _ = abi.ffi.list_types()
    ordered: list[str] = []
    for name in typedefs:
        if abi.ffi.typeof(name).kind == "struct":
            _after_its_parts(name, ordered)
    lines = ["#include <stdint.h>", *map(_struct, ordered)]
    lines += [
        f"#define {name} {value:#x}u"
        for name, value in vars(abi).items()
        if name.isupper() and not name.startswith("_") and isinstance(value, int)
    ]
    refused = [row for row in controls.ROWS if row.why is Why.SCHEDULING]
    rows = ", ".join(f'{{ {row.number:#x}u, "{row.name}" }}' for row in refused)
    lines.append(f"static const struct {{ uint32_t cmd; const char *name; }} refused_controls[] = {{ {rows} }};")
    return "\n".join(lines) + "\n"


def _after_its_parts(name: str, ordered: list[str]) -> None:
    if name in ordered:
        return
    for _, at in abi.ffi.typeof(name).fields:
        base = at.type.item if at.type.kind == "array" else at.type
        if base.kind == "struct":
            _after_its_parts(base.cname, ordered)
    ordered.append(name)


def _struct(name: str) -> str:
    fields = abi.ffi.typeof(name).fields
    checks = "".join(
        f'_Static_assert(__builtin_offsetof({name}, {field}) == {at.offset}, "{field}");\n' for field, at in fields
    )
    members = " ".join(_member(field, at.type) for field, at in fields)
    return f"typedef struct {{ {members} }} {name};\n{checks}"


def _member(name: str, ctype: object) -> str:
    base, _, length = str(getattr(ctype, "cname")).partition("[")  # noqa: B009 - cffi's types are untyped
    return f"{base} {name}{'[' + length if length else ''};"


if __name__ == "__main__":
    print(header(), end="")
