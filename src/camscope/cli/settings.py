"""A method's own options, `--set name=value`, read off its constructor's signature."""

import inspect
from collections.abc import Iterable, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

ELSEWHERE = ("self", "model", "layer", "preprocess", "categories")  # what other options say, or no option can
WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
HINT = "'--set'"


def settable(method: type) -> dict[str, tuple[Any, ...]]:
    """Name -> the kinds of value that the constructor takes and a word can say."""
    hints = get_type_hints(method.__init__)  # type: ignore[misc]  # the signature is read, nothing is called
    names = [name for name in inspect.signature(method).parameters if name not in ELSEWHERE]
    kinds = {name: tuple(_kinds(hints.get(name))) for name in names}
    return {name: known for name, known in kinds.items() if set(known) - {NoneType}}


def settings(pairs: Sequence[str], methods: dict[str, type]) -> dict[str, dict[str, Any]]:
    """Each method's keywords from `name=value` pairs; a name goes to the methods that know it."""
    known = {name: settable(method) for name, method in methods.items()}
    chosen: dict[str, dict[str, Any]] = {name: {} for name in methods}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        takers = [name for name, kinds in known.items() if key in kinds]
        if not equals or not takers:
            listing = ", ".join(dict.fromkeys(key for kinds in known.values() for key in kinds)) or "none"
            what = f"no setting {key!r} of {', '.join(methods)}" if equals else f"{pair!r} is not name=value"
            raise typer.BadParameter(f"{what}; known: {listing}", param_hint=HINT)
        for name in takers:
            chosen[name][key] = _read(key, value, known[name][key])
    return chosen


def _kinds(annotation: Any) -> Iterable[Any]:
    """int, float, bool, str, NoneType, and the words of a Literal inside an annotation."""
    if get_origin(annotation) in (Union, UnionType):
        for part in get_args(annotation):
            yield from _kinds(part)
    elif get_origin(annotation) is Literal:
        yield from get_args(annotation)
    elif annotation in (int, float, bool, str, NoneType):
        yield annotation


def _read(key: str, value: str, kinds: tuple[Any, ...]) -> Any:
    """The value as the first kind that it can be, the narrowest first."""
    if NoneType in kinds and value.lower() == "none":
        return None
    if bool in kinds and value.lower() in WORDS:
        return WORDS[value.lower()]
    if value in [kind for kind in kinds if isinstance(kind, str)]:
        return value
    for kind in (int, float, str):
        if kind in kinds:
            try:
                return kind(value)
            except ValueError:
                continue
    expected = " or ".join("none" if k is NoneType else getattr(k, "__name__", repr(k)) for k in kinds)
    raise typer.BadParameter(f"{key}={value!r}: expected {expected}", param_hint=HINT)
