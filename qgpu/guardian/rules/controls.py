"""RM's controls: one row for each control that any process may issue. A control without a row is refused.

``allowed_controls.py`` and ``refused_controls.py`` have the rows. Numbers, names and offsets are those of NVIDIA's open
kernel modules from 535 to 595 (generated/g_*_nvoc.c and SDK/ctrl, recorded in tests/data/rm; embedded_param_copy.c and
rmapi_deprecated_control.c for controls with pointers). A number with another meaning in an older branch has the newer
name.
"""

from __future__ import annotations

from qgpu.guardian.rules import allowed_controls, refused_controls
from qgpu.guardian.rules.allowed_controls import HANDLED
from qgpu.guardian.rules.rows import Why
from qgpu.nvidia import abi

#: All rows, in order of their numbers.
ROWS = tuple(sorted((*allowed_controls.ROWS, *refused_controls.ROWS), key=lambda row: row.number))

#: The rows by number.
CONTROLS = {row.number: row for row in ROWS}

ALLOWED = {row.number: row for row in ROWS if row.why.allowed}

#: Controls for some pods only: those whose grant allows profiling, and those on MIG instances.
ALLOWED_TO_SOME = ALLOWED | {row.number: row for row in ROWS if row.why in {Why.PROFILING, Why.INSTANCE}}

#: Controls with which the guardian does nothing but issue them; they take the fast path (``proxy/fast_path.py``).
PLAIN = frozenset(
    row.number
    for row in ALLOWED.values()
    if not (row.clients or row.pointers or row.descriptor_at is not None or row.module or row.number in HANDLED)
)


def name(number: int) -> str:
    """Return the name under which a control is counted."""
    row = CONTROLS.get(number)
    return row.name if row is not None and row.name else f"control {number:#x}"


def refusal(number: int) -> int:
    """Return a refusal's status: no permission to schedule; any other control the driver seems not to know."""
    row = CONTROLS.get(number)
    scheduling = row is not None and row.why is Why.SCHEDULING
    return abi.NV_ERR_INSUFFICIENT_PERMISSIONS if scheduling else abi.NV_ERR_NOT_SUPPORTED
