"""NeMo-RL's own `sft_train` over its own worker group, with two actors on the CPU: python loop.py STEPS [PLANT_MS].

In: the number of steps, and milliseconds of sleep to plant into the driver's data processing of each. Out: training, and a line per
step with its loss and its tokens. Needs NeMo-RL and this folder on PYTHONPATH.
"""

from __future__ import annotations

import tracetools_nemo_rl_compat  # noqa: F401  before nemo_rl

# isort: split
import sys
import time
from types import SimpleNamespace
from typing import Any

import torch
from nemo_rl.algorithms import sft
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.named_sharding import NamedSharding
from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY
from nemo_rl.distributed.virtual_cluster import PY_EXECUTABLES, RayVirtualCluster, init_ray
from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup
from nemo_rl.models.policy.lm_policy import Policy

WORKER = "tracetools_nemo_rl_worker.CpuWorker"
RANKS, BATCH, MICROBATCH, VOCABULARY = 2, 8, 2, 256
AXES = ["pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel"]


class CpuPolicy(Policy):  # type: ignore[misc]
    """NeMo-RL's Policy without what it does to set up a GPU model: `train` and all that it calls are NeMo-RL's."""

    def __init__(self, workers: Any, sharding: Any) -> None:
        self.cfg = {"train_global_batch_size": BATCH, "train_micro_batch_size": MICROBATCH}
        self.worker_group = workers
        self.sharding_annotations = sharding
        self.flops_tracker = None
        self.use_dynamic_batches = self.use_sequence_packing = False
        self.is_alive = lambda: True

    def prepare_for_training(self, *_: Any, **__: Any) -> None:
        """Nothing is on a GPU that had to come back."""

    def _report_sharded_payload(self, *_: Any, **__: Any) -> None:
        """A log line of NeMo-RL's that wants a configuration that is not here."""

    def shutdown(self) -> Any:
        return self.worker_group.shutdown()


class Batches(list[Any]):
    """A data loader of made-up conversations."""

    def state_dict(self) -> dict[str, Any]:
        return {}


class Log:
    def log_metrics(self, metrics: dict[str, Any], step: int, prefix: str = "") -> None:
        if prefix == "train":
            print(
                f"step {step} loss {float(metrics['loss']):.6f} tokens {metrics.get('global_valid_toks')}", flush=True
            )


def conversations(number: int) -> Any:
    """One global batch: a question of 16 tokens and an answer of 40 to 120 in each sequence."""
    rng = torch.Generator().manual_seed(number)

    def text(role: str, tokens: int) -> dict[str, Any]:
        return {"role": role, "content": "", "token_ids": torch.randint(0, VOCABULARY, (tokens,), generator=rng)}

    lengths = torch.randint(40, 121, (BATCH,), generator=rng).tolist()
    log = [[text("user", 16), text("assistant", length)] for length in lengths]
    return BatchedDataDict({"message_log": log, "loss_multiplier": torch.ones(BATCH)})


def plant(seconds: float) -> None:
    """Make the first function of NeMo-RL's data processing slow."""
    original = sft.add_loss_mask_to_message_log

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return original(*args, **kwargs)

    sft.add_loss_mask_to_message_log = slow


def configuration(steps: int) -> Any:
    loop = SimpleNamespace(
        max_num_epochs=1, max_num_steps=steps, only_unmask_final=False, seed=0, val_period=0, val_at_start=False, val_at_end=False,
        val_batches=0, val_global_batch_size=BATCH, val_micro_batch_size=MICROBATCH,
    )  # fmt: skip
    return SimpleNamespace(
        sft=loop,
        policy={
            "train_global_batch_size": BATCH,
            "train_micro_batch_size": MICROBATCH,
            "make_sequence_length_divisible_by": 8,
        },
        checkpointing={"enabled": False, "checkpoint_must_save_by": None, "save_period": 10**9, "metric_name": None},
        cluster={"num_nodes": 1, "gpus_per_node": RANKS},
    )


def main() -> None:
    steps, milliseconds = int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
    if milliseconds:
        plant(milliseconds / 1e3)
    ACTOR_ENVIRONMENT_REGISTRY[WORKER] = PY_EXECUTABLES.SYSTEM
    init_ray()
    cluster = RayVirtualCluster(
        [RANKS], use_gpus=False, max_colocated_worker_groups=1, num_gpus_per_node=RANKS, name="demo"
    )
    sharding = NamedSharding([[[[rank]] for rank in range(RANKS)]], AXES)
    workers = RayWorkerGroup(
        cluster, RayWorkerBuilder(WORKER), name_prefix="policy", workers_per_node=RANKS, sharding_annotations=sharding
    )
    policy = CpuPolicy(workers, sharding)
    state = SimpleNamespace(epoch=0, step=0, total_steps=0, total_valid_tokens=0, consumed_samples=0)
    sft.sft_train(
        policy, Batches(conversations(i) for i in range(steps)), None, SimpleNamespace(pad_token_id=0), None, configuration(steps),
        Log(), SimpleNamespace(shutdown=lambda: None), state,
    )  # fmt: skip
    policy.shutdown()


if __name__ == "__main__":
    main()
