"""The config of an audit, read from a TOML file or a mapping: data, model, methods and verdict margins."""

import hashlib
import inspect
import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from camscope.atomic_writes_and_folder_locks import read_bytes
from camscope.audit.core.config_faults import FaultCollector, find_key_lines, validate_tables
from camscope.batch.build_manifest_from_source import DATASET_PREFIXES
from camscope.errors import InputError
from camscope.explainers.core.base_explainer import get_explainer_class
from camscope.read_untrusted_files import MAX_TOML_BYTES, parse_toml, read_errors_converted

ImputationName = Literal["mean", "blur", "noise", "zero", "inpainting"]
Modality = Literal["xray", "ct", "mri", "dermoscopy", "retina", "pathology", "any"]
StageName = Literal["localization", "faithfulness", "sanity", "robustness", "shortcut"]  # stages that may be skipped
IDENTIFIER_COLUMNS = ("row", "id", "path")  # columns with a different value for each image


def _reject_duplicates(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Raise a ValueError if a value occurs twice. Otherwise the audit would count this value twice."""
    if repeated := [value for value, count in Counter(values).items() if count > 1]:
        raise ValueError(f"{repeated[0]!r} is listed twice; expected each value once")
    return values


DURATION_PATTERN = re.compile(r"(\d+(?:\.\d+)?)(s|m|h)")
SECONDS_BY_UNIT = {"s": 1, "m": 60, "h": 3600}
UNIT_NAMES = {"s": "second", "m": "minute", "h": "hour"}


def _check_duration(value: str) -> str:
    """Raise a ValueError if a text is not a duration such as `10m`."""
    match = DURATION_PATTERN.fullmatch(value)
    if match is None or float(match[1]) == 0:
        raise ValueError(f"{value!r} is not a duration; expected a number with s, m or h, such as 90s, 10m or 1.5h")
    return value


UniqueNames = Annotated[tuple[str, ...], AfterValidator(_reject_duplicates)]


def _to_category_names(value: Any) -> Any:
    """Convert one category or a list of categories to a tuple of names. Numbers become text."""
    values = value if isinstance(value, list | tuple) else [value]
    return tuple(str(item) if isinstance(item, int) and not isinstance(item, bool) else item for item in values)


CategoryNames = Annotated[tuple[str, ...], BeforeValidator(_to_category_names), AfterValidator(_reject_duplicates)]


class _ConfigTable(BaseModel):
    """A table of the TOML file. It is immutable, and unknown keys raise an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class MaskSource(_ConfigTable):
    """The source of masks: a file or folder, or a manifest column.

    A column may also hold boxes or points. `category`: the categories of a COCO file, or the labels of a mask, that count.
    "all" selects every one. Required where the source has several, as `{ file = "annotations.json", category = "WBC" }`.
    """

    file: str | None = None
    column: str | None = None
    category: CategoryNames = ()

    @model_validator(mode="after")
    def _check_single_source(self) -> Self:
        if (self.file is None) == (self.column is None):
            raise ValueError('name either file, as { file = "annotations.json", category = "WBC" }, or column')
        return self


MaskSourceLike = str | MaskSource


class DataConfig(_ConfigTable):
    """`[data]`: the images, their labels and their masks.

    Paths of images and masks are relative to `root` and may not leave it. By default it is the manifest's folder. `anywhere`
    allows any path. `masks_root` is the folder that `ground_truth` is relative to, for a TOML file its folder. `label` is
    the column with the class of each image, by name or number. `labels` replaces it: finding -> its column of 0 and 1.
    The report shows the levels of `subgroups`, so that a column that names images or patients is an error.
    `annotation_protocol` says who labeled and located the findings, as free text. `window` is that of CT images, as
    "center,width".
    """

    manifest: str  # a table, a folder or a dataset
    root: str | None = None
    anywhere: bool = False
    label: str | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    patient: str | None = None
    subgroups: UniqueNames = ()
    split: str | None = None
    split_value: str | None = None  # only rows with this value are audited
    ground_truth: str | MaskSource | dict[str, MaskSourceLike] | None = Field(default=None, union_mode="left_to_right")
    masks_root: str | None = None
    annotation_protocol: str = ""
    max_images: int | None = Field(default=None, ge=1)  # drawn by the seed
    window: str | None = None

    @model_validator(mode="after")
    def _check_label_and_split(self) -> Self:
        """Check that either `label` or `labels` is set, that the split is complete, and that no subgroup identifies patients."""
        if (self.label is None) == (not self.labels):
            raise ValueError(
                "label: set either label, one column with the class of each image, or labels, one column for each finding"
            )
        if (self.split is None) != (self.split_value is None):
            key = "split" if self.split_value is None else "split_value"
            raise ValueError(f"{key}: set both split, a column, and split_value, the value of the rows to audit")
        if identifiers := [name for name in self.subgroups if name in (*IDENTIFIER_COLUMNS, self.patient)]:
            raise ValueError(
                f"subgroups: {identifiers[0]!r} identifies images or patients, and the report shows the values of subgroups; "
                "expected columns such as site, scanner or sex"
            )
        return self


class ModelConfig(_ConfigTable):
    """`[model]`: the model and its weights, written as for `camscope explain`. A Python file is executed.

    `outputs`: "softmax" for mutually exclusive classes, "sigmoid" for one independent score for each finding.
    """

    source: str
    weights: str | None = None
    preprocess: str | None = None
    outputs: Literal["softmax", "sigmoid"] = "softmax"
    device: str = "cpu"


class ExplainConfig(_ConfigTable):
    """`[explain]`: the findings, by class name or number, and the methods.

    `settings`: method -> its parameters, as `[explain.settings.integratedgradients]` with `n_steps = 16`.
    """

    findings: UniqueNames = Field(min_length=1)
    methods: UniqueNames = Field(default=("gradcam", "integratedgradients"), min_length=1)
    layer: str | None = None
    settings: dict[str, dict[str, Any]] = Field(default_factory=dict)

    @field_validator("methods")
    @classmethod
    def _check_methods(cls, methods: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(get_explainer_class(name).name for name in methods)

    @model_validator(mode="after")
    def _check_method_settings(self) -> Self:
        """Check that `settings` names only chosen methods, and only parameters that these methods have."""
        for method, settings in self.settings.items():
            if method not in self.methods:
                raise ValueError(f"settings.{method}: {method} is not in methods, which has {', '.join(self.methods)}")
            parameters = inspect.signature(get_explainer_class(method)).parameters
            names = [name for name in parameters if name not in ("model", "preprocess")]
            if unknown := [name for name in settings if name not in names]:
                raise ValueError(
                    f"settings.{method}: {method} has no parameter {unknown[0]!r}; expected one of {', '.join(names)}"
                )
        return self


class RegionsConfig(_ConfigTable):
    """`[regions]`: the regions of an image that a correct model does not need."""

    modality: Modality | None = None  # whose usual regions are detected in each image
    presets: tuple[str, ...] = ()  # the regions to detect in place of those of the modality
    columns: dict[str, MaskSourceLike] = Field(default_factory=dict)  # the masks of markers that only some images have
    organ: MaskSourceLike | None = None  # the masks of the organ that contains the finding


class Margins(_ConfigTable):
    """`[margins]`: the thresholds of the verdicts. Declare them before the results are known.

    The absence of a reliance is claimed only with enough patients to observe the share `reliance_prevalence` with 95 %
    certainty (59 for 0.05).
    """

    effect: float = Field(default=0.1, gt=0, allow_inf_nan=False)  # in standard deviations of the log odds
    auroc_difference: float = Field(default=0.05, gt=0, lt=0.5)  # between subgroups
    useful_auroc: float = Field(default=0.7, ge=0.5, lt=1)  # that a useful model exceeds
    masked_auroc: float = Field(default=0.7, gt=0.5, lt=1)  # above it without the organ, the model does not need it
    enrichment: float = Field(default=1.5, ge=1, allow_inf_nan=False)  # of a region in a map; 1 is the chance level
    mass_difference: float = Field(default=0.05, gt=0, lt=1)  # of a map's share between subgroups
    robustness_correlation: float = Field(default=0.5, ge=0, lt=1)  # of maps under changes that should not matter
    leakage_auroc: float = Field(default=0.6, gt=0.5, lt=1)  # below it, the features do not encode a column
    reliance_prevalence: float = Field(default=0.05, gt=0, lt=1)  # the share of patients in whom it may be missed


class SampleSizes(_ConfigTable):
    """`[sample_sizes]`: the number of images for each slow stage. The sample is balanced by label."""

    faithfulness: int = Field(default=48, ge=8)
    robustness: int = Field(default=24, ge=8)
    sanity: int = Field(default=12, ge=5)
    regions: int = Field(default=500, ge=8)
    interventions: int = Field(default=200, ge=8)
    gallery: int = Field(default=12, ge=4, le=48)


class ReportConfig(_ConfigTable):
    """`[report]`: what the report shows. The profile "research" hides file names and unlisted columns."""

    profile: Literal["research", "clinical"] = "research"
    columns: tuple[str, ...] = ()
    allow_burned_in_text: bool = False


class Config(_ConfigTable):
    """The settings of an audit.


    Example:
        >>> config = Config.from_source({
        ...     "data": {"manifest": "manifest.csv", "label": "label"},
        ...     "model": {"source": "phantom"},
        ...     "explain": {"findings": ["nodule"]},
        ... })
        >>> config.margins.useful_auroc
        0.7

    Attributes:
        title: The title of the report.
        intended_use: What the model is meant for, as free text.
        seed: The seed of every random choice.
        n_resamples: The number of bootstrap resamples of patients.
        budget: The time that the audit may take, such as "10m". The slow stages take as many images as fit. A
            warning says if the rest takes longer. None: the images of `sample_sizes`.
        sequential: Whether faithfulness and robustness stop before all sampled images are used, where a verdict is reached.
        imputations: What replaces removed pixels. At least two, because the effect of one may be its artifact.
        batch_size: The number of images in a forward pass.
        skip: The stages to skip. The report lists them as not tested.
        data: The images, their labels and their masks.
        model: The model and its weights.
        explain: The findings, and the methods that explain them.
        regions: The regions of the shortcut tests.
        margins: The margins of the verdicts.
        sample_sizes: The number of images in each stage.
        report: The options of the report.

    """

    title: str = "Model audit"
    intended_use: str = ""
    seed: int = Field(default=0, ge=0)
    n_resamples: int = Field(default=2000, ge=200)
    sequential: bool = True
    budget: Annotated[str, AfterValidator(_check_duration)] | None = None
    imputations: Annotated[tuple[ImputationName, ...], AfterValidator(_reject_duplicates)] = Field(
        default=("mean", "blur"), min_length=2
    )
    batch_size: int | None = Field(default=None, ge=1)
    skip: tuple[StageName, ...] = ()
    data: DataConfig
    model: ModelConfig
    explain: ExplainConfig
    regions: RegionsConfig = RegionsConfig()
    margins: Margins = Margins()
    sample_sizes: SampleSizes = SampleSizes()
    report: ReportConfig = ReportConfig()

    @classmethod
    def from_source(cls, source: "Config | Mapping[str, Any] | str | os.PathLike[str]") -> "Config":
        """Return a config from a TOML file, from a mapping of tables, or from another config.

        Paths in a TOML file are relative to the file.

        Args:
            source: The path of a TOML file, a mapping of tables, or a config, which is returned unchanged.

        Returns:
            The validated config.

        Raises:
            InputError: There is no such file, or a setting is invalid.

        >>> tables = {
        ...     "data": {"manifest": "manifest.csv", "label": "label"},
        ...     "model": {"source": "phantom"},
        ...     "explain": {"findings": ["nodule"]},
        ... }
        >>> Config.from_source(tables).seed
        0

        """
        config, faults = cls.parse_source(source)
        faults.raise_if_any()
        return cast("Config", config)

    @classmethod
    def parse_source(
        cls, source: "Config | Mapping[str, Any] | str | os.PathLike[str]"
    ) -> "tuple[Config | None, FaultCollector]":
        """Return the config, or None for an invalid config. Also return the collected faults, without raising an error.

        Args:
            source: As for `from_source`.

        Returns:
            The config, with defaults in place of settings that have a fault, or None if a required setting has one. The
            faults.

        Raises:
            InputError: There is no such file, or it is no TOML.

        >>> config, faults = Config.parse_source({"data": {"manifest": "manifest.csv", "label": "label"}})
        >>> [".".join(fault.key) for fault in faults.faults]
        ['model', 'explain']

        """
        if isinstance(source, Config):
            return source, FaultCollector()
        if isinstance(source, Mapping):
            return cls._parse_tables(source, FaultCollector())
        path = Path(source)
        if not path.exists():
            raise InputError(f"{path}: the config file does not exist; camscope audit init writes one")
        message = f"{path}: this is no TOML file"
        with read_errors_converted(message):
            text = read_bytes(path, MAX_TOML_BYTES).decode("utf-8")
        return cls._parse_tables(
            parse_toml(text, message), FaultCollector(str(path), find_key_lines(text)), path.parent
        )

    @classmethod
    def from_toml(cls, text: str, folder: Path) -> "Config":
        """Return the config that TOML text describes. Paths in the text are relative to `folder`.

        Args:
            text: The text of a TOML file.
            folder: The folder to which its paths are relative.

        Returns:
            The validated config.

        Raises:
            InputError: The text is no TOML, or a setting is invalid.

        >>> text = '''
        ... [data]
        ... manifest = "manifest.csv"
        ... label = "label"
        ... [model]
        ... source = "phantom"
        ... [explain]
        ... findings = ["nodule"]
        ... '''
        >>> Config.from_toml(text, Path("study")).model.source
        'phantom'

        """
        tables = parse_toml(text, "the config is not a valid TOML file")
        config, faults = cls._parse_tables(tables, FaultCollector(lines=find_key_lines(text)), folder)
        faults.raise_if_any()
        return cast("Config", config)

    @classmethod
    def _parse_tables(
        cls, tables: Mapping[str, Any], faults: FaultCollector, folder: Path | None = None
    ) -> "tuple[Config | None, FaultCollector]":
        """Validate config tables and collect their faults. Paths in the tables are relative to `folder`."""
        with read_errors_converted(faults.source_name):  # a value may be an invalid path: too long, or with a null byte
            resolved = tables if folder is None else _resolve_paths(tables, folder)
        return validate_tables(cls, resolved, faults), faults

    @property
    def perturbed_batch_size(self) -> int:
        """The number of edited images in one forward pass."""
        return self.batch_size or 16

    @property
    def budget_seconds(self) -> float | None:
        """The time limit of the audit in seconds. The value is `None` if there is no limit."""
        match = DURATION_PATTERN.fullmatch(self.budget or "")
        return None if match is None else float(match[1]) * SECONDS_BY_UNIT[match[2]]

    @property
    def budget_in_words(self) -> str:
        """The time limit of the audit as text, such as "4 minutes". The text is empty if there is no limit."""
        match = DURATION_PATTERN.fullmatch(self.budget or "")
        return "" if match is None else f"{match[1]} {UNIT_NAMES[match[2]]}{'' if match[1] == '1' else 's'}"

    @property
    def bootstrap_options(self) -> dict[str, int]:
        """The keyword arguments that every bootstrap gets: the number of resamples and the seed."""
        return {"n_resamples": self.n_resamples, "seed": self.seed}

    @property
    def digest(self) -> str:
        """The SHA-256 digest of all settings except paths.

        Files have digests themselves.
        """
        settings = self.to_redacted_dict()
        settings["data"] |= {"manifest": None, "root": None}
        del settings["data"]["anywhere"]  # also a matter of where files lie
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()

    def to_redacted_dict(self) -> dict[str, Any]:
        """Return the config as JSON values, without paths. Only the file name of the model source is kept.

        Returns:
            The tables by name.

        >>> tables = {
        ...     "data": {"manifest": "manifest.csv", "label": "label"},
        ...     "model": {"source": "phantom"},
        ...     "explain": {"findings": ["nodule"]},
        ... }
        >>> Config.from_source(tables).to_redacted_dict()["data"]["manifest"]
        'a file'

        """
        tables = self.model_dump(mode="json")
        data, model, regions = tables["data"], tables["model"], tables["regions"]
        data |= {"manifest": "a file", "root": None if data["root"] is None else "files", "masks_root": None}
        redact = _redact_mask_sources if isinstance(self.data.ground_truth, dict) else _redact_mask_source
        data["ground_truth"] = redact(data["ground_truth"])
        regions["columns"] = _redact_mask_sources(regions["columns"])
        regions["organ"] = _redact_mask_source(regions["organ"])
        model["weights"] = model["weights"] if model["weights"] in (None, "random") else "a file"
        library, _, name = model["source"].partition(":")
        file, colon, function = model["source"].rpartition(":")
        if library == "hf" and Path(name).expanduser().is_dir():
            model["source"] = "hf:files"
        elif library != "hf" and colon and file.endswith(".py"):
            model["source"] = f"{Path(file).name}:{function}"
        return tables


def _resolve_paths(tables: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the config tables with their file paths resolved against the folder of the config."""
    resolved = {name: dict(value) if isinstance(value, Mapping) else value for name, value in tables.items()}
    data, model = resolved.get("data"), resolved.get("model")
    if isinstance(data, dict):
        for name in ("manifest", "root"):
            if isinstance(data.get(name), str) and data[name]:  # root = "" allows any path
                data[name] = resolve_manifest_source(data[name], folder)
        data["masks_root"] = str(folder / str(data.get("masks_root", "")))
    if isinstance(model, dict):
        weights, source = model.get("weights"), model.get("source")
        if isinstance(weights, str) and weights != "random":
            model["weights"] = str(folder / weights)
        if isinstance(source, str) and ".py:" in source:
            model["source"] = str(folder / source)
    return resolved


def resolve_manifest_source(source: str, folder: Path) -> str:
    """Resolve the manifest path against the folder of the config. URLs and dataset names stay unchanged."""
    prefix = next((prefix for prefix in DATASET_PREFIXES if source.startswith(prefix)), "")
    path = folder / source.removeprefix(prefix)
    return source if "://" in source or (prefix and not path.is_dir()) else f"{prefix}{path}"


def _redact_mask_sources(mask_sources: dict[str, Any]) -> dict[str, Any]:
    return {name: _redact_mask_source(source) for name, source in mask_sources.items()}


def _redact_mask_source(mask_source: Any) -> Any:
    """Hide the name of a mask file or mask folder. Column names and categories stay visible."""
    if isinstance(mask_source, dict):
        return {**mask_source, "file": None if mask_source["file"] is None else "files"}
    is_path = mask_source and ("/" in mask_source or os.sep in mask_source or mask_source.lower().endswith(".json"))
    return "files" if is_path else mask_source
