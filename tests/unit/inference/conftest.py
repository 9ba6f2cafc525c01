"""A real HTTP server on loopback over a `FakeBackend`, and a byte-level tokenizer made here."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

import httpx
import pytest
from openai import AsyncOpenAI
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from prime_rl.inference.embedded import EmbeddedAdministration
from prime_rl.inference.fake import FakeBackend
from prime_rl.inference.replies import ReplyFormat
from prime_rl.inference.server import build_server
from prime_rl.inference.service import Service
from prime_rl.inference.tokenizer import TextTokenizer

MODEL = "tiny"
EOS = "<|im_end|>"
TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level_tokenizer(*, chat_template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """256 byte tokens (id = position in the sorted alphabet), two merges, and three special tokens at the end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate([*alphabet, "he", "llo"])}
    vocab["ll"] = len(vocab)
    core = Tokenizer(models.BPE(vocab=vocab, merges=[("h", "e"), ("l", "l"), ("ll", "o")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", EOS, "<|pad|>")])
    core.add_tokens([AddedToken("<think>", special=False)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=EOS, pad_token="<|pad|>")
    tokenizer.chat_template = chat_template
    return tokenizer


@pytest.fixture(scope="session")
def hf_tokenizer() -> PreTrainedTokenizerFast:
    return byte_level_tokenizer()


@pytest.fixture(scope="session")
def tokenizer(hf_tokenizer: PreTrainedTokenizerFast) -> TextTokenizer:
    return TextTokenizer(hf_tokenizer)


@pytest.fixture(scope="session")
def templateless() -> TextTokenizer:
    return TextTokenizer(byte_level_tokenizer(chat_template=None))


@dataclass
class Running:
    """A server that answers on `url`, and clients of it."""

    url: str
    backend: FakeBackend
    service: Service
    http: httpx.AsyncClient
    openai: AsyncOpenAI


Serve = Callable[..., AbstractAsyncContextManager[Running]]
Say = Callable[[str], Callable[[Sequence[int], int], int]]


@pytest.fixture
def say(tokenizer: TextTokenizer) -> Say:
    """A script that answers every prompt with a text and then the end of sequence."""

    def script(text: str) -> Callable[[Sequence[int], int], int]:
        ids = [*tokenizer.encode(text, add_special_tokens=False), *tokenizer.encode(EOS, add_special_tokens=False)]
        return lambda prompt_ids, index: ids[index] if index < len(ids) else ids[-1]

    return script


@pytest.fixture
def make_backend(hf_tokenizer: PreTrainedTokenizerFast) -> Callable[..., FakeBackend]:
    """A backend whose vocabulary is the tokenizer's."""

    def make(**arguments: object) -> FakeBackend:
        eos = frozenset({hf_tokenizer.convert_tokens_to_ids(EOS)})
        return FakeBackend(vocab_size=len(hf_tokenizer), eos_token_ids=eos, **arguments)

    return make


@pytest.fixture
def serve(tokenizer: TextTokenizer) -> Serve:
    """`async with serve(backend) as running`: the server, stopped at the end."""

    @asynccontextmanager
    async def run(
        backend: FakeBackend,
        *,
        key: str | None = None,
        tokenizer: TextTokenizer = tokenizer,
        replies: ReplyFormat | None = None,
    ) -> AsyncIterator[Running]:
        first = {name: tensor.clone() for name, tensor in backend.weights().items()}
        administration = EmbeddedAdministration(backend, first=first.items)
        service = Service.build(
            backend,
            tokenizer,
            model_name=MODEL,
            model_root="/models/tiny",
            administration=administration,
            replies=replies,
        )
        server = build_server(service, key)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            task = asyncio.create_task(server.serve(sockets=[listener]))
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            async with (
                httpx.AsyncClient(base_url=url, headers=headers, timeout=20, verify=False) as http,
                AsyncOpenAI(base_url=f"{url}/v1", api_key=key or "EMPTY", max_retries=0, http_client=http) as openai,
            ):
                try:
                    yield Running(url=url, backend=backend, service=service, http=http, openai=openai)
                finally:
                    server.should_exit = True
                    await task

    return run


async def eventually(condition: Callable[[], bool]) -> None:
    """Give the event loop turns until the condition holds (20 s at most)."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 (what is waited for happens in the server, which sets no event)
            await asyncio.sleep(0.005)


@pytest.fixture(name="eventually")
def eventually_fixture() -> Callable[[Callable[[], bool]], object]:
    return eventually
