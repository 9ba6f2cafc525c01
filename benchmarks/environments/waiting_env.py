"""A classic verifiers environment whose reward function takes its time: for measuring overlap."""

import asyncio

import verifiers as vf
from datasets import Dataset


def load_environment(wait_s: float = 1.0, num_examples: int = 64) -> vf.Environment:
    async def takes_its_time(completion, **kwargs) -> float:
        await asyncio.sleep(wait_s)
        return len(str(completion)) % 7 / 7

    rows = [{"question": f"say {number}", "answer": str(number)} for number in range(num_examples)]
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[takes_its_time]))
