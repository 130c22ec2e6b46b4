"""`bench engine`: prefill, decode and warm starts, beside transformers' `generate` in the same run.

Ours and `generate` take turns on the same prompts, and each figure is a median over the turns, so
that a machine which slows down slows both. Prompts are random tokens, new ones for each turn:
nothing is warm unless the measurement is about warmth. Two engines share a store, as replicas do.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from mooncake_serve.bench.decode_long import BATCH, CONTEXT, decode_long
from mooncake_serve.bench.report import emit, machine, progress, version
from mooncake_serve.bench.store import memcpy_rate, running_store
from mooncake_serve.config import AppConfig, ModelConfig
from mooncake_serve.engine.build import build_engine
from mooncake_serve.engine.core import EngineCore
from mooncake_serve.engine.protocol import (
    Event,
    FailEvent,
    FinishEvent,
    GenerationRequest,
    SamplingParams,
    TokenEvent,
)
from mooncake_serve.models import load_model
from mooncake_serve.store import NodeStore

GIB = 1 << 30
TAIL_TOKENS = 32
LONGEST = 7000
MORE_TURNS_MAX = 8
WAIT_S = 600.0
DECODE_PROMPT, DECODE_TOKENS = 64, 48
ONEDNN_ISAS = {
    "avx2": "AVX2",
    "avx512": "AVX512_CORE",
    "avx512_bf16": "AVX512_CORE_BF16",
    "amx": "AVX512_CORE_AMX",
}
"""Ours to oneDNN's own name."""

_numbers = itertools.count()


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `mooncake-serve bench engine` and of `python -m mooncake_serve.bench.engine`."""
    parser = argparse.ArgumentParser(prog="mooncake-serve bench engine", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object (the default)")
    parser.add_argument("--quick", action="store_true", help="fewer sizes, within a minute")
    parser.add_argument("--backend", choices=["torch", "native"], default="torch")
    parser.add_argument("--model", default=ModelConfig().id)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--block-tokens", type=int, default=None)
    parser.add_argument("--turns", type=int, default=None, help="turns behind each median")
    parser.add_argument(
        "--isa", choices=list(ONEDNN_ISAS), help="hold both sides to one instruction set"
    )
    options = parser.parse_args(argv)
    if options.isa and os.environ.get("ONEDNN_MAX_CPU_ISA") != ONEDNN_ISAS[options.isa]:
        return _restarted(options.isa, sys.argv[1:] if argv is None else argv)
    emit(Measurement(options).run())
    return 0


def _restarted(isa: str, argv: Sequence[str]) -> int:
    """The same run in a process whose oneDNN, which computes for `generate`, is limited too."""
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": ONEDNN_ISAS[isa]}
    command = [sys.executable, "-m", "mooncake_serve.bench.engine", *argv]
    return subprocess.run(command, env=environment, check=False).returncode


@dataclass
class Answer:
    """One request's events, with the time of each token since it was submitted."""

    started: float = field(default_factory=time.perf_counter)
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    cached_store_tokens: int = 0
    error: Exception | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    def receive(self, event: Event) -> None:
        """Called on the engine's thread."""
        if isinstance(event, TokenEvent):
            self.times.append(time.perf_counter() - self.started)
            self.tokens.append(event.token_id)
            return
        if isinstance(event, FailEvent):
            self.error = event.error
        elif isinstance(event, FinishEvent):
            self.prompt_tokens = event.usage.prompt_tokens
            self.cached_tokens = event.usage.cached_tokens
            self.cached_store_tokens = event.usage.cached_store_tokens
        self.ended.set()

    def wait(self) -> Answer:
        """Block until the request ended; raises what it failed with."""
        if not self.ended.wait(WAIT_S):
            raise TimeoutError(f"a request did not end within {WAIT_S} s")
        if self.error is not None:
            raise self.error
        return self


def ask(engine: EngineCore, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Answer]:
    """Submit all at once and wait for all."""
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    answers = []
    for prompt in prompts:
        answer = Answer()
        request = GenerationRequest(f"bench-{next(_numbers)}", tuple(prompt), sampling)
        engine.submit(request, answer.receive)
        answers.append(answer)
    return [answer.wait() for answer in answers]


def first_token_s(engine: EngineCore, prompt: Sequence[int]) -> float:
    """Seconds to the first token of a request alone."""
    return ask(engine, [prompt], 1)[0].times[0]


class Measurement:
    """All measurements of one run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._quick: bool = options.quick
        self._turns: int = options.turns or (1 if self._quick else 5)
        self._random = random.Random(20)
        settings: dict[str, Any] = {"device": "cpu", "backend": options.backend}
        settings["threads"] = options.threads
        if options.isa:
            settings["isa"] = options.isa
        if options.block_tokens:
            settings["block_tokens"] = options.block_tokens
        self._config = AppConfig.model_validate(
            {"model": {"id": options.model}, "engine": {**settings, "pool": 3 * GIB // 2}}
        )
        self._block_tokens = 0
        self._vocab = 0

    def run(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        result: dict[str, Any] = {
            "machine": machine(),
            "version": version(),
            "runs": self._turns,
            "backend": self._options.backend,
            "threads": self._options.threads,
            "isa": self._options.isa or "best",
        }
        with ExitStack() as stack:
            progress("loading the model")
            off = stack.enter_context(self._engine(None))
            self._vocab = off.info.vocab_size
            self._block_tokens = result["block_tokens"] = off.info.layout.block_tokens
            generate = Generate(self._config, self._options.threads)
            self._warm_up(off, generate)
            result["prefill"] = self._prefill(off, generate)
            result["decode"] = self._decode(off, generate)
            result["mixed"] = self._mixed(off, generate)
            del generate
            if self._options.backend == "native":
                progress(f"decode at batch {BATCH}, {CONTEXT} tokens of context each")
                steps = 3 if self._quick else 9
                result["decode_long"] = decode_long(
                    self._config.model, self._options.threads, self._options.isa, steps
                )
            disk = stack.enter_context(tempfile.TemporaryDirectory(dir="/var/tmp"))
            settings = {"nvme_path": disk + "/blocks", "nvme_bytes": 4 * GIB}
            self._client, path = stack.enter_context(running_store(3 * GIB, **settings))
            first = stack.enter_context(self._engine(path))
            result["zero_hit_ttft"] = self._zero_hit(first, off)
            off.close()
            second = stack.enter_context(self._engine(path))
            result["warm_ttft"] = [self._warm(first, second, n) for n in self._warm_sizes()]
            result["warm_mean_s"] = self._warm_mean(first, second)
        return result

    @contextmanager
    def _engine(self, socket: str | None) -> Iterator[EngineCore]:
        store = NodeStore(socket) if socket else None
        if store is not None and not store.wait_until_healthy(WAIT_S):
            raise RuntimeError("the store did not answer")
        engine = build_engine(self._config, store)
        try:
            yield engine
        finally:
            engine.close()
            if store is not None:
                store.close()

    def _prompt(self, tokens: int) -> list[int]:
        return [self._random.randrange(self._vocab) for _ in range(tokens)]

    def _warm_up(self, engine: EngineCore, generate: Generate) -> None:
        prompt = self._prompt(600)
        ask(engine, [prompt], 4)
        generate([prompt], 4)

    def _turns_of(self, tokens: int) -> int:
        """More turns the shorter they are: the difference that is looked for is smaller then."""
        if self._quick:
            return self._turns
        return self._turns * min(MORE_TURNS_MAX, max(1, LONGEST // tokens))

    def _median(self, measure: Callable[[], float]) -> float:
        return statistics.median(measure() for _ in range(self._turns))

    def _in_turns(
        self, ours: Callable[[], float], theirs: Callable[[], float], turns: int | None = None
    ) -> tuple[float, float]:
        pairs = [(ours(), theirs()) for _ in range(turns or self._turns)]
        return statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)

    def _prefill(self, engine: EngineCore, generate: Generate) -> list[dict[str, float]]:
        rows = []
        for tokens in (512, 2048) if self._quick else (512, 2048, LONGEST):
            progress(f"prefill of {tokens} tokens")
            ours, theirs = self._in_turns(
                lambda n=tokens: first_token_s(engine, self._prompt(n)),
                lambda n=tokens: generate([self._prompt(n)], 1),
                self._turns_of(tokens),
            )
            rows.append(
                {"tokens": tokens, "ours_tok_s": tokens / ours, "generate_tok_s": tokens / theirs}
            )
        return rows

    def _decode(self, engine: EngineCore, generate: Generate) -> list[dict[str, float]]:
        def ours(batch: int) -> float:
            prompts = [self._prompt(DECODE_PROMPT) for _ in range(batch)]
            answers = ask(engine, prompts, DECODE_TOKENS)
            # From the time all of them decode to the time the first is done.
            begin = max(answer.started + answer.times[0] for answer in answers)
            end = min(answer.started + answer.times[-1] for answer in answers)
            stamps = [answer.started + each for answer in answers for each in answer.times]
            return sum(begin < stamp <= end for stamp in stamps) / (end - begin)

        def theirs(batch: int) -> float:
            prompts = [self._prompt(DECODE_PROMPT) for _ in range(batch)]
            seconds = generate(prompts, DECODE_TOKENS) - generate(prompts, 1)
            return batch * (DECODE_TOKENS - 1) / seconds

        rows = []
        for batch in (1, 16) if self._quick else (1, 8, 16):
            progress(f"decode at batch {batch}")
            rate, reference = self._in_turns(lambda n=batch: ours(n), lambda n=batch: theirs(n))
            rows.append({"batch": batch, "ours_tok_s": rate, "generate_tok_s": reference})
        return rows

    def _mixed(self, engine: EngineCore, generate: Generate) -> dict[str, float]:
        progress("16 requests of 256 in, 64 out")

        def ours() -> float:
            begin = time.perf_counter()
            ask(engine, [self._prompt(256) for _ in range(16)], 64)
            return 16 * 64 / (time.perf_counter() - begin)

        def theirs() -> float:
            return 16 * 64 / generate([self._prompt(256) for _ in range(16)], 64)

        rate, reference = self._in_turns(ours, theirs)
        figures = {"ours_out_tok_s": rate, "generate_out_tok_s": reference}
        return {"requests": 16, "in": 256, "out": 64, **figures}

    def _zero_hit(self, on: EngineCore, off: EngineCore) -> dict[str, float]:
        progress("first token with the store on and off, nothing cached")
        first_token_s(on, self._prompt(600))

        def with_store() -> float:
            seconds = first_token_s(on, self._prompt(2048))
            # What is published late must not cost the other side.
            on.flush(WAIT_S)
            return seconds

        # A difference of 5 % wants more turns than one of 50 %.
        on_s, off_s = self._in_turns(
            with_store, lambda: first_token_s(off, self._prompt(2048)), turns=3 * self._turns
        )
        return {"store_on_s": on_s, "store_off_s": off_s}

    def _warm_sizes(self) -> list[int]:
        wanted = (2048,) if self._quick else (1024, 2048, 4096, LONGEST)
        blocks = [(tokens - TAIL_TOKENS) // self._block_tokens for tokens in wanted]
        return [count * self._block_tokens + TAIL_TOKENS for count in blocks if count]

    def _warm(self, first: EngineCore, second: EngineCore, tokens: int) -> dict[str, Any]:
        """Cold on one engine, again from its pool, and on the other from the store."""
        progress(f"warm start at {tokens} tokens")
        cold, pool, store = [], [], []
        for turn in range(self._turns_of(tokens)):
            prompt = self._prompt(tokens)
            cold.append(first_token_s(first, prompt))
            first.flush(WAIT_S)
            # What the store writes to its disk in the background is no part of a load.
            self._client.drain(timeout_s=WAIT_S)
            for engine in (first, second) if turn % 2 else (second, first):
                self._wake(engine)
                (answer,) = ask(engine, [prompt], 1)
                loaded = answer.cached_store_tokens
                if loaded != (tokens - TAIL_TOKENS if engine is second else 0):
                    raise RuntimeError(f"{loaded} of {tokens} tokens came from the store")
                (store if engine is second else pool).append(answer.times[0])
        nvme_s = self._median(lambda: self._from_disk(first, second, tokens))
        layout = first.info.layout
        loaded_bytes = tokens // self._block_tokens * layout.block_bytes
        rate = memcpy_rate(4 << 20)
        cold_s, pool_s, store_s = map(statistics.median, (cold, pool, store))
        return {
            "tokens": tokens,
            "block_tokens": self._block_tokens,
            "tail_tokens": TAIL_TOKENS,
            "loaded_bytes": loaded_bytes,
            "memcpy_gb_s": rate,
            "cold_s": cold_s,
            "pool_s": pool_s,
            "store_s": store_s,
            "nvme_s": nvme_s,
            "cold_over_store": cold_s / store_s,
            "load_over_memcpy": (store_s - pool_s) / (loaded_bytes / rate / 1e9),
        }

    def _wake(self, engine: EngineCore) -> None:
        """Bring an engine's weights into the CPU's caches, as they are on a replica in use."""
        first_token_s(engine, self._prompt(TAIL_TOKENS))

    def _from_disk(self, first: EngineCore, second: EngineCore, tokens: int) -> float:
        """Cold on one engine, then on the other with its blocks on disk only."""
        prompt = self._prompt(tokens)
        first_token_s(first, prompt)
        first.flush(WAIT_S)
        self._client.drain(timeout_s=WAIT_S)
        self._client.cool()
        (answer,) = ask(second, [prompt], 1)
        if answer.cached_store_tokens != tokens - TAIL_TOKENS:
            raise RuntimeError(f"only {answer.cached_store_tokens} tokens came from the disk")
        return answer.times[0]

    def _warm_mean(self, first: EngineCore, second: EngineCore) -> dict[str, float]:
        count = 4 if self._quick else 20
        progress(f"warm start at {count} random lengths")
        cold, store = [], []
        for _ in range(count):
            prompt = self._prompt(self._random.randint(512, 2048 if self._quick else LONGEST))
            cold.append(first_token_s(first, prompt))
            first.flush(WAIT_S)
            store.append(first_token_s(second, prompt))
        return {
            "lengths": count,
            "cold": statistics.fmean(cold),
            "store": statistics.fmean(store),
        }


class Generate:
    """transformers' own `generate` with SDPA attention, for the same model and threads."""

    def __init__(self, config: AppConfig, threads: int) -> None:
        torch.set_num_threads(threads)
        self._threads = threads
        self._model: Any = load_model(config.model, "cpu").model

    def __call__(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> float:
        """Seconds for `new_tokens` greedy tokens after each prompt (all of one length)."""
        torch.set_num_threads(self._threads)
        ids = torch.tensor(prompts)
        begin = time.perf_counter()
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
            )
        return time.perf_counter() - begin


if __name__ == "__main__":
    raise SystemExit(main())
