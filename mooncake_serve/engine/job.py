"""`Job`: a request as the engine's core holds it, and how it takes its next token.

Pure: no thread, no store, no clock. The core owns every job and sends the events.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from mooncake_serve.engine.detokenizer import Detokenizer
from mooncake_serve.engine.grammar import GrammarFailed
from mooncake_serve.engine.protocol import FinishReason, OnEvent, TokenEvent
from mooncake_serve.engine.sampler import Sampled, Sampler
from mooncake_serve.engine.sequence import Sequence


@dataclass(slots=True, eq=False)
class Job:
    """One request that runs: its tokens, where its events go, how it samples, its text."""

    sequence: Sequence
    on_event: OnEvent
    sampler: Sampler
    detokenizer: Detokenizer

    def push(
        self, sampled: Sampled, eos_token_ids: Collection[int]
    ) -> tuple[TokenEvent, FinishReason | None]:
        """Append the next token; its event, and why the request ends if it was the last one."""
        sampling = self.sequence.request.sampling
        self.sequence.tokens.append(sampled.token_id)
        is_eos = sampled.token_id in eos_token_ids and not sampling.ignore_eos
        text = "" if is_eos else self.detokenizer.push(sampled.token_id)
        token = TokenEvent(sampled.token_id, text, sampled.logprob, sampled.top_logprobs)
        if is_eos or self.detokenizer.stopped or self.sampler.complete:
            return token, "stop"
        return token, "length" if self.sequence.generated >= sampling.max_tokens else None


def choose(jobs: list[Job], logits: torch.Tensor) -> list[Sampled | GrammarFailed]:
    """One token per row of `logits`, `[jobs, vocab]`."""
    if all(job.sampler.is_plain_greedy for job in jobs):
        return [Sampled(token) for token in logits.argmax(dim=-1).tolist()]
    return [_sample(job, row) for job, row in zip(jobs, logits, strict=True)]


def _sample(job: Job, row: torch.Tensor) -> Sampled | GrammarFailed:
    try:
        return job.sampler.sample(row)
    except GrammarFailed as err:
        return err
