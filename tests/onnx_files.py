"""Write small ONNX files without the package onnx: the bytes of their protocol buffers."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import nn

FLOAT, INT, INTS = 1, 2, 7  # of a tensor, and of attributes
OPSET, IR = 13, 8


def varint(value: int) -> bytes:
    """A number in groups of seven bits, the lowest first."""
    groups = [value >> shift & 127 for shift in range(0, max(1, value.bit_length()), 7)]
    return bytes([*(group | 128 for group in groups[:-1]), groups[-1]])


def field(number: int, value: int | str | bytes) -> bytes:
    """One field of a message: a number, or a text or message with its length."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    content = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(content)) + content


def tensor(name: str, values: np.ndarray) -> bytes:
    dims = b"".join(field(1, side) for side in values.shape)
    return dims + field(2, FLOAT) + field(8, name) + field(9, values.astype("<f4").tobytes())


def node(kind: str, inputs: Sequence[str], output: str, **attributes: int | Sequence[int]) -> bytes:
    content = b"".join(field(1, name) for name in inputs) + field(2, output) + field(4, kind)
    for name, value in attributes.items():
        is_number = isinstance(value, int)
        numbers = field(3, value) if is_number else b"".join(field(8, item) for item in value)
        content += field(5, field(1, name) + numbers + field(20, INT if is_number else INTS))
    return content


def value_info(name: str, shape: Sequence[int | str]) -> bytes:
    dims = b"".join(field(1, field(1 if isinstance(side, int) else 2, side)) for side in shape)
    return field(1, name) + field(2, field(1, field(1, FLOAT) + field(2, dims)))


def write(
    path: Path,
    nodes: Sequence[bytes],
    tensors: Sequence[bytes],
    inputs: Sequence[bytes],
    outputs: Sequence[bytes],
) -> Path:
    parts = ((1, nodes), (2, [b"graph"]), (5, tensors), (11, inputs), (12, outputs))
    graph = b"".join(field(number, item) for number, items in parts for item in items)
    path.write_bytes(field(1, IR) + field(7, graph) + field(8, field(2, OPSET)))
    return path


def write_network(path: Path, network: nn.Sequential, size: Sequence[int | str], batch: int | str = "n") -> Path:
    """Write a network of convolutions, ReLUs, a mean over the image and a linear layer, for images of a size (C,H,W)."""
    nodes: list[bytes] = []
    tensors: list[bytes] = []
    current = "image"
    for number, layer in enumerate(network):
        output, weights = f"y{number}", [f"w{number}", f"b{number}"]
        if isinstance(layer, nn.Conv2d | nn.Linear):
            pair = zip(weights, (layer.weight, layer.bias), strict=True)
            tensors += [tensor(name, value.detach().numpy()) for name, value in pair]
        if isinstance(layer, nn.Conv2d):
            options = {"strides": list(layer.stride), "pads": [*layer.padding, *layer.padding]}
            nodes.append(node("Conv", [current, *weights], output, **options))
        elif isinstance(layer, nn.Linear):
            nodes.append(node("Gemm", [current, *weights], output, transB=1))
        else:
            kinds = {nn.ReLU: "Relu", nn.AdaptiveAvgPool2d: "GlobalAveragePool", nn.Flatten: "Flatten"}
            nodes.append(node(kinds[type(layer)], [current], output))
        current = output
    outputs = [value_info(current, [batch, network[-1].out_features])]
    return write(path, nodes, tensors, [value_info("image", [batch, *size])], outputs)
