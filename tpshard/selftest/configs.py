"""Faults of the config beside the shards, which no weight shows, and of whole files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tpshard import manifest as manifests
from tpshard.shards import Shards

from .catalogue import UNSEALED, Expected, mutant
from .scratch import CONFIG, NotHereError, Scratch, rewrite

NORMS = ("*norm*", "*.ln_*", "*logits", "logits")
ATTENTION = ("*.self_attn*", "*.attention*", "*.attn*", "*.self_attention*")
FEED_FORWARD = ("*.mlp*", "*.fc2", "*.block_sparse_moe*")
ANYWHERE = ("*",)
WHOLE_FILE = ("structure",)


def edited(s: Scratch, edit: Callable[[Any], Any], *keys: str) -> None:
    """Edit every one of these keys of the config that has a value."""
    found = False
    for key in keys:
        if s.config.get(key) is not None:
            s.config[key] = edit(s.config[key])
            found = True
    if not found:
        raise NotHereError(f"the config has no {' or '.join(keys)}")


def shown(*points: str, refused: bool = False) -> Expected:
    """The fault shows at these points, or by a finding about the config itself."""
    return Expected(points, refused=refused, config=True)


@mutant("config: epsilon")
def epsilon(s: Scratch) -> Expected:
    """The norms' epsilon ten times as large"""
    edited(s, lambda value: value * 10, "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
    return shown(*NORMS, *ATTENTION, "*.mixer*")


@mutant("config: rope theta")
def theta(s: Scratch) -> Expected:
    """The rotary base twice as large"""

    def doubled(parameters: Any) -> Any:
        if "rope_theta" in parameters:
            return {**parameters, "rope_theta": parameters["rope_theta"] * 2}
        return {k: doubled(v) if isinstance(v, dict) else v for k, v in parameters.items()}

    edited(s, doubled, "rope_parameters")
    return shown(*ATTENTION)


@mutant("config: activation")
def activation(s: Scratch) -> Expected:
    """Another activation"""
    if s.manifest.origin.family == "gpt_oss":
        raise NotHereError("the model has its own activation, whatever the config says")
    edited(
        s, lambda value: "gelu" if value in ("silu", "relu") else "relu", "hidden_act", "activation_function",
        "hidden_activation", "activation",
    )  # fmt: skip
    return shown(*FEED_FORWARD, "*.mixer*", refused=True)


@mutant("config: KV heads", families=("llama", "qwen2", "starcoder2", "gemma2", "mixtral"))
def kv_count(s: Scratch) -> Expected:
    """One KV head where there are two"""
    edited(s, lambda value: value // 2, "num_key_value_heads")
    return shown(*ATTENTION, refused=True)


@mutant("config: vocabulary off by one")
def vocabulary(s: Scratch) -> Expected:
    """A vocabulary of one row more"""
    edited(s, lambda value: value + 1, "vocab_size")
    return shown("*embed*", "*wte", "lm_head", "embed_out", refused=True)


@mutant("config: layer fewer")
def layers(s: Scratch) -> Expected:
    """One layer fewer than there is"""
    edited(s, lambda value: value - 1, "num_hidden_layers", "n_layer")
    if "layer_types" in s.config:
        s.config["layer_types"] = s.config["layer_types"][:-1]
    return shown(*ANYWHERE, refused=True)


@mutant("config: sliding window")
def window(s: Scratch) -> Expected:
    """A sliding window of half the length"""
    edited(s, lambda value: value // 2, "sliding_window")
    if "sliding_attention" not in s.config.get("layer_types", ()):
        raise NotHereError("no layer has a window")
    return shown(*ATTENTION)


@mutant("config: soft cap")
def softcap(s: Scratch) -> Expected:
    """The attention's soft cap half as large"""
    edited(s, lambda value: value / 2, "attn_logit_softcapping")
    return shown(*ATTENTION)


@mutant("config: attention scale")
def scale(s: Scratch) -> Expected:
    """Another scale of the attention's scores"""
    edited(s, lambda value: value * 2, "query_pre_attn_scalar")
    return shown(*ATTENTION)


@mutant("config: routing")
def routing(s: Scratch) -> Expected:
    """The weights of the chosen experts normalised where they are not, or the other way"""
    edited(s, lambda value: not value, "norm_topk_prob")
    return shown(*FEED_FORWARD)


@mutant("config: routed scale")
def routed_scale(s: Scratch) -> Expected:
    """The experts' sum scaled by another factor"""
    edited(s, lambda value: value * 2, "routed_scaling_factor")
    return shown(*FEED_FORWARD)


# -- whole files ------------------------------------------------------------------------------------


def file_of(s: Scratch, rank: int) -> str:
    return next(file.name for file in s.manifest.files if file.rank == rank)


def replaced(s: Scratch, rank: int, source: Shards | None, other: int) -> None:
    """The file of a rank replaced by one of other shards."""
    if source is None:
        raise NotHereError("there are no such shards")
    path = source.root / next(file.name for file in source.manifest.files if file.rank == other)
    s.afterwards(lambda root: rewrite(root / file_of(s, rank), path.read_bytes()))


@mutant("another run's rank file", kind=UNSEALED)
def another_run(s: Scratch) -> Expected:
    """A rank's file from a run with other weights"""
    replaced(s, 1, s.other, 1)
    return Expected(levels=WHOLE_FILE)


@mutant("rank file of another degree", kind=UNSEALED)
def another_degree(s: Scratch) -> Expected:
    """A rank's file from a split to another degree"""
    replaced(s, 1, s.degree, 0)
    return Expected(levels=WHOLE_FILE)


@mutant("rank files exchanged", kind=UNSEALED)
def files_exchanged(s: Scratch) -> Expected:
    """The files of two ranks under each other's names"""
    replaced(s, 0, s.shards, 1)
    replaced(s, 1, s.shards, 0)
    return Expected(levels=WHOLE_FILE)


@mutant("rank file missing", kind=UNSEALED)
def missing(s: Scratch) -> Expected:
    """The file of a rank missing"""
    s.afterwards(lambda root: os.unlink(root / file_of(s, 1)))
    return Expected(levels=WHOLE_FILE)


@mutant("rank file cut short", kind=UNSEALED)
def cut_short(s: Scratch) -> Expected:
    """The file of a rank 7 bytes too short"""

    def act(root: Path) -> None:
        path = root / file_of(s, 0)
        rewrite(path, path.read_bytes()[:-7])

    s.afterwards(act)
    return Expected(levels=WHOLE_FILE)


@mutant("bit flipped, digest not", kind=UNSEALED)
def bit_rot(s: Scratch) -> Expected:
    """One bit of one rank's file flipped, as on a failing disk"""

    def act(root: Path) -> None:
        path = root / file_of(s, 1)
        data = bytearray(path.read_bytes())
        data[-3] ^= 16
        rewrite(path, bytes(data))

    s.afterwards(act)
    return Expected(levels=("digest", "bytes"))


@mutant("config edited, digest not", kind=UNSEALED)
def config_edited(s: Scratch) -> Expected:
    """The config edited after the split"""

    def act(root: Path) -> None:
        raw = (root / CONFIG).read_bytes()
        rewrite(root / CONFIG, raw.replace(b": true", b": null", 1))

    s.afterwards(act)
    return Expected(levels=("digest",))


@mutant("manifest edited", kind=UNSEALED)
def manifest_edited(s: Scratch) -> Expected:
    """A number of the manifest edited"""

    def act(root: Path) -> None:
        raw = (root / manifests.NAME).read_text()
        rewrite(root / manifests.NAME, raw.replace('"max_file_bytes": 0', '"max_file_bytes": 1').encode())

    s.afterwards(act)
    return Expected(levels=("structure",), refused=True)


@mutant("another run's rank file under this run's header")
def another_run_sealed(s: Scratch) -> Expected:
    """A rank's tensors from a run with other weights, sealed as if they were of this one"""
    if s.other is None:
        raise NotHereError("there is no other run")
    from .scratch import stored

    for tensor in s.manifest.tensors:
        s.put(tensor.name, 1, stored(s.other, tensor.name, 1))
    return Expected(ANYWHERE)
