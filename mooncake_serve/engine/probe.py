"""Checks of a loaded model at start: does it compute what our attention computes, and how exactly?

Both run on the device and in the thread that will serve, and take about a second. They exist
because a configuration cannot say everything: a model that adds a bias, a window or a sink to
its attention must be refused, and whether a linear layer's bits depend on the number of rows is a
property of the machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.functional import linear as apply_linear
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from mooncake_serve.errors import UnsupportedModel

MAX_RELATIVE_ERROR = 0.1
"""Between our logits and the model's own: bf16 rounding gives 0.01-0.03, another formula more."""

PROBED_ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 24, 31)


def own_logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of every position by the model's own (eager) attention, float32 `[tokens, vocab]`.

    Raises UnsupportedModel when its cache is not one plain K and V per layer.
    """
    model.set_attn_implementation("eager")
    cache = DynamicCache(config=model.config)
    output = model(input_ids=tokens.unsqueeze(0), cache=cache, use_cache=True)
    odd = sorted(
        {type(layer).__name__ for layer in cache.layers if type(layer) is not DynamicLayer}
    )
    layers = model.config.num_hidden_layers
    if odd or len(cache.layers) != layers:
        raise UnsupportedModel(
            f"{model.config.model_type} cannot be served: its cache has {len(cache.layers)} layers "
            f"of {', '.join(odd) or 'the plain kind'}, expected {layers} with one K and V each"
        )
    return output.logits[0].float()


def check_logits(model: Any, ours: torch.Tensor, reference: torch.Tensor) -> None:
    """Raise UnsupportedModel when our logits are not the model's own up to rounding."""
    spread = (reference - reference.mean(dim=-1, keepdim=True)).norm()
    error = float((ours - reference).norm() / spread)
    if not error < MAX_RELATIVE_ERROR:
        raise UnsupportedModel(
            f"{model.config.model_type} cannot be served: over the paged cache its logits differ "
            f"from its own by {error:.0%}, so its attention is not plain causal softmax attention"
        )


def least_exact_rows(model: Any, max_rows: int) -> int | None:
    """Smallest batch from which on a row's bits depend neither on its place nor on its company.

    1 where batches of one row use the same kernel as larger ones; often 2, because a single row
    is a matrix-vector product; `max_rows` where only batches of one fixed size agree; else None.
    """
    if not _only_linears(model):
        return None
    linears = list(_linears(model))
    for least in (1, 2, max_rows):
        generator = torch.Generator().manual_seed(20)
        if all(_is_independent(linear, least, max_rows, generator) for linear in linears):
            return least
    return None


def _only_linears(model: Any) -> bool:
    """Whether the probe sees every matrix. Experts, for one, are others: how many rows share a
    product depends there on where the router sends the company."""
    known = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding)
    }
    return all(id(each) in known for each in model.parameters() if each.ndim > 1)


def _linears(model: Any) -> Iterator[torch.nn.Linear]:
    """One linear layer of each shape."""
    seen: set[tuple[int, int, bool]] = set()
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            shape = (module.in_features, module.out_features, module.bias is not None)
            if shape not in seen:
                seen.add(shape)
                yield module


def _is_independent(
    linear: torch.nn.Linear, least: int, max_rows: int, generator: torch.Generator
) -> bool:
    # Three dimensions, as the model calls it: one token of each of several sequences.
    rows, weight = _cancelling(linear, max_rows, generator)
    # Zero, because a bias of any size would hide the rounding errors.
    bias = None if linear.bias is None else torch.zeros_like(linear.bias)

    def apply(x: torch.Tensor) -> torch.Tensor:
        return apply_linear(x, weight, bias)

    together = apply(rows)
    counts = [count for count in PROBED_ROWS if least <= count < max_rows]
    return torch.equal(apply(rows.flip(0)).flip(0), together) and all(
        torch.equal(apply(rows[:count]), together[:count])
        and torch.equal(apply(rows[-count:]), together[-count:])
        for count in counts
    )


def _cancelling(
    linear: torch.nn.Linear, rows: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and a weight whose products cancel, so that only the order of summation is left.

    Ordinary sums hide a change of order: it is rounded away in all but one in thousands of
    results. Here each product meets its negative elsewhere in the sum, and the result is the
    accumulated rounding error itself. Which kernel runs depends on shapes, not on values.
    """
    width = linear.in_features
    half = width // 2
    order = torch.randperm(width, generator=generator)
    first, second = order[:half], order[half : 2 * half]
    x = torch.zeros((rows, 1, width), dtype=torch.float32)
    x[..., first] = torch.randn((rows, 1, half), generator=generator)
    x[..., second] = x[..., first]
    weight = torch.zeros(linear.weight.shape, dtype=torch.float32)
    weight[:, first] = torch.randn((linear.out_features, half), generator=generator)
    weight[:, second] = -weight[:, first]
    return x.to(linear.weight), weight.to(linear.weight)
