"""The matrix of family x engine: what is written, read back equal, and was checked against the program.

    python tests/enginepage.py               # measures all (a quarter of an hour) and writes docs/engine-matrix.md
    python tests/enginepage.py llama opt     # prints the rows of these

For every causal model of transformers a tiny random checkpoint is exported for every engine at TP 2 (TP 1 where its
axes allow no more), read back, and compared tensor by tensor. ``test_engine_matrix.py`` holds a sample of the page's
rows against what the code does now.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
PAGE = ROOT / "docs" / "engine-matrix.md"

READ, WRITTEN, NONE, DIFFERENT, UNMADE = "read back", "written", "-", "DIFFERENT", "not made"

_HEAD = """\
# Which model for which engine

*Written by `python tests/enginepage.py`; `tests/test_engine_matrix.py` holds rows of it against the code.*

For every causal language model of transformers 5.24 a tiny random checkpoint was exported at TP 2 (at TP 1 where its
axes allow no more), verified against its source, and merged again: **{read}** gives the same tensors (experts one by
one or stacked), **{written}** is written and not read back, **{none}** is refused, with a message that says why. A row
**{unmade}** is of a model whose tiny checkpoint transformers does not make. More about each engine:
[engines.md](engines.md).

"""


def outcome(source: Path, engine: str) -> str:
    """What becomes of one checkpoint for one engine."""
    from tpshard.errors import TpshardError, UnsupportedError
    from tpshard.exporting.checking import verify_engine
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
            merge_engine(out, back, engine=engine, config=source)
        except TpshardError:
            return WRITTEN
        verified = verify_engine(out, against=source, engine=engine, config=source).passed
        return READ if verified and same(tensors_of(back), tensors_of(source)) else DIFFERENT


def tensors_of(directory: Path) -> dict[str, Any]:
    """Every tensor of a checkpoint."""
    from safetensors.torch import load_file

    return {name: value for file in sorted(directory.glob("*.safetensors")) for name, value in load_file(file).items()}


def same(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether tensors of one name are equal, and those of other names have the same rows, each as often.

    A merged checkpoint may spell its experts otherwise than the source, stacked or one by one; values are random, so
    that equal rows are the same ones. What an engine does without, a prediction layer or a head that is the embedding,
    is in the source alone: such rows are not asked for.
    """
    import torch

    def rows(tensors: Mapping[str, Any], names: Iterable[str]) -> Counter[bytes]:
        flat = [tensors[name].contiguous().view(torch.uint8).reshape(-1) for name in names]
        width = [tensors[name].shape[-1] * tensors[name].element_size() for name in names]
        return Counter(
            bytes(row.numpy()) for value, size in zip(flat, width, strict=True) for row in value.reshape(-1, size)
        )

    def is_copy(value: Any) -> bool:
        """Whether it is a tensor that the source stores once under another name."""
        return any(value.shape == other.shape and torch.equal(value, other) for other in wanted.values())

    if any(not torch.equal(found[name], wanted[name]) for name in found.keys() & wanted.keys()):
        return False
    others = sorted(name for name in found.keys() - wanted.keys() if not is_copy(found[name]))
    return rows(found, others) <= rows(wanted, sorted(wanted.keys() - found.keys()))


def row(model_type: str, engines: Iterable[str]) -> list[str]:
    """A row of the page: the model type and its outcome for every engine."""
    from zoo import models

    with tempfile.TemporaryDirectory() as directory:
        try:
            models.write(model_type, Path(directory) / "hf")
        except Exception:  # of transformers
            return [model_type, *[UNMADE for _ in engines]]
        if model_type == "deepseek_v3":  # its release says so, and transformers forgets it
            config = Path(directory) / "hf" / "config.json"
            config.write_text(json.dumps({**json.loads(config.read_text()), "topk_method": "noaux_tc"}))
        return [model_type, *[outcome(Path(directory) / "hf", engine) for engine in engines]]


def page(rows: list[list[str]], engines: Mapping[str, Any]) -> str:
    """The whole page."""
    lines = [
        _HEAD.format(read=READ, written=WRITTEN, none=NONE, unmade=UNMADE),
        "| engine | version | models written | of those read back equal | checked against the program |\n",
        "|---|---|---|---|---|\n",
    ]
    for at, (engine, module) in enumerate(engines.items(), 1):
        column = [cells[at] for cells in rows]
        version, checked = module.VERSIONS[0]
        written = sum(cell not in (NONE, UNMADE) for cell in column)
        lines.append(f"| {engine} | {version} | {written} | {column.count(READ)} | {checked} |\n")
    lines += [f"\n| model | {' | '.join(engines)} |\n", "|---" * (len(engines) + 1) + "|\n"]
    lines += [f"| {' | '.join(cells)} |\n" for cells in rows]
    return "".join(lines)


def rows_of(text: str) -> dict[str, list[str]]:
    """The rows of a page, by model type; the first, ``model``, names the engines."""
    out = {}
    for line in text[text.index("| model |") :].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| "):
            out[cells[0]] = cells[1:]
    return out


if __name__ == "__main__":
    from zoo import models

    from tpshard.exporting.registry import engines as known

    measured = []
    for name in sys.argv[1:] or models.architectures():
        measured.append(row(name, known()))
        print(*measured[-1], sep="\t", flush=True)
    if not sys.argv[1:]:
        PAGE.write_text(page(measured, known()))
