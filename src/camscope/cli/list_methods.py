"""`camscope methods`: list all methods, or show the page of one."""

import inspect
import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from camscope.cli import console_output, json_output, load_model_and_methods, shared_options
from camscope.cli.option_parsing import EXCLUDED_PARAMETERS, list_setting_types
from camscope.registry import METHODS

if TYPE_CHECKING:
    from rich.table import Table

    from camscope.explainers import Explainer

EXAMPLE = "camscope methods Grad-CAM"
MAX_COLUMN_WIDTHS = (None, None, 11, 11, 13)  # characters; leaves room for the description
MIN_DESCRIPTION_WIDTH = 35  # characters of the longest paper id, which is never wrapped
FAMILY_TITLES = {  # by folder
    "gradient": "gradient at the input",
    "path": "along a path of inputs",
    "perturbation": "perturbed inputs",
    "adapters": "by other libraries",
}
COST_LEGEND = "K: channels of the layer; L: attention blocks; a partial forward: the model behind the layer"


def run(
    name: Annotated[
        str | None,
        shared_options.argument(
            "[METHOD]",
            "Show the page of one method: Grad-CAM, gradcam++ ...",
            autocompletion=shared_options.complete_method,
        ),
    ] = None,
    plugins: shared_options.PluginOption = None,
    as_json: shared_options.JsonOption = False,
) -> None:
    """List all methods, or describe one method with its paper, settings and cost."""
    if name is not None:
        (method,) = load_model_and_methods.parse_methods(name).values()
        _print_method_page(method, plugins or ())
        methods = [method]
    else:
        _print_method_table()
        methods = load_model_and_methods.order_methods_by_cost(METHODS.values())
    json_output.print_json_result("methods", {"methods": list(map(describe_method, methods))})


def describe_method(explainer_cls: "type[Explainer]") -> dict[str, Any]:
    """Describe a method as a dict for JSON.

    Defaults of settings that JSON cannot represent are converted to text.
    """
    parameters = inspect.signature(explainer_cls).parameters
    defaults = {name: parameters[name].default for name in list_setting_types(explainer_cls)}
    return {
        "name": explainer_cls.name,
        "title": explainer_cls.title,
        "paper": explainer_cls.paper,
        "description": _summarize_docstring(explainer_cls),
        "forward_passes": explainer_cls.forward_passes,
        "backward_passes": explainer_cls.backward_passes,
        "class_specific": explainer_cls.class_specific,
        "control": explainer_cls.control,
        "slow": explainer_cls.slow,
        "settings": {
            name: value if isinstance(value, bool | int | float | str | None) else str(value)
            for name, value in defaults.items()
        },
    }


def _print_method_page(explainer_cls: "type[Explainer]", plugins: Sequence[str]) -> None:
    """Print the page of a method. It has the description, the settings with their defaults, and an example command.

    The example names the plugins if the method is not one of camscope.
    """
    from camscope.explainers.core import method_docstrings

    console = console_output.stdout_console()
    facts = describe_method(explainer_cls)
    console.print(
        console_output.styled_text((facts["title"], "bold"), (f"  {facts['name']} · {facts['paper']}", "dim"))
    )
    console.print()
    console.print(method_docstrings.read_description(explainer_cls), soft_wrap=False)
    meanings = method_docstrings.read_setting_descriptions(explainer_cls)
    table = console_output.new_table("setting", "default", "meaning")
    for name, value in facts["settings"].items():
        table.add_row(name, _format_default(value), " ".join(meanings.get(name, "").split()))
    console.print(table)
    parameters = set(inspect.signature(explainer_cls).parameters)
    python_only = sorted(parameters & set(meanings) - set(facts["settings"]) - set(EXCLUDED_PARAMETERS))
    if python_only:
        console.print(f"settings that are passed in Python only: {', '.join(python_only)}", style="dim")
    cost = f"forward passes: {facts['forward_passes']}; backward passes: {facts['backward_passes']}"
    console.print(cost + (f" ({COST_LEGEND})" if re.search(r"\b[KL]\b|partial", cost) else ""), style="dim")
    is_foreign = explainer_cls.__module__.partition(".")[0] != "camscope"
    options = "".join(f" --plugin {shlex.quote(str(file))}" for file in plugins) if is_foreign else ""
    console.print(f"Example: camscope explain photo.jpg{options} --methods {facts['name']}", style="dim")


def _format_default(value: object) -> str:
    """Format a default value as in Python. Text is in double quotes."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else str(value)


def _print_method_table() -> None:
    """Print a table of all methods. They are grouped by family."""
    from camscope.explainers import BaseCAM, Explainer, LayerExplainer
    from camscope.explainers.attention.token_attention_explainer import TokenAttentionExplainer
    from camscope.explainers.comparison.grid_of_targets_and_methods import accepts_several_layers
    from camscope.explainers.core.pixel_explainers import PixelExplainer

    foreign = [m for m in METHODS.values() if m.__module__.partition(".")[0] != "camscope"]
    ours = [method for method in METHODS.values() if method not in foreign]
    controls = [method for method in ours if method.control]
    layered = [m for m in ours if (issubclass(m, LayerExplainer) or accepts_several_layers(m)) and m not in controls]
    attention = [m for m in ours if issubclass(m, TokenAttentionExplainer)]
    by_folder = {
        title: [m for m in ours if m.__module__.split(".")[-2:-1] == [folder] and m not in layered]
        for folder, title in FAMILY_TITLES.items()
    }
    in_folders = [m for methods in by_folder.values() for m in methods]
    whole_network = [m for m in ours if m not in (*controls, *layered, *attention, *in_folders)]
    shared = {*list_setting_types(Explainer), *list_setting_types(BaseCAM), *list_setting_types(PixelExplainer)}
    table = console_output.new_table("method", "description", "forward>", "backward>", "settings")
    for column, max_width in zip(table.columns, MAX_COLUMN_WIDTHS, strict=True):
        column.max_width = max_width
    table.columns[1].min_width = MIN_DESCRIPTION_WIDTH
    families: Mapping[str, Sequence[type[Explainer]]] = {
        "class activation maps: of one layer, or several": layered,
        "attention of transformers": attention,
        "whole network": whole_network,
        **by_folder,
        "controls: maps without the model, which every method must beat": controls,
        "registered by your own code": foreign,
    }
    for title, methods in families.items():
        _add_method_family(table, title, methods, shared)
    console = console_output.stdout_console()
    console.print(table)
    console.print(COST_LEGEND, style="dim")
    console.print(f"settings of every method, by --set name=value: {', '.join(sorted(shared))}", style="dim")
    console.print("one method: camscope methods NAME", style="dim")


def _add_method_family(
    table: "Table", title: str, methods: "Iterable[type[Explainer]]", shared_settings: set[str]
) -> None:
    """Add a method family to the table: one heading, then one row for each method."""
    rows = load_model_and_methods.order_methods_by_cost(methods)
    if rows:
        table.add_row("", console_output.styled_text((title, "bold")))
    for method in rows:
        settings = ", ".join(setting for setting in list_setting_types(method) if setting not in shared_settings)
        description = console_output.styled_text((f"{_summarize_docstring(method)} ", ""), (method.paper, "dim"))
        table.add_row(method.name, description, method.forward_passes, method.backward_passes, settings or "–")
    if rows:
        table.add_section()


def _summarize_docstring(method: type) -> str:
    return " ".join((inspect.getdoc(method) or "").partition("\n\n")[0].split())
