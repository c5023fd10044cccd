"""The matrix of family x engine: what is written, read back equal, and was checked against the program.

    python tests/enginepage.py          # measures all (some minutes) and writes docs/engine-matrix.md

For every causal model of transformers a tiny random checkpoint is exported for every engine at TP 2 (TP 1 where its
axes allow no more), read back, and compared tensor by tensor. ``test_engine_matrix.py`` holds a sample of the page's
rows against what the code does now.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
PAGE = ROOT / "docs" / "engine-matrix.md"

READ, WRITTEN, NONE = "read back", "written", "-"

_HEAD = """\
# Which model for which engine

*Written by `python tests/enginepage.py`; `tests/test_engine_matrix.py` holds rows of it against the code.*

For every causal language model of transformers 5.24 a tiny random checkpoint was exported at TP 2 and merged again:
**{read}** gives the same tensors, **{written}** is written and not read back, **{none}** is refused, with a message
that says why. How names, shapes and bytes were checked against each program itself: `tpshard list engines`, and
[engines.md](engines.md).

"""


def outcome(source: Path, engine: str) -> str:
    """What becomes of one checkpoint for one engine."""
    from safetensors.numpy import load_file

    from tpshard.errors import TpshardError, UnsupportedError
    from tpshard.exporting.export import export
    from tpshard.exporting.merging import merge_engine

    with tempfile.TemporaryDirectory() as directory:
        out, back = Path(directory) / "out", Path(directory) / "back"
        for tp_size in (2, 1):
            try:
                export(source, out, engine, tp_size)
                break
            except UnsupportedError:
                continue
        else:
            return NONE
        try:
            merge_engine(out, back, engine=engine)
        except TpshardError:
            return WRITTEN
        mine = {name: value for file in source.glob("*.safetensors") for name, value in load_file(file).items()}
        found = {name: value for file in back.glob("*.safetensors") for name, value in load_file(file).items()}
        same = all(name in mine and mine[name].tobytes() == value.tobytes() for name, value in found.items())
        return READ if same else "DIFFERENT"


def row(model_type: str, engines: Iterable[str]) -> list[str]:
    """A row of the page: the model type and its outcome for every engine."""
    from zoo import models

    with tempfile.TemporaryDirectory() as directory:
        try:
            models.write(model_type, Path(directory) / "hf")
        except Exception as error:  # of transformers
            return [model_type, *[f"{type(error).__name__}" for _ in engines]]
        return [model_type, *[outcome(Path(directory) / "hf", engine) for engine in engines]]


def page(rows: list[list[str]], engines: list[str]) -> str:
    """The whole page."""
    lines = [
        _HEAD.format(read=READ, written=WRITTEN, none=NONE),
        "| engine | written | of those read back equal |\n|---|---|---|\n",
    ]
    for at, engine in enumerate(engines, 1):
        column = [cells[at] for cells in rows]
        lines.append(f"| {engine} | {sum(cell in (READ, WRITTEN) for cell in column)} | {column.count(READ)} |\n")
    lines += [f"\n| model | {' | '.join(engines)} |\n", "|---" * (len(engines) + 1) + "|\n"]
    lines += [f"| {' | '.join(cells)} |\n" for cells in rows]
    return "".join(lines)


def rows_of(text: str) -> dict[str, list[str]]:
    """The rows of a page, by model type."""
    out = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and len(cells) > 3:
            out[cells[0]] = cells[1:]
    return out


if __name__ == "__main__":
    from zoo import models

    from tpshard.exporting.registry import engines as known

    names = list(known())
    measured = []
    for name in sys.argv[1:] or models.architectures():
        measured.append(row(name, names))
        print(*measured[-1], sep="\t", flush=True)
    if not sys.argv[1:]:
        PAGE.write_text(page(measured, names))
