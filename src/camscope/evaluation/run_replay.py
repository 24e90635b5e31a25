"""Again: the model of a run, asked again: its images as they entered it then, its questions, its explainers."""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from camscope.batch import Run
from camscope.batch.batch_worker import question_of
from camscope.batch.image_loading import Way, taken_in
from camscope.batch.map_collection import expect_unchanged
from camscope.batch.result_rows import digest_of
from camscope.errors import ImageError, InputError, PreprocessError, UndefinedError
from camscope.explainers import METHODS, Explainer, GradCAM
from camscope.explainers.core.evaluation_context import Mode
from camscope.explainers.core.maps import in_words
from camscope.hooks.base import unwrap
from camscope.model_card import card_of, digest
from camscope.targets import Question

Row = Mapping[str, Any]
PYTHON = "in Python, pass measure(…, tools=[…]) the explainers that the run was made with"


@dataclass(frozen=True)
class Again:
    """The model that the maps of `run` are of. `reader`: an explainer of it, which knows how images enter it."""

    run: Run
    model: nn.Module
    reader: Explainer

    @classmethod
    def of(cls, run: Run, model: nn.Module, preprocess: Any = None) -> "Again":
        """InputError for another model, PreprocessError for another preprocessing, than the run was made with."""
        made, inner = run.facts["made_with"], unwrap(model)
        there, here = made["model"]["digest"], digest(inner)
        if here != there:
            card = card_of(inner)
            raise InputError(
                f"the run is of a model with digest {there} ({made['model']['source']}); the one given has {here} "
                f"({card.source if card else type(inner).__name__}): pass the same model with the same weights"
            )
        for words in made["targets"]:
            if words is not None and not _is_class(words, run.facts["categories"]):
                raise InputError(
                    f"the run was asked {words!r}, of which only the words are known: camscope.metrics has Trial for Python"
                )
        run.expect_images()
        reader = GradCAM(model, preprocess=preprocess, categories=run.facts["categories"] or None)
        if (words := in_words(reader.preprocess)) != made["preprocess"]:
            raise PreprocessError(
                f"the run was made with preprocess {made['preprocess']}; here it is {words}: pass the same preprocess"
            )
        return cls(run, model, reader)

    def image(self, row: Row) -> Tensor:
        """(C,*S): a row's image as it entered the model then; UndefinedError where it is not there any more.

        ImageError for one that has changed: of such a run nothing can be said.
        """
        try:
            source = self.run.source(row)
        except ImageError as error:
            raise UndefinedError(str(error)) from error
        expect_unchanged(row, source)
        made = self.run.facts["made_with"]
        item = taken_in(source, self.reader, Way(reduced=made["reduced"], window=made.get("window")))
        size, place = tuple(item.x.shape[1:]), item.placement
        there = None if row["placement"] is None else np.reshape(row["placement"], (len(size), -1))
        same = (there is None) == (place is None) and (
            there is None or place is None or np.allclose(there, place.matrix)
        )
        if list(size) != row["input_size"] or not same:
            raise PreprocessError(
                f"{row['path']} enters the model as {size}, and was explained as {tuple(row['input_size'])}, or lies elsewhere "
                f"on its image: pass the preprocess that the run was made with"
            )
        return item.x

    def question(self, row: Row) -> Question:
        """What was asked of a row; UndefinedError where it is no class."""
        if row["target"] is None:
            raise UndefinedError(f"what was asked, {row['label']}, is no class: it cannot be asked again")
        return question_of(row["target"])

    def mode(self, row: Row) -> Mode:
        """In which its method ran the model."""
        found: Mode = self._settings(key_of(row)).get("mode", "eval")
        return found

    def call_settings(self, row: Row) -> dict[str, Any]:
        """How its method called the model with an image: see `Method.call_settings`."""
        settings = self._settings(key_of(row))
        return {name: settings.get(name) for name in ("input_key", "frames_first")}

    def explainers(self, given: Sequence[Explainer] = ()) -> dict[str, Explainer]:
        """By `key_of`: those of the run, made again from its facts, or `given`; InputError for what cannot be made again."""
        known = {f"{tool.title} {digest_of(tool.parameters)}": tool for tool in given}
        for tool in given:
            if unwrap(tool.model) is not unwrap(self.model):
                raise InputError(f"{tool!r} is of another model than the one given")
        return {key: known.get(key) or self._made(key) for key in self.run.facts["made_with"]["methods"]}

    def _made(self, key: str) -> Explainer:
        """With the settings whose digest the run has, or not at all."""
        title, _, digits = key.rpartition(" ")
        settings = {name: _value(said) for name, said in self._settings(key).items()}
        try:
            tool = METHODS[title](
                self.model, preprocess=self.reader.preprocess, categories=self.reader.categories, **settings
            )
        except Exception as error:  # of whatever words are no setting
            raise InputError(f"{title} cannot be made again from what the run says of it; {PYTHON}") from error
        if digest_of(tool.parameters) != digits:
            raise InputError(f"{title} has settings that the run's words do not bring back; {PYTHON}")
        return tool

    def _settings(self, key: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.run.facts["made_with"]["methods"].get(key, {})
        return found


def key_of(row: Row) -> str:
    """A row's method and its settings, as `run.json` names them."""
    return f"{row['method']} {row['parameters']}"


def _is_class(words: str, categories: Sequence[str]) -> bool:
    return isinstance(question_of(words), int) or words in categories


def _value(said: Any) -> Any:
    """A setting from its words: of a list its entries, for words in words are said as they are."""
    if not isinstance(said, str) or not said.startswith(("[", "(")):
        return said
    try:
        return ast.literal_eval(said)
    except (ValueError, SyntaxError):
        return said
