"""Runs NeMo-RL's own SFT loop on a CPU under the recorder, as it is and with a known fault.

In: a checkout of NeMo-RL, the Python of its environment, an output folder. Out: two run folders (`OUT/nemo_rl`, `OUT/nemo_rl_planted`)
and what was printed (`OUT/*.log`). Raises UsageError where the checkout or its environment will not do, TracetoolsError where the
loop fails.
Knows nothing of analysis, and never imports NeMo-RL: the loop is in nemo_rl/, which runs in NeMo-RL's environment.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tracetools.collect.launch import collect, explain_empty
from tracetools.errors import TracetoolsError, UsageError
from tracetools.stackprofile import load_profile

FOLDER = Path(__file__).parent / "nemo_rl"
STEPS, RECORDED = 12, (4, 10)
LOG_LINES_SHOWN = 15
CHECK = "import tracetools_nemo_rl_compat, ray, nemo_rl.algorithms.sft"


def run_nemo_rl(out: Path, checkout: Path, python: str, milliseconds: float) -> tuple[Path, Path]:
    """Record the loop without and with `milliseconds` of sleep per step in the driver's data processing."""
    if not (checkout / "nemo_rl" / "algorithms" / "sft.py").is_file():
        raise UsageError(
            f"{checkout}: no checkout of NeMo-RL: it has no nemo_rl/algorithms/sft.py. Nothing was started."
        )
    _check_environment(python, checkout)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"{out}: cannot be used as output folder: {error.strerror or error}. Nothing was started."
        ) from error
    if any(out.iterdir()):
        raise UsageError(f"{out}: the output folder is not empty. Name a new one; nothing was started.")
    plain = _record(out, "nemo_rl", python, checkout, 0.0)
    return plain, _record(out, "nemo_rl_planted", python, checkout, milliseconds)


def _check_environment(python: str, checkout: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(checkout.resolve()), str(FOLDER)])}
    try:
        found = subprocess.run([python, "-c", CHECK], env=environment, capture_output=True, text=True, check=False)
    except OSError as error:
        raise UsageError(f"--python {python}: cannot be run: {error.strerror}. Nothing was started.") from error
    if found.returncode:
        why = next(iter(found.stderr.strip().splitlines()[-1:]), "no message")
        raise UsageError(f"--python {python}: NeMo-RL cannot be imported there: {why}. Nothing was started.")


def _record(out: Path, name: str, python: str, checkout: Path, milliseconds: float) -> Path:
    log = (out / f"{name}.log").resolve()
    command = [python, str(FOLDER / "launch.py"), str(checkout), str(log), str(STEPS), f"{milliseconds:g}"]
    found = collect(command, out / name, load_profile("nemo_rl"), *RECORDED)
    if found.exit_code:
        end = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES_SHOWN:] if log.exists() else []
        failed = f"NeMo-RL's loop failed with exit status {found.exit_code}. All it printed is in {log}; the end of it:"
        raise TracetoolsError("\n".join([failed, *end]))
    if not found.traces:
        raise explain_empty(found, RECORDED[0])
    return found.folder
