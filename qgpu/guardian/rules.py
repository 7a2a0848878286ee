"""What a pod may not ask of RM about its own scheduling, one row a control.

The driver lets any process raise its own timeslice or enable its own channels; beside other pods that would
be a way out of the share. The rows are RM's scheduling controls (SDK/ctrl/ctrla06c.h, ctrla06f, ctrl2080fifo.h,
ctrl0080fifo.h, ctrl83dedebug.h), refused by name; what else a pod may ask is in ``controls.py``. GPFIFO_SCHEDULE is
not among them: a process needs it to start, and what it enables stays under the gate. GR_SET_CTXSW_PREEMPTION_MODE
and PREEMPT are refused by what they say.
"""

from __future__ import annotations

from qgpu.rm import abi

REFUSED = {
    abi.NVA06C_SET_TIMESLICE: "NVA06C SET_TIMESLICE",
    0xA06C0107: "NVA06C SET_INTERLEAVE_LEVEL",
    0xA06C0110: "NVA06C MAKE_REALTIME",
    0xA06F0109: "NVA06F SET_INTERLEAVE_LEVEL",
    0xA06F0111: "NVA06F RESTART_RUNLIST",
    abi.NV2080_FIFO_DISABLE_CHANNELS: "NV2080 FIFO_DISABLE_CHANNELS",
    0x20801110: "NV2080 FIFO_CONFIG_CTXSW_TIMEOUT",
    0x20801115: "NV2080 FIFO_RUNLIST_SET_SCHED_POLICY",
    0x20801117: "NV2080 FIFO_DISABLE_USERMODE_CHANNELS",
    0x2080111A: "NV2080 FIFO_DISABLE_CHANNELS_FOR_KEY_ROTATION",
    0x2080111B: "NV2080 FIFO_DISABLE_CHANNELS_FOR_KEY_ROTATION_V2",
    0x20801120: "NV2080 FIFO_OBJSCHED_GET_STATE",
    0x20801121: "NV2080 FIFO_OBJSCHED_SET_STATE",
    0x20801211: "NV2080 GR_CTXSW_PREEMPTION_BIND",
    0x20800194: "NV2080 GPU_SET_COMPUTE_POLICY_CONFIG",
    0x0080170F: "NV0080 FIFO_SET_CHANNEL_PROPERTIES",
    0x00801711: "NV0080 FIFO_STOP_RUNLIST",
    0x00801712: "NV0080 FIFO_START_RUNLIST",
    0x00801714: "NV0080 FIFO_IDLE_CHANNELS",
    0x00000283: "NV0000 GPU_IDLE_CHANNELS",
    0x2080012C: "NV2080 GPU_EVICT_CTX",
    0x83DE0317: "NV83DE DEBUG_SUSPEND_CONTEXT",
    0x83DE0318: "NV83DE DEBUG_RESUME_CONTEXT",
}

#: How it is counted that compute would run to its end before anybody else gets a turn.
NO_PREEMPTION = "NV2080 GR_SET_CTXSW_PREEMPTION_MODE"


def gives_up_preemption(flags: int, mode: int) -> bool:
    """Tell whether GR_SET_CTXSW_PREEMPTION_MODE sets compute to anything but preemption at any instruction.

    No timeslice and no gate takes the engine from a kernel that cannot be preempted. libcuda asks for what is allowed.
    """
    return bool(flags & abi.PREEMPTION_MODE_FLAGS_CILP) and mode != abi.PREEMPTION_MODE_COMPUTE_CILP


#: How it is counted that a TSG was to be preempted which is not the pod's, or otherwise than ``ends_turn`` says.
PREEMPT = "NVA06C PREEMPT"


def ends_turn(wait: int, manual_timeout: int) -> bool:
    """Tell whether PREEMPT takes a TSG off the engine once, and comes back when it is off.

    A pod that does that to its own gives a turn away, and has the next one when it is due. libcuda does it when a
    context is destroyed. What does not wait is undefined when repeated (ctrla06c.h), and a timeout of the caller's own,
    up to a second, would say when RM takes the card for stuck.
    """
    return bool(wait) and not manual_timeout
