"""A method's own options, `--set name=value`, read off its constructor's signature."""

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

ELSEWHERE = ("self", "model", "layer", "preprocess", "categories")  # what other options say, or no option can
OPTIONS = ("model", "layer", "preprocess")
WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
HINT = "'--set'"


class Unsaid:
    """What no word can say: a tensor, a callable."""


@dataclass(frozen=True)
class Several:
    """A list whose parts are of these kinds, said with commas."""

    kinds: tuple[Any, ...]


def settable(method: type) -> dict[str, tuple[Any, ...]]:
    """Name -> the kinds of value that the constructor takes and a word can say."""
    hints = get_type_hints(method.__init__)  # type: ignore[misc]  # the signature is read, nothing is called
    names = [name for name in inspect.signature(method).parameters if name not in ELSEWHERE]
    kinds = {name: tuple(_kinds(hints.get(name))) for name in names}
    return {name: known for name, known in kinds.items() if set(known) - {NoneType, Unsaid}}


def settings(pairs: Sequence[str], methods: dict[str, type]) -> dict[str, dict[str, Any]]:
    """Each method's keywords from `name=value` pairs; a name goes to the methods that know it."""
    known = {name: settable(method) for name, method in methods.items()}
    chosen: dict[str, dict[str, Any]] = {name: {} for name in methods}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        takers = [name for name, kinds in known.items() if key in kinds]
        if not equals or not takers:
            raise typer.BadParameter(_why_not(pair, methods, known), param_hint=HINT)
        for name in takers:
            chosen[name][key] = _read(key, value, known[name][key])
    return chosen


def _why_not(pair: str, methods: dict[str, type], known: dict[str, dict[str, tuple[Any, ...]]]) -> str:
    """What is wrong with a pair that no method takes."""
    key, equals, _ = pair.partition("=")
    if equals and key not in ("self", *OPTIONS):
        unsaid = [name for name, method in methods.items() if key in inspect.signature(method).parameters]
        if unsaid:
            return f"{key!r} of {', '.join(unsaid)} is nothing that a word can say: set it in Python"
    if equals and key in OPTIONS:
        return f"{key!r} is an option of its own: --{key}"
    listing = ", ".join(dict.fromkeys(name for kinds in known.values() for name in kinds)) or "none"
    what = f"no setting {key!r} of {', '.join(methods)}" if equals else f"{pair!r} is not name=value"
    return f"{what}; known: {listing}"


def _kinds(annotation: Any) -> Iterable[Any]:
    """int, float, bool, str, NoneType, the words of a Literal, Several of them, and Unsaid, inside an annotation."""
    if get_origin(annotation) in (Union, UnionType):
        for part in get_args(annotation):
            yield from _kinds(part)
    elif get_origin(annotation) is Literal:
        yield from get_args(annotation)
    elif get_origin(annotation) in (Sequence, list, tuple):
        yield Several(tuple(kind for part in get_args(annotation) for kind in _kinds(part)))
    elif annotation in (int, float, bool, str, NoneType):
        yield annotation
    else:
        yield Unsaid


def _read(key: str, value: str, kinds: tuple[Any, ...]) -> Any:
    """The value as the first kind that it can be, the narrowest first; with a comma a list, where one is taken."""
    if NoneType in kinds and value.lower() == "none":
        return None
    if bool in kinds and value.lower() in WORDS:
        return WORDS[value.lower()]
    if value in [kind for kind in kinds if isinstance(kind, str)]:
        return value
    listed = next((kind for kind in kinds if isinstance(kind, Several)), None)
    if listed and ("," in value or not {int, float, str} & set(kinds)):
        return [_read(key, part.strip(), listed.kinds) for part in value.split(",")]
    for kind in (int, float, str):
        if kind in kinds and value:
            try:
                return kind(value)
            except ValueError:
                continue
    expected = " or ".join(dict.fromkeys(map(_in_words, sorted(kinds, key=lambda kind: kind is Unsaid))))
    raise typer.BadParameter(f"{key}={value!r}: expected {expected}", param_hint=HINT)


def _in_words(kind: Any) -> str:
    if isinstance(kind, Several):
        return f"several {' or '.join(dict.fromkeys(map(_in_words, kind.kinds)))} with commas between"
    if kind is Unsaid:
        return "what only Python can say"
    return "none" if kind is NoneType else getattr(kind, "__name__", repr(kind))
