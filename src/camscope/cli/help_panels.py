"""Panels that group the options in the help."""

PANELS = {
    "Model": (
        "--model",
        "--weights",
        "--layer",
        "--layers",
        "--methods",
        "--choice",
        "--preprocess",
        "--set",
        "--device",
    ),
    "Target": ("--target", "--targets", "--class-names"),
    "Data": (
        "--root",
        "--where",
        "--sort",
        "--images",
        "--seed",
        "--masks",
        "--category",
        "--metrics",
        "--group",
        "--patient",
        "--split",
        "--by",
        "--finding",
        "--fetch",
    ),
    "Output": (
        "--output",
        "--format",
        "--table",
        "--figure",
        "--export",
        "--save",
        "--overlays",
        "--overwrite",
        "--json",
    ),
    "Appearance": (
        "--colormap",
        "--alpha",
        "--shared-scale",
        "--contour",
        "--boxes",
        "--mask",
        "--columns",
        "--height",
        "--size",
        "--limit",
        "--limit-top",
    ),
    "Scans": ("--series", "--window", "--slices", "--profile", "--scans", "--modality", "--allow-pixels", "--keep"),
}
ADVANCED_PANEL = "Advanced"
_PANEL_BY_OPTION = {option: panel for panel, options in PANELS.items() for option in options}


def find_panel(option: str) -> str:
    """Return the panel of an option such as `--model`; `Advanced` if no panel lists it."""
    return _PANEL_BY_OPTION.get(option, ADVANCED_PANEL)
