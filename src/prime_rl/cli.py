"""The commands. Each parses its command line and calls one function; imports happen inside, so `--help` stays fast."""

import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from prime_rl.errors import PrimeRLError

if TYPE_CHECKING:
    from prime_rl.config.command import Files
    from prime_rl.config.evals import EvalConfig
    from prime_rl.config.inference import InferenceConfig
    from prime_rl.config.orchestrator import OrchestratorConfig
    from prime_rl.config.roots import RLConfig
    from prime_rl.launch.machine import ProcessSpec
    from prime_rl.paths import RunPaths

USAGE = """\
usage: prime-rl COMMAND [@ file.toml ...] [--key value ...]

  rl            starts and watches inference server, orchestrator and trainer
  sft           supervised fine-tuning
  eval          measures a model, and the weights of a run, on environments
  inference     serves a model over an OpenAI-compatible API
  orchestrator  runs environments and turns rollouts into training batches
  trainer       turns batches into weights

prime-rl COMMAND --help tells a command's keys. Each command exists without `prime-rl` in front, too."""


def rl(argv: Sequence[str] | None = None) -> None:
    """`rl`: plan, start and watch the three processes."""
    from prime_rl.config.command import run_command
    from prime_rl.config.roots import RLConfig

    words = list(sys.argv[1:] if argv is None else argv)
    if any(word.partition("=")[0] == "--status" for word in words):
        _rl_status(words)
        return
    run_command("rl", RLConfig, _rl, files=_rl_files, argv=argv)


def _rl_status(words: "Sequence[str]") -> None:
    from prime_rl.view.status import show

    try:
        print(show(words))
    except PrimeRLError as error:
        sys.exit(f"rl: {error}")


def _rl_files(config: "RLConfig") -> "Files":
    from prime_rl.launch.local import named_machine
    from prime_rl.launch.plan import plan_rl
    from prime_rl.launch.runs import decide
    from prime_rl.paths import RunPaths

    if config.ckpt is None or config.ckpt.resume_step is None:  # the checkpoint may be there once the run begins
        decide(config, RunPaths(config.output_dir))
    specs = plan_rl(config, named_machine(os.environ))
    return {"rl": config} | {spec.name: spec.config for spec in specs if spec.config is not None}


def _rl(config: "RLConfig") -> None:
    if config.bench:
        _rl_bench(config)
        return
    from prime_rl.launch.local import this_machine
    from prime_rl.launch.plan import plan_rl
    from prime_rl.launch.runs import held
    from prime_rl.paths import RunPaths

    specs = plan_rl(config, this_machine(os.environ))
    paths = RunPaths(config.output_dir)
    with held(paths):
        _rl_in(paths, config, specs)


def _rl_in(paths: "RunPaths", config: "RLConfig", specs: "Sequence[ProcessSpec]") -> None:
    """`rl` in a run directory that no other launcher works in."""
    from prime_rl import activity
    from prime_rl.config.writing import write_toml
    from prime_rl.journal import Journal
    from prime_rl.launch.hangs import Hangs
    from prime_rl.launch.local import Stopped, oversee
    from prime_rl.launch.restarts import Restarts
    from prime_rl.launch.runs import INTERRUPTED, Beginning, enter, finish
    from prime_rl.launch.supervise import Supervision
    from prime_rl.logs import get_logger, setup_logging
    from prime_rl.view.console import RLConsole

    decision, specs = enter(config, specs, paths)
    setup_logging("rl", config.log.level, paths.log("rl"), to_terminal=False, as_json=config.log.json_logging)
    logger = get_logger("prime_rl.rl")
    write_toml(config, paths.config("rl"))
    activity.start(paths.activity, "launcher")
    is_new = decision.beginning is Beginning.NEW
    console = RLConsole(paths, max_steps=config.max_steps, has_server=config.inference is not None, is_new=is_new)
    console.opening(config.model.name)
    logger.info("starting %s", ", ".join(spec.name for spec in specs))
    journal = Journal(paths.journal, "launcher")
    restarts = Restarts(config.max_restarts) if config.supervise else None
    hangs = Hangs(paths.activity, config.hang_timeout)
    try:
        with activity.doing(f"watching {', '.join(spec.name for spec in specs)}"):
            oversee(
                Supervision(specs, paths, restarts=restarts, journal=journal, hangs=hangs),
                paths,
                console.tick,
            )
    except (KeyboardInterrupt, Stopped) as error:
        journal.note("run_stopped", reason="SIGTERM" if isinstance(error, Stopped) else INTERRUPTED)
        logger.info("stopped by the user")
        console.interrupted()
        sys.exit(130)
    except PrimeRLError as error:
        journal.note("run_stopped", reason=str(error).partition("\n")[0])
        logger.error("%s", error)
        raise
    finish(paths)
    logger.info("complete")
    console.closing()


def _rl_bench(config: "RLConfig") -> None:
    import shutil
    from dataclasses import replace

    from prime_rl.config.bench import BENCH_STEPS, bench_dir, training_bench
    from prime_rl.launch.local import Stopped, run_local, this_machine
    from prime_rl.launch.plan import plan_rl
    from prime_rl.monitors.base import read_metrics
    from prime_rl.monitors.tables import GENERATION, TRAINING, TRAINING_NOTE, mean_of, table
    from prime_rl.paths import RunPaths, claim_run_dir

    specs = plan_rl(config, this_machine(os.environ))
    directory = bench_dir(config.output_dir)
    claim_run_dir(directory, clean=True)
    paths, batch_size = RunPaths(directory), config.orchestrator.batch_size
    print(f"measuring {config.model.name}, {BENCH_STEPS} steps a side; logs in {paths.logs}/", flush=True)
    try:
        run_local([spec for spec in specs if spec.name != "trainer"], directory)
        rows = read_metrics(paths.metrics("orchestrator"))
        print(f"\n{table('generation', rows, GENERATION)}", flush=True)
        trainer = training_bench(
            config.trainer, batch_size=batch_size, mean_tokens=mean_of(rows, "seq_len/mean"), seq_len=config.seq_len
        )
        run_local([replace(spec, config=trainer) for spec in specs if spec.name == "trainer"], directory)
    except (KeyboardInterrupt, Stopped):
        sys.exit(130)
    finally:
        shutil.rmtree(paths.weights, ignore_errors=True)  # nobody will read them
    measured = trainer.bench
    assert measured is not None
    rows = read_metrics(paths.metrics("trainer"))
    print(f"\n{table('training', rows, TRAINING, num_warm_up=measured.warm_up)}\n\n{TRAINING_NOTE}")


def sft(argv: Sequence[str] | None = None) -> None:
    """`sft`: supervised fine-tuning in this process."""
    from prime_rl.config.trainer import SFTConfig
    from prime_rl.trainer.script import main
    from prime_rl.trainer.sft.train import run

    main("sft", SFTConfig, run, argv)


def trainer(argv: Sequence[str] | None = None) -> None:
    """`trainer`: the RL trainer alone."""
    from prime_rl.config.trainer import TrainerConfig
    from prime_rl.trainer.rl.train import run
    from prime_rl.trainer.script import main

    main("trainer", TrainerConfig, run, argv)


def orchestrator(argv: Sequence[str] | None = None) -> None:
    """`orchestrator`: the orchestrator alone."""
    from prime_rl.config.command import run_command
    from prime_rl.config.orchestrator import OrchestratorConfig

    run_command("orchestrator", OrchestratorConfig, _orchestrator, argv=argv)


def _orchestrator(config: "OrchestratorConfig") -> None:
    from prime_rl.config.command import begin

    if config.bench:
        _orchestrator_bench(config)
        return
    begin("orchestrator", config)
    from prime_rl.orchestrator.orchestrator import run

    run(config)


def _orchestrator_bench(config: "OrchestratorConfig") -> None:
    from prime_rl.config.bench import generation_bench
    from prime_rl.config.command import begin
    from prime_rl.monitors.base import read_metrics
    from prime_rl.monitors.tables import GENERATION, table
    from prime_rl.orchestrator.orchestrator import run
    from prime_rl.paths import RunPaths

    config = generation_bench(config)
    metrics = RunPaths(config.output_dir).metrics("orchestrator")
    metrics.unlink(missing_ok=True)
    begin("orchestrator", config)
    run(config)
    print(table("generation", read_metrics(metrics), GENERATION))


def inference(argv: Sequence[str] | None = None) -> None:
    """`inference`: the inference server alone."""
    from prime_rl.config.command import run_command
    from prime_rl.config.inference import InferenceConfig

    run_command("inference", InferenceConfig, _inference, argv=argv)


def _inference(config: "InferenceConfig") -> None:
    from prime_rl.config.command import begin
    from prime_rl.imports import importing

    begin("inference", config)
    # Until it serves, Ctrl-C ends it without an exception: one is lost where Python cannot raise it, in the callbacks
    # that importing a module runs hundreds of.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    with importing():
        from prime_rl.inference.server import run

    run(config)


def evaluate(argv: Sequence[str] | None = None) -> None:
    """`eval`: against a running server, or with one of its own."""
    from prime_rl.config.command import run_command
    from prime_rl.config.evals import EvalConfig

    run_command("eval", EvalConfig, _evaluate, argv=argv)


def _evaluate(config: "EvalConfig") -> None:
    from prime_rl.config.command import begin
    from prime_rl.launch.local import Stopped, find_server, run_local, this_machine
    from prime_rl.launch.plan import plan_eval

    if config.client is None:
        client = find_server(config.inference)
        config = config.model_copy(update={"client": client})
        if client is not None:
            print(f"eval: note: measuring the server that runs at {client.base_url[0]}", file=sys.stderr)
    if config.client is None:
        try:
            run_local(plan_eval(config, this_machine(os.environ)), config.output_dir)
        except Stopped:
            sys.exit(130)
        return
    begin("eval", config)
    from prime_rl.evals.runner import run

    run(config)


COMMANDS = {
    "rl": rl,
    "sft": sft,
    "eval": evaluate,
    "inference": inference,
    "orchestrator": orchestrator,
    "trainer": trainer,
}


def main(argv: Sequence[str] | None = None) -> None:
    """`prime-rl COMMAND ...`."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(USAGE)
    elif words[0] in COMMANDS:
        COMMANDS[words[0]](words[1:])
    else:
        sys.exit(f"prime-rl: no command {words[0]!r}; there are {', '.join(COMMANDS)}")


if __name__ == "__main__":
    main()
