"""vLLM as an engine, in this process. After every update it is given the weights in memory, without a file.

vLLM is not installed with Plaudit, and its versions of other packages differ; it has a lock of its own
(requirements-vllm.lock). Where features of a shared trunk are needed, the arrangement computes them from the answers.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from plaudit.config import SamplingConfig
from plaudit.errors import ConfigError, NonFinite
from plaudit.types import Prompt, Rollout


class VLLMEngine:
    """Answers through vLLM, with the weights that ``model`` has at every :meth:`load`.

    ``folder`` is where the model was loaded from: vLLM reads its configuration and first weights there. On a GPU vLLM
    gives its memory back between two calls (sleep), and takes it again (wake).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        folder: str,
        end_ids: Sequence[int],
        *,
        max_rows: int = 128,
        context: int = 2048,
        device: torch.device | str = "cpu",
    ):
        # one process: weights are handed over by reference
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        try:
            from vllm import LLM
        except ImportError as error:
            raise ConfigError(
                f"engine.kind=vllm needs vLLM ({error}); install requirements-vllm.lock into an environment of its "
                "own, or use engine.kind=local"
            ) from None
        on_gpu = torch.device(device).type == "cuda"
        extra: dict[str, Any] = {"enable_sleep_mode": True, "gpu_memory_utilization": 0.4} if on_gpu else {}
        self.llm = LLM(
            model=folder,
            dtype=str(model.dtype).removeprefix("torch."),
            enforce_eager=not on_gpu,
            max_model_len=context,
            max_num_seqs=max_rows,
            # the log-probabilities of what was sampled from: after temperature, top-p and top-k
            logprobs_mode="processed_logprobs",
            enable_prefix_caching=True,
            disable_log_stats=True,
            seed=0,
            **extra,
        )
        self.model, self.end_ids, self.sleeps = model, sorted(end_ids), on_gpu
        self.version = 0
        self.load(0)

    def load(self, version: int) -> None:
        self.version = version
        self._awake()
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": list(self._weights())})
        # what was computed under the old weights must not answer for the new ones
        self.llm.reset_prefix_cache()

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        tied = getattr(self.model.config, "tie_word_embeddings", False)
        for name, weight in self.model.state_dict().items():
            if not (tied and name == "lm_head.weight"):
                yield name, weight.detach()

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingConfig,
        *,
        seed: int,
        progress: Callable[[int], None] | None = None,
    ) -> Rollout:
        from vllm import SamplingParams, TokensPrompt

        self._awake()
        how = [
            SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=sampling.max_new_tokens,
                stop_token_ids=[] if sampling.fixed_length else self.end_ids,
                stop=list(sampling.stop) or None,
                include_stop_str_in_output=True,
                ignore_eos=True,
                seed=_row_seed(seed, i),
                logprobs=0,
                detokenize=bool(sampling.stop),
            )
            for i in range(len(prompts))
        ]
        asked = [TokensPrompt(prompt_token_ids=list(p.ids)) for p in prompts]
        answers = [out.outputs[0] for out in self.llm.generate(asked, how, use_tqdm=False)]
        if progress:
            progress(len(answers))
        if self.sleeps:
            self.llm.sleep(level=1)
        rows = [[*p.ids, *a.token_ids] for p, a in zip(prompts, answers, strict=True)]
        masks = [[False] * len(p.ids) + [True] * len(a.token_ids) for p, a in zip(prompts, answers, strict=True)]
        logprobs = torch.zeros(len(rows), max(map(len, rows)))
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            said = [at[token].logprob for at, token in zip(answer.logprobs, answer.token_ids, strict=True)]
            logprobs[i, len(prompt.ids) : len(rows[i])] = torch.tensor(said)
            if not all(map(torch.isfinite, logprobs[i])):
                raise NonFinite(f"vLLM's log-probabilities are not finite (answer {i}); nothing was kept")
        stopped = [isinstance(a.stop_reason, str) for a in answers]
        return Rollout.pack(
            rows,
            masks,
            logprobs=logprobs,
            terminated=torch.tensor([a.finish_reason == "stop" for a in answers]),
            stopped=torch.tensor(stopped),
            version=torch.full((len(rows),), self.version),
            prompts=tuple(prompts),
        )

    def _awake(self) -> None:
        if self.sleeps:
            self.llm.wake_up()


def _row_seed(seed: int, row: int) -> int:
    """A seed for each row, so that its answer does not depend on its neighbours."""
    return int.from_bytes(hashlib.sha256(f"{seed} {row}".encode()).digest()[:4], "big")
