"""What every library of published models needs: the package, the numbers, and words for what cannot be had."""

import importlib
import os
from collections.abc import Callable
from typing import Any

from torch import nn

from camscope.errors import MissingExtraError, WeightsError
from camscope.models.checkpoint import RANDOM, fitted, read_state


def package(name: str) -> Any:
    """An optional package; MissingExtraError names the extra that brings it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtraError(name.partition(".")[0], "hub") from error


def built(build: Callable[[int | None], nn.Module], weights: str | os.PathLike[str]) -> tuple[nn.Module, bool]:
    """A model without its published weights (`build`: see `fitted`), and whether its classes are the published ones."""
    return (build(None), False) if weights == RANDOM else fitted(build, read_state(weights), weights)


def unavailable(spec: str, error: Exception, advice: str) -> WeightsError:
    """The error for weights that are neither here nor to be had; `advice` says what to fetch, and how to pass it."""
    return WeightsError(f"the weights of {spec!r} cannot be had ({type(error).__name__}: {error}); {advice}")
