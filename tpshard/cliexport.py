"""The command ``export``."""

from __future__ import annotations

from typing import Any

import click

from .cliparts import F, file_size, json_option, options_of, show, table_option
from .cliwriting import writing


def source_engine_option(function: F) -> F:
    """What an engine's directory does not tell itself: whose it is, and the model's config.json."""
    for option in (
        click.option(
            "--config", "source_config", metavar="DIR",
            help="Directory with the model's config.json, where SRC is an engine's and has none.",
        ),
        click.option("--from", "source_engine", metavar="NAME[@VERSION]", help="The engine whose directory SRC is."),
    ):  # fmt: skip
        function = option(function)
    return function


@click.command()
@click.argument("source", metavar="SRC")
@click.argument("output", metavar="OUT")
@click.option("--engine", required=True, metavar="NAME[@VERSION]", help="As 'tpshard list engines' has it.")
@click.option("--tp", "tp_size", type=int, required=True, help="Tensor-parallel degree.")
@click.option("--pp", "pp_size", type=int, default=1, show_default=True, help="Pipeline stages.")
@click.option("--ep", "ep_size", type=int, default=1, show_default=True, help="Groups to which experts are dealt.")
@click.option("--stages", metavar="N,N,...", help="Layers of every stage, where the engine's own rule is not wanted.")
@source_engine_option
@click.option("--max-file-size", type=file_size, help="Largest size of a file; 0: one a rank [default: the engine's].")
@table_option
@writing
@json_option
def export(
    source: str, output: str, engine: str, tp_size: int, pp_size: int, ep_size: int, stages: str | None,
    source_engine: str | None, source_config: str | None, max_file_size: int | None, as_json: bool, **moving: Any,
) -> None:  # fmt: skip
    """Write SRC (a checkpoint, shards, or an engine's directory) as the files that an engine loads."""
    from .exporting.export import export as convert

    report = convert(
        source, output, engine, tp_size, pp_size=pp_size, ep_size=ep_size, stages=stages,
        source_engine=source_engine, source_config=source_config, max_file_bytes=max_file_size,
        options=options_of(moving),
    )  # fmt: skip
    show(report, as_json)
