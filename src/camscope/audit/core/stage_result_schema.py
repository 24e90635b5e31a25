"""Schema of `summary.json`: estimates, and results of the stages from the data check to the sanity test."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class SchemaModel(BaseModel):
    """A frozen pydantic model. NaN and infinity raise an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class EstimateSummary(SchemaModel):
    """An estimate with a 95 % confidence interval by patient and a baseline.

    `value` is None where no estimate exists, for the `reason`. `n_values` counts the `unit`, and `n_undefined` the rows without
    a value. `n_groups` counts patients. For insertions, whose values belong to several patients each, `n_groups_by_role` counts
    the patients in each role, and `n_groups` is the smallest count. `p_value` is for no difference. `baseline` is the value
    expected by chance, or of a control. `interval_method` is "" where there is no interval.
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


class PlannedSize(SchemaModel):
    """The number of images of a stage that fits the budget, where it is below the configured number. 0: the stage is left out.

    `min_effect` is the half-width of an interval of that number of patients, in standard deviations of their values: a
    smaller distance from the margin is not decided.
    """

    stage: Literal["faithfulness", "robustness", "sanity", "interventions"]
    n_images: int
    configured_n_images: int
    min_effect: float | None = None


class StageResult(SchemaModel):
    """The result of a stage. If the stage was skipped or impossible, `tested` is False and `reason` says why.

    `planned_sizes` has all stages that the budget of time makes smaller, as planned after this stage. None: no new plan.
    """

    tested: bool = True
    reason: str = ""
    planned_sizes: tuple[PlannedSize, ...] | None = None


RANDOM_SAMPLE_REASON = "drawn at random"  # of the step of a flow that audits a sample of the images


class FlowStep(SchemaModel):
    """A step of the selection of rows: how many rows remain or are excluded, and why."""

    name: str
    n_rows: int
    reason: str = ""
    is_exclusion: bool = False


class DataIssue(SchemaModel):
    """A problem of the data, with the affected rows."""

    code: str
    severity: str
    message: str
    count: int
    ids: tuple[str, ...] = ()


class LevelCount(SchemaModel):
    """The numbers of images and patients of a subgroup level."""

    column: str
    level: str
    n_rows: int
    n_patients: int
    positives_by_finding: dict[str, int] = Field(default_factory=dict)


class AnnotationSource(SchemaModel):
    """Where the masks of a finding or region come from.

    `categories` are those that count. Empty for boxes, points, and masks of one label. `excluded_categories` are the
    categories of a COCO file that do not count.
    """

    name: str
    source: str
    categories: tuple[str, ...] = ()
    excluded_categories: tuple[str, ...] = ()


class DataCheckResult(StageResult):
    """The result of the data check. `annotation_protocol` is free text on who labeled the images.

    `determining_columns`: finding -> column -> the number of images with a value, for columns from whose value the label
    follows.
    """

    annotation_protocol: str = ""
    annotation_sources: tuple[AnnotationSource, ...] = ()
    flow: tuple[FlowStep, ...] = ()
    n_patients: int = 0
    has_patient_column: bool = False
    issues: tuple[DataIssue, ...] = ()
    metadata_value_counts: dict[str, dict[str, int]] = Field(default_factory=dict)
    level_counts: tuple[LevelCount, ...] = ()
    determining_columns: dict[str, dict[str, int]] = Field(default_factory=dict)


class ExplainerInfo(SchemaModel):
    """An attribution method with its parameters.

    `stride` is the distance between the cells of its map in pixels of the model's input. `stride_mm` is the same in
    millimeters on the image.
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
    """The model and its attribution methods.

    `architecture`: the name of the model's class.
    """

    model: str = ""
    architecture: str = ""
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
        """Return the information about the explainer that has this title."""
        return next(info for info in self.explainers if info.title == title)


class SubgroupDifference(SchemaModel):
    """The value of a subgroup level and its difference from the other levels, compared with the margin.

    `region`: the region whose effect on the prediction the value is. "" for other values.
    """

    finding: str
    region: str = ""
    column: str
    level: str
    value: EstimateSummary
    difference: EstimateSummary
    conclusion: Literal["different", "equivalent", "undecided", "not tested"]
    margin: float


class ReliabilityPoint(SchemaModel):
    """A point of a reliability diagram, with its interval."""

    predicted: float
    observed: float
    low: float
    high: float
    n_images: int


class PerformanceEstimates(SchemaModel):
    """Estimates of discrimination and calibration."""

    n_positives: int
    n_negatives: int
    auroc: EstimateSummary = EstimateSummary()
    average_precision: EstimateSummary = EstimateSummary()
    brier: EstimateSummary = EstimateSummary()
    calibration_error: EstimateSummary = EstimateSummary()
    slope: EstimateSummary = EstimateSummary()
    intercept: EstimateSummary = EstimateSummary()


class SubgroupPerformance(PerformanceEstimates):
    """The performance in one subgroup level, or the reason why it was not computed."""

    column: str
    level: str
    reason: str = ""


class FindingPerformance(PerformanceEstimates):
    """The performance for one finding, overall and by subgroup."""

    finding: str
    log_odds_std: float
    bins: tuple[ReliabilityPoint, ...]
    subgroups: tuple[SubgroupPerformance, ...] = ()
    subgroup_differences: tuple[SubgroupDifference, ...]


class PredictResult(StageResult):
    """The performance of the model.

    `outputs_are_probabilities`: the model returns probabilities, which are converted into log odds.
    """

    outputs_are_probabilities: bool = False
    flow: tuple[FlowStep, ...] = ()
    performance: tuple[FindingPerformance, ...] = ()


class MapCounts(SchemaModel):
    """How many maps a method computed for a finding, and how often it failed."""

    method: str
    finding: str
    n_maps: int
    n_failures: int
    status_counts: dict[str, int]


class ExplainResult(StageResult):
    """The number of maps, and the reasons for missing maps."""

    map_counts: tuple[MapCounts, ...] = ()
    failures: tuple[FlowStep, ...] = ()


class MetricSummary(SchemaModel):
    """The value of a metric for a method or a control map, over the images with a finding.

    `difference_to_control` is the paired difference to the best control, with a sign such that higher is better. `max_value` is
    the enrichment of a map that lies inside the mask completely, 1 / area.
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
    """The share of input changes that left the prediction unchanged. Stability metrics use only these changes."""

    metric: str
    finding: str
    share: EstimateSummary


class PathSteps(SchemaModel):
    """The reduced number of path steps of a method, in a stage that compares ranks.

    `rank_correlation` is Spearman's correlation of maps with this and with the configured number, the mean over `n_images`.
    """

    method: str
    n_steps: int
    configured_n_steps: int
    rank_correlation: float
    n_images: int


class StoppingLook(SchemaModel):
    """The interim analysis at which the test of a method for a finding stopped.

    `confidence_level` is that of its intervals: over all looks together they have 95 %. "decided": the verdict is reached.
    "undecidable": the images that are left would hardly change it. "complete": all sampled images were used.
    """

    method: str
    finding: str
    look: int
    n_looks: int
    n_images: int
    max_images: int
    confidence_level: float
    reason: Literal["decided", "undecidable", "complete"]


class MetricsResult(StageResult):
    """The metric values of the sampled images. `formulas` defines each metric.

    `path_steps` lists the methods that used fewer path steps than configured. `stopping_looks` has the interim analysis at
    which each method stopped. It is empty if all images were evaluated at once.
    """

    n_images: int = 0
    formulas: dict[str, str] = Field(default_factory=dict)
    stable_predictions: tuple[StablePredictionShare, ...] = ()
    path_steps: tuple[PathSteps, ...] = ()
    stopping_looks: tuple[StoppingLook, ...] = ()
    metric_summaries: tuple[MetricSummary, ...] = ()
    subgroup_differences: tuple[SubgroupDifference, ...] = ()


class RandomizationSimilarity(SchemaModel):
    """The similarity between maps of the trained model and maps of the model with randomized weights.

    `curve` is the mean similarity after each step of the cascade, and `final_similarity` that after the last step. The null is
    the similarity of maps of different images. `passes`: whether the maps change enough. None where nothing can be compared.
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
    """The weight randomization test of one method."""

    method: str
    finding: str
    part_names: tuple[str, ...]
    seeds: tuple[int, ...]
    similarities: tuple[RandomizationSimilarity, ...]
    passes: bool | None
    reason: str
    control: bool


class SanityImages(SchemaModel):
    """The images of a finding in the randomization test, which needs images of one size.

    `size` is the size of the model's input. `n_other_sizes` counts the images left out because their input has another size.
    """

    finding: str
    n_images: int
    size: tuple[int, ...]
    n_other_sizes: int


class SanityResult(StageResult):
    """The weight randomization tests of all methods and of an edge detector as a control.

    `path_steps` lists the methods that used fewer path steps than configured.
    """

    n_images: int = 0
    images_by_finding: tuple[SanityImages, ...] = ()
    tests: tuple[RandomizationTest, ...] = ()
    path_steps: tuple[PathSteps, ...] = ()
