"""The script that everyone writes, as a yardstick: torch and safetensors, a rank at a time, no checks, no digests.

    python common_script.py split SRC OUT TP      safe_open + get_slice + save_file per rank
    python common_script.py reshard SRC OUT TP    load every rank, cat, split again, save
    python common_script.py merge SRC OUT         load every rank, cat, save

It is a fair one: files are mapped, not read (``safe_open``), a rank reads only its own slices, nothing is copied that
need not be, and float conversion never happens. It handles Llama-like names only, cuts wherever the division falls
(uneven degrees cut through heads), and its outputs are not meant to be served: what is compared is the work.
"""

import shutil
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

COLUMN_PARALLEL = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "w1", "w3", "embed_tokens", "lm_head")
ROW_PARALLEL = ("o_proj", "down_proj", "w2")


def parallel_dim(name):
    """The dimension along which the tensor ``name`` is cut, None where every rank holds it whole."""
    module = name.rsplit(".", 2)[-2]
    if module in COLUMN_PARALLEL:
        return 0
    if module in ROW_PARALLEL:
        return 1
    return None


def weight_files(directory):
    """The safetensors files of a checkpoint, by name."""
    return sorted(directory.glob("*.safetensors"))


def copy_side_files(source, out):
    """config.json and the like."""
    out.mkdir(parents=True)
    for path in source.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and not path.name.startswith(("model.safet", "tpshard")):
            shutil.copyfile(path, out / path.name)


def split(source, out, tp_size):
    """One pass over the source per rank, each reading the rank's own slices."""
    copy_side_files(source, out)
    for rank in range(tp_size):
        tensors = {}
        for path in weight_files(source):
            with safe_open(path, framework="pt") as file:
                names = file.keys()
                for name in names:
                    dim = parallel_dim(name)
                    if dim is None:
                        tensors[name] = file.get_tensor(name)
                        continue
                    view = file.get_slice(name)
                    size = view.get_shape()[dim]
                    start, stop = size * rank // tp_size, size * (rank + 1) // tp_size
                    part = view[start:stop] if dim == 0 else view[:, start:stop]
                    tensors[name] = part.contiguous()
        save_file(tensors, out / f"model-tp-{rank:02d}-of-{tp_size:02d}.safetensors", metadata={"format": "pt"})


def load_joined(source):
    """Every tensor whole, from all ranks' files."""
    ranks = [load_file(path) for path in weight_files(source)]
    whole = {}
    for name in list(ranks[0]):
        parts = [rank.pop(name) for rank in ranks]
        dim = parallel_dim(name)
        whole[name] = parts[0] if dim is None else torch.cat(parts, dim=dim)
    return whole


def reshard(source, out, tp_size):
    """Join, then cut again; a joined tensor is let go once its parts are made."""
    copy_side_files(source, out)
    whole = load_joined(source)
    ranks = [{} for _ in range(tp_size)]
    for name in list(whole):
        tensor = whole.pop(name)
        dim = parallel_dim(name)
        parts = [tensor] * tp_size if dim is None else torch.tensor_split(tensor, tp_size, dim=dim)
        for rank, part in zip(ranks, parts, strict=True):
            rank[name] = part.contiguous()
    for number, tensors in enumerate(ranks):
        save_file(tensors, out / f"model-tp-{number:02d}-of-{tp_size:02d}.safetensors", metadata={"format": "pt"})


def merge(source, out):
    """Join and save as one file."""
    copy_side_files(source, out)
    save_file(load_joined(source), out / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    command, source, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    if command == "split":
        split(source, out, int(sys.argv[4]))
    elif command == "reshard":
        reshard(source, out, int(sys.argv[4]))
    elif command == "merge":
        merge(source, out)
    else:
        sys.exit(__doc__)
