"""Checkpoints, and how weights and batches travel between the processes."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from prime_rl.config.shared import BaseConfig


class SharedCheckpointConfig(BaseConfig):
    """Checkpoints of trainer and orchestrator, from which a run is resumed."""

    interval: int | None = Field(default=50, ge=1)
    """Steps between two checkpoints; the last step always has one. None: only the last."""

    resume_step: int | None = Field(default=None, ge=-1)
    """Step to go on from; -1 is the latest complete one. None: start anew."""

    keep_last: int | None = Field(default=None, ge=1)
    """How many of the latest checkpoints stay on disk. None, and no `keep_interval`: all."""

    keep_interval: int | None = Field(default=None, ge=1)
    """Checkpoints of every N-th step stay for good."""

    output_dir: Path | None = None
    """Directory that holds the `step_N` of the checkpoints. None: `checkpoints` in the run directory."""

    save_async: bool = False
    """Whether training goes on while a checkpoint is written."""

    skip_progress: bool = False
    """Whether a resumed run counts its steps from 0 again."""


class WeightCheckpointConfig(BaseConfig):
    """The form of the weights that are written beside a checkpoint."""

    save_sharded: bool = True
    """Whether large models are written as several files."""

    save_format: Literal["safetensors", "torch"] = "safetensors"
    """File format."""

    save_adapter_separately: bool = False
    """Whether a LoRA adapter is written as files of its own too."""


class TrainerCheckpointConfig(SharedCheckpointConfig):
    """The trainer's checkpoints: torch DCP directories `checkpoints/step_N/trainer`."""

    weights: WeightCheckpointConfig | None = Field(default_factory=WeightCheckpointConfig)

    weights_only: bool = False
    """Whether a checkpoint holds weights alone: small, but a run cannot be resumed from it."""

    skip_scheduler: bool = False
    """Whether a resumed run starts its learning-rate schedule anew."""

    skip_dataloader: bool = False
    """Whether a resumed run starts its data anew."""

    skip_optimizer: bool = False
    """Whether a resumed run starts with an empty optimizer state."""


class OrchestratorCheckpointConfig(SharedCheckpointConfig):
    """The orchestrator's checkpoints: `checkpoints/step_N/orchestrator`."""

    wait_for_weights_timeout: int | None = Field(default=None, ge=1)
    """Seconds that a resumed run waits for the weights of its step. None: `weights_timeout`."""

    skip_buffer: bool = False
    """Whether a resumed run starts with an empty buffer."""


class WeightsConfig(BaseConfig):
    """Which `weights/step_N` stay on disk."""

    interval: int | None = Field(default=None, ge=1)
    """Keep every N-th step's weights for good. None: only those the run still needs, and the last."""


class SharedWeightBroadcastConfig(BaseConfig):
    """How new weights reach the inference server."""

    type: Literal["filesystem", "nccl", "auto"] = "filesystem"
    """filesystem: through `weights/step_N`. nccl: from GPU to GPU. auto: nccl where `rl` starts a vLLM server on GPUs
    that the trainer does not use, else filesystem."""


class FilesystemBroadcastConfig(BaseConfig):
    """New weights reach the inference server through `weights/step_N`, on a file system that both see."""

    type: Literal["filesystem"] = "filesystem"


class _MeetingConfig(BaseConfig):
    """Where trainer and servers meet over NCCL."""

    host: str = "localhost"
    """Address of the trainer's first rank, as the server reaches it."""

    port: int = Field(default=29501, ge=1, le=65535)
    """TCP port where they meet."""

    timeout: int = Field(default=1200, ge=1)
    """Seconds that one side waits for the other. When they first meet, servers wait 300 at most, as vLLM does."""

    inference_world_size: int = Field(default=1, ge=1)
    """GPUs of all servers together; with `rl` it follows from `inference_gpu_ids`."""


class NCCLBroadcastConfig(_MeetingConfig):
    """New weights are sent from the trainer's GPUs to the server's."""

    type: Literal["nccl"] = "nccl"


class AutoBroadcastConfig(_MeetingConfig):
    """Over NCCL where `rl` starts a vLLM server on GPUs that the trainer does not use, else through files. A process
    that is started alone takes files."""

    type: Literal["auto"] = "auto"

    def resolved(self, *, over_nccl: bool) -> "FilesystemBroadcastConfig | NCCLBroadcastConfig":
        """What it stands for, once it is known where server and trainer run."""
        if not over_nccl:
            return FilesystemBroadcastConfig()
        return NCCLBroadcastConfig(**self.model_dump(exclude={"type"}))


WeightBroadcastConfig = Annotated[
    FilesystemBroadcastConfig | NCCLBroadcastConfig | AutoBroadcastConfig, Field(discriminator="type")
]


class FilesystemTransportConfig(BaseConfig):
    """Batches reach the trainer through `rollouts/step_N`, on a file system that both see."""

    type: Literal["filesystem"] = "filesystem"


class ZMQTransportConfig(BaseConfig):
    """Batches are sent to the trainer over TCP."""

    type: Literal["zmq"] = "zmq"

    host: str = "localhost"
    """Address of the orchestrator, as the trainer reaches it."""

    port: int = Field(default=5555, ge=1, le=65535)
    """TCP port."""

    hwm: int = Field(default=10, ge=1)
    """Most batches that wait in the queue."""


TransportConfig = Annotated[FilesystemTransportConfig | ZMQTransportConfig, Field(discriminator="type")]
