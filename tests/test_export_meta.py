"""Meta's files against its rules written out by hand, read with torch.load and back again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import enginemodels as models
import numpy as np
import pytest
from enginemodels import HEADS, HIDDEN, KV, LAYERS, SIZE, Tensors, read_all

from tpshard.converters.engines.meta import feed_forward
from tpshard.errors import DamagedError, UnsupportedError
from tpshard.exporting.checking import verify_engine
from tpshard.exporting.export import export
from tpshard.exporting.merging import merge_engine

torch = pytest.importorskip("torch")

VOCAB = 132  # Meta pads nothing, so the degrees divide it


@pytest.fixture(autouse=True)
def _vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "VOCAB", VOCAB)


def together(directory: Path) -> Tensors:
    return {name: value for file in read_all(directory).values() for name, value in file.items()}


def in_pairs(value: np.ndarray, heads: int) -> np.ndarray:
    """``permute`` of ``convert_llama_weights_to_hf.py`` turned round: halves of a head become neighbours."""
    rest = value.shape[1:]
    return value.reshape(heads, 2, SIZE // 2, *rest).swapaxes(1, 2).reshape(heads * SIZE, *rest)


def expected(source: Tensors, rank: int, tp: int, *, hidden: bool) -> Tensors:
    """By ``ColumnParallelLinear`` and ``RowParallelLinear`` of fairscale and the two embeddings of Meta's code."""

    def column(value: np.ndarray) -> np.ndarray:
        return np.split(value, tp, 0)[rank]

    def row(value: np.ndarray) -> np.ndarray:
        return np.split(value, tp, 1)[rank]

    embedding = source["model.embed_tokens.weight"]
    held = {
        "tok_embeddings.weight": row(embedding) if hidden else column(embedding),
        "output.weight": column(source.get("lm_head.weight", embedding)),
        "norm.weight": source["model.norm.weight"],
    }
    for layer in range(LAYERS):
        at, to = f"model.layers.{layer}", f"layers.{layer}"
        for name, heads in (("q", HEADS), ("k", KV), ("v", None)):
            for kind in ("weight", "bias"):
                value = source.get(f"{at}.self_attn.{name}_proj.{kind}")
                if value is not None:
                    held[f"{to}.attention.w{name}.{kind}"] = column(in_pairs(value, heads) if heads else value)
        held[f"{to}.attention.wo.weight"] = row(source[f"{at}.self_attn.o_proj.weight"])
        held[f"{to}.feed_forward.w1.weight"] = column(source[f"{at}.mlp.gate_proj.weight"])
        held[f"{to}.feed_forward.w3.weight"] = column(source[f"{at}.mlp.up_proj.weight"])
        held[f"{to}.feed_forward.w2.weight"] = row(source[f"{at}.mlp.down_proj.weight"])
        held[f"{to}.attention_norm.weight"] = source[f"{at}.input_layernorm.weight"]
        held[f"{to}.ffn_norm.weight"] = source[f"{at}.post_attention_layernorm.weight"]
    return held


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize(("engine", "hidden"), [("meta", False), ("meta@llama3", False), ("meta@llama2", True)])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", [{}, {"tied": True}, {"model_type": "qwen2", "bias": True}])
def test_every_rank_holds_what_metas_layers_hold(
    tmp_path: Path, engine: str, hidden: bool, tp: int, kind: dict[str, Any], mapped: bool
) -> None:
    source, tensors = models.llama(tmp_path / "source", **kind)
    export(source, tmp_path / "out", engine, tp)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.pth"))  # as the loader finds its ranks
    assert files == [f"consolidated.{rank:02d}.pth" for rank in range(tp)]
    for rank, name in enumerate(files):
        state = torch.load(tmp_path / "out" / name, weights_only=True, mmap=mapped)
        wanted = expected(tensors, rank, tp, hidden=hidden)
        assert state.keys() == wanted.keys()
        for key, value in wanted.items():
            np.testing.assert_array_equal(state[key].numpy(), value, key)
    assert verify_engine(tmp_path / "out", against=source).passed
    merge_engine(tmp_path / "out", tmp_path / "back")
    back = together(tmp_path / "back")
    assert back.keys() == tensors.keys()
    for key in tensors:
        np.testing.assert_array_equal(back[key], tensors[key], key)


def test_both_cuts_of_the_embedding_are_told_apart_when_read(tmp_path: Path) -> None:
    source, _ = models.llama(tmp_path / "source")
    export(source, tmp_path / "two", "meta@llama2", 2)
    assert verify_engine(tmp_path / "two", against=source).passed
    with pytest.raises(DamagedError, match=r"tok_embeddings\.weight"):
        merge_engine(tmp_path / "two", tmp_path / "back", engine="meta@llama3")


def test_params_say_what_the_code_computes_with(tmp_path: Path) -> None:
    source, _ = models.llama(tmp_path / "source")
    export(source, tmp_path / "out", "meta", 1)
    params = json.loads((tmp_path / "out" / "params.json").read_text())
    assert (params["dim"], params["n_layers"], params["n_heads"], params["n_kv_heads"]) == (HIDDEN, LAYERS, HEADS, KV)
    assert params["vocab_size"] == VOCAB and "use_scaled_rope" not in params
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "llama"


@pytest.mark.parametrize(
    ("hidden", "width"),
    [(4096, 11008), (5120, 13824), (6656, 17920), (8192, 22016), (8192, 28672), (4096, 14336), (16384, 53248),
     (2048, 8192), (3072, 8192), (24, 32), (100, 333), (64, 1)],
)  # fmt: skip
def test_the_width_that_metas_code_computes_is_the_models(hidden: int, width: int) -> None:
    """``FeedForward.__init__`` of llama-models, with what params.json says."""
    multiple, factor = feed_forward(hidden, width)
    computed = int(2 * (4 * hidden) / 3)
    if factor is not None:
        computed = int(factor * computed)
    assert multiple * ((computed + multiple - 1) // multiple) == width


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "activation silu alone"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "scaled as 'yarn'"),
    ],
)
def test_what_metas_code_has_not_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    source, _ = models.llama(tmp_path / "source")
    values = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**values, **change}))
    with pytest.raises(UnsupportedError, match=message):
        export(source, tmp_path / "out", "meta", 1)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("tp", "vocab", "kind", "message"),
    [
        (4, 132, {}, r"2 KV heads, and there ranks do not share one; it can at 1(,| and) 2"),
        (2, 131, {}, "vocabulary of 131 among ranks without padding, and 2 does not divide it"),
        (2, 132, {"model_type": "qwen3", "norms": True}, r"those of Qwen3ForCausalLM may be others"),
    ],
)
def test_degrees_and_parts_that_it_cannot_load_are_refused(
    tmp_path: Path, tp: int, vocab: int, kind: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "VOCAB", vocab)
    source, _ = models.llama(tmp_path / "source", **kind)
    with pytest.raises(UnsupportedError, match=message):
        export(source, tmp_path / "out", "meta", tp)
    assert not (tmp_path / "out").exists()


def test_frequencies_of_old_releases_are_no_weights(tmp_path: Path) -> None:
    source, tensors = models.llama(tmp_path / "source")
    export(source, tmp_path / "out", "meta", 1)
    path = tmp_path / "out" / "consolidated.00.pth"
    state = torch.load(path, weights_only=True)
    torch.save({**state, "rope.freqs": torch.rand(SIZE // 2)}, path)
    merge_engine(tmp_path / "out", tmp_path / "back")
    assert together(tmp_path / "back").keys() == tensors.keys()
