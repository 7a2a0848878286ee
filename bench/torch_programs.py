"""Ordinary torch programs, step by step: inference, decoding, training and copies, eager or by CUDA graphs.

Weights are random: the work is that of the real program, the answers are not. No code here refers to qgpu. ``PROGRAMS``
maps a name to a function that builds the program and returns its step; a step ends when the host has waited for the
GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from resnet import resnet50
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (torch's own convention)

Step = Callable[[], object]

_COPY_BYTES = 256 << 20


class Block(nn.Module):
    """A transformer block with causal self-attention; with a cache it decodes one token at a time."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, cache: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Transform ``x`` (batch, tokens, width); ``cache`` holds the keys and values of earlier tokens."""
        batch, tokens, width = x.shape
        parts = self.qkv(self.before_attention(x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = parts[0], parts[1], parts[2]
        if cache is not None:
            keys, values = cache
            keys[:, :, -1:].copy_(key)
            values[:, :, -1:].copy_(value)
            key, value = keys, values
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=cache is None)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.before_mlp(x))))


class Transformer(nn.Module):
    """A decoder-only language model."""

    def __init__(self, width: int, layers: int, heads: int, words: int = 8192) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, words)

    def forward(self, tokens: Tensor, caches: list[tuple[Tensor, Tensor]] | None = None) -> Tensor:
        """Return scores of the next word for ``tokens`` (batch, tokens)."""
        x = self.words(tokens)
        for n, block in enumerate(self.blocks):
            x = block(x, caches[n] if caches else None)
        scores: Tensor = self.head(x)
        return scores


def _resnet(batch: int, *, graph: bool) -> Step:
    with torch.device("cuda"):
        model = resnet50()
    model = model.eval().half().to(memory_format=torch.channels_last)
    images = torch.randn(batch, 3, 224, 224, device="cuda", dtype=torch.half).to(memory_format=torch.channels_last)

    def infer() -> object:
        with torch.inference_mode():
            return model(images)

    return _waiting(_captured(infer) if graph else infer)


def _decoder(width: int, layers: int, batch: int, *, graph: bool, context: int = 1024) -> Step:
    heads = width // 64
    with torch.device("cuda"):
        model = Transformer(width, layers, heads).eval().half()
    shape = (batch, heads, context, width // heads)
    caches = [
        (torch.zeros(shape, device="cuda", dtype=torch.half), torch.zeros(shape, device="cuda", dtype=torch.half))
        for _ in range(layers)
    ]
    token = torch.zeros(batch, 1, dtype=torch.long, device="cuda")

    def decode() -> object:
        with torch.inference_mode():
            return token.copy_(model(token, caches)[:, -1:].argmax(-1))

    return _waiting(_captured(decode) if graph else decode)


def _training(width: int, layers: int, batch: int, tokens: int) -> Step:
    with torch.device("cuda"):
        model = Transformer(width, layers, max(1, width // 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = torch.randint(8192, (batch, tokens + 1), device="cuda")

    def step() -> object:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            scores = model(data[:, :-1])
            loss = F.cross_entropy(scores.flatten(0, 1), data[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def _copy(direction: str) -> Step:
    def memory(place: str) -> Tensor:
        if place == "d":
            return torch.zeros(_COPY_BYTES, dtype=torch.uint8, device="cuda")
        return torch.zeros(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)

    source, target = memory(direction[0]), memory(direction[-1])
    before: list[torch.cuda.Event] = []

    def step() -> object:
        """Queue one copy and wait for the one before it, so that the engine never runs dry."""
        target.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        before.append(event)
        if len(before) > 1:
            before.pop(0).synchronize()
        return None

    return step


def _captured(work: Callable[[], object]) -> Callable[[], object]:
    """Record ``work`` as a CUDA graph, after a few rounds in which torch chooses its kernels."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()

    def replay() -> object:
        """Run the graph; it uses the weights and buffers that ``work`` holds."""
        graph.replay()
        return work

    return replay


def _waiting(work: Callable[[], object]) -> Step:
    def step() -> object:
        work()
        torch.cuda.synchronize()
        return None

    return step


def _request(step: Callable[[], Step], count: int) -> Callable[[], Step]:
    def build() -> Step:
        token = step()

        def request() -> object:
            for _ in range(count):
                token()
            return None

        return request

    return build


#: How to build each program.
PROGRAMS: dict[str, Callable[[], Step]] = {
    **{f"resnet-eager-{batch}": (lambda batch=batch: _resnet(batch, graph=False)) for batch in (8, 16, 32, 128)},
    **{f"resnet-graph-{batch}": (lambda batch=batch: _resnet(batch, graph=True)) for batch in (16, 128)},
    "decoder-eager": lambda: _decoder(512, 12, 4, graph=False),
    "decoder-graph": lambda: _decoder(2048, 24, 8, graph=True),
    "training-small": lambda: _training(256, 4, 16, 128),
    "training-medium": lambda: _training(1024, 8, 16, 512),
    "training-large": lambda: _training(2048, 8, 8, 1024),
    "copy-h2d": lambda: _copy("h2d"),
    "copy-d2h": lambda: _copy("d2h"),
    "copy-d2d": lambda: _copy("d2d"),
    "service-graph": _request(lambda: _decoder(2048, 24, 8, graph=True), 32),
    "service-eager": _request(lambda: _decoder(512, 12, 4, graph=False), 16),
}

#: Services get a request every this many ms, even if the last one is not done; other programs run steps back to back.
PERIOD_MS = {"service-graph": 250, "service-eager": 150}
