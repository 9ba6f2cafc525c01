"""Any causal language model of `transformers` as a LanguageModel, packed where its architecture allows that.

    packed       documents end to end in one row; our attention keeps them apart, called through the library's own
                 attention interface. For models whose tokens see each other in attention only
    side by side documents of similar length as rows of a rectangle, padded at the end, where causality hides it. For
                 the others: state-space and convolution layers, attention that is not behind the interface

Which one it is, and why, is logged once. Dropout is off: logprobs must be those of the policy that sampled.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from prime_rl.errors import ModelError
from prime_rl.logs import get_logger
from prime_rl.models.attention import Attention, group_by_length
from prime_rl.models.hf import read_json
from prime_rl.models.language_model import LanguageModel
from prime_rl.models.local_attention import ScoreRule, attend_locally

_logger = get_logger(__name__)

_INTERFACE: Final = "prime_rl_packed"
_PACKED_LAYERS: Final = {"full_attention", "sliding_attention"}
_ARGUMENT: Final = "packed_attention"


@dataclass(slots=True)
class _Call:
    """The attention of one forward, handed down through the library's keyword arguments to every layer."""

    attention: Attention
    position_ids_T: Tensor
    num_calls: int = 0
    _seq_lens: list[int] | None = None

    @property
    def seq_lens(self) -> list[int]:
        """Read from the device once a forward, and only for models that need it."""
        if self._seq_lens is None:
            self._seq_lens = lengths_of(self.position_ids_T)
        return self._seq_lens


def lengths_of(position_ids_T: Tensor) -> list[int]:
    """Tokens of each document of a packed row. Example: positions [0, 1, 2, 0, 1] -> [3, 2]"""
    starts = torch.nonzero(position_ids_T == 0).flatten().tolist()
    return [stop - start for start, stop in itertools.pairwise([*starts, len(position_ids_T)])]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend(  # noqa: PLR0913 (the library's signature)
    module: nn.Module,
    q_1HTD: Tensor,
    k_1KTD: Tensor,
    v_1KTD: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    packed_attention: _Call | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What the library calls in place of one of its own kernels; gives [1, T, H, D]."""
    name = type(module).__name__
    if packed_attention is None or attention_mask is not None:
        lost = "a mask" if attention_mask is not None else "no packed documents"
        raise ModelError(f"impl hf: {name} of the model's code is given {lost} by the layers around it")
    call = packed_attention
    call.num_calls += 1
    q_THD, k_TKD, v_TKD = (x[0].transpose(0, 1) for x in (q_1HTD, k_1KTD, v_1KTD))
    head_dim = q_THD.shape[-1]
    usual = head_dim**-0.5
    scale = usual if scaling is None else float(scaling)
    window = sliding_window if sliding_window is not None and max(call.seq_lens) > sliding_window else None
    if window is None and softcap is None and s_aux is None and v_TKD.shape[-1] == head_dim:
        if abs(scale / usual - 1) > 1e-6:
            q_THD = q_THD * (scale / usual)
        return call.attention(getattr(module, "layer_idx", 0), q_THD, k_TKD, v_TKD)[None], None
    rule = ScoreRule(scale=scale, window=window, softcap=softcap)
    return attend_locally(q_THD, k_TKD, v_TKD, call.seq_lens, rule, s_aux)[None], None


class TransformersModel(LanguageModel):
    """The modules of a `transformers` model under their own names; see `empty_transformers_model`."""

    def __init__(self, hf: PreTrainedModel, *, is_packed: bool) -> None:
        """`hf`: parameters on the meta device, buffers with their values."""
        super().__init__()
        head, embedding = _head_of(hf), hf.get_input_embeddings()
        names = {id(module): name for name, module in hf.named_modules()}
        is_tied = head.weight is embedding.weight
        self._body_name = hf.base_model_prefix
        self._head_name = names[id(embedding if is_tied else head)]
        for name, child in hf.named_children():
            if not (is_tied and child is head):
                self.add_module(name, child)
        self._vocab_size = head.weight.shape[0]
        self._blocks_name = _blocks_of(hf)
        self.logit_scale, self.logit_softcap = _probe_head(hf, head)
        self.is_packed = is_packed
        self._hf_config = hf.config

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return list(self.get_submodule(self._blocks_name).children())

    @property
    def head_weight(self) -> Tensor:
        weight = self.get_submodule(self._head_name).weight
        assert isinstance(weight, Tensor)
        return weight

    def forward(self, input_ids_T: Tensor, position_ids_T: Tensor, attention: Attention) -> Tensor:
        hidden_TH = (
            self._packed(input_ids_T, position_ids_T, attention)
            if self.is_packed
            else self._side_by_side(input_ids_T, lengths_of(position_ids_T))
        )
        return hidden_TH if self.logit_scale == 1.0 else hidden_TH * self.logit_scale

    def _packed(self, input_ids_T: Tensor, position_ids_T: Tensor, attention: Attention) -> Tensor:
        call = _Call(attention, position_ids_T)
        body = self.get_submodule(self._body_name)
        out = body(input_ids_T[None], position_ids=position_ids_T[None], use_cache=False, **{_ARGUMENT: call})
        if call.num_calls < len(self.blocks):
            raise ModelError(
                f"impl hf: {call.num_calls} of {len(self.blocks)} layers of {type(body).__name__} used the attention "
                "they were given, so documents of a packed row may have seen each other"
            )
        hidden_TH: Tensor = out.last_hidden_state[0]
        return hidden_TH

    def _side_by_side(self, input_ids_T: Tensor, seq_lens: Sequence[int]) -> Tensor:
        body = self.get_submodule(self._body_name)
        documents = input_ids_T.split(list(seq_lens))
        outs: list[Tensor] = [input_ids_T] * len(documents)
        for members in group_by_length(seq_lens):
            rows_SL = nn.utils.rnn.pad_sequence([documents[index] for index in members], batch_first=True)
            hidden_SLH = body(rows_SL, use_cache=False).last_hidden_state
            for row, index in enumerate(members):
                outs[index] = hidden_SLH[row, : seq_lens[index]]
        return torch.cat(outs)

    def to_empty(self, *, device: Any, recurse: bool = True) -> "TransformersModel":
        """Allocate the parameters. Buffers, which no file holds (rotation frequencies), keep their values."""
        buffers = {name: buffer.detach().clone() for name, buffer in self.named_buffers()}
        super().to_empty(device=device, recurse=recurse)
        for name, buffer in self.named_buffers():
            buffer.copy_(buffers[name])
        return self

    def initial_tensors(self, seed: int) -> Iterator[tuple[str, Tensor]]:
        """The values that the library draws for a new model, float32 on the CPU."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            drawn = AutoModelForCausalLM.from_config(self._hf_config, dtype=torch.float32)
        names = {name for name, _ in self.named_parameters()}
        for name, parameter in drawn.named_parameters():
            if name in names:
                yield name, parameter.detach()


def empty_transformers_model(
    directory: Path, *, dtype: torch.dtype, trust_remote_code: bool = False, num_layers: int | None = None
) -> TransformersModel:
    """The model of `directory` with parameters on the meta device, to be loaded under Hugging Face's names.

    `num_layers`: keep only the first. Raises: ModelError for what would be trained wrongly, or cannot be built.
    """
    config = _config_of(directory, trust_remote_code)
    if num_layers is not None:
        config.num_hidden_layers = min(num_layers, config.num_hidden_layers)
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:num_layers]
    for key, value in config.to_dict().items():
        if ("dropout" in key or key.endswith("pdrop")) and isinstance(value, float):
            setattr(config, key, 0.0)
    try:
        with _meta_parameters():
            hf = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    except (ValueError, ImportError, AttributeError) as error:
        raise ModelError(f"{directory}: transformers cannot build this model: {_first_line(error)}") from error
    _refuse_converted(hf, directory)
    reason = _why_not_packed(hf) or _take_over_attention(hf)
    if reason is not None:
        _tell_unpacked(hf, reason)
    return TransformersModel(hf, is_packed=reason is None)


def _config_of(directory: Path, trust_remote_code: bool) -> PreTrainedConfig:
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, OSError) as error:
        if not trust_remote_code and read_json(directory / "config.json").get("auto_map"):
            asks = "it comes with Python code of its own; look at it, and set model.trust_remote_code if it may run"
            raise ModelError(f"{directory}: {asks}") from error
        raise ModelError(f"{directory}: transformers cannot read its config.json: {_first_line(error)}") from error
    if getattr(config, "quantization_config", None):
        raise ModelError(f"{directory}: its weights are quantized; train the model that they were made from")
    return config


class _meta_parameters:
    """Parameters that are made meanwhile are on the meta device; buffers have their values."""

    def __enter__(self) -> None:
        def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
            if parameter is None or parameter.is_meta:
                return None  # as it is: tied parameters stay one
            return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

        self._hook = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]  # it may return

    def __exit__(self, *_: object) -> None:
        self._hook.remove()


def _refuse_converted(hf: PreTrainedModel, directory: Path) -> None:
    """Refuse weights that have other names and shapes in files than in memory, and tied ones beside the head."""
    for key in (hf.config.model_type, type(hf).__name__):
        if get_checkpoint_conversion_mapping(key):
            raise ModelError(
                f"{directory}: weights of {type(hf).__name__} are laid out otherwise in files than in memory (most "
                "mixtures of experts are), which this trainer can neither load nor publish"
            )
    head, embedding = hf.get_output_embeddings(), hf.get_input_embeddings()
    seen: dict[int, str] = {}
    for name, parameter in hf.named_parameters(remove_duplicate=False):
        first = seen.setdefault(id(parameter), name)
        if first != name and head is not None and not (parameter is head.weight and parameter is embedding.weight):
            raise ModelError(f"{directory}: {name} and {first} are one tensor; only the head may be tied")


def _why_not_packed(hf: PreTrainedModel) -> str | None:
    """What keeps documents from standing end to end in a row; None where they can."""
    if hf._is_stateful or any(isinstance(module, nn.Conv1d) for module in hf.modules()):
        return "its layers carry a state along the row, from one document into the next"
    kinds = set(getattr(hf.config, "layer_types", None) or ()) - _PACKED_LAYERS
    if kinds:
        return f"it has layers of kind {', '.join(sorted(kinds))}"
    takes = signature(type(hf.base_model).forward).parameters.values()
    if not hf._supports_attention_backend or all(parameter.kind != parameter.VAR_KEYWORD for parameter in takes):
        return "its attention is not behind transformers' attention interface"
    return None


def _take_over_attention(hf: PreTrainedModel) -> str | None:
    """Have the model call our attention; what keeps it from doing so, found by a forward without values, or None."""
    before = hf.config._attn_implementation
    AttentionInterface.register(_INTERFACE, _attend)
    hf.set_attn_implementation(_INTERFACE)
    ids = torch.zeros(2, dtype=torch.long, device="meta")
    call = _Call(lambda layer, q, k, v: torch.empty(q.shape, dtype=q.dtype, device=q.device), ids, _seq_lens=[2])
    try:
        hf.base_model(ids[None], position_ids=ids[None], use_cache=False, **{_ARGUMENT: call})
    except ModelError:
        pass
    except (RuntimeError, NotImplementedError, TypeError):
        return None  # code that cannot be run without values: `_packed` counts what it does with them
    if call.num_calls >= hf.config.num_hidden_layers:
        return None
    hf.set_attn_implementation(before)
    return "its layers do not tell its attention which documents the row holds"


def _tell_unpacked(hf: PreTrainedModel, reason: str) -> None:
    name = type(hf).__name__
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise ModelError(
            f"impl hf: {name} cannot be packed ({reason}), and what cannot be packed is trained by one process only; "
            "start one"
        )
    _logger.warning(
        "%s is not packed: %s. Documents of similar length are computed side by side, padded to the longest of them",
        name,
        reason,
    )


def _head_of(hf: PreTrainedModel) -> nn.Linear:
    head: nn.Module | None = hf.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ModelError(f"impl hf: {type(hf).__name__} has no head that is one matrix")
    if getattr(head, "bias", None) is not None:
        raise ModelError(f"impl hf: the head of {type(hf).__name__} has a bias, which is not supported")
    return head


def _blocks_of(hf: PreTrainedModel) -> str:
    """Name of the list of layers: the longest list of modules below the body."""
    lists = [
        (len(module), name)
        for name, module in hf.named_modules()
        if isinstance(module, nn.ModuleList) and name.startswith(f"{hf.base_model_prefix}.")
    ]
    if not lists:
        raise ModelError(f"impl hf: {type(hf).__name__} has no list of layers")
    _, longest = max(lists, key=lambda found: found[0])
    return str(longest)


class _Stub(nn.Module):
    """Stands for a module whose output is known."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.weight = torch.empty(0)  # some ask the head for its data type
        self._call = call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


class _BodyOutput:
    """What a body returns, whatever else its model would look for in that."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]


def _probe_head(hf: PreTrainedModel, head: nn.Linear) -> tuple[float, float | None]:
    """What the model's code does to its logits besides the product with the head: a factor, and a cap.

    Its own `forward` is run on numbers that stand for the output of its body, with a head that leaves them as they
    are. Raises: ModelError for anything but `factor * x` and `cap * tanh(factor * x / cap)`.
    """
    probe = torch.tensor([[[1e-3, -0.5, 2.0, 40.0, -1e6]]])
    head_name = next(name for name, module in hf.named_modules() if module is head)
    originals = {name: hf.get_submodule(name) for name in (hf.base_model_prefix, head_name)}
    hf.set_submodule(hf.base_model_prefix, _Stub(lambda *_, **__: _BodyOutput(probe)))
    hf.set_submodule(head_name, _Stub(lambda x: x))
    try:
        with torch.no_grad():
            found = hf.forward(input_ids=torch.zeros(1, 1, dtype=torch.long), use_cache=False).logits.double()
    except (AttributeError, TypeError, RuntimeError, ValueError) as error:
        raise ModelError(f"impl hf: the code of {type(hf).__name__} does not show how it makes its logits") from error
    finally:
        for name, module in originals.items():
            hf.set_submodule(name, module)
    x, cap = probe.double(), float(found.abs().max())
    factor = float(found[0, 0, 0] / x[0, 0, 0])
    factor = 1.0 if abs(factor - 1) < 1e-4 else factor
    if torch.allclose(found, factor * x, rtol=1e-4):
        return factor, None
    if torch.allclose(found, cap * torch.tanh(factor * x / cap), rtol=1e-4):
        return factor, cap
    raise ModelError(f"impl hf: {type(hf).__name__} turns the product with its head into logits in a way unknown here")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
