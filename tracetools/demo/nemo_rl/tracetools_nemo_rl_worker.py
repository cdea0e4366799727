"""A policy worker for NeMo-RL's worker group that needs no GPU: gloo, and a model of two layers.

In: shards, by NeMo-RL's `Policy.train`. Out: what that expects back. Uses NeMo-RL's Timer and its decorator, as its own workers do, so that
the ranges in a trace are the ones of a real run. Knows nothing of the loop around it.
"""

from __future__ import annotations

import tracetools_nemo_rl_compat  # noqa: F401  before nemo_rl

# isort: split
from typing import Any

import ray
import torch
from nemo_rl.utils.nsys import wrap_with_nvtx_name
from nemo_rl.utils.timer import Timer
from torch import distributed
from torch.nn import functional

VOCABULARY, HIDDEN = 256, 192


class CpuWorkerImpl:
    """One rank; NeMo-RL gives it its place by environment variables."""

    def __init__(self, **_: Any) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(1234)
        distributed.init_process_group("gloo")
        self.model = torch.nn.Sequential(
            torch.nn.Embedding(VOCABULARY, HIDDEN),
            torch.nn.Linear(HIDDEN, 4 * HIDDEN),
            torch.nn.SiLU(),
            torch.nn.Linear(4 * HIDDEN, VOCABULARY),
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.timer = Timer()

    def is_alive(self) -> bool:
        return True

    @wrap_with_nvtx_name("megatron_policy_worker/train")  # type: ignore[untyped-decorator]
    def train(self, data: Any, *_: Any, mbs: int | None = None, **__: Any) -> dict[str, Any]:
        """One optimizer step on this rank's shard, in microbatches of `mbs` sequences."""
        with self.timer.time("train"):
            self.optimizer.zero_grad()
            losses = [self._microbatch(tokens) for tokens in data["input_ids"].split(mbs or data.size)]
            for parameter in self.model.parameters():
                distributed.all_reduce(parameter.grad)
            self.optimizer.step()
        counts = torch.stack([data["token_mask"].sum().double(), torch.tensor(float(data.size)).double()])
        distributed.all_reduce(counts)
        tokens, sequences = counts.tolist()
        return {
            "rank": distributed.get_rank(),
            "global_loss": torch.stack(losses).mean(),
            "grad_norm": torch.zeros(()),
            "all_mb_metrics": {
                "global_valid_toks": [tokens] * len(losses),
                "global_valid_seqs": [sequences] * len(losses),
            },
        }

    def _microbatch(self, tokens: Any) -> Any:
        logits = self.model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        return loss.detach()

    def start_gpu_profiling(self) -> None:
        """NeMo-RL calls it; there is no GPU."""

    def stop_gpu_profiling(self) -> None:
        """NeMo-RL calls it; there is no GPU."""


@ray.remote
class CpuWorker(CpuWorkerImpl):
    pass
