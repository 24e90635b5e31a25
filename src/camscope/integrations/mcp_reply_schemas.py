"""Schemas of the structured replies of the MCP server. Their field descriptions are sent to clients."""

from typing import Annotated, Any

from pydantic import BaseModel, Field

Versions = Annotated[dict[str, str], Field(description="versions of camscope, torch and Python")]
Notes = Annotated[list[str], Field(description="remarks and warnings, as sentences")]


class MapFacts(BaseModel):
    """The facts of one attribution map."""

    method: str = Field(description="name of the method")
    layer: str | None = Field(description="layer of the map, or null")
    target: int | None = Field(description="class index, or null")
    label: str = Field(description="class as text")
    score: float | None = Field(description="value of the target, before softmax for a class")
    probability: float | None = Field(description="probability of the class, or null")
    status: str = Field(description="`ok`, or the flag of a map that shows nothing")
    status_meaning: str | None = Field(description="the flag as a sentence, or null")
    value_range: list[float | None] = Field(description="smallest and largest value of the map")
    grid: list[int] = Field(description="size of the map in cells")
    peak: list[int] | None = Field(
        description="row and column of the largest value, in pixels of the image or the input"
    )


class ClassFacts(BaseModel):
    """One of the classes with the highest scores."""

    index: int
    label: str
    score: float | None
    probability: float | None


class ExplainReply(BaseModel):
    """The reply of `explain`."""

    image: str = Field(description="path below a root, or the pseudonym of a scan")
    model: str = Field(description="name of the model")
    map: MapFacts
    top_classes: list[ClassFacts] = Field(description="classes with the highest scores")
    saved: str | None = Field(description="file that was written, below a root, or null")
    notes: Notes
    versions: Versions


class ComparedMap(BaseModel):
    """One map of a comparison."""

    method: str
    layer: str | None
    target: int | None
    label: str
    score: float | None
    probability: float | None
    status: str
    forward_passes: str | int | float = Field(description="forward passes of the model")
    backward_passes: str | int | float
    seconds: float
    correlation: float | None = Field(
        description="Pearson's correlation with the first map of the same target, or null"
    )


class CompareReply(BaseModel):
    """The reply of `compare`."""

    image: str
    model: str
    maps: list[ComparedMap]
    equal_maps: list[str] = Field(description="which maps are equal, and why")
    notes: Notes
    versions: Versions


class MethodMean(BaseModel):
    """The mean of one metric for one method."""

    method: str
    layer: str | None
    is_control: bool = Field(description="whether it is a map without the model")
    n_values: int
    n_undefined: int
    mean: float | None
    low: float | None = Field(description="lower end of the 95 % interval, or null")
    high: float | None


class MetricFacts(BaseModel):
    """The values of one metric. The best method is first."""

    metric: str
    title: str
    imputation: str | None = Field(description="what replaces removed pixels, or null")
    higher_is_better: bool | None
    formula: str
    methods: list[MethodMean]


class EvaluateReply(BaseModel):
    """The reply of `evaluate`."""

    source: str = Field(description="name of the run, or the number of images")
    n_values: int = Field(description="rows of metric values")
    metrics: list[MetricFacts]
    notes: Notes
    versions: Versions


class MethodFacts(BaseModel):
    """One explanation method."""

    name: str
    title: str
    paper: str
    description: str
    forward_passes: str
    backward_passes: str
    class_specific: bool = Field(description="whether the map depends on the class")
    control: bool = Field(description="whether it is a map without the model")
    slow: bool


class MethodsReply(BaseModel):
    """The reply of `methods`."""

    methods: list[MethodFacts]
    versions: Versions


class LayerFacts(BaseModel):
    """One layer with a spatial grid."""

    name: str
    type: str
    output_shape: list[int] | None
    is_default: bool


class LayersReply(BaseModel):
    """The reply of `layers`."""

    model: str
    default_layer: str | None
    layers: list[LayerFacts] = Field(description="the layers with a grid, where maps can be computed")
    notes: Notes
    versions: Versions


class QueryReply(BaseModel):
    """The reply of `query`."""

    run: str
    n_matching: int = Field(description="rows that fulfill the condition")
    columns: list[str] = Field(description="columns of the run, without the maps")
    rows: list[dict[str, Any]] = Field(description="the first matching rows")
    notes: Notes
    versions: Versions


class VerdictFacts(BaseModel):
    """One verdict of an audit."""

    claim: str
    question: str
    finding: str | None
    conclusion: str = Field(description="`supported`, `not supported` or `not decided`")
    direction: str = Field(description="`supports`, `contradicts` or `neither`")
    reason: str
    effect: float | None
    low: float | None
    high: float | None
    n_values: int | None


class VerdictsReply(BaseModel):
    """The reply of `verdicts`."""

    audit: str
    verdicts: list[VerdictFacts] = Field(description="those against the model come first")
    versions: Versions
