"""The health of the cards as a stream to the kubelet, which shows it in the status of their pods."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import grpc

from qgpu.k8s.card_watch import CardState, CardWatch
from qgpu.k8s.kubelet_api import DRA_HEALTH
from qgpu.k8s.names import device_name

_UNKNOWN, _HEALTHY, _UNHEALTHY = range(3)
#: After 30 s without an answer, the kubelet shows the health as unknown.
_REPEAT_S = 10.0


class HealthStream:
    """Answers NodeWatchResources: all cards at once, at every change, and repeatedly."""

    def __init__(self, cards: CardWatch, pool: str) -> None:
        self._cards = cards
        self._pool = pool

    def watch(self, _request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        """Yield the health of all cards until the kubelet hangs up."""
        context.add_callback(self._cards.wake)
        seen = self._cards.wait(-1, 0)
        while context.is_active() and not self._cards.closed:
            yield self._response(self._cards.value)
            seen = self._cards.wait(seen, _REPEAT_S)

    def _response(self, state: CardState) -> Any:
        messages = DRA_HEALTH.messages
        response = messages.NodeWatchResourcesResponse()
        for card in state.node.cards if state.node is not None else ():
            if (name := device_name(card.uuid)) is not None:
                health = _UNKNOWN if state.problem else _UNHEALTHY if card.problem else _HEALTHY
                response.devices.add(
                    device=messages.DeviceIdentifier(pool_name=self._pool, device_name=name),
                    health=health,
                    last_updated_time=int(time.time()),
                )
        return response
