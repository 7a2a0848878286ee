"""The vocabulary of a row: why a call is allowed or refused, and what its parameters hold."""

from __future__ import annotations

import enum
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from heapq import merge
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

_U32 = struct.Struct("<I")
_Row = TypeVar("_Row", bound=tuple[Any, ...])


class Why(enum.Enum):
    """Why a call is allowed or refused."""

    #: Allowed. Recorded from programs (tests/data/traces and calls).
    SEEN = "programs ask for it"
    #: Allowed. NVIDIA's libraries and tools use it: recorded elsewhere, or on the list of gVisor's nvproxy.
    LIBRARY = "NVIDIA's libraries ask for it"
    #: Allowed. Reads the card or the pod's own objects; changes nothing and reveals nothing about other pods.
    GETTER = "it only reads"

    #: Allowed to pods whose grant allows profiling: it reads counters of the whole card, or serves such a reader.
    PROFILING = "only pods with --allow-profiling may use it"
    #: Allowed to pods whose grant allows graphics: a draw runs to its end, whatever timeslice or gate it outlasts.
    GRAPHICS = "only pods with --allow-graphics may use it"
    #: Allowed to pods on a MIG instance: it reads the instance to which the pod has subscribed. NVIDIA's libraries find
    #: theirs so (src/common/src/nv_smg.c).
    INSTANCE = "only pods on a MIG instance have use for it"

    #: The guardian cannot issue it: RM ties it to the calling process, so the kernel continues the call in the pod.
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
        """Tell whether a call with this reason is allowed to every pod."""
        return self in _ALLOWED


_ALLOWED = {Why.SEEN, Why.LIBRARY, Why.GETTER}


class InModule(enum.Enum):
    """What the kernel module does with a row besides passing it to RM, or why it does nothing where the guardian acts.

    The module works inside the pod's own call, and RM itself reads the process's pointers and descriptors. So a row
    with nothing but those needs no action here. Both planes check the clients in parameters.
    """

    TIMESLICE = "notes the request and answers OK: libcuda accepts no refusal, and the plan sets the timeslice"
    PREEMPTION_MODE = "refuses the modes that the guardian refuses"
    SHARE_POLICY = "refuses the policy that the guardian refuses"
    BIND = "refuses an engine where the TSG would not have the gate and timeslices of the others"
    PREEMPT = "refuses what the guardian refuses; the gate penalty replaces the guardian's pause"
    PAID = "makes the pod pay the gate penalty, where the guardian makes it rest"
    START_CHANNELS = "closes a closed gate again before the call returns"
    FB_INFO = "shows the pod its own memory limit"
    EXPORT = "charges the memory that it names until the pod has no file left"
    IMPORT = "charges imported memory, but only once if the pod itself exported it"
    FIRMWARE = "refuses a client that is not the pod's, because RM does not check it"
    PIDS_BY_NAMESPACE = "makes the pod pay, and asks of each pid once; RM hides those of other pid namespaces"
    SAMPLES_BY_NAMESPACE = "does nothing: RM hides the pids of other namespaces; their utilization stays visible"
    GPUS_BY_NODES = "does nothing: RM names every GPU, and a pod opens those whose device nodes it has"
    FURTHER_HANDLE = "counts it as a further handle of the memory at holds_memory_at, for as long as it lives"
    HOLDS_MEMORY = "charges all memory of the client until the pod has no file left, because RM keeps the memory named"


class Scope(enum.Enum):
    """Where RM looks a handle up."""

    #: In the client of the call. It must belong to the file on which the call is made; RM checks that.
    CALLER = enum.auto()
    #: In the client that another field of the parameters names.
    NAMED = enum.auto()
    #: In firmware, which gets the call with its client; the source says no more.
    FIRMWARE = enum.auto()
    #: Among the events of the call's client, by file descriptor number (os.c:osUserHandleToKernelPtr).
    EVENT = enum.auto()
    #: Nowhere: RM writes it.
    ANSWER = enum.auto()


class Handle(NamedTuple):
    """Where handles lie in parameters: ``number`` of them, ``stride`` bytes apart.

    With a ``size``, only in parameters of that many bytes: driver branches differ, and RM accepts only its own size.
    """

    at: int
    number: int = 1
    stride: int = 4
    scope: Scope = Scope.CALLER
    size: int | None = None


class Pointer(NamedTuple):
    """A pointer at an offset, to ``unit`` bytes times the count at ``count_at``, or to ``unit`` bytes without it."""

    at: int
    unit: int
    count_at: int | None = 0


class Control(NamedTuple):
    """One control of RM."""

    number: int
    #: Empty if RM sends it to firmware: no header names those.
    name: str
    why: Why
    #: Handles of clients; they must be the pod's own (0 for none).
    clients: tuple[Handle, ...] = ()
    #: All other handles, by where RM looks them up; in an export or import, those of the memory last.
    handles: tuple[Handle, ...] = ()
    pointers: tuple[Pointer, ...] = ()
    #: A file descriptor of the caller (4 bytes).
    descriptor_at: int | None = None
    #: RM reads and writes so many bytes, however few the call names (rmapi_deprecated_control.c).
    least: int = 0
    #: It unregisters what another control has registered, and reports an error if that is gone.
    unregisters: bool = False
    #: What the kernel module does if the guardian does more than issue the control.
    module: InModule | None = None

    @property
    def firmware(self) -> bool:
        """Tell whether RM sends it to firmware unread, and does not check whose client it is issued on."""
        return not self.name


def handles(places: Iterable[Handle], params: bytes | bytearray) -> Iterator[int]:
    """Read the handles at these places of the parameters, as far as the parameters reach."""
    for at, number, stride, _, size in places:
        if size is None or size == len(params):
            for place in range(at, min(at + number * stride, len(params) - 3), stride):
                yield _U32.unpack_from(params, place)[0]


def table(
    kind: Callable[[int, str, Why], _Row], by_reason: Mapping[Why, str], *others: Iterable[_Row]
) -> tuple[_Row, ...]:
    """Make a table in order of its numbers: of rows that say no more than a reason, listed by it, and of others.

    A list has numbers and names, two spaces between rows, in order of its numbers, as the others are.
    """

    def listed(why: Why, text: str) -> Iterator[_Row]:
        for number, _, name in (row.partition(" ") for row in re.split(r"\s{2,}", text.strip())):
            yield kind(int(number, 16), name, why)

    return tuple(merge(*others, *(listed(why, text) for why, text in by_reason.items()), key=itemgetter(0)))
