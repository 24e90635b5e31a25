"""Schema: what `summary.json` says, one part for each stage. Every number of the report comes from here; none is NaN."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Word = Literal["supported", "not supported", "not testable"]


class Part(BaseModel):
    """Numbers and words that do not change; NaN and infinity are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Number(Part):
    """A value with its 95 % interval by patient, of `n` rows in `groups` patients, beside what knows nothing (`baseline`).

    `value` None: there is none, and `reason` says why. `interval`: the method of the interval; "" where there is none.
    `unit`: what `n` counts. `roles`: of insertions, in which each value belongs to several patients, how many there are of
    each kind; `groups` is then the smallest of these counts, and no number of patients.
    """

    value: float | None = None
    low: float | None = None
    high: float | None = None
    n: int = 0
    groups: int = 0
    undefined: int = 0
    p: float | None = None
    baseline: float | None = None
    baseline_name: str = ""
    reason: str = ""
    interval: str = ""
    unit: Literal["images", "insertions"] = "images"
    roles: tuple[tuple[str, int], ...] = ()


class Stage(Part):
    """`tested` False: it was skipped, or could not be done, and `reason` says why."""

    tested: bool = True
    reason: str = ""


class Step(Part):
    """Of the way of the rows into the audit: how many were left, or were lost, and why."""

    name: str
    rows: int
    reason: str = ""
    lost: bool = False


class Found(Part):
    """What is odd about the data."""

    code: str
    severity: str
    message: str
    count: int
    ids: tuple[str, ...] = ()


class Count(Part):
    """So many images of a kind: of a subgroup's level, of a label."""

    column: str
    level: str
    rows: int
    patients: int
    positives: dict[str, int] = Field(default_factory=dict)


class Marked(Part):
    """Where the pixels of a finding or a region (`name`) are marked: in which kind of `source`, and which categories of it count.

    `left_out`: categories of a COCO file that do not count. No categories: boxes, points, or masks of one label.
    """

    name: str
    source: str
    categories: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


class Check(Stage):
    """The data, before any model saw them. `annotated`: who said which images have a finding, and where, in words."""

    annotated: str = ""
    marked: tuple[Marked, ...] = ()
    flow: tuple[Step, ...] = ()
    patients: int = 0
    grouped: bool = False
    found: tuple[Found, ...] = ()
    mix: dict[str, dict[str, int]] = Field(default_factory=dict)
    levels: tuple[Count, ...] = ()


class Tool(Part):
    """A method with all its settings. `stride`: pixels of the model's input between the cells of its map; `millimetres`: on
    the image, where that is known.
    """

    method: str
    title: str
    layer: str | None
    grid: tuple[int, ...]
    stride: tuple[float, ...]
    settings: dict[str, str]
    paper: str
    millimetres: float | None = None


class Resolve(Stage):
    """The model and the methods."""

    model: str = ""
    digest: str = ""
    parameters: int = 0
    classes: int = 0
    categories: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()
    input_size: tuple[int, ...] = ()
    preprocess: str = ""
    outputs: str = ""
    tools: tuple[Tool, ...] = ()
    passes: int = 0


class Level(Part):
    """A level of a subgroup: its value for a finding, and its difference to the others, judged against the margin.

    `region`: whose effect on the answer it is; "": none's.
    """

    finding: str
    region: str = ""
    column: str
    level: str
    value: Number
    difference: Number
    word: Literal["different", "equivalent", "undecided", "not testable"]
    margin: float


class Bin(Part):
    """Of a reliability plot."""

    predicted: float
    observed: float
    low: float
    high: float
    n: int


class Group(Part):
    """A level of a subgroup by itself: what `Answers` says of all. `reason`: why there are no numbers."""

    column: str
    level: str
    positives: int
    negatives: int
    auroc: Number = Number()
    average_precision: Number = Number()
    brier: Number = Number()
    calibration_error: Number = Number()
    slope: Number = Number()
    intercept: Number = Number()
    reason: str = ""


class Answers(Part):
    """How well a finding is told from its absence."""

    finding: str
    positives: int
    negatives: int
    spread: float
    auroc: Number
    average_precision: Number
    brier: Number
    calibration_error: Number
    slope: Number
    intercept: Number
    bins: tuple[Bin, ...]
    groups: tuple[Group, ...] = ()
    levels: tuple[Level, ...]


class Predict(Stage):
    """The model's answers. `probabilities`: it gives these, and log odds were made of them."""

    probabilities: bool = False
    flow: tuple[Step, ...] = ()
    findings: tuple[Answers, ...] = ()


class Maps(Part):
    """Maps of a method: how many, and how many say nothing."""

    method: str
    finding: str
    maps: int
    failures: int
    statuses: dict[str, int]


class Explain(Stage):
    """The maps."""

    maps: tuple[Maps, ...] = ()
    failures: tuple[Step, ...] = ()


class Line(Part):
    """A metric of a method, or of a map that knows nothing of the model (`control`): `over` is the paired difference to the
    best of these, counted so that more is better. `most`: of enrichment what all of the map inside would be, 1 / area.
    """

    metric: str
    method: str
    layer: str | None
    finding: str
    control: bool
    better: Literal["more", "less", "neither"]
    fill: str | None
    value: Number
    over: Number | None
    most: float | None = None


class Held(Part):
    """Of the changes of a stability the share under which the answer held: the others say nothing of maps, and are left out."""

    metric: str
    finding: str
    share: Number


class Measured(Stage):
    """Metrics of some images. `formulas`: what each of them is, with all that it depends on."""

    images: int = 0
    formulas: dict[str, str] = Field(default_factory=dict)
    held: tuple[Held, ...] = ()
    lines: tuple[Line, ...] = ()
    levels: tuple[Level, ...] = ()


class Similarity(Part):
    """How alike the maps of a model that has lost its training stay, step by step, beside maps of different images.

    `end`: after the last step, with its interval by patient. `passes` None: there is nothing to compare.
    """

    name: str
    curve: tuple[float | None, ...]
    low: float | None
    null: float | None
    high: float | None
    passes: bool | None
    reason: str
    end: Number = Number()


class Randomised(Part):
    """The randomisation test of a method."""

    method: str
    finding: str
    steps: tuple[str, ...]
    seeds: tuple[int, ...]
    similarities: tuple[Similarity, ...]
    passes: bool | None
    reason: str
    control: bool


class Sanity(Stage):
    """Whether maps notice that the training is gone."""

    images: int = 0
    tests: tuple[Randomised, ...] = ()


class Mass(Part):
    """How much of a method's maps lies in a region. `most`: what the enrichment of a map that is all inside would be."""

    region: str
    method: str
    finding: str
    share: Number
    enrichment: Number
    confounder_sensitivity: Number
    resolved: bool
    diameter: float
    stride: float
    reason: str = ""
    most: float | None = None


class Overlap(Part):
    """How much of a region lies in another one: the mean share of its pixels, over the `images` that have it."""

    finding: str
    region: str
    within: str
    share: float
    images: int


class Intervention(Part):
    """What a change of the input does to the log odds of a finding, in their standard deviations."""

    region: str
    finding: str
    kind: Literal["remove", "insert", "keep only"]
    fill: str | None
    effect: Number


class Blanked(Part):
    """The AUROC that is left when a region is filled (`blank`), or all but it (`keep only`)."""

    region: str
    finding: str
    kind: Literal["blank", "keep only"]
    fill: str
    auroc: Number


class Leak(Part):
    """Whether a column of the manifest can be read off the model's features.

    `readable`: the interval lies above a half, and no deal of the labels at random gave as much; the most gave `null_high`.
    """

    column: str
    auroc: Number
    null_high: float | None
    readable: bool = False


class Cluster(Part):
    """Images whose maps are alike: their number, the most typical ones, and what they have in common.

    `mass`: the mean share of their maps in each region. `missed`: the share of them with a probability below a half.
    """

    number: int
    images: int
    prototypes: tuple[str, ...]
    mass: dict[str, float] = Field(default_factory=dict)
    missed: float | None = None
    columns: tuple[str, ...] = ()


class Stability(Part):
    """Of so many clusters, beside what one way of looking alone would show."""

    k: int
    stability: float
    null: float | None
    separation: float | None = None


class Strategies(Part):
    """Groups of maps, of so many `patients`. `claimed`: 1 where there is no reason to believe in several ways of looking."""

    finding: str
    method: str
    claimed: int
    maps: int
    left_out: int
    patients: int = 0
    eigenvalues: tuple[float, ...] = ()
    trials: tuple[Stability, ...] = ()
    clusters: tuple[Cluster, ...] = ()
    reason: str = ""


class Reading(Part):
    """An image that somebody should look at, and why."""

    id: str
    finding: str
    why: str


class Shortcut(Stage):
    """What travels with the finding. `regions`: how many images have it; `markers`: finding -> those that only some
    images have.
    """

    regions: dict[str, int] = Field(default_factory=dict)
    markers: dict[str, tuple[str, ...]] = {}
    missing: tuple[Step, ...] = ()
    overlaps: tuple[Overlap, ...] = ()
    masses: tuple[Mass, ...] = ()
    interventions: tuple[Intervention, ...] = ()
    blanked: tuple[Blanked, ...] = ()
    levels: tuple[Level, ...] = ()
    leaks: tuple[Leak, ...] = ()
    strategies: tuple[Strategies, ...] = ()
    reading: tuple[Reading, ...] = ()


class Verdict(Part):
    """The answer to one question. `worry`: whether "supported" speaks against the model, or "not supported" does.

    `decided`: the part of this file whose numbers gave the word.
    """

    question: str
    claim: str
    finding: str
    subject: str = ""
    word: Word
    speaks: Literal["for", "against", "neither"]
    effect: Number
    margin: float | None
    rule: str
    reason: str
    section: str


class Summary(Part):
    """All that was found."""

    schema_version: Literal["camscope/audit/1"] = "camscope/audit/1"
    camscope: str
    title: str
    question: str
    config: str
    data: str
    seed: int
    replicates: int
    margins: dict[str, float]
    fills: tuple[str, ...]
    profile: str
    check: Check
    resolve: Resolve
    predict: Predict
    explain: Explain
    localise: Measured
    faithfulness: Measured
    sanity: Sanity
    robustness: Measured
    shortcut: Shortcut
    verdicts: tuple[Verdict, ...]
    warnings: tuple[str, ...]
    limits: tuple[str, ...]


def plain(part: BaseModel) -> dict[str, Any]:
    """As JSON has it."""
    return part.model_dump(mode="json")
