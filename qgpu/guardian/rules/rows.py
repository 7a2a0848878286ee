"""What a row of the tables says: why something is allowed or refused, and what lies in its parameters."""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_U32 = struct.Struct("<I")


class Why(enum.Enum):
    """Why a pod may ask for something, or may not."""

    #: Allowed. Recorded from programs (tests/data/traces).
    SEEN = "programs ask for it"
    #: Allowed. Known of NVIDIA's libraries and tools: recorded otherwise, or on the list of gVisor's nvproxy.
    LIBRARY = "NVIDIA's libraries ask for it"
    #: Allowed. Reads the card or the pod's own objects; changes nothing and tells nothing of other pods.
    GETTER = "it only reads"

    #: Not by the guardian: RM ties it to the process that asks, so the kernel carries the call out.
    KERNEL = "only the process itself can ask for it"
    SCHEDULING = "it schedules"
    MEMORY = "it reaches memory or page tables that the pod has no handle of"
    OTHERS = "it names or tells of other processes' objects"
    INTERNAL = "it is RM's own"
    VGPU = "it is for hosts of virtual machines"
    DISPLAY = "it is for displays"
    ACTS = "it changes something, and no program was seen to ask for it"
    UNUSED = "no program was seen to ask for it"

    @property
    def allowed(self) -> bool:
        """Tell whether what has this reason is allowed."""
        return self in _ALLOWED


_ALLOWED = {Why.SEEN, Why.LIBRARY, Why.GETTER}


class InModule(enum.Enum):
    """What the kernel module does with a row besides passing it to RM, or why it does nothing where the guardian does.

    The module works inside the pod's own call. RM reads the process's pointers and descriptors itself, so rows whose
    only extra is one of those have nothing here. Clients in parameters are checked by both.
    """

    TIMESLICE = "notes the wish and answers OK each time: libcuda takes no refusal, and the plan sets the timeslice"
    PREEMPTION_MODE = "refuses the modes that the guardian refuses"
    PREEMPT = "refuses what the guardian refuses, and the gate penalty takes the place of the guardian's rest"
    START_CHANNELS = "closes the gate again, if it is closed, before the call returns"
    FB_INFO = "shows the pod its own memory limit"
    EXPORT = "charges the memory at handle_at, or all of the client's, until the pod has no file left"
    IMPORT = "charges what arrives, once if the pod itself exported it"
    FIRMWARE = "refuses a client that is not the pod's, because RM does not check it"
    PIDS_BY_NAMESPACE = "does nothing: RM leaves out processes outside the pid namespace of the one that asks"
    SAMPLES_BY_NAMESPACE = "does nothing: RM hides the pids of others by namespace, and their utilization stays visible"
    GPUS_BY_NODES = "does nothing: RM names every GPU, and a pod opens those whose device nodes it has"
    HOLDS_MEMORY = "charges all memory of the client until the pod has no file left: RM keeps what is named"


class Of(enum.Enum):
    """Where RM looks a handle up."""

    #: In the client of the call, which has to be one of the file's that the call is made on: RM checks that.
    CALLER = enum.auto()
    #: In the client that another field of the parameters names.
    NAMED = enum.auto()
    #: In firmware, which gets the call with its client; the source says no more.
    FIRMWARE = enum.auto()
    #: Among the events of the call's client, by the number of a descriptor (os.c:osUserHandleToKernelPtr).
    EVENT = enum.auto()
    #: Nowhere: RM writes it.
    ANSWER = enum.auto()


class At(NamedTuple):
    """Where handles lie in parameters: ``many`` of them, ``stride`` bytes apart.

    With a ``size``, only in parameters of so many bytes: branches differ, and RM takes no other size than its own.
    """

    at: int
    many: int = 1
    stride: int = 4
    of: Of = Of.CALLER
    size: int | None = None


class Pointer(NamedTuple):
    """A pointer in parameters: where it lies, and how long what it points to is.

    That is ``unit`` bytes times the count at ``count_at``, or ``unit`` alone where there is no count.
    """

    at: int
    unit: int
    count_at: int | None = 0


def handles(places: Iterable[At], params: bytes | bytearray) -> Iterator[int]:
    """Read the handles at some places of parameters, as far as these reach."""
    for at, many, stride, _, size in places:
        if size is None or size == len(params):
            for place in range(at, min(at + many * stride, len(params) - 3), stride):
                yield _U32.unpack_from(params, place)[0]
