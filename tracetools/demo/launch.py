"""Starts one half with the environment that it needs before anything is imported.

In: `megatron` or `ray`, the file for all that is printed, and the half's `Options` as arguments. Out: this process becomes
torchrun, or the Ray driver. Ranks and actors inherit environment and output. Knows nothing of what the half does.
"""

from __future__ import annotations

import os
import secrets
import sys

from tracetools.demo.settings import Options, read_options

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # one thread per rank in both halves: two ranks fit on two cores
    "TORCHDYNAMO_DISABLE": "1",  # megatron-core's fused functions are compiled at run time: no compiler is asked for
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # as Megatron-LM wants it
    "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",  # one host, perhaps without a network
    "KINETO_LOG_LEVEL": "6",  # no line per start and stop of the profiler
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",  # nobody else may use the demo's Ray; without one of ours, Ray leaves a token file in $HOME
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # what Ray will do by itself, and warns about until then
}
TORCHRUN = ("-m", "torch.distributed.run", "--standalone")


def command(half: str, options: Options) -> list[str]:
    """What to run for this half, after the Python interpreter."""
    if half == "megatron":
        return [*TORCHRUN, f"--nproc-per-node={options.ranks}", "-m", "tracetools.demo.rank", *options.arguments()]
    return ["-m", "tracetools.demo.driver", *options.arguments()]


def main() -> None:
    half, log, *arguments = sys.argv[1:]
    options = read_options(arguments)
    _redirect_output(log)
    os.environ.update(ENVIRONMENT, RAY_AUTH_TOKEN=secrets.token_hex(32))
    os.execv(sys.executable, [sys.executable, *command(half, options)])


def _redirect_output(log: str) -> None:
    """By file descriptor: the libraries print a lot, their C++ parts too, and every process of the half inherits it."""
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(target, stream)
    os.close(target)


if __name__ == "__main__":
    main()
