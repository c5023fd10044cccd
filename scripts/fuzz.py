"""Coverage-guided fuzzing of everything that parses a file from a stranger; run by hand.

    pip install atheris
    python scripts/fuzz.py header [CORPUS] [-max_total_time=600] [other options of libFuzzer]
    python scripts/fuzz.py index | config | manifest | pickle | journal

What is raised must be one of tpshard's own errors. Anything else stops the run with the input in ``crash-*``;
``-rss_limit_mb=512 -timeout=5`` make a bomb one as well.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["tpshard"]):
    from tpshard.errors import TpshardError
    from tpshard.header import Read, build_header, read_header
    from tpshard.journal import read_journal
    from tpshard.manifestreader import parsed
    from tpshard.source import open_source
    from tpshard.torchfile import read_torch

_SCRATCH = Path(tempfile.mkdtemp(prefix="tpshard-fuzz-"))


def _reader(data: bytes) -> Read:
    return lambda offset, nbytes: data[offset : offset + nbytes]


def _checkpoint(name: str) -> Callable[[bytes], object]:
    """Opens a checkpoint of two files, of which the file ``name`` is what is tried."""
    for number in (1, 2):
        header = build_header([(f"w{number}", "U8", (4,))], None)
        (_SCRATCH / f"model-0000{number}-of-00002.safetensors").write_bytes(header + b"data")
    (_SCRATCH / "config.json").write_text('{"model_type": "llama"}')
    weight_map = {f"w{number}": f"model-0000{number}-of-00002.safetensors" for number in (1, 2)}
    (_SCRATCH / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    def attempt(data: bytes) -> object:
        (_SCRATCH / name).write_bytes(data)
        return open_source(_SCRATCH)

    return attempt


def _journal(data: bytes) -> None:
    path = _SCRATCH / "journal"
    path.write_bytes(data)
    read_journal(path)


TARGETS: dict[str, Callable[[bytes], object]] = {
    "header": lambda data: read_header(_reader(data), len(data), "x"),
    "index": _checkpoint("model.safetensors.index.json"),
    "config": _checkpoint("config.json"),
    "manifest": lambda data: parsed(data, "x"),
    "pickle": lambda data: read_torch(_reader(data), len(data), "x"),
    "journal": _journal,
}


def main() -> None:
    """Command line entry."""
    if len(sys.argv) < 2 or sys.argv[1] not in TARGETS:
        sys.exit(f"name a target: {', '.join(TARGETS)}")
    target = TARGETS[sys.argv.pop(1)]

    def one(data: bytes) -> None:
        try:
            target(data)
        except TpshardError:
            return

    atheris.Setup(sys.argv, one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
