"""Load a model folder of nnU-Net v2: `plans.json`, `dataset.json` and `fold_0/checkpoint_final.pth`.

The architecture comes from `dynamic-network-architectures`, the package that nnU-Net uses. nnU-Net itself is not needed.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from camscope.errors import CamscopeError, ModelError, WeightsError
from camscope.images.scans.nnunet_preprocess import CT, EXTRA, NORMALIZATIONS, NnunetPreprocess
from camscope.loaded_model_metadata_and_weight_digest import LoadedModelMetadata
from camscope.models.checkpoint import (
    RANDOM_WEIGHTS,
    WeightsSource,
    fixed_seed_scope,
    format_model_source,
    load_state_dict_strictly,
    read_state_dict,
)
from camscope.models.nnunet_checkpoint import read_nnunet_checkpoint
from camscope.optional_packages import require
from camscope.plurals import plural
from camscope.read_untrusted_files import read_json

ARCHITECTURES = ("PlainConvUNet", "ResidualEncoderUNet")
ARCHITECTURE_MODULE = "dynamic_network_architectures.architectures.unet"
LAYER_NAME = re.compile(r"torch\.nn\.(modules\.[a-z]+\.)?([A-Z]\w*)")
CHECKPOINT_NAMES = ("checkpoint_final.pth", "checkpoint_best.pth", "checkpoint_latest.pth")
READERS = ("SimpleITKIO", "NibabelIO", "NibabelIOWithReorient")
RESAMPLING = "resample_data_or_seg_to_shape"
MAX_STAGES, MAX_PLAN_BYTES = 16, 2**26
BACKGROUND, IGNORED = "background", "ignore"


class NnunetFolder(NamedTuple):
    """The files of a trained model of nnU-Net."""

    plans: Mapping[str, Any]
    dataset: Mapping[str, Any]
    checkpoint: Path | None


def load_nnunet_model_and_metadata(
    name: str, weights: WeightsSource, *, trust_code: bool = False
) -> tuple[nn.Module, LoadedModelMetadata]:
    """Load a folder of nnU-Net v2, the folder of a fold in it, or a checkpoint of a fold."""
    spec = f"nnunet:{name}"
    folder = _read_folder(Path(name).expanduser(), spec, needs_checkpoint=weights is None)
    content: Mapping[str, Any] = {}
    if folder.checkpoint is not None and weights is None:
        content = read_nnunet_checkpoint(folder.checkpoint, trust_code=trust_code)
    configuration_name = _find_configuration_name(folder.plans, content, spec)
    with _plans_checked(spec):
        configuration = _resolve_configuration(folder.plans["configurations"], configuration_name)
        class_names, has_regions = _read_class_names(folder.dataset["labels"])
        channels = folder.dataset.get("channel_names") or folder.dataset["modality"]
        preprocess = _build_preprocess(folder.plans, configuration, len(channels), spec)
        if configuration.get("previous_stage_name") or configuration.get("previous_stage"):
            raise ModelError(f"{spec}: {configuration_name} is the second stage of a cascade; explain its first stage")
        architecture = _read_architecture(configuration)
        build = _find_builder(architecture, len(channels), len(class_names), spec, trust_code=trust_code)
        if content:
            _check_size(build, content["network_weights"], spec)
        with fixed_seed_scope():
            model = build()
    if content:
        load_state_dict_strictly(model, dict(content["network_weights"]), folder.checkpoint)
    elif weights != RANDOM_WEIGHTS:
        load_state_dict_strictly(model, read_state_dict(weights or ""), weights)
    n_stages = int(architecture["arch_kwargs"]["n_stages"])
    model.has_overlapping_classes = has_regions
    return model, LoadedModelMetadata(
        format_model_source(spec, weights), preprocess, class_names, f"encoder.stages.{n_stages - 1}"
    )


@contextmanager
def _plans_checked(spec: str) -> Iterator[None]:
    """Convert the errors of incomplete or malformed plans to one ModelError inside the `with`."""
    try:
        yield
    except CamscopeError:
        raise
    except Exception as error:  # values of any kind may be anywhere in the files
        reason = f"there is no {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
        raise ModelError(f"{spec}: no model can be built from plans.json and dataset.json: {reason[:300]}") from error


def _read_folder(path: Path, spec: str, *, needs_checkpoint: bool) -> NnunetFolder:
    """Read the plans of a model folder. Find the checkpoint: the one named, that of fold 0, or that of the only fold."""
    checkpoint = path if path.is_file() else None
    fold = path.parent if checkpoint else path if path.name.startswith("fold_") else None
    folder = path if fold is None else fold.parent
    missing = [name for name in ("plans.json", "dataset.json") if not (folder / name).is_file()]
    if missing:
        raise ModelError(
            f"{spec}: {folder} has no {' and no '.join(missing)}; expected the folder of a trained model of nnU-Net v2, "
            "such as nnUNetTrainer__nnUNetPlans__3d_fullres"
        )
    plans, dataset = (
        read_json(folder / name, f"{spec}: {name} is no JSON file that can be read", max_bytes=MAX_PLAN_BYTES)
        for name in ("plans.json", "dataset.json")
    )
    if not isinstance(plans, dict) or not isinstance(dataset, dict):
        raise ModelError(f"{spec}: plans.json and dataset.json must hold objects")
    if fold is None:
        folds = sorted(part for part in folder.glob("fold_*") if part.is_dir())
        fold = next((part for part in folds if part.name == "fold_0"), folds[0] if len(folds) == 1 else None)
        if fold is None and needs_checkpoint:
            names = ", ".join(part.name for part in folds) or "none"
            raise ModelError(f"{spec}: there is no fold_0 (folds: {names}); name one, as in nnunet:FOLDER/fold_1")
    if checkpoint is None and fold is not None:
        checkpoint = next((fold / name for name in CHECKPOINT_NAMES if (fold / name).is_file()), None)
    if checkpoint is None and needs_checkpoint:
        raise ModelError(f"{spec}: {fold} has no {CHECKPOINT_NAMES[0]}")
    return NnunetFolder(plans, dataset, checkpoint)


def _find_configuration_name(plans: Mapping[str, Any], content: Mapping[str, Any], spec: str) -> str:
    """Return the name of the configuration that was trained, or of the only one in the plans."""
    arguments = content.get("init_args")
    configurations = plans.get("configurations")
    if not isinstance(configurations, Mapping):
        raise ModelError(f"{spec}: plans.json has no configurations; expected plans of nnU-Net v2")
    if isinstance(arguments, Mapping) and isinstance(arguments.get("configuration"), str):
        return str(arguments["configuration"])
    if len(configurations) == 1:
        return str(next(iter(configurations)))
    raise ModelError(
        f"{spec}: which of the configurations {', '.join(configurations)} was trained is unknown; leave one in plans.json"
    )


def _resolve_configuration(configurations: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a configuration, completed by those that it inherits from."""
    chain = list[str]()
    current: str | None = name
    while current is not None:
        if current in chain or current not in configurations:
            raise ModelError(f"the configuration {current!r} of plans.json is missing, or inherits from itself")
        chain.append(current)
        current = configurations[current].get("inherits_from")
    resolved: dict[str, Any] = {}
    for part in reversed(chain):
        resolved.update(configurations[part])
    return resolved


def _read_class_names(labels: Mapping[str, Any]) -> tuple[tuple[str, ...], bool]:
    """Return the names of the output channels, and whether they are regions that may overlap."""
    has_regions = any(isinstance(value, list) and len(value) > 1 for value in labels.values())
    if has_regions:
        regions = [name for name, value in labels.items() if name != IGNORED and value not in (0, [0])]
        return tuple(regions), True
    values = {
        int(value[0] if isinstance(value, list) else value): name for name, value in labels.items() if name != IGNORED
    }
    return tuple(str(values[value]) for value in sorted(values)), False


def _build_preprocess(
    plans: Mapping[str, Any], configuration: Mapping[str, Any], n_channels: int, spec: str
) -> NnunetPreprocess:
    """Build the preprocessing of the plans. Raise ModelError for steps that camscope does not have."""
    normalizations = tuple(map(str, configuration["normalization_schemes"]))
    reader, resampling = plans.get("image_reader_writer", READERS[0]), configuration["resampling_fn_data"]
    problems = {
        "normalization": [name for name in normalizations if name not in NORMALIZATIONS],
        "reader of images": [reader] if reader not in READERS else [],
        "resampling": [resampling] if resampling != RESAMPLING else [],
        "preprocessor": [
            name
            for name in [configuration.get("preprocessor_name", "DefaultPreprocessor")]
            if name != "DefaultPreprocessor"
        ],
    }
    for kind, unsupported in problems.items():
        if unsupported:
            raise ModelError(f"{spec}: the {kind} {str(unsupported[0])[:80]!r} of plans.json is not supported")
    masked = tuple(map(bool, configuration["use_mask_for_norm"]))
    if not len(normalizations) == len(masked) == n_channels:
        raise ModelError(f"{spec}: plans.json normalizes {len(normalizations)} of {plural(n_channels, 'channel')}")
    by_channel = plans.get("foreground_intensity_properties_per_channel") or {}
    intensities = tuple(
        {key: float(value) for key, value in by_channel.get(str(i), {}).items()} if name == CT else {}
        for i, name in enumerate(normalizations)
    )
    options = configuration["resampling_fn_data_kwargs"]
    separate = options.get("force_separate_z")
    return NnunetPreprocess(
        patch_size=tuple(map(int, configuration["patch_size"])),
        target_spacing=tuple(map(float, configuration["spacing"])),
        normalizations=normalizations,
        masked=masked,
        intensities=intensities,
        transpose=tuple(map(int, plans["transpose_forward"])),
        order=int(options["order"]),
        order_between_slices=int(options["order_z"]),
        separate_slices=None if separate is None else bool(separate),
        reorient=reader == "NibabelIOWithReorient",
    )


def _read_architecture(configuration: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the class and arguments of the network. Plans before nnU-Net 2.5 describe it by numbers, in other keys."""
    if "architecture" in configuration:
        architecture: Mapping[str, Any] = configuration["architecture"]
        return architecture
    name, dimension = str(configuration["UNet_class_name"]), len(configuration["patch_size"])
    n_stages = len(configuration["n_conv_per_stage_encoder"])
    first, largest = configuration["UNet_base_num_features"], configuration["unet_max_num_features"]
    blocks = "n_conv_per_stage" if name == ARCHITECTURES[0] else "n_blocks_per_stage"
    return {
        "network_class_name": f"{ARCHITECTURE_MODULE}.{name}",
        "arch_kwargs": {
            "n_stages": n_stages,
            "features_per_stage": [min(first * 2**stage, largest) for stage in range(n_stages)],
            "conv_op": f"torch.nn.Conv{dimension}d",
            "kernel_sizes": configuration["conv_kernel_sizes"],
            "strides": configuration["pool_op_kernel_sizes"],
            blocks: configuration["n_conv_per_stage_encoder"],
            "n_conv_per_stage_decoder": configuration["n_conv_per_stage_decoder"],
            "conv_bias": True,
            "norm_op": f"torch.nn.InstanceNorm{dimension}d",
            "norm_op_kwargs": {"eps": 1e-5, "affine": True},
            "dropout_op": None,
            "dropout_op_kwargs": None,
            "nonlin": "torch.nn.LeakyReLU",
            "nonlin_kwargs": {"inplace": True},
        },
        "_kw_requires_import": ["conv_op", "norm_op", "dropout_op", "nonlin"],
    }


def _find_builder(
    architecture: Mapping[str, Any], n_channels: int, n_classes: int, spec: str, *, trust_code: bool
) -> Any:
    """Return a function that builds the network. Raise ModelError for a class that is not on the allow-list."""
    class_name = str(architecture["network_class_name"])
    module, _, name = class_name.rpartition(".")
    if module.startswith("dynamic_network_architectures.architectures.") and name in ARCHITECTURES:
        network_class = getattr(require(ARCHITECTURE_MODULE, extra=EXTRA), name)
    elif trust_code:
        network_class = getattr(import_module(module), name)
    else:
        raise ModelError(
            f"{spec}: plans.json names the network {class_name[:80]!r}; only {' and '.join(ARCHITECTURES)} are built, because "
            "another class could execute code. Where you trust it, pass trust_code=True (--trust-code)"
        )
    arguments = dict(architecture["arch_kwargs"])
    for key in architecture["_kw_requires_import"]:
        if arguments.get(key) is not None:
            arguments[key] = _find_layer_class(str(arguments[key]), key, spec)
    if not 1 <= int(arguments["n_stages"]) <= MAX_STAGES:
        raise ModelError(f"{spec}: plans.json has {arguments['n_stages']} stages; expected 1 to {MAX_STAGES}")

    def build() -> nn.Module:
        network: nn.Module = network_class(
            input_channels=n_channels, num_classes=n_classes, **arguments | {"deep_supervision": False}
        )
        return network

    return build


def _find_layer_class(class_name: str, key: str, spec: str) -> type[nn.Module]:
    """Return a layer class of PyTorch by its name. Raise ModelError for any other name."""
    match = LAYER_NAME.fullmatch(class_name)
    layer_class = getattr(nn, match[2], None) if match else None
    if not (isinstance(layer_class, type) and issubclass(layer_class, nn.Module)):
        raise ModelError(f"{spec}: {key} of plans.json is {class_name[:80]!r}; expected a layer of torch.nn")
    return layer_class


def _check_size(build: Any, weights: Mapping[str, torch.Tensor], spec: str) -> None:
    """Raise WeightsError before a network is built that is larger than its checkpoint."""
    with torch.device("meta"):
        n_described = sum(prod(value.shape) for value in build().parameters())
    n_stored = sum(value.numel() for value in weights.values())
    if n_described > n_stored:
        raise WeightsError(
            f"{spec}: plans.json describes {plural(n_described, 'parameter', spec=',')}, but the checkpoint stores {n_stored:,}; "
            "are they of one model?"
        )
