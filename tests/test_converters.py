"""Every family's table: complete, true to the model's own code, and literally the row ranges of known reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import certificate  # noqa: E402
import tiny_models  # noqa: E402

from tpshard import roles  # noqa: E402
from tpshard.axes import Dim, Heads, Units  # noqa: E402
from tpshard.errors import DamagedError, TpshardError, UnsupportedError  # noqa: E402
from tpshard.partition import partition  # noqa: E402
from tpshard.registry import table_for  # noqa: E402
from tpshard.table import ADDED_ONCE, NEEDS_SUM, Table, rule_template  # noqa: E402

Saved = tuple[dict[str, Any], dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """``saved(name)`` -> the config and the tensors of a tiny checkpoint, as files hold them."""
    done: dict[str, Saved] = {}

    def get(name: str) -> Saved:
        if name not in done:
            directory = tmp_path_factory.mktemp("tiny") / name
            tensors = tiny_models.write(name, directory)
            done[name] = json.loads(Path(directory, "config.json").read_text()), tensors
        config, tensors = done[name]
        return dict(config), dict(tensors)

    return get


def differences(name: str, table: Table, tensors: dict[str, torch.Tensor], tp_size: int) -> dict[str, float]:
    config = tiny_models.MODELS[name]()
    return certificate.differences(config, tiny_models.architecture(config), table, tensors, tp_size)


@pytest.mark.parametrize("tp_size", [2, 3, 4])
@pytest.mark.parametrize("name", tiny_models.MODELS)
def test_no_rank_needs_what_it_does_not_hold(name: str, tp_size: int, saved: Any) -> None:
    config, tensors = saved(name)
    found = differences(name, table_for(config), tensors, tp_size)
    assert len(found) >= 2 + 1 + 1  # at least the embedding, two blocks and the logits were looked at
    wrong = {module: gap for module, gap in found.items() if not gap < certificate.TOLERANCE}
    assert not wrong


HEADS, KV = Heads("heads", 4, 4), Heads("heads", 8, 2)
WRONG: dict[str, tuple[str, str, int, Dim]] = {
    "blocks for per-head": ("gpt_neox", "query_key_value.", 0, HEADS.query(8) + HEADS.kv(8) * 2),
    "per-head for blocks": ("gpt2", "c_attn.weight", 1, HEADS.grouped(8, 8, 8)),
    "blocks for per-group": ("falcon", "query_key_value.", 0, KV.query(8) + KV.kv(8) * 2),
    "halves for pairs": ("gpt_oss", "gate_up_proj", 2, Units("expert_ffn", 32).each() * 2),
    "straight for gate, up": ("phi3", "gate_up_proj", 0, Units("ffn", 64).each(2)),
    "key block, value block": ("deepseek_v3", "kv_b_proj", 0, Units("heads", 4).each(8) * 2),
    "straight for five parts": ("mamba2", "in_proj", 0, Units("heads", 8).each(21)),
    "square read the other way": ("gpt2", "attn.c_proj.weight", 1, HEADS.query(8)),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_order_is_seen(wrong: str, saved: Any) -> None:
    """The certificate can fail: right shapes in a wrong order are what bytes cannot see."""
    name, part, axis, dim = WRONG[wrong]
    config, tensors = saved(name)
    table = table_for(config)
    for at, rule in enumerate(table.rules):
        if part in rule.name and len(rule.dims) > axis:
            plain = [d.extent if isinstance(d, Dim) and wrong.startswith("square") else d for d in rule.dims]
            table.rules[at] = rule._replace(dims=(*plain[:axis], dim, *plain[axis + 1 :]))
    assert max(differences(name, table, tensors, 2).values()) > 0.01


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("opt", "fc2"),
        ("gpt2", "attn.c_proj"),
        ("gpt_oss", "o_proj"),
        ("gpt_oss", "down_proj_bias"),
        ("mamba2-one-group", "out_proj"),
    ],
)
def test_a_bias_on_every_rank_counts_too_often(name: str, part: str, saved: Any) -> None:
    config, tensors = saved(name)
    table = table_for(config)
    once = [rule for rule in table.rules if part in rule.name and rule.note == ADDED_ONCE]
    assert once
    table.rules[:] = [rule._replace(note="") if rule in once else rule for rule in table.rules]
    assert max(differences(name, table, tensors, 2).values()) > 0.01


# Inclusive ranges as the reports H07 to H16 give them, rank by rank: model, tensor, axis, degree -> ranges.
RANGES: list[tuple[str, str, int, list[str]]] = [
    ("gpt_neox", "gpt_neox.layers.0.attention.query_key_value.weight", 0, ["0-47", "48-95"]),
    ("gpt_neox", "gpt_neox.layers.0.attention.query_key_value.bias", 0, ["0-47", "48-95"]),
    ("gpt_neox", "gpt_neox.layers.0.attention.dense.weight", 1, ["0-15", "16-31"]),
    ("falcon", "transformer.h.0.self_attention.query_key_value.weight", 0, ["0-47", "48-95"]),
    (
        "falcon",
        "transformer.h.0.self_attention.query_key_value.weight",
        0,
        ["0-15 32-47", "16-47", "48-63 80-95", "64-95"],
    ),
    ("gpt2", "transformer.h.0.attn.c_attn.weight", 1, ["0-15 32-47 64-79", "16-31 48-63 80-95"]),
    ("gpt2", "transformer.h.0.attn.c_attn.bias", 0, ["0-15 32-47 64-79", "16-31 48-63 80-95"]),
    ("gpt2", "transformer.h.0.attn.c_proj.weight", 0, ["0-15", "16-31"]),
    ("gpt2", "transformer.h.0.mlp.c_fc.weight", 1, ["0-63", "64-127"]),
    ("gpt2", "transformer.h.0.mlp.c_proj.weight", 0, ["0-63", "64-127"]),
    ("gpt2", "transformer.wpe.weight", 0, ["0-63", "0-63"]),
    ("phi3", "model.layers.0.self_attn.qkv_proj.weight", 0, ["0-15 32-39 48-55", "16-31 40-47 56-63"]),
    (
        "phi3",
        "model.layers.0.self_attn.qkv_proj.weight",
        0,
        ["0-7 32-39 48-55", "8-15 32-39 48-55", "16-23 40-47 56-63", "24-31 40-47 56-63"],
    ),
    ("phi3", "model.layers.0.mlp.gate_up_proj.weight", 0, ["0-31 64-95", "32-63 96-127"]),
    ("opt", "model.decoder.embed_positions.weight", 0, ["0-65", "0-65"]),
    ("deepseek_v3", "model.layers.1.self_attn.q_a_proj.weight", 0, ["0-15", "0-15"]),
    ("deepseek_v3", "model.layers.1.self_attn.kv_a_proj_with_mqa.weight", 0, ["0-11", "0-11"]),
    ("deepseek_v3", "model.layers.1.mlp.gate.weight", 0, ["0-11", "0-11"]),
    ("deepseek_v3", "model.layers.1.mlp.gate.e_score_correction_bias", 0, ["0-11", "0-11"]),
    ("deepseek_v3", "model.layers.1.self_attn.q_b_proj.weight", 0, ["0-23", "24-47"]),
    ("deepseek_v3", "model.layers.1.self_attn.kv_b_proj.weight", 0, ["0-31", "32-63"]),
    ("deepseek_v3", "model.layers.1.self_attn.o_proj.weight", 1, ["0-15", "16-31"]),
    ("deepseek_v3", "model.layers.1.mlp.experts.11.gate_proj.weight", 0, ["0-7", "8-15"]),
    ("deepseek_v3", "model.layers.1.mlp.experts.11.down_proj.weight", 1, ["0-7", "8-15"]),
    ("deepseek_v3", "model.layers.1.mlp.shared_experts.up_proj.weight", 0, ["0-7", "8-15"]),
    ("olmo2", "model.layers.0.self_attn.q_norm.weight", 0, ["0-15", "16-31"]),
    ("olmo2", "model.layers.0.self_attn.k_norm.weight", 0, ["0-15", "16-31"]),
    ("olmo2", "model.layers.0.post_attention_layernorm.weight", 0, ["0-31", "0-31"]),
    ("qwen3_moe", "model.layers.1.mlp.experts.2.up_proj.weight", 0, ["0-7", "8-15"]),
    ("gpt_oss", "model.layers.0.self_attn.sinks", 0, ["0-1", "2-3"]),
    ("gpt_oss", "model.layers.0.mlp.experts.gate_up_proj", 2, ["0-31", "32-63"]),
    ("gpt_oss", "model.layers.0.mlp.experts.gate_up_proj_bias", 1, ["0-31", "32-63"]),
    ("gpt_oss", "model.layers.0.mlp.experts.down_proj", 1, ["0-15", "16-31"]),
    ("gpt_oss", "model.layers.0.mlp.experts.down_proj_bias", 1, ["0-31", "0-31"]),
    (
        "mamba2",
        "backbone.layers.0.mixer.in_proj.weight",
        0,
        ["0-31 64-95 128-135 144-151 160-163", "32-63 96-127 136-143 152-159 164-167"],
    ),
    ("mamba2", "backbone.layers.0.mixer.conv1d.weight", 0, ["0-31 64-71 80-87", "32-63 72-79 88-95"]),
    ("mamba2", "backbone.layers.0.mixer.conv1d.bias", 0, ["0-31 64-71 80-87", "32-63 72-79 88-95"]),
    ("mamba2", "backbone.layers.0.mixer.A_log", 0, ["0-3", "4-7"]),
    ("mamba2", "backbone.layers.0.mixer.norm.weight", 0, ["0-31", "32-63"]),
    ("mamba2", "backbone.layers.0.mixer.out_proj.weight", 1, ["0-31", "32-63"]),
]


@pytest.mark.parametrize(("name", "tensor", "axis", "ranks"), RANGES)
def test_rows_of_reports(name: str, tensor: str, axis: int, ranks: list[str], saved: Any) -> None:
    config, tensors = saved(name)
    dim = certificate.matched(table_for(config), tensors).dims_of(tensor)[axis]
    found = [
        " ".join(f"{start}-{start + length - 1}" for start, length in runs) for runs in partition(dim, len(ranks)).ranks
    ]
    assert found == ranks


@pytest.mark.parametrize(("name", "tensor"), [("olmo2", "q_norm"), ("olmo2", "k_norm"), ("mamba2", "mixer.norm")])
def test_a_norm_over_what_is_cut_needs_a_sum(name: str, tensor: str, saved: Any) -> None:
    config, tensors = saved(name)
    rules = certificate.matched(table_for(config), tensors).rules
    marked = {key for key, rule in rules.items() if rule.note == NEEDS_SUM}
    assert {key for key in rules if tensor in key} <= marked
    assert not any(tensor not in key for key in marked if "k_norm" not in key and "q_norm" not in key)


def stack_experts(tensors: dict[str, torch.Tensor], parts: tuple[str, str, str]) -> None:
    """Replace separate experts by the stacked form, in numeric order, under transformers' names."""
    for layer in (0, 1):
        block = next(
            (key.split("experts.0.")[0] for key in tensors if f"layers.{layer}." in key and ".experts.0." in key), None
        )
        if block is None:
            continue
        count = sum(key.startswith(f"{block}experts.") for key in tensors) // 3
        gate, up, down = (
            torch.stack([tensors.pop(f"{block}experts.{expert}.{part}.weight") for expert in range(count)])
            for part in parts
        )
        tensors[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = torch.cat([gate, up], 1)
        tensors[f"model.layers.{layer}.mlp.experts.down_proj"] = down
        tensors[f"model.layers.{layer}.mlp.gate.weight"] = tensors.pop(f"{block}gate.weight")


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3"])
def test_stacked_experts(name: str, saved: Any) -> None:
    config, tensors = saved(name)
    stack_experts(tensors, ("w1", "w3", "w2") if name == "mixtral" else ("gate_proj", "up_proj", "down_proj"))
    table = table_for(config)
    roles = {rule.role for rule in certificate.matched(table, tensors).rules.values()}
    assert "expert_gate_up" in roles and "expert_gate" not in roles
    assert max(differences(name, table, tensors, 3).values()) < certificate.TOLERANCE
    if name == "qwen3_moe":
        ranks = partition(certificate.matched(table, tensors).dims_of("model.layers.1.mlp.experts.gate_up_proj")[1], 2)
        assert ranks.ranks == (((0, 8), (16, 8)), ((8, 8), (24, 8)))


def refused(config: dict[str, Any], tensors: dict[str, torch.Tensor], error: type[Exception], *words: str) -> None:
    with pytest.raises(error) as caught:
        certificate.matched(table_for(config), tensors)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("name", tiny_models.MODELS)
def test_any_missing_tensor_is_refused(name: str, saved: Any) -> None:
    config, tensors = saved(name)
    rules = certificate.matched(table_for(config), tensors).rules
    for key, rule in rules.items():
        if not rule.optional:
            with pytest.raises(DamagedError) as caught:
                certificate.matched(table_for(config), {k: v for k, v in tensors.items() if k != key})
            # A layer whose only router is gone is named by its number.
            assert f"{key} is missing" in str(caught.value) or "layer 1 holds none of" in str(caught.value)


@pytest.mark.parametrize("name", tiny_models.MODELS)
def test_any_wrong_shape_is_refused(name: str, saved: Any) -> None:
    config, tensors = saved(name)
    rules = certificate.matched(table_for(config), tensors).rules
    for key, value in tensors.items():
        for axis, dim in enumerate(rules[key].dims):
            if dim is not None:
                longer = torch.cat([value, value.narrow(axis, 0, 1)], axis)
                refused(config, tensors | {key: longer}, DamagedError, key, str(longer.shape[axis]))


@pytest.mark.parametrize("name", tiny_models.MODELS)
def test_any_unknown_tensor_is_refused(name: str, saved: Any) -> None:
    config, tensors = saved(name)
    prefix = next(iter(tensors)).split(".0.")[0]
    for key in ("new.weight", f"{prefix}.0.new_proj.weight"):
        refused(config, tensors | {key: torch.zeros(2)}, UnsupportedError, key)


def test_optional_tensors_are_few(saved: Any) -> None:
    """What may be missing without a word: tied heads, old buffers, images, copies, an encoder's pooler and task heads,
    and biases that no config promises.
    """
    anywhere = {"buffer", "prediction_head", "prediction_embed", "head"}
    for name in tiny_models.MODELS:
        config, _ = saved(name)
        for rule in table_for(config).rules:
            if rule.optional and rule.role not in anywhere and "vision_tower" not in rule.name:
                heads = ("@pooler.", "cls.", "classifier.", "qa_outputs.")
                family = {"gemma3": ("multi_modal",), "deepseek_v2": ("router_bias",), "bert": heads}
                known = family.get(config["model_type"], ("_proj.bias",))
                assert any(part in rule.name or part == rule.role for part in known), rule


@pytest.mark.parametrize("name", ["llama-biases", "qwen2"])
def test_promised_biases_are_demanded(name: str, saved: Any) -> None:
    config, _ = saved(name)
    biases = {
        rule.name.split(".")[-2]: rule.optional for rule in table_for(config).rules if rule.name.endswith(".bias")
    }
    demanded = {key for key, optional in biases.items() if not optional}
    every = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert demanded == (every if name == "llama-biases" else {"q_proj", "k_proj", "v_proj"})


def test_experts_of_a_layer_gone(saved: Any) -> None:
    config, tensors = saved("qwen3_moe")
    refused(config, {k: v for k, v in tensors.items() if ".layers.1.mlp.experts." not in k}, DamagedError, "layer 1")
    refused(config, {k: v for k, v in tensors.items() if ".layers.1.mlp.gate." not in k}, DamagedError, "layers.1.mlp")
    refused(config, {k: v for k, v in tensors.items() if ".layers.0.mlp." not in k}, DamagedError, "layers.0.mlp")
    refused(config, {k: v for k, v in tensors.items() if ".experts.11." not in k}, DamagedError, "experts.11", "12")
    refused(config | {"num_experts": 11}, tensors, DamagedError, "11")


def test_layers_that_the_config_does_not_promise(saved: Any) -> None:
    config, tensors = saved("llama")
    refused(config | {"num_hidden_layers": 1}, tensors, DamagedError, "layers.1.", "only 1 layer")
    refused(config | {"num_hidden_layers": 3}, tensors, DamagedError, "layers.2.")


def test_head_size_missing_from_the_config(saved: Any) -> None:
    config, tensors = saved("llama-wide-heads")
    del config["head_dim"]
    refused(config, tensors, DamagedError, "self_attn", "head_dim")


def test_head_size_that_cannot_be_worked_out(saved: Any) -> None:
    config, _ = saved("llama")
    del config["head_dim"]
    with pytest.raises(DamagedError, match="5 heads do not divide the hidden size 48"):
        table_for(config | {"num_attention_heads": 5, "num_key_value_heads": 1})


def test_prediction_layers_of_deepseek(saved: Any) -> None:
    """The names of the published V3: layer 61 of 61 layers, with its own copies of embedding and head."""
    config, tensors = saved("deepseek_v3")
    extra = {k.replace("layers.1.", "layers.2."): v for k, v in tensors.items() if "layers.1." in k}
    norm, head = tensors["model.norm.weight"], tensors["lm_head.weight"]
    extra |= {f"model.layers.2.{n}.weight": norm for n in ("enorm", "hnorm", "shared_head.norm")}
    extra |= {"model.layers.2.eh_proj.weight": torch.zeros(32, 64), "model.layers.2.shared_head.head.weight": head}
    extra |= {"model.layers.2.embed_tokens.weight": tensors["model.embed_tokens.weight"]}
    config["num_nextn_predict_layers"] = 1
    assert len(certificate.matched(table_for(config), tensors | extra).rules) == len(tensors) + len(extra)
    assert len(certificate.matched(table_for(config), tensors).rules) == len(tensors)
    config["num_nextn_predict_layers"] = 0
    refused(config, tensors | extra, DamagedError, "layers.2.")


@pytest.mark.parametrize(
    ("name", "buffers"),
    [
        ("gpt2", {"attn.bias": (1, 1, 64, 64), "attn.masked_bias": ()}),
        (
            "gpt_neox",
            {"attention.bias": (1, 1, 64, 64), "attention.masked_bias": (), "attention.rotary_emb.inv_freq": (4,)},
        ),
        ("llama", {"self_attn.rotary_emb.inv_freq": (4,)}),
    ],
)
def test_buffers_of_old_releases_stay_whole(name: str, buffers: dict[str, tuple[int, ...]], saved: Any) -> None:
    config, tensors = saved(name)
    layer = next(key for key in tensors if ".0." in key).split(".0.")[0]
    old = {f"{layer}.{at}.{key}": torch.zeros(shape) for at in (0, 1) for key, shape in buffers.items()}
    found = certificate.matched(table_for(config), tensors | old)
    for key, value in old.items():
        assert found.rule_of(key).role == "buffer"
        assert certificate.held(found, key, value.shape, 2, 1).all()


@pytest.mark.parametrize("name", ["gpt2", "llama", "opt", "gpt_neox", "falcon", "mamba2", "gemma3"])
def test_prefixes(name: str, saved: Any) -> None:
    """Base models are saved without the outermost part of the name, and read alike."""
    config, tensors = saved(name)
    table = table_for(config)
    for prefix in table.prefixes:
        own = next(p for p in table.prefixes if any(key.startswith(p) for key in tensors))
        other = {prefix + k.removeprefix(own) if k.startswith(own) else k: v for k, v in tensors.items()}
        assert len(certificate.matched(table, other).rules) == len(tensors)


def test_spellings_of_falcon(saved: Any) -> None:
    config, _ = saved("falcon")
    rules = table_for(config).rules
    for old, new in (
        ("num_kv_heads", "n_head_kv"),
        ("num_attention_heads", "n_head"),
        ("num_hidden_layers", "n_layer"),
    ):
        config[new] = config.pop(old)
        assert table_for(config).rules == rules


def test_gemma3_as_published() -> None:
    """The published 4B leaves out what transformers' own class fills in."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34}
    vision = {
        "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "model_type": "siglip_vision_model",
        "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
    }  # fmt: skip
    table = table_for({"model_type": "gemma3", "text_config": text, "vision_config": vision})
    shapes = {rule.name: [d.extent if isinstance(d, Dim) else d for d in rule.dims] for rule in table.rules}
    assert shapes["@layers.{layer}.self_attn.q_proj.weight"] == [2048, 2560]
    assert shapes["@layers.{layer}.self_attn.k_proj.weight"] == [1024, 2560]
    assert shapes["@embed_tokens.weight"] == [262208, 2560]


def test_a_composite_config_without_its_text_part() -> None:
    with pytest.raises(DamagedError, match="text_config"):
        table_for({"model_type": "gemma3"})


def test_no_two_rules_know_one_tensor(saved: Any) -> None:
    for name in tiny_models.MODELS:
        table = table_for(saved(name)[0])
        for prefix in table.prefixes:
            templates = [rule_template(rule.name.replace("@", prefix, 1)) for rule in table.rules]
            assert len(set(templates)) == len(templates)


def test_gemma3s_tower_is_cut_and_its_projector_whole(saved: Any) -> None:
    """The published files say ``vision_tower.vision_model``; transformers 5 leaves the middle part out."""
    config, tensors = saved("gemma3")
    published = {k.replace("vision_tower.", "vision_tower.vision_model."): v for k, v in tensors.items()}
    assert published.keys() != tensors.keys()
    for form in (tensors, published):
        found = certificate.matched(table_for(config), form)
        images = [key for key in form if "vision" in key or "projector" in key]
        parts = [key for key in images if not certificate.held(found, key, form[key].shape, 2, 1).all()]
        assert len(images) > 20
        assert all("self_attn" in key or "mlp" in key for key in parts)
        assert {key.rsplit(".", 2)[1] for key in parts} == {"q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"}


JUNK = st.one_of(
    st.none(), st.booleans(), st.text(max_size=3), st.floats(), st.integers(-2, 10), st.integers(2**13, 2**80),
    st.lists(st.integers(), max_size=2), st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)  # fmt: skip


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_config_gives_a_table_or_a_plain_refusal(data: st.DataObject, saved: Any) -> None:
    config, _ = saved(data.draw(st.sampled_from(list(tiny_models.MODELS))))
    keys = st.sampled_from([key for key in config if key != "model_type"])
    broken = config | data.draw(st.dictionaries(keys, JUNK, min_size=1, max_size=4))
    for key in data.draw(st.lists(keys, max_size=2)):
        broken.pop(key, None)
    try:
        table = table_for(broken)
    except TpshardError as error:
        assert str(error)
    else:
        assert table.rules and table.axes


def test_the_worked_example_is_the_table() -> None:
    folder = Path(__file__).parent.parent / "converters"
    shown = (folder / "README.md").read_text(encoding="utf-8")
    assert (folder / "starcoder2.py").read_text(encoding="utf-8") in shown


def test_every_role_is_explained() -> None:
    shown = (Path(__file__).parent.parent / "converters" / "README.md").read_text(encoding="utf-8")
    for role in roles.ROW | roles.COLUMN | roles.VOCABULARY | roles.WHOLE | {"norm"}:
        assert f"`{role}`" in shown, role


def test_tables_give_no_role_that_nobody_knows() -> None:
    known = roles.ROW | roles.COLUMN | roles.VOCABULARY | roles.WHOLE | {"norm"}
    for name in tiny_models.MODELS:
        for rule in table_for(tiny_models.MODELS[name]().to_dict()).rules:
            assert rule.role.removesuffix("_bias") in known, rule
