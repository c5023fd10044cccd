"""Level *forward*: the ranks' shards run in lockstep with the original, block by block.

A reference, built from the source's config with the source's tensors, and one participant a rank, built
from the shards' config with only that rank's tensors, run the model's own unmodified code on the same
inputs. Wherever a tensor-parallel group would exchange tensors they meet and are compared.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tpshard.errors import DamagedError, UnsupportedError, UsageError
from tpshard.shards import Shards
from tpshard.source import Source
from tpshard.valued import values_of_source
from tpshard.verdicts import PASSED, LevelVerdict, Measure

from .configs import remote_name, require_positions
from .judge import BASE, FINE, NARROWED
from .memory import peak_bytes, share_one_heap
from .run import LockstepRun, Terms
from .stores import native_dtype
from .twin import tried
from .ways import LOCAL, ZERO_PAD, chosen

LEVEL = "forward"
COMPUTE = {"fp64": torch.float64, "fp32": torch.float32}
DEFAULT_TOKENS = 16


def forward(
    shards: Shards,
    source: Source,
    *,
    compute: str = "fp64",
    mode: str = "auto",
    tokens: int = DEFAULT_TOKENS,
    max_memory: int | None = None,
    device: str = "cpu",
    min_coverage: float | None = None,
    seed: int = 0,
    gates: Callable[[str, float], float] | None = None,
    progress: Callable[[str], None] | None = None,
    trust_remote_code: bool = False,
    text: str | os.PathLike[str] | None = None,
) -> LevelVerdict:
    """Run the level.

    Args:
        compute: ``fp64``, ``fp32``, or ``native`` (the dtype of most of the weights).
        mode: how a rank is run: ``zero-pad``, ``local`` (on the shapes that it stores), or ``auto``: local where
            the twin of this class passes so (see :mod:`.twin`).
        tokens: length of the sequences, at least 2.
        max_memory: bytes of weights and of exchanged tensors to hold at a time; bounds the tiles in which matrices
            are read. What Python and the imports take is outside. By default as little as is fast.
        min_coverage: the part of the parameters that must be reached, 0 to 1. By default all that the original's own
            run reaches; what it does not is named in a note, and compared by bytes and plan.
        gates: given a point and its default gate, the gate to apply.
        progress: called with the name of every point as it is passed.
        text: a file whose first tokens are run in place of made-up ones; perplexities are then reported.

    Raises:
        UsageError: an argument that makes no sense: more tokens than the model has positions for, or less memory
            than the run needs, among others.
        UnsupportedError: the model's class is unknown or fails on its own weights, or there is no such device.
        DamagedError: the shards are not of this source, or config and weights are not of one model.
        StorageError: reading failed.
    """
    started = time.monotonic()
    dtype = dtype_of(compute, source)
    place = device_of(device)
    if tokens < 2:
        raise UsageError(f"{tokens} tokens make no sequence; give at least 2")
    if min_coverage is not None and not 0 <= min_coverage <= 1:
        raise UsageError(f"a coverage of {min_coverage} makes no sense; give a part from 0 to 1")
    require_same_tensors(shards, source)
    require_positions(source.root, shards.manifest, tokens)
    way = chosen(shards, mode, trust_remote_code=trust_remote_code)

    def run(mode: str) -> LevelVerdict:
        return run_ranks(
            shards, source, dtype, mode, device=place, tokens=tokens, max_memory=max_memory,
            min_coverage=min_coverage, seed=seed, gates=gates, progress=progress,
            trust_remote_code=trust_remote_code, text=text,
        )  # fmt: skip

    verdict = run(way.mode)
    doubt = _doubtful(verdict, native_dtype(source)[1] >= 4) if way.mode == LOCAL else None
    if doubt is not None and not tried(shards, trust_remote_code=trust_remote_code).problems[ZERO_PAD]:
        again = run(ZERO_PAD)
        agreed = "agree" if again.verdict == PASSED else "do not agree either"
        verdict = verdict if again.verdict == PASSED else again
        verdict.notes.append(
            f"on local shapes {doubt.point} is off by {doubt.error:.3g}, which float32 inside the model may explain; "
            f"the ranks were run zero-padded as well, where the same float32 kernels run: they {agreed}"
        )
    verdict.notes += way.notes
    own = remote_name(source.root)
    if own and not trust_remote_code:
        verdict.notes.append(
            f"the model's own code ({own} in auto_map) was not run but transformers' own class; --trust-remote-code "
            "runs it"
        )
    verdict.seconds = time.monotonic() - started
    verdict.peak_memory = peak_bytes()
    return verdict


def _doubtful(verdict: LevelVerdict, fine: bool) -> Measure | None:
    """The worst measure of a passed run that passes only by the gate of float32 inside; None where there is none."""
    usual = FINE if fine else BASE[torch.float64]
    wide = [m for m in verdict.measures if m.kind != "logits" and m.gate == NARROWED and m.error > usual]
    return max(wide, key=lambda m: m.error, default=None) if verdict.verdict == PASSED else None


def run_ranks(
    shards: Shards,
    source: Source,
    dtype: torch.dtype,
    mode: str,
    *,
    device: torch.device | None = None,
    tokens: int = DEFAULT_TOKENS,
    max_memory: int | None = None,
    min_coverage: float | None = None,
    seed: int = 0,
    gates: Callable[[str, float], float] | None = None,
    progress: Callable[[str], None] | None = None,
    trust_remote_code: bool = False,
    text: str | os.PathLike[str] | None = None,
) -> LevelVerdict:
    """Run ranks of the same tensors as the source in one way, without asking the twin; see :func:`forward`."""
    share_one_heap()
    path = None if text is None else Path(text)
    terms = Terms(
        dtype, mode, device or torch.device("cpu"), tokens, max_memory, seed, gates, progress, trust_remote_code, path
    )
    run = LockstepRun(LEVEL, shards, source, terms)
    try:
        return run.verdict(min_coverage)
    except UnsupportedError as error:
        if not run.is_pictured:
            raise
        verdict = LockstepRun(LEVEL, shards, source, terms._replace(pictures=False)).verdict(min_coverage)
        verdict.notes.append(f"no image was run: {error}")
        return verdict


def dtype_of(compute: str, source: Source) -> torch.dtype:
    """The dtype that the word means for this source.

    Raises:
        UsageError: it is no such word.
        UnsupportedError: the weights' own dtype is none to compute in.
    """
    if compute == "native":
        return native_dtype(source)[0]
    if compute not in COMPUTE:
        raise UsageError(f"'{compute}' is not a dtype to compute in; choose fp64, fp32 or native")
    return COMPUTE[compute]


def device_of(name: str) -> torch.device:
    """The device of this name.

    Raises:
        UsageError: there is no such kind.
        UnsupportedError: this machine has none.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"'{name}' is not a device; choose cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError("there is no CUDA device, or this torch was built without CUDA; use --device cpu")
    return device


def require_same_tensors(shards: Shards, source: Source) -> None:
    """Raise DamagedError unless the shards hold tensors of the source's names, dtypes and shapes, or its values'."""
    values = values_of_source(source, shards.manifest)
    source = source if values is None else values.checkpoint.source
    mine = {tensor.name: f"{tensor.dtype} {list(tensor.shape)}" for tensor in shards.manifest.tensors}
    theirs = {info.name: f"{info.dtype} {list(info.shape)}" for _, info in source.tensors()}
    odd = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
    if odd:
        raise DamagedError(
            f"the shards are not of this source: {odd[0]} is {mine.get(odd[0], 'absent')} in the shards and "
            f"{theirs.get(odd[0], 'absent')} in the source ({len(odd)} tensors differ); name the checkpoint that they "
            "were cut from"
        )
