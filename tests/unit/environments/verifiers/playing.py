"""Environments that are written here, and rollouts of them through the door."""

import asyncio
import sys
import textwrap
from contextlib import contextmanager

import msgspec

from prime_rl.environments import verifiers
from prime_rl.environments.rollouts import EnvironmentSpec, RolloutRequest


@contextmanager
def importable(directory, modules):
    """Modules by name, with their sources."""
    for name, source in modules.items():
        (directory / f"{name}.py").write_text(textwrap.dedent(source))
    sys.path.insert(0, str(directory))
    yield
    sys.path.remove(str(directory))


async def roll(inference, env_id, *, examples=(0,), requests=(), **fields):
    """Rollouts of the examples in the environment `env_id`; `fields` of its specification."""
    environment = await load(inference, env_id, **fields)
    requests = requests or [request_of(number, example) for number, example in enumerate(examples)]
    try:
        return await asyncio.gather(*(environment.run(request) for request in requests))
    finally:
        await environment.close()


async def load(inference, env_id, **fields):
    spec = EnvironmentSpec(
        id=env_id, label="env", args={}, base_urls=(inference.base_url,), model=str(inference.model)
    )  # fmt: skip
    return await verifiers.load(msgspec.structs.replace(spec, **fields))


def request_of(number, example=0, **fields):
    return RolloutRequest(id=number, example=example, sampling={}, version=0, timeout_s=60, **fields)


def replies(inference, *texts):
    """The model says these, one after the other."""
    left = list(texts)
    inference.reply = lambda text: left.pop(0)
