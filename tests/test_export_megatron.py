"""Megatron's two formats against its rules written out by hand, read by torch's own loaders, and back again."""

from __future__ import annotations

import argparse
import os
import pickle
import shutil
import subprocess
from pathlib import Path
from typing import Any

import enginemodels as models
import numpy as np
import pytest
from enginemodels import EXPERTS, HEADS, KV, LAYERS, SIZE, VOCAB, Tensors, read_all

from tpshard.errors import DamagedError, UnsupportedError
from tpshard.exporting.checking import verify_engine
from tpshard.exporting.distmetadata import read
from tpshard.exporting.export import export
from tpshard.exporting.merging import merge_engine
from tpshard.torchfile import read_torch

torch = pytest.importorskip("torch")

MAKERS: dict[str, Any] = {
    "llama": models.llama,
    "tied": lambda at: models.llama(at, tied=True),
    "biased": lambda at: models.llama(at, model_type="qwen2", bias=True),
    "normed": lambda at: models.llama(at, model_type="qwen3", norms=True),
    "experts": models.qwen3_moe,
    "stacked": lambda at: models.qwen3_moe(at, stacked=True),
    "latent": models.deepseek_v3,
}


def together(directory: Path) -> Tensors:
    return {name: value for file in read_all(directory).values() for name, value in file.items()}


def grouped(source: Tensors, at: str, kind: str, heads: int = HEADS, kv: int = KV) -> np.ndarray:
    """``[q ... q k v]`` of every group, as ``get_query_key_value_tensors`` takes it apart."""
    q, k, v = (source[f"{at}.{name}_proj.{kind}"] for name in "qkv")
    per, rest = heads // kv * SIZE, q.shape[1:]
    return np.concatenate(
        [q.reshape(kv, per, *rest), k.reshape(kv, SIZE, *rest), v.reshape(kv, SIZE, *rest)], 1
    ).reshape(-1, *rest)  # fmt: skip


def vocabulary(value: np.ndarray, tp: int) -> np.ndarray:
    rows = -(-len(value) // (128 * tp)) * 128 * tp
    return np.concatenate([value, np.zeros((rows - len(value), *value.shape[1:]), value.dtype)])


def expert(source: Tensors, at: str, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gate, up and down of an expert, stored by itself or in a bank."""
    if f"{at}.experts.gate_up_proj" in source:
        gate, up = np.split(source[f"{at}.experts.gate_up_proj"][number], 2)
        return gate, up, source[f"{at}.experts.down_proj"][number]
    gate, up, down = (source[f"{at}.experts.{number}.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return gate, up, down


class Rank:
    """What a rank of Megatron holds: TP rank of TP, layers ``[first, last)``, experts ``own``."""

    def __init__(self, source: Tensors, version: str, tp_rank: int, tp: int) -> None:
        self.source, self.version, self.rank, self.tp = source, version, tp_rank, tp
        self.held: Tensors = {}

    def column(self, value: np.ndarray) -> np.ndarray:
        return np.split(value, self.tp, 0)[self.rank]

    def row(self, value: np.ndarray) -> np.ndarray:
        return np.split(value, self.tp, 1)[self.rank]

    def gated(self, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        return np.concatenate([self.column(gate), self.column(up)])

    def layer(self, number: int, local: int, own: range) -> None:
        at, to, source, held = f"model.layers.{number}", f"decoder.layers.{local}", self.source, self.held
        fused, mixed = self.version != "local", f"{at}.mlp.gate.weight" in source
        first, second = source[f"{at}.input_layernorm.weight"], source[f"{at}.post_attention_layernorm.weight"]
        attn = f"{to}.self_attention"
        if f"{at}.self_attn.kv_b_proj.weight" in source:
            held[f"{to}.input_layernorm.weight"] = first
            for name, leaf in (("q_a_proj", "linear_q_down_proj"), ("kv_a_proj_with_mqa", "linear_kv_down_proj")):
                held[f"{attn}.{leaf}.weight"] = source[f"{at}.self_attn.{name}.weight"]
            for name, leaf, norm, alone in (
                ("q_b_proj", "linear_q_up_proj", "q_a_layernorm", "q_layernorm"),
                ("kv_b_proj", "linear_kv_up_proj", "kv_a_layernorm", "kv_layernorm"),
            ):
                held[f"{attn}.{leaf}.weight"] = self.column(source[f"{at}.self_attn.{name}.weight"])
                key = f"{attn}.{leaf}.layer_norm_weight" if fused else f"{attn}.{alone}.weight"
                held[key] = source[f"{at}.self_attn.{norm}.weight"]
        else:
            held[f"{attn}.linear_qkv.layer_norm_weight" if fused else f"{to}.input_layernorm.weight"] = first
            for kind in ("weight", "bias"):
                if f"{at}.self_attn.q_proj.{kind}" in source:
                    held[f"{attn}.linear_qkv.{kind}"] = self.column(grouped(source, f"{at}.self_attn", kind))
            for name in ("q", "k"):
                if f"{at}.self_attn.{name}_norm.weight" in source:
                    held[f"{attn}.{name}_layernorm.weight"] = source[f"{at}.self_attn.{name}_norm.weight"]
        held[f"{attn}.linear_proj.weight"] = self.row(source[f"{at}.self_attn.o_proj.weight"])
        before = "mlp.linear_fc1.layer_norm_weight" if fused and not mixed else "pre_mlp_layernorm.weight"
        held[f"{to}.{before}"] = second
        if not mixed:
            self.matrices(f"{to}.mlp", *(source[f"{at}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down")))
            return
        held[f"{to}.mlp.router.weight"] = source[f"{at}.mlp.gate.weight"]
        if f"{at}.mlp.gate.e_score_correction_bias" in source:
            held[f"{to}.mlp.router.expert_bias"] = source[f"{at}.mlp.gate.e_score_correction_bias"]
            shared = f"{at}.mlp.shared_experts"
            self.matrices(f"{to}.mlp.shared_experts",
                          *(source[f"{shared}.{name}_proj.weight"] for name in ("gate", "up", "down")))  # fmt: skip
        for index, number_of in enumerate(own):
            gate, up, down = expert(source, f"{at}.mlp", number_of)
            if self.version == "te":
                held[f"{to}.mlp.experts.linear_fc1.weight{index}"] = self.gated(gate, up)
                held[f"{to}.mlp.experts.linear_fc2.weight{index}"] = self.row(down)
            else:
                self.matrices(f"{to}.mlp.experts.local_experts.{index}", gate, up, down)

    def matrices(self, to: str, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> None:
        self.held[f"{to}.linear_fc1.weight"] = self.gated(gate, up)
        self.held[f"{to}.linear_fc2.weight"] = self.row(down)

    def ends(self, first: bool, last: bool) -> None:
        embedding = vocabulary(self.source["model.embed_tokens.weight"], self.tp)
        if first:
            self.held["embedding.word_embeddings.weight"] = self.column(embedding)
        if last:
            self.held["decoder.final_layernorm.weight"] = self.source["model.norm.weight"]
            head = self.source.get("lm_head.weight")
            if head is not None or not first:
                self.held["output_layer.weight"] = self.column(
                    embedding if head is None else vocabulary(head, self.tp)
                )


def shared_with(maker: str, *degrees: tuple[int, int, int]) -> list[Any]:
    return [(maker, *degree) for degree in degrees]


CASES = [
    *(case for maker in MAKERS for case in shared_with(maker, (1, 1, 1), (2, 5, 1))),
    ("llama", 4, 1, 1), ("llama", 8, 1, 1),  # more ranks than KV heads: a part of a group each
    ("experts", 2, 1, 5), ("experts", 1, 5, 5), ("stacked", 2, 1, 5), ("latent", 2, 5, 5),
]  # fmt: skip


@pytest.mark.parametrize("version", ["te", "te-sequential", "local"])
@pytest.mark.parametrize(("maker", "tp", "pp", "ep"), CASES)
def test_every_rank_of_the_older_format(tmp_path: Path, maker: str, tp: int, pp: int, ep: int, version: str) -> None:
    source, tensors = MAKERS[maker](tmp_path / "source")
    out = tmp_path / "out"
    export(source, out, f"megatron-legacy@{version}", tp, pp_size=pp, ep_size=ep)
    assert (out / "latest_checkpointed_iteration.txt").read_text() == "release"
    for stage in range(pp):
        for group in range(ep):
            for rank in range(tp):
                names = [f"{rank:02d}", *([f"{stage:03d}"] if pp > 1 else []), *([f"{group:03d}"] if ep > 1 else [])]
                path = out / "release" / f"mp_rank_{'_'.join(names)}" / "model_optim_rng.pt"
                state = torch.load(path, weights_only=False)
                wanted = Rank(tensors, version, rank, tp)
                wanted.ends(stage == 0, stage == pp - 1)
                own = range(group * EXPERTS // ep, (group + 1) * EXPERTS // ep)
                layers = range(stage * LAYERS // pp, (stage + 1) * LAYERS // pp)
                for local, number in enumerate(layers):
                    wanted.layer(number, local, own)
                assert state["model"].keys() == wanted.held.keys()
                for key, value in wanted.held.items():
                    np.testing.assert_array_equal(state["model"][key].numpy(), value, key)
                assert state["args"].tensor_model_parallel_size == tp
                assert state["args"].pipeline_model_parallel_size == pp
    back_and_again(source, tensors, out, tmp_path, "megatron-legacy")


def back_and_again(source: Path, tensors: Tensors, out: Path, tmp_path: Path, engine: str) -> None:
    """The checkpoint again, every byte compared; prediction layers are what Megatron keeps elsewhere."""
    assert verify_engine(out, against=source, engine=engine).passed
    merge_engine(out, tmp_path / "back", engine=engine)
    back = together(tmp_path / "back")
    if any(name.endswith("experts.gate_up_proj") for name in tensors):  # experts come back one by one
        split = {"gate": 0, "up": 1, "down": 2}
        for name, value in back.items():
            at, found, rest = name.partition(".experts.")
            if found:
                number, leaf, _ = rest.split(".")
                np.testing.assert_array_equal(value, expert(tensors, at, int(number))[split[leaf.split("_")[0]]], name)
        return
    kept = {name for name in tensors if not name.startswith(f"model.layers.{LAYERS}.")}
    assert back.keys() == kept
    for name in kept:
        np.testing.assert_array_equal(back[name], tensors[name], name)


def whole(tensors: Tensors, version: str, tp: int) -> Tensors:
    """The global tensors: what one rank would hold, gates and ups whole, experts and like layers stacked."""
    rank = Rank(tensors, "te-sequential", 0, 1)
    rank.ends(True, True)
    layers = [{} for _ in range(LAYERS)]
    for number in range(LAYERS):
        one = Rank(tensors, "te-sequential", 0, 1)
        one.layer(number, 0, range(EXPERTS))
        for key, value in one.held.items():
            layers[number][key.removeprefix("decoder.layers.0.")] = value
        for name in ("linear_fc1", "linear_fc2"):
            banks = [layers[number].pop(f"mlp.experts.local_experts.{n}.{name}.weight", None) for n in range(EXPERTS)]
            if banks[0] is not None:
                layers[number][f"mlp.experts.experts.{name}.weight"] = np.stack(banks)
        if version == "local" and "mlp.router.weight" in layers[number]:
            layers[number]["mlp.linear_fc1.layer_norm_weight"] = layers[number].pop("pre_mlp_layernorm.weight")
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if name in rank.held:
            own = {"embedding.word_embeddings.weight": "model.embed_tokens.weight"}.get(name, "lm_head.weight")
            rank.held[name] = vocabulary(tensors[own], tp)
    if len({frozenset(layer) for layer in layers}) == 1:
        return rank.held | {f"decoder.layers.{key}": np.stack([layer[key] for layer in layers]) for key in layers[0]}
    return rank.held | {f"decoder.layers.{n}.{key}": value for n, layer in enumerate(layers)
                        for key, value in layer.items()}  # fmt: skip


@pytest.mark.filterwarnings("ignore:torch.distributed")
@pytest.mark.parametrize("version", ["te", "local"])
@pytest.mark.parametrize(("maker", "tp", "pp", "ep"), CASES)
def test_global_tensors(tmp_path: Path, maker: str, tp: int, pp: int, ep: int, version: str) -> None:
    """Torch's own loader of distributed checkpoints finds every element of every global tensor."""
    import torch.distributed.checkpoint as dcp

    source, tensors = MAKERS[maker](tmp_path / "source")
    out = tmp_path / "out"
    export(source, out, f"megatron@{version}", tp, pp_size=pp, ep_size=ep)
    folder = out / "release"
    metadata = dcp.FileSystemReader(folder).read_metadata()
    wanted = whole(tensors, version, tp)
    assert metadata.state_dict_metadata.keys() == wanted.keys()
    state = {
        name: torch.full(tuple(held.size), float("nan"), dtype=held.properties.dtype)
        for name, held in metadata.state_dict_metadata.items()
    }
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    for name, value in wanted.items():
        np.testing.assert_array_equal(state[name].numpy(), value, name)
    back_and_again(source, tensors, out, tmp_path, "megatron")


@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_the_metadata_is_what_torch_writes(tmp_path: Path) -> None:
    """Attribute by attribute, for the same tensors; and read without torch it is the same."""
    import torch.distributed.checkpoint as dcp

    source, _ = models.llama(tmp_path / "source")
    export(source, tmp_path / "out", "megatron", 1)
    folder = tmp_path / "out" / "release"
    ours = pickle.loads((folder / ".metadata").read_bytes())
    state = {
        name: torch.zeros(tuple(held.size), dtype=held.properties.dtype)
        for name, held in ours.state_dict_metadata.items()
    }
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    dcp.save(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    theirs = pickle.loads((tmp_path / "theirs" / ".metadata").read_bytes())
    assert vars(ours).keys() == vars(theirs).keys()
    for name, held in theirs.state_dict_metadata.items():
        found = ours.state_dict_metadata[name]
        assert type(found) is type(held) and (found.properties, found.size) == (held.properties, held.size)
        assert vars(found.chunks[0]).keys() == vars(held.chunks[0]).keys()
    one, two = next(iter(ours.storage_data.items())), next(iter(theirs.storage_data.items()))
    assert [type(part) for part in one] == [type(part) for part in two]
    assert set(vars(one[1])) <= set(vars(two[1]))
    plain = read((folder / ".metadata").read_bytes(), ".metadata")
    assert {name: tensor.shape for name, tensor in plain.items()} == {
        name: tuple(held.size) for name, held in ours.state_dict_metadata.items()
    }
    again = read((tmp_path / "theirs" / ".metadata").read_bytes(), ".metadata")
    assert {name: t.shape for name, t in again.items()} == {name: t.shape for name, t in plain.items()}
    common = torch.load(folder / "common.pt", weights_only=False)
    assert isinstance(common["args"], argparse.Namespace) and common["args"].ckpt_format == "torch_dist"


@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_what_torch_itself_wrote_is_read_back(tmp_path: Path) -> None:
    """Global tensors in one chunk a layer, saved by torch; the padding holds numbers, which mean nothing."""
    import torch.distributed.checkpoint as dcp

    source, tensors = models.llama(tmp_path / "source")
    export(source, tmp_path / "out", "megatron", 2, pp_size=5)
    folder = tmp_path / "out" / "release"
    held = pickle.loads((folder / ".metadata").read_bytes()).state_dict_metadata
    state = {name: torch.zeros(tuple(one.size), dtype=one.properties.dtype) for name, one in held.items()}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        state[name][VOCAB:] = 7.0
        assert len(state[name]) > VOCAB
    shutil.rmtree(folder)
    dcp.save({n: t for n, t in state.items() if "layers." not in n}, checkpoint_id=folder, no_dist=True)
    with pytest.raises((UnsupportedError, DamagedError)):  # the layers are missing
        merge_engine(tmp_path / "out", tmp_path / "back", engine="megatron")
    shutil.rmtree(folder)
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    with pytest.raises(UnsupportedError, match="of several layers or experts"):
        merge_engine(tmp_path / "out", tmp_path / "back", engine="megatron")
    assert not (tmp_path / "back").exists()
    assert tensors


@pytest.mark.parametrize("engine", ["megatron", "megatron-legacy"])
@pytest.mark.parametrize(
    ("maker", "degrees", "message"),
    [
        ("experts", {"tp_size": 1, "ep_size": 2}, r"2 do not divide 5; choose --ep 1, 5"),
        ("llama", {"tp_size": 1, "pp_size": 2}, r"5 layers cannot be 2 equal stages; choose --pp 1, 5"),
        ("llama", {"tp_size": 3}, "cannot load this model at TP 3"),
        ("llama", {"tp_size": 1, "ep_size": 2}, "this model has no experts"),
    ],
)
def test_degrees_that_megatron_cannot_load_are_refused(
    tmp_path: Path, engine: str, maker: str, degrees: dict[str, int], message: str
) -> None:
    source, _ = MAKERS[maker](tmp_path / "source")
    with pytest.raises(UnsupportedError, match=message):
        export(source, tmp_path / "out", engine, **degrees)
    assert not (tmp_path / "out").exists()


def test_nothing_of_a_rank_file_is_executed(tmp_path: Path) -> None:
    """What a training program left beside the tensors is skipped, whatever it is."""

    class Hostile:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "executed"),)

    source, tensors = models.llama(tmp_path / "source")
    out = tmp_path / "out"
    export(source, out, "megatron-legacy", 1)
    path = out / "release" / "mp_rank_00" / "model_optim_rng.pt"
    state = torch.load(path, weights_only=False)
    state["model"]["decoder.layers.0.mlp.linear_fc1._extra_state"] = torch.zeros(3, dtype=torch.uint8)
    more = {"optimizer": {"state": [torch.ones(3), {1, 2}]}, "rng_state": [np.arange(3)], "args": Hostile()}
    torch.save({**state, **more}, path)
    merge_engine(out, tmp_path / "back", engine="megatron-legacy")
    assert together(tmp_path / "back").keys() == tensors.keys()
    assert not (tmp_path / "executed").exists()
    raw = path.read_bytes()
    with pytest.raises(UnsupportedError):  # as a checkpoint of weights it is still refused
        read_torch(lambda at, nbytes: raw[at : at + nbytes], len(raw), "pytorch_model.bin")


@pytest.mark.engine
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("model", ["llama", "llama-tied", "qwen3", "qwen3-moe", "mixtral"])
def test_megatron_core_reads_it(tmp_path: Path, model: str, tp: int) -> None:
    """megatron-core's own loader: nothing missing, nothing unexpected, every parameter of every rank equal.

    MEGATRON_PYTHON is an interpreter with megatron-core 0.16.1, MEGATRON_LOAD a script ``load.py DIR TP --hf SOURCE``
    that loads into a fresh GPT of its local layers, and MEGATRON_MODELS a directory of checkpoints ``NAME/hf``.
    """
    python, script, sources = (os.environ.get(f"MEGATRON_{name}") for name in ("PYTHON", "LOAD", "MODELS"))
    if not (python and script and sources):
        pytest.skip("MEGATRON_PYTHON, MEGATRON_LOAD and MEGATRON_MODELS name no installed Megatron")
    source = Path(sources) / model / "hf"
    export(source, tmp_path / "out", "megatron@local", 2)
    command = [python, script, str(tmp_path / "out" / "release"), str(tp), "--hf", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
