"""Hypothesis strategies: any snapshot that admission permits."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from qgpu.model import (
    MAX_LATENCY_TARGET_NS,
    MAX_PERIOD_NS,
    MIN_LATENCY_TARGET_NS,
    MIN_PERIOD_NS,
    Grant,
    Pod,
    PodClass,
    Sharing,
    Snapshot,
    Tsg,
)

#: Ways to take turns that the ledger may ask for.
sharings = st.one_of(
    st.just(Sharing()), st.just(Sharing(by_gate=True)), st.builds(Sharing, round_ns=st.integers(1_000_000, 200_000_000))
)

#: Not in alphabetical order, because a plan must not depend on names.
_NAMES = [f"pod{number}" for number in (3, 0, 5, 1, 4, 2)]

periods = st.one_of(
    st.integers(MIN_PERIOD_NS, MAX_PERIOD_NS),
    st.sampled_from([MIN_PERIOD_NS, 20_000_000, 33_333_333, 100_000_000, MAX_PERIOD_NS]),
)

targets = st.one_of(st.none(), st.integers(MIN_LATENCY_TARGET_NS, MAX_LATENCY_TARGET_NS))


@st.composite
def pods(draw: st.DrawFn, *, everybody: bool, classes: tuple[PodClass, ...] = tuple(PodClass)) -> tuple[Pod, ...]:
    """Draw up to six pods of up to four compute TSGs each, busy or not, satisfied or not; their quotas fit."""
    number = draw(st.integers(0, 6))
    cuts = sorted(draw(st.lists(st.integers(0, 100), min_size=number, max_size=number)))
    result = []
    for name, below, cut in zip(_NAMES, [0, *cuts], cuts, strict=False):
        cores = max(1, cut - below) if everybody else cut - below or None
        flags = draw(st.integers(0, 16))
        tsgs = tuple(Tsg(f"{name}/{n}", bool(flags >> n & 1)) for n in range(flags % 5))
        pod_class = draw(st.sampled_from(classes))
        target_ns = draw(targets) if pod_class is PodClass.ONLINE else None
        grant = Grant(pod_class, cores, latency_target_ns=target_ns)
        satisfied, fragmented = draw(st.booleans()), draw(st.booleans())
        starting = bool(tsgs) and draw(st.integers(0, 7)) == 7
        result.append(Pod(name, grant, tsgs, satisfied=satisfied, fragmented=fragmented, starting=starting))
    excess = sum(pod.grant.cores or 0 for pod in result) - 100
    return tuple(result) if excess <= 0 else tuple(_lowered(result, excess))


def _lowered(pods: list[Pod], excess: int) -> list[Pod]:
    """Reduce the largest quota until all fit."""
    largest = max(range(len(pods)), key=lambda i: pods[i].grant.cores or 0)
    pod = pods[largest]
    pods[largest] = pod._replace(grant=replace(pod.grant, cores=(pod.grant.cores or 0) - excess))
    return pods


@st.composite
def snapshots(draw: st.DrawFn, *, everybody: bool, classes: tuple[PodClass, ...] = tuple(PodClass)) -> Snapshot:
    """Draw an admitted snapshot; ``everybody`` has a quota if the policy under test needs one."""
    offline, online = draw(sharings), draw(sharings)
    return Snapshot(0, draw(periods), draw(pods(everybody=everybody, classes=classes)), offline=offline, online=online)
