"""`camscope mcp`: serve explanations to assistants by the Model Context Protocol."""

import os
import re
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from camscope.cli import console_output, json_output, load_model_and_methods, option_parsing, shared_options
from camscope.cli.shared_options import option
from camscope.optional_packages import require

EXAMPLE = "camscope mcp --model phantom --root camscope-demo/images"
TOKEN_VARIABLE = "CAMSCOPE_MCP_TOKEN"  # noqa: S105 - the name of a variable
MAX_TOKEN_FILE_BYTES = 4096
NAME = re.compile(r"[\w.-]+")
Value = TypeVar("Value")


def run(
    models: Annotated[
        list[str] | None,
        option("--model -m", "[NAME=]MODEL", "Model, as in explain --model; default: phantom. Repeat for several."),
    ] = None,
    weights: shared_options.WeightsOption = None,
    trust_code: shared_options.TrustCodeOption = False,
    class_names: shared_options.ClassNamesOption = None,
    layer: Annotated[str | None, option("--layer -l", "NAME", "Default layer of the maps.")] = None,
    preprocess: shared_options.PreprocessOption = None,
    plugins: shared_options.PluginOption = None,
    device: shared_options.DeviceOption = "cpu",
    roots: Annotated[
        list[str] | None,
        option("--root", "FOLDER", "Folder whose images and masks a call may name. Repeat for several."),
    ] = None,
    runs: Annotated[
        list[str] | None, option("--run", "[NAME=]RUN", "Folder of a run, for query and evaluate. Repeat for several.")
    ] = None,
    audits: Annotated[
        list[str] | None, option("--audit", "[NAME=]AUDIT", "Folder of an audit, for verdicts. Repeat for several.")
    ] = None,
    port: Annotated[
        int | None,
        option("--http", "PORT", "Serve over HTTP on 127.0.0.1; 0 chooses a port. Default: stdio.", min=0, max=65535),
    ] = None,
    token_file: Annotated[
        str | None,
        option("--token-file", "FILE", f"File with the token of --http; default: ${TOKEN_VARIABLE}, or a random one."),
    ] = None,
    allow_writing: Annotated[
        bool, option("--allow-writing", None, "Calls may write new files below the roots; default: read-only.")
    ] = False,
    as_json: shared_options.JsonOption = False,
) -> None:
    """Serve explanations to assistants by the Model Context Protocol, over stdio or HTTP on 127.0.0.1.

    A call can use only the models, folders, runs and audits that are named here.
    """
    require("mcp", extra="mcp")
    sources = parse_named_sources(models or ["phantom"], "--model")
    if len(sources) > 1 and (weights is not None or class_names is not None or layer is not None):
        raise shared_options.build_option_error(
            "--model", "--weights, --class-names and --layer apply to one model; name a single --model"
        )
    if as_json and port is None:
        raise shared_options.build_option_error("--json", "over stdio, stdout holds the protocol; pass --http PORT too")
    if token_file is not None and port is None:
        raise shared_options.build_option_error("--token-file", "it belongs to --http PORT")
    from camscope.batch import BatchRun
    from camscope.integrations.mcp_server import build_server, serve_http, serve_stdio
    from camscope.integrations.mcp_workspace import Workspace

    parsed_names = option_parsing.parse_class_names(class_names)
    loaded = {
        name: load_model_and_methods.load_model_on_device(
            source, weights, device, None, parsed_names, trust_code=trust_code
        )
        for name, source in sources.items()
    }
    workspace = Workspace(
        models=loaded,
        roots=[Path(root) for root in roots or ()],
        runs=_open_named(runs or (), "--run", BatchRun),
        audits=_open_named(audits or (), "--audit", _open_audit),
        layer=layer,
        preprocess=preprocess,
        allow_writing=allow_writing,
    )
    server = build_server(workspace)
    if port is None:
        serve_stdio(server)
        return
    token, is_random = _choose_token(token_file)

    def print_address(url: str) -> None:
        names = {"models": list(workspace.models), "runs": list(workspace.runs), "audits": list(workspace.audits)}
        json_output.print_json_result("mcp", {"url": url, "token": token if is_random else None, **names})
        console_output.print_note(f"serving at {url}" + (f" with the token {token}" if is_random else ""))

    serve_http(server, port, token, print_address)


def parse_named_sources(values: Sequence[str], option_name: str) -> dict[str, str]:
    """Parse values such as `NAME=SOURCE`. Without a name, the last part of the source is the name."""
    parsed: dict[str, str] = {}
    for value in values:
        name, equals, source = value.partition("=")
        if not (equals and NAME.fullmatch(name)):
            name, source = Path(value.rstrip("/\\").rpartition(":")[2]).stem, value
        name = name or "model"
        if name in parsed:
            raise shared_options.build_option_error(option_name, f"two values are named {name}; pass NAME=... for each")
        parsed[name] = source
    return parsed


def _open_named(values: Sequence[str], option_name: str, open_folder: Callable[[str], Value]) -> dict[str, Value]:
    return {name: open_folder(folder) for name, folder in parse_named_sources(values, option_name).items()}


def _open_audit(folder: str) -> Any:
    from camscope.audit.finished_audit import AuditRun

    return AuditRun(folder)


def _choose_token(token_file: str | None) -> tuple[str, bool]:
    """Return the token of the file or the environment variable, or a random one, and whether it is random."""
    from camscope.atomic_writes_and_folder_locks import read_bytes

    if token_file is not None:
        try:
            return read_bytes(Path(token_file), MAX_TOKEN_FILE_BYTES).decode("ascii").strip(), False
        except (OSError, ValueError):
            raise shared_options.build_option_error("--token-file", f"{token_file} cannot be read as text") from None
    if token := os.environ.get(TOKEN_VARIABLE, "").strip():
        return token, False
    return secrets.token_urlsafe(32), True
