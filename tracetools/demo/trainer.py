"""The training step of both halves: a tiny GPT of megatron-core, data parallel.

In: a rank's `Batch` per step. Out: a `StepResult`. Builds the model with megatron-core's own parts (GPTModel, DistributedDataParallel,
schedule, optimizer) and leaves the ranges to the stack profile's hooks; only what is the demo's own code is marked here.
The process group comes from the environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), which torchrun and Ray both provide that way.
Knows nothing of the loop around it.
"""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from tracetools import region
from tracetools.demo.data import Batch
from tracetools.demo.metrics import StepResult
from tracetools.demo.plant import Plant, collect_garbage_for, compute_for, due, sleep_for
from tracetools.demo.settings import Settings

warnings.filterwarnings("ignore", module=r"megatron\..*")  # it says on import which optional libraries are not there

import torch  # noqa: E402  the filter must stand first
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

from tracetools.demo import shim  # noqa: E402

Tensors = dict[str, Any]  # name -> torch.Tensor
_LINEAR = (
    "linear_qkv",
    "linear_proj",
    "linear_fc1",
    "linear_fc2",
)  # of each layer; each is called once per forward pass


class Trainer:
    """One rank. Make it in the process that trains; `close` it before the process ends."""

    def __init__(self, settings: Settings, plants: tuple[Plant, ...] = ()) -> None:
        self.settings = settings
        self.planted = plants
        self.plants = plants  # of them, those that are for this step
        self._step = 0
        self.device = _start(settings.seed)
        self.rank = torch.distributed.get_rank()
        self.ranks = torch.distributed.get_world_size()
        self.model = _model(settings, self.device)
        self.optimizer = _optimizer(settings, self.model)
        self.forward_backward = get_forward_backward_func()
        self._microbatches = 1
        self._plant_in_forward()
        # what setting up left behind would otherwise be searched again by every full collection
        gc.collect()
        gc.freeze()

    def train_step(self, batch: Batch) -> StepResult:
        """Forward, backward, reduction and optimizer on this rank's bins, one bin per microbatch."""
        self.plants = due(self.planted, self._step)
        self._step += 1
        if any(plant.cause == "setup" for plant in self.plants):
            with region("setup"):
                sleep_for("setup", self.plants)
        self._microbatches = len(batch.tokens)
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        reports = self.forward_backward(
            forward_step_func=partial(_forward_step, device=self.device, delay=self._delay),
            data_iterator=_microbatches(batch),
            model=[self.model],
            num_microbatches=len(batch.tokens),
            seq_length=self.settings.bin_length,
            micro_batch_size=1,
            forward_only=False,
        )
        _, grad_norm, _ = self._optimizer_step()
        with region("metrics"):
            if self._is_last:
                sleep_for("late_collective", self.plants)
            total = torch.stack([report["loss and tokens"] for report in reports]).sum(dim=0)
            torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group())
            loss, tokens = total.tolist()
        return StepResult(loss / tokens, int(tokens), float(grad_norm))

    @property
    def _is_last(self) -> bool:
        return bool(self.rank == self.ranks - 1)

    def _delay(self) -> None:
        """What is planted into the forward pass of one microbatch, before the model."""
        share = 1 / self._microbatches
        collect_garbage_for(self.plants, share)
        if self._is_last:
            sleep_for("straggler", self.plants, share)

    def _plant_in_forward(self) -> None:
        """What is planted between the modules of the model."""
        if not any(plant.cause == "forward" for plant in self.planted):
            return
        modules = [module for name, module in self.model.named_modules() if name.endswith(_LINEAR)]

        def before(*_: Any) -> None:
            compute_for("forward", self.plants, 1 / (self._microbatches * len(modules)))

        for module in modules:
            module.register_forward_pre_hook(before)

    def _optimizer_step(self) -> Any:
        if any(plant.cause == "optimizer" for plant in self.plants):
            with region("optimizer"):
                sleep_for("optimizer", self.plants)
                return self.optimizer.step()
        return self.optimizer.step()

    def close(self) -> None:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def _start(seed: int) -> Any:
    """Process group, megatron-core's groups and seeds. Returns the device this rank trains on."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    if torch.cuda.is_available():
        # Ray shows an actor its own GPU only, torchrun shows all of them
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        torch.distributed.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        shim.install()
        torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    if device.type == "cuda":
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
    else:
        tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)
    return device


def _model(settings: Settings, device: Any) -> Any:
    config = TransformerConfig(
        num_layers=settings.layers,
        hidden_size=settings.hidden,
        num_attention_heads=settings.heads,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,  # the same weights on every device
        calculate_per_token_loss=True,  # bins hold different numbers of tokens
        # fusions that want a C++ or CUDA compiler at run time
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
    gpt = GPTModel(config, get_gpt_layer_local_spec(), settings.vocabulary, settings.bin_length).to(device)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), gpt)
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = model.no_sync
    return model


def _optimizer(settings: Settings, model: Any) -> Any:
    config = OptimizerConfig(optimizer="adam", lr=settings.learning_rate, clip_grad=settings.clip_grad)
    optimizer = get_megatron_optimizer(config, [model])
    model.config.grad_scale_func = optimizer.scale_loss
    return optimizer


def _microbatches(batch: Batch) -> Iterator[dict[str, Any]]:
    """Name -> numpy array of shape [1, bin length], bin by bin."""
    for row in range(len(batch.tokens)):
        yield {name: getattr(batch, name)[row : row + 1] for name in ("tokens", "labels", "positions", "segments")}


def _forward_step(
    microbatches: Iterator[dict[str, Any]], model: Any, *, device: Any, delay: Callable[[], None]
) -> tuple[Any, Any]:
    with region("data_loading"):
        batch = _to_device(next(microbatches), device)
    delay()
    losses = model(batch["tokens"], batch["positions"], _attention_mask(batch["segments"]), labels=batch["labels"])
    return losses, partial(_loss, counted=batch["segments"] >= 0)


def _to_device(arrays: dict[str, Any], device: Any) -> Tensors:
    # a copy, because Ray's shared memory is read-only
    return {name: torch.from_numpy(np.array(array)).to(device, non_blocking=True) for name, array in arrays.items()}


def _attention_mask(segments: Any) -> Any:
    """True where a token must not look: later tokens, and other documents of its bin. Shape [1, 1, length, length]."""
    length = segments.shape[1]
    later = torch.ones(length, length, dtype=torch.bool, device=segments.device).triu(diagonal=1)
    return (later | (segments[:, :, None] != segments[:, None, :]))[:, None]


def _loss(losses: Any, *, counted: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Sum over the real tokens of this microbatch, their number, and both for the report."""
    total = (losses * counted).sum()
    tokens = counted.sum()
    return total, tokens.to(torch.int), {"loss and tokens": torch.stack([total.detach().double(), tokens.double()])}
