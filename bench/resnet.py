"""ResNet-50 for inference, with random weights: what it computes is the real network's work, not its answers.

The layers are those of He et al., "Deep Residual Learning for Image Recognition" (2015), table 1, with the stride
in the 3x3 convolution of a block, as is common.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from inference import Batch
from torch import Tensor, nn

_STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))
_EXPANSION = 4


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * _EXPANSION
        self.body = nn.Sequential(
            *_convolution(inputs, width, 1),
            nn.ReLU(inplace=True),
            *_convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *_convolution(width, outputs, 1),
        )
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Sequential(*_convolution(inputs, outputs, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        """Add the output of the body for ``x`` to the shortcut."""
        return torch.relu_(self.body(x) + self.shortcut(x))


def resnet50() -> nn.Sequential:
    """Build the network: images of 3x224x224 in, 1000 scores out."""
    layers: list[nn.Module] = [
        *_convolution(3, 64, 7, 2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    inputs = 64
    for stage, (width, blocks) in enumerate(_STAGES):
        for block in range(blocks):
            layers.append(Bottleneck(inputs, width, 2 if block == 0 and stage > 0 else 1))
            inputs = width * _EXPANSION
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


def inference() -> Callable[[Batch], int]:
    """Return a function that infers one batch in fp16, as requested, and waits until the GPU has finished.

    It returns the time at which everything was launched (ns, as of perf_counter_ns).
    """
    torch.manual_seed(0)
    model = resnet50().eval().cuda().half().to(memory_format=torch.channels_last)
    images: dict[int, Tensor] = {}
    graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def infer(batch: Batch) -> int:
        size = batch.size
        if size not in images:
            images[size] = torch.randn(size, 3, 224, 224, device="cuda", dtype=torch.half).to(
                memory_format=torch.channels_last
            )
        with torch.inference_mode():
            if not batch.graph:
                model(images[size])
            elif size not in graphs:
                graphs[size] = _captured(model, images[size])
            else:
                graphs[size].replay()
        launched_ns = time.perf_counter_ns()
        torch.cuda.synchronize()
        return launched_ns

    return infer


def _captured(model: nn.Module, images: Tensor) -> torch.cuda.CUDAGraph:
    """Record the network on these images as a CUDA graph, after a few rounds in which torch chooses its kernels."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            model(images)
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(images)
    return graph


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), nn.BatchNorm2d(outputs)
