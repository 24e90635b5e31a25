"""Schema of `summary.json`: results of the shortcut stage, verdicts, and the summary of all stages."""

from typing import Literal

from pydantic import Field

from camscope.audit.core.stage_result_schema import (
    DataCheckResult,
    EstimateSummary,
    ExplainResult,
    FlowStep,
    MetricsResult,
    PlannedSize,
    PredictResult,
    ResolveResult,
    SanityResult,
    SchemaModel,
    StageResult,
    SubgroupDifference,
)

Conclusion = Literal["supported", "not supported", "not decided"]


class AttributionMass(SchemaModel):
    """The share of a method's attribution in a region.

    `max_enrichment` is the enrichment of a map that lies inside the region completely.
    """

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
    """The mean share of a region's pixels that lie in another region."""

    finding: str
    region: str
    other_region: str
    share: float
    n_images: int


class InterventionEffect(SchemaModel):
    """How an edited region changes the log odds of a finding. The unit is the standard deviation of the log odds."""

    region: str
    finding: str
    kind: Literal["remove", "insert", "keep only"]
    imputation: str | None
    effect: EstimateSummary


class MaskedAuroc(SchemaModel):
    """The AUROC after a region was masked (`mask`), or everything outside the region (`keep only`)."""

    region: str
    finding: str
    kind: Literal["mask", "keep only"]
    imputation: str
    auroc: EstimateSummary


class ColumnLeakage(SchemaModel):
    """The AUROC of a linear probe that predicts a column of the manifest from the model's features.

    `null_max` is the largest AUROC under permuted labels. `is_decodable`: the interval lies above 0.5, and no permutation
    reached the AUROC.
    """

    column: str
    auroc: EstimateSummary
    null_max: float | None
    is_decodable: bool = False


class MapCluster(SchemaModel):
    """A cluster of images with similar maps. `number` 0 is the largest.

    `prototypes`: the ids of its most typical images. `attribution_mass`: region -> the mean share of its maps in the region.
    `missed_share`: the share of its images with a probability below 0.5. `associated_columns`: the subgroup levels that are
    more frequent in it, as text.
    """

    number: int
    n_images: int
    prototypes: tuple[str, ...]
    attribution_mass: dict[str, float] = Field(default_factory=dict)
    missed_share: float | None = None
    associated_columns: tuple[str, ...] = ()


class ClusterStability(SchemaModel):
    """The stability for one number of clusters, compared with reference data of a single cluster."""

    n_clusters: int
    stability: float
    null_stability: float | None
    separation: float | None = None


class ClusterAnalysis(SchemaModel):
    """The clusters of a method's maps for a finding. `n_clusters` is 1 if the data support no split."""

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
    """An image for manual review, and the reason."""

    id: str
    finding: str
    reason: str


class ShortcutResult(StageResult):
    """The results of the shortcut tests.

    `region_counts`: region -> the number of images that have it. `markers_by_finding`: finding -> the regions that only some
    images have.
    """

    region_counts: dict[str, int] = Field(default_factory=dict)
    markers_by_finding: dict[str, tuple[str, ...]] = Field(default={})
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
    """The conclusion about one claim, with its effect estimate and the margin.

    Attributes:
        question: Name of the question that the claim belongs to.
        claim: The claim as a sentence.
        finding: Name of the finding.
        qualifier: The region, subgroup or method that the claim is about.
        metric: The metric, where one question has a claim for each of several metrics.
        conclusion: "supported", "not supported" or "not decided".
        direction: Whether the conclusion supports or contradicts the model, or neither.
        effect: The estimate with its interval.
        margin: What the estimate is compared with. None: nothing.
        rule: How the conclusion follows from estimate and margin.
        reason: The conclusion as a sentence.
        section: The section of the report with the numbers.
        answer: The conclusion about the claim as a sentence.
        patients_needed: About how many patients would decide the claim in four of five audits, if the effect stayed the
            same. None if the claim is decided, or if nothing was measured.

    >>> verdict = audit_run.verdicts[0]  # of a `run_audit` of twelve images
    >>> verdict.finding, verdict.conclusion
    ('nodule', 'not decided')

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
    answer: str = ""
    patients_needed: int | None = None
    metric: str = ""


class Summary(SchemaModel):
    """The results of all stages, the verdicts and the settings.

    Attributes:
        schema_version: Version of this schema.
        camscope_version: Version of the package.
        title: Title of the report.
        intended_use: What the model is meant for.
        config_digest: SHA-256 digest of the settings.
        data_digest: SHA-256 digest of the images and the table.
        seed: Seed of every random choice.
        n_resamples: Number of bootstrap resamples.
        margins: Margins of the verdicts by name.
        imputations: What replaced removed pixels.
        profile: "research" or "clinical", see `PrivacyOptions`.
        check: Results of the check of the data.
        resolve: Results of loading the model.
        predict: Performance of the model.
        explain: Results of the computation of maps.
        localization: Comparison of the maps with masks.
        faithfulness: Deletion and insertion tests.
        sanity: Randomization tests.
        robustness: Stability of the maps.
        shortcut: Tests of shortcuts.
        verdicts: The verdicts.
        warnings: What to know before reading the results.
        limitations: What the audit does not show.
        data_description: The kind of images, such as "X-ray images in PNG files".

    >>> audit_run.summary.n_resamples, audit_run.summary.imputations  # of a `run_audit`
    (200, ('mean', 'blur'))

    """

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
    data_description: str = ""

    @property
    def planned_sizes(self) -> tuple[PlannedSize, ...]:
        """The stages that a budget of time made smaller, as last planned."""
        stages = (getattr(self, name) for name in type(self).model_fields)
        plans = [stage.planned_sizes for stage in stages if isinstance(stage, StageResult)]
        return next((plan for plan in reversed(plans) if plan is not None), ())
