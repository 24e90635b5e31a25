"""Config: what an audit is to look at, and what was declared before anybody looked. A TOML file, or the same in Python."""

import hashlib
import inspect
import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from camscope.batch.sources import DATASET_PREFIXES
from camscope.data_readers import parse_toml, read_errors_converted, read_toml
from camscope.errors import InputError
from camscope.explainers.core.base import get_explainer_class

ImputationName = Literal["mean", "blur", "noise", "zero", "inpainting"]
Modality = Literal["xray", "ct", "mri", "dermoscopy", "retina", "pathology", "any"]
StageName = Literal["localization", "faithfulness", "sanity", "robustness", "shortcut"]  # stages that may be skipped
DEFAULT_IMPUTATION_NAMES: tuple[ImputationName, ...] = (
    "mean",
    "blur",
)  # at least two: what they agree on is not one fill's own doing
IDENTIFIER_COLUMNS = ("row", "id", "path")  # columns whose every value names an image


def _reject_duplicates(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """ValueError for a value that stands there twice: nothing is counted, or corrected for, twice."""
    if twice := [one for one, times in Counter(values).items() if times > 1]:
        raise ValueError(f"{twice[0]!r} stands there twice; expected each once")
    return values


UniqueNames = Annotated[tuple[str, ...], AfterValidator(_reject_duplicates)]


def _to_category_names(value: Any) -> Any:
    """One category as a list of one, and labels by number as names."""
    several = value if isinstance(value, list | tuple) else [value]
    return tuple(str(one) if isinstance(one, int) and not isinstance(one, bool) else one for one in several)


CategoryNames = Annotated[tuple[str, ...], BeforeValidator(_to_category_names), AfterValidator(_reject_duplicates)]


class _ConfigTable(BaseModel):
    """A table of the file: nothing in it is unknown, and nothing changes afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class MaskSource(_ConfigTable):
    """`{ file = "annotations.json", category = "WBC" }`: a file or a folder of masks, or a `column`, and what counts in it.

    `category`: one, or several, of a COCO file, or labels of masks; "all": every one. Needed where there are several.
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
    """`[data]`: the images, and what is known of each.

    `label`: a column with each image's class, by name or number; or `labels`: for each finding a column of 0 and 1.
    `ground_truth`: where the finding is, as `camscope evaluate --masks` takes it, or with its category, see `MaskSource`; of several
    findings a table, finding -> where.
    `masks_root`: the folder that a relative place of evidence begins in; of a TOML file its own. `annotation_protocol`: who said where
    findings are, and which images have one, in words.
    `root`: the folder that the paths in the manifest begin in and may not leave, images and masks alike; default: the
    manifest's own; "": any path may be named.
    `split`, `split_value`: only rows of this split.
    `subgroups`: columns by which answers and maps are compared, whose levels the report shows, so none that names an image
    or a patient. `max_images`: at most so many, drawn by the seed.
    """

    manifest: str
    root: str | None = None
    label: str | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    patient: str | None = None
    subgroups: UniqueNames = ()
    split: str | None = None
    split_value: str | None = None
    ground_truth: str | MaskSource | dict[str, MaskSourceLike] | None = Field(default=None, union_mode="left_to_right")
    masks_root: str | None = None
    annotation_protocol: str = ""
    max_images: int | None = Field(default=None, ge=1)
    window: str | None = None

    @model_validator(mode="after")
    def _check_label_and_split(self) -> Self:
        if (self.label is None) == (not self.labels):
            raise ValueError(
                "name either label, a column with each image's class, or labels, a column for each finding"
            )
        if (self.split is None) != (self.split_value is None):
            raise ValueError("split and use go together: the column, and the value whose rows are audited")
        if naming := [one for one in self.subgroups if one in (*IDENTIFIER_COLUMNS, self.patient)]:
            raise ValueError(
                f"subgroups: {naming[0]!r} names images or patients, and the report shows the levels of subgroups; "
                "name columns as site, scanner or sex"
            )
        return self


class ModelConfig(_ConfigTable):
    """`[model]`: as `camscope explain --model` and `--weights` take it; a file of Python that is named is executed.

    `outputs`: "softmax", classes that exclude one another, or "sigmoid", findings of which each has an answer of its own.
    """

    source: str
    weights: str | None = None
    preprocess: str | None = None
    outputs: Literal["softmax", "sigmoid"] = "softmax"
    device: str = "cpu"


class ExplainConfig(_ConfigTable):
    """`[explain]`: the findings, by class name or number, and the methods.

    The first method is a CAM by default, the others finer.

    `setting_names`: method -> its own settings, as `[explain.settings.integratedgradients]` with `steps = 16`.
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
    def _check_settings(self) -> Self:
        for method, said in self.settings.items():
            if method not in self.methods:
                raise ValueError(f"settings.{method}: the methods are {', '.join(self.methods)}; name it there too")
            known = [
                name
                for name in inspect.signature(get_explainer_class(method)).parameters
                if name not in ("model", "preprocess")
            ]
            if wrong := [name for name in said if name not in known]:
                raise ValueError(
                    f"settings.{method}: {method} has no setting {wrong[0]!r} here; it has {', '.join(known)}"
                )
        return self


class RegionsConfig(_ConfigTable):
    """`[regions]`: where a model should not need to look.

    `modality`: whose usual regions are looked for in each image; `presets`: or these. `columns`: name -> a column of masks,
    of markers that some images have. `organ`: a column of masks of what the finding lies in. Of either also `MaskSource`.
    """

    modality: Modality | None = None
    presets: tuple[str, ...] = ()
    columns: dict[str, MaskSourceLike] = Field(default_factory=dict)
    organ: MaskSourceLike | None = None


class Margins(_ConfigTable):
    """`[margins]`: what counts, declared before looking.

    `effect`: of an intervention, in standard deviations of the log odds. `auroc_difference`: a difference between subgroups that would
    matter. `useful_auroc`: the AUROC that a model has to exceed. `masked_auroc`: the AUROC above which a model that has lost the organ
    still answers. `enrichment`: of a region in a map, its share of the map over its share of the image; 1 is chance. `mass_difference`:
    a difference of a map's share between subgroups. `robustness_correlation`: the rank correlation of maps under changes that do not matter.
    `leakage_auroc`: the AUROC of a probe below which a column cannot be read off the features to any extent that matters. `reliance_prevalence`:
    the share of patients in whom the model may rely on a region without being found out; no reliance is claimed to be absent
    with fewer patients than it takes to meet one of these (59 for 0.05).
    """

    effect: float = Field(default=0.1, gt=0, allow_inf_nan=False)
    auroc_difference: float = Field(default=0.05, gt=0, lt=0.5)
    useful_auroc: float = Field(default=0.7, ge=0.5, lt=1)
    masked_auroc: float = Field(default=0.7, gt=0.5, lt=1)
    enrichment: float = Field(default=1.5, ge=1, allow_inf_nan=False)
    mass_difference: float = Field(default=0.05, gt=0, lt=1)
    robustness_correlation: float = Field(default=0.5, ge=0, lt=1)
    leakage_auroc: float = Field(default=0.6, gt=0.5, lt=1)
    reliance_prevalence: float = Field(default=0.05, gt=0, lt=1)


class SampleSizes(_ConfigTable):
    """`[sizes]`: on how many images, drawn by the seed with as many of each label as there are, the costly stages work."""

    faithfulness: int = Field(default=48, ge=8)
    robustness: int = Field(default=24, ge=8)
    sanity: int = Field(default=12, ge=5)
    regions: int = Field(default=500, ge=8)
    interventions: int = Field(default=200, ge=8)
    gallery: int = Field(default=12, ge=4, le=48)


class ReportConfig(_ConfigTable):
    """`[report]`: `columns` of the manifest that may be shown; "research" names no file and no other column of it."""

    profile: Literal["research", "clinical"] = "research"
    columns: tuple[str, ...] = ()
    allow_burned_in_text: bool = False


class Config(_ConfigTable):
    """An audit. `intended_use`: what the model is meant for, in words. `skip`: stages that are then "not tested"."""

    title: str = "Model audit"
    intended_use: str = ""
    seed: int = Field(default=0, ge=0)
    n_resamples: int = Field(default=2000, ge=200)
    imputations: Annotated[tuple[ImputationName, ...], AfterValidator(_reject_duplicates)] = Field(
        default=DEFAULT_IMPUTATION_NAMES, min_length=2
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
        """A config, its tables as dicts, or a TOML file; paths in a file are relative to it. InputError for what it is not."""
        if isinstance(source, Config):
            return source
        if isinstance(source, Mapping):
            return cls._validate_tables(source, "the config")
        path = Path(source)
        if not path.exists():
            raise InputError(f"{path}: there is no such file; camscope audit init writes one")
        return cls._from_relative_tables(read_toml(path), path.parent, str(path))

    @classmethod
    def from_toml(cls, text: str, folder: Path, source_name: str = "the config") -> "Config":
        """The text of a TOML file; paths in it are relative to `folder`. InputError for what is no config."""
        return cls._from_relative_tables(parse_toml(text, f"{source_name}: this is no TOML file"), folder, source_name)

    @classmethod
    def _from_relative_tables(cls, tables: Mapping[str, Any], folder: Path, source_name: str) -> "Config":
        with read_errors_converted(source_name):  # a word may be no path: it is too long, or has a zero in it
            return cls._validate_tables(_resolve_paths(tables, folder), source_name)

    @classmethod
    def _validate_tables(cls, tables: Mapping[str, Any], source_name: str) -> "Config":
        try:
            return cls.model_validate(tables)
        except ValidationError as error:
            wrong = error.errors(include_url=False)
            # where a text or a table may stand, the first error is that a table is no text: the next says what it lacks
            is_table = wrong[0]["type"] == "string_type" and isinstance(wrong[0]["input"], Mapping)
            first = wrong[1] if is_table and len(wrong) > 1 else wrong[0]
            where = ".".join(str(part) for part in first["loc"] if "MaskSource" not in str(part)) or "the whole"
            words = str(first["msg"]).removeprefix("Value error, ")
            raise InputError(f"{source_name}: {where}: {words[0].lower()}{words[1:]}") from None

    @property
    def perturbed_batch_size(self) -> int:
        """How many changed images share a pass."""
        return self.batch_size or 16

    @property
    def bootstrap_options(self) -> dict[str, int]:
        """The number of resamples and the seed of every bootstrap."""
        return {"n_resamples": self.n_resamples, "seed": self.seed}

    @property
    def digest(self) -> str:
        """Of all that was declared, 64 hex digits: wherever its files lie, which have digests of their own."""
        plain = self.to_redacted_dict()
        plain["data"] |= {"manifest": None, "root": None}
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()

    def to_redacted_dict(self) -> dict[str, Any]:
        """Its tables as JSON has them, with words in place of the places of files; of the model's code the file's name stays."""
        plain = self.model_dump(mode="json")
        data, model, regions = plain["data"], plain["model"], plain["regions"]
        data["manifest"] = "a file"
        data["root"], data["masks_root"] = None if data["root"] is None else "files", None
        several = isinstance(self.data.ground_truth, dict)
        data["ground_truth"] = (
            _redact_mask_sources(data["ground_truth"]) if several else _redact_mask_source(data["ground_truth"])
        )
        regions["columns"], regions["organ"] = (
            _redact_mask_sources(regions["columns"]),
            _redact_mask_source(regions["organ"]),
        )
        model["weights"] = model["weights"] if model["weights"] in (None, "random") else "a file"
        model["source"] = _redact_source_folder(model["source"])
        return plain


def _resolve_paths(tables: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """With the paths of files as seen from here."""
    made = {name: dict(value) if isinstance(value, Mapping) else value for name, value in tables.items()}
    data, model = made.get("data"), made.get("model")
    if isinstance(data, dict):
        for name in ("manifest", "root"):
            if isinstance(data.get(name), str) and data[name]:  # root = "" lets paths lead anywhere
                data[name] = resolve_manifest_source(data[name], folder)
        data["masks_root"] = str(folder / str(data.get("masks_root", "")))
    if isinstance(model, dict):
        if isinstance(model.get("weights"), str) and model["weights"] != "random":
            model["weights"] = str(folder / model["weights"])
        source = model.get("source")
        if isinstance(source, str) and ".py:" in source:
            model["source"] = str(folder / source)
    return made


def resolve_manifest_source(source: str, folder: Path) -> str:
    """A manifest as seen from here: the path of a file or a folder, of an `hf:FOLDER` too; a URL and a name as they are."""
    library = next((one for one in DATASET_PREFIXES if source.startswith(one)), "")
    path = folder / source.removeprefix(library)
    return source if "://" in source or (library and not path.is_dir()) else f"{library}{path}"


def _redact_mask_sources(mask_sources: dict[str, Any]) -> dict[str, Any]:
    return {name: _redact_mask_source(one) for name, one in mask_sources.items()}


def _redact_mask_source(mask_source: Any) -> Any:
    """Without the name of a file or a folder; columns and categories stay."""
    if isinstance(mask_source, dict):
        return {**mask_source, "file": None if mask_source["file"] is None else "files"}
    return "files" if _is_path(mask_source) else mask_source


def _is_path(text: str | None) -> bool:
    """Whether it is written as a folder or a file of masks, and not as the name of a column."""
    return text is not None and ("/" in text or os.sep in text or text.lower().endswith(".json"))


def _redact_source_folder(source: str) -> str:
    library, _, name = source.partition(":")
    if library == "hf":
        return "hf:files" if Path(name).expanduser().is_dir() else source
    file, colon, function = source.rpartition(":")
    return f"{Path(file).name}:{function}" if colon and file.endswith(".py") else source
