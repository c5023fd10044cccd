"""DeepSeek's files: names, cuts and owners of experts against plain slices, and against DeepSeek's own converter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from zoo import write

from tpshard.errors import DamagedError, UnsupportedError, UsageError
from tpshard.exporting.checking import verify_engine
from tpshard.exporting.export import export
from tpshard.exporting.merging import merge_engine

LEAVES = {
    "q_proj": ("wq", 0), "q_a_proj": ("wq_a", None), "q_b_proj": ("wq_b", 0), "kv_a_proj_with_mqa": ("wkv_a", None),
    "kv_b_proj": ("wkv_b", 0), "o_proj": ("wo", 1), "gate_proj": ("w1", 0), "up_proj": ("w3", 0),
    "down_proj": ("w2", 1),
    "gate": ("gate", None), "q_a_layernorm": ("q_norm", None), "kv_a_layernorm": ("kv_norm", None),
    "input_layernorm": ("attn_norm", None), "post_attention_layernorm": ("ffn_norm", None), "norm": ("norm", None),
    "embed_tokens": ("embed", 0), "lm_head": ("head", 0),
}  # fmt: skip


def whole_of(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def expected(source: dict[str, torch.Tensor], tp_size: int, rank: int, experts: int) -> dict[str, torch.Tensor]:
    """What a rank holds: every leaf renamed and cut by itself, experts whole on their owner."""
    out = {}
    each = experts // tp_size
    for name, tensor in source.items():
        path = name.removeprefix("model.").replace("self_attn", "attn").replace("mlp", "ffn").split(".")
        if path[-1] == "e_score_correction_bias":
            out[".".join([*path[:-1], "bias"])] = tensor
            continue
        path[-2], dim = LEAVES[path[-2]]
        if "experts" in path:
            if int(path[-3]) // each != rank:
                continue
            dim = None
        out[".".join(path)] = tensor if dim is None else tensor.chunk(tp_size, dim)[rank]
    return out


@pytest.fixture(scope="module", params=["deepseek_v2", "deepseek_v3"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param) / "hf"
    write(request.param, directory)
    return directory


def experts_of(source: Path) -> int:
    return int(json.loads((source / "config.json").read_text())["n_routed_experts"])


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_every_rank_holds_what_the_format_says(source: Path, tmp_path: Path, tp_size: int) -> None:
    export(source, tmp_path / "out", "deepseek", tp_size)
    whole = whole_of(source)
    for rank in range(tp_size):
        made = load_file(tmp_path / "out" / f"model{rank}-mp{tp_size}.safetensors")
        wanted = expected(whole, tp_size, rank, experts_of(source))
        assert made.keys() == wanted.keys()
        assert all(torch.equal(made[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize("tp_size", [1, 4])
def test_reads_back_and_merges_to_the_source(source: Path, tmp_path: Path, tp_size: int) -> None:
    export(source, tmp_path / "out", "deepseek", tp_size)
    assert verify_engine(tmp_path / "out", against=source).passed
    merge_engine(tmp_path / "out", tmp_path / "merged")
    whole, merged = whole_of(source), whole_of(tmp_path / "merged")
    assert whole.keys() == merged.keys()
    assert all(torch.equal(merged[name], tensor) for name, tensor in whole.items())


def test_stacked_experts_give_the_same_files(source: Path, tmp_path: Path) -> None:
    whole = whole_of(source)
    stacked = {name: tensor for name, tensor in whole.items() if ".experts." not in name or "shared" in name}
    layers = {name.split(".experts.")[0] for name in whole.keys() - stacked.keys()}
    for layer in layers:
        of = [f"{layer}.experts.{number}" for number in range(experts_of(source))]
        gate_up = [torch.cat([whole[f"{at}.gate_proj.weight"], whole[f"{at}.up_proj.weight"]]) for at in of]
        stacked[f"{layer}.experts.gate_up_proj"] = torch.stack(gate_up)
        stacked[f"{layer}.experts.down_proj"] = torch.stack([whole[f"{at}.down_proj.weight"] for at in of])
    other = tmp_path / "stacked"
    other.mkdir()
    save_file(stacked, other / "model.safetensors", {"format": "pt"})
    (other / "config.json").write_bytes((source / "config.json").read_bytes())
    export(source, tmp_path / "a", "deepseek", 2)
    export(other, tmp_path / "b", "deepseek", 2)
    for rank in range(2):
        a, b = (load_file(tmp_path / side / f"model{rank}-mp2.safetensors") for side in ("a", "b"))
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)


def with_prediction_layer(source: Path, target: Path) -> None:
    """The same checkpoint with a prediction layer past the last, as releases of V3 hold it."""
    target.mkdir()
    config = json.loads((source / "config.json").read_text())
    last = config["num_hidden_layers"] - 1
    config["num_nextn_predict_layers"] = 1
    (target / "config.json").write_text(json.dumps(config))
    whole = whole_of(source)
    here, there = f"model.layers.{last}.", f"model.layers.{last + 1}."
    extra = {there + name.removeprefix(here): tensor + 1 for name, tensor in whole.items() if name.startswith(here)}
    width = config["hidden_size"]
    extra |= {f"{there}{norm}.weight": torch.randn(width) for norm in ("enorm", "hnorm", "shared_head.norm")}
    extra[f"{there}eh_proj.weight"] = torch.randn(width, 2 * width)
    extra[f"{there}embed_tokens.weight"] = whole["model.embed_tokens.weight"].clone()
    extra[f"{there}shared_head.head.weight"] = whole["lm_head.weight"].clone()
    save_file(whole | extra, target / "model.safetensors", {"format": "pt"})


def test_a_prediction_layer_is_left_out_and_named(tmp_path: Path) -> None:
    write("deepseek_v3", tmp_path / "hf")
    with_prediction_layer(tmp_path / "hf", tmp_path / "more")
    export(tmp_path / "hf", tmp_path / "a", "deepseek", 2)
    report = export(tmp_path / "more", tmp_path / "b", "deepseek", 2)
    for rank in range(2):
        a, b = (load_file(tmp_path / side / f"model{rank}-mp2.safetensors") for side in ("a", "b"))
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)
    assert any("prediction layer" in line for line in report.left_out)


def test_degrees_that_it_cannot_load_are_refused_before_writing(source: Path, tmp_path: Path) -> None:
    for tp_size in (3, 5, 16):
        with pytest.raises(UnsupportedError, match=r"--tp 1, 2, 4, 8|share equally"):
            export(source, tmp_path / "out", "deepseek", tp_size)
    with pytest.raises(UnsupportedError, match="--pp 2"):
        export(source, tmp_path / "out", "deepseek", 2, pp_size=2)
    with pytest.raises(UsageError, match="--ep 2"):
        export(source, tmp_path / "out", "deepseek", 4, ep_size=2)
    with pytest.raises(UnsupportedError, match="one file a rank"):
        export(source, tmp_path / "out", "deepseek", 2, max_file_bytes=65536)
    assert not (tmp_path / "out").exists()


def test_other_attention_is_refused(tmp_path: Path) -> None:
    write("llama", tmp_path / "hf")
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM has none"):
        export(tmp_path / "hf", tmp_path / "out", "deepseek", 2)


def test_a_missing_rank_is_named(source: Path, tmp_path: Path) -> None:
    export(source, tmp_path / "out", "deepseek", 4)
    (tmp_path / "out" / "model3-mp4.safetensors").unlink()
    with pytest.raises(DamagedError, match="of 4 ranks, and those of 3"):
        merge_engine(tmp_path / "out", tmp_path / "merged")


@pytest.mark.engine
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_equal_to_deepseeks_own_converter(source: Path, tmp_path: Path, tp_size: int) -> None:
    """Needs a copy of github.com/deepseek-ai/DeepSeek-V3: ``TPSHARD_DEEPSEEK=COPY pytest -m engine``."""
    script = Path(os.environ.get("TPSHARD_DEEPSEEK", ""), "inference", "convert.py")
    if not script.is_file():
        pytest.skip("set TPSHARD_DEEPSEEK to a copy of DeepSeek-V3's repository")
    theirs = tmp_path / "theirs"
    subprocess.run(
        [
            sys.executable, script, "--hf-ckpt-path", source, "--save-path", theirs, "--n-experts",
            str(experts_of(source)), "--model-parallel", str(tp_size),
        ],
        check=True, capture_output=True, timeout=100,
    )  # fmt: skip
    export(source, tmp_path / "ours", "deepseek", tp_size)
    for rank in range(tp_size):
        name = f"model{rank}-mp{tp_size}.safetensors"
        a, b = load_file(theirs / name), load_file(tmp_path / "ours" / name)
        assert a.keys() == b.keys()
        assert all(a[key].dtype == b[key].dtype and torch.equal(a[key], b[key]) for key in a)
