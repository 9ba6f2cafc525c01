"""One side of the offline benchmark, in a process of its own: loads an engine, then one timed run for each line read.

Started by `benchmarks.sides`; its one argument is a JSON object.
"""

import asyncio
import json
import sys
import time
from typing import Any

from http_load import READY, Workload


class Embedded:
    """The embedded engine through its `Backend`."""

    def __init__(self, spec: dict[str, Any], work: Workload) -> None:
        import torch  # noqa: PLC0415 (only the process of this side loads it)

        from prime_rl.config.inference import InferenceConfig  # noqa: PLC0415
        from prime_rl.inference.engine.build import build_engine  # noqa: PLC0415

        torch.set_num_threads(spec["threads"])
        self._engine = build_engine(InferenceConfig.model_validate(spec["config"]))
        self._asked = work.sampling

    def run(self, prompts: list[list[int]], new_tokens: int) -> int:
        return asyncio.run(self._run(prompts, new_tokens))

    async def _run(self, prompts: list[list[int]], new_tokens: int) -> int:
        from prime_rl.inference.backend import GenerationRequest, SamplingParams  # noqa: PLC0415

        async def complete(index: int, prompt: list[int]) -> int:
            limits = {"max_tokens": new_tokens, "ignore_eos": True, "seed": index}
            sampling = SamplingParams(**limits, **self._asked)
            request = GenerationRequest(request_id=str(index), prompt_ids=prompt, sampling=sampling, stream=False)
            count = 0
            async for outputs in self._engine.generate(request):
                count += sum(output.logprob <= 0.0 for output in outputs)
            return count

        return sum(await asyncio.gather(*(complete(i, prompt) for i, prompt in enumerate(prompts))))


class Vllm:
    """vLLM through its offline API."""

    def __init__(self, spec: dict[str, Any], work: Workload) -> None:
        from vllm import LLM, SamplingParams  # noqa: PLC0415

        if spec["device"] == "cpu":
            import torch  # noqa: PLC0415

            torch.set_num_threads(spec["threads"])
        self._logprobs = work.logprobs
        asked = {"temperature": 1.0, "ignore_eos": True} | work.sampling
        self._sampling = SamplingParams(**asked, logprobs=0 if work.logprobs else None)
        self._llm = LLM(**spec["vllm"])

    def run(self, prompts: list[list[int]], new_tokens: int) -> int:
        self._sampling.max_tokens = new_tokens
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._llm.generate(inputs, self._sampling, use_tqdm=False)
        completions = [output.outputs[0] for output in outputs]
        if self._logprobs:
            assert all(len(c.logprobs) == len(c.token_ids) for c in completions)
        return sum(len(c.token_ids) for c in completions)


def main() -> None:
    spec: dict[str, Any] = json.loads(sys.argv[1])
    work = Workload(**spec["work"])
    side: Embedded | Vllm = {"embedded": Embedded, "vllm": Vllm}[spec["side"]](spec, work)
    for number, new_tokens in enumerate(spec["warm_ups"]):
        side.run(work.prompts(-1 - number), new_tokens)
    print(READY, flush=True)
    for line in sys.stdin:
        prompts = work.prompts(int(line))
        started = time.perf_counter()
        tokens = side.run(prompts, work.new_tokens)
        seconds = time.perf_counter() - started
        assert tokens == work.requests * work.new_tokens, tokens
        print(json.dumps({"tokens_per_s": tokens / seconds, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
