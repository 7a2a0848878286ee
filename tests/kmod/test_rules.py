"""The module's table of rules is the guardian's: the header that is checked in, and what C finds in it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from qgpu.guardian.accounting import memory_quota
from qgpu.guardian.proxy import alloc_checks, client_registry, dma_mappings, untracked_objects
from qgpu.guardian.rules import classes, controls, escapes, kernel_header, scheduling
from qgpu.guardian.rules.rows import InModule, Why
from qgpu.nvidia import abi
from tests import rm_data

KMOD = Path(__file__).resolve().parents[2] / "kmod"
CC = shutil.which("cc") or shutil.which("gcc")
#: What rule_lookup.c and nvrm.h need of the kernel.
SHIM = {
    "types.h": "#include <stdint.h>\n#include <stddef.h>\ntypedef uint8_t u8;\ntypedef uint32_t u32;\n"
    "typedef int16_t s16;\ntypedef uint16_t u16;\ntypedef int32_t s32;\ntypedef uint64_t u64;\n"
    "#include <stdbool.h>\n",
    "build_bug.h": "#include <assert.h>\n",
    "kernel.h": "#define ARRAY_SIZE(array) (sizeof(array) / sizeof(*(array)))\n",
    "bsearch.h": "#include <stdlib.h>\n",
}
#: It reads numbers, and says of each what becomes of it as a control, an engine, a class and an escape.
PROGRAM = """
#include <stdio.h>
#include "rule_lookup.h"

int main(void)
{
	unsigned int number;

	while (scanf("%u", &number) == 1) {
		const struct qgpu_control_rule *control = qgpu_control_rule(number);
		const struct qgpu_class_rule *class = qgpu_class_rule(number);

		printf("%d ", control ? (int)control->action : -1);
		printf("%d %d ", control ? control->clients : 0, control ? control->clients_size : 0);
		printf("%d %d ", control ? control->memory_at : 0, qgpu_engine_allowed(number));
		printf("%d %d ", class ? class->flags : 0, class ? class->clients : 0);
		printf("%d\\n", qgpu_escape_refusal(number));
	}
	return 0;
}
"""
#: It names each engine type up to 255 that the module takes for compute, or for copies.
ENGINES_PROGRAM = """
#include <stdio.h>
#include "nvrm.h"

int main(void)
{
	unsigned int engine;

	for (engine = 0; engine < 256; engine++) {
		if (NV_IS_COMPUTE(engine))
			printf("compute %u\\n", engine);
		if (NV_IS_COPY(engine))
			printf("copy %u\\n", engine);
	}
	return 0;
}
"""
RECORDED = sorted(
    {each.number for driver in rm_data.DRIVERS for read in (rm_data.controls, rm_data.classes) for each in read(driver)}
)
TABLED = {*controls.CONTROLS, *classes.CLASSES, *(row.number for row in escapes.ROWS)}
#: And their neighbours, which mostly have no row.
ASKED = sorted(
    {
        *range(256),
        *RECORDED,
        *TABLED,
        *(number + 1 for number in TABLED),
        *(number ^ 0x8000 for number in TABLED),
        2**32 - 1,
    }
)


def _enumerators(name: str) -> dict[str, int]:
    """Read an enum of rule_lookup.h."""
    body = re.search(rf"enum {name} \{{(.*?)\}};", (KMOD / "rule_lookup.h").read_text(), re.DOTALL)
    return {word: at for at, word in enumerate(re.findall(r"^\t(QGPU_\w+),", body[1], re.MULTILINE))}


def _defines() -> dict[str, int]:
    text = (KMOD / "rule_lookup.h").read_text()
    return {
        name: int(value, 16) for name, value in re.findall(r"^#define (QGPU_\w+)\s+(0x[0-9a-f]+)", text, re.MULTILINE)
    }


def _run(folder: Path, program: str, *sources: Path, asked: str = "") -> list[str]:
    """Compile a program with sources of the module, and return the lines that it prints."""
    if CC is None:
        pytest.skip("no C compiler")
    (folder / "linux").mkdir()
    for name, text in SHIM.items():
        (folder / "linux" / name).write_text(text)
    (folder / "main.c").write_text(program)
    flags = ["-std=gnu11", "-Wall", "-Wextra", "-Wno-missing-field-initializers", "-Werror", f"-I{folder}", f"-I{KMOD}"]
    of = [str(folder / "main.c"), *map(str, sources)]
    subprocess.run([str(CC), *flags, "-o", str(folder / "main"), *of], check=True)
    return subprocess.run(
        [str(folder / "main")], input=asked, check=True, capture_output=True, text=True
    ).stdout.splitlines()


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> dict[int, list[int]]:
    """What the module's own lookup says of each number."""
    asked = "\n".join(map(str, ASKED))
    lines = _run(tmp_path_factory.mktemp("rules"), PROGRAM, KMOD / "rule_lookup.c", asked=asked)
    return {number: [int(word) for word in line.split()] for number, line in zip(ASKED, lines, strict=True)}


def test_the_header_checked_in_is_what_the_tables_say():
    """Otherwise: python -m qgpu.guardian.rules.kernel_header --write."""
    assert (KMOD / "rules.h").read_text() == kernel_header.header()


def test_module_and_guardian_refuse_the_same_controls(said):
    actions = _enumerators("qgpu_control_action")
    for number, (action, *_) in said.items():
        if action in (-1, actions["QGPU_CONTROL_SCHEDULES"]):
            status = abi.NV_ERR_NOT_SUPPORTED if action == -1 else abi.NV_ERR_INSUFFICIENT_PERMISSIONS
            assert number not in controls.ALLOWED, hex(number)
            assert controls.refusal(number) == status, hex(number)
        else:
            answered = controls.CONTROLS[number].module is InModule.TIMESLICE
            assert number in controls.ALLOWED or answered, hex(number)


def test_module_and_guardian_refuse_the_same_classes(said):
    flags = _defines()
    for number, (*_, flag, _clients, _escape) in said.items():
        row = classes.CLASSES.get(number)
        allowed = number in classes.ALLOWED or number in abi.ROOT_CLASSES
        assert bool(flag & flags["QGPU_BY_ALLOC"]) is allowed, hex(number)
        assert bool(flag & flags["QGPU_BY_ALLOC_MEMORY"]) is bool(row and row.by_alloc_memory), hex(number)
        assert bool(flag & flags["QGPU_ON_COMPUTE_ENGINE"]) is classes.on_compute_engine(number), hex(number)


def test_module_and_guardian_refuse_the_same_escapes(said):
    refusals = _enumerators("qgpu_escape_refusal")
    rows = {row.number: row for row in escapes.ROWS}
    for number, (*_, refusal) in said.items():
        row = rows.get(number)
        expected = (row.in_module or row.refused) if row else None
        assert refusal == refusals[f"QGPU_REFUSED_{expected.name}" if expected else "QGPU_NOT_REFUSED"], hex(number)


def test_module_and_guardian_refuse_the_same_engines(said):
    allowed = {number for number, (_, _, _, _, engine, *_) in said.items() if engine}

    assert allowed == {0, *scheduling.ENGINES}


def test_module_and_guardian_know_the_same_copy_engines(tmp_path):
    lines = _run(tmp_path, ENGINES_PROGRAM)
    found = {kind: {int(line.split()[1]) for line in lines if line.startswith(kind)} for kind in ("compute", "copy")}

    assert found == {"compute": set(abi.GR_ENGINES), "copy": set(abi.COPY_ENGINES)}


def test_module_and_guardian_bound_the_same_objects():
    """The guardian counts shared pages among others, too."""
    text = (KMOD / "untracked_object.c").read_text()
    rows = re.findall(r"\[QGPU_UNTRACKED_(\w+)\] = \{ 1 << (\d+), 1 << (\d+) \}", text)
    most = {kind: (1 << int(of_client), 1 << int(of_pod)) for kind, of_client, of_pod in rows}
    system, other = ((untracked_objects._MOST[key], untracked_objects._MOST_OF_POD[key]) for key in (True, False))

    assert most == {
        "OTHER": other,
        "SYSTEM": system,
        "DEBUGGER": (client_registry._MOST_DEBUGGERS,) * 2,
        "PAGE": (alloc_checks._MOST_PAGES, other[1]),
        "MAPPING": (1 << 15, 1 << 16),
        "DMA_MAPPING": (dma_mappings._MOST, dma_mappings._MOST_OF_POD),
    }


def test_module_and_guardian_bound_devices_alike():
    text = (KMOD / "object.c").read_text()
    found = {name: int(value) for name, value in re.findall(r"^#define (\w*DEVICES_MAX\w*)\s+(\d+)$", text, re.M)}

    assert {True: found["DEVICES_MAX_LIMITED"], False: found["DEVICES_MAX"]} == alloc_checks._MOST_DEVICES
    assert found["SUBDEVICES_MAX"] == alloc_checks._MOST_SUBDEVICES


@pytest.mark.parametrize(
    ("file", "name", "most"),
    [
        ("export.c", "EXPORTS_MAX", memory_quota._MOST_CARRIED),
        ("client.c", "CLIENTS_MAX", client_registry._MOST_CLIENTS),
    ],
)
def test_module_and_guardian_have_the_same_bound(file, name, most):
    found = re.search(rf"^#define {name} \(1 << (\d+)\)$", (KMOD / file).read_text(), re.M)

    assert 1 << int(found[1]) == most


def test_module_and_guardian_know_the_same_system_memory():
    text = (KMOD / "untracked_object.c").read_text()
    cases = re.search(r"((?:\tcase \w+:\n)+)\t\treturn QGPU_UNTRACKED_SYSTEM;", text)[1]

    assert {getattr(abi, name) for name in re.findall(r"case (\w+):", cases)} == untracked_objects._SYSTEM_MEMORY


def test_module_reads_mappings_for_the_card_where_rm_does():
    text = (KMOD / "nvrm.h").read_text()
    values = {name: int(value) for name, value in re.findall(r"^#define (NVOS4[67]_\w+)\s+(\d+)$", text, re.M)}

    for size, struct in abi.MAP_MEMORY_DMA.items():
        assert size - abi.offsetof(struct, "dmaOffset") == values["NVOS46_DMA_OFFSET_BEFORE_END"]
        assert size - abi.offsetof(struct, "status") == values["NVOS46_STATUS_BEFORE_END"]
    for size, struct in abi.UNMAP_MEMORY_DMA.items():
        assert size - abi.offsetof(struct, "status") == values["NVOS47_STATUS_BEFORE_END"]
    assert min(abi.UNMAP_MEMORY_DMA) == values["NVOS47_BYTES_BEFORE_550"]


@pytest.mark.parametrize(
    ("name", "params", "members"),
    [
        ("TSG", "NV_CHANNEL_GROUP_ALLOCATION_PARAMETERS", {"hObjectError", "hObjectEccError"}),
        ("CHANNEL", "NV_CHANNEL_ALLOC_PARAMS", {"hObjectError", "hObjectEccError", "hUserdMemory"}),
    ],
)
def test_module_reads_what_memory_is_written_where_rm_does(name, params, members):
    text = (KMOD / "nvrm.h").read_text()
    places = {int(at) for at in re.search(rf"NV_{name}_PARAMS_WRITTEN_AT\s+{{([\d, ]+)}}", text)[1].split(",")}
    looked_at = int(re.search(r"NV_PARAMS_LOOKED_AT\s+(\d+)", text)[1])

    assert places == {abi.offsetof(params, member) for member in members}
    assert max(places) + 4 <= looked_at


def test_module_reads_userd_where_rm_does():
    text = (KMOD / "nvrm.h").read_text()
    places = [int(re.search(rf"NV_CHANNEL_PARAMS_USERD_{name}\s+(\d+)", text)[1]) for name in ("AT", "OFFSET_AT")]

    assert places == [abi.offsetof("NV_CHANNEL_ALLOC_PARAMS", member) for member in ("hUserdMemory", "userdOffset")]


def _words(places):
    return sum(1 << place.at // 4 for place in places)


def test_module_and_guardian_look_for_the_same_clients(said):
    for number, (_, clients, size, _, _, _, of_class, _) in said.items():
        control, rm_class = controls.ALLOWED.get(number), classes.ALLOWED.get(number)
        assert clients == (_words(control.clients) if control else 0), hex(number)
        assert [size] == [place.size or 0 for place in control.clients] if clients else size == 0, hex(number)
        assert of_class == (_words(rm_class.clients) if rm_class else 0), hex(number)


def test_the_memory_of_an_export_is_a_handle_that_the_row_knows(said):
    for number, (action, _, _, at, *_) in said.items():
        if at:
            assert action == _enumerators("qgpu_control_action")["QGPU_CONTROL_EXPORT"]
            assert at in {place.at for place in controls.ALLOWED[number].handles}, hex(number)


def test_a_class_that_holds_memory_names_an_action():
    for row in classes.ROWS:
        if row.holds_memory_at is not None:
            assert row.module is InModule.FURTHER_HANDLE, row.name


def test_every_action_of_the_module_is_some_rows():
    used = {row.module for row in controls.ROWS} & kernel_header.ACTIONS
    names = {f"QGPU_CONTROL_{action.name}" for action in used} | {"QGPU_CONTROL_PASS", "QGPU_CONTROL_SCHEDULES"}

    assert used == kernel_header.ACTIONS
    assert names == _enumerators("qgpu_control_action").keys()


def test_what_one_plane_alone_lets_a_pod_do_is_declared():
    """A timeslice of its own, which the module notes each time and the guardian once."""
    only = [row.number for row in controls.ROWS if not row.why.allowed and row.module not in (None, InModule.FIRMWARE)]

    assert only == [abi.NVA06C_SET_TIMESLICE]
    assert controls.CONTROLS[only[0]].why is Why.SCHEDULING


def test_numbers_of_the_modules_own_header_are_those_of_the_abi():
    """Both planes type RM's numbers; where they type the same name it is the same number."""
    text = (KMOD / "nvrm.h").read_text()
    defined = re.findall(r"^#define ((?:NV|RS_)\w+)\s+(0x[0-9a-f]+|\d+)(?:\s+/\*.*)?$", text, re.M)
    typed = {name: int(value, 0) for name, value in defined}
    same = {name: value for name, value in typed.items() if isinstance(getattr(abi, name, None), int)}

    assert len(same) > 30
    assert "RS_SHARE_TYPE_CLIENT" in same
    assert {name: hex(value) for name, value in same.items() if getattr(abi, name) != value} == {}


def test_controls_that_the_module_names_have_the_rows_number():
    text = (KMOD / "nvrm.h").read_text()
    rows = {row.name.replace("_CTRL_CMD_", "_").replace("_CTRL_", "_"): row.number for row in controls.ROWS if row.name}
    typed = {name: int(value, 16) for name, value in re.findall(r"^#define (NV\w+)\s+(0x[0-9a-f]+)$", text, re.M)}
    named = typed.keys() & rows.keys()

    assert len(named) > 12
    assert {name: hex(typed[name]) for name in named if typed[name] != rows[name]} == {}
