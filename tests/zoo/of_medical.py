"""Networks of nnU-Net, which tests/models/test_nnunet.py asks where their package is installed."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MedicalRow:
    """One network: its class, the size of its patches, the layer that is chosen, and the grid of its map."""

    name: str
    patch: tuple[int, ...]
    layer: str
    grid: tuple[int, ...]


ROWS = [
    MedicalRow("PlainConvUNet", (8, 16, 12), "encoder.stages.2", (2, 4, 3)),
    MedicalRow("ResidualEncoderUNet", (8, 16, 12), "encoder.stages.2", (2, 4, 3)),
    MedicalRow("ResidualEncoderUNet", (8, 12), "encoder.stages.2", (2, 3)),
]
HEAD = """
## nnU-Net

`tests/models/test_nnunet.py` builds these from plans. It compares merged maps of patches with a network and gradients
that are written by hand, to 1e-4 of the maximum. The [recipe](../recipes/nnunet.md) says what is explained.

| network | patch | layer chosen | map |
|---|---|---|---|
"""


def section() -> str:
    """The section of the page of models."""
    return HEAD + "".join(
        f"| {row.name} | {'×'.join(map(str, (1, *row.patch)))} | `{row.layer}` | {'×'.join(map(str, row.grid))} |\n"
        for row in ROWS
    )
