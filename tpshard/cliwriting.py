"""The options of every command that writes an output."""

from __future__ import annotations

import click

from .cliobserve import observing
from .cliparts import F, moving_options


def writing(function: F) -> F:
    """Options of everything that writes an output; they reach the command as the keywords of ``Options``."""
    for option in reversed(
        (
            click.option("--dry-run", is_flag=True, help="Plan and check everything, write nothing."),
            click.option("--overwrite", is_flag=True, help="Replace OUT if it exists."),
            click.option(
                "--keep-previous", is_flag=True,
                help="With --overwrite: keep what is replaced, as OUT.tpshard-previous, for tpshard rollback.",
            ),
            click.option(
                "--resume", is_flag=True,
                help="Go on from what an unfinished run left, and leave what is done if this one ends early.",
            ),
            click.option("--fsync", is_flag=True, help="Wait until the data is on the device."),
        )
    ):  # fmt: skip
        function = option(function)
    return moving_options(observing(function))
