"""What a pod may ask about its own scheduling, for controls whose arguments decide.

The driver lets any process raise its own timeslice or enable its own channels. Beside other pods that would bypass the
share, so such controls are refused (``refused_controls.py``). GPFIFO_SCHEDULE is allowed: a process needs it to start,
and the channels that it enables stay under the gate.
"""

from __future__ import annotations

from qgpu.nvidia import abi

#: Engines that a pod's TSGs and channels may be for: GR, COPY, NVDEC and NVENC0 to 2, SEC2, NVJPG, OFA0, COPY10 to 19,
#: OFA1, NVENC3 (SDK/class/cl2080_notification.h). Branches before 560 keep those from COPY10 on reserved. RM runs other
#: engines' channels, such as those of the software engine, on a runlist where the share does not count them.
ENGINES = frozenset({*range(0x01, 0x1E), 0x26, *range(0x2B, 0x40)}) | abi.COPY_ENGINES


def gives_up_preemption(flags: int, mode: int) -> bool:
    """Tell whether GR_SET_CTXSW_PREEMPTION_MODE sets compute to a mode other than preemption at any instruction.

    No timeslice and no gate takes the engine from a kernel that cannot be preempted. libcuda asks for the allowed mode.
    """
    return bool(flags & abi.PREEMPTION_MODE_FLAGS_CILP) and mode != abi.PREEMPTION_MODE_COMPUTE_CILP


def takes_graphics_buffers(flags: int, graphics: int) -> bool:
    """Tell whether GR_SET_CTXSW_PREEMPTION_MODE asks for preemption within a draw.

    RM gives the context buffers for that, which cannot be counted. No compute program asks for it.
    """
    return bool(flags & abi.PREEMPTION_MODE_FLAGS_GFXP) and graphics != abi.PREEMPTION_MODE_GRAPHICS_WFI


def ends_turn(wait: int, manual_timeout: int) -> bool:
    """Tell whether PREEMPT takes a TSG off the engine once, and returns when it is off.

    A pod that does that to its own TSG gives a turn away, and gets its next one when it is due. libcuda does it when it
    destroys a context. A preemption that does not wait is undefined when repeated (ctrla06c.h), and a timeout chosen by
    the caller, up to a second, would decide when RM considers the card hung.
    """
    return bool(wait) and not manual_timeout
