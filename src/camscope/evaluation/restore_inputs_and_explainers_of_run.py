"""`RunReplay`: restore the model inputs, targets and explainers with which the maps of a run were computed."""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from camscope.batch import BatchRun
from camscope.batch.batch_worker import parse_target
from camscope.batch.image_loading import prepare_input
from camscope.batch.result_rows import hash_parameters
from camscope.batch.run_reader import require_unchanged_image
from camscope.errors import ImageError, InputError, PreprocessError, Remedy, UndefinedError
from camscope.explainers import METHODS, CenterGaussian, Explainer
from camscope.explainers.core.evaluation_context import Mode
from camscope.explainers.core.redacted_settings_text import format_without_address
from camscope.hooks.find_layers import unwrap
from camscope.loaded_model_metadata_and_weight_digest import compute_model_digest, get_loaded_model_metadata
from camscope.targets import TargetLike

Row = Mapping[str, Any]
EXPLAINERS_HINT = "in Python, pass evaluate(…, explainers=[…]) the explainers that the run was made with"


@dataclass(frozen=True)
class RunReplay:
    """A run with its model. `input_explainer`, which accepts any model, prepares images as in the run."""

    run: BatchRun
    model: nn.Module
    input_explainer: Explainer

    @classmethod
    def from_run(cls, run: BatchRun, model: nn.Module, preprocess: Any = None) -> "RunReplay":
        """Check that the run used this model and this preprocessing. Then build its replay."""
        settings, inner = run.run_info["run_config"], unwrap(model)
        expected_digest, digest = settings["model"]["digest"], compute_model_digest(inner)
        if digest != expected_digest:
            model_metadata = get_loaded_model_metadata(inner)
            source = model_metadata.source if model_metadata else type(inner).__name__
            raise InputError(
                f"the run used a model with digest {expected_digest} ({settings['model']['source']}), but this model has digest "
                f"{digest} ({source}): pass the model of the run with the same weights"
            )
        for text in settings["targets"]:
            if text not in (None, *run.run_info["class_names"]) and not isinstance(parse_target(text), int):
                raise InputError(
                    f"the target {text!r} of the run is not a class and cannot be restored: "
                    "call camscope.metrics.PerturbationTest in Python instead"
                )
        run.require_images()
        reader = CenterGaussian(model, preprocess=preprocess, class_names=run.run_info["class_names"] or None)
        if (text := format_without_address(reader.preprocess)) != settings["preprocess"]:
            raise PreprocessError(
                f"the run was made with preprocess {settings['preprocess']}, but this is {text}: pass the same preprocess"
            )
        return cls(run, model, reader)

    def read_image(self, row: Row) -> Tensor:
        """Return the model input (C,*S) for the image of a row. Raise an UndefinedError if the image is not available."""
        try:
            source = self.run.read_source(row)
        except ImageError as error:
            raise UndefinedError(str(error)) from error
        require_unchanged_image(row, source)
        settings = self.run.run_info["run_config"]
        options = {"reduced_decoding": settings["reduced_decoding"], "window": settings.get("window")}
        item = prepare_input(source, self.input_explainer, **options)
        size, placement = tuple(item.x.shape[1:]), item.placement
        recorded = None if row["placement"] is None else np.reshape(row["placement"], (len(size), -1))
        is_same = (recorded is None) == (placement is None) and (
            recorded is None or placement is None or np.allclose(recorded, placement.matrix)
        )
        if list(size) != row["input_size"] or not is_same:
            raise PreprocessError(
                f"{row['path']}: the model input differs from that of the run, in its size ({size}, in the run "
                f"{tuple(row['input_size'])}) or in the part of the image that it shows: pass the preprocess of the run"
            )
        return item.x

    def get_target(self, row: Row) -> TargetLike:
        """Return the target of a row. Raise an UndefinedError if the target is not a class."""
        if row["target"] is None:
            raise UndefinedError(f"the target {row['label']} is not a class and cannot be restored")
        return parse_target(row["target"])

    def get_model_mode(self, row: Row) -> Mode:
        """Return the mode in which the model computed the map of a row, such as "eval"."""
        mode: Mode = self._get_method_settings(format_method_key(row)).get("mode", "eval")
        return mode

    def get_forward_options(self, row: Row) -> dict[str, Any]:
        """Return the forward options that were used for the map of a row (see `BaseMethod.forward_options`)."""
        settings = self._get_method_settings(format_method_key(row))
        return {name: settings.get(name) for name in ("input_key", "frames_first")}

    def rebuild_explainers(self, explainers: Sequence[Explainer] = ()) -> dict[str, Explainer]:
        """Return a dict from method key to explainer, for all methods of the run.
        Missing explainers are rebuilt from the run's settings.
        """
        given = {}
        for explainer in explainers:
            if unwrap(explainer.model) is not unwrap(self.model):
                raise InputError(f"{explainer!r} has another model: expected the model that is passed as model")
            given[f"{explainer.composed_name} {hash_parameters(explainer.parameters)}"] = explainer
        keys = self.run.run_info["run_config"]["methods"]
        return {key: given.get(key) or self._rebuild_explainer(key) for key in keys}

    def _rebuild_explainer(self, method_key: str) -> Explainer:
        """Rebuild an explainer from the settings in the run. Its digest must match the digest in the run."""
        title, _, digest = method_key.rpartition(" ")
        plugins = self.run.run_info["run_config"].get("plugins", {})
        if plugins and title not in METHODS:
            raise InputError(
                f"{title} is not a method of camscope; the run was made with the plugin {', '.join(plugins)}",
                fix="import the module that registers it",
                remedy=Remedy.LOAD_PLUGIN,
            )
        settings = {name: _parse_setting(text) for name, text in self._get_method_settings(method_key).items()}
        reader = self.input_explainer
        settings |= {"preprocess": reader.preprocess, "class_names": reader.class_names}
        try:
            explainer = METHODS[title](self.model, **settings)
        except Exception as error:  # a setting may be text that the method rejects
            raise InputError(f"{title} cannot be rebuilt from the settings in the run; {EXPLAINERS_HINT}") from error
        if hash_parameters(explainer.parameters) != digest:
            raise InputError(f"{title} has settings that cannot be restored from the run; {EXPLAINERS_HINT}")
        return explainer

    def _get_method_settings(self, method_key: str) -> Mapping[str, Any]:
        settings: Mapping[str, Any] = self.run.run_info["run_config"]["methods"].get(method_key, {})
        return settings


def format_method_key(row: Row) -> str:
    """Return the method key of a row. It joins the method's name with the digest of its settings."""
    return f"{row['method']} {row['parameters_digest']}"


def _parse_setting(text: Any) -> Any:
    """Parse a method setting that a run stored. Lists were stored as text, and become lists again."""
    if not isinstance(text, str) or not text.startswith(("[", "(")):
        return text
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
