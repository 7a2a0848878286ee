"""Write tests/data/rm for one driver: python tests/record_rm.py SOURCE VERSION, with gcc and gdb.

SOURCE is NVIDIA's open-gpu-kernel-modules at the tag VERSION. What any process may ask is in the generated tables of
methods and in the list of classes; where handles and pointers lie, gdb reads from compiled headers. ``rm_data.py`` says
what a line means.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

try:
    import gdb
except ImportError:
    gdb = None

DATA = Path(__file__).parent / "data" / "rm"
SDK = "src/common/sdk/nvidia/inc"
_METHOD = re.compile(
    r"/\*flags=\*/\s+(0x[0-9a-f]+)u?,\s*/\*accessRight=\*/\s*0x[0-9a-f]+u?,\s*/\*methodId=\*/\s+(0x[0-9a-f]+)u?,\s*"
    r"/\*paramSize=\*/\s+([^\n]*),\s*/\*pClassInfo=\*/[^\n]*\s*#if NV_PRINTF_STRINGS_ALLOWED\s*/\*func=\*/\s+\"(\w+)\""
)
_DEFINE = re.compile(r"^\s*#define\s+(\w+)\s+\(?(0x[0-9a-fA-F]+)[Uu]?\)?", re.MULTILINE)
#: Constants of controls that have the number of one, and are none.
_NO_CONTROL = re.compile(
    r"_(DEPRECATED|MAX|SIZE|VERSION_ID)$|_SYSTEM_(GPS|PFM_REQ_HNDLR)_(SYS|DATA)_|_PUSH_UCODE|_MESSAGE_ID$|_PARAMS_ID$"
)
#: Controls that no header names.
_UNNAMED = {
    0x20800145: "NV2080_CTRL_CMD_GPU_ACQUIRE_COMPUTE_MODE_RESERVATION",
    0x20800146: "NV2080_CTRL_CMD_GPU_RELEASE_COMPUTE_MODE_RESERVATION",
}


def methods(source):
    """List what any process may issue: number, type of its parameters, name of its function."""
    header = next(source.rglob("inc/kernel/rmapi/control.h")).read_text()
    flag = {
        name: int(value, 16) for name, value in re.findall(r"#define RMCTRL_FLAGS_(\w+)\s+(0x[0-9a-fA-F]+)", header)
    }
    for path in sorted((source / "src/nvidia/generated").glob("g_*_nvoc.c")):
        for flags, number, size, function in _METHOD.findall(path.read_text()):
            if int(flags, 16) & flag["NON_PRIVILEGED"] and not int(flags, 16) & flag["INTERNAL"]:
                of = re.match(r"sizeof\((\w+)\)", size)
                yield int(number, 16), of[1] if of else None, function


def control_names(source):
    """Return the names of controls by number, likeliest first."""
    found = {}
    for path in sorted((source / SDK / "ctrl").rglob("*.h")):
        for name, value in _DEFINE.findall(path.read_text()):
            if "_CTRL_" in name:
                found.setdefault(int(value, 16), []).append(name)

    def rank(number, name):
        return not name.startswith(f"NV{number >> 16:04X}"), bool(_NO_CONTROL.search(name)), "_CMD_" not in name

    return {number: sorted(names, key=lambda name: rank(number, name)) for number, names in found.items()}


def classes(source):
    """List classes without a privilege: number, type of the parameters, name."""
    headers = [*(source / SDK / "class").glob("*.h"), source / "src/nvidia/generated/g_allclasses.h"]
    numbers = {name: int(value, 16) for path in headers for name, value in _DEFINE.findall(path.read_text())}
    text = (source / "src/nvidia/src/kernel/rmapi/resource_list.h").read_text()
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)
    for entry in re.findall(r"RS_ENTRY\((.*?)\n\)", text, re.DOTALL):
        name = entry.split(",")[0].strip()
        of = re.search(r"RS_(?:OPTIONAL|REQUIRED)\((\w+)\)", entry)
        if name in numbers and not re.search(r"RS_FLAGS_ALLOC_(KERNEL_)?PRIVILEGED", entry):
            yield numbers[name], of[1] if of else None, name


def layouts(source, types):
    """Return by type its size and its fields: (offset, path, type, bytes)."""
    include = source / SDK
    lines = ['#include "nvtypes.h"', '#include "nvmisc.h"', '#include "nvos.h"']
    headers = [
        path for pattern in ("ctrl/**/*.h", "class/cl*.h", "alloc/*.h") for path in sorted(include.glob(pattern))
    ]
    lines += [f'#include "{path.relative_to(include)}"' for path in headers]
    lines += [f"{name} v{i};" for i, name in enumerate(sorted(types))]
    with tempfile.TemporaryDirectory() as folder:
        unit, out = Path(folder, "all.c"), Path(folder, "out.json")
        unit.write_text("\n".join(lines))
        places = [include, *(source / "src/nvidia" / part for part in ("inc", "interface", "inc/kernel"))]
        flags = [f"-I{place}" for place in places]
        subprocess.run(["gcc", "-g", "-w", "-c", "-DNV_64_BITS", *flags, unit, "-o", f"{unit}.o"], check=True)
        ask = f"python import sys; sys.argv = ['', {str(out)!r}, *{sorted(types)!r}]"
        subprocess.run(["gdb", "-q", "-batch", "-ex", ask, "-x", __file__, f"{unit}.o"], check=True)
        return json.loads(out.read_text())


def _walk(of, base, path, out):
    plain = of.strip_typedefs()
    if plain.code in (gdb.TYPE_CODE_STRUCT, gdb.TYPE_CODE_UNION):
        for field in plain.fields():
            _walk(field.type, base + field.bitpos // 8, f"{path}.{field.name or ''}", out)
    elif plain.code == gdb.TYPE_CODE_ARRAY:
        inner = plain.target()
        _walk(inner, base, f"{path}[{plain.range()[1] + 1}*{inner.sizeof}]", out)
    else:
        out.append((base, path, str(of), plain.sizeof))


def _in_gdb():
    found = {}
    for name in sys.argv[2:]:
        fields = []
        of = gdb.lookup_type(name)
        _walk(of, 0, "", fields)
        found[name] = (of.sizeof, fields)
    Path(sys.argv[1]).write_text(json.dumps(found))


def _columns(fields):
    handles, pointers = [], []
    for at, path, of, size in fields:
        name = re.sub(r"\[[^]]*\]", "", path).rpartition(".")[2] or "handle"
        many = re.search(r"\[(\d+)\*(\d+)\]", path)
        place = f"{name}@{at}" + (f"+{many[1]}*{many[2]}" if many else "")
        if of == "NvHandle":
            handles.append(place)
        elif of == "NvP64" or "*" in of or (size == 8 and re.match(r"p[A-Z]", name)):
            pointers.append("*" + place)
    return handles + pointers


def main():
    source, version = Path(sys.argv[1]), sys.argv[2]
    names = control_names(source)
    asked = {
        number: (of, _UNNAMED.get(number) or names.get(number, [function])[0])
        for number, of, function in methods(source)
    }
    made = {number: (of, name) for number, of, name in classes(source)}
    known = layouts(source, {of for of, _ in [*asked.values(), *made.values()] if of})
    for kind, table, width in (("controls", asked, 10), ("classes", made, 6)):
        lines = []
        for number, (of, name) in sorted(table.items()):
            size, fields = known[of] if of else (0, [])
            lines.append(" ".join([f"{number:#0{width}x}", str(size), name, *_columns(fields)]))
        (DATA / f"{kind}-{version}.txt").write_text("\n".join(lines) + "\n")


if gdb is not None:
    _in_gdb()
elif __name__ == "__main__":
    main()
