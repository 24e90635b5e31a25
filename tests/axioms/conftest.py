"""Networks this small are faster on one thread than on several.

`CAMSCOPE_DEVICE=cuda pytest tests/axioms` asks the same of a card.
"""

import os
from collections.abc import Iterator

import pytest
import torch

from tests.nets import DEVICE


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="package", autouse=True)
def every_digit() -> Iterator[None]:
    """A card's sums have float32's digits and one order: cuDNN rounds to TF32, and adds in any order, unless it is told."""
    if DEVICE.type != "cuda":
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.backends.cudnn.allow_tf32, torch.are_deterministic_algorithms_enabled()
    torch.backends.cudnn.allow_tf32 = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.backends.cudnn.allow_tf32 = before[0]
    torch.use_deterministic_algorithms(before[1])
