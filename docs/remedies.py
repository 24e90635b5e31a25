"""Remedies of errors, flags and messages, for the page of errors. Most are read from the code; the others are listed here."""

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

PACKAGE = Path(next(iter(find_spec("camscope").submodule_search_locations)))  # type: ignore[union-attr, arg-type] # a package
AUDIT_START = {  # modules whose errors users meet before the first stage of an audit, and when
    "config_generation.py": "`camscope audit init`",
    "core/config.py": "The config file",
    "core/config_faults.py": "Any setting of the config",
    "core/cohort.py": "Manifest and labels",
    "core/audit_context.py": "Model, findings and methods",
    "config_validation.py": "Images, masks and regions",
    "run_audit_from_config.py": "The start of `camscope audit run`",
    "run_stages.py": "The start of `camscope audit run`",
}
TEXT_FUNCTIONS = ("_describe_problem", "describe_outside_paths")  # they return the text of a fault
ERROR_REMEDIES = {
    "CamscopeError": "Read the message: its last part is the fix, and `error.fix` holds it.",
    "ModelError": "Pass the plain `torch.nn.Module`, or choose a method that needs no gradients, such as `rise`.",
    "LayerError": "Leave the layer out, or choose one of `camscope layers MODEL`.",
    "TargetError": "Pass a class index, a class name that the model has, or a target such as `Box` or `Region`.",
    "InputError": "Compare the shape and the type in the message with what was expected.",
    "ConfigError": "Correct every line that the message lists. [Messages of an audit](#messages-of-an-audit) has their remedies.",
    "FormError": "Correct every line that the message lists. [Reader studies](../how-to/reader-study.md) describes the form.",
    "ImageError": "Copy or export the file again. `camscope inspect-images FOLDER` lists all files that cannot be read.",
    "CategoryError": 'Name one category, or select all with `category = "all"`.',
    "PreprocessError": 'Pass `preprocess=`: the transforms of the training, `"imagenet"`, or a `camscope.Preprocess`.',
    "GeometryError": 'Use `size="input"`, or a preprocessing without random steps.',
    "NonFiniteError": "Check the weights and the normalization, and use `precision=None` in place of bfloat16.",
    "WeightsError": "Save the `state_dict()` of the model as safetensors, or check that the file is complete.",
    "OutputError": "Choose another file or folder, a known suffix, or `overwrite=True`.",
    "UndefinedError": "Treat the value as missing. The message says which property of the map or the annotation is the reason.",
    "RunError": "Repeat the command. Finished parts are kept.",
    "MissingExtraError": "Run the `pip install` command of the message.",
    "CamscopeWarning": "Read the message before you use the result. The table of flags below has the remedies.",
}
STATUS_REMEDIES = {
    "no_positive_evidence": "Explain the predicted class, or an earlier layer. For a class with a low score it is valid.",
    "zero_gradient": "Leave the layer out. For a vision transformer do not name the last block.",
    "constant_score": "Load trained weights, and check the preprocessing.",
    "flat": "Explain another layer or another target.",
    "nonfinite": "Check the weights and the normalization, and run the model in float32.",
    "no_spatial_resolution": "Choose an earlier layer, or a larger input.",
    "layout_unverified": "Compare with a method on pixels, such as `occlusion`, or pass `layout=` if you know the layout.",
}
AUDIT_REMEDIES = {  # by the first words of messages that name it in another place, or not at all
    "the config has no settings": "Pass a file of `camscope audit init`.",
    "the manifest … cannot be read": "Correct what the second part of the message names.",
    "no label matches the finding": "Choose one of the labels that the message lists.",
    "the column … does not have the name of a class": "Rename the column to the class.",
    "no row of the split": "Compare `split_value` with the values of the column `split`.",
    "labels has no column for the finding": "Add the finding and its column to `labels`.",
    "column … holds a value that is neither": "Write 0, 1 or nothing in each cell.",
    "the column … has labels that are no class": "Name in `label` the column that holds the classes, or correct these cells.",
    "the manifest has no column": "Choose one of the columns that the message lists.",
    "class … is out of range": "Choose a class index below the number of outputs.",
    "no map could be computed": "Correct what the second part names: it is the error of the method.",
    "model.device = ": 'Write `device = "cpu"`, or a device of this machine.',
    "the settings of … in explain.settings": "Correct the parameter that the second part names.",
    "… has no annotation of any image": "Check that the file or column belongs to these images.",
    "… of … of … can be read": "Correct the first annotation that fails, then start again.",
    "… has …; expected at most": "Name columns with fewer values, or combine values.",
    "… is a file; ": "Name a folder.",
    "settings.…: … is not in methods": "Add the method to `methods`, or remove its settings.",
    "name either file": "Keep one of the two.",
    "label: set either": "Keep one of the two.",
    "…: set both split": "Set both, or neither.",
    "it is missing, and has no default": "Write the setting.",
    "there is no such setting": "Choose one of the names that the message lists.",
    "…: …": "Correct the value: the second part says what was expected.",
}


def list_audit_messages() -> list[tuple[str, str, str]]:
    """Return when, the message and the remedy of each error before the first stage of an audit.

    In a message, … stands for a value. The remedy is the `fix` of the error, the part of the message that names it, or an
    entry of `AUDIT_REMEDIES`. It is empty if there is none.
    """
    rows = {}
    for name, when in AUDIT_START.items():
        tree = ast.parse((PACKAGE / "audit" / name).read_text(encoding="utf-8"))
        constants = _list_constants(tree)
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            assigned = _list_assignments(function)
            for argument, fix in _iter_messages(function, constants):
                for text in _list_texts(argument, assigned):
                    message, remedy = _split_message(text, fix)
                    rows[message] = (when, message, remedy)
    return list(rows.values())


def list_remedies_for_programs() -> list[tuple[str, list[str], list[str]]]:
    """Return each `Remedy` with the errors that have it and the fixes that they name, as the code has them."""
    found: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        constants = _list_constants(tree)
        for call in ast.walk(tree):
            keywords = {kw.arg: kw.value for kw in call.keywords} if isinstance(call, ast.Call) else {}
            remedy = keywords.get("remedy")
            if not (
                isinstance(call, ast.Call)
                and isinstance(remedy, ast.Attribute)
                and ast.unparse(remedy.value) == "Remedy"
            ):
                continue
            errors, fixes = found.setdefault(remedy.attr, ({}, {}))
            if error := _get_error_name(call):
                errors[error] = None
            if fix := _read_fix(call, constants):
                fixes[fix] = None
    return [(name, list(errors), list(fixes)) for name, (errors, fixes) in sorted(found.items())]


def _iter_messages(function: ast.FunctionDef, constants: dict[str, str]) -> Iterator[tuple[ast.expr, str]]:
    """Yield the message and the fix of each error and each fault of a function."""
    inside = {id(arg) for node in ast.walk(function) if _is_fault(node) for arg in node.args}  # type: ignore[attr-defined] # a call
    for node in ast.walk(function):
        if _is_fault(node):
            yield node.args[1], ""  # type: ignore[attr-defined] # a call
        elif isinstance(node, ast.Call) and node.args and _get_error_name(node) and id(node) not in inside:
            yield node.args[0], _read_fix(node, constants)
        elif isinstance(node, ast.Yield) and isinstance(node.value, ast.Tuple) and len(node.value.elts) == 2:
            yield node.value.elts[1], ""  # a key of the config and its fault
        elif isinstance(node, ast.Return) and node.value is not None and function.name in TEXT_FUNCTIONS:
            yield node.value, ""


def _is_fault(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "faults.add"


def _read_fix(call: ast.Call, constants: dict[str, str]) -> str:
    """Return the text of the argument `fix` of an error, or ""."""
    fix = next((keyword.value for keyword in call.keywords if keyword.arg == "fix"), None)
    return constants.get(fix.id, "") if isinstance(fix, ast.Name) else _render(fix) if fix is not None else ""


def _get_error_name(call: ast.Call) -> str:
    """Return the name of an error that a call constructs, or ""."""
    name = ast.unparse(call.func) if isinstance(call.func, ast.Name) else ""
    return name if name.endswith("Error") and name not in ("ConfigError", "NotImplementedError") else ""


def _list_constants(tree: ast.Module) -> dict[str, str]:
    """Return the texts that a module assigns to names."""
    return {
        target.id: _render(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _list_assignments(function: ast.FunctionDef) -> dict[str, ast.expr]:
    """Return the text that a function assigns to each name."""
    nodes = (node for node in ast.walk(function) if isinstance(node, ast.Assign) and _is_text(node.value))
    return {node.targets[0].id: node.value for node in nodes if isinstance(node.targets[0], ast.Name)}


def _list_texts(argument: ast.expr, assigned: dict[str, ast.expr]) -> list[str]:
    """Return the text of the argument of an error, or nothing if another function writes it."""
    argument = assigned.get(argument.id, argument) if isinstance(argument, ast.Name) else argument
    return [_render(argument, assigned)] if _is_text(argument) else []


def _is_text(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        return _is_text(node.left) or _is_text(node.right)
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _render(node: ast.expr, assigned: dict[str, ast.expr] | None = None) -> str:
    """Return a text of the code, with … in place of values."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.Name):
        text = (assigned or {}).get(node.value.id)
        return "…" if text is None else _render(text)
    if isinstance(node, ast.JoinedStr):
        return "".join(_render(part, assigned) for part in node.values)
    return _render(node.left, assigned) + _render(node.right, assigned) if isinstance(node, ast.BinOp) else "…"


def _split_message(text: str, fix: str) -> tuple[str, str]:
    """Return the problem and the remedy of a message."""
    if fix:
        return text, fix
    for start in AUDIT_REMEDIES:
        if text.startswith(start):
            return text.partition(". Accepted")[0], AUDIT_REMEDIES[start]
    for separator in (": set ", ": write ", ". Rename ", ". Check ", "; "):
        problem, verb, rest = text.rpartition(separator)
        if verb:
            return problem, (verb.strip(" :.;") + " " + rest).strip()
    return text, ""
