"""vLLM's own OpenAI server, built from its parts, with our routes and gates in front.

BearerKey > OnlyRoutes > BodyLimit > ObjectsOnly > OlderNames > MinVersion > SayVersions > (our admin routes, vLLM's)
> VersionedLLM
"""

import asyncio
import logging
import os
import socket
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import vllm
from prometheus_client import Gauge
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.system_utils import set_ulimit

from prime_rl import activity
from prime_rl.config.inference import InferenceConfig
from prime_rl.errors import ConfigError, ModelError
from prime_rl.inference import admin
from prime_rl.inference.gate import GENERATION_ROUTES, BearerKey, BodyLimit, MinVersion, OnlyRoutes
from prime_rl.inference.http import error_response
from prime_rl.inference.http_server import LOADING_S, Server, say_where, serve_until_stopped
from prime_rl.inference.vllm import compat
from prime_rl.inference.vllm.administration import VLLMAdministration
from prime_rl.inference.vllm.answers import OlderNames, SayVersions
from prime_rl.inference.vllm.arguments import Facts, arguments, check_known, command_line
from prime_rl.inference.vllm.bodies import ObjectsOnly
from prime_rl.inference.vllm.engine import VersionedLLM
from prime_rl.inference.vllm.failures import Causes, sentence
from prime_rl.inference.vllm.steps import Steps
from prime_rl.models.hf import read_json

OTHER_ROUTES = ("/v1/models", "/tokenize", "/detokenize", "/metrics", "/openapi.json", "/version", "/ping", "/load")
"""Routes of vLLM's that are served beside those that sample tokens: they change nothing."""

ENGINE_STOP_S = 1.0
"""How long vLLM's processes get to end by themselves."""

SCHEDULERS = {
    True: "prime_rl.inference.vllm.scheduler.ForgetfulAsyncScheduler",
    False: "prime_rl.inference.vllm.scheduler.ForgetfulScheduler",
}
"""By whether vLLM schedules asynchronously, which it decides itself."""


async def serve(
    config: InferenceConfig, model_dir: Path, listener: socket.socket, api_key: str | None, causes: Causes
) -> None:
    """Start vLLM's engine and serve until told to stop, or until the engine fails (InferenceError)."""
    set_ulimit()
    args = parse_arguments(config, model_dir)
    steps = Steps()
    with activity.doing("loading the model", deadline_s=LOADING_S):
        engine = start_engine(args, steps)
    try:
        administration = VLLMAdministration(
            engine, first=model_dir, recompute=config.kv_cache_on_update == "recompute", causes=causes
        )
        app = await build_app(args, engine, administration)

        async def close() -> None:
            administration.is_stopping = True
            # An engine that is too busy to end in time is killed, and vLLM would report a failure with a traceback.
            logging.getLogger("vllm.v1.engine.async_llm").disabled = True
            await asyncio.to_thread(engine.shutdown, timeout=ENGINE_STOP_S)

        def gets_on() -> bool:
            is_loading = administration.lock.locked()  # or something else for which somebody waits
            is_idle = not is_loading and not engine.output_processor.has_unfinished_requests()
            if is_idle:  # who waits for servers is not kept waiting by this one
                activity.beat()
            return steps.have_come() or is_idle or is_loading or administration.paused()

        server = Server(
            gated(app, administration, api_key),
            close=close,
            failure=administration.failure,
            lifespan=True,
            gets_on=gets_on,
        )
        app.state.server = server  # where vLLM's error handlers look
        say_where(listener, config.model.name, api_key, f"vLLM {vllm.__version__}")
        with activity.doing(lambda: f"serving weights {administration.served().version}"):
            await serve_until_stopped(server, listener)
    finally:
        engine.shutdown(timeout=ENGINE_STOP_S)


def parse_arguments(config: InferenceConfig, model_dir: Path) -> Namespace:
    """vLLM's arguments, read by its own parser.

    Raises: ConfigError for a name that this version does not have, or a value that it does not take.
    """
    facts = Facts(
        model_dir=str(model_dir),
        on_cpu=current_platform.is_cpu(),
        has_cpu_kv_space=bool(os.environ.get("VLLM_CPU_KVCACHE_SPACE")),
        rope_parameters=_rope_parameters(model_dir),
    )
    found = arguments(config, facts)
    parser = compat.make_arg_parser(_Parser())
    check_known(found, {action.dest for action in parser._actions}, vllm.__version__)
    args: Namespace = parser.parse_args(command_line(found))
    for plugin, manager in (("tool", ToolParserManager), ("reasoning", ReasoningParserManager)):
        if path := getattr(args, f"{plugin}_parser_plugin", None):
            getattr(manager, f"import_{plugin}_parser")(path)
    try:
        compat.validate_parsed_serve_args(args)
        compat.validate_api_server_args(args)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"vLLM refuses its arguments: {error.args[0] if error.args else error}") from error
    return args


class _Parser(FlexibleArgumentParser):
    """Says what is wrong instead of ending the process with a usage."""

    def error(self, message: str) -> Any:
        raise ConfigError(f"vLLM {vllm.__version__} refuses an argument (inference.vllm.<name>): {message}")


def _rope_parameters(model_dir: Path) -> Mapping[str, Any] | None:
    config = read_json(model_dir / "config.json")
    found: Mapping[str, Any] | None = config.get("rope_parameters")
    if found is None and "rope_theta" in config:
        found = {"rope_theta": config["rope_theta"]}
    return found


def start_engine(args: Namespace, steps: Steps) -> VersionedLLM:
    """vLLM's engine processes, with the model loaded. Raises: ModelError for a model that vLLM cannot serve."""
    engine_args = AsyncEngineArgs.from_cli_args(args)
    try:
        vllm_config = engine_args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    except ValueError as error:  # also pydantic's
        raise ModelError(f"vLLM cannot serve this model so: {sentence(type(error).__name__, str(error))}") from error
    scheduler = vllm_config.scheduler_config
    scheduler.scheduler_cls = SCHEDULERS[bool(scheduler.async_scheduling)]
    engine: VersionedLLM = VersionedLLM.from_vllm_config(
        vllm_config,
        usage_context=UsageContext.OPENAI_API_SERVER,
        enable_log_requests=engine_args.enable_log_requests,
        aggregate_engine_logging=engine_args.aggregate_engine_logging,
        stat_loggers=[steps],  # with vLLM's own switched off, too: then this is the only one
        disable_log_stats=engine_args.disable_log_stats,
    )
    return engine


async def build_app(args: Namespace, engine: VersionedLLM, administration: VLLMAdministration) -> Any:
    """vLLM's application, with our administration in front of its routes."""
    tasks = await engine.get_supported_tasks()
    app = compat.build_app(args, tasks, engine.model_config)
    await compat.init_app_state(engine, app.state, args, tasks)
    app.state.administration = administration
    # Beside vLLM's own metrics, in the registry that its /metrics shows; the embedded server has the same one.
    version = Gauge("prime_rl:weights_version", "Version of the weights in use.", ["model_name"])
    version.labels(model_name=args.served_model_name[0]).set_function(lambda: administration.served().version)
    app.router.routes[:0] = admin.routes()
    app.add_exception_handler(HTTPException, _on_http_exception)
    # vLLM's own has built it already, for the sake of a cloud's hooks, so it knows nothing of the new handler.
    app.middleware_stack = app.build_middleware_stack()
    return app


def gated(app: ASGIApp, administration: VLLMAdministration, api_key: str | None) -> ASGIApp:
    """The application behind what a request must pass."""
    saying = SayVersions(app, administration.unavailable)
    versioned = OlderNames(MinVersion(saying, served=lambda: administration.served().version))
    bounded = BodyLimit(ObjectsOnly(versioned))
    inner = OnlyRoutes(bounded, {*(route.path for route in admin.routes()), *GENERATION_ROUTES, *OTHER_ROUTES})
    return inner if api_key is None else BearerKey(inner, api_key)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """An unknown path or method, in the form of every other error."""
    assert isinstance(error, HTTPException)
    message = error.detail if isinstance(error.detail, str) else str(error.detail)
    answer = error_response(f"{request.method} {request.url.path}: {message}", status=error.status_code)
    answer.headers.update(error.headers or {})
    return answer
