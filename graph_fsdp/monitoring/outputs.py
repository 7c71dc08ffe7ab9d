"""A monitor reports to a terminal, a program's loggers, a file and a port of OpenMetrics text.

None of them can end a training: what raises is told once in Python's ``logging``, and tried again at the next record.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any, TypeAlias

from rich.console import Console
from rich.text import Text

from graph_fsdp.compat.inductor.probes import replace_file
from graph_fsdp.monitoring.record import PREFIX, MonitorRecord
from graph_fsdp.passes.ir.settings import check_path, is_count
from graph_fsdp.report.file import check_writable

log = logging.getLogger(__name__)

Output: TypeAlias = Callable[[MonitorRecord], Any]
_CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_MOST_PORT = 65535


def checked(to: Any, path: Any, port: Any, host: Any) -> list[Output]:
    """Return what reports to the program's own loggers ``to``. Raises TypeError or ValueError, which names the
    argument, on what does not fit."""
    if path is not None:
        check_path("path", path, "the path of a file to write, or None")
    if port is not None and not (is_count(port, least=0) and port <= _MOST_PORT):
        raise ValueError(f"port must be a number from 1 to {_MOST_PORT}, 0 for any that is free, or None, got {port!r}")
    if not isinstance(host, str) or not host:
        raise TypeError(f"host must be the name or address to listen on, such as '127.0.0.1', got {host!r}")
    return [_output(given) for given in (to if isinstance(to, (list, tuple)) else (to,))]


def _output(given: Any) -> Output:
    if isinstance(given, (logging.Logger, logging.LoggerAdapter)):
        return lambda record: given.info("%s", record)
    if callable(add_scalar := getattr(given, "add_scalar", None)):
        return lambda record: [add_scalar(name, value, record.step) for name, value in _named(record).items()]
    if callable(given) and not isinstance(given, type):
        return lambda record: given(_named(record), record.step)
    raise TypeError(
        f"to must be a logging.Logger, an object with TensorBoard's add_scalar, a function of a dict and a step, or a "
        f"list of them, got {given!r}; of W&B: lambda values, step: run.log(values, commit=False)"
    )


def _named(record: MonitorRecord) -> dict[str, float]:
    return {f"{PREFIX}/{name}": value for name, value in record.numbers().items()}


def terminal(console: Console | None = None) -> Output | None:
    """Return what prints a line to standard error; None where that is no terminal."""
    console = Console(stderr=True) if console is None else console
    if not console.is_terminal:
        return None
    return lambda record: console.print(line(record), soft_wrap=True)


def line(record: MonitorRecord) -> Text:
    return Text(", ").join(Text(text, style) for text, style in record.parts())


def text_file(path: str | os.PathLike[str], model: str) -> Output:
    """Return what writes OpenMetrics text, so that a reader finds the old text or the new one. Raises OSError."""
    check_writable(path)
    target = Path(path)

    # A collector may be another user.
    return lambda record: replace_file(target, record.open_metrics(model), 0o644)


class MetricsHTTPServer(ThreadingHTTPServer):
    def server_bind(self) -> None:
        """Bind, without http.server's question for the name of the host, which may take long."""
        TCPServer.server_bind(self)


class Server:
    """Answers ``GET /metrics`` with the last record. ``address``: host and port on which it listens. Raises OSError,
    which names ``port``, where it cannot."""

    def __init__(self, host: str, port: int, model: str) -> None:
        self.model = model
        self.text = MonitorRecord(0, 0).open_metrics(model).encode()
        server = self

        class Handler(BaseHTTPRequestHandler):
            timeout = 10  # seconds, for one that connects and asks nothing

            def do_GET(self) -> None:
                if self.path.partition("?")[0] != "/metrics":
                    self.send_error(404, "only /metrics is here")
                    return
                text = server.text
                self.send_response(200)
                self.send_header("Content-Type", _CONTENT_TYPE)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *args: Any) -> None:
                """Say nothing: standard error is the program's."""

        try:
            self._server = MetricsHTTPServer((host, port), Handler)
        except OSError as error:
            reason = f"port: cannot listen on {host}:{port} ({error.strerror}); name one that is free, and a host here"
            raise type(error)(error.errno, reason) from error
        self.address = (host, int(self._server.server_address[1]))
        threading.Thread(target=self._server.serve_forever, name="graph_fsdp monitor", daemon=True).start()

    def __call__(self, record: MonitorRecord) -> None:
        self.text = record.open_metrics(self.model).encode()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class OutputList:
    """Reports records to ``outputs``, one after the other."""

    def __init__(self, outputs: Sequence[Output]) -> None:
        self._outputs = list(outputs)
        self._told: set[int] = set()  # places of those that have raised

    @property
    def address(self) -> tuple[str, int] | None:
        return next((output.address for output in self._outputs if isinstance(output, Server)), None)

    def report(self, record: MonitorRecord) -> None:
        for place, output in enumerate(self._outputs):
            try:
                output(record)
            except Exception as error:
                if place not in self._told:
                    self._told.add(place)
                    log.warning(
                        f"the monitor cannot report step {record.step} ({type(error).__name__}: {error}); training "
                        "goes on, and the next record is tried again",
                        exc_info=not isinstance(error, OSError),
                    )

    def close(self) -> None:
        for output in self._outputs:
            if isinstance(output, Server):
                output.close()
        self._outputs.clear()
