"""The command line. Each command has a module. Heavy imports happen inside the commands, so that `--help` is quick."""

from typing import Annotated

import typer

from camscope.cli import (
    audit,
    batch,
    benchmark_methods_on_synthetic_radiographs,
    choose_method_and_layer,
    compare_methods,
    demo,
    diff_runs,
    draw_feature_maps,
    evaluate_maps,
    explain_images,
    export_run_rows,
    inspect_images,
    list_layers,
    list_methods,
    serve_mcp,
    show_rows_as_html_page,
    version_and_device_info,
)
from camscope.cli.commands_and_error_reports import Command, CommandGroup
from camscope.cli.console_output import stdout_console

__all__ = ["app", "main"]

app = typer.Typer(
    cls=CommandGroup,
    name="camscope",
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: camscope demo",
)
COMMAND_GROUPS = {
    "Start": {"demo": demo, "info": version_and_device_info},
    "Explain images": {"explain": explain_images, "compare": compare_methods, "features": draw_feature_maps},
    "Whole data sets": {
        "inspect-images": inspect_images,
        "batch": batch,
        "show": show_rows_as_html_page,
        "export": export_run_rows,
    },
    "Evidence": {
        "evaluate": evaluate_maps,
        "choose": choose_method_and_layer,
        "diff": diff_runs,
        "benchmark": benchmark_methods_on_synthetic_radiographs,
    },
    "Connect": {"mcp": serve_mcp},
    "Look up": {"methods": list_methods, "layers": list_layers},
}
for group, commands in COMMAND_GROUPS.items():
    for name, module in commands.items():
        example = f"Example: {module.EXAMPLE}"
        app.command(name, cls=Command, epilog=example, rich_help_panel=group)(module.run)
app.add_typer(audit.app, name="audit", rich_help_panel="Evidence")


@app.callback()
def show_help_or_version(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Show where a vision model looked. Start with: camscope demo"""
    if version:
        from camscope.version import __version__

        stdout_console().print(f"camscope {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    """Run the `camscope` command. Exit codes: 0 for success, 1 if inputs failed or a gate fails, 2 for wrong usage."""
    app(prog_name="camscope")
