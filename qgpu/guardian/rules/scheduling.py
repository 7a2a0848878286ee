"""What a pod may ask about its own scheduling, for controls whose arguments decide.

The driver lets any process raise its own timeslice or enable its own channels. Beside other pods that would bypass the
share, so such controls are refused (``refused_controls.py``). GPFIFO_SCHEDULE is allowed: a process needs it to start,
and the channels that it enables stay under the gate.
"""

from __future__ import annotations

from qgpu.nvidia import abi


def gives_up_preemption(flags: int, mode: int) -> bool:
    """Tell whether GR_SET_CTXSW_PREEMPTION_MODE sets compute to a mode other than preemption at any instruction.

    No timeslice and no gate takes the engine from a kernel that cannot be preempted. libcuda asks for the allowed mode.
    """
    return bool(flags & abi.PREEMPTION_MODE_FLAGS_CILP) and mode != abi.PREEMPTION_MODE_COMPUTE_CILP


def ends_turn(wait: int, manual_timeout: int) -> bool:
    """Tell whether PREEMPT takes a TSG off the engine once, and returns when it is off.

    A pod that does that to its own TSG gives a turn away, and gets its next one when it is due. libcuda does it when it
    destroys a context. A preemption that does not wait is undefined when repeated (ctrla06c.h), and a timeout chosen by
    the caller, up to a second, would decide when RM considers the card hung.
    """
    return bool(wait) and not manual_timeout
