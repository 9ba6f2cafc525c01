"""The trainer's configuration: RL (`TrainerConfig`) and SFT (`SFTConfig`) share everything but data and loss."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from prime_rl.config.algorithms import LossConfig, RefKLConfig, RLLossConfig
from prime_rl.config.artifacts import (
    FilesystemBroadcastConfig,
    FilesystemTransportConfig,
    TrainerCheckpointConfig,
    TransportConfig,
    WeightBroadcastConfig,
    WeightsConfig,
)
from prime_rl.config.conflict import Conflict
from prime_rl.config.monitors import HeartbeatConfig, MetricsServerConfig, TrainerWandbConfig
from prime_rl.config.optim import (
    AdamWConfig,
    ConstantSchedulerConfig,
    LinearSchedulerConfig,
    MuonConfig,
    OptimizerConfig,
    SchedulerConfig,
)
from prime_rl.config.shared import (
    BaseConfig,
    Device,
    ModelConfig,
    ProcessConfig,
    SlurmConfig,
    TokenizerConfig,
    TrainerLogConfig,
)


class ActivationCheckpointConfig(BaseConfig):
    """Recomputes activations in the backward pass instead of keeping them."""

    freq: int = Field(default=1, ge=1)
    """Every how many layers; 1 is every layer."""

    mode: Literal["full", "selective"] = "full"
    """full: whole layers. selective: only `targets` inside them."""

    targets: tuple[Literal["norm", "attn_proj", "mlp"], ...] = ("norm",)
    """What is recomputed in a layer; others than the default need `mode = "selective"`. attn_proj: from a layer's first
    norm to the rotated queries and keys."""

    keep_attention: bool = True
    """Whether `mode = "full"` keeps what goes into attention and comes out of it, so that attention, most of the work
    of long sequences, is not computed twice. false: least memory. With impl hf layers are always recomputed whole."""

    @model_validator(mode="after")
    def _suits_its_mode(self) -> Any:
        if self.mode == "full" and self.targets != ("norm",):
            raise Conflict(
                "targets are for mode selective, mode full recomputes whole layers: set mode to selective",
                "targets",
                "mode",
            )
        if self.mode == "selective" and not self.keep_attention:
            raise Conflict(
                "keep_attention is for mode full, mode selective recomputes targets only: leave it out, or set mode to "
                "full",
                "keep_attention",
                "mode",
            )
        return self


class ActivationOffloadingConfig(BaseConfig):
    """Keeps what `ac` does not recompute in the host's memory between forward and backward; turns `ac` on."""

    pin_memory: bool = True
    """Whether that memory is pinned, which makes copies faster."""

    max_inflight_activations: int = Field(default=5, ge=1)
    """Most copies under way; each holds GPU memory."""


class CompileConfig(BaseConfig):
    """Compiles each layer with `torch.compile`."""

    fullgraph: bool = False
    """Whether a layer that cannot be compiled whole is an error."""


class LoRAConfig(BaseConfig):
    """Low-rank adapters (arXiv 2106.09685) instead of all weights."""

    rank: int = Field(default=16, ge=1)
    """Rank of an adapter. vLLM serves ranks up to 512."""

    alpha: float = Field(default=32.0, ge=0)
    """An adapter's output is scaled by alpha / rank."""

    dropout: float = Field(default=0.0, ge=0, le=1)
    """Share of an adapter's inputs that are dropped in training."""

    target_modules: tuple[str, ...] = (
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "experts"),
    )
    """Linear layers that get an adapter: the ends of their names, or regular expressions of whole names. Names of the
    default that a model has not are passed over."""

    modules_to_save: tuple[str, ...] = ()
    """Modules that are trained whole beside the adapters, named likewise. Servers are then given the whole merged model
    each step, for vLLM takes no adapter that holds such modules."""

    merge: bool = False
    """Whether weights that stay on disk (the last step's, and every `weights.interval`) are also written merged into
    the model, as `merged/step_N` in the run directory."""


class DebugModelConfig(BaseConfig):
    """For measuring and testing the system itself."""

    num_layers: int | None = Field(default=None, ge=1)
    """Keep only the first layers. None: all."""

    random_init: bool = False
    """Whether weights are initialised from the seed although there are some."""


class TrainerModelConfig(ModelConfig):
    """The model that is trained."""

    seq_len: int = Field(default=2048, ge=2)
    """Tokens of one packed micro-batch; no sample may be longer."""

    trust_remote_code: bool = False
    """Whether Python code that comes with the model may run, with impl hf or auto."""

    impl: Literal["auto", "custom", "hf"] = "auto"
    """Model code. custom: ours. hf: the `transformers` library's, for dense models of any other architecture; packed
    where tokens see each other in attention only, else documents side by side. auto: ours where it knows the model."""

    attn: Literal["auto", "sdpa", "varlen", "flash_attention_2", "flash_attention_3", "fa4"] = "auto"
    """Attention kernel. auto: FlashAttention of the GPU's generation where it is installed, else torch's: cuDNN's for
    long sequences, its ragged one for short ones. sdpa: torch's, sequences of like length padded. varlen: torch's
    ragged one. CPU: always sdpa."""

    optimization_dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of forward and backward. Master weights and optimizer state stay float32."""

    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type in which gradients are added up over GPUs."""

    compile: CompileConfig | None = None
    ac: ActivationCheckpointConfig | None = None
    ac_offloading: ActivationOffloadingConfig | None = None
    lora: LoRAConfig | None = None

    fsdp_cpu_offload: bool = False
    """Whether weights, gradients and optimizer state live in the host's memory."""

    optim_cpu_offload: bool = False
    """Whether only the optimizer state does. It visits the GPU in each step."""

    reshard_after_forward: bool = True
    """Whether a layer's gathered weights are dropped between forward and backward: less memory, more communication."""

    dp_replicate: int = Field(default=1, ge=1)
    """Groups of GPUs that each hold the whole model (HSDP)."""

    ep: int = Field(default=1, ge=1)
    """GPUs that share the experts of a mixture-of-experts layer."""

    tp: int = Field(default=1, ge=1)
    """GPUs that share each matrix multiplication."""

    cp: int = Field(default=1, ge=1)
    """GPUs that share a sequence."""

    ep_comm_backend: Literal["torch", "deepep"] = "torch"
    """What carries tokens to their experts on other GPUs. torch: all-to-all. deepep: DeepEP's kernels."""

    moe_use_grouped_mm: bool = True
    """Whether experts are computed by one grouped matrix multiplication."""

    fp8: bool = False
    """Whether matrix multiplications are computed in 8-bit floating point (Hopper GPUs and later)."""

    fused_lm_head_chunk_size: int | Literal["auto", "disabled"] = "auto"
    """As many logits exist at a time as this many tokens have. auto: 2.5 GiB of them on a GPU, 256 MiB on a CPU;
    disabled: all. What is not held is computed again in the backward pass."""

    debug: DebugModelConfig = Field(default_factory=DebugModelConfig)

    @field_validator("attn", mode="before")
    @classmethod
    def _long_for_fa4(cls, value: Any) -> Any:
        return "fa4" if value == "flash_attention_4" else value

    @model_validator(mode="after")
    def _fits_together(self) -> Any:
        if self.trust_remote_code and self.impl == "custom":
            raise Conflict(
                "trust_remote_code runs the model's own code: set impl to hf or auto", "trust_remote_code", "impl"
            )
        if self.cp > 1 and self.attn == "sdpa":
            raise Conflict(
                "cp above 1 needs flash attention: set attn to auto, flash_attention_2 or flash_attention_3",
                "cp",
                "attn",
            )
        if self.fsdp_cpu_offload and self.optim_cpu_offload:
            raise Conflict(
                "fsdp_cpu_offload offloads the optimizer too: set only one of it and optim_cpu_offload",
                "fsdp_cpu_offload",
                "optim_cpu_offload",
            )
        if isinstance(self.fused_lm_head_chunk_size, int) and self.fused_lm_head_chunk_size < 512:
            raise Conflict("fused_lm_head_chunk_size must be 512 or more, or auto", "fused_lm_head_chunk_size")
        return self


class BenchConfig(BaseConfig):
    """Measures a few steps and prints a table of step time, tokens/s, MFU and memory. Nothing that it writes stays but
    metrics, in `bench` below the run directory; without `data.fake`, RL is measured on made-up batches of its own."""

    steps: int = Field(default=4, ge=2)
    """Steps that are made."""

    warm_up: int = Field(default=1, ge=1)
    """Of these, the first ones, which are shown and not counted."""

    output_json: Path | None = None
    """File that every step, and mean and median of those that count, are written to as well. None: none."""

    @model_validator(mode="after")
    def _something_counts(self) -> Any:
        if self.warm_up >= self.steps:
            raise Conflict("all steps are for warming up, so none counts; raise steps", "steps", "warm_up")
        return self


class DebugConfig(BaseConfig):
    """For measuring and testing the system itself."""

    min_step_time: float = Field(default=0.0, ge=0)
    """Seconds that a step takes at least: a stand-in for a larger model when overlap is measured."""


class _BaseTrainerConfig(ProcessConfig):
    """What RL and SFT configure alike."""

    model: TrainerModelConfig = Field(default_factory=TrainerModelConfig)
    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig)
    optim: OptimizerConfig = Field(default_factory=AdamWConfig)
    scheduler: SchedulerConfig = Field(default_factory=ConstantSchedulerConfig)
    ckpt: TrainerCheckpointConfig | None = None
    weights: WeightsConfig = Field(default_factory=WeightsConfig)
    wandb: TrainerWandbConfig | None = None
    heartbeat: HeartbeatConfig | None = None
    metrics_server: MetricsServerConfig | None = None
    bench: BenchConfig | None = None
    debug: DebugConfig = Field(default_factory=DebugConfig)

    memory_profiler_path: Path | None = None
    """Directory for snapshots of GPU memory. None: none are taken."""

    trace_path: Path | None = None
    """Directory for a trace of every step, for at most 10 of them. None: none is taken."""

    dist_timeout_seconds: int = Field(default=600, ge=1)
    """Seconds after which a rank that waits for the others gives up."""

    max_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps. None: until stopped."""

    max_skipped_steps: int = Field(default=3, ge=0)
    """Steps in a row whose update is left out because the loss or the gradient is not finite, before the run stops and
    says why. 0: the first one stops it. Weights that are not finite stop it at once."""

    seed: int = 42
    """Seeds initial weights where the model directory has none, dropout (with the rank added), and made-up data.
    (SFT data has `data.seed`.)"""

    deterministic: bool = False
    """Whether the same batches give the same weights to the last bit: on the CPU of one kind of machine, with as many
    ranks and threads."""

    device: Device = "auto"
    """Where to train. auto: the first visible GPU, else the CPU."""

    log: TrainerLogConfig = Field(default_factory=TrainerLogConfig)

    @model_validator(mode="after")
    def _fits_together(self) -> Any:
        num_steps = self.max_steps if self.bench is None else self.bench.steps
        if self.trace_path is not None and (num_steps is None or num_steps >= 10):
            raise Conflict("trace_path writes a large file a step: set max_steps below 10", "trace_path", "max_steps")
        if isinstance(self.optim, MuonConfig) and self.model.fsdp_cpu_offload:
            raise Conflict(
                "optim.type muon does not go with model.fsdp_cpu_offload; use adamw, or drop the offload",
                "optim.type",
                "model.fsdp_cpu_offload",
            )
        if self.deterministic and self.device == "cuda":
            raise Conflict(
                "deterministic is held on the CPU alone: set device to cpu, or leave deterministic out",
                "deterministic",
                "device",
            )
        weights = self.ckpt.weights if self.ckpt else None
        if weights is not None and weights.save_adapter_separately and self.model.lora is None:
            raise Conflict(
                "save_adapter_separately needs an adapter: add [model.lora], or drop it",
                "ckpt.weights.save_adapter_separately",
                "model.lora",
            )
        return self

    @model_validator(mode="after")
    def _schedule_fits(self) -> Any:
        if isinstance(self.scheduler, ConstantSchedulerConfig):
            return self
        if self.max_steps is None:
            raise Conflict(
                f"scheduler.type {self.scheduler.type} needs max_steps, to know where it ends",
                "scheduler.type",
                "max_steps",
            )
        decay = self.scheduler.decay_steps if isinstance(self.scheduler, LinearSchedulerConfig) else 0
        if self.scheduler.warmup_steps + decay > self.max_steps:
            keys = ["scheduler.warmup_steps", *(["scheduler.decay_steps"] if decay else []), "max_steps"]
            parts = f"{self.scheduler.warmup_steps} warm-up{f' and {decay} decay' if decay else ''} steps"
            raise Conflict(
                f"{parts} do not fit into max_steps {self.max_steps}; set fewer, or a larger max_steps", *keys
            )
        return self


class FakeDataConfig(BaseConfig):
    """Batches made up on the spot, to run or measure the trainer alone."""

    batch_size: int = Field(default=2, ge=1)
    """Samples a step."""

    micro_batch_size: int = Field(default=1, ge=1)
    """Samples of `seq_len` tokens in one micro-batch."""

    seq_len: int | None = Field(default=None, ge=2)
    """Tokens of a sample. None: `model.seq_len`."""

    length: Literal["fixed", "variable"] = "fixed"
    """fixed: every sample has `seq_len` tokens. variable: between 2 and that many, packed."""

    generate_samples: bool = False
    """Whether each step has samples of its own; else every step sees the same."""

    @model_validator(mode="after")
    def _whole_micro_batches(self) -> Any:
        check_divisible(self.batch_size, self.micro_batch_size)
        return self


class RLDataConfig(BaseConfig):
    """Where batches come from."""

    fake: FakeDataConfig | None = None
    """None: the orchestrator's batches."""


def check_divisible(batch_size: int, micro_batch_size: int) -> None:
    """A batch is a whole number of micro-batches. Raises: Conflict with a size that fits."""
    if batch_size % micro_batch_size:
        near = max(micro_batch_size, batch_size - batch_size % micro_batch_size)
        raise Conflict(
            f"batch_size must be divisible by micro_batch_size; try batch_size {near}", "batch_size", "micro_batch_size"
        )


class TrainerConfig(_BaseTrainerConfig):
    """`trainer`: turns batch n and weights n into weights n + 1."""

    data: RLDataConfig = Field(default_factory=RLDataConfig)
    loss: RLLossConfig = Field(default_factory=LossConfig)
    ref_kl: RefKLConfig = Field(default_factory=RefKLConfig)
    weight_broadcast: WeightBroadcastConfig = Field(default_factory=FilesystemBroadcastConfig)
    rollout_transport: TransportConfig = Field(default_factory=FilesystemTransportConfig)

    max_async_level: int = Field(default=1, ge=0)
    """How many steps generation may run ahead; weights that it may still need are kept on disk."""

    batch_timeout: float = Field(default=3600.0, gt=0)
    """Seconds to wait for a batch of the orchestrator before the run ends with an error."""

    max_concurrent_runs: int = Field(default=1, ge=1)
    """Runs, each with an adapter of its own, that share this trainer."""

    enable_router_replay: bool = False
    """Whether a mixture-of-experts layer takes the experts that the server took (`enable_return_routed_experts`)."""

    recover: bool = False
    """Go on from the newest complete checkpoint that the run directory holds, or from step 0 where it holds none, and
    train the batches that are there since again. `rl` sets it when it starts a trainer again."""

    recovery_interval: float | None = Field(default=None, gt=0)
    """Seconds between two recovery checkpoints, of which the newest stays on disk until the run is complete. None: none
    are written; `rl` has one of its own for a run that it supervises."""

    keep_batches: bool = False
    """Whether the batches that no checkpoint needs any more stay on disk, for `replay`."""

    replay: Path | None = None
    """Directory of recorded batches (`rollouts` of a run) to train on, instead of those of an orchestrator."""

    @model_validator(mode="after")
    def _batches_come_from_one_place(self) -> Any:
        if self.replay is not None and self.data.fake is not None:
            raise Conflict("batches are either recorded or made up: drop one", "replay", "data.fake")
        if self.ckpt is not None and self.ckpt.skip_dataloader:
            raise Conflict(
                "the trainer has no data of its own, only batches by their step; what starts anew is the "
                "orchestrator's (its ckpt.skip_buffer and ckpt.skip_progress)",
                "ckpt.skip_dataloader",
            )
        return self

    @model_validator(mode="after")
    def _adapters_are_files(self) -> Any:
        if self.model.lora is not None and self.weight_broadcast.type == "nccl":
            raise Conflict(
                "adapters reach the servers as files, in milliseconds: set weight_broadcast.type to filesystem or auto",
                "weight_broadcast.type",
                "model.lora",
            )
        return self

    @model_validator(mode="after")
    def _one_tokenizer(self) -> Any:
        if self.tokenizer.name not in (None, self.model.name):
            raise Conflict(
                "the server and the environments use the model's tokenizer; leave tokenizer.name out",
                "tokenizer.name",
                "model.name",
            )
        return self


class LossMaskConfig(BaseConfig):
    """Whose tokens are trained on."""

    system: bool = False
    user: bool = False
    assistant: bool = True
    tool: bool = False


class _BaseDataConfig(BaseConfig):
    """How data are batched."""

    batch_size: int = Field(default=128, ge=1)
    """Packed rows of `seq_len` tokens per step."""

    seq_len: int = Field(default=128, ge=2)
    """Tokens per packed row. A longer example is skipped and counted."""

    micro_batch_size: int | None = Field(default=None, ge=1)
    """Rows per micro-batch. None: as many as fit into `model.seq_len` tokens."""

    pack_function: Literal["cat", "stack"] = "cat"
    """cat: examples end to end in a row. stack: one example a row, rows of like length together."""

    @model_validator(mode="after")
    def _whole_micro_batches(self) -> Any:
        if self.micro_batch_size is not None:
            check_divisible(self.batch_size, self.micro_batch_size)
        if self.pack_function == "stack" and self.seq_len % 256:
            raise Conflict("pack_function stack needs a seq_len divisible by 256", "pack_function", "seq_len")
        return self


class SFTDataConfig(_BaseDataConfig):
    """The data set, and how it is batched."""

    type: Literal["sft"] = "sft"

    name: str = "PrimeIntellect/Reverse-Text-SFT"
    """A JSONL or Parquet file, a directory of them, or a hub data set; rows of `messages` or `prompt`/`completion`."""

    subsets: tuple[str, ...] | None = None
    """Subsets of a hub data set. None: its default one."""

    splits: tuple[str, ...] | None = None
    """Splits of a hub data set. None: `train`."""

    probabilities: tuple[float, ...] | None = None
    """How often each subset or split is drawn. None: one after the other."""

    stopping_strategy: Literal["all_exhausted", "first_exhausted"] = "all_exhausted"
    """When an epoch over several subsets ends: when all of them have, or the first."""

    num_examples: int | None = Field(default=None, ge=1)
    """Use only the first examples. None: all."""

    shuffle: bool = True
    """Whether each epoch has an order of its own."""

    seed: int = 0
    """Seeds that order."""

    loss_mask: LossMaskConfig = Field(default_factory=LossMaskConfig)

    @model_validator(mode="after")
    def _subsets_and_splits_match(self) -> Any:
        lists = {"subsets": self.subsets, "splits": self.splits, "probabilities": self.probabilities}
        lengths = {name: len(given) for name, given in lists.items() if given is not None}
        if self.probabilities is not None and len(lengths) == 1:
            raise Conflict("probabilities are those of subsets or splits: set one of these too", "probabilities")
        if len(set(lengths.values())) > 1:
            raise Conflict(f"{' and '.join(lengths)} belong together: give as many of each", *lengths)
        return self


class SFTFakeDataConfig(_BaseDataConfig):
    """Rows made up on the spot, to run or measure the trainer alone."""

    type: Literal["fake"] = "fake"

    length: Literal["fixed", "variable"] = "fixed"
    """fixed: every example fills a row. variable: between 2 and `seq_len` tokens, packed."""

    input_ids: Literal["increasing", "random"] = "increasing"
    """Which tokens."""


AnySFTDataConfig = Annotated[SFTDataConfig | SFTFakeDataConfig, Field(discriminator="type")]


class SFTConfig(_BaseTrainerConfig):
    """`sft`: supervised fine-tuning on conversations."""

    data: AnySFTDataConfig = Field(default_factory=SFTDataConfig)

    slurm: SlurmConfig | None = None

    loss_impl: Literal["torch", "liger"] = "torch"
    """Code of the cross-entropy."""

    clean: bool = False
    """Delete what an earlier run left in the run directory. Without it, a used directory is refused."""

    @model_validator(mode="after")
    def _parallel_fits(self) -> Any:
        if self.model.cp > 1 and (self.data.pack_function != "cat" or self.data.seq_len % self.model.cp):
            raise Conflict(
                "model.cp above 1 needs data.pack_function cat and a data.seq_len divisible by it",
                "model.cp",
                "data.pack_function",
                "data.seq_len",
            )
        return self
