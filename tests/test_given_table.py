"""``--table FILE``: a table of one's own is used, or refused with what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import tpshard
from weights import write_llama

WRONG_TABLES = {
    "of another family": ("MODEL_TYPES = ('gpt2',)\ndef table(c): ...", "serves gpt2"),
    "that fails": ("MODEL_TYPES = ('llama',)\ndef table(c): raise RuntimeError('boom')", "boom"),
    "that gives no table": ("MODEL_TYPES = ('llama',)\ndef table(c): return 5", "gives a int, not a Table"),
    "with a text for its types": ("MODEL_TYPES = 'llama'\ndef table(c): ...", "not a tuple of names"),
    "that leaves": ("raise SystemExit(0)", "SystemExit"),
}


@pytest.mark.parametrize("kind", WRONG_TABLES)
def test_a_table_is_never_passed_over(kind: str, tmp_path: Path) -> None:
    body, said = WRONG_TABLES[kind]
    write_llama(tmp_path / "model")
    (tmp_path / "own.py").write_text(f"FAMILY = 'own'\n{body}\n")
    done = tpshard("inspect", str(tmp_path / "model"), "--table", str(tmp_path / "own.py"))
    assert done.status == 2
    assert said in done.err
