"""Torch programs whose results are the same bits in every run, for ``memory.py``.

    python bench/memory_programs.py training|decoder|two --steps 400 --json FILE

A line "step N" on stdout after each step says how far a program is; ``--json`` gets every result: losses as written by
``float.hex``, or tokens and scores. ``two`` trains in two processes of different seeds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from pathlib import Path

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


def main() -> None:
    """Run one program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", choices=["training", "decoder", "two"])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    result = {"training": training, "decoder": decoder, "two": two}[options.program](options.steps, 1)
    options.json.write_text(json.dumps({"result": result}))


if __name__ == "__main__":
    main()
