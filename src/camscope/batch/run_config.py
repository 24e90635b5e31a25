"""The contents of run.json: what a run is made with, and what made it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from camscope.batch.batch_worker import BatchWorker
from camscope.batch.manifest import Manifest, hash_manifest
from camscope.batch.options import OverlayOptions
from camscope.batch.result_rows import hash_parameters
from camscope.explainers.core.base_method import format_without_address, redact_parameters
from camscope.explainers.core.runner import get_library_versions
from camscope.hooks.base import unwrap
from camscope.model_card import ModelCard, compute_model_digest, get_card
from camscope.models import redact_file_names


def build_run_info(worker: BatchWorker, chunk_size: int, overlays: OverlayOptions | None = None) -> dict[str, Any]:
    """Build the contents of a run.json. Two starts of one run have the same `run_config`."""
    explainer, manifest = worker.explainers[0], worker.manifest
    model = unwrap(explainer.model)
    folder = build_root_info(manifest)["folder"] if manifest.has_relative_paths else None
    return {
        "run_config": {
            "model": {
                "source": _describe_model_source(get_card(model), model, is_pseudonymized=manifest.is_pseudonymized),
                "digest": compute_model_digest(model),
            },
            "preprocess": format_without_address(explainer.preprocess),
            "methods": _build_method_settings(worker),
            "targets": [None if target is None else format_without_address(target) for target in worker.targets],
            "manifest": {
                "rows": len(manifest),
                "digest": hash_manifest(manifest),
                "dataset": manifest.dataset,
                "folder": folder,  # the same relative paths may name other images elsewhere
            },
            "chunk_size": chunk_size,
            "reduced_decoding": worker.reduced_decoding,
            **({} if worker.window is None else {"window": worker.window}),
            **({} if overlays is None else {"overlays": {"format": overlays.format, "height": overlays.height}}),
        },
        "root": build_root_info(manifest),
        "versions": dict(get_library_versions()),
        "class_names": list(explainer.class_names or ()),
    }


def _build_method_settings(worker: BatchWorker) -> dict[str, dict[str, Any]]:
    """Return the settings of each method. A key is the name of the method and a digest of its settings."""
    redact = redact_parameters if worker.manifest.is_pseudonymized else dict
    return {
        f"{explainer.full_name} {hash_parameters(explainer.parameters)}": to_json_parameters(
            redact(explainer.parameters)
        )
        for explainer in worker.explainers
    }


def _describe_model_source(card: ModelCard | None, model: nn.Module, *, is_pseudonymized: bool) -> str:
    """Return what loads the model again, without file names if the run is pseudonymized."""
    source = card.source if card else type(model).__name__
    return redact_file_names(source) if is_pseudonymized else source


def build_root_info(manifest: Manifest) -> dict[str, Any]:
    """Return the folder of relative paths, and whether paths must stay inside it."""
    if manifest.is_pseudonymized:
        return {"folder": "", "confined": False}
    resolver = manifest.path_resolver
    return {"folder": str((resolver.root or Path.cwd()).resolve()), "confined": resolver.confined}


def to_json_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Convert settings to values that JSON can hold."""
    return {name: value if isinstance(value, int | float | str) else str(value) for name, value in parameters.items()}
