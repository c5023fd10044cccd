"""Events, heartbeats and metrics: what they say is what was done, and they never stand in its way."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
from commands import ok, process, refused, tpshard
from faultyfiles import Layer, layered
from unfinished import VERBS, Operation, small
from weights import tree

from tpshard import output
from tpshard.observing import Observer
from tpshard.options import Options
from tpshard.prometheus import exposition

__all__ = ["small"]


def events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("verb", VERBS)
def test_events_tell_what_was_done(verb: str, small: dict[str, Operation], tmp_path: Path) -> None:
    logs = []
    for number in range(2):
        out = tmp_path / str(number) / "out"
        out.parent.mkdir()
        report = json.loads(ok(*small[verb].words(out), "--log-json", tmp_path / "log", "--json").out)
        logs.append(events(tmp_path / "log"))
        (tmp_path / "log").unlink()
        assert tree(out) == small[verb].expected
        found = logs[-1]
        assert [event["event"] for event in found if event["event"] not in ("note", "heartbeat")] == [
            "start", "plan", *["file"] * len(report["files"]), "end",
        ]  # fmt: skip
        assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", event["time"]) for event in found)
        files = [event for event in found if event["event"] == "file"]
        assert {event["file"]: event["bytes"] for event in files} == {
            path.name: path.stat().st_size for path in out.glob("*.safetensors")
        }
        assert all(re.fullmatch("[0-9a-f]{32}", event["digest"]) for event in files)
        end = found[-1]
        assert (end["status"], end["error"], end["bytes"]) == (0, None, report["bytes_written"])
        assert end["rate"] > 0
        assert end["peak_resident_bytes"] > 1 << 20
    assert logs[0][-1]["summary"] == logs[1][-1]["summary"], "two runs of one thing can be compared"


def test_summaries_of_different_weights_differ(small: dict[str, Operation], tmp_path: Path) -> None:
    told = []
    source = small["split"].source
    for number in range(2):
        if number:
            name = "model-00002-of-00003.safetensors"
            changed = Path(tmp_path / "changed")
            changed.mkdir()
            for path in source.iterdir():
                raw = bytearray(path.read_bytes())
                if path.name == name:
                    raw[-1] ^= 1
                (changed / path.name).write_bytes(raw)
            source = changed
        ok("split", source, tmp_path / f"out{number}", "--tp", 3, "--log-json", tmp_path / str(number))
        told.append(events(tmp_path / str(number))[-1]["summary"])
    digests = [{file["file"]: file["digest"] for file in summary["files"]} for summary in told]
    assert digests[0] != digests[1]
    assert told[0]["layout"] == told[1]["layout"]
    assert told[0]["content"] != told[1]["content"]


def test_the_log_on_stdout_stands_alone(small: dict[str, Operation], tmp_path: Path) -> None:
    done = process(*small["split"].words(tmp_path / "out"), "--log-json", "-")
    assert done.returncode == 0
    assert [json.loads(line)["event"] for line in done.stdout.splitlines()][-1] == "end"
    refused(2, *small["split"].words(tmp_path / "out"), "--log-json", "-", "--json", says=("stdout",))
    refused(2, *small["split"].words(tmp_path / "out"), "--heartbeat", 3, says=("--log-json",))


def test_errors_end_the_log_too(small: dict[str, Operation], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "x").touch()
    log, metrics = tmp_path / "log", tmp_path / "metrics.prom"
    reason = refused(2, *small["split"].words(tmp_path / "out"), "--log-json", log, "--metrics-file", metrics)
    assert events(log)[-1]["status"] == 2
    assert events(log)[-1]["error"] in reason
    assert metric(metrics, "exit_status") == 2
    assert metric(metrics, "running") == 0


def metric(path: Path, name: str) -> float:
    found = re.findall(rf"^tpshard_job_{name}{{.*}} (\S+)$", path.read_text(), re.MULTILINE)
    assert len(found) == 1
    return float(found[0])


def test_a_heartbeat_tells_how_far_it_is(
    small: dict[str, Operation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On slow storage, also while nothing moves at all; and the metrics of the moment are a whole file."""
    monkeypatch.setattr(output, "move_settings", lambda threads, memory: (1, 2048))
    log, metrics = tmp_path / "log", tmp_path / "metrics.prom"
    seen = []

    def slow(name: str, number: int, args: tuple[Any, ...]) -> None:
        if name == "pwrite":
            time.sleep(0.01)
            if metrics.exists():
                seen.append(metrics.read_text())

    words = ["--log-json", log, "--metrics-file", metrics, "--heartbeat", 0.1]
    with layered(Layer(fault=slow)):
        ok(*small["split"].words(tmp_path / "out"), *words)
    beats = [event for event in events(log) if event["event"] == "heartbeat"]
    assert len(beats) >= 2
    assert sorted(event["bytes"] for event in beats) == [event["bytes"] for event in beats]
    assert all(event["bytes"] <= event["of_bytes"] for event in beats if event["of_bytes"])
    assert any(0 < event["bytes"] < event["of_bytes"] for event in beats)
    assert any("tpshard_job_running" in text and 'verb="split"' in text for text in seen)
    assert all(text.endswith("\n") for text in seen)
    assert metric(metrics, "done_bytes") == metric(metrics, "planned_bytes") > 0
    assert metric(metrics, "exit_status") == 0
    assert metric(metrics, "start_time_seconds") <= metric(metrics, "update_time_seconds")
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".new")]


def test_a_log_that_cannot_be_made_is_said_before_anything(small: dict[str, Operation], tmp_path: Path) -> None:
    for option in ("--log-json", "--metrics-file"):
        reason = refused(5, *small["split"].words(tmp_path / "out"), option, tmp_path / "no" / "file")
        assert str(tmp_path / "no" / "file") in reason
    assert not list(tmp_path.iterdir())


def test_a_log_whose_disk_is_full_does_not_stop_the_job(small: dict[str, Operation], tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    done = tpshard(*small["split"].words(tmp_path / "out"), "--log-json", "/dev/full")
    assert done.status == 0
    assert done.err.count("the log ends here: No space left on device") == 1
    assert tree(tmp_path / "out") == small["split"].expected


def test_metrics_are_in_the_exposition_format() -> None:
    text = exposition({"running": 1.0}, {"output": 'a"b\\c\nd'})
    assert text.splitlines()[1:] == [
        "# TYPE tpshard_job_running gauge", 'tpshard_job_running{output="a\\"b\\\\c\\nd"} 1.0',
    ]  # fmt: skip
    parser = pytest.importorskip("prometheus_client.parser", reason="the reference parser is not installed")
    (family,) = parser.text_string_to_metric_families(text)
    assert family.samples[0].labels == {"output": 'a"b\\c\nd'}


def test_the_library_tells_an_observer_too(small: dict[str, Operation], tmp_path: Path) -> None:
    with Observer("split", log=str(tmp_path / "log")) as observer:
        small["split"](tmp_path / "out", observer=observer)
    assert events(tmp_path / "log")[-1]["summary"]["to_tp_size"] == 3
    assert Options().observer is None
    assert os.path.exists(tmp_path / "out")
