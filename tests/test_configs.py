"""What the level forward makes of a config.json: keys that differ, that nobody knows, and limits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from conftest import Case  # noqa: E402
from cuts import change_config  # noqa: E402
from damaged import Sharded  # noqa: E402

from tpshard.errors import UnsupportedError, UsageError  # noqa: E402
from tpshard.numerics.configs import longest_sequence  # noqa: E402
from tpshard.shards import open_shards  # noqa: E402


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("attention_dropout", 0.25, "0.25 where the source's has 0.0"),  # what no input of an evaluation shows
        ("max_position_embeddings", 99, "99"),
        ("eos_token_id", 7, "7"),
        ("a_key_of_one's_own", "x", "'x' where the source's has absent"),
    ],
)
def test_a_key_that_differs_fails_though_every_number_is_right(
    key: str, value: Any, said: str, case: Case, tmp_path: Path
) -> None:
    shards = Sharded(case("F-LLAMA6"), tmp_path, 2)
    shards.configure(**{key: value})
    verdict = shards.verify()
    assert verdict.verdict == "failed"
    found = [f for f in verdict.findings if f.tensor.partition(".")[2] == key or f.tensor == key]
    assert len(found) == 1
    assert found[0].level == "forward"
    assert key in found[0].message
    assert said in found[0].message
    assert verdict.logits["top1"] == 1.0  # the numbers were compared all the same


def test_keys_without_bearing_may_differ(case: Case, tmp_path: Path) -> None:
    shards = Sharded(case("F-LLAMA6"), tmp_path, 2)
    config = json.loads((shards.root / "config.json").read_text())
    dtype = config.pop("dtype", None) or config.pop("torch_dtype")
    config |= {"_name_or_path": "x", "transformers_version": "4.0", "use_cache": False, "torch_dtype": dtype}
    (shards.root / "config.json").write_text(json.dumps(config, indent=1))
    verdict = shards.verify()
    assert verdict.verdict == "passed", [finding.message for finding in verdict.findings]


def test_a_size_that_transformers_passes_over_is_no_damage(doctored: Case, tmp_path: Path) -> None:
    """F-FALCON with its key-value heads under the older name alone: transformers then takes a default."""
    source = doctored("F-FALCON")
    heads = json.loads((source / "config.json").read_text())["num_kv_heads"]
    change_config(source, num_kv_heads=None, n_head_kv=heads)
    shards = Sharded(source, tmp_path, 2)
    with pytest.raises(UnsupportedError, match=f"n_head_kv {heads}"):
        shards.verify()


@pytest.mark.parametrize("name", ["F-GPT2", "F-OPT"])
def test_more_tokens_than_positions(name: str, case: Case, tmp_path: Path) -> None:
    shards = Sharded(case(name), tmp_path, 2)
    longest = longest_sequence(shards.root, open_shards(shards.root).manifest)
    assert longest is not None
    assert shards.verify(tokens=longest).verdict == "passed"
    with pytest.raises(UsageError, match=f"--tokens {longest + 1} is more than the {longest} positions"):
        shards.verify(tokens=longest + 1)


def test_rotary_positions_have_no_end(case: Case, tmp_path: Path) -> None:
    shards = Sharded(case("F-LLAMA6"), tmp_path, 2)
    assert longest_sequence(shards.root, open_shards(shards.root).manifest) is None


OWN = """from transformers import LlamaConfig, LlamaForCausalLM


class OwnConfig(LlamaConfig):
    model_type = "llama"


class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig

    def forward(self, *args, **kwargs):
        open(MARKER, "a").close()
        return super().forward(*args, **kwargs)
"""


@pytest.mark.parametrize("trusted", [False, True])
def test_code_of_the_model_itself(
    trusted: bool, doctored: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs only where that is asked for, and then the twin is made of it too; else it is said what ran instead."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    source, marker = doctored("F-LLAMA6"), tmp_path / "ran"
    (source / "own.py").write_text(OWN.replace("MARKER", repr(str(marker))))
    names = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    change_config(source, architectures=["OwnModel"], auto_map=names)
    shards = Sharded(source, tmp_path, 2)
    verdict = shards.verify(mode="auto", trust_remote_code=trusted)
    assert verdict.verdict == "passed", [finding.message for finding in verdict.findings]
    assert not [note for note in verdict.notes if "no twin could be made" in note]
    assert marker.exists() == trusted
    assert any("own.OwnModel in auto_map" in note for note in verdict.notes) != trusted
