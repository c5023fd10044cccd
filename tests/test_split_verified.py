"""Splits that publish what passes, and the workflow that runs them."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import click
import pytest
from commands import ROOT, ok, refused, tpshard
from levels import forward_gives, ran
from weights import tree

from tpshard import numerics
from tpshard.cli import cli
from tpshard.errors import NotProvenError
from tpshard.gates import read_settings
from tpshard.listing import CARD
from tpshard.reports import Verification

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
    assert [path.name for path in tmp_path.iterdir()] == ["out.tpshard-failed"]
    shutil.rmtree(tmp_path / "out.tpshard-failed")
    assert tpshard(*command, "--no-keep-failed").status == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == []
    done = tpshard(*command, "--json")
    assert done.status == 1 and json.loads(done.out)["schema"] == "tpshard.verify/1"
    assert [path.name for path in tmp_path.iterdir()] == ["out.tpshard-failed"]
    assert not [path.name for path in (tmp_path / "out.tpshard-failed").iterdir() if "partial" in path.name]
    ok("verify", tmp_path / "out.tpshard-failed")
    assert tpshard(*command).status == 1  # what failed before makes way
    (tmp_path / "out.tpshard-failed" / "tpshard.json").unlink()
    refused(5, *command, says=("out.tpshard-failed", "in the way"))
    shutil.rmtree(tmp_path / "out.tpshard-failed")
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
