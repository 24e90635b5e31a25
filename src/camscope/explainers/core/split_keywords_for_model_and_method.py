"""Sort the arguments of a call into inputs for the model's forward and settings of the method."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from camscope.errors import InputError
from camscope.explainers.core.model_input import ExtraInputs
from camscope.explainers.core.translate_keywords_of_other_toolkits import (
    CAPTUM_SETTING_NAMES,
    Method,
    apply_captum_settings,
    describe_unknown_keyword,
)
from camscope.forward_signature import list_forward_keywords
from camscope.hooks.find_layers import unwrap


def resolve_explainers_and_extra_inputs(
    explainers: Sequence[Method], args: tuple[Any, ...], additional_forward_args: Any, keywords: Mapping[str, Any]
) -> tuple[list[Method], ExtraInputs]:
    """Apply the settings of one call to copies of the explainers, and collect the extra inputs of the model."""
    if not keywords or not explainers:
        return list(explainers), build_extra_inputs(args, keywords, additional_forward_args)
    where = " and ".join(dict.fromkeys(type(explainer).__name__ for explainer in explainers))
    names = frozenset[str]().union(*(explainer.setting_names for explainer in explainers))
    for_model, for_method = split_keywords(explainers[0].model, keywords, names, where)
    extra = build_extra_inputs(args, for_model, additional_forward_args)
    return [apply_captum_settings(explainer, for_method) for explainer in explainers], extra


class SplitKeywords(NamedTuple):
    """The keywords of a call, split into inputs for the model's forward and settings for the method."""

    for_model: dict[str, Any]
    for_method: dict[str, Any]


def split_keywords(
    model: nn.Module, keywords: Mapping[str, Any], setting_names: Collection[str], owner_name: str
) -> SplitKeywords:
    """Split the keywords of a call into inputs of the model's forward and settings of the methods.

    Raise InputError for an unknown keyword.
    """
    inner = unwrap(model)
    named = list_forward_keywords(inner) if keywords else ()
    for_model, for_method = dict[str, Any](), dict[str, Any]()
    for word, value in keywords.items():
        if word in named:
            for_model[word] = value
        elif any(setting in setting_names for setting in CAPTUM_SETTING_NAMES.get(word, ())):
            for_method[word] = value
        else:
            raise InputError(
                f"{describe_unknown_keyword(word, setting_names, owner_name)}. The forward of {type(inner).__name__} "
                f"does not list it either; to pass it to the model, use additional_forward_args={{{word!r}: ...}}"
            )
    return SplitKeywords(for_model, for_method)


def build_extra_inputs(
    args: tuple[Any, ...], keywords: Mapping[str, Any], additional_forward_args: Any = None
) -> ExtraInputs:
    """Build the extra inputs of the model from the positional arguments, keywords and `additional_forward_args` of a call."""
    if additional_forward_args is None:
        return ExtraInputs(args, keywords)
    if isinstance(additional_forward_args, Mapping):
        repeated = sorted(set(keywords) & set(additional_forward_args))
        if repeated:
            raise InputError(
                f"{', '.join(repeated)}: given as a keyword and in additional_forward_args; pass only one of them"
            )
        return ExtraInputs(args, {**keywords, **additional_forward_args})
    positional = additional_forward_args if isinstance(additional_forward_args, tuple) else (additional_forward_args,)
    return ExtraInputs((*args, *positional), keywords)
