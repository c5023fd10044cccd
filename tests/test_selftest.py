"""The self-test: every planted fault is caught at its place, good shards raise no alarm, and neither is for nothing."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch", reason="the self-test runs models")
pytest.importorskip("transformers", reason="the self-test runs models")

from commands import ok
from tpshard.errors import UsageError
from tpshard.report import render
from tpshard.reports import Finding, SelfTest
from tpshard.selftest import trial
from tpshard.selftest.catalogue import EQUIVALENT, catalogue
from tpshard.selftest.models import FAMILIES
from tpshard.selftest.plans import PLANS
from tpshard.selftest.runner import GOOD_QUICK, missed, selftest
from tpshard.verdicts import FAILED, PASSED, LevelVerdict, Measure


def told(report: SelfTest) -> str:
    lines = [f"{f.name} ({f.family}, {f.tp_size}): {f.levels} {f.point} {f.note}" for f in missed(report)]
    return "\n".join([*lines, *report.alarms])


@pytest.mark.timeout(300)
def test_every_fault_is_caught_where_it_is_and_good_shards_are_silent() -> None:
    report = selftest(quick=True)
    assert report.passed, told(report)
    assert report.untried == []
    assert report.kinds >= 60
    assert len(report.families) >= 8
    assert report.good_runs >= GOOD_QUICK
    assert {fault.name for fault in report.faults} == {*catalogue(), *PLANS}


def test_the_eighteen_wrong_plans_are_among_them_and_bytes_see_none_that_covers_the_model() -> None:
    assert len(PLANS) >= 18
    report = selftest(["phi3", "gpt_neox"], quick=True)
    plans = [fault for fault in report.faults if fault.kind == "plan"]
    assert plans and all(fault.caught for fault in plans), told(report)
    assert not any("bytes" in fault.levels for fault in plans)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_full_form() -> None:
    report = selftest()
    assert report.passed, told(report)
    assert report.good_runs >= 200
    assert report.planted >= 1000


# -- a self-test that cannot fail would prove nothing -------------------------------------------------


def test_a_verifier_that_sees_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "run_forward", lambda shards, source, way: LevelVerdict("forward", PASSED))
    report = selftest(["llama"], quick=True)
    assert not report.passed
    blind = [fault for fault in missed(report) if fault.kind == "resealed"]
    assert len(blind) > 30
    assert all("the verdict is 'passed'" in fault.note for fault in blind)
    assert report.alarms == []


def test_a_verifier_that_always_alarms_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def alarmed(shards: object, source: object, way: str) -> LevelVerdict:
        where = "model.layers.1.self_attn.o_proj"
        measure = Measure(where, "model.layers.1.self_attn", "sum", None, 1.0, None, 1.0, 1e-10, "fail")
        return LevelVerdict("forward", FAILED, measures=[measure], findings=[Finding("forward", "", where, "wrong")])

    monkeypatch.setattr(trial, "run_forward", alarmed)
    report = selftest(["llama"], quick=True)
    assert not report.passed
    assert len(report.alarms) == report.good_runs > 0
    # What it says is right for faults of that block alone: of all others it names the wrong place.
    assert any("not where the fault is" in fault.note for fault in missed(report))


def test_a_verifier_that_names_the_wrong_rank_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    real = trial.run_forward

    def shifted(shards, source, way):  # type: ignore[no-untyped-def]
        verdict = real(shards, source, way)
        for measure in verdict.measures:
            if measure.rank is not None:
                measure.rank = (measure.rank + 1) % shards.manifest.tp_size
        return verdict

    monkeypatch.setattr(trial, "run_forward", shifted)
    report = selftest(["gpt2"], quick=True)
    wrong = [fault for fault in missed(report) if "ranks" in fault.note]
    assert {"norm left at ones on one rank", "positions off by one on one rank"} <= {fault.name for fault in wrong}


def test_a_gate_that_is_too_wide_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tolerances as projects publish them (5e-3) let faults through, and the self-test says which."""
    real = trial.run_forward

    def lenient(shards, source, way):  # type: ignore[no-untyped-def]
        verdict = real(shards, source, way)
        for measure in verdict.measures:
            measure.status = "pass" if measure.error <= 5e-3 else "fail"
        if all(measure.status == "pass" for measure in verdict.measures):
            verdict.verdict, verdict.findings = PASSED, []
        return verdict

    monkeypatch.setattr(trial, "run_forward", lenient)
    report = selftest(["llama"], quick=True)
    assert {"lowest bit of one q weight", "lowest bit of one down weight"} <= {fault.name for fault in missed(report)}


# -- the catalogue and the report -------------------------------------------------------------------


def test_every_fault_says_what_it_is() -> None:
    said = [fault.says for fault in [*catalogue().values(), *PLANS.values()]]
    assert all(text and "\n" not in text for text in said)
    assert len(set(said)) == len(said)
    assert {family for wrong in PLANS.values() for family in wrong.families} <= {*FAMILIES, "bitnet"}
    assert {family for fault in catalogue().values() for family in fault.families} <= set(FAMILIES)
    assert sum(fault.kind == EQUIVALENT for fault in catalogue().values()) >= 4


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(UsageError, match="no family 'nothing'; choose among llama"):
        selftest(["nothing"])


def test_the_command_prints_a_table_and_json() -> None:
    report = json.loads(ok("selftest", "--family", "mamba2", "--quick", "--json").out)
    assert report["schema"] == "tpshard.selftest/1"
    assert report["passed"] and report["caught"] == report["planted"] > 20
    fault = report["faults"][0]
    assert fault["expected"] and fault["error"] > fault["gate"]


def test_the_table_names_what_was_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "run_forward", lambda shards, source, way: LevelVerdict("forward", PASSED))
    text = render(selftest(["mamba2"], quick=True))
    assert "MISSED B and C exchanged on one rank (mamba2, 2 ranks, auto)" in text
    assert "selftest FAILED" in text
