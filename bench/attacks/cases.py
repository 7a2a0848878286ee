"""The attacks, one row each: the program, its mode, and under which policy the neighbour runs meanwhile."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Case:
    """One attack. ``ends``: the attacker ends by itself after its report; otherwise the judge kills it."""

    family: str
    path: str
    program: str
    mode: str
    planes: tuple[str, ...] = ("seccomp", "kmod")
    policy: str = "burst-share"
    #: How long it goes on after its report, s.
    lasts_s: float = 0.3
    ends: bool = False
    #: Whether its kernel faults, so that the card recovers for a while, with qgpu or without.
    kernel_faults: bool = False
    #: Its share of the card, percent; with 50 nothing is left over that it could take without its neighbour's loss.
    cores: int = 40
    #: Whether the neighbour is online meanwhile.
    online: bool = False


_GPU = ("seccomp",)
_VM = ("kmod",)


def _cuda(path: str, mode: str, lasts_s: float = 0.3) -> Case:
    return Case("cuda", path, "cuda", mode, _GPU, lasts_s=lasts_s)


def _raw(path: str, mode: str) -> Case:
    return Case("raw", path, "raw", mode)


def _race(path: str, mode: str) -> Case:
    return Case("race", path, "race", mode)


def _fault(path: str, mode: str, *, ends: bool = True, kernel_faults: bool = False) -> Case:
    return Case("fault", path, "fault", mode, _GPU, lasts_s=1.5, ends=ends, kernel_faults=kernel_faults)


def _control(path: str, mode: str, policy: str = "burst-share") -> Case:
    return Case("control", path, "control", mode, policy=policy, lasts_s=1.8)


def _profile(path: str, mode: str, policy: str = "burst-share", *, online: bool = False) -> Case:
    return Case("profile", path, "profile", mode, policy=policy, lasts_s=1.8, online=online)


def _monitors(path: str, mode: str, policy: str = "burst-share", lasts_s: float = 1.8) -> Case:
    return Case("profile", path, "monitors", mode, policy=policy, lasts_s=lasts_s)


CASES: tuple[Case, ...] = (
    _cuda("cudaMalloc", "malloc"),
    _cuda("async pool", "pool"),
    _cuda("VMM cuMemCreate", "vmm"),
    _cuda("VMM, handle released, mapped", "vmm-mapping"),
    _cuda("VMM, exported", "vmm-export"),
    _cuda("VMM, only a descriptor left", "vmm-descriptor"),
    _cuda("managed memory", "managed"),
    _cuda("managed, then cudaMalloc", "managed-then-malloc"),
    _cuda("managed, UVM initialised by a child", "managed-child"),
    _cuda("page tables of UVM's", "uvm-tables"),
    _cuda("a sleeper keeps exports", "export-sleeper"),
    _cuda("a sleeper keeps UVM's file", "uvm-sleeper"),
    _cuda("arrays", "array"),
    _cuda("graph memory nodes", "graph"),
    _cuda("contexts' own memory", "contexts"),
    _cuda("IPC, opened by another, freed", "ipc"),
    _cuda("VMM, descriptor opened by another", "shared"),
    _cuda("executed anew in its process", "exec"),
    _cuda("five exec'd programs", "processes", 1),
    _cuda("five orphans", "orphans", 1),
    _cuda("after a refusal", "after-refusal"),
    _raw("RM_ALLOC, static program", "alloc"),
    _raw("RM_ALLOC, short form", "short-alloc"),
    _raw("RM_ALLOC below a subdevice", "under-subdevice"),
    _raw("handle chosen by RM", "rms-handle"),
    _raw("VID_HEAP_CONTROL", "heap"),
    _raw("VID_HEAP_CONTROL, any place", "heap-any"),
    _raw("VID_HEAP_CONTROL, in a range", "heap-range"),
    _raw("RM_ALLOC_MEMORY", "old-alloc"),
    _raw("RM_ALLOC_MEMORY, by address", "physical"),
    _raw("RM_ALLOC_OBJECT", "bare-alloc"),
    _raw("XFER-wrapped", "wrapped"),
    _raw("XFER-wrapped heap", "wrapped-heap"),
    _raw("odd magic and direction", "odd-number"),
    _raw("high bits of the registers", "high-bits"),
    _raw("i386 call", "i386"),
    _raw("i386 heap call", "i386-heap"),
    _raw("x32 call", "x32"),
    _raw("dup, first handle freed", "dup"),
    _raw("dup into another client", "dup-client"),
    _raw("export to a descriptor", "export"),
    _raw("dup of others' objects", "steal"),
    _raw("others' objects shared, then dup", "share"),
    _raw("others' OS events freed, their numbers taken", "os-events"),
    _raw("any class by the call for context DMAs", "context-dma"),
    _raw("address spaces of the whole card", "whole-spaces"),
    _raw("12 forked processes", "processes"),
    _raw("orphans in sessions of their own", "orphans"),
    _raw("page tables of address space", "tables"),
    _raw("small pieces, at places of their own", "small"),
    _raw("address spaces", "spaces"),
    _raw("600 devices with address spaces", "devices"),
    _raw("mapped for the processor, 400 times", "windows"),
    Case("raw", "another's name, another's memory freed", "raw", "named", _GPU),
    _raw("32 clients", "clients"),
    _raw("free from above, take again", "churn"),
    _raw("descriptor over exec", "exec"),
    _raw("given to a semaphore surface", "surface"),
    _raw("TSGs' own memory", "tsgs"),
    Case("raw", "RM_ALLOC, musl program", "raw-musl", "alloc"),
    _race("size", "size"),
    _race("class", "class"),
    _race("memory's place", "place"),
    _race("handle", "handle"),
    _race("client", "client"),
    _race("parent", "parent"),
    _race("pointer to parameters", "pointer"),
    _race("XFER's inner number", "wrapper"),
    _race("XFER's inner size", "wrapper-size"),
    _race("heap size", "heap"),
    _race("heap function", "heap-function"),
    _race("heap place", "heap-place"),
    _race("forged answers", "answer"),
    _race("descriptor exchanged", "files"),
    _race("file exchanged under a root client", "exchange"),
    _race("descriptors of one's own", "own-table"),
    _race("root client rewritten elsewhere", "elsewhere"),
    _race("freed meanwhile", "free"),
    _race("closed meanwhile", "close"),
    _race("flags of address space", "space"),
    _race("a TSG's engine", "engine"),
    _control("a flood, asking nothing", "none"),
    _control("SET_TIMESLICE, five ways", "timeslice"),
    _control("SET_TIMESLICE, raced", "race"),
    _control("interleave, realtime, preempt, restart", "priority"),
    _control("own TSG preempted, over and over", "preempt-self"),
    _control("own TSG preempted under Fixed Share", "preempt-self", "fixed-share"),
    _control("neighbours' TSGs preempted by name", "preempt-neighbours"),
    _control("DISABLE_CHANNELS of neighbours", "neighbours"),
    _control("neighbours' objects by name, legacy bit", "names"),
    _control("every control of the list", "every-control"),
    _control("a flood under Fixed Share", "none", "fixed-share"),
    _control("own gate opened", "open-gate", "fixed-share"),
    _control("own channels started", "start-self", "fixed-share"),
    _control("own gate opened for a free of nothing", "free-nothing", "fixed-share"),
    Case("control", "three new contexts, over and over", "control", "churn-briefly", _GPU, "fixed-share", 4, cores=10),
    Case("control", "three new contexts, over and over, lent", "control", "churn-briefly", _GPU, lasts_s=4, cores=10),
    Case("control", "contexts that end in a kernel", "control", "churn", _GPU, "fixed-share", 4, cores=50),
    Case("control", "long kernels, preemption not asked for", "control", "no-wish", _GPU, "fixed-share", 1.8),
    Case("control", "long kernels, preemption given up", "control", "wait-for-idle", _GPU, "fixed-share", 1.8),
    Case("control", "channels of an old class", "control", "old-channels", _GPU, "fixed-share", 1.8),
    Case("control", "compute in a TSG for copies", "control", "copy-group", _GPU, "fixed-share", 1.8),
    _monitors("monitors reserved, streams bound, held", "reserve"),
    _monitors("monitors held under Fixed Share", "reserve", "fixed-share"),
    _monitors("monitors of a killed process", "outlive"),
    # between two of them a pod rests for two seconds
    _monitors("monitors of killed processes under Fixed Share", "outlive", "fixed-share", 5.0),
    _monitors("streams beyond memory, over freed memory", "streams"),
    _monitors("profilers and streams without end", "objects"),
    _monitors("registers outside the list", "registers"),
    _monitors("lists of registers, a flood", "many-registers"),
    _profile("debuggers of others' contexts", "debug"),
    _profile("own context suspended and resumed", "suspend", "fixed-share"),
    _profile("profilers of others' contexts", "others"),
    _profile("caches flushed by address, not written back", "flush"),
    _profile("caches flushed, beside an online neighbour", "many-flushes", online=True),
    _profile("bytes that only firmware reads", "unread"),
    _profile("control files tied to others", "ties"),
    _profile("others' memory mapped by further clients", "maps"),
    _fault("illegal address", "illegal-address", kernel_faults=True),
    _fault("misaligned address", "misaligned", kernel_faults=True),
    _fault("misaligned address, nothing mapped", "misaligned-unmapped", kernel_faults=True),
    _fault("assert (trap)", "assert", kernel_faults=True),
    _fault("infinite kernel, killed", "infinite-kernel", ends=False),
    _fault("infinite kernel, exit", "infinite-kernel-exit", ends=False),
    _fault("2000 times out of memory", "oom", ends=False),
    _fault("SIGKILL in a flood", "flood", ends=False),
    _fault("abort in mid-allocation", "abort-mid-allocation"),
    _fault("segmentation fault in a flood", "segfault"),
    Case("fault", "SIGKILL in a flood", "control", "none", _VM, lasts_s=1.5),
    Case("fault", "SIGKILL in mid-allocation", "race", "free", _VM, lasts_s=0.0),
)
