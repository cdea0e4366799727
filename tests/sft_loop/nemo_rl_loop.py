"""NeMo-RL's real SFT loop over two CPU actors: python nemo_rl_loop.py STEPS [MS]

In: how many steps, and how many milliseconds its data processing sleeps per step. Out: a line "STEP n LOSS x TOKENS t" per step,
as NeMo-RL logs them. NeMo-RL and this folder must be on PYTHONPATH. Real are sft_train, the virtual cluster, the worker
group, Policy.train, BatchedDataDict and Timer.
"""

import nemo_rl_worker  # noqa: I001  first: it makes NeMo-RL importable here
import sys
import time
from types import SimpleNamespace as Settings
from typing import Any

import torch
from nemo_rl.algorithms import sft
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.named_sharding import NamedSharding
from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY
from nemo_rl.distributed.virtual_cluster import PY_EXECUTABLES, RayVirtualCluster, init_ray
from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup
from nemo_rl.models.policy.lm_policy import Policy

WORKER = "nemo_rl_worker.SmallPolicyWorker"
BATCH, MICRO = 8, 2


class SmallPolicy(Policy):
    """The real `train`, over workers that need no model configuration."""

    def __init__(self, group: Any, sharding: Any) -> None:
        self.cfg = {"train_global_batch_size": BATCH, "train_micro_batch_size": MICRO}
        self.worker_group = group
        self.sharding_annotations = sharding
        self.flops_tracker = None
        self.use_dynamic_batches = self.use_sequence_packing = self.debug_payload_metrics = False

    def prepare_for_training(self, *_: Any, **__: Any) -> None: ...

    def shutdown(self) -> Any:
        return self.worker_group.shutdown()


class Batches(list[Any]):
    def state_dict(self) -> dict[str, Any]:
        return {}


def batch(seed: int) -> Any:
    random = torch.Generator().manual_seed(seed)

    def tokens(n: int) -> Any:
        return torch.randint(0, nemo_rl_worker.VOCABULARY, (n,), generator=random)

    def conversation() -> list[dict[str, Any]]:
        answer = 20 + int(torch.randint(0, 40, (1,), generator=random))
        return [
            {"role": "user", "content": "?", "token_ids": tokens(8)},
            {"role": "assistant", "content": "!", "token_ids": tokens(answer)},
        ]

    return BatchedDataDict(
        {"message_log": [conversation() for _ in range(BATCH)], "loss_multiplier": torch.ones(BATCH)}
    )


class Printer:
    def log_metrics(self, metrics: dict[str, Any], step: int, prefix: str = "") -> None:
        if prefix == "train":
            print(f"STEP {step} LOSS {metrics['loss']:.6f} TOKENS {metrics['global_valid_toks']:.0f}", flush=True)


def slow_down(ms: float) -> None:
    real = sft.add_loss_mask_to_message_log

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(ms / 1000)
        return real(*args, **kwargs)

    sft.add_loss_mask_to_message_log = slow


def main() -> None:
    steps = int(sys.argv[1])
    if len(sys.argv) > 2:
        slow_down(float(sys.argv[2]))
    ACTOR_ENVIRONMENT_REGISTRY[WORKER] = PY_EXECUTABLES.SYSTEM
    init_ray()
    cluster = RayVirtualCluster([2], use_gpus=False, max_colocated_worker_groups=1, num_gpus_per_node=2, name="small")
    axes = ["pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel"]
    sharding = NamedSharding([[[[0]], [[1]]]], axes)
    group = RayWorkerGroup(cluster, RayWorkerBuilder(WORKER), workers_per_node=2, sharding_annotations=sharding)
    settings = Settings(
        sft=Settings(
            val_period=0,
            val_at_start=False,
            val_at_end=False,
            val_batches=0,
            val_global_batch_size=BATCH,
            val_micro_batch_size=MICRO,
            max_num_epochs=1,
            max_num_steps=steps,
            only_unmask_final=False,
            seed=0,
        ),
        policy={
            "train_global_batch_size": BATCH,
            "train_micro_batch_size": MICRO,
            "make_sequence_length_divisible_by": 8,
        },
        checkpointing={"enabled": False, "checkpoint_must_save_by": None, "save_period": 1000, "metric_name": None},
        cluster={"num_nodes": 1, "gpus_per_node": 2},
    )
    policy = SmallPolicy(group, sharding)
    state = Settings(epoch=0, step=0, total_steps=0, total_valid_tokens=0, consumed_samples=0)
    nothing = Settings(shutdown=lambda: None)
    data = Batches(batch(i) for i in range(steps))
    sft.sft_train(policy, data, None, Settings(pad_token_id=0), None, settings, Printer(), nothing, state)
    policy.shutdown()


if __name__ == "__main__":
    main()
