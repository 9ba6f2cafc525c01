"""From a configuration to the Publisher of a trainer.

full weights                          weights/step_N: the model; or sent over NCCL
[model.lora]                          weights/step_N: the adapter; with `merge`, merged/step_N: the model, where
                                      the step stays
[model.lora] with modules_to_save,    weights/step_N: the merged model, for vLLM takes no adapter that holds whole
and a server                          modules
"""

from contextlib import ExitStack, closing
from pathlib import Path

from prime_rl.config.trainer import SFTConfig, TrainerConfig
from prime_rl.journal import Journal
from prime_rl.paths import RunPaths
from prime_rl.trainer.model.adapters import adapter_config, tied_embedding
from prime_rl.trainer.model.build import TrainedModel
from prime_rl.trainer.model.precision import DTYPES
from prime_rl.trainer.publish.background import BackgroundWriter
from prime_rl.trainer.publish.gathering import StoredTensors
from prime_rl.trainer.publish.publishers import (
    AdapterPublisher,
    BroadcastPublisher,
    Following,
    Leading,
    Publisher,
    WeightPublisher,
    merged_tensors,
)
from prime_rl.trainer.publish.retention import Retention
from prime_rl.trainer.ranks import Ranks
from prime_rl.transport.manifest import latest_step, remove_drafts
from prime_rl.transport.nccl import NcclSender


def build_publisher(
    config: TrainerConfig | SFTConfig,
    *,
    model: TrainedModel,
    ranks: Ranks,
    assets: Path,
    tokenizer: Path,
    retention: Retention,
    journal: Journal,
    stack: ExitStack,
) -> Publisher:
    """On every rank. `assets`: the model's directory; `tokenizer`: that which the batches were made with.

    What is opened is closed by `stack`.
    """
    stored = StoredTensors(model.stored, DTYPES[config.model.optimization_dtype], ranks)
    if not ranks.is_leader:
        return Following(stored)
    paths = RunPaths(config.output_dir)
    for root in (paths.weights, paths.merged):
        remove_drafts(root)
    writer = stack.enter_context(closing(BackgroundWriter(while_waiting=stored.wait)))
    publisher: Publisher
    if config.model.lora is None:
        files = WeightPublisher(
            tensors=stored.gathering,
            writer=writer,
            retention=retention,
            assets=assets,
            tokenizer=tokenizer,
            num_layers=config.model.debug.num_layers,
            journal=journal,
        )
        publisher = _over_nccl(config, stored, files, ranks, stack) or files
    else:
        publisher = _of_adapter(config, model, stored, writer, retention, assets, tokenizer, journal)
    return publisher if ranks.control is None else Leading(publisher, stored)


def _over_nccl(
    config: TrainerConfig | SFTConfig, stored: StoredTensors, files: WeightPublisher, ranks: Ranks, stack: ExitStack
) -> Publisher | None:
    """None where weights are files; a trainer that was started alone takes `auto` for that."""
    if not isinstance(config, TrainerConfig) or config.weight_broadcast.type != "nccl":
        return None
    broadcast = config.weight_broadcast
    sender = NcclSender(
        host=broadcast.host,
        port=broadcast.port,
        world_size=1 + broadcast.inference_world_size,
        device=ranks.device,
        timeout=broadcast.timeout,
    )
    stack.callback(sender.close)
    root = RunPaths(config.output_dir).broadcasts
    return BroadcastPublisher(stored=stored, sender=sender, root=root, timeout=broadcast.timeout, files=files)


def _of_adapter(
    config: TrainerConfig | SFTConfig,
    model: TrainedModel,
    stored: StoredTensors,
    writer: BackgroundWriter,
    retention: Retention,
    assets: Path,
    tokenizer: Path,
    journal: Journal,
) -> Publisher:
    lora = config.model.lora
    assert lora is not None
    adapter = adapter_config(model.model, lora)

    def merged_at(where: Retention, journal: Journal | None = None) -> WeightPublisher:
        return WeightPublisher(
            tensors=lambda: merged_tensors(stored, adapter),
            writer=writer,
            retention=where,
            assets=assets,
            tokenizer=tokenizer,
            num_layers=config.model.debug.num_layers,
            journal=journal,
        )

    if adapter.modules_to_save and retention.keep_last is not None:
        return merged_at(retention, journal)
    name = Path(config.model.name)
    milestones = Retention(
        root=RunPaths(config.output_dir).merged,
        max_steps=retention.max_steps,
        interval=retention.interval,
        keep_last=None,
        published_before=latest_step(RunPaths(config.output_dir).merged) or 0,
    )
    return AdapterPublisher(
        stored=stored,
        config=adapter,
        base_model=str(name.resolve()) if name.is_dir() else config.model.name,
        tied_embedding=tied_embedding(model.model),
        retention=retention,
        merged=merged_at(milestones) if lora.merge else None,
        journal=journal,
    )
