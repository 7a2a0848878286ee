"""Torch programs whose results are the same bits in every run, for ``memory.py``.

    python bench/memory_programs.py training|decoder|two|ipc|cards|peers --steps 400 --json FILE

A line "step N" on stdout after each step says how far a program is; ``--json`` gets every result: losses as written by
``float.hex``, or tokens and scores. ``two`` trains in two processes of different seeds; in ``ipc`` two processes write
to one tensor. ``cards`` uses two cards, and ``peers`` copies between them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

#: cuBLAS gives the same bits only with this; torch reads it when CUDA starts.
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 (torch's own convention)
from torch_programs import Transformer

_WIDTH, _LAYERS, _BATCH = 4096, 6, 256


def _begin(seed: int) -> None:
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed)


def training(steps: int, seed: int) -> list[str]:
    """Train a network on random data, and return the loss of every step."""
    _begin(seed)
    with torch.device("cuda"):
        model = nn.Sequential(
            *(nn.Sequential(nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _WIDTH), nn.GELU()) for _ in range(_LAYERS))
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses = []
    for step in range(steps):
        given, wanted = torch.randn(2, _BATCH, _WIDTH, device="cuda")
        loss = F.mse_loss(model(given), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
        print(f"step {step}", flush=True)
    return losses


def decoder(steps: int, seed: int, width: int = 2048, layers: int = 8, context: int = 256) -> list[str]:
    """Decode by a CUDA graph, each token from the last, and return every token with the sum of its scores."""
    _begin(seed)
    heads = width // 64
    with torch.device("cuda"):
        model = Transformer(width, layers, heads).eval().half()
        caches = [tuple(torch.randn(1, heads, context, 64).half() for _ in "kv") for _ in range(layers)]
        token = torch.zeros(1, 1, dtype=torch.long)
        total = torch.zeros((), dtype=torch.float)

    def decode() -> None:
        for cache in caches:
            for each in cache:
                each.copy_(each.roll(-1, 2))
        scores = model(token, caches)[:, -1:]
        token.copy_(scores.argmax(-1))
        total.copy_(scores.float().sum())

    with torch.inference_mode():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            decode()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            decode()
    results = []
    for step in range(steps):
        graph.replay()
        results.append(f"{token.item()} {total.item().hex()}")
        print(f"step {step}", flush=True)
    return results


def two(steps: int, seed: int) -> list[str]:
    """Train in two processes at once, and return the losses of both."""
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        return [loss for losses in pool.starmap(training, [(steps, seed), (steps, seed + 1)]) for loss in losses]


def ipc(steps: int, seed: int) -> list[str]:
    """Write to a tensor in turn with another process, which has opened it by CUDA IPC; return its first element."""
    _begin(seed)
    context = multiprocessing.get_context("spawn")
    there, back = context.Queue(), context.Queue()
    other = context.Process(target=_add, args=(there, back, steps))
    other.start()
    tensor = torch.zeros(1 << 20, device="cuda")
    there.put(tensor)
    values = []
    for step in range(steps):
        back.get()
        tensor.mul_(1.5).remainder_(1000)
        values.append(tensor[0].item().hex())
        print(f"step {step}", flush=True)
        there.put(step)
    other.join()
    return values


def _add(there: multiprocessing.Queue[Any], back: multiprocessing.Queue[int], steps: int) -> None:
    tensor = there.get()
    for step in range(steps):
        tensor.add_(1)
        torch.cuda.synchronize()
        back.put(step)
        there.get()


def cards(steps: int, seed: int) -> list[str]:
    """Multiply on two cards; return an element of each product."""
    _begin(seed)
    made = [torch.randn(1024, 1024, device=f"cuda:{card}") for card in range(2)]
    values = []
    for step in range(steps):
        made = [(each @ each).tanh_() for each in made]
        values += [each[0, 0].item().hex() for each in made]
        print(f"step {step}", flush=True)
    return values


def peers(steps: int, seed: int) -> list[str]:
    """Copy from card to card and back; return an element after each round."""
    _begin(seed)
    first, second = (torch.ones(1 << 22, device=f"cuda:{card}") for card in range(2))
    values = []
    for step in range(steps):
        first.copy_(second.copy_(first).add_(1))
        values.append(first[0].item().hex())
        print(f"step {step}", flush=True)
    return values


PROGRAMS = {"training": training, "decoder": decoder, "two": two, "ipc": ipc, "cards": cards, "peers": peers}


def main() -> None:
    """Run one program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    result = PROGRAMS[options.program](options.steps, 1)
    options.json.write_text(json.dumps({"result": result}))


if __name__ == "__main__":
    main()
