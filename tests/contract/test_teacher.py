"""A server of either backend is a teacher: it says how likely its model finds tokens that another one sampled."""

import pytest

from prime_rl.config.orchestrator import OrchestratorConfig
from prime_rl.environments.rollouts import Rollout, Turn
from prime_rl.environments.trajectories import training_samples
from prime_rl.orchestrator.scoring import ScoredRollout
from prime_rl.orchestrator.teacher import open_teacher
from tests.contract.conftest import KEY
from tests.contract.servers import TOLERANCE

PROMPT, SAMPLED = [5, 9, 60, 33], [40, 41, 7]


async def test_samples_get_the_logprobs_of_its_model(api, truth, monkeypatch):
    monkeypatch.setenv("CONTRACT_TEACHER_KEY", KEY)
    side = {
        "model": {"name": api.model},
        "client": {"base_url": [f"{api.server.url}/v1"], "api_key_var": "CONTRACT_TEACHER_KEY"},
    }
    config = OrchestratorConfig.model_validate({**side, "teacher_model": {**side, "kl_weight": 1.0}})
    turn = Turn(prompt_ids=PROMPT, completion_ids=SAMPLED, logprobs=[-1.0] * 3, versions=[0] * 3)
    rollout = Rollout(id=0, env="reverse-text", example=0, reward=1.0, turns=[turn])
    samples = training_samples(rollout, advantage=0.0, temperature=1.0)
    async with open_teacher(config) as teacher:
        (found,) = await teacher.annotate([ScoredRollout(rollout=rollout, advantage=0.0, samples=samples)])
    tokens = PROMPT + SAMPLED
    expected = [float(row[token]) for row, token in zip(truth.prompt_logprobs(tokens), tokens[1:], strict=True)]
    assert found.samples[0].ref_logprobs[1:].tolist() == pytest.approx(expected, abs=TOLERANCE)
