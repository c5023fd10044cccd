"""The levels under one call and one command: verdicts, exit statuses, files, and splits that publish what passes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from commands import ELSEWHERE, environment, ok, refused, tpshard
from levels import forward_gives, ran

from tpshard import checkpoint, numerics, verification
from tpshard.axes import Dim
from tpshard.convert import split
from tpshard.errors import DamagedError, UnsupportedError, UsageError
from tpshard.listing import CARD
from tpshard.options import Options
from tpshard.planrules import plan_verdict
from tpshard.registry import table_for
from tpshard.report import render
from tpshard.shards import read_manifest
from tpshard.table import Table
from tpshard.verdicts import LevelVerdict
from tpshard.verification import verify


@pytest.fixture
def shards(llama: Path, tmp_path: Path) -> Path:
    split(llama, tmp_path / "out", 4)
    return tmp_path / "out"


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


# -- levels ------------------------------------------------------------------------------------------


def test_by_default_bytes_and_plan_as_far_as_the_call_allows(shards: Path, llama: Path) -> None:
    report = verify(shards)
    assert report.passed and report.status == 0 and report.levels == ["structure", "digest", "plan"]
    assert [v.verdict for v in report.verdicts] == ["passed"] * 3
    assert len(report.rank_bytes) == 4 and report.versions["tpshard"] and report.hardware["machine"]
    assert verify(shards, against=llama).levels == ["structure", "digest", "bytes", "plan"]
    assert verify(shards, levels=["quick"]).levels == ["structure", "plan"]


@pytest.mark.parametrize("level", ["bytes", "forward", "runtime", "standard", "full"])
def test_levels_that_compare_need_the_source(shards: Path, level: str) -> None:
    refused(2, "verify", shards, "--level", level, says=("--against SRC",))


@pytest.mark.parametrize("levels", [["structure"], ["plan"], ["quick"], ["digest"], ["twin"], ["backward"]])
def test_every_level_holds_the_headers_against_the_source(
    shards: Path, llama: Path, tmp_path: Path, levels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Levels that read no weights of the source still see another model, and run no model of it."""
    monkeypatch.setattr(verification, "_run_level", lambda level, *rest: LevelVerdict(level, "passed"))
    assert verify(shards, against=llama, levels=levels).passed
    other = changed_header(llama, tmp_path / "other")
    report = verify(shards, against=other, levels=levels)
    assert report.status == 1 and not report.passed
    assert [finding.tensor for finding in report.findings] == ["model.norm.weight"]
    assert "F16 [" in report.findings[0].message and report.verdicts[0].verdict == "failed"
    assert all(v.verdict == "not_run" for v in report.verdicts if v.level in ("twin", "backward"))
    split(other, tmp_path / "shards", 2)
    assert verify(shards, against=tmp_path / "shards", levels=["plan"]).status == 1
    (other / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(DamagedError):
        verify(shards, against=other, levels=levels)


def changed_header(source: Path, out: Path) -> Path:
    """The same checkpoint with another dtype of as many bits."""
    shutil.copytree(source, out)
    path = out / "model.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header["model.norm.weight"]["dtype"] = "F16"
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    return out


def test_unknown_levels_are_refused(shards: Path) -> None:
    refused(2, "verify", shards, "--level", "forwards", says=("'forwards'", "standard"))


def test_damage_fails_its_own_level_and_leaves_the_others(shards: Path) -> None:
    flip(shards / "model-tp-02-of-04.safetensors")
    report = verify(shards, levels=["structure", "digest", "plan"])
    assert [(v.level, v.verdict) for v in report.verdicts] == [
        ("structure", "passed"), ("digest", "failed"), ("plan", "passed"),
    ]  # fmt: skip
    assert report.status == 1 and report.findings == report.verdicts[1].findings
    assert tpshard("verify", shards).status == 1


def test_a_wrong_structure_runs_nothing_that_reads_weights(shards: Path, llama: Path) -> None:
    (shards / "model-tp-02-of-04.safetensors").unlink()
    report = verify(shards, against=llama, levels=["standard"])
    assert {v.level: v.verdict for v in report.verdicts} == {
        "structure": "failed", "digest": "not_run", "bytes": "not_run", "plan": "passed", "forward": "not_run",
    }  # fmt: skip
    assert report.status == 1 and not report.passed and report.levels == ["structure", "plan"]
    assert [text for text in report.warnings if "not run" in text] == [
        "not run because the structure is wrong: digest, bytes, forward"
    ]
    assert render(report).startswith(f"verify {shards}: FAILED (structure)\n  4 ranks, 4 files\n")


def test_digests_that_were_not_taken_are_no_pass_where_they_were_asked_for(llama: Path, tmp_path: Path) -> None:
    split(llama, tmp_path / "out", 2, options=Options(algorithm=""))
    assert verify(tmp_path / "out").passed
    report = verify(tmp_path / "out", levels=["digest"])
    assert not report.passed and report.status == 1
    assert any(v.level == "digest" and v.verdict == "not_run" for v in report.verdicts)


def test_the_plan_of_written_shards_passes_and_counts_collectives(shards: Path) -> None:
    verdict = plan_verdict(read_manifest(shards))
    assert verdict.verdict == "passed" and verdict.collectives["all_gather"] == 1
    assert verdict.collectives["all_reduce"] % 2 == 1 and verdict.collective_bytes_per_token
    assert "attention" in verdict.notes[0]


def test_a_wrong_table_is_caught_though_every_byte_is_right(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """down_proj whole on every rank: it merges back exactly, and its sum over ranks would be too large."""

    def wrong_table(values: Any) -> Table:
        table = table_for(values)
        for number, rule in enumerate(table.rules):
            if rule.role == "down" and len(rule.dims) == 2:
                assert isinstance(rule.dims[1], Dim)
                table.rules[number] = rule._replace(dims=(rule.dims[0], rule.dims[1].extent))
        return table

    monkeypatch.setattr(checkpoint, "table_for", wrong_table)
    done = tpshard("split", llama, tmp_path / "refused", "--tp", 4, "--verify", "quick")
    assert done.status == 1 and "4 times too large" in done.out and not (tmp_path / "refused").exists()
    ok("split", llama, tmp_path / "out", "--tp", 4)
    ok("merge", tmp_path / "out", tmp_path / "merged")
    assert (tmp_path / "merged" / "model.safetensors").read_bytes() == (llama / "model.safetensors").read_bytes()
    report = verify(tmp_path / "out", against=llama)
    assert {v.level: v.verdict for v in report.verdicts} == {
        "structure": "passed", "digest": "passed", "bytes": "passed", "plan": "failed",
    }  # fmt: skip
    assert "mlp.down_proj.weight is whole on every rank" in report.findings[0].message


# -- numeric levels ----------------------------------------------------------------------------------


def test_a_level_is_called_with_what_it_takes(shards: Path, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = forward_gives(monkeypatch, ran())
    report = verify(shards, against=llama, levels=["forward"])
    assert report.passed and report.levels == ["structure", "forward"] and report.versions["torch"] == "2.13.0"
    assert report.gates["compute"] == "fp64" and report.gates["default"] == 1e-10
    assert calls[0]["compute"] == "fp64" and calls[0]["tokens"] == 8 and calls[0]["gates"]("x", 1e-10) == 1e-10
    with pytest.raises(UsageError, match="takes no text"):
        verify(shards, against=llama, levels=["forward"], run=verification.Run(text="t"))


@pytest.mark.parametrize(
    ("given", "status", "verdict"),
    [
        (ran(), 0, "passed"),
        (ran("failed"), 1, "failed"),
        (LevelVerdict("forward", "failed"), 1, "failed"),
        (LevelVerdict("forward", "source_nan", notes=["the source holds NaN"]), 4, "source_nan"),
        (LevelVerdict("forward", "unsupported"), 3, "unsupported"),
        (UnsupportedError("torch is not installed"), 3, "unsupported"),
        (DamagedError("not of this source"), 4, "not_run"),
    ],
)
def test_exit_statuses(
    shards: Path, llama: Path, monkeypatch: pytest.MonkeyPatch, given: LevelVerdict | Exception, status: int,
    verdict: str,
) -> None:  # fmt: skip
    forward_gives(monkeypatch, given)
    done = tpshard("verify", shards, "--against", llama, "--level", "forward", "--level", "plan", "--json")
    values = json.loads(done.out)
    assert done.status == status == values["status"], done.err
    assert values["passed"] is (status == 0)
    assert [v["verdict"] for v in values["verdicts"] if v["level"] == "forward"] == [verdict]
    assert values["schema"] == "tpshard.verify/1" and values["command"][:2] == ["tpshard", "verify"]
    if status == 1:
        assert values["findings"]
    words = {
        "passed": "passed (structure, plan, forward)",
        "failed": "FAILED (forward)",
        "unsupported": "UNSUPPORTED (forward)",
        "source_nan": "SOURCE HOLDS NaN (forward)",
        "not_run": "NOT RUN (forward)",
    }
    lines = tpshard("verify", shards, "--against", llama, "--level", "forward", "--level", "plan").out.splitlines()
    assert lines[0] == f"verify {shards}: {words[verdict]}" and lines[1] == "  4 ranks, 4 files"


def test_missing_torch_is_unsupported_and_says_how_to_install(
    shards: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> dict[str, str]:
        raise UnsupportedError("torch is not installed: pip install 'tpshard[verify]'")

    monkeypatch.setattr(numerics, "require", missing)
    done = tpshard("verify", shards, "--against", llama, "--level", "forward")
    assert done.status == 3 and "tpshard[verify]" in done.out
    refused(3, "split", llama, shards.parent / "new", "--tp", 2, "--verify", "forward", says=("tpshard[verify]",))
    assert not (shards.parent / "new").exists()


def test_a_package_whose_import_fails_is_unsupported(shards: Path, llama: Path, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libtorch_cpu.so: cannot open shared object file')\n")
    where = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    words = ("-m", "tpshard", "verify", str(shards), "--against", str(llama), "--level", "forward")
    outside = {**ELSEWHERE, "env": environment(PYTHONPATH=where)}
    done = subprocess.run([sys.executable, *words], **outside, capture_output=True)
    assert done.returncode == 3, done.stderr
    assert "importing it fails (OSError: libtorch_cpu.so" in done.stdout and "Traceback" not in done.stderr
    assert "UNSUPPORTED (forward)" in done.stdout


def test_a_level_that_cannot_be_loaded_is_unsupported(
    shards: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(name: str) -> Any:
        raise ImportError("cannot import name 'x'")

    forward_gives(monkeypatch, ran())
    monkeypatch.setattr(verification.importlib, "import_module", broken)
    report = verify(shards, against=llama, levels=["forward"])
    assert report.status == 3 and "cannot import name 'x'" in report.verdicts[1].notes[0]


def test_forward_needs_the_checkpoint_not_shards(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward_gives(monkeypatch, ran())
    refused(2, "verify", shards, "--against", shards, "--level", "forward", says=("holds shards",))


# -- files and settings ------------------------------------------------------------------------------


def test_every_file_is_written_and_the_job_summary_is_appended(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "step.md"))
    (tmp_path / "step.md").write_text("before\n")
    ok("verify", shards, "--junit", tmp_path / "j.xml", "--html", tmp_path / "p.html", "--card")
    assert (tmp_path / "step.md").read_text().startswith("before\n## ✅ tpshard verify")
    assert ElementTree.parse(tmp_path / "j.xml").getroot().attrib["failures"] == "0"
    assert (tmp_path / "p.html").read_text().startswith("<!doctype html>")
    card = json.loads((shards / CARD).read_text())
    manifest = read_manifest(shards)
    assert card["passed"] and card["digests"]["content"] == manifest.content and card["command"][1] == "verify"
    assert [level["verdict"] for level in card["levels"]] == ["passed"] * 3
    ok("verify", shards, "--summary", tmp_path / "own.md")
    assert (tmp_path / "own.md").read_text().startswith("## ✅")
    refused(5, "verify", shards, "--html", tmp_path / "none" / "p.html", says=("p.html",))


def test_the_card_is_no_part_of_the_shards(shards: Path, llama: Path, tmp_path: Path) -> None:
    ok("verify", shards, "--card")
    ok("verify", shards, "--against", llama)
    ok("merge", shards, tmp_path / "merged")
    ok("reshard", shards, tmp_path / "two", "--tp", 2)
    assert not (tmp_path / "merged" / CARD).exists() and not (tmp_path / "two" / CARD).exists()
    shutil.copytree(llama, tmp_path / "stale")
    shutil.copy(shards / CARD, tmp_path / "stale" / CARD)
    ok("split", tmp_path / "stale", tmp_path / "new", "--tp", 2)
    assert not (tmp_path / "new" / CARD).exists()


def test_levels_and_gates_come_from_the_file_unless_given(shards: Path, tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text("[verify]\nlevels = ['plan']\n")
    values = json.loads(ok("verify", shards, "--gates", tmp_path / "t.toml", "--json").out)
    assert values["levels"] == ["structure", "plan"]
    values = json.loads(ok("verify", shards, "--gates", tmp_path / "t.toml", "--level", "digest", "--json").out)
    assert values["levels"] == ["structure", "digest"]
    (tmp_path / "t.toml").write_text("[verify]\nlevel = ['plan']\n")
    refused(2, "verify", shards, "--gates", tmp_path / "t.toml", says=("verify.level",))


def test_a_tpshard_toml_in_the_working_directory_is_read(
    shards: Path, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    usual = json.loads(ok("verify", shards, "--json").out)["levels"]
    (tmp_path / "tpshard.toml").write_text("[verify]\nlevels = ['plan']\n")
    done = ok("verify", shards, "--json")
    assert json.loads(done.out)["levels"] == ["structure", "plan"] and "./tpshard.toml" in done.err
    done = ok("verify", shards, "--no-gates", "--json")
    assert json.loads(done.out)["levels"] == usual and done.err == ""
    (tmp_path / "t.toml").write_text("[verify]\nlevels = ['structure']\n")
    done = ok("verify", shards, "--gates", "t.toml", "--json")
    assert json.loads(done.out)["levels"] == ["structure"] and done.err == ""
    refused(2, "verify", shards, "--gates", "t.toml", "--no-gates", says=("--no-gates",))
    (tmp_path / "tpshard.toml").write_text("[verify]\nlevel = 3\n")
    refused(2, "verify", shards, says=("tpshard.toml", "verify.level"))
    refused(2, "split", llama, tmp_path / "new", "--tp", 2, "--verify", "plan", says=("verify.level",))
    ok("split", llama, tmp_path / "new", "--tp", 2, "--verify", "plan", "--no-gates")
    ok("split", llama, tmp_path / "bare", "--tp", 2)


def test_a_baseline_fails_on_drift(shards: Path, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = ("verify", shards, "--against", llama, "--level", "forward")
    forward_gives(monkeypatch, ran())
    ok(*forward, "--write-baseline", tmp_path / "b.json")
    ok(*forward, "--baseline", tmp_path / "b.json")
    grown = ran()
    grown.measures[0].error = 5e-12
    forward_gives(monkeypatch, grown)
    done = tpshard(*forward, "--baseline", tmp_path / "b.json", "--write-baseline", tmp_path / "new.json")
    assert done.status == 1 and "drifted" in done.out and not (tmp_path / "new.json").exists()
    refused(2, *forward, "--baseline", tmp_path / "none.json", says=("--write-baseline",))
