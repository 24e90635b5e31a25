"""A summary of an audit as it could be: two findings, two methods, a marker that the model relies on, one stage skipped."""

from camscope.audit.core.convert_to_summary_entries import collect_formulas
from camscope.audit.core.stage_result_schema import (
    DataCheckResult,
    DataIssue,
    EstimateSummary,
    ExplainerInfo,
    ExplainResult,
    FindingPerformance,
    FlowStep,
    LevelCount,
    MapCounts,
    MetricsResult,
    MetricSummary,
    PredictResult,
    RandomizationSimilarity,
    RandomizationTest,
    ReliabilityPoint,
    ResolveResult,
    SanityResult,
    SubgroupDifference,
    SubgroupPerformance,
)
from camscope.audit.core.summary_schema import (
    AttributionMass,
    ClusterAnalysis,
    ClusterStability,
    ColumnLeakage,
    InterventionEffect,
    MapCluster,
    MaskedAuroc,
    RegionOverlap,
    ReviewCase,
    ShortcutResult,
    Summary,
    Verdict,
)

FINDINGS = ("nodule", "effusion")
CAM, PIXELS = "gradcam", "integratedgradients"
CONTROLS = ("edges", "center", "random")
MARGINS = {
    "effect": 0.1,
    "auroc_difference": 0.05,
    "useful_auroc": 0.7,
    "masked_auroc": 0.7,
    "enrichment": 1.5,
    "mass_difference": 0.05,
    "robustness_correlation": 0.5,
    "leakage_auroc": 0.6,
}
SKIPPED = "the config skips it"


def num(value, spread=None, n=312, groups=187, baseline=None, name="", p=None, reason="", undefined=0):
    """A number with an interval of so much to each side."""
    low, high = (None, None) if spread is None else (round(value - spread, 6), round(value + spread, 6))
    return EstimateSummary(
        value=value,
        low=low,
        high=high,
        n_values=n,
        n_groups=groups,
        baseline=baseline,
        baseline_name=name,
        p_value=p,
        reason=reason,
        n_undefined=undefined,
    )


def levels(finding, values, margin, region=""):
    made = []
    for (column, level), (value, difference, word) in values.items():
        made.append(
            SubgroupDifference(
                finding=finding, region=region, column=column, level=level, value=num(value, 0.0417, n=96, groups=61),
                difference=num(difference, 0.0329, n=312, groups=187, p=0.0004 if word == "different" else 0.412),
                conclusion=word, margin=margin,
            )
        )  # fmt: skip
    return tuple(made)


def answers(finding, auroc):
    bins = [(0.04, 0.03, 96), (0.17, 0.12, 41), (0.36, 0.31, 22), (0.55, 0.62, 31), (0.78, 0.83, 52), (0.95, 0.93, 70)]
    values = {
        ("site", "A"): (auroc - 0.071, -0.0832, "different"),
        ("site", "B"): (auroc + 0.012, 0.0832, "different"),
        ("sex", "female"): (auroc - 0.004, -0.0061, "equivalent"),
        ("sex", "male"): (auroc + 0.003, 0.0061, "equivalent"),
        ("age", "60 and more"): (auroc - 0.019, -0.0274, "undecided"),
    }
    return FindingPerformance(
        finding=finding,
        n_positives=148,
        n_negatives=164,
        log_odds_std=2.31482917,
        auroc=num(auroc, 0.0213649, baseline=0.5, name="chance", p=0.0002),
        average_precision=num(auroc - 0.0134921, 0.0294, baseline=0.474359, name="prevalence"),
        brier=num(0.0913847, 0.0142, baseline=0.249342, name="the prevalence for all"),
        calibration_error=num(0.0427193, 0.0183, baseline=0.0, name="perfect"),
        slope=num(0.913847, 0.2113, baseline=1.0, name="perfect calibration"),
        intercept=num(-0.084712, 0.1934, baseline=0.0, name="perfect calibration"),
        subgroups=(
            SubgroupPerformance(
                column="site",
                level="A",
                n_positives=51,
                n_negatives=60,
                auroc=num(auroc - 0.071, 0.0417, n=111, groups=70),
            ),
            SubgroupPerformance(
                column="site",
                level="C",
                n_positives=1,
                n_negatives=0,
                reason="too few patients, or images of one class only",
            ),
        ),
        bins=tuple(
            ReliabilityPoint(predicted=p, observed=o, low=max(0, o - 0.09), high=min(1, o + 0.08), n_images=n)
            for p, o, n in bins
        ),
        subgroup_differences=levels(finding, values, MARGINS["auroc_difference"]),
    )


def gain(value, n):
    return num(value, 0.0714, n=n, groups=min(93, n), baseline=0.0, name="no difference", p=0.0031)


def lines(metric, finding, values, better="more", fill=None, layer=None, n=148):
    made = []
    best = (max if better == "more" else min)((one for one in values if one in CONTROLS), key=values.__getitem__)
    for method, value in values.items():
        control = method in CONTROLS
        made.append(
            MetricSummary(
                metric=metric, method=method, layer=None if control or method == PIXELS else layer or "layer4",
                finding=finding, control=control, better_direction=better, imputation=fill,
                value=num(value, 0.061 * abs(value) + 0.008, n=n, groups=min(93, n), baseline=values[best], name=best),
                difference_to_control=None if control else gain(abs(value - values[best]), n),
            )
        )  # fmt: skip
    return made


def localize(findings):
    found = []
    for finding in findings:
        found += lines(
            "energy-inside", finding, {CAM: 0.4128, PIXELS: 0.2871, "edges": 0.0912, "center": 0.1033, "random": 0.0614}
        )
        found += lines(
            "enrichment", finding, {CAM: 5.8213, PIXELS: 3.9127, "edges": 1.2914, "center": 1.4482, "random": 1.0021}
        )
        found += lines(
            "pointing-game", finding, {CAM: 0.7162, PIXELS: 0.4459, "edges": 0.1284, "center": 0.1081, "random": 0.0541}
        )
        found += lines(
            "peak-distance",
            finding,
            {CAM: 9.13, PIXELS: 14.72, "edges": 31.2, "center": 27.9, "random": 39.4},
            better="less",
        )
    values = {("site", "A"): (0.4513, 0.0712, "different"), ("site", "B"): (0.3801, -0.0712, "different")}
    return MetricsResult(
        n_images=148,
        formulas=collect_formulas(found),
        metric_summaries=tuple(found),
        subgroup_differences=tuple(
            one for finding in findings for one in levels(finding, values, MARGINS["mass_difference"])
        ),
    )


def faithfulness(findings):
    found = []
    for finding in findings:
        for fill, less in (("mean", 0.0), ("blur", 0.07)):
            for metric, better, add in (("lerf-morf-gap", "more", 0.0), ("deletion", "less", -0.31)):
                values = {CAM: 0.5142 - less + add, PIXELS: 0.6118 - less + add, "edges": 0.31 + add, "random": 0.0087}
                found += lines(metric, finding, values, better=better, fill=fill, n=48)
    return MetricsResult(n_images=48, formulas=collect_formulas(found), metric_summaries=tuple(found))


def sanity():
    steps = ("fc", "layer4.0.conv2", "layer3.0.conv1", "layer2.0.conv1", "conv1")
    made = []
    for method, curve, passes in (
        (CAM, (0.71, 0.42, 0.28, 0.19, 0.1718), True),
        (PIXELS, (0.83, 0.61, 0.44, 0.37, 0.3312), True),
        ("edges", (1.0, 1.0, 1.0, 1.0, 1.0), False),
    ):
        similar = [
            RandomizationSimilarity(
                name=name,
                curve=tuple(round(one * weight, 5) for one in curve),
                null_low=0.1124,
                null_mean=0.2871,
                null_high=0.4418,
                passes=passes,
                reason="",
                final_similarity=num(round(curve[-1] * weight, 5), 0.0513, n=12, groups=12),
            )
            for name, weight in (("spearman", 1.0), ("ssim", 0.93))
        ]
        made.append(
            RandomizationTest(
                method=method, finding=FINDINGS[0], part_names=steps, seeds=(0, 1, 2), similarities=tuple(similar), passes=passes,
                reason="", control=method == "edges",
            )
        )  # fmt: skip
    return SanityResult(n_images=12, tests=tuple(made))


def masses(findings):
    made = []
    for finding in findings:
        for method, stride in ((CAM, 8.0), (PIXELS, 1.0)):
            for region, share, area, diameter in (
                ("the finding", 0.4128, 0.071, 19.4),
                ("outside the organ", 0.1914, 0.5213, 94.1),
                ("the frame", 0.0512, 0.1172, 43.2),
                ("marker", 0.0913 if method == PIXELS else 0.0121, 0.0078, 5.3),
            ):
                made.append(
                    AttributionMass(
                        region=region, method=method, finding=finding,
                        share=num(share, share * 0.12, n=141, groups=88, baseline=area * 0.94, name="maps of other patients"),
                        enrichment=num(
                            share / area, share / area * 0.14, n=141, groups=88, baseline=0.94, name="maps of other patients"
                        ),
                        confounder_sensitivity=num(min(1.0, share * 2.1), 0.06, n=141, groups=88, baseline=0.1, name="chance"),
                        is_resolvable=diameter >= stride, diameter=diameter, stride=stride,
                        reason="" if diameter >= stride else "below the resolution of the maps",
                    )
                )  # fmt: skip
    return made


def interventions(findings):
    made = []
    for finding in findings:
        for region, remove, insert in (
            ("the finding", -0.9714, None),
            ("marker", -0.8412, 1.0831),
            ("the frame", -0.0213, None),
        ):
            for fill, less in (("mean", 1.0), ("blur", 0.87)):
                effect = num(remove * less, 0.0931, n=141, groups=88, baseline=0.0, name="no effect", p=0.0002)
                made.append(
                    InterventionEffect(region=region, finding=finding, kind="remove", imputation=fill, effect=effect)
                )
            if insert is not None:
                effect = num(insert, 0.1241, n=164, groups=99, baseline=0.0, name="no effect", p=0.0002)
                made.append(
                    InterventionEffect(region=region, finding=finding, kind="insert", imputation=None, effect=effect)
                )
    return made


def shortcut(findings, ids):
    trials = [ClusterStability(n_clusters=k, stability=s, null_stability=n, separation=0.31 - 0.03 * k) for k, s, n in
              ((2, 0.9412, 0.6113), (3, 0.7218, 0.5914), (4, 0.6033, 0.5527), (5, 0.5511, 0.5402))]  # fmt: skip
    clusters = (
        MapCluster(
            number=1,
            n_images=87,
            prototypes=ids[:3],
            attribution_mass={"marker": 0.2113, "the finding": 0.1127},
            associated_columns=("site: A",),
        ),
        MapCluster(
            number=2,
            n_images=61,
            prototypes=ids[3:6],
            attribution_mass={"marker": 0.0124, "the finding": 0.5218},
            associated_columns=("site: B",),
        ),
    )
    return ShortcutResult(
        region_counts={"the finding": 148, "the organ": 312, "outside the organ": 312, "the frame": 305, "marker": 141},
        missing_regions=(
            FlowStep(name="marker", n_rows=171, reason="its mask is empty"),
            FlowStep(name="the frame", n_rows=7, reason="the border is not of one gray"),
        ),
        overlaps=tuple(
            RegionOverlap(finding=finding, region=region, other_region=within, share=share, n_images=images)
            for finding in findings
            for region, within, share, images in (
                ("marker", "the frame", 0.9412, 141),
                ("the frame", "marker", 0.0613, 305),
                ("outside the organ", "marker", 0.0143, 312),
            )
        ),
        attribution_mass=tuple(masses(findings)),
        interventions=tuple(interventions(findings)),
        masked_auroc=tuple(
            MaskedAuroc(
                region="the organ",
                finding=finding,
                kind=kind,
                imputation=fill,
                auroc=num(value - less, 0.0331, baseline=0.5, name="chance"),
            )
            for finding in findings
            for kind, value in (("mask", 0.9127), ("keep only", 0.7218))
            for fill, less in (("mean", 0.0), ("blur", 0.0213))
        ),
        subgroup_differences=tuple(
            one
            for finding in findings
            for one in levels(finding, {("site", "A"): (0.8127, 0.5214, "different")}, MARGINS["effect"], "marker")
        ),
        leakage=(
            ColumnLeakage(
                column="site",
                auroc=num(0.9317, 0.0241, baseline=0.5, name="chance"),
                null_max=0.5613,
                is_decodable=True,
            ),
            ColumnLeakage(column="sex", auroc=num(0.5714, 0.0518, baseline=0.5, name="chance"), null_max=0.5702),
        ),
        cluster_analyses=(
            ClusterAnalysis(
                finding=findings[0],
                method=CAM,
                n_clusters=2,
                n_maps=148,
                n_excluded=3,
                n_patients=93,
                eigenvalues=(0.0, 0.0312, 0.2914, 0.3518, 0.4127, 0.4713, 0.5214, 0.5518),
                stability_by_n_clusters=tuple(trials),
                clusters=clusters,
            ),
            ClusterAnalysis(
                finding=findings[-1],
                method=CAM,
                n_clusters=1,
                n_maps=18,
                n_excluded=0,
                n_patients=18,
                reason="fewer than 20 maps",
            ),
        ),
        review_cases=tuple(
            ReviewCase(id=one, finding=findings[0], reason=why)
            for one, why in zip(
                ids[:3],
                (
                    "missed, and the map highlights the marker",
                    "a duplicate of it is in the other split",
                    "inserting the marker reverses the prediction",
                ),
                strict=False,
            )
        ),
    )


def verdict(
    question,
    claim,
    finding,
    word,
    speaks,
    effect,
    margin,
    section,
    subject="",
    reason="",
    rule="the interval beyond the margin",
):
    return Verdict(
        question=question, claim=claim, finding=finding, qualifier=subject, conclusion=word, direction=speaks, effect=effect,
        margin=margin, rule=rule, reason=reason, section=section,
    )  # fmt: skip


def verdicts(findings):
    made = []
    for finding in findings:
        add = made.append
        add(
            verdict(
                "performance",
                f"The model distinguishes images with “{finding}” from those without.",
                finding,
                "supported",
                "supports",
                num(0.9412, 0.0213649, baseline=0.5, name="chance"),
                0.7,
                "performance",
            )
        )
        add(
            verdict(
                "performance by subgroup",
                f"The model detects “{finding}” equally well regardless of site.",
                finding,
                "not supported",
                "contradicts",
                num(-0.0832, 0.0329),
                0.05,
                "performance",
                "site",
                "A differs from the others by more than the margin",
            )
        )
        add(
            verdict(
                "ground truth",
                f"The prediction for “{finding}” uses the area that is marked as “{finding}”.",
                finding,
                "supported",
                "supports",
                num(-0.9714, 0.0931, n=141, groups=88, baseline=0.0, name="no effect"),
                0.1,
                "shortcut",
                "the finding",
            )
        )
        add(
            verdict(
                "shortcut",
                f"The prediction for “{finding}” relies on the region “marker”.",
                finding,
                "supported",
                "contradicts",
                num(1.0831, 0.1241, n=164, groups=99, baseline=0.0, name="no effect"),
                0.1,
                "shortcut",
                "marker",
            )
        )
        add(
            verdict(
                "shortcut",
                f"The prediction for “{finding}” relies on the region the frame.",
                finding,
                "supported",
                "contradicts",
                num(0.6127, 0.0931, n=164, groups=99, baseline=0.0, name="no effect"),
                0.1,
                "shortcut",
                "the frame",
            )
        )
        add(
            verdict(
                "masked organ",
                f"The model still detects “{finding}” when the organ is masked.",
                finding,
                "supported",
                "contradicts",
                num(0.8914, 0.0331, baseline=0.5, name="chance"),
                0.7,
                "shortcut",
                "the organ",
            )
        )
        add(
            verdict(
                "localization",
                f"The maps of {CAM} highlight “{finding}” more than expected by chance.",
                finding,
                "supported",
                "supports",
                num(5.8213, 0.363, n=148, groups=93, baseline=1.4482, name="center"),
                1.5,
                "localization",
                CAM,
            )
        )
        add(
            verdict(
                "attribution mass",
                f"The maps of {CAM} for “{finding}” highlight the region “marker”.",
                finding,
                "not decided",
                "neither",
                num(1.5513, 0.217, n=141, groups=88, baseline=0.94, name="maps of other patients"),
                1.5,
                "shortcut",
                f"marker · {CAM}",
                "below the resolution of the maps: the map can neither show nor exclude it",
            )
        )
        add(
            verdict(
                "faithfulness",
                f"The maps of {CAM} show what the prediction for “{finding}” depends on.",
                finding,
                "not decided",
                "neither",
                num(0.0712, 0.0914, n=48, groups=37, baseline=0.0, name="no difference"),
                0.0,
                "faithfulness",
                CAM,
                "the interval includes the margin: more images are needed",
            )
        )
        add(
            verdict(
                "robustness",
                "The maps stay stable under irrelevant changes of the image.",
                finding,
                "not decided",
                "neither",
                EstimateSummary(reason="there are no data to test it"),
                None,
                "robustness",
                "",
                SKIPPED,
            )
        )
    add(verdict("sanity", f"The maps of {CAM} depend on the trained weights.", findings[0], "supported", "supports",
                num(0.1718, 0.0513, n=12, groups=12, baseline=0.4418, name="maps of different images",
                    reason="spearman after the last step"), None, "sanity", CAM))  # fmt: skip
    add(verdict("leakage", "The column site can be predicted from the model's features.", findings[0], "supported", "neither",
                num(0.9317, 0.0241, baseline=0.5, name="chance"), 0.6, "shortcut", "site"))  # fmt: skip
    add(verdict("clusters", f"The maps of {CAM} for “{findings[0]}” fall into several clusters.", findings[0], "supported",
                "neither", num(0.9412, n=148, groups=93, baseline=0.6113, name="a single cluster"), None, "clusters",
                CAM))  # fmt: skip
    return tuple(made)


IDS = tuple(f"case {n:03d}" for n in range(12))


def full(title="Nodules and effusions on chest radiographs", findings=FINDINGS, ids=IDS, **changed):
    """The audit of a model that relies on a marker; robustness was skipped."""
    made = Summary(
        camscope_version="0.9.0",
        title=title,
        intended_use="Does the classifier use the finding, or a confounder of it, in adults at two hospitals?",
        config_digest="9f2c41d7a0b35e68c1f4927d5b60e3a8",
        data_digest="41e07bd2935c86fa0d7e12c4b89f3560",
        seed=7,
        n_resamples=2000,
        margins=MARGINS,
        imputations=("mean", "blur"),
        profile="research",
        check=DataCheckResult(
            flow=(
                FlowStep(name="rows of the manifest", n_rows=1214),
                FlowStep(name="rows of the audited split", n_rows=318, reason="split is test"),
                FlowStep(name="rows audited", n_rows=312, reason="at most so many, drawn by the seed"),
            ),
            n_patients=187,
            has_patient_column=True,
            issues=(
                DataIssue(code="patient-in-splits", severity="error", message="4 patients are in several splits", count=9,
                      ids=ids[:4]),
                DataIssue(code="twins", severity="warning", message="the same pixels under two names", count=2, ids=ids[4:6]),
            ),
            metadata_value_counts={"modality": {"DX": 241, "CR": 71}, "photometric": {"MONOCHROME2": 298, "MONOCHROME1": 14}},
            level_counts=tuple(
                LevelCount(
                    column=column, level=level, n_rows=rows, n_patients=patients,
                    positives_by_finding=dict.fromkeys(findings, positives),
                )
                for column, level, rows, patients, positives in (
                    ("site", "A", 171, 102, 118), ("site", "B", 141, 85, 30), ("sex", "female", 150, 91, 70),
                    ("sex", "male", 162, 96, 78), ("age", "60 and more", 96, 61, 52),
                )
            ),
        ),
        resolve=ResolveResult(
            model="resnet.py:build", weights_digest="c0ffee5a7d31b294", n_parameters=11176512, n_classes=4,
            class_names=("no finding", "nodule", "effusion", "pneumothorax"), findings=findings, input_size=(128, 128),
            preprocess="resize to 128 x 128, mean 0.55, std 0.2", outputs="softmax",
            explainers=(
                ExplainerInfo(method=CAM, title=CAM, layer="layer4", grid=(16, 16), stride=(8.0, 8.0), settings={"relu": "True"},
                     paper="Selvaraju et al. 2017", stride_mm=12.4),
                ExplainerInfo(method=PIXELS, title=PIXELS, layer=None, grid=(128, 128), stride=(1.0, 1.0),
                     settings={"steps": "32", "baseline": "black"}, paper="Sundararajan et al. 2017"),
            ),
            n_passes=48211,
        ),
        predict=PredictResult(performance=tuple(map(answers, findings, (0.9412371, 0.8874103)))),
        explain=ExplainResult(
            map_counts=tuple(
                MapCounts(
                    method=m, finding=f, n_maps=310, n_failures=2, status_counts={"ok": 303, "no_positive_evidence": 7}
                )
                for m in (CAM, PIXELS) for f in findings
            ),
            failures=(FlowStep(name="no map", n_rows=2, reason="the file is cut off"),),
        ),
        localization=localize(findings),
        faithfulness=faithfulness(findings),
        sanity=sanity(),
        robustness=MetricsResult(tested=False, reason=SKIPPED),
        shortcut=shortcut(findings, ids),
        verdicts=verdicts(findings),
        warnings=(
            "4 patients are in several splits: performance is too good.",
            "The marker is correlated with the finding: site A has 118 of 148 positives.",
            "The cells of gradcam are 12.4 mm wide: the marker is below its resolution.",
            "Robustness was not tested.",
            "2 images have no map.",
            "14 images are MONOCHROME1 and were inverted.",
        ),
        limitations=("The maps of gradcam have cells of 12.4 mm: smaller structures are not resolved.",),
    )  # fmt: skip
    return made.model_copy(update=changed)


def nothing():
    """An audit in which everything was skipped."""
    no = {"tested": False, "reason": SKIPPED}
    return full(
        check=DataCheckResult(**no),
        resolve=ResolveResult(**no),
        predict=PredictResult(**no),
        explain=ExplainResult(**no),
        localization=MetricsResult(**no),
        faithfulness=MetricsResult(**no),
        sanity=SanityResult(**no),
        robustness=MetricsResult(**no),
        shortcut=ShortcutResult(**no),
        verdicts=(),
        warnings=(),
        limitations=(),
        intended_use="",
    )


PROVENANCE = {
    "camscope": {"version": "0.9.0", "commit": "8d1f6b2"},
    "command": "camscope audit run audit.toml",
    "started": "2025-03-01T09:00:00Z",
    "ended": "2025-03-01T09:08:41Z",
    "host": {"system": "Linux", "cpus": 2, "gpu": None, "deterministic": True},
    "versions": {"python": "3.12.4", "torch": "2.6.0", "numpy": "2.1.0"},
    "model": {"digest": "c0ffee5a7d31b294", "parameters": 11176512, "missing keys": []},
    "seeds": {"sample": 7, "bootstrap": 7},
    "files": ["summary.json", "metrics.parquet"],
}
