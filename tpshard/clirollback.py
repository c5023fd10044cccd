"""The command ``rollback``."""

from __future__ import annotations

import click

from .cliparts import json_option, show


@click.command()
@click.argument("output", metavar="OUT")
@json_option
def rollback(output: str, as_json: bool) -> None:
    """Bring back what OUT held before --keep-previous replaced it; what it holds now is kept in its stead."""
    from .previous import rollback as bring_back

    show(bring_back(output), as_json)
