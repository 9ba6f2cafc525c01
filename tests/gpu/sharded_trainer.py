"""A trainer of several ranks for `test_nccl`: publishes each step that its first rank reads, as `build_publisher` does.

`torchrun ... tests/gpu/sharded_trainer.py SPEC`, where SPEC is JSON: model_dir, output_dir, port, device, max_steps and
`added`: what is added to the first parameter at each step, twice that to the second, and so on. Printed by the first
rank: the times of each publication as a line of JSON.
"""

import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from prime_rl.config.trainer import TrainerConfig
from prime_rl.journal import Journal
from prime_rl.paths import RunPaths
from prime_rl.trainer.model.build import build_model
from prime_rl.trainer.publish.build import build_publisher
from prime_rl.trainer.publish.retention import Retention
from prime_rl.trainer.ranks import joined

TIMEOUT_S = 240


def main(spec: dict[str, Any]) -> None:
    """Until all steps are published."""
    meeting = {"type": "nccl", "host": "127.0.0.1", "port": spec["port"], "timeout": TIMEOUT_S}
    config = TrainerConfig.model_validate(
        {
            "model": {"name": spec["model_dir"], "optimization_dtype": "bfloat16"},
            "output_dir": spec["output_dir"],
            "max_steps": spec["max_steps"],
            "weight_broadcast": meeting if spec["device"] == "cuda" else {"type": "filesystem"},
        }
    )
    model_dir = Path(spec["model_dir"])
    with joined(lambda: torch.device(spec["device"]), timeout=TIMEOUT_S) as ranks, ExitStack() as stack:
        model = build_model(config.model, model_dir, ranks, seed=0)
        paths = RunPaths(config.output_dir)
        publisher = build_publisher(
            config,
            model=model,
            ranks=ranks,
            assets=model_dir,
            tokenizer=model_dir,
            retention=Retention(root=paths.weights, max_steps=spec["max_steps"], interval=None, keep_last=2),
            journal=Journal(paths.journal, "trainer"),
            stack=stack,
        )
        for _ in range(spec["max_steps"]):
            (step,) = ranks.gathered(int(sys.stdin.readline()) if ranks.is_leader else 0)[:1]
            with torch.no_grad():
                for number, parameter in enumerate(model.parameters.values(), 1):
                    parameter.add_(number * spec["added"])
            started = time.monotonic()
            publisher.publish(step)
            publisher.finish()
            if ranks.is_leader:
                print(json.dumps({"started": started, "ended": time.monotonic()}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
