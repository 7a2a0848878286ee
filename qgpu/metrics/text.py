"""Prometheus' text exposition format, version 0.0.4. It knows nothing about GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Kind(StrEnum):
    """The kind of a series: a value, or a count that only grows."""

    GAUGE = "gauge"
    COUNTER = "counter"


@dataclass(frozen=True, slots=True)
class Family:
    """All series of one name."""

    name: str
    kind: Kind
    help: str
    #: (labels, value)
    series: list[tuple[Mapping[str, str], float]] = field(default_factory=list)

    def add(self, value: float, **labels: str) -> None:
        """Add a series."""
        self.series.append((labels, value))


def render(families: Iterable[Family]) -> bytes:
    """Return the text of all families that have any series."""
    lines = []
    for family in families:
        if family.series:
            lines += [f"# HELP {family.name} {_help(family.help)}", f"# TYPE {family.name} {family.kind}"]
            lines += [f"{family.name}{_labels(labels)} {_number(value)}" for labels, value in family.series]
    return ("\n".join(lines) + "\n").encode()


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_value(value)}"' for name, value in labels.items()) + "}"


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else repr(float(value))


def _value(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _help(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")
