"""The options by which a command tells those who watch it how far it is: ``--log-json``, ``--metrics-file``."""

from __future__ import annotations

from functools import wraps
from typing import Any

import click

from .cliparts import F, say, silence
from .errors import UsageError


def observing(function: F) -> F:
    """Give a command that moves bytes the options; it gets the observer, or None, as ``observer``."""

    @wraps(function)
    def observed(
        *args: Any, log_json: str | None, metrics_file: str | None, heartbeat: float | None, **values: Any
    ) -> Any:
        if log_json is None and metrics_file is None:
            if heartbeat is not None:
                raise UsageError("--heartbeat is how often --log-json and --metrics-file are written: give one")
            return function(*args, observer=None, **values)
        if log_json == "-":
            if values.get("as_json"):
                raise UsageError("--json and --log-json - both write to stdout: name a file for one of them")
            silence()
        from .observing import HEARTBEAT, Observer

        verb = click.get_current_context().info_name or ""
        with Observer(
            verb, log=log_json, metrics=metrics_file, heartbeat=heartbeat or HEARTBEAT,
            note=lambda message: say(f"note: {message}"),
        ) as observer:  # fmt: skip
            return function(*args, observer=observer, **values)

    for option in reversed(
        (
            click.option(
                "--log-json", metavar="FILE", help="Append events to FILE, one JSON object a line; - is stdout."
            ),
            click.option(
                "--metrics-file", metavar="FILE", help="Write metrics to FILE for Prometheus' textfile collector."
            ),
            click.option(
                "--heartbeat", type=click.FloatRange(0.01, 86400), metavar="SECONDS",
                help="Seconds between signs of life in both. [default: 30]",
            ),
        )
    ):
        observed = option(observed)
    return observed  # type: ignore[return-value]
