"""Adapters that PEFT made, cut with their base: a rank that merges its part has its part of the merged model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

peft = pytest.importorskip("peft", reason="the adapters are made by peft")
torch = pytest.importorskip("torch", reason="the adapters are made with torch")

import tiny_models  # noqa: E402
from peft.tuners.lora.layer import Embedding, LoraLayer, ParamWrapper  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from weights import tree  # noqa: E402

from tpshard import UnsupportedError, merge, reshard, split, verify  # noqa: E402

LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
BANKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
# fmt: off
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama-biases", {"target_modules": LLAMA, "bias": "all"}),
    "llama-two-targets": ("llama-wide-heads", {"target_modules": ["q_proj", "v_proj"], "bias": "lora_only"}),
    "llama-embeddings": ("llama-vocab-101", {
        "target_modules": ["embed_tokens", "lm_head", "q_proj", "down_proj"], "use_rslora": True,
        "rank_pattern": {"q_proj": 5}, "alpha_pattern": {"down_proj": 9},
    }),
    "llama-dora": ("llama-biases", {
        "target_modules": [*LLAMA, "embed_tokens"], "use_dora": True, "modules_to_save": ["lm_head"],
    }),
    "llama-lora-bias": ("llama-biases", {"target_modules": LLAMA, "lora_bias": True}),
    "gpt2": ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"]}),
    "gpt2-dora": ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"], "use_dora": True, "fan_in_fan_out": True}),
    "phi3": ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj", "o_proj", "down_proj"]}),
    "bert": ("bert", {"target_modules": ["query", "key", "value", "dense"], "bias": "all"}),
    "gpt_neox": ("gpt_neox", {"target_modules": ["query_key_value", "dense", "dense_h_to_4h"]}),
    "falcon": ("falcon", {"target_modules": ["query_key_value", "dense"]}),
    "deepseek_v3": ("deepseek_v3", {"target_modules": [
        "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "down_proj",
    ]}),
    "mixtral": ("mixtral", {"target_modules": ["q_proj", "o_proj"], "target_parameters": BANKS}),
    "gpt_oss": ("gpt_oss", {"target_modules": ["v_proj"], "target_parameters": BANKS}),  # its down_proj is square
}
# fmt: on
State = dict[str, Any]


class Wrapped(NamedTuple):
    """A module that PEFT wrapped: ``kind`` is linear, conv1d, embedding, or the name of a bank of experts."""

    name: str
    kind: str
    scale: float
    transposed: bool
    experts: int


class Made(NamedTuple):
    """An adapter, its base, and PEFT's own merge of the two."""

    adapter: Path
    base: Path
    merged: Path
    wrapped: list[Wrapped]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """``made("gpt2")``: that adapter, each made once."""
    directory = tmp_path_factory.mktemp("adapters")
    known: dict[str, Made] = {}

    def get(name: str) -> Made:
        if name not in known:
            known[name] = _make(directory / name, *CASES[name])
        return known[name]

    return get


def _make(directory: Path, model_name: str, settings: dict[str, Any]) -> Made:
    found = Made(directory / "adapter", directory / "base", directory / "merged", [])
    tiny_models.build(model_name).save_pretrained(found.base)
    base = tiny_models.build(model_name)
    base.set_experts_implementation("eager")  # the others take no float64
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=6, **settings))
    _randomise(model)
    model.save_pretrained(found.adapter)
    (found.adapter / "tokenizer_config.json").write_text("{}")
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            kind = "conv1d" if getattr(module, "fan_in_fan_out", False) else "linear"
            kind = "embedding" if isinstance(module, Embedding) else kind
            bank = isinstance(module, ParamWrapper)
            swapped = bank and not module._did_swap_in_out_features
            kind, experts = (module.parameter_name, module.num_experts) if bank else (kind, 1)
            found.wrapped.append(Wrapped(name, kind, module.scaling["default"], swapped, experts))
    with torch.no_grad():
        ids = torch.arange(12).reshape(1, -1)
        adapted = model(ids).logits
        merged = model.merge_and_unload()
        torch.testing.assert_close(merged(ids).logits, adapted, atol=1e-8, rtol=1e-8)
    merged.save_pretrained(found.merged)
    return found


def _randomise(model: Any) -> None:
    """Every parameter of the adapter is random: fresh ones are zero or the base's own, and would hide a wrong cut."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) / 4)


def _ranks(directory: Path) -> list[State]:
    return [load_file(path) for path in sorted(directory.glob("model-tp-*.safetensors"))]


# --- what a rank makes of its part -----------------------------------------------------------------------------------


def _merged_by_ranks(base: list[State], adapter: list[State], whole: State, wrapped: list[Wrapped]) -> list[State]:
    """The ranks of the base, each with its own part of the adapter merged in; for DoRA's norms they sum squares."""
    out = [dict(rank) for rank in base]
    for of_rank, parts in zip(out, adapter, strict=True):
        for name, value in parts.items():
            plain = _plain(name)
            if ".lora_" not in name:
                of_rank[plain] = value  # a copy: biases, modules_to_save
    for module in wrapped:
        pairs = [_product(parts, module) for parts in adapter]
        weight = f"{_plain(module.name)}.weight"
        if module.kind in ("gate_up_proj", "down_proj"):
            for of_rank, delta in zip(out, pairs, strict=True):
                _add_to_bank(of_rank, module, delta)
            continue
        for of_rank, parts, delta in zip(out, adapter, pairs, strict=True):
            of_rank[weight] = of_rank[weight] + (delta.T if module.kind in ("conv1d", "embedding") else delta)
            bias = parts.get(f"{module.name}.lora_B.bias")
            if bias is not None:
                of_rank[f"{_plain(module.name)}.bias"] += module.scale * bias
        if f"{module.name}.lora_magnitude_vector" in whole:
            _scale_rows(out, adapter, whole, module, weight)
    return out


def _plain(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".base_layer", "")


def _product(parts: State, module: Wrapped) -> Any:
    if module.kind == "embedding":
        return module.scale * parts[f"{module.name}.lora_embedding_B"] @ parts[f"{module.name}.lora_embedding_A"]
    first, second = parts[f"{module.name}.lora_A.weight"], parts[f"{module.name}.lora_B.weight"]
    if module.kind in ("linear", "conv1d"):
        return module.scale * second @ first
    first = first.reshape(module.experts, -1, first.shape[-1])
    second = second.reshape(second.shape[0], -1, module.experts)
    into = "e i o" if module.transposed else "e o i"
    return module.scale * torch.einsum(f"o r e, e r i -> {into}", second, first)


def _add_to_bank(of_rank: State, module: Wrapped, delta: Any) -> None:
    """Add to a bank of experts as the base's files have it: stacked, or every expert by itself."""
    bank = f"{_plain(module.name)}.{module.kind}"
    if bank in of_rank:
        of_rank[bank] = of_rank[bank] + delta
        return
    mixtral, usual = (bank.split(".mlp.")[0] + ".block_sparse_moe.experts", _plain(module.name))
    for expert, part in enumerate(delta):
        halves = part.chunk(2) if module.kind == "gate_up_proj" else (part,)
        names = (("w1", "gate_proj"), ("w3", "up_proj")) if len(halves) == 2 else (("w2", "down_proj"),)
        for (theirs, own), value in zip(names, halves, strict=True):
            apart = f"{mixtral}.{expert}.{theirs}.weight", f"{usual}.{expert}.{own}.weight"
            of_rank[next(name for name in apart if name in of_rank)] += value


def _scale_rows(out: list[State], adapter: list[State], whole: State, module: Wrapped, weight: str) -> None:
    """DoRA: every row of the matrix gets the length that the magnitude says."""
    first = f"{module.name}.lora_{'embedding_A' if module.kind == 'embedding' else 'A.weight'}"
    turned = module.kind in ("conv1d", "embedding")
    rows = [of_rank[weight].T if turned else of_rank[weight] for of_rank in out]
    squares = [row.square().sum(1) for row in rows]
    summed = adapter[0][first].shape != whole[first].shape
    for number, (of_rank, row) in enumerate(zip(out, rows, strict=True)):
        norm = (sum(squares) if summed else squares[number]).sqrt()
        scaled = row * (adapter[number][f"{module.name}.lora_magnitude_vector"] / norm)[:, None]
        of_rank[weight] = scaled.T if turned else scaled


@pytest.mark.parametrize("tp_size", [2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_a_rank_merges_its_part_to_its_part_of_the_merged_model(
    name: str, tp_size: int, made: Callable[[str], Made], tmp_path: Path
) -> None:
    case = made(name)
    report = split(case.adapter, tmp_path / "adapter", tp_size, base=case.base)
    assert not report.copied_whole
    for part in ("base", "merged"):
        split(getattr(case, part), tmp_path / part, tp_size)
    whole = load_file(case.adapter / "adapter_model.safetensors")
    adapter = _ranks(tmp_path / "adapter")
    assert all(rank.keys() == whole.keys() for rank in adapter)
    mine = _merged_by_ranks(_ranks(tmp_path / "base"), adapter, whole, case.wrapped)
    for rank, (found, expected) in enumerate(zip(mine, _ranks(tmp_path / "merged"), strict=True)):
        assert found.keys() - expected.keys() <= {"cls.predictions.decoder.bias"}  # BERT's files have one of its names
        for tensor, value in expected.items():
            torch.testing.assert_close(
                found[tensor], value, atol=1e-9, rtol=1e-9, msg=lambda text, at=(rank, tensor): f"{at}: {text}"
            )


@pytest.mark.parametrize("name", CASES)
def test_every_pair_is_cut_and_only_once(name: str, made: Callable[[str], Made], tmp_path: Path) -> None:
    case = made(name)
    split(case.adapter, tmp_path / "adapter", 2, base=case.base)
    whole, rank = load_file(case.adapter / "adapter_model.safetensors"), _ranks(tmp_path / "adapter")[0]
    kept_whole = ("q_a_proj", "kv_a_proj", "pooler", ".transform.")  # so are these matrices of the base
    for module in case.wrapped:
        a, b = ("lora_embedding_A", "lora_embedding_B") if module.kind == "embedding" else ("lora_A.weight",) * 2
        b = b.replace("lora_A", "lora_B")
        smaller = [rank[n].shape != whole[n].shape for n in (f"{module.name}.{a}", f"{module.name}.{b}")]
        assert sum(smaller) == (0 if any(part in module.name for part in kept_whole) else 1), module.name


# --- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_merge_gives_back_the_adapter_and_reshard_the_direct_split(
    name: str, made: Callable[[str], Made], tmp_path: Path
) -> None:
    case = made(name)
    for tp_size in (1, 3, 4):
        split(case.adapter, tmp_path / str(tp_size), tp_size, base=case.base)
        report = verify(tmp_path / str(tp_size), against=case.adapter)
        assert report.passed, report.findings
        assert report.levels == ["structure", "digest", "bytes", "plan"]
        merge(tmp_path / str(tp_size), tmp_path / f"merged-{tp_size}")
        assert tree(tmp_path / f"merged-{tp_size}") == tree(case.adapter)
    reshard(tmp_path / "4", tmp_path / "4-3", 3)
    assert tree(tmp_path / "4-3") == tree(tmp_path / "3")
    reshard(tmp_path / "3", tmp_path / "3-1", 1)
    assert tree(tmp_path / "3-1") == tree(tmp_path / "1")


def test_forms_of_the_base_give_the_same_files(made: Callable[[str], Made], tmp_path: Path) -> None:
    for name in ("llama", "mixtral", "gpt2"):
        case, out = made(name), tmp_path / name
        (out / "config").mkdir(parents=True)
        split(case.adapter, out / "direct", 3, base=case.base)
        (out / "config" / "config.json").write_bytes((case.base / "config.json").read_bytes())
        split(case.base, out / "shards", 4)
        for form in ("config", "shards"):
            split(case.adapter, out / f"by-{form}", 3, base=out / form)
            assert tree(out / f"by-{form}") == tree(out / "direct"), form


def test_a_pickled_adapter(made: Callable[[str], Made], tmp_path: Path) -> None:
    case, pickled = made("llama"), tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "adapter_config.json").write_bytes((case.adapter / "adapter_config.json").read_bytes())
    torch.save(load_file(case.adapter / "adapter_model.safetensors"), pickled / "adapter_model.bin")
    split(pickled, tmp_path / "two", 2, base=case.base)
    split(case.adapter, tmp_path / "direct", 2, base=case.base)
    for mine, direct in zip(_ranks(tmp_path / "two"), _ranks(tmp_path / "direct"), strict=True):
        assert mine.keys() == direct.keys()
        assert all(torch.equal(mine[name], direct[name]) for name in direct)
    merge(tmp_path / "two", tmp_path / "merged")
    assert tree(tmp_path / "merged") == tree(pickled)


def test_rows_of_single_tokens_and_a_tied_head(tmp_path: Path) -> None:
    base = tiny_models.build("llama-wide-heads")
    base.save_pretrained(tmp_path / "base")
    settings = {"target_modules": ["lm_head", "o_proj"], "trainable_token_indices": {"embed_tokens": [1, 5, 40]}}
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, **settings))
    _randomise(model)
    model.save_pretrained(tmp_path / "adapter")
    split(tmp_path / "adapter", tmp_path / "three", 3, base=tmp_path / "base")
    whole = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    parts = _ranks(tmp_path / "three")
    tokens = next(name for name in whole if "token_adapter" in name)
    head = "base_model.model.lm_head.lora_B.weight"
    assert all(torch.equal(part[tokens], whole[tokens]) for part in parts)
    assert torch.equal(torch.cat([part[head] for part in parts]), whole[head])
    assert verify(tmp_path / "three", against=tmp_path / "adapter").passed


def test_other_kinds_of_adapters_are_refused_by_name(tmp_path: Path) -> None:
    kinds = {
        "LOHA": peft.LoHaConfig(target_modules=["q_proj"]),
        "IA3": peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]),
        "PREFIX_TUNING": peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        "ADALORA": peft.AdaLoraConfig(target_modules=["q_proj"], total_step=9),
        "VERA": peft.VeraConfig(target_modules=["q_proj"]),
    }
    tiny_models.build("llama").save_pretrained(tmp_path / "base")
    for kind, config in kinds.items():
        peft.get_peft_model(tiny_models.build("llama"), config).save_pretrained(tmp_path / kind)
        with pytest.raises(UnsupportedError, match=kind):
            split(tmp_path / kind, tmp_path / "out", 2, base=tmp_path / "base")
    assert not (tmp_path / "out").exists()
