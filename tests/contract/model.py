"""The model that both backends serve in the contract tests: a Qwen3 of 0.1 million parameters, float32, made here.

It speaks bytes. Most of it is random, so that its distributions are broad and differ from place to place. Some things
it has learned, by construction of its weights and not by training, so that they hold exactly:

- it writes printable ASCII, unless asked for something else;
- where its prompt offers tools, it calls `get_weather` with `{"city": "Paris"}` in Hermes' form, and ends;
- after `<|smile|>` it writes a smiling face, four tokens for one character, and ends.

How: the first hidden dimensions are reserved. Random weights neither write nor read them (MLPs, and attention but for
one head, have zeros there). Dimension 0 is on for ordinary tokens, and the head of the rare ones is low there. A
learned transition `a -> b` is a dimension that the embedding of `a` turns on and the output row of `b` reads. The tools
of a prompt are found by one attention head that looks for `<tool_call>`, which the chat template writes beside tools.
"""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

CALL = ('\n{"name": "get_weather", ', '"arguments": {"city": ', '"Paris"}}\n')
"""The text of the call between its marks, token by token."""
ARGUMENTS = '{"city": "Paris"}'
SMILE = "\N{SLIGHTLY SMILING FACE}"
END = "<|im_end|>"
# As in Qwen3: tool and thinking markers are added tokens and not special ones, so they are part of the text.
SPECIAL = ("<|endoftext|>", "<|im_start|>", END, "<|smile|>")
PLAIN = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>", *CALL)

TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
{{- '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' }}
{{- 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
{{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments ' }}
{{- 'within <tool_call></tool_call> XML tags:\\n<tool_call>\\n' }}
{{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- elif message.role != 'system' %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments if call.function.arguments is string else call.function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

HIDDEN, MLP, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 64, 96, 4, 2, 32, 2
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "dtype": "float32",
}
"""Besides the size of the vocabulary and the end of sequence."""

ORDINARY = 0
"""The hidden dimension that is on for tokens without a transition."""
ON, LOUD = 4.0, 40.0
"""Values of that dimension, and of a transition's: louder than anything random."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and the added tokens of Qwen3."""
    vocabulary = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    core.add_tokens([AddedToken(token, special=False, normalized=False) for token in PLAIN])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END, pad_token=SPECIAL[0])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def save_model(directory: Path, seed: int = 0) -> Path:
    """The model as a Hugging Face directory with its tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(directory)
    end = tokenizer.eos_token_id
    config = CONFIG | {"vocab_size": len(tokenizer), "eos_token_id": end, "pad_token_id": tokenizer.pad_token_id}
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    save_file(weights(tokenizer, seed), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def weights(tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> dict[str, Tensor]:
    """All tensors under their Hugging Face names. What is random differs by seed, what is learned does not."""
    tensors = dict(_random(len(tokenizer), torch.Generator().manual_seed(seed)))
    chains = _transitions(tokenizer)
    reserved = 2 + len(chains)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[:reserved] = 0.0  # nothing random is written there,
        elif name.endswith(("proj.weight", "embed_tokens.weight", "lm_head.weight")):
            tensor[:, :reserved] = 0.0  # and nothing read
    _speak_ascii(tensors, tokenizer)
    for dim, (token, following) in enumerate(chains, start=1):
        tensors["model.embed_tokens.weight"][token, ORDINARY] = 0.0
        tensors["model.embed_tokens.weight"][token, dim] = LOUD
        tensors["lm_head.weight"][following, dim] = 5.0
    _look_for_tools(tensors, found=1, says=reserved - 1)
    tensors["lm_head.weight"][chains[0][0], reserved - 1] = 5.0
    return tensors


def _random(vocab_size: int, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    def normal(rows: int, columns: int, std: float) -> Tensor:
        return torch.empty(rows, columns).normal_(0.0, std, generator=generator)

    yield "model.embed_tokens.weight", normal(vocab_size, HIDDEN, 1.0)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", torch.ones(HIDDEN)
        yield f"{prefix}.self_attn.q_proj.weight", normal(HEADS * HEAD_DIM, HIDDEN, 0.2)
        yield f"{prefix}.self_attn.k_proj.weight", normal(KV_HEADS * HEAD_DIM, HIDDEN, 0.2)
        yield f"{prefix}.self_attn.v_proj.weight", normal(KV_HEADS * HEAD_DIM, HIDDEN, 0.2)
        yield f"{prefix}.self_attn.o_proj.weight", normal(HIDDEN, HEADS * HEAD_DIM, 0.2)
        yield f"{prefix}.self_attn.q_norm.weight", torch.ones(HEAD_DIM)
        yield f"{prefix}.self_attn.k_norm.weight", torch.ones(HEAD_DIM)
        yield f"{prefix}.post_attention_layernorm.weight", torch.ones(HIDDEN)
        yield f"{prefix}.mlp.gate_proj.weight", normal(MLP, HIDDEN, 0.2)
        yield f"{prefix}.mlp.up_proj.weight", normal(MLP, HIDDEN, 0.2)
        yield f"{prefix}.mlp.down_proj.weight", normal(HIDDEN, MLP, 0.2)
    yield "model.norm.weight", torch.ones(HIDDEN)
    yield "lm_head.weight", normal(vocab_size, HIDDEN, 0.25)


def _transitions(tokenizer: PreTrainedTokenizerFast) -> list[tuple[int, int]]:
    """Token and the one that follows it, that of `<tool_call>` first."""
    call = tokenizer.convert_tokens_to_ids(["<tool_call>", *CALL, "</tool_call>", END])
    face = [tokenizer.convert_tokens_to_ids("<|smile|>"), *tokenizer.encode(SMILE), call[-1]]
    pairs = [*itertools.pairwise(call), *itertools.pairwise(face)]
    assert len(dict(pairs)) == len(pairs)
    return pairs


@torch.no_grad()
def _speak_ascii(tensors: dict[str, Tensor], tokenizer: PreTrainedTokenizerFast) -> None:
    """Of what follows an ordinary token, make printable ASCII likely, the end possible, all else rare."""
    head = tensors["lm_head.weight"]
    tensors["model.embed_tokens.weight"][:, ORDINARY] = ON
    head[:, ORDINARY] = -8.0
    head[tokenizer.convert_tokens_to_ids(list(map(chr, range(33, 127)))), ORDINARY] = 0.0
    head[tokenizer.eos_token_id, ORDINARY] = 0.5


@torch.no_grad()
def _look_for_tools(tensors: dict[str, Tensor], *, found: int, says: int) -> None:
    """Let the first head of the first layer attend to the token that dimension `found` marks, and turn `says` on."""
    prefix = "model.layers.0.self_attn"
    slow = HEAD_DIM // 2 - 1  # the slowest rotation: positions make no difference there
    for name in ("q_proj", "k_proj"):
        tensors[f"{prefix}.{name}.weight"][:HEAD_DIM] = 0.0
    tensors[f"{prefix}.q_proj.weight"][slow, ORDINARY] = 1.0  # every ordinary token looks
    tensors[f"{prefix}.k_proj.weight"][slow, found] = 1.0  # for this one
    tensors[f"{prefix}.k_proj.weight"][slow - 1, ORDINARY] = 1.0  # and for no other
    tensors[f"{prefix}.q_norm.weight"][slow] = 4.0
    tensors[f"{prefix}.v_proj.weight"][0] = 0.0
    tensors[f"{prefix}.v_proj.weight"][0, found] = 1.0
    tensors[f"{prefix}.o_proj.weight"][says, 0] = 6.0
