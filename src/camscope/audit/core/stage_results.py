"""The results of the stages that are done, which later stages take as input."""

from functools import cached_property
from pathlib import Path
from typing import cast

from camscope.audit.core.predictions import Predictions
from camscope.audit.core.schema import ResolveResult, StageResult


class StageResults(dict[str, StageResult]):
    """Stage name -> its result. The predictions, which are too large for a result, are read from their file."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    @property
    def resolve(self) -> ResolveResult:
        """The result of the stage "resolve": the model and its methods."""
        return cast(ResolveResult, self["resolve"])

    @cached_property
    def predictions(self) -> Predictions:
        """The predictions of the stage "predict", without features."""
        return Predictions.read(self._folder)
