"""The rows of the batch: three runs of the model in one.

Every participant runs on the same batch of three parts, each a number of whole sequences:

* *main*: at every point the ranks go on with the reference's tensor (teacher forced), so that a fault is
  named by its point and does not hide the next;
* *free*: the ranks go on with their own sum. The reference uses these rows for itself: at every point they
  are the main rows, each element moved by about one unit in its last place, so that what comes out is the
  noise that the sublayer makes of differences as small as another order of sums gives;
* *probe*: at every point all go on with the same Gaussian noise of the reference's size there, so that every
  sublayer is also tried on inputs that the tokens do not give; its tokens are sent through all experts in turn.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from math import ceil

import torch


@dataclass(frozen=True)
class Shares:
    """How a tensor's first dimension divides: indices of the three parts."""

    main: slice
    free: slice
    probe: slice


class Batch:
    """The layout of the batch, and the random numbers that all participants share.

    Args:
        tokens: length of a sequence.
        probes: sequences of the probe.
        vocabulary: number of token ids of the text, 0 where there is none.
        ulp: the relative size of the free rows' movement in the reference.
        text: token ids of the main and free rows, in place of made-up ones.
    """

    def __init__(
        self, tokens: int, probes: int, vocabulary: int, seed: int, ulp: float, text: torch.Tensor | None = None
    ) -> None:
        self.tokens, self.probes, self.vocabulary, self.seed, self.ulp = tokens, probes, vocabulary, seed, ulp
        self.rows, self.text = 2 + probes, text
        self.units = {1, tokens}  # how many vectors of one row tensors may have along their first dimension
        self.cotangents = torch.Generator().manual_seed(seed + 1)

    def ids(self, vocabulary: int | None = None, name: str = "ids") -> torch.Tensor:
        """Token ids ``[rows, tokens]``: the first, the last, odd ones, and some spread over the vocabulary.

        ``vocabulary``: number of ids, where they are others than the text's (a decoder's); they have another ``name``.
        """
        count = self.vocabulary if vocabulary is None else vocabulary
        generator = self.generator(name)
        spread = torch.linspace(0, count - 1, self.tokens, dtype=torch.float64).long()
        chance = torch.randint(0, count, (self.tokens,), generator=generator)
        main = torch.where(torch.arange(self.tokens) % 2 == 0, spread, chance)
        main[-1] = count - 1
        if self.text is not None and name == "ids":
            main = self.text
        probe = torch.randint(0, count, (self.probes, self.tokens), generator=generator)
        return torch.cat([main[None], main[None], probe])

    def values(self, name: str, *shape: int) -> torch.Tensor:
        """Gaussian numbers ``[rows, *shape]`` in place of an image, a sound or what an encoder makes."""
        main, *probes = torch.randn(1 + self.probes, *shape, generator=self.generator(name), dtype=torch.float32)
        return torch.stack([main, main, *probes])

    def generator(self, text: str) -> torch.Generator:
        """A generator of its own for everything that has a name."""
        return torch.Generator().manual_seed((self.seed << 32) ^ zlib.crc32(text.encode()))

    def parts(self, tensor: torch.Tensor) -> Shares | None:
        """The parts of a tensor of batch rows or of tokens; None where it is neither (the same for all rows)."""
        unit, rest = divmod(tensor.shape[0], self.rows) if tensor.dim() else (0, 0)
        if rest or unit not in self.units:
            return None
        return Shares(slice(0, unit), slice(unit, 2 * unit), slice(2 * unit, tensor.shape[0]))

    def gaussian(self, name: str, like: torch.Tensor, main: torch.Tensor) -> torch.Tensor:
        """Noise in the shape of ``like`` with the root mean square of ``main``."""
        size = main.double().pow(2).mean().sqrt().clamp_min(1e-30)
        noise = torch.randn(like.shape, generator=self.generator(name), dtype=torch.float32)
        return noise.to(like.device, like.dtype) * size.to(like.dtype)

    def moved(self, name: str, main: torch.Tensor) -> torch.Tensor:
        """``main`` with every element moved by up to an ulp."""
        by = torch.rand(main.shape, generator=self.generator(name + "/ulp"), dtype=torch.float32) * 2 - 1
        return main * (1 + by.to(main.device, main.dtype) * self.ulp)

    def routed(self, indices: torch.Tensor, experts: int, reference: bool) -> torch.Tensor:
        """Expert indices ``[tokens, k]`` with the probe's going over all experts in turn."""
        shares = self.parts(indices)
        assert shares is not None
        out = indices.clone()
        count = out[shares.probe].numel()
        cycle = torch.arange(count, device=indices.device) % experts
        out[shares.probe] = cycle.view_as(out[shares.probe]).to(indices.dtype)
        if reference:
            out[shares.free] = out[shares.main]
        return out

    def weighted(self, weights: torch.Tensor, reference: bool) -> torch.Tensor:
        """Expert weights ``[tokens, k]`` with the probe's between 1/2 and 1, none of them zero."""
        shares = self.parts(weights)
        assert shares is not None
        out = weights.clone()
        probe = out[shares.probe]
        chance = torch.rand(probe.shape, generator=self.generator("weights"), dtype=torch.float32)
        out[shares.probe] = (0.5 + chance / 2).to(probe.device, probe.dtype)
        return out


def probes_needed(tokens: int, experts: int, per_token: int) -> int:
    """Sequences of the probe, so that every expert gets a token."""
    return max(1, ceil(experts / (max(1, per_token) * tokens))) if experts else 1
