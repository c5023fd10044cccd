"""The command ``derive``: a table for a model that nobody wrote one for."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .cliparts import json_option, on_terminal, printable, say

if TYPE_CHECKING:
    from .derivation.derive import Derivation


def degrees(value: object) -> tuple[int, ...]:
    """Degrees, as 2,3,4."""
    parts = str(value).split(",")
    if not all(part.strip().isascii() and part.strip().isdigit() and 1 < int(part) < 1000 for part in parts):
        raise click.BadParameter(f"{str(value)!r:.80} are no degrees from 2 to 999; write them as 2,3,4")
    return tuple(dict.fromkeys(map(int, parts)))


@click.command()
@click.argument("source", metavar="SRC")
@click.option("--out", "output", metavar="FILE", help="Write the table here; printed on stdout without it.")
@click.option("--degrees", "tp_sizes", type=degrees, default="2,3,4", show_default=True, help="Degrees of the proof.")
@click.option("--overwrite", is_flag=True, help="Replace FILE if it exists.")
@click.option("--trust-remote-code", is_flag=True, help="Run model code that lies in the checkpoint.")
@json_option
def derive(
    source: str, output: str | None, tp_sizes: tuple[int, ...], overwrite: bool, trust_remote_code: bool, as_json: bool
) -> None:
    """Work out a table for the model in SRC, prove it by experiment, and write it.

    SRC is a checkpoint's directory, or one with its config.json alone. The model runs tiny and random on the CPU; no
    weights of SRC are read. Use the table with split, plan or inspect: --table FILE.
    """
    from .errors import StorageError, UsageError
    from .hub import looks_like_id, resolve
    from .numerics import require

    root = Path(source)
    if root.exists() and not root.is_dir():
        raise UsageError(f"{source} is a file; give the directory of a checkpoint, or one with its config.json alone")
    require()
    from .derivation.derive import derive as derived

    if not root.is_dir() and looks_like_id(source):
        root = resolve(source)
    target = None if output is None else Path(output)
    if target is not None and target.exists() and not overwrite:
        raise UsageError(f"{target} exists; --overwrite replaces it")
    note = (lambda message: say(f"derive: {message}")) if on_terminal(sys.stderr) else (lambda message: None)
    found = derived(root, trust_remote_code=trust_remote_code, degrees=tp_sizes, note=note)
    if target is not None and found.proven:
        try:
            partial = target.with_name(f"{target.name}.tpshard-partial")
            partial.write_text(found.text, encoding="utf-8")
            os.replace(partial, target)
        except OSError as error:
            raise StorageError(f"{target}: writing the table failed: {error.strerror or error}") from None
    if as_json:
        import json

        click.echo(json.dumps(found.as_json(), indent=1))
    else:
        if target is None:
            click.echo(printable(found.text))
        click.echo(printable(told(found, output)), err=target is None)
    if not found.proven:
        say(f"error: the table of {found.class_name} is not proven, so no file was written; write one by hand from it")
        click.get_current_context().exit(1)


def told(found: Derivation, output: str | None) -> str:
    """The report in words."""
    state = f"proven; wrote {output}" if found.proven and output else "proven" if found.proven else "NOT proven"
    lines = [
        f"derive {found.source}: {state}",
        f"  {found.class_name}, {len(found.text.splitlines())} lines, {found.seconds:.1f} s",
        *(f"  axis {axis}" for axis in found.axes),
        f"  {found.experiments} comparisons with noise in what a rank lacks, and in what it holds",
    ]
    for trial in found.trials:
        if trial.uncut:
            lines.append(f"  TP {trial.tp_size}: not possible: {trial.problem}")
        elif trial.problem:
            lines.append(f"  TP {trial.tp_size}: FAILED: {trial.problem}")
        else:
            lines.append(
                f"  TP {trial.tp_size}: ranks ran as the original at {trial.points} points (worst {trial.error:.1e}), "
                f"merged equal, sharded fraction {trial.fraction:.4f}"
            )
    if found.spanning:
        lines.append(f"  needs a sum over ranks: {', '.join(found.spanning)}")
    lines += [f"  whole: {name}: {why}" for name, why in found.whole.items()]
    lines += [f"  note: {remark}" for remark in found.remarks]
    return "\n".join(lines)
