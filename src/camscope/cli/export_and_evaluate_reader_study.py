"""Reader studies on the command line: `camscope export RUN --reader-study` and `camscope evaluate --reader-study`."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from camscope.cli import console_output, json_output, open_or_compute_run, progress_bars, shared_options
from camscope.cli.shared_options import option
from camscope.plurals import plural

if TYPE_CHECKING:
    from camscope.batch import BatchRun, Query
    from camscope.evaluation import ReaderStudyResult

ExportStudyOption = Annotated[
    str | None,
    option(
        "--reader-study",
        "FOLDER",
        "Write a blinded reader study instead: images without a map, with it, and with a control map, forms for the readers, "
        "and the key in FOLDER/key.",
    ),
]
ReadersOption = Annotated[int, option("--readers", None, "Reader study: the number of readers.", min=1, max=99)]
DesignOption = Annotated[
    Literal["crossed", "split"],
    option(
        "--design",
        None,
        "Reader study: crossed (each reader sees each case under each condition, in several sessions) or split (once).",
    ),
]
ControlsOption = Annotated[
    Literal["other-case", "flipped", "none"],
    option(
        "--controls",
        None,
        "Reader study: the control map is that of another patient (other-case), the own map turned by 180 degrees (flipped), or "
        "none.",
    ),
]
LabelsOption = Annotated[
    str | None,
    option(
        "--labels",
        "COLUMN|FILE",
        "Reader study: true class of each image, a column of the run or a CSV file with the columns id and label; default: the "
        "column class.",
    ),
]
ModelAnswersOption = Annotated[
    str | None,
    option(
        "--model-answers",
        "COLUMN",
        "Reader study: class that the model predicts; default: that of the map, if it is the top class or its probability is "
        "above 0.5.",
    ),
]
PositiveOption = Annotated[
    str | None,
    option("--positive", "CLASS", "Reader study: the positive one of two classes, for sensitivity and AUROC."),
]
WashoutOption = Annotated[
    int, option("--washout", "DAYS", "Reader study: days between two sessions, in the instructions.", min=0)
]
EvaluateStudyOption = Annotated[
    str | None,
    option("--reader-study", "FOLDER", "Evaluate the filled forms of a reader study instead of maps."),
]
KeyOption = Annotated[
    str | None, option("--key", "FOLDER", "Reader study: folder of the key; default: key in the folder of the study.")
]
AllowMissingOption = Annotated[
    bool, option("--allow-missing", None, "Reader study: evaluate the answers that exist, although some are missing.")
]
STUDY_EXPORT_PARAMETERS = (
    "readers",
    "design",
    "controls",
    "labels",
    "group",
    "model_answers",
    "positive",
    "washout",
    "seed",
)
FILE_EXPORT_PARAMETERS = ("formats", "output", "threshold", "overwrite")
STUDY_EVALUATION_PARAMETERS = ("key", "allow_missing")
COMMON_EVALUATION_PARAMETERS = (
    *STUDY_EVALUATION_PARAMETERS, "reader_study", "output", "overwrite", "as_json", "figure", "plugins",
)  # fmt: skip


def export_study(
    context: typer.Context, run: "BatchRun", query: "Query", folder: str, parameters: Mapping[str, Any]
) -> None:
    """Write the folder of a reader study, and print its numbers. `parameters` are those of `camscope export`."""
    from camscope.batch import ReaderStudyOptions
    from camscope.batch.reader_study.export_reader_study import write_reader_study

    shared_options.check_options_unset(
        context, FILE_EXPORT_PARAMETERS, "it does not belong to --reader-study FOLDER, which writes its own files"
    )
    if run.is_pseudonymized and run.manifest_of_passed_images is None:
        raise shared_options.build_option_error("--reader-study", open_or_compute_run.MISSING_SCANS)
    options = ReaderStudyOptions(
        n_readers=parameters["readers"],
        design=parameters["design"],
        controls=parameters["controls"],
        seed=parameters["seed"],
        washout_days=parameters["washout"],
        **({} if parameters["image_height"] is None else {"image_size": parameters["image_height"]}),
    )
    matching = open_or_compute_run.count_matching_rows_or_exit(run, query)
    n_rows = min(matching, query.max_rows or matching)
    with progress_bars.progress_bar("drawing", n_rows, console_output.stderr_console()) as bar:
        study = write_reader_study(
            run,
            folder,
            query,
            options,
            parameters["labels"],
            parameters["group"],
            parameters["model_answers"],
            parameters["positive"],
            bar.advance,
        )
    console_output.print_field(
        "study",
        f"{plural(study.n_cases, 'case')} of {plural(study.n_patients, 'patient')}, {plural(study.n_readers, 'reader')}, "
        f"{plural(study.n_sessions, 'session')} each, {study.n_readings} readings: {folder}",
    )
    console_output.print_field(
        "readers", f"give each reader one folder at a time, such as {Path(folder, 'reader-1', 'session-1')}"
    )
    console_output.print_field("key", f"keep it away from the readers: {Path(folder, 'key')}")
    if study.n_patients == study.n_cases:
        console_output.print_note("each image counts as a patient; name the column of the patients by --group")
    if study.n_model_errors == 0:
        console_output.print_note("the model is right on all cases, so that the study cannot show automation bias")
    if study.n_maps_without_information:
        maps = plural(study.n_maps_without_information, "map has", "maps have")
        console_output.print_note(f"{maps} a warning, such as a zero gradient, and may have no colors")
    names = (
        "n_cases", "n_patients", "n_readers", "n_sessions", "n_readings", "conditions", "answers", "positive_answer",
        "n_model_errors", "n_maps_without_information",
    )  # fmt: skip
    json_output.print_json_result(
        "export-reader-study", {"folder": folder, **{name: getattr(study, name) for name in names}}
    )


def evaluate_study(context: typer.Context, folder: str, parameters: Mapping[str, Any], figure: Path | None) -> None:
    """Evaluate a reader study and print its tables. If the user passes `--output`, write files. `parameters` are all options."""
    from camscope.evaluation import evaluate_reader_study

    unrelated = {parameter.name for parameter in context.command.params if parameter.name} - set(
        COMMON_EVALUATION_PARAMETERS
    )
    shared_options.check_options_unset(
        context, unrelated, "it does not belong to --reader-study FOLDER, which evaluates forms"
    )
    overwrite, output = parameters["overwrite"], parameters["output"]
    result = evaluate_reader_study(folder, parameters["key"], allow_missing=parameters["allow_missing"])
    print_study_tables(result)
    saved = result.save(output, overwrite=overwrite) if shared_options.is_option_set(context, "output") else None
    if figure is not None:
        from camscope.atomic_writes_and_folder_locks import write_bytes
        from camscope.evaluation.reader_study.reader_study_figure import draw_reader_study

        write_bytes(figure, draw_reader_study(result, figure.suffix.lower()), overwrite=overwrite)
        console_output.print_field("figure", figure, "cyan")
    if saved is not None:
        console_output.print_field("report", saved / "report.md", "cyan")
    json_output.print_json_result("evaluate-reader-study", {**result.to_dict(), "folder": saved, "figure": figure})


def print_study_tables(result: "ReaderStudyResult") -> None:
    """Print tables of all readers, the accuracy of each reader, and the sentences."""
    from camscope.evaluation.reader_study import reader_study_report as report

    console = console_output.stdout_console()
    for rows in (
        report.build_level_rows(result),
        report.build_difference_rows(result),
        report.build_reader_rows(result),
    ):
        table = console_output.new_table(rows[0][0], *(f"{name}>" for name in rows[0][1:]))
        for row in rows[1:]:
            table.add_row(*row)
        console.print(table)
    for sentence in result.statements():
        console.print(console_output.to_printable_line(sentence), soft_wrap=True)
    if result.readings.n_missing:
        console_output.print_note(f"{plural(result.readings.n_missing, 'answer is', 'answers are')} missing")
