"""Tables derived from the model's own code alone, against the written ones and against the model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import zoo  # noqa: E402
from click.testing import CliRunner  # noqa: E402

from tpshard.check import verify  # noqa: E402
from tpshard.cli import cli  # noqa: E402
from tpshard.convert import merge, split  # noqa: E402
from tpshard.derivation.derive import Derivation, derive  # noqa: E402
from tpshard.derivation.noise import experiments  # noqa: E402
from tpshard.derivation.probe import Probe  # noqa: E402
from tpshard.derivation.structure import Structure, structure  # noqa: E402
from tpshard.derivation.sums import Meeting, meeting  # noqa: E402
from tpshard.errors import UnsupportedError, UsageError  # noqa: E402
from tpshard.matching import Logical, match  # noqa: E402
from tpshard.partition import partition  # noqa: E402
from tpshard.registry import given_table, table_for  # noqa: E402
from tpshard.source import open_source  # noqa: E402

torch.set_num_threads(1)

# Each for what it alone has: [in, out] and q k v, one KV head, blocks of a trainer's ranks, rectifiers that are off
# for every token. Groups of query heads (llama), heads of q k v (gpt_neox) and a command on its config come below.
DIVERSE = ("gpt2", "falcon", "codegen", "opt")
SLOW = (
    "llama", "gpt_neox", "mixtral", "olmo2", "xlnet", "bitnet",
    "gpt_oss", "mamba", "bert", "deepseek_v3", "qwen3_next", "mamba2", "kimi_linear", "xlstm", "rwkv", "phi3", "bloom",
    "qwen2_moe",
)  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """``made(name)``: a tiny checkpoint and what was derived of it, once for each."""
    done: dict[str, tuple[Path, Derivation]] = {}

    def get(name: str) -> tuple[Path, Derivation]:
        if name not in done:
            root = tmp_path_factory.mktemp("derived") / name
            zoo.write(name, root)
            done[name] = root, derive(root, degrees=(2, 3))
        return done[name]

    yield get


def bytes_held(root: Path, table: Any, tp_size: int) -> dict[str, list[int]]:
    """Elements of every tensor on every rank."""
    tensors = [Logical(info.name, info.dtype, info.shape) for _, info in open_source(root).tensors()]
    found = match(table, tensors)
    return {
        tensor.name: [
            prod(partition(dim, tp_size).length(rank) for dim in found.dims_of(tensor.name)) for rank in range(tp_size)
        ]
        for tensor in tensors
    }


def agrees(root: Path, found: Derivation, path: Path) -> None:
    assert found.proven, [trial.problem for trial in found.trials]
    path.write_text(found.text)
    values = json.loads((root / "config.json").read_text())
    written = table_for(values)
    with given_table(path):
        derived = table_for(values)
    for tp_size in (2, 4):
        ours, theirs = bytes_held(root, derived, tp_size), bytes_held(root, written, tp_size)
        # A derived table may leave whole what a written one cuts at a price: at most a twentieth of it.
        assert sum(map(sum, ours.values())) <= 1.05 * sum(map(sum, theirs.values())), (ours, theirs)


@pytest.mark.parametrize("name", DIVERSE)
def test_a_derived_table_cuts_what_the_written_one_cuts(name: str, made: Any, tmp_path: Path) -> None:
    agrees(*made(name), tmp_path / "table.py")


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_more_derived_tables(name: str, made: Any, tmp_path: Path) -> None:
    agrees(*made(name), tmp_path / "table.py")


def test_the_table_serves_other_numbers(made: Any, tmp_path: Path) -> None:
    """What was derived of one checkpoint cuts another of the same class: keys were followed, not numbers."""
    _, found = made("llama")
    (tmp_path / "table.py").write_text(found.text)
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=40, num_attention_heads=10, num_key_value_heads=5, head_dim=6, intermediate_size=72, vocab_size=101,
        num_hidden_layers=3,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    with given_table(tmp_path / "table.py"):
        split(tmp_path / "model", tmp_path / "shards", 5)
    merge(tmp_path / "shards", tmp_path / "merged")
    one, two = (tmp_path / d / "model.safetensors" for d in ("model", "merged"))
    assert one.read_bytes() == two.read_bytes()


def examined(name: str, directory: Path) -> tuple[Probe, Meeting, Structure]:
    zoo.write(name, directory)
    probe = Probe(directory)
    met = meeting(probe)
    return probe, met, structure(probe, met)


def test_noise_finds_units_in_a_wrong_order(tmp_path: Path) -> None:
    """The experiment can fail: GPT-2's thirds read head by head."""
    probe, met, found = examined("gpt2", tmp_path / "model")
    assert not experiments(probe, met, found).failed
    axis = next(axis for axis in found.axes if axis.units == 8)
    for tensor, (dim, labels) in list(axis.tensors.items()):
        if "c_attn" in tensor:
            axis.tensors[tensor] = (dim, tuple(sorted(labels)))
    failed = experiments(probe, met, found).failed
    assert set(failed) == {axis.sums} and "lacks changed" in failed[axis.sums]


def test_noise_finds_what_does_nothing(tmp_path: Path) -> None:
    """A rank that holds nothing that feeds its channels is no rank."""
    probe, met, found = examined("gpt_neox", tmp_path / "model")
    axis = next(axis for axis in found.axes if axis.units == 8)
    for tensor in list(axis.tensors):
        if tensor not in axis.ends:
            del axis.tensors[tensor]
    failed = experiments(probe, met, found).failed
    assert "changed nothing" in failed[axis.sums]


def test_the_command(tmp_path: Path) -> None:
    zoo.write("gpt_neox", tmp_path / "model")
    for file in (tmp_path / "model").glob("*.safetensors"):
        file.unlink()  # the config alone does
    out = tmp_path / "table.py"
    arguments = ["derive", str(tmp_path / "model"), "--out", str(out), "--degrees", "2", "--json"]
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["proven"] and report["trials"][0]["merged"] and out.read_text() == report["table"]
    again = CliRunner().invoke(cli, arguments)
    assert isinstance(again.exception, UsageError) and "--overwrite" in str(again.exception)
    zoo.write("gpt_neox", tmp_path / "other")
    words = ["split", str(tmp_path / "other"), str(tmp_path / "tp2"), "--tp", "2", "--table", str(out)]
    assert CliRunner().invoke(cli, words).exit_code == 0
    done = CliRunner().invoke(cli, ["verify", str(tmp_path / "tp2"), "--against", str(tmp_path / "other")])
    assert done.exit_code == 0, done.output  # the level plan, too: its roles are what the plan's rules take them for
    assert CliRunner().invoke(cli, ["merge", str(tmp_path / "tp2"), str(tmp_path / "merged")]).exit_code == 0
    for file in (tmp_path / "other").iterdir():
        assert (tmp_path / "merged" / file.name).read_bytes() == file.read_bytes()


def test_no_contradiction_is_claimed_for_a_table_that_is_not_installed(tmp_path: Path) -> None:
    """A config that was changed is a difference of bytes; what it implies no installed table tells."""
    zoo.write("gpt_neox", tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text().replace('"gpt_neox"', '"never-heard-of"'))
    table = tmp_path / "table.py"
    table.write_text(
        "from tpshard.axes import Padded\nfrom tpshard.table import Table\n\n"
        "FAMILY, MODEL_TYPES = 'mine', ('never-heard-of',)\n\n\ndef table(c):\n"
        "    t = Table(layers=0)\n    t.whole_module('gpt_neox', why='a test')\n"
        "    t.tensor('embed_out.weight', Padded('vocab', c.count('vocab_size')).each(), None, role='head')\n"
        "    return t\n"
    )
    with given_table(table):
        split(tmp_path / "model", tmp_path / "shards", 2)
    written = tmp_path / "shards" / "config.json"
    written.write_text(written.read_text().replace('"never-heard-of"', '"never-heard-if"'))
    structure_alone = verify(tmp_path / "shards", levels=("structure",))
    assert structure_alone.passed, structure_alone.findings
    assert not verify(tmp_path / "shards", levels=("digest",)).passed


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def table(:\n", "cannot be read"),
        ("raise ValueError('no')\n", "ValueError: no"),
        ("FAMILY = 'x'\n", "no MODEL_TYPES and no table"),
    ],
)
def test_a_file_that_is_no_table_is_refused(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "table.py").write_text(text)
    with pytest.raises(UsageError, match=words), given_table(tmp_path / "table.py"):
        pass


def test_a_given_table_serves_for_its_time_alone(tmp_path: Path) -> None:
    path = tmp_path / "table.py"
    path.write_text(
        "from tpshard.table import Table\nFAMILY = 'mine'\nMODEL_TYPES = ('never-heard-of',)\n\n"
        "def table(c):\n    return Table(c.count('x'))\n"
    )
    with given_table(path):
        assert table_for({"model_type": "never-heard-of", "x": 7}).layers == 7
    with pytest.raises(UnsupportedError, match="never-heard-of"):
        table_for({"model_type": "never-heard-of", "x": 7})


def test_what_cannot_be_derived_says_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no config\.json"):
        derive(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "never-heard-of", "architectures": ["NoSuch"]}')
    with pytest.raises(UnsupportedError, match="never-heard-of"):
        derive(tmp_path)
    with pytest.raises(UsageError, match="degree"):
        derive(tmp_path, degrees=(1,))
