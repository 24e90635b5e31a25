"""What an audit's config refuses at once, what `init` writes, and what the digest of a config hangs on."""

import pytest

pytest.importorskip("pydantic")
pytest.importorskip("pyarrow")

from camscope.audit.config import Config
from camscope.errors import InputError

PLAIN = {
    "data": {"manifest": "manifest.csv", "label": "label", "patient": "patient"},
    "model": {"source": "phantom"},
    "explain": {"findings": ("lesion",), "methods": ("gradcam",)},
}


def config(**tables):
    plain = {name: dict(table) for name, table in PLAIN.items()}
    for name, table in tables.items():
        plain[name] = {**plain.get(name, {}), **table} if isinstance(table, dict) else table
    return Config.of(plain)


# What it refuses


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"explain": {"findings": ("a", "b", "a")}}, "explain.findings: 'a' stands there twice"),
        ({"explain": {"methods": ("gradcam", "gradcam")}}, "explain.methods: 'gradcam' stands there twice"),
        ({"fills": ("mean", "mean")}, "fills: 'mean' stands there twice"),
        ({"data": {"subgroups": ("site", "site")}}, "data.subgroups: 'site' stands there twice"),
        ({"explain": {"methods": ("gradcamm",)}}, "no method 'gradcamm'; nearest names: .*gradcam"),
        (
            {"explain": {"settings": {"integratedgradients": {"steps": 2}}}},
            "settings.integratedgradients: the methods are",
        ),
        ({"explain": {"settings": {"gradcam": {"step": 2}}}}, "gradcam has no setting 'step' here; it has layer, "),
        ({"explain": {"settings": {"gradcam": {"model": 2}}}}, "gradcam has no setting 'model'"),
        ({"data": {"subgroups": ("site", "patient")}}, "'patient' names images or patients"),
        ({"data": {"subgroups": ("path",)}}, "'path' names images or patients"),
        ({"data": {"subgroups": ("id",)}}, "'id' names images or patients"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_loaded(tables, words):
    with pytest.raises(InputError, match=words):
        config(**tables)


def test_settings_of_a_method_that_is_asked_are_taken():
    methods = ("gradcam", "integratedgradients")
    assert config(explain={"methods": methods, "settings": {"integratedgradients": {"steps": 2}}}).explain.settings


# What its digest hangs on


def test_the_digest_is_of_what_is_declared_not_of_where_files_lie():
    here, there = (
        config(
            data={"manifest": f"{at}/manifest.csv", "root": root, "evidence": f"{at}/masks"},
            model={"source": f"{at}/models.py:net", "weights": f"{at}/net.pt"},
        ).digest
        for at, root in (("here", None), ("/there", "/there/images"))
    )
    assert here == there
    others = [
        config(data={"evidence": "mask"}),
        config(data={"label": "other"}),
        config(model={"source": "models.py:other"}),
        config(model={"source": "others.py:net"}),
        config(model={"weights": "random"}),
        config(margins={"effect": 0.2}),
        config(),
    ]
    assert len({here, *(one.digest for one in others)}) == len(others) + 1
