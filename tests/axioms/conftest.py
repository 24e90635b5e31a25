"""Networks this small are faster on one thread than on several.

`CAMSCOPE_DEVICE=cuda pytest tests/axioms` asks the same of a card.
"""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="package", autouse=True)
def every_digit() -> Iterator[None]:
    """A card's convolutions keep the digits of float32 (cuDNN rounds to TF32 by default): the package is compared."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before
