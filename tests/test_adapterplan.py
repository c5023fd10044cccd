"""The level plan of an adapter's shards: every fault that is planted in a cut or a note is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from adapterfiles import pairs, write_adapter

from tpshard import split
from tpshard.adapterplan import adapter_plan_verdict, judge_adapter
from tpshard.intervals import Run
from tpshard.manifest import Manifest
from tpshard.partition import interned
from tpshard.plancuts import Planned, planned
from tpshard.shards import read_manifest
from tpshard.table import ADDED_ONCE

Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def manifest(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """An adapter with everything that has a rule of its own, on three ranks."""
    directory = tmp_path_factory.mktemp("plan")
    at = "base_model.model.model.layers.0.self_attn"
    shapes = pairs() | {
        f"{at}.q_proj.lora_magnitude_vector": (32,),
        f"{at}.o_proj.lora_magnitude_vector": (32,),
        f"{at}.k_proj.lora_B.bias": (16,),
        f"{at}.o_proj.lora_B.bias": (32,),
        "base_model.model.lm_head.weight": (53, 32),
    }
    split(write_adapter(directory / "adapter", shapes), directory / "out", 3, base=llama)
    return read_manifest(directory / "out")


def test_a_good_plan_passes(manifest: Manifest) -> None:
    verdict = adapter_plan_verdict(manifest)
    assert verdict.verdict == "passed"
    assert verdict.notes[0] == "judged: 12 pairs of adapter matrices"
    assert verdict.collectives == {"norm_all_reduce": 1}
    assert not list(judge_adapter(planned(manifest), manifest.tp_size))


def _exchanged(tensor: Planned) -> Planned:
    """Ranks 0 and 1 hold each other's part."""
    parts = [interned(p.extent, (p.ranks[1], p.ranks[0], *p.ranks[2:])) for p in tensor.parts]
    return tensor._replace(parts=tuple(parts))


def _whole(tensor: Planned) -> Planned:
    parts = [interned(p.extent, ((Run(0, p.extent),),) * 3) for p in tensor.parts]
    return tensor._replace(parts=tuple(parts))


def _shortened(tensor: Planned) -> Planned:
    """The last rank lacks its last index."""
    cut = [n for n, dim in enumerate(tensor.dims) if dim.axes]
    n = cut[0] if cut else 0
    *others, last = tensor.parts[n].ranks
    *runs, run = last
    short = (*runs, Run(run.start, run.length - 1))
    parts = [*tensor.parts]
    parts[n] = interned(tensor.parts[n].extent, (*others, short))
    return tensor._replace(parts=tuple(parts))


FAULTS: dict[str, Callable[[Planned], Planned]] = {
    "parts exchanged": _exchanged,
    "whole on every rank": _whole,
    "an index lacks": _shortened,
    "another note": lambda tensor: tensor._replace(note="" if tensor.note else ADDED_ONCE),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_in_every_tensor_is_found(fault: str, manifest: Manifest) -> None:
    good = planned(manifest)
    for name, tensor in good.items():
        bad = FAULTS[fault](tensor)
        if bad.parts == tensor.parts and bad.note == tensor.note:
            continue  # whole as it should be, or as long on both ranks
        found = list(judge_adapter(good | {name: bad}, manifest.tp_size))
        if fault == "another note" and ".lora_" not in name:
            continue  # copies have the notes of the base, which its own table answers for
        assert found, name


def test_a_pair_that_lost_its_cut_or_its_half_is_found(manifest: Manifest) -> None:
    at = "base_model.model.model.layers.1.mlp.down_proj"
    good = planned(manifest)
    a, b = good[f"{at}.lora_A.weight"], good[f"{at}.lora_B.weight"]
    bare = _whole(a)._replace(dims=b.dims[1:] * 2, note="")
    alone = {name: tensor for name, tensor in good.items() if name != b.name}
    assert "stands alone" in str(list(judge_adapter(alone, 3)))
    cut = b._replace(dims=(good[f"{Q}.lora_B.weight"].dims[0], b.dims[1]))
    cut = cut._replace(parts=(good[f"{Q}.lora_B.weight"].parts[0], b.parts[1]))
    assert "both cut" in str(list(judge_adapter(good | {b.name: cut}, 3)))
    found = str(list(judge_adapter(good | {a.name: bare, b.name: b._replace(note="")}, 3)))
    assert "is cut" in found, found
