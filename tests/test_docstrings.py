"""Every public name has a docstring with its arguments, what it returns and raises, and an example."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import FunctionType

import pytest

from camscope import METHODS, Denoised, GradCAM, LayerExplainer
from camscope.errors import CamscopeError, InputError
from camscope.explainers.core.method_docstrings import read_description, read_setting_descriptions

ROOT = Path(__file__).parent.parent
ROOMS = ["camscope"] + [
    f"camscope.{room}"
    for room in "audit batch evaluation explainers hooks medical metrics models phantom render targets".split()  # noqa: SIM905
]
CLASSES_WITH_METHODS = {  # what a user calls; of the other classes, which a method or target implements, only the class
    "camscope.AttentionMaps",
    "camscope.Comparison",
    "camscope.Concepts",
    "camscope.Explainer",
    "camscope.Explanation",
    "camscope.Layout",
    "camscope.PatchFeatures",
    "camscope.PatchPCA",
    "camscope.Preprocess",
    "camscope.BatchRun",
    "camscope.audit.AuditRun",
    "camscope.audit.Config",
    "camscope.audit.Summary",
    "camscope.audit.Verdict",
    "camscope.batch.DatasetInspection",
    "camscope.evaluation.ComparisonResult",
    "camscope.evaluation.EvaluationResult",
    "camscope.hooks.LayerRow",
    "camscope.hooks.LayerTable",
    "camscope.metrics.RandomizationResult",
    "camscope.metrics.RandomizationVerdict",
    "camscope.medical.SliceExplanations",
}
EXEMPT: dict[str, str] = {}  # name: the reason
SEVERAL = re.compile(r"    \w+(?:, \w+)+: \S")  # errors of one reason
DOCUMENTED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
ENTRY = re.compile(r"    \*{0,2}(\w+)(?: \([^)]*\))?: \S")


def read_section(doc, *titles):
    """The entries of a section, such as {"x"} of `Args:`, or None without that section."""
    lines = doc.splitlines()
    for title in titles:
        if f"{title}:" in lines:
            start = lines.index(f"{title}:") + 1
            end = next((i for i in range(start, len(lines)) if lines[i] and not lines[i].startswith(" ")), len(lines))
            return {match[1] for line in lines[start:end] if (match := ENTRY.match(line))}
    return None


def raised_errors(function):
    """The kinds of CamscopeError that the body of a function raises itself."""
    body = ast.parse(textwrap.dedent(inspect.getsource(function)))
    names = {
        node.exc.func.id
        for node in ast.walk(body)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name)
    }
    kinds = [inspect.unwrap(function).__globals__.get(name) for name in names]
    return [kind for kind in kinds if inspect.isclass(kind) and issubclass(kind, CamscopeError)]


def has_kind(listed, kind):
    return any(base.__name__ in listed for base in kind.__mro__)


def list_parameters(subject):
    try:
        names = set(inspect.signature(subject).parameters)
    except ValueError:  # a class that is made in C, such as an exception
        return set()
    return {name for name in names if not name.startswith("_")} - (
        {"self", "cls"} if "." in subject.__qualname__ else set()
    )


def problems(name, subject):
    """What is missing in the docstring of a function or class."""
    doc = inspect.cleandoc(subject.__doc__ or "")
    if not doc or doc.startswith(f"{name.rpartition('.')[2]}("):  # a dataclass without one gets its signature
        return [f"{name}: no docstring"]
    if isinstance(subject, property):
        return []
    missing = []
    is_class = inspect.isclass(subject)
    is_error = is_class and issubclass(subject, Exception)
    parameters = list_parameters(subject)
    absent = parameters - set(read_section(doc, "Args") or ())
    if is_class:  # a result that a user receives and never makes lists its attributes
        absent -= set(read_section(doc, "Attributes") or ())
    if absent and not is_error:
        missing.append(f"Args of {', '.join(sorted(absent))}")
    if not is_error and (surplus := (read_section(doc, "Args") or set()) - parameters):
        missing.append(f"no such arguments: {', '.join(sorted(surplus))}")
    if is_class:
        made = [inspect.unwrap(vars(subject)[part]) for part in ("__init__", "__post_init__") if part in vars(subject)]
        functions = [function for function in made if function.__code__.co_filename != "<string>"]  # not dataclass's
    else:
        functions = [subject]
        returned = inspect.signature(subject).return_annotation
        if returned not in (None, "None", Iterator[None]) and read_section(doc, "Returns", "Yields") is None:
            missing.append("Returns")
    kinds = [kind for function in functions for kind in raised_errors(function)]
    listed = read_section(doc, "Raises") or set()
    missing += [f"Raises of {kind.__name__}" for kind in kinds if not has_kind(listed, kind)]
    if not re.search(r"^\s*>>> ", doc, re.MULTILINE) and not is_error:
        missing.append("an example")
    return [f"{name}: {', '.join(missing)}"] if missing else []


def public_methods(cls):
    for part, value in inspect.getmembers_static(cls):
        owner = next(base for base in cls.__mro__ if part in vars(base))
        if not part.startswith("_") and owner.__module__.startswith("camscope."):
            value = value.__func__ if isinstance(value, classmethod | staticmethod) else value
            if isinstance(value, FunctionType | property):
                yield part, value


def public_api():
    """(name, function or class) of everything that is documented, each once."""
    listed = set()
    for room in ROOMS:
        module = import_module(room)
        for name in module.__all__:
            subject = getattr(module, name)
            if not (inspect.isclass(subject) or isinstance(subject, FunctionType)) or id(subject) in listed:
                continue
            listed.add(id(subject))
            yield f"{room}.{name}", subject
            if f"{room}.{name}" in CLASSES_WITH_METHODS:
                yield from ((f"{room}.{name}.{part}", value) for part, value in public_methods(subject))


API = dict(public_api())


@pytest.mark.parametrize("room", ROOMS)
def test_public_names_have_complete_docstrings(room):
    lines = [line for name, subject in API.items() if name.startswith(f"{room}.") for line in problems(name, subject)]
    if room == "camscope":
        lines = [line for line in lines if re.match(r"camscope\.[A-Z]|camscope\.\w+:", line)]
    assert not [line for line in lines if line.partition(":")[0] not in EXEMPT]


def test_every_exemption_is_needed():
    assert all(problems(name, API[name]) for name in EXEMPT)


def test_the_reference_has_every_public_name():
    pages = "".join(page.read_text("utf-8") for page in (ROOT / "docs" / "reference" / "api").glob("*.md"))
    listed = {name.rpartition(".")[2] for name in re.findall(r"auto\w+:: ([\w.]+)", pages)}
    names = {name.rpartition(".")[2] for name in API if name.rpartition(".")[0] in ROOMS}
    assert names <= listed


# --- methods


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_method_says_what_it_shows_when_to_use_it_and_what_it_costs(name):
    doc = METHODS[name].__doc__
    assert re.search(r"\((?:[^()]*[ .])?(?:19|20)\d\d\w?\b|vit-explain \(2020\)|Gaussian", doc), "a paper with its year"
    assert re.search(r"\bUse\s+it\b", doc)
    cost = f"Cost: forward passes {METHODS[name].forward_passes}, backward passes {METHODS[name].backward_passes}."
    assert cost in doc
    assert f"Reference: {METHODS[name].paper}." in doc


@pytest.fixture
def own_method():
    class OwnMethod(GradCAM):
        """A map of my own.

        Args:
            strength: How strong
                it is.

        Raises:
            InputError: Never.

        >>> OwnMethod(model).strength
        2

        """

        name, title, paper = "own", "Own", "arXiv:1"
        strength: int = 2

    return OwnMethod


def test_a_method_class_gets_the_settings_of_its_base_classes_once(own_method):
    settings = read_setting_descriptions(own_method)
    assert [*settings][:2] == ["model", "strength"]
    assert settings["strength"].split() == ["How", "strong", "it", "is."]
    assert (
        settings["layer"]
        == read_setting_descriptions(GradCAM)["layer"]
        == read_setting_descriptions(LayerExplainer)["layer"]
    )
    doc = own_method.__doc__
    assert doc.count("Args:") == doc.count("Raises:") == doc.count("    layer: ") == doc.count("Cost: ") == 1
    assert doc.index("Cost: ") < doc.index("Args:") < doc.index("Raises:") < doc.index(">>> ")
    assert read_description(own_method) == "A map of my own."


def test_an_example_gets_what_it_lacks_if_the_method_is_ours(own_method):
    assert own_method.__doc__.count(">>> ") == 1  # of another package
    lines = [line[4:] for line in GradCAM.__doc__.splitlines() if line.startswith(">>> ")]
    assert lines[:2] == ["from camscope import GradCAM, load_model", "from camscope.phantom import draw_radiograph"]
    assert lines[2:4] == ['model = load_model("phantom")', 'image = draw_radiograph(0, "nodule").image']


def test_a_wrapper_has_only_its_own_settings():
    assert [*read_setting_descriptions(Denoised)] == ["explainer"]
    assert "Cost: forward" not in Denoised.__doc__


def test_a_method_without_a_docstring_stays_without():
    class Silent(GradCAM):
        pass

    assert Silent.__doc__ is None


# --- what the check itself finds


def complete(x, *rest, scale=1.0):
    """Scale.

    Args:
        x: (N,) numbers.
        *rest: More of them.
        scale: The factor.

    Returns:
        (N,) numbers.

    Raises:
        CamscopeError: x is negative.

    >>> complete(1)
    1.0

    """
    if x < 0:
        raise InputError("negative")
    return x * scale


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("scale: The", "factor: The", "Args of scale, no such arguments: factor"),
        ("*rest: More of them.", "", "Args of rest"),
        ("Returns:\n        (N,) numbers.", "", "Returns"),
        ("CamscopeError: x", "TargetError: x", "Raises of InputError"),
        (">>> complete(1)", "complete(1)", "an example"),
    ],
)
def test_the_check_sees_what_is_missing(old, new, expected, monkeypatch):
    assert problems("complete", complete) == []
    assert old in complete.__doc__
    monkeypatch.setattr(complete, "__doc__", complete.__doc__.replace(old, new))
    assert problems("complete", complete) == [f"complete: {expected}"]


def find_torn_entries(doc):
    """Lines of a section that begin like an entry and name nothing: the end of an entry that was indented too little."""
    is_section, torn = False, []
    for line in doc.splitlines():
        if line and not line.startswith(" "):
            is_section = line in ("Args:", "Attributes:", "Raises:")
        elif is_section and re.match(r"    \S", line) and not (ENTRY.match(line) or SEVERAL.match(line)):
            torn.append(line.strip())
    return torn


@pytest.mark.slow
def test_no_entry_of_a_docstring_is_torn():
    torn = {}
    for path in sorted((ROOT / "src" / "camscope").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, DOCUMENTED):
                torn[path.name, node.name] = find_torn_entries(ast.get_docstring(node) or "")
    assert {name: lines for name, lines in torn.items() if lines} == {}


def test_a_torn_entry_is_seen():
    assert find_torn_entries("Box.\n\nArgs:\n    x: Left\n        edge.\n    of it.\n\n    y: Top.\n") == ["of it."]
