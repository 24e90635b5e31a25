"""`build_server`: tools of the Model Context Protocol over a workspace. `serve_stdio` and `serve_http` run it."""

import base64
import functools
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Annotated, Any

import anyio
import anyio.from_thread
import anyio.to_thread
import torch
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.transport_security import TransportSecuritySettings
from mcp_types import CallToolResult, ContentBlock, ImageContent, TextContent, ToolAnnotations
from pydantic import Field, ValidationError

from camscope.errors import InputError
from camscope.integrations import mcp_reply_schemas as schemas
from camscope.integrations import mcp_tools
from camscope.integrations.mcp_workspace import Workspace
from camscope.version import __version__

HOST, PATH = "127.0.0.1", "/mcp"
MIN_TOKEN_CHARACTERS = 16
MAX_BODY_BYTES = 2**20  # of a request over HTTP
MAX_SESSIONS, SESSION_IDLE_SECONDS = 16, 1800.0
MAX_WAITING_CALLS = 32
LOCK_POLL_SECONDS = 0.1
Target = Annotated[
    int | str | None, Field(description="class, by index or name; default: the class with the highest score")
]
Model = Annotated[str | None, Field(description="name of a model of this server; default: the first")]
Layer = Annotated[str | None, Field(description="name of a layer, as `layers` lists it; default: the last with a grid")]
ImagePath = Annotated[str, Field(description="path of an image below a folder of this server")]
Methods = Annotated[list[str] | None, Field(description="names of methods, as `methods` lists them")]


class CallCanceledError(Exception):
    """The client canceled the call."""


class StrictServer(MCPServer[Any]):
    """An MCP server that refuses unknown arguments, and that describes wrong ones in one sentence."""

    async def call_tool(
        self, name: str, arguments: dict[str, Any], context: Context[Any, Any] | None = None
    ) -> Any:  # the union of results of the base class
        """Call a tool. An argument that the tool does not have is an error."""
        schema = self._tool_input_schema(name)
        allowed = [] if schema is None else list(schema.get("properties", {}))
        if schema is not None and (unknown := [key for key in arguments if key not in allowed]):
            raise ToolError(
                f"{name} has no argument {', '.join(unknown)[:100]}; its arguments: {', '.join(allowed) or 'none'}"
            )
        try:
            return await super().call_tool(name, arguments, context)
        except ToolError as error:
            if not isinstance(error.__cause__, ValidationError):
                raise
            faults = {".".join(map(str, fault["loc"][:1])): fault["msg"] for fault in error.__cause__.errors()}
            text = "; ".join(f"{argument}: {message}" for argument, message in faults.items())
            raise ToolError(f"{name}: {text}; its arguments: {', '.join(allowed)}") from None


class CallRunner:
    """Run tools in worker threads, one at a time. A canceled call stops at the next layer of the model."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace, self._lock = workspace, threading.Lock()
        self._limiter: anyio.CapacityLimiter | None = None

    async def run(
        self, context: Context[Any, Any], function: Callable[..., mcp_tools.ToolResult], **arguments: Any
    ) -> Any:
        """Run a tool, and return its result for the protocol. Errors become ToolErrors of one sentence."""
        if self._limiter is None:
            self._limiter = anyio.CapacityLimiter(MAX_WAITING_CALLS)
        canceled = threading.Event()

        def report(done: float, total: float | None, message: str) -> None:
            if canceled.is_set():
                raise CallCanceledError
            with suppress(RuntimeError):  # the event loop has ended
                anyio.from_thread.run(context.report_progress, done, total, message)

        def work() -> mcp_tools.ToolResult:
            while not self._lock.acquire(timeout=LOCK_POLL_SECONDS):
                if canceled.is_set():
                    raise CallCanceledError
            try:
                with stop_forward_passes(canceled):
                    return function(self._workspace, report, **arguments)
            finally:
                self._lock.release()

        try:
            result = await anyio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=self._limiter)
        except Exception as error:  # every error is one sentence for the client
            raise ToolError(self._workspace.format_error(error)) from None
        finally:
            canceled.set()
        return encode_result(result)


@contextmanager
def stop_forward_passes(canceled: threading.Event) -> Iterator[None]:
    """Inside the `with` block, forward passes of this thread raise a CallCanceledError as soon as the event is set."""
    thread = threading.get_ident()

    def check(module: torch.nn.Module, args: Any) -> None:
        if canceled.is_set() and threading.get_ident() == thread:
            raise CallCanceledError

    handle = torch.nn.modules.module.register_module_forward_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()


def encode_result(result: mcp_tools.ToolResult) -> CallToolResult:
    """Convert the result of a tool to text, a picture and structured content."""
    content: list[ContentBlock] = [TextContent(type="text", text=result.text)]
    if (png := result.encode_picture()) is not None:
        content.append(ImageContent(type="image", data=base64.b64encode(png).decode("ascii"), mime_type="image/png"))
    return CallToolResult(content=content, structured_content=result.data.model_dump(mode="json"))


def build_server(workspace: Workspace) -> MCPServer[Any]:
    """Build the server with its seven tools.

    Args:
        workspace: What the calls may use.

    Returns:
        The server, for `serve_stdio` or `serve_http`.

    >>> from camscope import load_model
    >>> build_server(Workspace({"phantom": load_model("phantom")}, [])).name
    'camscope'

    """
    names = (
        f"models: {', '.join(workspace.models)}; folders: {workspace.format_roots()}; "
        f"runs: {', '.join(workspace.runs) or 'none'}; audits: {', '.join(workspace.audits) or 'none'}"
    )
    server = StrictServer(
        "camscope",
        version=__version__,
        instructions=f"Explains where a vision model looked. This server has {names}.",
        log_level="ERROR",
    )
    runner = CallRunner(workspace)
    read_only = ToolAnnotations(read_only_hint=True, open_world_hint=False)
    writes = ToolAnnotations(read_only_hint=not workspace.allow_writing, destructive_hint=False, open_world_hint=False)

    async def explain(
        context: Context[Any, Any],
        image: ImagePath,
        target: Target = None,
        method: Annotated[str, Field(description="name of a method")] = "gradcam",
        layer: Layer = None,
        model: Model = None,
        save: Annotated[
            str | None, Field(description="new .png or .npz file below a folder, if the server may write")
        ] = None,
    ) -> Annotated[CallToolResult, schemas.ExplainReply]:
        """Explain which parts of one image raised the score of a class, as a picture with numbers and flags."""
        arguments = {"target": target, "method": method, "layer": layer, "model": model, "save": save}
        return await runner.run(context, mcp_tools.explain_image, image=image, **arguments)  # type: ignore[no-any-return]

    async def compare(
        context: Context[Any, Any],
        image: ImagePath,
        methods: Methods = None,
        target: Target = None,
        layer: Layer = None,
        model: Model = None,
    ) -> Annotated[CallToolResult, schemas.CompareReply]:
        """Compare several methods on one image: a picture of all maps, their scores, flags and correlations."""
        arguments = {"methods": methods, "target": target, "layer": layer, "model": model}
        return await runner.run(context, mcp_tools.compare_on_image, image=image, **arguments)  # type: ignore[no-any-return]

    async def evaluate(
        context: Context[Any, Any],
        run: Annotated[str | None, Field(description="name of a run of this server; or pass images")] = None,
        images: Annotated[list[str] | None, Field(description="paths of images below a folder of this server")] = None,
        methods: Methods = None,
        metrics: Annotated[list[str] | None, Field(description="names of metrics; default: all fast ones")] = None,
        masks: Annotated[
            str | None, Field(description="ground truth below a folder: a COCO file or a folder of masks")
        ] = None,
        target: Target = None,
        model: Annotated[
            str | None, Field(description="model for metrics that remove pixels; for images, default: the first")
        ] = None,
    ) -> Annotated[CallToolResult, schemas.EvaluateReply]:
        """Evaluate maps of a run, or of images, by metrics, and compare them with control maps."""
        arguments = {"methods": methods, "metrics": metrics, "masks": masks, "target": target, "model": model}
        return await runner.run(context, mcp_tools.evaluate_maps, run=run, images=images, **arguments)  # type: ignore[no-any-return]

    async def methods(context: Context[Any, Any]) -> Annotated[CallToolResult, schemas.MethodsReply]:
        """List the explanation methods with their costs and papers."""
        return await runner.run(context, mcp_tools.list_methods)  # type: ignore[no-any-return]

    async def layers(context: Context[Any, Any], model: Model = None) -> Annotated[CallToolResult, schemas.LayersReply]:
        """List the layers of a model where maps can be computed."""
        return await runner.run(context, mcp_tools.list_model_layers, model=model)  # type: ignore[no-any-return]

    async def query(
        context: Context[Any, Any],
        run: Annotated[str, Field(description="name of a run of this server")],
        condition: Annotated[
            str | None, Field(description="SQL condition over the columns of the run, such as probability < 0.6")
        ] = None,
        sort: Annotated[str | None, Field(description="SQL order of the rows, such as probability desc")] = None,
        limit: Annotated[int, Field(description="largest number of rows, 1 to 50")] = 20,
    ) -> Annotated[CallToolResult, schemas.QueryReply]:
        """Select rows of a run by an SQL condition. The picture shows the first maps."""
        arguments = {"condition": condition, "sort": sort, "limit": limit}
        return await runner.run(context, mcp_tools.query_run, run=run, **arguments)  # type: ignore[no-any-return]

    async def verdicts(
        context: Context[Any, Any],
        audit: Annotated[str, Field(description="name of an audit of this server")],
    ) -> Annotated[CallToolResult, schemas.VerdictsReply]:
        """List the verdicts of an audit: claims, conclusions and effects with their intervals."""
        return await runner.run(context, mcp_tools.list_verdicts, audit=audit)  # type: ignore[no-any-return]

    server.add_tool(explain, annotations=writes)
    for function in (compare, evaluate, methods, layers, query, verdicts):
        server.add_tool(function, annotations=read_only)
    return server


def serve_stdio(server: MCPServer[Any]) -> None:
    """Serve the protocol over stdin and stdout until stdin closes."""
    server.run("stdio")


def serve_http(server: MCPServer[Any], port: int, token: str, on_start: Callable[[str], None]) -> None:
    """Serve the protocol over HTTP on 127.0.0.1.

    Args:
        server: The server.
        port: The port. 0 chooses a free one.
        token: Every request must carry it as `Authorization: Bearer TOKEN`.
        on_start: Called with the URL as soon as the port is open.

    Raises:
        InputError: The token is too short, or the port is not free.

    """
    import uvicorn

    if len(token) < MIN_TOKEN_CHARACTERS or not token.isascii() or not token.isprintable():
        raise InputError(f"the token has {len(token)} characters; expected at least {MIN_TOKEN_CHARACTERS} in ASCII")
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, port))
        except OSError as error:
            raise InputError(
                f"port {port} of {HOST} cannot be opened: {error.strerror}; choose another --http"
            ) from None
        listener.listen(MAX_SESSIONS)
        port = listener.getsockname()[1]
        config = uvicorn.Config(
            build_http_app(server, port, token), log_level="error", access_log=False, server_header=False, lifespan="on"
        )
        on_start(f"http://{HOST}:{port}{PATH}")
        anyio.run(functools.partial(uvicorn.Server(config).serve, sockets=[listener]))


def build_http_app(server: MCPServer[Any], port: int, token: str) -> Any:
    """Return the ASGI app of the server. It checks the token, the host, the origin and the size of each request."""
    hosts = [f"{HOST}:{port}", f"localhost:{port}"]
    security = TransportSecuritySettings(
        enable_dns_rebinding_protection=True, allowed_hosts=hosts, allowed_origins=[f"http://{host}" for host in hosts]
    )
    app = server.streamable_http_app(
        streamable_http_path=PATH,
        max_request_body_size=MAX_BODY_BYTES,
        session_idle_timeout=SESSION_IDLE_SECONDS,
        max_sessions=MAX_SESSIONS,
        transport_security=security,
        host=HOST,
    )
    return TokenMiddleware(app, token, hosts)


class TokenMiddleware:
    """Refuse requests for a foreign host, and requests without the token, before the app reads them."""

    def __init__(self, app: Any, token: str, hosts: list[str]) -> None:
        self._app, self._expected, self._hosts = app, f"Bearer {token}".encode(), [host.encode() for host in hosts]

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        """Handle one request of ASGI."""
        if scope["type"] == "http":
            headers = scope["headers"]
            tokens = [value for name, value in headers if name == b"authorization"]
            if [value for name, value in headers if name == b"host"] not in [[host] for host in self._hosts]:
                return await _refuse(send, 421, b"this server answers only on 127.0.0.1")
            if len(tokens) != 1 or not secrets.compare_digest(tokens[0], self._expected):
                return await _refuse(send, 401, b"pass the token as Authorization: Bearer TOKEN")
        elif scope["type"] != "lifespan":
            return None
        return await self._app(scope, receive, send)  # type: ignore[no-any-return]


async def _refuse(send: Any, status: int, text: bytes) -> None:
    headers = [(b"content-type", b"text/plain"), (b"www-authenticate", b"Bearer")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text})
