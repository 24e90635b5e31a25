"""Figures in sentences: each is the one in the file of results that it was measured into.

A row is a page, a sentence with `{}` for its figures, and where they come from. The tables of benchmarks/README.md, of the
leaderboard and of the metrics have tests of their own in tests/benchmarks.
"""

import json
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from camscope.explainers import METHODS

ROOT = Path(__file__).resolve().parents[2]
RAW, DRAWN = "ResNet-18, raw maps", "ResNet-18, overlays (JPEG)"
STUDIES = "docs/how-to/reader-study.md"
COSTS, METRICS, AUDIT = "benchmarks/README.md", "docs/explanation/metrics/intervals.md", "docs/explanation/audit.md"


@cache
def results(name):
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text("utf-8"))


def measured(name, section, work, tool="camscope"):
    """The figure of one tool, at the work whose name begins so."""
    rows = [row for row in results(name)["figures"] if (row["section"], row["tool"]) == (section, tool)]
    (value,) = [row["value"] for row in rows if row["work"].startswith(work)]
    return value


def forward_passes_on_gpu(tool):
    """Grad-CAM of eight images on the GPU, in forward passes: the smallest and the largest of five networks."""
    rows = [row for row in results("cuda")["figures"] if (row["section"], row["tool"]) == ("gradcam", tool)]
    values = [row["value"] for row in rows if row["value"] is not None]
    return min(values), max(values)


def ratio_to_fastest(method):
    """The time of camscope divided by that of the fastest other toolkit."""
    return measured("cpu", "family", method, "camscope / the fastest")


def yolo_percent(method, name):
    return 100 * results("yolo_shapes")["methods"][method][name]


def yolo_pairs(method):
    """The number of pairs, all of which the method tells apart."""
    assert results("yolo_shapes")["methods"][method]["pairs_told_apart"] == 1
    return results("yolo_shapes")["pairs_of_one_class"]


def judged_correctly(name):
    """How many models of the audits with known shortcuts got the right verdict, and how many there are."""
    rows = results("audit_power")[name]
    return sum(row["word"] == ("not supported" if row["p"] == 0.5 else "supported") for row in rows), len(rows)


def coverage(section, words, key=None):
    return [
        value if key is None else value[key] for name, value in results("coverage")[section].items() if words in name
    ]


def coverage_before(n_patients):
    """The percentage of intervals that contain the true value, before few patients gave none."""
    rows = results("coverage_before")["coverage"]
    return 100 * rows[f"enrichment, normal, {n_patients} patients of 1 to 8"]["coverage"]


def absences(n_patients, name="coverage"):
    """The percentages of samples in which a rare reliance is called "not supported"."""
    rows = results(name)["absences"]
    rare = [
        f"{n} patients, {share} of them" for n in n_patients for share in ("3 SD in 5 %", "5 SD in 3 %", "2 SD in 10 %")
    ]
    return [100 * row["not supported"] for key, row in rows.items() if key.startswith(tuple(rare))]


def contrast(name):
    row = results("audit_acceptance")["subgroups"][name]
    return [row["value"], row["low"], row["high"]]


def strategies():
    """How many times as much attribution one of two clusters has on the markers, and how often two were detected."""
    found = results("audit_acceptance")["strategies"]
    gradients, cams = (found[f"two ways, {method}"] for method in ("integratedgradients", "gradcam"))
    detected = [*gradients["claimed"], *cams["claimed"]]
    times = "mass_at_tokens_times"
    return detected.count(2), len(detected), min(gradients[times]), max(gradients[times]), min(cams[times])


def grids(verdict):
    return sum(row.get("verdict") == verdict for row in results("layout_probe")["families"])


def layers():
    """The layers of all families, those that are contradicted, and the families that have such layers."""
    counts = [row["layers"] for row in results("layout_probe")["families"] if "layers" in row]
    contradicted = [count.get("contradicted", 0) for count in counts]
    return sum(sum(count.values()) for count in counts), sum(contradicted), sum(map(bool, contradicted))


def planted_grids():
    """How often each planted grid is contradicted at least and at most, of how many models."""
    grids = [row["planted"] for row in results("layout_probe")["families"] if row.get("planted")]
    counts = Counter(name for planted in grids for name, verdict in planted.items() if verdict == "contradicted")
    return min(counts.values()), max(counts.values()), len(grids)


def quarter_shuffled(verdict):
    families = results("layout_probe")["families"]
    return sum(row.get("planted", {}).get("a quarter shuffled") == verdict for row in families)


def near_float64(way, distance):
    """The percentage of maps that are at most so far from float64 on the CPU."""
    maps = [one[way][0] for network in results("devices")["maps"].values() for one in network.values() if one.get(way)]
    return 100 * sum(value <= distance for value in maps) / len(maps)


def damaged_files():
    """All damaged files, those that are read, those that are refused, and those that are reported as damaged."""
    rows, facts = results("fuzz_files")["rows"], ("files", "mutation", "slowest s", "most MiB")
    counts = {}
    for row in rows:
        for name, count in row.items():
            counts[name] = counts.get(name, 0) + (0 if name in facts else count)
    refused, damaged = counts.pop("refused"), counts.pop("damaged")
    return results("fuzz_files")["files"], sum(counts.values()), refused, damaged


def acceptance():
    scale = results("audit_acceptance")["scale"]
    bare, maps, metrics = (scale[name] for name in ("bare_loop", "maps", "metrics"))
    memory = [scale[name] / 1e6 for name in ("memory_at_a_tenth", "memory_at_the_end")]
    return scale["maps_over_bare"], maps, bare, metrics, (maps + metrics) / bare, *memory


def vlm_percent(*names, file="vlm_shapes", place="before"):
    """The percentages of peaks in the box."""
    methods = results(file)["prompts"][place]["methods"]
    return [100 * methods[name]["peak_in_box"] for name in names]


def study_percent(kind, figure):
    """A figure of the simulated reader studies of every size, in percent."""
    return [100 * size[kind][figure] for size in results("reader_study")["sizes"].values()]


def study_row(name):
    """Coverage, half width and power of the simulated reader studies of one size, in percent."""
    figures = results("reader_study")["sizes"][name]["by reader and by patient"]
    return [100 * figures[key] for key in ("coverage", "half_width", "power")]


def state_space_percent(*names):
    """The percentages of peaks in the box of the shape."""
    return [100 * results("state_space")["peak_in_box"][name] for name in names]


def served():
    """The figures of 10,000 requests in the order of the page."""
    figures = results("serve")
    ((_, n_warnings),), ((_, n_lines),) = figures["warnings"].items(), figures["log_lines"].items()
    statuses = figures["statuses"]
    assert n_lines == 1
    return [
        figures["requests_per_second"], figures["memory_mb"][0], figures["memory_mb"][-1],
        statuses["200"], statuses["422"], n_warnings,
    ]  # fmt: skip


def callback_costs():
    """The number of maps, the seconds per epoch, the share of an epoch, and the number of images, in the order of the page."""
    figures = results("training_callbacks")
    trainers = [figures[name] for name in ("lightning", "transformers")]
    seconds, percent = ([row[name] for row in trainers] for name in ("seconds_per_epoch", "percent_of_an_epoch"))
    return [figures["maps_per_epoch"], *seconds, *percent, figures["images"]]


def count_architectures():
    """The number of architectures that the models page has, which the zoo compares with itself."""
    page = (ROOT / "docs/evidence/models.md").read_text(encoding="utf-8")
    return [int(re.search(r"^(\d+) architectures are tested", page, re.MULTILINE)[1])]


FIGURES = [
    ("README.md", "It is tested on [{} architectures]", count_architectures),
    ("docs/index.md", "the leaderboard, {} architectures", count_architectures),
    ("docs/recipes/index.md", "lists {} architectures", count_architectures),
    (
        "docs/recipes/training.md",
        "With Grad-CAM of {} images on two cores that other programs used too, the callback took {:.2f} s per epoch with "
        "Lightning and {:.2f} s with transformers. That is {:.1f} and {:.1f} % of an epoch of {:,} synthetic radiographs",
        callback_costs,
    ),
    (
        "docs/how-to/serve.md",
        "- {:.1f} requests per second, client included. - The process has {:.1f} MB after 1,000 requests and {:.1f} MB at the "
        "end. - {:,} answers are 200, each equal to the map that `explain` computes directly, and {:,} are 422. - The warning is "
        "counted {:,} times and logged once.",
        served,
    ),
    (
        "docs/how-to/figures.md",
        "is {:.4f} of the map's range per cell for `smooth`, and {:.4f} for `bilinear`. A B-spline has smaller jumps, but moved "
        "the peak out of its cell in {} of the {} maps, and lowered it by {:.0f} %",
        lambda: [
            *(results("interpolation")[name]["slope_jump"] for name in ("smooth", "bilinear")),
            20 - results("interpolation")["cubic B-spline"]["peaks_in_their_cell"],
            results("interpolation")["smooth"]["n_maps"],
            100 * (1 - results("interpolation")["cubic B-spline"]["mean_maximum"]),
        ],
    ),
    *(
        ("docs/explanation/attention.md", sentence, find)
        for sentence, find in (
            ("covers {:.1f} % of the image", lambda: [100 * results("state_space")["chance"]]),
            (
                "in {:.0f} % of the images at the default layer and in {:.0f} % at `patch_embed`",
                lambda: state_space_percent("Grad-CAM, default layer", "Grad-CAM, patch_embed"),
            ),
            (
                "HiResCAM reaches {:.0f} % at `patch_embed`, occlusion {:.0f} % and Integrated Gradients {:.0f} %",
                lambda: state_space_percent("HiResCAM, patch_embed", "Occlusion", "Integrated Gradients"),
            ),
        )
    ),
    *(
        ("docs/recipes/vision_language.md", sentence, find)
        for sentence, find in (
            (
                "names {:.0f} % of {} held-out objects",
                lambda: [100 * results("vlm_shapes")["prompts"]["before"]["accuracy"], results("vlm_shapes")["images"]],
            ),
            ("covers {:.1f} % of the image", lambda: [100 * results("vlm_shapes")["box_share_of_image"]]),
            (
                "in {:.0f} % of the images with `rise`, and in {:.0f} % with `occlusion`",
                lambda: vlm_percent("rise", "occlusion"),
            ),
            (
                "in {:.0f} % with LayerCAM, {:.0f} % with Grad-CAM, {:.0f} % with `chefer` and {:.0f} % with `rollout`",
                lambda: vlm_percent("layercam", "gradcam", "chefer", "rollout"),
            ),
            (
                "`rise` reaches {:.0f} % with the image inside the question, and {:.0f} % with the image behind it",
                lambda: [vlm_percent("rise", place=place)[0] for place in ("around", "behind")],
            ),
            (
                "named {:.0f} % of the objects, and its maps of `chefer` peaked in the box in {:.0f} %",
                lambda: [
                    100 * results("vlm_shapes_3000_steps")["prompts"]["before"]["accuracy"],
                    *vlm_percent("chefer", file="vlm_shapes_3000_steps"),
                ],
            ),
        )
    ),
    *(
        ("docs/recipes/yolo.md", sentence, find)
        for sentence, find in (
            ("it finds {} of {} shapes", lambda: [results("yolo_shapes")[name] for name in ("detections", "shapes")]),
            (
                "LayerCAM peaks inside the box that it explains in {:.1f} % of the detections, and HiResCAM in {:.1f} %",
                lambda: [yolo_percent(name, "peak_in_own_box") for name in ("layercam", "hirescam")],
            ),
            (
                "D-RISE with 500 masks does so for {:.1f} % of {} of them",
                lambda: [yolo_percent("drise", "peak_in_own_box"), results("yolo_shapes")["methods"]["drise"]["maps"]],
            ),
            ("Grad-CAM does so in {:.1f} %", lambda: [yolo_percent("gradcam", "peak_in_own_box")]),
            (
                "draws peak there in {:.1f} %",
                lambda: [yolo_percent("activations of visualize=True", "peak_in_own_box")],
            ),
            ("For all {} pairs of one class", lambda: [yolo_pairs("layercam")]),
            ("Grad-CAM tells {:.1f} % of the pairs apart", lambda: [yolo_percent("gradcam", "pairs_told_apart")]),
        )
    ),
    ("README.md", "{} methods for classifiers, detectors", lambda: [len(METHODS)]),
    (
        "README.md",
        "A batch run with Grad-CAM processes {:.2f} times the images per second of a bare decode and forward loop. A script "
        "around grad-cam reaches {:.2f}",
        lambda: [
            measured("cpu", "batch", f"{RAW}: of", tool) for tool in ("camscope", "script with grad-cam, batches")
        ],
    ),
    (
        COSTS,
        "explained at {:.0f} images per second, {:.1f} times a bare decode and forward loop. With overlays it is {:.0f}, or "
        "{:.2f} of that loop",
        lambda: [measured("cuda", "batch", f"{work}: {unit}") for work in (RAW, DRAWN) for unit in ("images", "of")],
    ),
    (
        COSTS,
        "Grad-CAM takes {:.1f} to {:.1f} forward passes. grad-cam takes {:.1f} to {:.1f}, captum {:.1f} to {:.1f} and torchcam "
        "{:.1f} to {:.1f}",
        lambda: [end for tool in ("camscope", "grad-cam", "captum", "torchcam") for end in forward_passes_on_gpu(tool)],
    ),
    (
        COSTS,
        "Score-CAM takes {:.2f} times its plain",
        lambda: [measured("cuda", "score", "ResNet-18 `layer4`, 510 passes in batches of 32, float32")],
    ),
    (COSTS, "SmoothGrad takes {:.1f} times its loop", lambda: [measured("cuda", "loops", "smoothgrad")]),
    (
        COSTS,
        "take {:,.0f} MB at most with the default threads of 16 cores, and {:,.0f} MB with two. The goal is {:,.0f} MB",
        lambda: [
            *(run["peak_mb"] for run in results("batch_memory")["runs"]),
            results("batch_memory")["runs"][0]["goal_mb"],
        ],
    ),
    (COSTS, "for each of {} families of timm", lambda: [len(results("layout_probe")["families"])]),
    (
        COSTS,
        "known by construction in {}, verified by a probe in {}, and undecided, which a note reports, in {}",
        lambda: [grids(verdict) for verdict in ("by construction", "verified", "undecided")],
    ),
    (COSTS, "at the layer are rejected in {} to {} of {} models", planted_grids),
    (
        COSTS,
        "a quarter of the cells shuffled: undecided in {}, wrongly verified in {}",
        lambda: [quarter_shuffled(verdict) for verdict in ("undecided", "verified")],
    ),
    (
        COSTS,
        "{:.0f} and {:.0f} % of the maps are within 1e-4, {:.0f} % within 1e-2",
        lambda: [
            near_float64("float32", 1e-4),
            near_float64("CPU, float32", 1e-4),
            near_float64("float32", 1e-2),
        ],
    ),
    (COSTS, "Of all {:,} layers {} are contradicted, in {} families", layers),
    (COSTS, "of {:,} damaged files {:,} are read, {:,} refused and {:,} reported as damaged", damaged_files),
    (COSTS, "{} of {} models are judged correctly. None", lambda: judged_correctly("nets")),
    (COSTS, "None of {1} further clean models is flagged", lambda: judged_correctly("clean")),
    (COSTS, "{} of {} models of volumes are judged correctly", lambda: judged_correctly("volumes")),
    (
        AUDIT,
        "{:.0f} s; the estimate before the start was {:.0f} s; the report has {:.1f} MB",
        lambda: [
            results("audit_acceptance")["time"]["seconds"],
            results("audit_acceptance")["time"]["foreseen"][0],
            results("audit_acceptance")["time"]["page_bytes"] / 1e6,
        ],
    ),
    (
        AUDIT,
        "maps take {:.2f} times as long as a bare loop that reads the files and runs forward and backward, in three alternating "
        "rounds ({:.1f} s and {:.1f} s); the metrics, at the size of the images and for four control maps too, take {:.0f} s "
        "more, in total {:.1f} times the loop; {:.0f} MB after a tenth of the rows, {:.0f} MB at the end",
        acceptance,
    ),
    (
        AUDIT,
        "| patients | 2 | 3 | 5 | 6 | 10 | |---|---|---|---|---|---| | interval contains the true value | {:.0f} % | {:.0f} % | "
        "{:.0f} % | {:.0f} % | {:.0f} % |",
        lambda: map(coverage_before, (2, 3, 5, 6, 10)),
    ),
    (AUDIT, "({} simulated samples of patients with 1 to 8 images)", lambda: [results("coverage_before")["sims"]]),
    (
        AUDIT,
        "simulations with 10 to 40 patients gave *not supported* in {:.0f} %. With 100 patients it was {:.0f} to {:.0f} %. "
        "Before this rule it was up to {:.0f} %",
        lambda: [
            max(absences((10, 20, 40))),
            min(absences((100,))),
            max(absences((100,))),
            max(absences((10, 20, 40, 100), "coverage_before")),
        ],
    ),
    (
        AUDIT,
        "*different*: {:.2f} SD [{:.2f}, {:.2f}] at A against B, 100 images of 100 patients; with the marker at both sites "
        "*undecided*: {:.2f} [{:.2f}, {:.2f}]",
        lambda: [*contrast("at site B only"), *contrast("at both sites")],
    ),
    (
        AUDIT,
        "two clusters detected {} of {} times, adjusted Rand index 1.0; one cluster has {:.0f} to {:.0f} (IG), {:.0f} and more "
        "(Grad-CAM) times",
        strategies,
    ),
    (
        AUDIT,
        "ends in the same {} files as an uninterrupted audit",
        lambda: [results("audit_acceptance")["killed"]["files"]],
    ),
    (
        COSTS,
        "(rank correlation {:.3f}, the maximum for three values of p)",
        lambda: set(results("audit_power")["dose"].values()),
    ),
    (
        AUDIT,
        "the rank correlation is {:.2f} for insertion, IG and occlusion",
        lambda: [results("audit_power")["dose"]["insertion"]],
    ),
    (
        "docs/how-to/evaluate.md",
        "{:.0f} to {:.0f} of 100 comparisons find a difference from the first",
        lambda: [100 * end(coverage("comparisons", "any differs")) for end in (min, max)],
    ),
    (
        METRICS,
        "{:.2f} to {:.2f} for lognormal values",
        lambda: [end(coverage("coverage", "lognormal(1)", "coverage")) for end in (min, max)],
    ),
    (
        METRICS,
        'is still called "not supported" in {:.0f} to {:.0f} % of samples',
        lambda: [
            100
            * end(
                coverage("absences", "100 patients, 3 SD in 5 %", "not supported")
                + coverage("absences", "100 patients, 5 SD in 3 %", "not supported")
            )
            for end in (min, max)
        ],
    ),
    (
        STUDIES,
        "maps change the accuracy by {:.1f} points, with an interval from {:.1f} to {:.1f}",
        lambda: [100 * results("reader_study")["example"]["accuracy map none"][key] for key in ("mean", "low", "high")],
    ),
    (
        STUDIES,
        "change is {:.1f} points, with an interval from {:.1f} to {:.1f}",
        lambda: [
            100 * results("reader_study")["example"]["accuracy map control"][key] for key in ("mean", "low", "high")
        ],
    ),
    (
        STUDIES,
        "gain of accuracy was {:.1f} percentage points",
        lambda: [100 * results("reader_study")["sizes"]["4 readers, 60 patients"]["true_difference"]],
    ),
    (
        STUDIES,
        "contained it in {:.1f} to {:.1f} % of the studies",
        lambda: [end(study_percent("by reader and by patient", "coverage")) for end in (min, max)],
    ),
    (
        STUDIES,
        "contained it in only {:.1f} to {:.1f} %",
        lambda: [end(study_percent("by patient", "coverage")) for end in (min, max)],
    ),
    *(
        (STUDIES, f"| {name} | {{:.1f}} % | {{:.1f}} | {{:.0f}} % |", lambda name=name: study_row(name))
        for name in results("reader_study")["sizes"]
    ),
    (COSTS, "`liftcam` ({:.2f})", lambda: [ratio_to_fastest("liftcam")]),
    (
        COSTS,
        "`dff` ({:.2f} for eight images, {:.2f} for one",
        lambda: [ratio_to_fastest(f"dff, batch {n}") for n in (8, 1)],
    ),
    (COSTS, "`cam` ({:.2f})", lambda: [ratio_to_fastest("cam, batch 8")]),
    (
        "docs/how-to/audit.md",
        "default, one finding | {:.1f} min",
        lambda: [sum(results("audit_minutes")["wall"].values()) / 60],
    ),
    (
        "docs/how-to/audit.md",
        "grow with the images: {:.1f} s an X-ray",
        lambda: [results("audit_minutes")["wall"]["explain"] / 40 + results("audit_minutes")["wall"]["predict"] / 40],
    ),
]


MEASURED = re.compile(
    r"(?<![\w.])\d[\d.,]*(?: (?:to|and|or|instead of) \d[\d.,]*)? (?:ms|s|min|MB|GB)\b"
)  # times and sizes; a percentage is often a level or a setting
GUIDES = [
    path.relative_to(ROOT).as_posix()
    for folder in ("get-started", "how-to", "recipes", "explanation", "help")
    for path in sorted((ROOT / "docs" / folder).rglob("*.md"))
]
BATCHES, BY_HAND = "docs/how-to/batch.md", "measured once on two cores, without a file of results"
FROM_BY_HAND = "computed from figures that were measured once"
AUDITS = "docs/how-to/audit.md"
UNTIED = {  # (page, figure): why no file of results has it
    (BATCHES, "659 MB"): BY_HAND,
    (BATCHES, "540 MB"): BY_HAND,
    (BATCHES, "737 to 742 MB"): BY_HAND,
    (BATCHES, "46 and 99 ms"): BY_HAND,
    (BATCHES, "249 and 840 ms"): BY_HAND,
    (BATCHES, "108 and 47 ms"): BY_HAND,
    (BATCHES, "35 instead of 186 ms"): BY_HAND,
    (BATCHES, "162 MB"): BY_HAND,
    (BATCHES, "2.7 s"): BY_HAND,
    (BATCHES, "0.1 s"): BY_HAND,
    (BATCHES, "520 GB"): FROM_BY_HAND,
    (BATCHES, "5.2 GB"): FROM_BY_HAND,
    (BATCHES, "4 s"): FROM_BY_HAND,
    (BATCHES, "2 MB"): FROM_BY_HAND,
    (BATCHES, "160 GB"): FROM_BY_HAND,
    (BATCHES, "1.6 GB"): FROM_BY_HAND,
    (BATCHES, "45 min"): FROM_BY_HAND,
    (BATCHES, "3 min"): FROM_BY_HAND,
    (BATCHES, "27 s"): FROM_BY_HAND,
    (BATCHES, "2 s"): FROM_BY_HAND,
    (AUDIT, "2 s"): BY_HAND,
    ("docs/explanation/metrics/faithfulness.md", "20 to 60 ms"): BY_HAND,
    ("docs/explanation/metrics/faithfulness.md", "20 to 340 ms"): BY_HAND,
    ("docs/explanation/targets.md", "12 s"): BY_HAND,
    **dict.fromkeys([(AUDITS, figure) for figure in ("33 s", "79 s", "9.9 min", "3.7 min", "0.06 s")], BY_HAND),
}


def find_untied_figures():
    """The times and sizes of the guides that stand in no sentence of `FIGURES`."""
    untied = set()
    for page in GUIDES:
        text = sentences(page)
        for name, sentence, find in FIGURES:
            if name == page:
                text = text.replace(sentence.format(*find()), "")
        prose = re.sub(r"```.*?```|`[^`]*`", "", text)
        untied |= {(page, figure[0]) for figure in MEASURED.finditer(prose)}
    return untied


def sentences(page):
    return " ".join((ROOT / page).read_text("utf-8").split())


@pytest.mark.parametrize(
    ("page", "sentence", "find"), FIGURES, ids=[f"{page}: {text[:40]}" for page, text, _ in FIGURES]
)
def test_a_figure_in_a_sentence_is_the_measured_one(page, sentence, find):
    assert sentence.format(*find()) in sentences(page)


def test_a_time_or_a_size_in_a_guide_is_tied_or_has_a_reason():
    untied = find_untied_figures()
    assert untied - UNTIED.keys() == set(), "tie it in FIGURES, or give the reason in UNTIED"
    assert UNTIED.keys() - untied == set(), "these are tied or gone"


def test_a_new_figure_is_noticed(monkeypatch):
    monkeypatch.setitem(globals(), "sentences", lambda page: "A run takes 35.5 s, `a 3 s setting` and 2 to 4 GB.")
    assert {figure for _, figure in find_untied_figures()} == {"35.5 s", "2 to 4 GB"}


def test_every_model_without_a_shortcut_is_cleared():
    assert all(row["word"] == "not supported" for row in results("audit_power")["clean"])


def test_another_figure_is_found():
    page, sentence, find = next(row for row in FIGURES if row[1].startswith("A batch run"))
    first, second = find()
    assert sentence.format(first + 0.01, second) not in sentences(page)
