"""Again: the model of a run, asked again: its images as they entered it then, its questions, its explainers."""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from camscope.batch import BatchRun
from camscope.batch.batch_worker import parse_target
from camscope.batch.image_loading import InputOptions, prepare_input
from camscope.batch.map_collection import require_unchanged
from camscope.batch.result_rows import hash_parameters
from camscope.errors import ImageError, InputError, PreprocessError, UndefinedError
from camscope.explainers import METHODS, Explainer, GradCAM
from camscope.explainers.core.evaluation_context import Mode
from camscope.explainers.core.maps import format_without_address
from camscope.hooks.base import unwrap
from camscope.model_card import compute_model_digest, get_card
from camscope.targets import TargetLike

Row = Mapping[str, Any]
PASS_EXPLAINERS_HINT = "in Python, pass evaluate(…, explainers=[…]) the explainers that the run was made with"


@dataclass(frozen=True)
class RunReplay:
    """The model that the maps of `run` are of. `input_explainer`: an explainer of it, which knows how images enter it."""

    run: BatchRun
    model: nn.Module
    input_explainer: Explainer

    @classmethod
    def from_run(cls, run: BatchRun, model: nn.Module, preprocess: Any = None) -> "RunReplay":
        """InputError for another model, PreprocessError for another preprocessing, than the run was made with."""
        made, inner = run.run_info["run_config"], unwrap(model)
        there, here = made["model"]["digest"], compute_model_digest(inner)
        if here != there:
            card = get_card(inner)
            raise InputError(
                f"the run is of a model with digest {there} ({made['model']['source']}); the one given has {here} "
                f"({card.source if card else type(inner).__name__}): pass the same model with the same weights"
            )
        for words in made["targets"]:
            if words is not None and not _is_class_target(words, run.run_info["class_names"]):
                raise InputError(
                    f"the run was asked {words!r}, of which only the words are known: camscope.metrics.PerturbationTest takes such maps in Python"
                )
        run.require_images()
        reader = GradCAM(model, preprocess=preprocess, class_names=run.run_info["class_names"] or None)
        if (words := format_without_address(reader.preprocess)) != made["preprocess"]:
            raise PreprocessError(
                f"the run was made with preprocess {made['preprocess']}; here it is {words}: pass the same preprocess"
            )
        return cls(run, model, reader)

    def read_image(self, row: Row) -> Tensor:
        """(C,*S): a row's image as it entered the model then; UndefinedError where it is not there any more.

        ImageError for one that has changed: of such a run nothing can be said.
        """
        try:
            source = self.run.read_source(row)
        except ImageError as error:
            raise UndefinedError(str(error)) from error
        require_unchanged(row, source)
        made = self.run.run_info["run_config"]
        item = prepare_input(
            source, self.input_explainer, InputOptions(reduced_decoding=made["reduced_decoding"], window=made.get("window"))
        )
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

    def get_target(self, row: Row) -> TargetLike:
        """What was asked of a row; UndefinedError where it is no class."""
        if row["target"] is None:
            raise UndefinedError(f"what was asked, {row['label']}, is no class: it cannot be asked again")
        return parse_target(row["target"])

    def get_mode(self, row: Row) -> Mode:
        """In which its method ran the model."""
        found: Mode = self._get_method_settings(format_method_key(row)).get("mode", "eval")
        return found

    def get_call_settings(self, row: Row) -> dict[str, Any]:
        """How its method called the model with an image: see `BaseMethod.call_settings`."""
        settings = self._get_method_settings(format_method_key(row))
        return {name: settings.get(name) for name in ("input_key", "frames_first")}

    def rebuild_explainers(self, explainers: Sequence[Explainer] = ()) -> dict[str, Explainer]:
        """By `format_method_key`: those of the run, made again from its facts, or `explainers`; InputError for what cannot be made again."""
        known = {f"{tool.full_name} {hash_parameters(tool.parameters)}": tool for tool in explainers}
        for tool in explainers:
            if unwrap(tool.model) is not unwrap(self.model):
                raise InputError(f"{tool!r} is of another model than the one given")
        return {
            key: known.get(key) or self._rebuild_explainer(key) for key in self.run.run_info["run_config"]["methods"]
        }

    def _rebuild_explainer(self, method_key: str) -> Explainer:
        """With the settings whose digest the run has, or not at all."""
        title, _, digits = method_key.rpartition(" ")
        settings = {name: _parse_setting(said) for name, said in self._get_method_settings(method_key).items()}
        try:
            tool = METHODS[title](
                self.model,
                preprocess=self.input_explainer.preprocess,
                class_names=self.input_explainer.class_names,
                **settings,
            )
        except Exception as error:  # of whatever words are no setting
            raise InputError(
                f"{title} cannot be made again from what the run says of it; {PASS_EXPLAINERS_HINT}"
            ) from error
        if hash_parameters(tool.parameters) != digits:
            raise InputError(f"{title} has settings that the run's words do not bring back; {PASS_EXPLAINERS_HINT}")
        return tool

    def _get_method_settings(self, method_key: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.run.run_info["run_config"]["methods"].get(method_key, {})
        return found


def format_method_key(row: Row) -> str:
    """A row's method and its settings, as `run.json` names them."""
    return f"{row['method']} {row['parameters_digest']}"


def _is_class_target(text: str, class_names: Sequence[str]) -> bool:
    return isinstance(parse_target(text), int) or text in class_names


def _parse_setting(text: Any) -> Any:
    """A setting from its words: of a list its entries, for words in words are said as they are."""
    if not isinstance(text, str) or not text.startswith(("[", "(")):
        return text
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
