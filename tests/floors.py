"""The floors of the house, read from the imports: `violations` lists what leans on a floor that is not below it."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

FLOORS = {
    **dict.fromkeys(["errors", "version", "plurals", "json_values", "unusual_tensors", "names_of_other_toolkits"], 0),
    **dict.fromkeys(
        [
            "pytree",
            "forward_signature",
            "atomic_writes_and_folder_locks",
            "loaded_model_metadata_and_weight_digest",
            "log_explanation",
            "mask_labels",
            "map_interpolation",
            "optional_packages",
            "registry",
        ],
        0.5,
    ),  # what several rooms of level 1 need
    **dict.fromkeys(["read_untrusted_files", "geometry", "user_code_and_plugins"], 0.75),
    **dict.fromkeys(["hooks", "targets", "render"], 1),
    "figure_caption": 1.5,  # the text below a figure for print
    "explanation_io": 1.5,  # the fields of an explanation in a file
    **dict.fromkeys(["layers", "explanation", "images", "phantom"], 2),
    "models": 2.5,
    "explainers": 3,
    "medical": 3.5,  # scans to explainers, and explanations to viewers
    "metrics": 4,
    "batch": 5,
    "evaluation": 5.5,  # metrics of the maps of a run
    **dict.fromkeys(["audit", "viewer", "integrations", "compat"], 6),
    "cli": 7,
    "__main__": 8,
}
NAMED_FOR_NOTHING = {"utils", "util", "helpers", "common", "misc"}
NAMED_BY_ANOTHER_LIBRARY = "camscope.compat."  # its modules have the names of that library's


def violations(root: Path) -> list[str]:
    """What is wrong with a package's imports and file names; an empty list for a sound house."""
    modules = {_name(path, root): path for path in sorted(root.rglob("*.py"))}
    graph = {name: sorted(set(_imports(path, name, modules, root))) for name, path in modules.items()}
    lazy = graph.pop(root.name, None)
    wrong = [
        f"{name}: a file named for nothing"
        for name in modules
        if name.rpartition(".")[2] in NAMED_FOR_NOTHING and not name.startswith(NAMED_BY_ANOTHER_LIBRARY)
    ]
    for name, targets in graph.items():
        wrong += [problem for target in targets if (problem := _leaning(name, target, modules))]
        if _part(name) not in FLOORS:
            wrong.append(f"{name}: stands on no floor; give {_part(name)!r} one")
    assert lazy is not None, f"{root} is no package"
    return wrong + [f"circle: {' -> '.join(circle)}" for circle in _circles(graph)]


def _name(path: Path, root: Path) -> str:
    parts = path.relative_to(root.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _part(module: str) -> str:
    return module.split(".")[1]


def _leaning(name: str, target: str, modules: dict[str, Path]) -> str | None:
    if target == "" or target not in modules:
        return f"{name}: imports {target or 'names'} that the package does not hold"
    if "." not in target:
        return f"{name}: imports {target} itself; import from the room where the name lives"
    own, other = _part(name), _part(target)
    if own == other or FLOORS.get(other, -1) < FLOORS.get(own, 99):
        return None
    return f"{name} (floor {FLOORS.get(own)}) imports {target} (floor {FLOORS.get(other)})"


@functools.cache
def iter_nodes(path: Path) -> tuple[ast.AST, ...]:
    """The syntax tree of a file, node by node: several tests read the same files."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def _imports(path: Path, name: str, modules: dict[str, Path], root: Path) -> Iterator[str]:
    """Modules of the package that a file imports, at its top, in a function, by a relative name or by a string."""
    package = root.name
    for node in iter_nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == package)
        elif isinstance(node, ast.ImportFrom):
            home = _home(node, name, path)
            if home.split(".")[0] == package:
                inner = [f"{home}.{alias.name}" for alias in node.names]
                yield from {module if module in modules else home for module in inner}
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            text = node.args[0].value
            if called in ("import_module", "__import__") and isinstance(text, str) and text.split(".")[0] == package:
                yield text


def _home(node: ast.ImportFrom, name: str, path: Path) -> str:
    """The absolute name of the module in `from … import`."""
    if not node.level:
        return node.module or ""
    parents = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    above = parents[: len(parents) - node.level + 1]
    return ".".join([*above, *([node.module] if node.module else [])])


def _circles(graph: dict[str, list[str]]) -> list[list[str]]:
    """Every circle that a walk along the imports closes."""
    found: list[list[str]] = []
    done: set[str] = set()

    def walk(name: str, way: list[str]) -> None:
        if name in way:
            found.append([*way[way.index(name) :], name])
        elif name not in done:
            for target in graph.get(name, []):
                walk(target, [*way, name])
            done.add(name)

    for name in graph:
        walk(name, [])
    return found
