"""What a pod may say of its own scheduling, where a control is allowed for some of what it says.

The driver lets any process raise its own timeslice or enable its own channels; beside other pods that would be a way
out of the share, so such controls are refused (``controls.py``). GPFIFO_SCHEDULE is not among them: a process needs it
to start, and what it enables stays under the gate.
"""

from __future__ import annotations

from qgpu.nvidia import abi


def gives_up_preemption(flags: int, mode: int) -> bool:
    """Tell whether GR_SET_CTXSW_PREEMPTION_MODE sets compute to anything but preemption at any instruction.

    No timeslice and no gate takes the engine from a kernel that cannot be preempted. libcuda asks for what is allowed.
    """
    return bool(flags & abi.PREEMPTION_MODE_FLAGS_CILP) and mode != abi.PREEMPTION_MODE_COMPUTE_CILP


def ends_turn(wait: int, manual_timeout: int) -> bool:
    """Tell whether PREEMPT takes a TSG off the engine once, and comes back when it is off.

    A pod that does that to its own gives a turn away, and has the next one when it is due. libcuda does it when a
    context is destroyed. What does not wait is undefined when repeated (ctrla06c.h), and a timeout of the caller's own,
    up to a second, would say when RM takes the card for stuck.
    """
    return bool(wait) and not manual_timeout
