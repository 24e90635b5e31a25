"""What any test may rely on. None touches the network: what is not on this machine fails at once, as on a plane."""

import gc
import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

os.environ.setdefault("CAMSCOPE_KEY", "the key of the tests")  # names of scans: none is made in anybody's home

LONG = (
    "audit/test_runner.py",
    "batch/test_ray_engine.py",
    "explainers/test_zoo.py",
    "audit/test_awkward_cases.py",
    "test_examples.py",
    "audit/provenance/test_provenance.py",
    "evaluation/test_comparison.py",
    "audit/performance/test_leakage.py",
    "cli/test_audit.py",
    "images/scans/test_canaries.py",
    "evaluation/test_model_based_metrics.py",
    "explainers/test_real_data.py",
)  # by how long they take
LOCAL = {None, "", "localhost", "127.0.0.1", "::1", "0.0.0.0"}


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--write-models`: what tests/explainers/test_zoo.py measures becomes docs/models.md."""
    parser.addoption("--write-models", action="store_true", help="write docs/models.md from what is measured")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first: two workers, each of which takes the next file, are then done at about the same time."""
    places = {Path(__file__).parent / path: place for place, path in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path, len(LONG)))


def pytest_collection_finish() -> None:
    """What is here by now stays to the end: no garbage collector need look through it again and again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Python takes itself apart in its usual way."""
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def no_network() -> Iterator[None]:
    """Names other than this machine's do not resolve, for as long as the tests run."""
    with pytest.MonkeyPatch.context() as patch:
        original = socket.getaddrinfo

        def only_local(host: str | bytes | None, *args: object, **kwargs: object) -> object:
            name = host.decode() if isinstance(host, bytes) else host
            if name in LOCAL or name == socket.gethostname():
                return original(host, *args, **kwargs)  # type: ignore[arg-type] - handed on as it came
            raise socket.gaierror(socket.EAI_NONAME, f"tests use no network (asked for {name})")

        patch.setattr(socket, "getaddrinfo", only_local)
        yield


@pytest.fixture
def passes_of_maps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the pass of noise that a model, input size and class has once: for tests that count passes."""
    monkeypatch.setattr("camscope.explainers.core.runner.flag_constant_scores", lambda *_: None)


@pytest.fixture(scope="module", autouse=True)
def seeded_module() -> None:
    """What a file draws for all its tests is the same in every run, whatever ran before it."""
    seed()


@pytest.fixture(autouse=True)
def seeded(seeded_module: None) -> None:
    """What a test draws is the same in every run, alone or among others."""
    seed()


def seed() -> None:
    """The generators that a test may use without naming one."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Networks as small as those of most tests are faster on one thread than on several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
