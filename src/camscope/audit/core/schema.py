"""Schema: what `summary.json` says, one part for each stage. Every number of the report comes from here; none is NaN."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Conclusion = Literal["supported", "not supported", "not testable"]


class SchemaModel(BaseModel):
    """Numbers and words that do not change; NaN and infinity are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class EstimateSummary(SchemaModel):
    """A value with its 95 % interval by patient, of `n_values` rows in `n_groups` patients, beside what knows nothing (`baseline`).

    `value` None: there is none, and `reason` says why. `interval_method`: the method of the interval; "" where there is none.
    `unit`: what `n_values` counts. `n_groups_by_role`: of insertions, in which each value belongs to several patients, how many there are of
    each kind; `n_groups` is then the smallest of these counts, and no number of patients.
    """

    value: float | None = None
    low: float | None = None
    high: float | None = None
    n_values: int = 0
    n_groups: int = 0
    n_undefined: int = 0
    p_value: float | None = None
    baseline: float | None = None
    baseline_name: str = ""
    reason: str = ""
    interval_method: str = ""
    unit: Literal["images", "insertions"] = "images"
    n_groups_by_role: tuple[tuple[str, int], ...] = ()


class StageResult(SchemaModel):
    """`tested` False: it was skipped, or could not be done, and `reason` says why."""

    tested: bool = True
    reason: str = ""


class FlowStep(SchemaModel):
    """Of the way of the rows into the audit: how many were left, or were lost, and why."""

    name: str
    n_rows: int
    reason: str = ""
    is_exclusion: bool = False


class DataIssue(SchemaModel):
    """What is odd about the data."""

    code: str
    severity: str
    message: str
    count: int
    ids: tuple[str, ...] = ()


class LevelCount(SchemaModel):
    """So many images of a kind: of a subgroup's level, of a label."""

    column: str
    level: str
    n_rows: int
    n_patients: int
    positives_by_finding: dict[str, int] = Field(default_factory=dict)


class AnnotationSource(SchemaModel):
    """Where the pixels of a finding or a region (`name`) are marked: in which kind of `source`, and which categories of it count.

    `excluded_categories`: categories of a COCO file that do not count. No categories: boxes, points, or masks of one label.
    """

    name: str
    source: str
    categories: tuple[str, ...] = ()
    excluded_categories: tuple[str, ...] = ()


class DataCheckResult(StageResult):
    """The data, before any model saw them. `annotation_protocol`: who said which images have a finding, and where, in words."""

    annotation_protocol: str = ""
    annotation_sources: tuple[AnnotationSource, ...] = ()
    flow: tuple[FlowStep, ...] = ()
    n_patients: int = 0
    has_patient_column: bool = False
    issues: tuple[DataIssue, ...] = ()
    metadata_value_counts: dict[str, dict[str, int]] = Field(default_factory=dict)
    level_counts: tuple[LevelCount, ...] = ()


class ExplainerInfo(SchemaModel):
    """A method with all its settings. `stride`: pixels of the model's input between the cells of its map; `stride_mm`: on
    the image, where that is known.
    """

    method: str
    title: str
    layer: str | None
    grid: tuple[int, ...]
    stride: tuple[float, ...]
    settings: dict[str, str]
    paper: str
    stride_mm: float | None = None


class ResolveResult(StageResult):
    """The model and the methods."""

    model: str = ""
    weights_digest: str = ""
    n_parameters: int = 0
    n_classes: int = 0
    class_names: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()
    input_size: tuple[int, ...] = ()
    preprocess: str = ""
    outputs: str = ""
    explainers: tuple[ExplainerInfo, ...] = ()
    n_passes: int = 0

    def get_explainer_info(self, title: str) -> ExplainerInfo:
        """Return the information about the explainer of this title."""
        return next(info for info in self.explainers if info.title == title)


class SubgroupDifference(SchemaModel):
    """A level of a subgroup: its value for a finding, and its difference to the others, judged against the margin.

    `region`: whose effect on the answer it is; "": none's.
    """

    finding: str
    region: str = ""
    column: str
    level: str
    value: EstimateSummary
    difference: EstimateSummary
    conclusion: Literal["different", "equivalent", "undecided", "not testable"]
    margin: float


class ReliabilityPoint(SchemaModel):
    """Of a reliability plot."""

    predicted: float
    observed: float
    low: float
    high: float
    n_images: int


class SubgroupPerformance(SchemaModel):
    """A level of a subgroup by itself: what `FindingPerformance` says of all. `reason`: why there are no numbers."""

    column: str
    level: str
    n_positives: int
    n_negatives: int
    auroc: EstimateSummary = EstimateSummary()
    average_precision: EstimateSummary = EstimateSummary()
    brier: EstimateSummary = EstimateSummary()
    calibration_error: EstimateSummary = EstimateSummary()
    slope: EstimateSummary = EstimateSummary()
    intercept: EstimateSummary = EstimateSummary()
    reason: str = ""


class FindingPerformance(SchemaModel):
    """How well a finding is told from its absence."""

    finding: str
    n_positives: int
    n_negatives: int
    log_odds_std: float
    auroc: EstimateSummary
    average_precision: EstimateSummary
    brier: EstimateSummary
    calibration_error: EstimateSummary
    slope: EstimateSummary
    intercept: EstimateSummary
    bins: tuple[ReliabilityPoint, ...]
    subgroups: tuple[SubgroupPerformance, ...] = ()
    subgroup_differences: tuple[SubgroupDifference, ...]


class PredictResult(StageResult):
    """The model's answers. `outputs_are_probabilities`: it gives these, and log odds were made of them."""

    outputs_are_probabilities: bool = False
    flow: tuple[FlowStep, ...] = ()
    performance: tuple[FindingPerformance, ...] = ()


class MapCounts(SchemaModel):
    """Maps of a method: how many, and how many say nothing."""

    method: str
    finding: str
    n_maps: int
    n_failures: int
    status_counts: dict[str, int]


class ExplainResult(StageResult):
    """The maps."""

    map_counts: tuple[MapCounts, ...] = ()
    failures: tuple[FlowStep, ...] = ()


class MetricSummary(SchemaModel):
    """A metric of a method, or of a map that knows nothing of the model (`control`): `difference_to_control` is the paired difference to the
    best of these, counted so that more is better. `max_value`: of enrichment what all of the map inside would be, 1 / area.
    """

    metric: str
    method: str
    layer: str | None
    finding: str
    control: bool
    better_direction: Literal["more", "less", "neither"]
    imputation: str | None
    value: EstimateSummary
    difference_to_control: EstimateSummary | None
    max_value: float | None = None


class StablePredictionShare(SchemaModel):
    """Of the changes of a stability the share under which the answer held: the others say nothing of maps, and are left out."""

    metric: str
    finding: str
    share: EstimateSummary


class MetricsResult(StageResult):
    """Metrics of some images. `formulas`: what each of them is, with all that it depends on."""

    n_images: int = 0
    formulas: dict[str, str] = Field(default_factory=dict)
    stable_predictions: tuple[StablePredictionShare, ...] = ()
    metric_summaries: tuple[MetricSummary, ...] = ()
    subgroup_differences: tuple[SubgroupDifference, ...] = ()


class RandomizationSimilarity(SchemaModel):
    """How alike the maps of a model that has lost its training stay, step by step, beside maps of different images.

    `final_similarity`: after the last step, with its interval by patient. `passes` None: there is nothing to compare.
    """

    name: str
    curve: tuple[float | None, ...]
    null_low: float | None
    null_mean: float | None
    null_high: float | None
    passes: bool | None
    reason: str
    final_similarity: EstimateSummary = EstimateSummary()


class RandomizationTest(SchemaModel):
    """The randomisation test of a method."""

    method: str
    finding: str
    part_names: tuple[str, ...]
    seeds: tuple[int, ...]
    similarities: tuple[RandomizationSimilarity, ...]
    passes: bool | None
    reason: str
    control: bool


class SanityResult(StageResult):
    """Whether maps notice that the training is gone."""

    n_images: int = 0
    tests: tuple[RandomizationTest, ...] = ()


class AttributionMass(SchemaModel):
    """How much of a method's maps lies in a region. `max_enrichment`: what the enrichment of a map that is all inside would be."""

    region: str
    method: str
    finding: str
    share: EstimateSummary
    enrichment: EstimateSummary
    confounder_sensitivity: EstimateSummary
    is_resolvable: bool
    diameter: float
    stride: float
    reason: str = ""
    max_enrichment: float | None = None


class RegionOverlap(SchemaModel):
    """How much of a region lies in another one: the mean share of its pixels, over the `n_images` that have it."""

    finding: str
    region: str
    other_region: str
    share: float
    n_images: int


class InterventionEffect(SchemaModel):
    """What a change of the input does to the log odds of a finding, in their standard deviations."""

    region: str
    finding: str
    kind: Literal["remove", "insert", "keep only"]
    imputation: str | None
    effect: EstimateSummary


class MaskedAuroc(SchemaModel):
    """The AUROC that is left when a region is filled (`blank`), or all but it (`keep only`)."""

    region: str
    finding: str
    kind: Literal["mask", "keep only"]
    imputation: str
    auroc: EstimateSummary


class ColumnLeakage(SchemaModel):
    """Whether a column of the manifest can be read off the model's features.

    `is_decodable`: the interval lies above a half, and no deal of the labels at random gave as much; the most gave `null_max`.
    """

    column: str
    auroc: EstimateSummary
    null_max: float | None
    is_decodable: bool = False


class MapCluster(SchemaModel):
    """Images whose maps are alike: their number, the most typical ones, and what they have in common.

    `attribution_mass`: the mean share of their maps in each region. `missed_share`: the share of them with a probability below a half.
    """

    number: int
    n_images: int
    prototypes: tuple[str, ...]
    attribution_mass: dict[str, float] = Field(default_factory=dict)
    missed_share: float | None = None
    associated_columns: tuple[str, ...] = ()


class ClusterStability(SchemaModel):
    """Of so many clusters, beside what one way of looking alone would show."""

    n_clusters: int
    stability: float
    null_stability: float | None
    separation: float | None = None


class ClusterAnalysis(SchemaModel):
    """Groups of maps, of so many `n_patients`. `n_clusters`: 1 where there is no reason to believe in several ways of looking."""

    finding: str
    method: str
    n_clusters: int
    n_maps: int
    n_excluded: int
    n_patients: int = 0
    eigenvalues: tuple[float, ...] = ()
    stability_by_n_clusters: tuple[ClusterStability, ...] = ()
    clusters: tuple[MapCluster, ...] = ()
    reason: str = ""


class ReviewCase(SchemaModel):
    """An image that somebody should look at, and why."""

    id: str
    finding: str
    reason: str


class ShortcutResult(StageResult):
    """What travels with the finding. `region_counts`: how many images have it; `markers_by_finding`: finding -> those that only some
    images have.
    """

    region_counts: dict[str, int] = Field(default_factory=dict)
    markers_by_finding: dict[str, tuple[str, ...]] = {}
    missing_regions: tuple[FlowStep, ...] = ()
    overlaps: tuple[RegionOverlap, ...] = ()
    attribution_mass: tuple[AttributionMass, ...] = ()
    interventions: tuple[InterventionEffect, ...] = ()
    masked_auroc: tuple[MaskedAuroc, ...] = ()
    subgroup_differences: tuple[SubgroupDifference, ...] = ()
    leakage: tuple[ColumnLeakage, ...] = ()
    cluster_analyses: tuple[ClusterAnalysis, ...] = ()
    review_cases: tuple[ReviewCase, ...] = ()


class Verdict(SchemaModel):
    """The answer to one question. `worry`: whether "supported" speaks against the model, or "not supported" does.

    `is_race_decided`: the part of this file whose numbers gave the word.
    """

    question: str
    claim: str
    finding: str
    qualifier: str = ""
    conclusion: Conclusion
    direction: Literal["supports", "contradicts", "neither"]
    effect: EstimateSummary
    margin: float | None
    rule: str
    reason: str
    section: str


class Summary(SchemaModel):
    """All that was found."""

    schema_version: Literal["camscope/audit/2"] = "camscope/audit/2"
    camscope_version: str
    title: str
    intended_use: str
    config_digest: str
    data_digest: str
    seed: int
    n_resamples: int
    margins: dict[str, float]
    imputations: tuple[str, ...]
    profile: str
    check: DataCheckResult
    resolve: ResolveResult
    predict: PredictResult
    explain: ExplainResult
    localization: MetricsResult
    faithfulness: MetricsResult
    sanity: SanityResult
    robustness: MetricsResult
    shortcut: ShortcutResult
    verdicts: tuple[Verdict, ...]
    warnings: tuple[str, ...]
    limitations: tuple[str, ...]


def to_json_dict(model: BaseModel) -> dict[str, Any]:
    """As JSON has it."""
    return model.model_dump(mode="json")
