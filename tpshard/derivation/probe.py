"""A tiny random model of an architecture, ready to be experimented on.

Every element of every parameter is known by its place in the tensors on disk, under the names that released
files have: checkpoints are cut there, whatever a model joins on loading.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tpshard.errors import TpshardError, UnsupportedError
from tpshard.numerics.rankmodel import materialise
from tpshard.numerics.skeleton import Skeleton
from tpshard.source import open_source

from .patterns import Patterns
from .products import parameters_of

ROWS, TOKENS = 1, 12
MORE_ROWS = 8  # where some unit was off for all tokens of fewer


class Probe:
    """The model of a tiny checkpoint, in float64 on the CPU.

    Args:
        root: the checkpoint's directory.

    Attributes:
        model: with all parameters of the checkpoint.
        parameters: floating-point parameters by name in the model, each object once.
        shapes: shape of every tensor on disk.
        patterns: of the names of parameters and of tensors on disk.
        inputs: arguments of the model's forward.

    Raises:
        UnsupportedError: transformers does not build or run it.
    """

    def __init__(self, root: Path, *, trust_remote_code: bool = False, seed: int = 0) -> None:
        import safetensors.torch

        self.root, self.seed = root, seed
        source = open_source(root)
        stored: dict[str, torch.Tensor] = {}
        for file in source.files:
            stored |= safetensors.torch.load_file(str(source.root / file.name))
        self.shapes = {name: tuple(value.shape) for name, value in stored.items()}
        self.floating = {name for name, value in stored.items() if value.is_floating_point()}
        self.skeleton = Skeleton(root, self.shapes, torch.float64, trust_remote_code=trust_remote_code)
        values = {n: v.double() if v.is_floating_point() else v for n, v in stored.items()}
        self.model = materialise(self.skeleton, values.__getitem__, torch.device("cpu"), trainable=True)
        self.model.eval()
        self.parameters = parameters_of(self.model)
        self.patterns = Patterns(self.skeleton.modules)
        self.offsets: dict[str, int] = {}
        self.elements = 0
        for name, value in stored.items():
            self.offsets[name] = self.elements
            self.elements += value.numel()
        self.origin = self._origins()
        self.inputs = self._inputs(ROWS)

    def _origins(self) -> dict[str, torch.Tensor]:
        """For every parameter the place of each of its elements among those of all tensors on disk."""
        out: dict[str, torch.Tensor] = {}
        made: set[int] = set()
        names = {id(value): name for name, value in self.parameters.items()}
        every = self.model.named_parameters(remove_duplicate=False)  # files may have a tied one under another name
        known = {name: names[id(value)] for name, value in every if id(value) in names}

        def places(name: str) -> torch.Tensor:
            first, shape = self.offsets[name], self.shapes[name]
            return torch.arange(first, first + int(torch.tensor(shape).prod()), dtype=torch.float64).view(shape)

        for recipe in self.skeleton.recipes.values():
            if id(recipe) in made:
                continue
            made.add(id(recipe))
            for target, value in recipe.make(self.skeleton.model, places).items():
                if target in known:
                    out[known[target]] = value.round().long()
        return out

    def more(self) -> None:
        """Run on more tokens from now on."""
        self.inputs = self._inputs(MORE_ROWS)

    def _inputs(self, rows: int) -> dict[str, Any]:
        takes = inspect.signature(self.model.forward).parameters
        chance = torch.Generator().manual_seed(self.seed + 17)
        ids = torch.randint(3, self.vocabulary, (rows, TOKENS), generator=chance)
        inputs: dict[str, Any] = {"input_ids": ids}
        if "attention_mask" in takes:
            inputs["attention_mask"] = torch.ones_like(ids)
        if "decoder_input_ids" in takes:
            inputs["decoder_input_ids"] = torch.randint(3, self.vocabulary, (rows, TOKENS - 4), generator=chance)
        kinds = getattr(self.model.config, "type_vocab_size", None)
        if "token_type_ids" in takes and isinstance(kinds, int) and kinds > 1:
            inputs["token_type_ids"] = torch.randint(0, kinds, (rows, TOKENS), generator=chance)
        if "encoder_hidden_states" in takes and "decoder_input_ids" not in takes and self._crosses():
            width = getattr(self.model.config, "cross_attention_hidden_size", None) or self.model.config.hidden_size
            inputs["encoder_hidden_states"] = torch.randn(
                (rows, TOKENS - 4, width), generator=chance, dtype=torch.float64
            )
        if "use_cache" in takes:
            inputs["use_cache"] = False
        return inputs

    def _crosses(self) -> bool:
        """Whether a decoder attends to an encoder that the model lacks: its states are an input then."""
        return any(re.search(r"cross_?att|encoder_att", name) for name in self.parameters)

    @property
    def vocabulary(self) -> int:
        """How many token ids the model takes."""
        table = self.model.get_input_embeddings()
        return int(table.weight.shape[0])

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        return self.skeleton.modules

    def run(self) -> torch.Tensor:
        """The logits, or the last hidden states where there are none: ``[rows, tokens, ...]``.

        Raises:
            UnsupportedError: the model's own code fails.
        """
        try:
            outputs = self.model(**self.inputs)
        except TpshardError:
            raise
        except Exception as error:  # whatever a model's code makes of sizes that it never had
            text = " ".join(f"{type(error).__name__}: {error}".split())
            raise UnsupportedError(f"{type(self.model).__name__} does not run small on the CPU: {text:.300}") from None
        logits = getattr(outputs, "logits", None)
        first: torch.Tensor = outputs[0] if logits is None else logits
        return first

    def on_disk(self, masks: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Masks of parameters as one mask of all elements on disk, in the order of ``offsets``."""
        flat = torch.zeros(self.elements, dtype=torch.bool)
        for name, mask in masks.items():
            flat[self.origin[name][mask]] = True
        return flat

    def of_tensor(self, flat: torch.Tensor, name: str) -> torch.Tensor:
        """The part of one tensor in what :meth:`on_disk` gives, in its shape."""
        shape = self.shapes[name]
        first = self.offsets[name]
        return flat[first : first + int(torch.tensor(shape).prod())].view(shape)
