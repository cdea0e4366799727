"""A policy worker for NeMo-RL's own worker group that trains a small model on a CPU.

In: shards of batches from NeMo-RL's driver. Out: what `Policy.train` expects of a worker. The Timer and the nvtx decorator are
NeMo-RL's own.
"""

import typing
from typing import Any

import typing_extensions

for _name in ("TypedDict", "NotRequired", "Required"):  # NeMo-RL's data classes need those of Python 3.12
    setattr(typing, _name, getattr(typing_extensions, _name))

import ray  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: 0  # a CPU build of torch has no NVTX

from nemo_rl.utils.nsys import wrap_with_nvtx_name  # noqa: E402
from nemo_rl.utils.timer import Timer  # noqa: E402

VOCABULARY, HIDDEN = 256, 64


class SmallPolicyWorkerImpl:
    def __init__(self, **_: Any) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(7)
        dist.init_process_group("gloo")
        self.model = torch.nn.Sequential(
            torch.nn.Embedding(VOCABULARY, HIDDEN), torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.Linear(HIDDEN, VOCABULARY)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.timer = Timer()

    def is_alive(self) -> bool:
        return True

    @wrap_with_nvtx_name("megatron_policy_worker/train")
    def train(self, data: Any, mbs: int, **_: Any) -> dict[str, Any]:
        self.timer.start("train")
        losses = []
        for tokens in data["input_ids"].split(mbs):
            logits = self.model(tokens[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            losses.append(float(loss))
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.timer.stop("train")
        valid = torch.stack([data["token_mask"][:, 1:].sum(), torch.tensor(data.size)])
        dist.all_reduce(valid)
        toks, seqs = valid.tolist()
        metrics = {"global_valid_toks": [float(toks)] * len(losses), "global_valid_seqs": [float(seqs)] * len(losses)}
        return {"global_loss": torch.tensor(sum(losses)), "grad_norm": torch.tensor(1.0), "all_mb_metrics": metrics}


@ray.remote
class SmallPolicyWorker(SmallPolicyWorkerImpl):
    pass
