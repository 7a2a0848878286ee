"""Writes the tables as the C header that the kernel module reads: ``python -m qgpu.guardian.rules.kernel_header``.

The header is checked in as kmod/rules.h; tests/kmod/test_rules.py fails if the two differ. The module, like the
guardian, refuses what has no row. The command needs no build, only the tables.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from qgpu.guardian.rules import classes, controls, escapes, scheduling
from qgpu.guardian.rules.rows import Control, Handle, InModule, Why
from qgpu.nvidia import abi

HEADER = Path(__file__).resolve().parents[3] / "kmod" / "rules.h"

_OPENING = """\
/* SPDX-License-Identifier: GPL-2.0 */
/*
 * rules.h - the rules for a pod's RM calls: controls, classes and escapes, in order of their numbers. What has no row
 * is refused. Written by "python -m qgpu.guardian.rules.kernel_header" from qgpu/guardian/rules, where each row has its
 * reason; do not edit. Only rule_lookup.c reads it, and rule_lookup.h explains the members.
 */
#ifndef _QGPU_RULES_H
#define _QGPU_RULES_H

#include "rule_lookup.h"
"""
#: Actions on controls that the module has code for; two other values of InModule say why it needs none, two are of
#: classes.
ACTIONS = set(InModule) - {
    *(InModule.SAMPLES_BY_NAMESPACE, InModule.GPUS_BY_NODES),
    *(InModule.FURTHER_HANDLE, InModule.HOLDS_MEMORY),
}
_WORD = 4
_MOST_COLUMNS = 120


def header() -> str:
    """Return the whole header."""
    return "\n".join(
        [
            _OPENING,
            "static const struct qgpu_control_rule control_rules[] = {",
            *filter(None, map(_control, sorted(controls.ROWS))),
            "};\n",
            "static const struct qgpu_class_rule class_rules[] = {",
            *filter(None, map(_class, sorted(classes.ROWS))),
            "};\n",
            "static const struct qgpu_escape_rule escape_rules[] = {",
            *filter(None, map(_escape, sorted(escapes.ROWS, key=lambda row: row.number))),
            "};\n",
            "/* A bit for each engine that programs use, and for 0, which names none. */",
            f"static const u32 engine_bits[] = {{ {', '.join(_engines())} }};\n",
            "#endif /* _QGPU_RULES_H */\n",
        ]
    )


def action(row: Control) -> str | None:
    """Return what the module does with a control; None if it refuses the control as unknown."""
    if row.why is Why.PROFILING:
        return None
    if row.module in ACTIONS:
        return f"QGPU_CONTROL_{row.module.name}"
    if row.why.allowed:
        return "QGPU_CONTROL_PASS"
    return "QGPU_CONTROL_SCHEDULES" if row.why is Why.SCHEDULING else None


def _control(row: Control) -> str | None:
    act = action(row)
    if act is None:
        return None
    members = [f"0x{row.number:08x}", act]
    if row.module is InModule.EXPORT and row.handles[-1].number == 1:
        members.append(f".memory_at = {row.handles[-1].at}")
    members += _clients(row.clients)
    members += [f".clients_size = {place.size}" for place in row.clients if place.size is not None]
    return _row(members, row.name or "for firmware")


def _class(row: classes.Class) -> str | None:
    flags = {
        "QGPU_BY_ALLOC": row.why.allowed or row.number in abi.ROOT_CLASSES,
        "QGPU_BY_ALLOC_MEMORY": row.by_alloc_memory,
        "QGPU_ON_COMPUTE_ENGINE": row.on_compute_engine,
        "QGPU_HOLDS_MEMORY": row.module is InModule.HOLDS_MEMORY,
    }
    said = [flag for flag, holds in flags.items() if holds]
    members = [f"0x{row.number:04x}", " | ".join(said), *_clients(row.clients)]
    if row.module is InModule.FURTHER_HANDLE:
        members.append(f".memory_at = {row.holds_memory_at}")
    return _row(members, row.name) if said else None


def _escape(row: escapes.Escape) -> str | None:
    refused = row.in_module or row.refused
    return _row([f"0x{row.number:02x}", f"QGPU_REFUSED_{refused.name}"], row.name) if refused is not None else None


def _engines() -> list[str]:
    """Encode the engines as words of a bitmap."""
    bits = sum(1 << engine for engine in {0, *scheduling.ENGINES})
    return [f"0x{bits >> at & 0xFFFFFFFF:08x}" for at in range(0, bits.bit_length(), 32)]


def _clients(places: Iterable[Handle]) -> list[str]:
    """Encode which 32-bit words of the parameters are client handles, one bit each."""
    words = 0
    for place in places:
        assert place.number == 1, "the module knows single handles only"
        assert place.at % _WORD == 0, "the module knows whole words only"
        words |= 1 << place.at // _WORD
    return [f".clients = {words:#x}"] if words else []


def _row(members: list[str], name: str) -> str:
    row = f"\t{{ {', '.join(members)} }}, /* {name} */"
    return row if len(row.expandtabs()) <= _MOST_COLUMNS else f"\t/* {name} */\n\t{{ {', '.join(members)} }},"


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        HEADER.write_text(header())
    else:
        sys.stdout.write(header())
