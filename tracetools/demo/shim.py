"""Names that megatron-core looks up in torch, rebound so that it trains where torch has no CUDA.

In: nothing. Out: megatron-core 0.16 modules that put their tensors on the CPU. No source file of theirs is changed; the rebinding
lasts as long as the process. Never installed where there is a GPU: there the demo runs the library as it is.

What stands in the way (megatron-core 0.16.1), and what is done about it:
  torch.cuda.current_device()         as `device=` of DDP's gradient buffer, the attention's scratch memory and others: answers the CPU
  device="cuda", written out          in the schedules, the optimizer, gradient clipping and its multi-tensor functions: these four
                                      modules see a `torch` whose tensor factories say "cpu" instead
  grad.type() == "torch.cuda..."      an assertion of gradient clipping: `Tensor.type()` answers with the CUDA name
  random number state of CUDA devices only dropout draws from it and the demo has none: megatron-core's own tracker for inference, which
                                      keeps no state, takes its place (`trainer.py` asks for it)
The functions compute what they always compute; nothing is skipped.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

_LITERAL_CUDA = (
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.optimizer.optimizer",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.utils",
)
_FACTORIES = ("empty", "full", "ones", "tensor", "zeros")


def install() -> None:
    """Rebind the names. Once per process, before the model is built. Raises RuntimeError where there is a GPU."""
    if torch.cuda.is_available():
        raise RuntimeError("the CPU shim is for machines without CUDA")
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch_on_cpu = _torch_on_cpu()
    for name in _LITERAL_CUDA:
        import_module(name).torch = torch_on_cpu  # type: ignore[attr-defined]  # every one of them does `import torch`
    torch.Tensor.type = _named_as_on_cuda(torch.Tensor.type)


def _torch_on_cpu() -> types.ModuleType:
    """A module with all of torch's names, of which the factories never allocate on CUDA."""
    look_alike = types.ModuleType("torch")
    look_alike.__dict__.update(vars(torch))
    look_alike.__dict__["__getattr__"] = functools.partial(getattr, torch)  # names that torch itself makes on demand
    for name in _FACTORIES:
        look_alike.__dict__[name] = _on_cpu(getattr(torch, name))
    return look_alike


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return call


def _named_as_on_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def named(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        answer = original(tensor, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    return named
