"""The frame of the house: floors, what `import camscope` costs and offers, and the code in the documents."""

import ast
import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

import camscope
from tests.floors import FLOORS, iter_nodes, violations

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "camscope"
HEAVY = [
    "cv2",
    "pyarrow",
    "duckdb",
    "jinja2",
    "fsspec",
    "torchvision",
    "PIL",
    "matplotlib",
    "rich",
    "typer",
    "timm",
    "transformers",
    "pydicom",
    "nibabel",
    "SimpleITK",
    "ultralytics",
    "monai",
    "openslide",
    "dynamic_network_architectures",
]
IMAGES = (".png", ".jpg", ".jpeg")


# --- tensors


FLOATS = {"empty", "eye", "linspace", "ones", "rand", "randn", "zeros"}
FACTORIES = FLOATS | {"Generator", "arange", "as_tensor", "full", "randint", "randperm", "tensor"}


def without_device_or_type(text):
    """Of a text or of nodes: the calls that make a tensor of the user's default device or type, which may be any."""
    for node in text if isinstance(text, tuple) else ast.walk(ast.parse(text)):
        function = node.func if isinstance(node, ast.Call) else None
        if (
            isinstance(function, ast.Attribute)
            and isinstance(function.value, ast.Name)
            and function.value.id == "torch"
        ):
            kind, given, name = function.attr, {keyword.arg for keyword in node.keywords}, f"torch.{function.attr}"
            missing = {"device"} - given if kind in FACTORIES else set()
            missing |= {"dtype"} - given if kind in FLOATS else set()
            yield from (f"line {node.lineno}: {name} without {word}" for word in sorted(missing))


@pytest.mark.slow
def test_every_tensor_is_made_on_a_device_that_is_named():
    found = {str(path): [*without_device_or_type(iter_nodes(path))] for path in PACKAGE.rglob("*.py")}
    assert not {path: lines for path, lines in found.items() if lines}
    planted = "torch.zeros(3)\ntorch.arange(2)\ntorch.tensor(1, device=x.device)\nx.new_zeros(2)"
    assert [*without_device_or_type(planted)] == [
        "line 1: torch.zeros without device",
        "line 1: torch.zeros without dtype",
        "line 2: torch.arange without device",
    ]


# --- floors


def test_every_module_imports_only_from_floors_below_it():
    assert violations(PACKAGE) == []


def test_contributing_draws_the_same_floors():
    drawn = re.findall(
        r"^([0-9½¾]+) (\w+(?: · \w+)*)$", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    told = {
        room: int(floor.rstrip("½¾") or 0) + {"½": 0.5, "¾": 0.75}.get(floor[-1], 0.0)
        for floor, rooms in drawn
        for room in rooms.split(" · ")
    }
    assert told == {room: floor for room, floor in FLOORS.items() if room != "__main__"}


SOUND = {
    "__init__.py": "from importlib import import_module\nfrom camscope.explainers import CAM",
    "errors.py": "class CamscopeError(Exception): ...",
    "hooks/__init__.py": "from camscope.hooks.tap import Tap",
    "hooks/base.py": "import torch\nfrom camscope.errors import CamscopeError",
    "hooks/tap.py": "from camscope.hooks.base import Hooks\nfrom .base import find_layer",
    "render/__init__.py": "",
    "explanation.py": "from camscope import render\ndef show():\n    from camscope.hooks import Tap",
    "explainers/__init__.py": "from camscope import explanation\nimport camscope.hooks.tap",
}


def house(folder: Path, **changes: str) -> Path:
    for name, text in {**SOUND, **changes}.items():
        path = folder / "camscope" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "camscope"


def test_a_sound_house_has_no_violation(tmp_path):
    assert violations(house(tmp_path)) == []


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("hooks/base.py", "from camscope.explainers import CAM", r"hooks\.base \(floor 1\).*explainers \(floor 3\)"),
        ("hooks/base.py", "def late():\n    import camscope.explainers", r"hooks\.base \(floor 1\).*\(floor 3\)"),
        ("hooks/base.py", "from ..explainers import CAM", r"hooks\.base \(floor 1\).*\(floor 3\)"),
        ("hooks/__init__.py", "from ..explanation import show", r"hooks \(floor 1\).*\(floor 2\)"),
        ("hooks/base.py", "import_module('camscope.explainers')", r"hooks\.base \(floor 1\).*\(floor 3\)"),
        ("hooks/base.py", "from camscope import render", r"hooks\.base \(floor 1\).*render \(floor 1\)"),
        ("hooks/base.py", "from camscope.hooks.tap import Tap", r"circle: .*hooks\.base.*hooks\.tap"),
        ("hooks/base.py", "from camscope.hooks import Tap", r"circle: .*hooks -> .*hooks\.tap"),
        ("explanation.py", "from camscope import Tap", "imports camscope itself"),
        ("explanation.py", "from camscope.cellar import wine", "that the package does not hold"),
        ("attic.py", "", "attic: stands on no floor"),
        ("render/utils.py", "", "named for nothing"),
    ],
)
def test_a_planted_violation_is_found(tmp_path, file, text, expected):
    found = violations(house(tmp_path, **{file: text}))
    assert any(re.search(expected, problem) for problem in found), found


# --- what a user imports


def test_every_public_name_is_there_once_and_where_it_says():
    assert len(set(camscope.__all__)) == len(camscope.__all__)
    assert set(camscope._HOMES) == set(camscope.__all__) - {"__version__"}
    for name, home in camscope._HOMES.items():
        assert getattr(camscope, name) is getattr(import_module(home), name), name
    assert set(camscope.__all__) <= set(dir(camscope))
    with pytest.raises(AttributeError, match="no attribute 'GradCam'"):
        camscope.GradCam  # noqa: B018 - looking is the act


def test_public_names_are_sorted_constants_classes_functions():
    def rank(name: str) -> tuple[int, str]:
        return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)

    assert camscope.__all__ == sorted(camscope.__all__, key=rank)


def test_targets_are_in_their_own_package():
    from camscope import targets

    assert not set(camscope.__all__) & set(targets.__all__)
    assert targets.__all__ == sorted(targets.__all__)
    assert all(hasattr(targets, name) for name in targets.__all__)
    assert targets.Box(0, 0, 4, 4).corners == (0, 0, 4, 4)


def test_type_checkers_see_the_same_names():
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    told = {
        name: node.module
        for node in block.body
        for alias in node.names
        for name in (import_module(node.module).__all__ if alias.name == "*" else [alias.asname])
    }
    assert told == camscope._HOMES


def fresh_python(code: str) -> str:
    """What a new interpreter prints; a failure shows its own words."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


@pytest.fixture(scope="module")
def import_facts():
    """What a new interpreter says of `import camscope`, then of all public names, then of all modules but the command line."""
    paths = [path.relative_to(PACKAGE.parent).with_suffix("") for path in PACKAGE.rglob("*.py")]
    names = [
        ".".join(path.parts).removesuffix(".__init__") for path in paths if path.parts[1] not in ("cli", "__main__")
    ]
    assert len(names) > 20
    code = f"""
import importlib, json, sys, time, torch
facts, start = {{}}, time.process_time()
import camscope
facts["seconds"] = time.process_time() - start
camscope.GradCAM
facts["dynamo"] = "torch._dynamo" in sys.modules
for name in camscope.__all__:
    getattr(camscope, name)
facts["names"] = [heavy for heavy in {HEAVY} if heavy in sys.modules]
facts["modules"] = []
for name in {sorted(names)}:
    importlib.import_module(name)
    facts["modules"] += [name + " imports " + heavy for heavy in {HEAVY} if heavy in sys.modules]
print(json.dumps(facts))
"""
    return json.loads(fresh_python(code))


def test_import_camscope_adds_a_tenth_of_a_second_at_most_and_nothing_heavy(import_facts):
    assert import_facts["seconds"] <= 0.1
    assert not import_facts["dynamo"]
    assert import_facts["names"] == []


def test_no_module_imports_a_heavy_library_at_its_top(import_facts):
    assert import_facts["modules"] == []


ON_ARRAYS = {
    "cam/deep_feature_factorization.py",
    "comparison/compare.py",
    "comparison/equal_maps.py",
    "core/base_method.py",
    "core/baselines.py",
    "core/base_explainer.py",
    "core/input_segments.py",
    "core/model_input.py",
    "ensemble/map_fusion.py",
    "features/attention_maps.py",
    "features/patch_features.py",
    "features/patch_pca.py",
    "path/xrai.py",
}  # what makes or reads finished explanations, or what another package makes of a picture


@pytest.mark.parametrize(
    "path",
    sorted(path.relative_to(PACKAGE / "explainers").as_posix() for path in (PACKAGE / "explainers").rglob("*.py")),
)
def test_methods_stay_on_the_device(path):
    imported = {
        name.name.partition(".")[0]
        for node in ast.walk(ast.parse((PACKAGE / "explainers" / path).read_text(encoding="utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([ast.alias(node.module or "")] if isinstance(node, ast.ImportFrom) else node.names)
    }
    assert path in ON_ARRAYS or not imported & {"numpy", "cv2", "scipy", "sklearn"}


def test_the_version_is_said_in_one_place():
    told = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'path = "src/camscope/version.py"' in told
    assert f"## [{camscope.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


# --- the code in the documents


def blocks(document: str) -> list[str]:
    """The ```python blocks of a document, at the lines where they stand, so that an error names its line."""
    text = (ROOT / document).read_text(encoding="utf-8")
    found = re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return ["\n" * text[: block.start(1)].count("\n") + block[1] for block in found]


def pictures_read(code: str) -> set[str]:
    """Names of images that the code reads: those that it does not save."""
    tree = ast.parse(code)
    saves = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "attr", "") == "save"]
    saved = {id(argument) for call in saves for argument in call.args}
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return {node.value for node in texts if id(node) not in saved and node.value.lower().endswith(IMAGES)}


def run_document(document: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """The names that a document's code defines, run from top to bottom where its images are phantoms."""
    from PIL import Image

    from camscope.phantom import draw_radiograph

    monkeypatch.chdir(folder)
    torch.manual_seed(0)
    names: dict[str, object] = {"__name__": "__main__"}
    codes = blocks(document)
    assert codes, f"{document} shows no code"
    for picture in set().union(*map(pictures_read, codes)):
        Image.fromarray(draw_radiograph(seed=1, finding=1).image).convert("RGB").save(folder / picture)
    for code in codes:
        exec(compile(code, str(ROOT / document), "exec"), names)
    return names


def test_what_the_code_reads_is_told_from_what_it_writes():
    code = "cam.explain('cat.jpg').save('why.png')\nshow(open('b.PNG'), 'x.npz')"
    assert pictures_read(code) == {"cat.jpg", "b.PNG"}


@pytest.mark.slow
def test_the_code_about_volumes_runs_and_finds_what_it_drew(tmp_path, monkeypatch):
    names = run_document("docs/how-to/volumes.md", tmp_path, monkeypatch)
    found = names["found"].volume(mask={"lesion": names["lesion"]})
    assert names["lesion"][found.peak]
    assert (tmp_path / "why.gif").stat().st_size < 1e6
    assert names["picture"].ndim == 3


def test_the_readme_shows_code_by_line_thirty():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert "```python" in lines[:30]


def test_the_method_in_contributing_is_a_method_and_runs(tmp_path, monkeypatch):
    from camscope.explainers import METHODS, Explainer, GradCAM

    before = dict(METHODS)
    try:
        names = run_document("CONTRIBUTING.md", tmp_path, monkeypatch)
        (added,) = METHODS.keys() - before.keys()
        assert issubclass(METHODS[added], Explainer)
    finally:
        METHODS.clear()
        METHODS.update(before)
    # its weight is the largest gradient of a channel; where every gradient of a channel is the same, that is Grad-CAM's
    activation, gradient = torch.rand(2, 3, 4), torch.randn(2, 3, 1).expand(2, 3, 4)
    own = names[type(names["cam"]).__name__].weights(names["cam"], activation, gradient)
    assert torch.allclose(own, GradCAM.weights(names["cam"], activation, gradient))
    assert names["explanation"].method == added


def test_contributings_method_takes_ten_lines():
    first = next(code for code in blocks("CONTRIBUTING.md") if "@register" in code).strip()
    method = first[first.index("@register") :].split("\n\n\n")[0]
    assert len(method.splitlines()) <= 10
