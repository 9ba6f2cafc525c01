"""Model calls of v1 tasksets: who makes them, and how they reach the servers of the run.

    program of a harness --HTTP--> Interception --> Client (renders, samples) --> `traffic` --> a server
    OneCallHarness ------^         one for all rollouts of the process

A plain taskset, without tools or a harness of its own, needs one call per task; `OneCallHarness` makes that call inside
this process instead of starting a program for every rollout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import Any

import httpx
import msgspec
import verifiers.v1 as vf
from verifiers.v1.clients import TrainClient
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.errors import OverlongPromptError
from verifiers.v1.interception import InterceptionServer
from verifiers.v1.session import RolloutSession

from prime_rl.environments.verifiers.traffic import Traffic


class OneCallHarness(vf.Harness[vf.HarnessConfig]):
    """Plays a task with a single model call, in process."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    def __init__(self, config: vf.HarnessConfig, http: httpx.AsyncClient) -> None:
        super().__init__(config)
        self._http = http

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        response = await self._http.post(
            f"{endpoint}/chat/completions",
            json={"model": ctx.model, "messages": messages},
            headers={"Authorization": f"Bearer {secret}"},
        )
        if response.is_error:
            raise vf.ProviderError(response.text, status_code=response.status_code)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class Client(TrainClient):
    """verifiers' token-in, token-out client, which notes the calls that failed and were not made again.

    The program that plays may do with a failed call what it likes, go on with half a conversation too: then that is
    scored. Only the very same call, made again, makes good for one that failed.
    """

    def __init__(self, config: vf.TrainClientConfig, traffic: Traffic) -> None:
        super().__init__(config)
        self._traffic = traffic

    async def get_response(
        self, dialect: Any, body: dict[str, Any], sampling: Any, session_id: str | None = None, **others: Any
    ) -> vf.Response:
        call = hashlib.blake2b(msgspec.json.encode(body.get("messages"), enc_hook=repr), digest_size=16).digest()
        session = session_id or ""
        try:
            response: vf.Response = await super().get_response(dialect, body, sampling, session_id=session_id, **others)
        except OverlongPromptError:  # ends the rollout as truncated
            raise
        except Exception as error:
            self._traffic.note_failed(session, call, error)
            raise
        self._traffic.note_answered(session, call)
        return response


class Interception(InterceptionServer):
    """verifiers' interception server, calling the model that is trained through our HTTP client."""

    def __init__(self, client: TrainClient, traffic: Traffic, state_secrets: Collection[str]) -> None:
        super().__init__(state_service_secrets=state_secrets)
        self._train_client = client
        self._traffic = traffic

    def register(self, session: RolloutSession) -> tuple[str, str]:
        model_secret, state_secret = super().register(session)
        if session.ctx.client == self._train_client.config:  # else it is that of a judge with a model of its own
            session.client = self._train_client
            self._traffic.open(session.trace.id)
        return model_secret, state_secret


class OneCallEnv(vf.SingleAgentEnv):
    """The plain environment, its agent driven by `OneCallHarness`."""

    harness: OneCallHarness

    async def setup(self, agents: vf.Agents) -> None:
        for agent in agents:
            agent.harness = self.harness
