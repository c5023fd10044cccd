"""The levels under one call and one command: verdicts, exit statuses, files, and splits that publish what passes."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import click
import pytest
from commands import ROOT, ok, refused, tpshard
from weights import tree

from tpshard import checkpoint, numerics, verification
from tpshard.cli import cli
from tpshard.convert import split
from tpshard.errors import DamagedError, NotProvenError, UnsupportedError, UsageError
from tpshard.gates import read_settings
from tpshard.listing import CARD
from tpshard.options import Options
from tpshard.partition import Dim
from tpshard.planrules import plan_verdict
from tpshard.registry import table_for
from tpshard.reports import Finding, Verification
from tpshard.shards import read_manifest
from tpshard.table import Table
from tpshard.verdicts import LevelVerdict, Measure
from tpshard.verification import verify


@pytest.fixture
def shards(llama: Path, tmp_path: Path) -> Path:
    split(llama, tmp_path / "out", 4)
    return tmp_path / "out"


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


def forward_gives(monkeypatch: pytest.MonkeyPatch, verdict: LevelVerdict | Exception) -> list[dict[str, Any]]:
    """Let the level forward give this; returns what it was called with."""
    calls: list[dict[str, Any]] = []

    def forward(shards: Any, source: Any, **arguments: Any) -> LevelVerdict:
        calls.append(arguments)
        if isinstance(verdict, Exception):
            raise verdict
        return verdict

    monkeypatch.setattr(verification, "_require", lambda: {"torch": "2.13.0", "transformers": "5.24.0"})
    module = type(sys)("tpshard.numerics.forward")
    # the level is called with what it takes
    module.forward = lambda shards, source, *, compute, tokens, gates, device: forward(  # type: ignore[attr-defined]
        shards, source, compute=compute, tokens=tokens, gates=gates, device=device
    )
    monkeypatch.setitem(sys.modules, "tpshard.numerics.forward", module)
    return calls


def ran(verdict: str = "passed", **more: Any) -> LevelVerdict:
    error = 1e-15 if verdict == "passed" else 0.5
    status = "pass" if verdict == "passed" else "fail"
    measure = Measure("model.norm", "model", "sum", None, error, None, error, 1e-10, status)
    findings = [] if verdict == "passed" else [Finding("forward", "", "model.norm", "model.norm is off by 0.5")]
    return LevelVerdict("forward", verdict, "zero-pad", [measure], findings, 1.0, **more)


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


def test_a_baseline_fails_on_drift(
    shards: Path, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


# -- split --verify ----------------------------------------------------------------------------------


def test_a_split_that_passes_is_published_with_its_card(llama: Path, tmp_path: Path) -> None:
    command = ("split", llama, tmp_path / "out", "--tp", 3, "--verify", "quick", "--verify", "bytes", "--json")
    values = json.loads(ok(*command).out)
    assert values["schema"] == "tpshard.split/1" and values["verification"]["levels"] == ["structure", "bytes", "plan"]
    card = json.loads((tmp_path / "out" / CARD).read_text())
    assert card["passed"] and card["command"][:2] == ["tpshard", "split"]
    assert "partial" not in json.dumps(values)
    ok("verify", tmp_path / "out", "--against", llama)
    ok("split", llama, tmp_path / "bare", "--tp", 2, "--verify", "quick", "--no-card")
    assert not (tmp_path / "bare" / CARD).exists()


def test_a_split_that_fails_is_not_published(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward_gives(monkeypatch, ran("failed"))
    monkeypatch.setattr(numerics, "require", dict)
    command = ("split", llama, tmp_path / "out", "--tp", 2, "--verify", "forward")
    done = tpshard(*command)
    assert done.status == 1 and "model.norm is off by 0.5" in done.out and "nothing was published" in done.err
    assert sorted(path.name for path in tmp_path.iterdir()) == []
    done = tpshard(*command, "--keep-failed", "--json")
    assert done.status == 1 and json.loads(done.out)["schema"] == "tpshard.verify/1"
    assert [path.name for path in tmp_path.iterdir()] == ["out.tpshard-failed"]
    assert not [path.name for path in (tmp_path / "out.tpshard-failed").iterdir() if "partial" in path.name]
    ok("verify", tmp_path / "out.tpshard-failed")
    refused(5, *command, "--keep-failed", says=("out.tpshard-failed", "in the way"))
    ok("split", llama, tmp_path / "out", "--tp", 3)
    before = tree(tmp_path / "out")
    assert tpshard(*command, "--overwrite").status == 1
    assert tree(tmp_path / "out") == before


def test_a_dry_run_verifies_nothing_and_says_so(llama: Path, tmp_path: Path) -> None:
    refused(2, "split", llama, tmp_path / "out", "--tp", 2, "--verify", "quick", "--dry-run", says=("--dry-run",))


def test_the_error_carries_the_report() -> None:
    report = Verification("verify", "out", None, 2, status=3)
    assert NotProvenError("no", report).exit_status == 3 and NotProvenError("no", report).report is report


# -- examples/ci -------------------------------------------------------------------------------------


def commands_of(text: str) -> list[list[str]]:
    """The tpshard commands of a shell script, as words without redirections and variables' braces."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        line = re.sub(r"\$\{\w+:\+(.*?)\}(?=\s|$)", r"\1", line.strip()).replace('"', "")
        if line.startswith("tpshard "):
            found.append(shlex.split(line)[1:])
    return found


def test_the_workflow_is_yaml_and_its_commands_parse() -> None:
    yaml = pytest.importorskip("yaml", reason="needs PyYAML to read the workflow")
    workflow = yaml.safe_load((ROOT / "examples/ci/github-gpu.yml").read_text())
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    words = [command for step in steps for command in commands_of(step.get("run", ""))]
    assert [command[0] for command in words] == ["plan", "split", "verify"]
    for command in words:
        given = [word.replace("$TP", "4").replace("$DEVICE", "cuda") for word in command]
        sub = cli.commands[given[0]]
        with click.Context(cli, info_name="tpshard") as above:
            sub.make_context(given[0], given[1:], parent=above)
    verifying = next(command for command in words if command[0] == "verify")
    for option in ("--against", "--gates", "--junit", "--html", "--card", "--baseline", "--write-baseline"):
        assert option in verifying
    uploads = [step["with"]["path"] for step in steps if "upload-artifact" in step.get("uses", "")]
    assert any("reports/" in path for path in uploads)
    assert next(step for step in steps if step.get("with", {}).get("name") == "verification")["if"] == "always()"


def test_the_example_settings_are_read() -> None:
    settings = read_settings(ROOT / "examples/ci/tpshard.toml")
    assert settings.levels == ("structure", "digest", "bytes", "plan", "forward") and settings.min_coverage == 1.0
    assert settings.gates.of("fp64", "x") == 1e-10
