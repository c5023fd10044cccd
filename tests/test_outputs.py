"""JUnit, summary, page and card: whole, escaped, and loading nothing from anywhere."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpshard.errors import StorageError
from tpshard.outputs.blocks import blocks_of, failing_first, number, percent
from tpshard.outputs.files import write_text
from tpshard.outputs.headline import headline
from tpshard.outputs.junit import junit
from tpshard.outputs.page import page
from tpshard.outputs.summary import summary
from tpshard.report import render
from tpshard.reports import Finding, Verification
from tpshard.verdicts import LevelVerdict, Measure

HOSTILE = "</title><script>alert(1)</script>\x00\x1b[31m\ud800 &amp; \"'|`*_[x](http://h) <img src=//h onerror=a>\n# x"


def measure(point: str, error: float, status: str = "pass", **more: Any) -> Measure:
    made = {"block": point.rpartition(".")[0] or point, "kind": "sum", "rank": None, "free": 2 * error, "gate": 1e-10}
    return Measure(point, error=error, max_abs=error, status=status, **{**made, **more})


def example(passed: bool = False, layers: int = 4) -> Verification:
    measures = [measure("lm_head", 3e-15, kind="gather", free=None)]
    for layer in range(layers):
        at = f"model.layers.{layer}"
        measures.append(measure(f"{at}.self_attn.o_proj", 1e-15))
        measures += [measure(f"{at}.self_attn.q_norm", 0.0, kind="replicated", rank=rank) for rank in (0, 1)]
        measures.append(measure(f"{at}.mlp.down_proj", 2e-15))
    findings = []
    if not passed:
        measures[1].error, measures[1].status = 0.3, "fail"
        measures[3].error, measures[3].status = math.nan, "fail"
        measures[8].error, measures[8].status, measures[8].note = 4e-12, "drift", "1.0e-15 in the baseline"
        findings = [Finding("forward", "", measures[1].point, f"{measures[1].point}: error 3.0e-01 over its gate")]
    forward = LevelVerdict(
        "forward", "passed" if passed else "failed", "zero-pad", measures, findings, 1.0 if passed else 0.9999999,
        [] if passed else ["model.layers.1.mlp.experts.5.w1.weight"], {"all_reduce": 9, "all_gather": 1}, 2048.0,
        logits={"max_abs": 1e-14, "perplexity": 8.25}, seconds=1.5, peak_memory=10**9, notes=["fp64"],
    )  # fmt: skip
    verdicts = [LevelVerdict("structure", "passed", seconds=0.25), LevelVerdict("plan", "passed"), forward]
    if not passed:
        verdicts.append(LevelVerdict("twin", "unsupported", notes=["no such class"]))
        verdicts.append(LevelVerdict("runtime", "not_run", notes=["not run: the structure is wrong"]))
        verdicts.append(LevelVerdict("backward", "source_nan", notes=["the source holds NaN"]))
    report = Verification("verify", "out", "src", 2, [v.level for v in verdicts], passed, findings)
    report.verdicts, report.rank_bytes = verdicts, [1_000_000, 900_000]
    report.gates = {"compute": "fp64", "default": 1e-10, "fp32_inside": None, "blocks": {"model.*": 1e-3}}
    report.versions, report.hardware = {"tpshard": "0.1.0", "torch": "2.13.0"}, {"machine": "x86_64"}
    report.command, report.warnings = ["tpshard", "verify", "out"], ["the 2 ranks are unequal"]
    return report


def hostile() -> Verification:
    report = example()
    for verdict in report.verdicts:
        verdict.notes.append(HOSTILE)
        verdict.unreached.append(HOSTILE)
        verdict.collectives[HOSTILE] = 1
        verdict.logits[HOSTILE] = math.inf
        for found in verdict.measures:
            found.point += HOSTILE
            found.block += HOSTILE
            found.note += HOSTILE
    report.findings.append(Finding(HOSTILE, HOSTILE, HOSTILE, HOSTILE))
    report.shards = report.against = HOSTILE
    report.warnings.append(HOSTILE)
    report.command.append(HOSTILE)
    report.versions[HOSTILE] = report.hardware[HOSTILE] = HOSTILE
    report.gates["blocks"][HOSTILE] = 1.0
    return report


# -- JUnit -------------------------------------------------------------------------------------------


def suites(report: Verification) -> dict[str, ElementTree.Element]:
    root = ElementTree.fromstring(junit(report))
    return {suite.attrib["name"]: suite for suite in root}


def test_junit_has_a_case_for_every_level_and_block() -> None:
    found = suites(example())
    levels = ("structure", "plan", "forward", "twin", "runtime", "backward")
    assert list(found) == [f"tpshard.{level}" for level in levels]
    forward = found["tpshard.forward"]
    assert (forward.attrib["tests"], forward.attrib["failures"]) == ("10", "3")
    cases = {case.attrib["name"]: case for case in forward}
    failed = cases["model.layers.0.self_attn"].find("failure")
    assert failed is not None and "on rank 1: replicated error nan" in (failed.text or "")
    assert cases["verdict"].find("failure") is not None and cases["lm_head"].find("failure") is None
    drifted = cases["model.layers.1.mlp"].find("failure")
    assert drifted is not None and "(drift)" in (drifted.text or "")
    kinds = {name: [child.tag for child in suite[0]] for name, suite in found.items()}
    assert kinds["tpshard.twin"] == kinds["tpshard.backward"] == ["error"] and kinds["tpshard.runtime"] == ["skipped"]
    assert kinds["tpshard.structure"] == []


def test_a_passing_report_has_no_failure_and_an_empty_one_no_pass() -> None:
    root = ElementTree.fromstring(junit(example(passed=True)))
    assert (root.attrib["failures"], root.attrib["errors"], root.attrib["skipped"]) == ("0", "0", "0")
    root = ElementTree.fromstring(junit(Verification("verify", "out", None, 2)))
    assert (root.attrib["tests"], root.attrib["errors"]) == ("1", "1")


def test_junit_of_hostile_names_is_xml() -> None:
    forward = suites(hostile())["tpshard.forward"]
    assert any("</script>" in case.attrib["name"] for case in forward)


@settings(max_examples=60, deadline=None)
@given(st.text(), st.text(min_size=1), st.floats(allow_nan=True))
def test_any_text_makes_whole_documents(message: str, point: str, error: float) -> None:
    report = example()
    report.verdicts[2].findings[0].message = report.findings[0].message = message
    report.verdicts[2].measures[1].point = report.verdicts[2].measures[1].block = point
    report.verdicts[2].measures[1].error = error
    ElementTree.fromstring(junit(report))
    Reader().read(page(report))
    summary(report).encode("utf-8")


# -- summary -----------------------------------------------------------------------------------------


def test_the_summary_puts_failing_rows_first() -> None:
    text = summary(example())
    assert text.startswith("## ❌ tpshard verify: FAILED")
    assert text.index("Blocks over their gate") < text.index("### Findings") < text.index("| level |")
    rows = [line for line in text.splitlines() if line.startswith("| model.layers")]
    assert [row.split("|")[-2].strip() for row in rows[:3]] == ["fail", "drift", "pass"]
    assert summary(example(passed=True)).startswith("## ✅ tpshard verify: passed")
    assert "Nothing was checked" in summary(Verification("verify", "out", None, 2))


def test_a_summary_of_hostile_names_is_text_and_stays_short() -> None:
    text = summary(hostile())
    assert "<script>" not in text and "\x00" not in text and "](" not in text.replace("\\](", "")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    width = {line.replace(r"\|", "").count("|") for line in rows}
    assert width <= {8}
    report = example(layers=3000)
    report.findings *= 5000
    assert len(summary(report).encode()) < 1 << 17


# -- page --------------------------------------------------------------------------------------------

VOID = {"meta", "br", "wbr", "hr", "img", "input", "link"}
LOADING = {"script", "link", "img", "iframe", "object", "embed", "base", "a", "form", "use", "image"}


class Reader(HTMLParser):
    """Reads a page, and fails where a tag is not closed in turn or anything refers to something else."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text = ""

    def read(self, document: str) -> Reader:
        self.feed(document)
        self.close()
        assert self.open == []
        return self

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        assert tag not in LOADING, tag
        for name, value in attrs:
            assert not name.startswith("on") and name not in {"src", "href", "xlink:href", "action", "srcset"}, name
            assert "url(" not in (value or "").lower()

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, (tag, self.open)
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "style":
            assert "url(" not in data and "@import" not in data and "//" not in data
        else:
            self.text += data


def test_the_page_is_self_contained_and_says_everything() -> None:
    found = Reader().read(page(example()))
    assert found.tags.count("svg") == 2  # errors by block, bytes by rank
    for said in (
        "Failed", "1 finding", "model.layers.0.self_attn", "3.0e-01", "over its gate", "drifted", "source holds NaN",
        "unsupported", "not run", "99.9999%", "Compared by bytes only: 1", "all_gather", "2,048", "perplexity", "8.25",
        "1.00 MB", "2.13.0", "calibrated on the original", "tpshard verify out", "the 2 ranks are unequal", "nan",
    ):  # fmt: skip
        assert said in found.text, said
    passed = Reader().read(page(example(passed=True)))
    assert "Passed" in passed.text and "finding" not in passed.text and "Every parameter had a part" in passed.text
    assert "Nothing was checked" in Reader().read(page(Verification("verify", "out", None, 2))).text


def test_long_names_are_whole_on_the_page_and_break_at_dots_only() -> None:
    report = example()
    name = "vision_tower.vision_model.encoder.layers.30.self_attn"
    for found in report.verdicts[2].measures[:2]:
        found.block, found.point, found.note = name, f"{name}.out_proj", "a note"
    document = page(report)
    label = re.search(rf'<text class="name"[^>]*translate\(([\d.]+) [^>]*>{re.escape(name)}</text>', document)
    assert label is not None and float(label[1]) > 5 * len(name) * 0.85  # there is room for it on the left
    assert f"<code>{name.replace('.', '.<wbr>')}</code>" in document
    assert "td code,li code{font-size:13px;overflow-wrap:normal" in document
    rows = re.findall(r'<tr class="notes"><td colspan="(\d+)">(.*?)</td></tr>', document)
    assert ("9", '<div class="note">no such class</div>') in rows and ("8", '<div class="note">a note</div>') in rows


@pytest.mark.parametrize("kind", ["unsupported", "source_nan", "not_run"])
def test_what_is_no_failure_has_a_headline_of_its_own(kind: str) -> None:
    verdicts = [LevelVerdict("plan", "passed"), LevelVerdict("twin", kind)]
    report = Verification("verify", "out", None, 2, verdicts=verdicts)
    words = {"unsupported": "UNSUPPORTED", "source_nan": "SOURCE HOLDS NaN", "not_run": "NOT RUN"}
    told = f"{words[kind]} (twin)"
    assert render(report).splitlines()[:2] == [f"verify out: {told}", "  2 ranks, 0 files"]
    assert f"tpshard verify: {told}" in summary(report).splitlines()[0] and "❌" not in summary(report)
    assert "Failed" not in Reader().read(page(report)).text
    report.findings.append(Finding("baseline", "b.json", "", "sizes changed"))
    assert headline(report) == ("failed", ["baseline"]) and "FAILED (baseline)" in render(report)
    report.verdicts[0].verdict = "failed"
    assert headline(report) == ("failed", ["plan", "baseline"])


def test_a_page_of_hostile_names_shows_them_as_text() -> None:
    found = Reader().read(page(hostile()))
    assert "<script>alert(1)</script>" in found.text and "\x00" not in found.text


def test_pages_of_large_models_stay_small() -> None:
    report = example(layers=200)
    report.rank_bytes = [10**9 + rank for rank in range(256)]
    document = page(report)
    Reader().read(document)
    assert len(document) < 1_000_000
    assert len(page(example(passed=True))) < 40_000


def test_the_page_opens_in_a_browser(tmp_path: Path) -> None:
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
    browser = next((found for found in map(shutil.which, names) if found), None)
    if browser is None:
        pytest.skip(f"needs Chromium or Chrome ({', '.join(names)}) to open the page in")
    (tmp_path / "page.html").write_text(page(example()), encoding="utf-8")
    command = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
        "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
        f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1200,1600",
        f"--screenshot={tmp_path / 'page.png'}", (tmp_path / "page.html").as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    image = (tmp_path / "page.png").read_bytes()
    assert image.startswith(b"\x89PNG") and len(image) > 40_000  # an empty page has a few kB


# -- lines, blocks, files ----------------------------------------------------------------------------


def test_the_terminal_shows_every_error_beside_its_gate() -> None:
    text = render(example())
    assert "verify out: FAILED" in text and "gate 1.0e-10" in text
    assert "fail model.layers.0.self_attn.q_norm on rank 1: nan, gate 1.0e-10" in text
    assert "compared by bytes only: model.layers.1.mlp.experts.5.w1.weight" in text
    assert "9 all_reduce, 1 all_gather a pass, 2.05 kB a token" in text
    assert "unsupported" in text and "the source holds NaN" in text


def test_blocks_gather_points_and_count_nan_as_worst() -> None:
    blocks = {block.name: block for block in blocks_of(example().verdicts[2])}
    assert math.isnan(blocks["model.layers.0.self_attn"].worst.error)
    assert blocks["model.layers.0.self_attn"].status == "fail" and blocks["lm_head"].free is None
    assert [block.status for block in failing_first(blocks.values())][:3] == ["fail", "drift", "pass"]


def test_numbers_for_people() -> None:
    assert [number(value) for value in (None, 0.0, 2.71e-15, math.nan, math.inf)] == ["–", "0", "2.7e-15", "nan", "inf"]
    assert [percent(part) for part in (None, 1.0, 0.99999999, 0.5, 0.0)] == [
        "not measured", "100%", "99.9999%", "50%", "0%",
    ]  # fmt: skip


def test_reports_with_nan_are_json() -> None:
    values = json.loads(json.dumps(example().as_json(), allow_nan=False))
    assert values["schema"] == "tpshard.verify/1"
    assert values["verdicts"][2]["measures"][3]["error"] == "nan"


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no-such-directory"):
        write_text(tmp_path / "no-such-directory" / "x.xml", "x")
    write_text(tmp_path / "x", "a\n")
    write_text(tmp_path / "x", "b\ud800\n", append=True)
    assert (tmp_path / "x").read_bytes() == b"a\nb\\ud800\n"
