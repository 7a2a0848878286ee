"""Kubernetes quantities such as ``20Gi``, ``1500M`` or ``1e9`` as exact whole numbers, and back."""

from __future__ import annotations

from decimal import Decimal

from lightkube.utils.quantity import parse_quantity

from qgpu.errors import InvalidValueError

_KI = 1024
_MI = _KI**2


def parse(text: str) -> Decimal:
    """Read a quantity. Raises InvalidValueError."""
    try:
        value = parse_quantity(text)
    except ValueError as error:
        raise InvalidValueError(f"{text!r} is not a quantity such as 20Gi") from error
    if value is None:
        raise InvalidValueError("a quantity is missing")
    return value


def whole(text: str) -> int:
    """Read a quantity that is a whole number of at least 0, such as bytes or per cent. Raises InvalidValueError."""
    value = parse(text)
    if value < 0 or value != value.to_integral_value():
        raise InvalidValueError(f"{text!r} is not a whole number")
    return int(value)


def from_bytes(size: int) -> str:
    """Write bytes as a quantity: in MiB if that is exact, else in bytes."""
    return f"{size // _MI}Mi" if size % _MI == 0 else str(size)
