"""Who a process is and what it runs on: everything of run.json that is known only inside the process.

In: the modules that the process has imported, and its environment. Out: plain values for JSON. Standard library only: what is not
imported is not asked, and nothing is imported here. Knows nothing of recordings.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

MODULES = ("torch", "triton", "ray", "megatron.core", "transformer_engine", "flash_attn", "vllm", "deepspeed", "numpy")
GENERATION = re.compile(r"vllm|sglang|generat|rollout|inference", re.IGNORECASE)  # in the name of an actor's class
# Environment variables that change how fast a job runs. A list of what may be told: all else stays untold.
ENVIRONMENT = re.compile(
    r"^(NCCL|TORCH_NCCL|RCCL|GLOO|UCX|NVSHMEM|FI|OMP|MKL|KMP|OPENBLAS|CUDA|CUBLAS|CUDNN|NVTE|HIP|HSA|ROCR|MIOPEN|GPU_MAX|PYTORCH|TORCH|TORCHINDUCTOR"
    r"|TORCHDYNAMO|TRITON|MALLOC|KINETO|UB|PYTHON(OPTIMIZE|MALLOC|NOUSERSITE|UNBUFFERED|GIL))(_|$)|^(OMP|KMP|MKL|PYTHON)\w*$"
    r"|^(LD_PRELOAD|VLLM_USE_V1|VLLM_ATTENTION_BACKEND|VLLM_ENABLE_V1_MULTIPROCESSING|RAY_DEDUP_LOGS|RAY_PROFILING|RAY_CGRAPH\w+"
    r"|RAY_ENABLE_UV_RUN_RUNTIME_ENV|RAY_worker_register_timeout_seconds|RAY_task_events_report_interval_ms|NRL_\w+)$"
)
PRIVATE = re.compile(
    r"TOKEN|SECRET|PASS|CRED|AUTH|COOKIE|(^|_)(API_?)?KEYS?($|_)|PYTHONPATH|PYTHONHOME|PYTHONUSERBASE", re.IGNORECASE
)
LONGEST = 300  # characters of a value

Sizes = dict[str, int]

roles: list[
    tuple[str, list[re.Pattern[str]]]
] = []  # of Ray actors by the name of their class, from the profile: these come first


def install(rules: list[tuple[str, list[str]]]) -> None:
    roles[:] = [(role, [re.compile(p, re.IGNORECASE) for p in patterns]) for role, patterns in rules]


def _role(actor_class: str) -> str:
    of_profile = (role for role, patterns in roles if any(p.search(actor_class) for p in patterns))
    return next(of_profile, "generation" if GENERATION.search(actor_class) else "policy")


def who() -> dict[str, Any]:
    """Role, rank, world size, host, pid, and Ray's names for the process."""
    rank, world_size = _rank()
    found: dict[str, Any] = {
        "role": "rank",
        "rank": rank,
        "world_size": world_size,
        "host": os.uname().nodename,
        "pid": os.getpid(),
        "ray": None,
    }
    worker = _ray_worker()
    if worker is not None:
        if worker.mode == sys.modules["ray"]._private.worker.WORKER_MODE:
            found["ray"] = ray = _ray_names()
            found["role"] = _role(ray["actor_class"] or "")
        else:
            found["role"] = "driver"
            found["rank"] = found["world_size"] = None
    elif rank is None:
        found["rank"], found["world_size"] = 0, 1
    return found


def ray_job() -> tuple[bool, str] | None:
    """(is it the driver, a name of the job that its driver and its workers share), where this is a process of Ray."""
    worker = _ray_worker()
    if worker is None:
        return None
    context = sys.modules["ray"].get_runtime_context()
    driver = worker.mode != sys.modules["ray"]._private.worker.WORKER_MODE
    return driver, f"{context.gcs_address} {context.get_job_id()}"


def _ray_worker() -> Any:
    ray = sys.modules.get("ray")
    if ray is None or not hasattr(ray, "is_initialized") or not ray.is_initialized():
        return None
    return ray._private.worker.global_worker


def _ray_names() -> dict[str, str | None]:
    context = sys.modules["ray"].get_runtime_context()
    names: dict[str, str | None] = {
        "worker_id": context.get_worker_id(),
        "actor_id": context.get_actor_id(),
        "job_id": context.get_job_id(),
        "node_id": context.get_node_id(),
        "actor_class": None,
    }
    with suppress(Exception):  # a private attribute of Ray: without it the role is less exact
        for actor in list(_ray_worker().actors.values()):
            names["actor_class"] = type(actor).__name__
    return names


def _rank() -> tuple[int | None, int | None]:
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    rank, world = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return (int(rank) if rank.isdigit() else None), (int(world) if world.isdigit() else None)


# ---------------------------------------------------------------- what it runs on


def nice() -> int | None:
    """The process's scheduling priority: Ray gives its workers 15, which matters where they share their cores."""
    try:
        return os.getpriority(os.PRIO_PROCESS, 0)
    except (AttributeError, OSError):  # no such thing on this system
        return None


def versions() -> dict[str, str]:
    """Of Python and of what is imported; commits where a library runs from a checkout."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in MODULES:
        version = getattr(sys.modules.get(name), "__version__", None)
        if isinstance(version, str):
            found[name.replace(".", "-")] = version
    torch = sys.modules.get("torch")
    for name in ("cuda", "hip"):
        version = getattr(getattr(torch, "version", None), name, None)
        if version:
            found[name] = str(version)
    with suppress(Exception):  # a torch without NCCL has no such function
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[union-attr]
    for name, package in (("nemo-rl", "nemo_rl"), ("megatron-lm", "megatron")):
        commit = _commit(package)
        if commit is not None:
            found[name] = commit
    return found


def _commit(package: str) -> str | None:
    """The git commit of the checkout that a package is imported from, or could be."""
    module = sys.modules.get(package)
    places = list(getattr(module, "__path__", [])) or [os.path.join(p or os.curdir, package) for p in sys.path]
    for place in places:
        git = os.path.join(os.path.dirname(os.path.abspath(place)), ".git")
        if os.path.isdir(place) and os.path.exists(git):
            with suppress(OSError, IndexError):
                return _head(git)
    return None


def _head(git: str) -> str | None:
    if os.path.isfile(git):  # a worktree or a submodule: "gitdir: PATH"
        git = os.path.join(os.path.dirname(git), _text(git).split(": ", 1)[1])
    head = _text(os.path.join(git, "HEAD"))
    if not head.startswith("ref: "):
        return head
    common = os.path.join(git, "commondir")
    base = os.path.join(git, _text(common)) if os.path.exists(common) else git
    ref = head[5:]
    if os.path.exists(os.path.join(base, ref)):
        return _text(os.path.join(base, ref))
    packed = _text(os.path.join(base, "packed-refs")).splitlines()
    return next((line.split()[0] for line in packed if line.endswith(" " + ref)), None)


def _text(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read().strip()


def environment() -> dict[str, str]:
    """Variables that change performance, by an allow-list; never what may be a secret."""
    return {
        name: value[:LONGEST]
        for name, value in sorted(os.environ.items())
        if ENVIRONMENT.match(name) and not PRIVATE.search(name)
    }


def device() -> dict[str, Any] | None:
    """The GPU that this process uses. None without one, or where CUDA was not started: asking would start it."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return None
    with suppress(Exception):  # whatever a driver may answer
        index = cuda.current_device()
        of = cuda.get_device_properties(index)
        return {
            "index": index,
            "name": of.name,
            "memory_bytes": int(of.total_memory),
            "multiprocessors": int(of.multi_processor_count),
            "capability": f"{of.major}.{of.minor}",
        }
    return None


def parallel() -> dict[str, Sizes] | None:
    """Megatron-Core's parallel layout: the size of each dimension, and this process's place in it. None where it has none."""
    state = sys.modules.get("megatron.core.parallel_state")
    with suppress(Exception):
        if state is not None and state.model_parallel_is_initialized():
            sizes, ranks = _layout(state)
            return {"sizes": sizes, "ranks": ranks}
    return None


DIMENSIONS = (
    ("tp", "tensor_model_parallel"),
    ("pp", "pipeline_model_parallel"),
    ("vpp", "virtual_pipeline_model_parallel"),
    ("cp", "context_parallel"),
    ("dp", "data_parallel"),
    ("ep", "expert_model_parallel"),
    ("etp", "expert_tensor_parallel"),
)


def _layout(state: Any) -> tuple[Sizes, Sizes]:
    sizes: Sizes = {}
    ranks: Sizes = {}
    for short, name in DIMENSIONS:
        for kind, into in (("world_size", sizes), ("rank", ranks)):
            ask: Callable[[], Any] | None = getattr(state, f"get_{name}_{kind}", None)
            with suppress(Exception):  # a dimension that this release or this job does not have
                value = None if ask is None else ask()
                if value is not None:
                    into[short] = int(value)
    return sizes, ranks
