"""Names of methods and metrics: one rule of lookup, no two entries with one spelling."""

from dataclasses import dataclass

import pytest

from camscope.errors import InputError, MissingExtraError
from camscope.explainers import METHODS, GradCAM
from camscope.registry import Registry, normalize_name


@dataclass(frozen=True)
class Entry:
    name: str
    title: str


@pytest.fixture
def registry():
    made = Registry("method")
    for name, title in (("gradcam", "Grad-CAM"), ("gradcam++", "Grad-CAM++"), ("ig", "Integrated Gradients")):
        made.add(Entry(name, title))
    return made


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("gradcam", "gradcam"),
        ("Grad-CAM", "gradcam"),
        ("grad_cam", "gradcam"),
        ("GRAD CAM", "gradcam"),
        ("Grad-CAM++", "gradcam++"),
        ("gradcamplusplus", "gradcam++"),
        ("grad-cam-plus-plus", "gradcam++"),
        ("integrated gradients", "ig"),
    ],
)
def test_every_spelling_of_a_name_or_title_is_found(registry, text, name):
    assert registry[text].name == registry.find(text).name == name
    assert text in registry


def test_an_unknown_name_is_an_error_with_the_nearest_names(registry):
    with pytest.raises(InputError, match=r"no method 'gradcan'; nearest names: gradcam, gradcam\+\+, ig"):
        registry.find("gradcan")
    with pytest.raises(KeyError):
        registry["gradcan"]
    assert "gradcan" not in registry
    assert registry.get("gradcan") is None


@pytest.mark.parametrize(
    ("name", "title", "other"),
    [("grad-cam", "Another", "gradcam"), ("new", "Grad_CAM", "gradcam"), ("gradcamplusplus", "New", "gradcam++")],
)
def test_a_second_entry_with_a_spelling_of_the_first_is_refused(registry, name, title, other):
    with pytest.raises(ValueError, match=f"already refers to '{other}'".replace("+", r"\+")):
        registry.add(Entry(name, title))
    assert list(registry) == ["gradcam", "gradcam++", "ig"]


def test_an_entry_without_its_package_names_the_extra(registry):
    registry.add_unavailable("lrp", "LRP", "zennit", "lrp")
    with pytest.raises(MissingExtraError, match=r"camscope\[lrp\]"):
        registry.find("LRP")
    assert "lrp" not in registry
    assert registry.unavailable == ("lrp",)


def test_the_display_name_of_a_composed_method_replaces_each_part(registry):
    assert registry.replace_names_by_titles("gradcam") == "Grad-CAM"
    assert (
        registry.replace_names_by_titles("gradcam++ + ig, fused, denoised")
        == "Grad-CAM++ + Integrated Gradients, fused, denoised"
    )
    assert registry.replace_names_by_titles("unknown") == "unknown"
    assert (
        registry.replace_names_by_titles("gradcam n_samples=2, denoised · gradcam")
        == "Grad-CAM n_samples=2, denoised · gradcam"
    )


def test_an_entry_can_be_added_again_and_removed(registry):
    entry = registry["ig"]
    registry.add(entry)
    assert registry.pop("Integrated Gradients") is entry
    registry.update({"ig": entry})
    assert list(registry) == ["gradcam", "gradcam++", "ig"]
    with pytest.raises(ValueError, match="use the same name"):
        registry["other"] = entry


def test_no_two_methods_share_a_spelling_of_a_name_or_title():
    spellings = [{normalize_name(method.name), normalize_name(method.title)} for method in METHODS.values()]
    assert len(set().union(*spellings)) == sum(map(len, spellings))


def test_every_method_of_the_package_has_a_title_of_its_own():
    assert all("title" in vars(method) for method in METHODS.values())
    assert METHODS["gradcam"].title == "Grad-CAM"
    assert METHODS["Integrated Gradients"].name == "integratedgradients"


def test_a_method_without_the_decorator_is_listed_under_its_class_name():
    class Mine(GradCAM):
        name, paper = "mine", "none"

    try:
        METHODS["mine"] = Mine
        assert METHODS.replace_names_by_titles("mine") == Mine.title == "Mine"
        assert METHODS["MINE"] is Mine
    finally:
        METHODS.pop("mine", None)
    with pytest.raises(ValueError, match="its `name` is 'gradcam'; use the same name"):
        METHODS["other"] = GradCAM
