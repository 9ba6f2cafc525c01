import random

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from prime_rl.inference.text import Stops, TextStream
from prime_rl.inference.tokenizer import TextTokenizer

TEXTS = ["hello world", "w\u00f6rld \u4f60\u597d", "\U0001f600\U0001f468\u200d\U0001f469", "a\n\n\tb", "end\U0001f600"]


def stream(tokenizer, *, stops=(), include=False, min_tokens=0, skip=True, prompt_ids=()):
    return TextStream(
        tokenizer,
        prompt_ids=prompt_ids,
        stops=Stops(strings=tuple(stops), include=include),
        skip_special_tokens=skip,
        min_tokens=min_tokens,
    )


def run(text_stream, ids):
    """The pieces pushed out, the stop string, and how many tokens were taken."""
    pieces = []
    for number, token_id in enumerate(ids, start=1):
        text, stop = text_stream.push(token_id)
        pieces.append(text)
        if stop is not None:
            return pieces, stop, number
    text, stop = text_stream.finish()
    return [*pieces, text], stop, len(ids)


@pytest.mark.parametrize("text", TEXTS)
def test_the_pieces_join_to_the_text_and_hold_no_half_character(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces, stop, _ = run(stream(tokenizer), ids)
    assert "".join(pieces) == text
    assert stop is None
    assert all("\ufffd" not in piece for piece in pieces)
    assert len(pieces) == len(ids) + 1


def test_random_bytes_join_to_what_the_tokenizer_decodes_at_once(tokenizer):
    generator = random.Random(0)
    for _ in range(200):
        ids = [generator.randrange(256) for _ in range(generator.randrange(1, 30))]
        pieces, _, _ = run(stream(tokenizer), ids)
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)


def test_an_unfinished_character_at_the_end_becomes_a_replacement_character(tokenizer):
    ids = tokenizer.encode("a\u4f60", add_special_tokens=False)[:-1]
    pieces, _, _ = run(stream(tokenizer), ids)
    assert "".join(pieces) == "a\ufffd"
    assert pieces[-1] == "\ufffd"


def test_special_tokens_are_left_out_unless_asked_for(tokenizer):
    ids = tokenizer.encode("a<|im_end|><think>b", add_special_tokens=False)
    assert "".join(run(stream(tokenizer), ids)[0]) == "a<think>b"
    assert "".join(run(stream(tokenizer, skip=False), ids)[0]) == "a<|im_end|><think>b"


def test_a_stop_string_over_several_tokens_is_found_and_nothing_of_it_is_sent(tokenizer):
    ids = tokenizer.encode("one END two", add_special_tokens=False)
    pieces, stop, taken = run(stream(tokenizer, stops=["END"]), ids)
    assert "".join(pieces) == "one "
    assert stop == "END"
    assert taken == len("one END")


def test_what_only_began_like_a_stop_string_is_sent(tokenizer):
    ids = tokenizer.encode("EN EN", add_special_tokens=False)
    pieces, stop, _ = run(stream(tokenizer, stops=["END"]), ids)
    assert "".join(pieces) == "EN EN"
    assert pieces[:3] == ["", "", "EN "]
    assert stop is None


def test_a_stop_string_can_end_within_a_token(tokenizer):
    ids = tokenizer.encode("hello", add_special_tokens=False)
    assert len(ids) == 2
    pieces, stop, _ = run(stream(tokenizer, stops=["el"]), ids)
    assert ("".join(pieces), stop) == ("h", "el")


def test_the_first_stop_string_in_the_text_wins(tokenizer):
    ids = tokenizer.encode("hello", add_special_tokens=False)
    _, stop, _ = run(stream(tokenizer, stops=["lo", "ll"]), ids)
    assert stop == "ll"


def test_the_stop_string_is_kept_when_asked_for(tokenizer):
    ids = tokenizer.encode("one END two", add_special_tokens=False)
    pieces, stop, _ = run(stream(tokenizer, stops=["END"], include=True), ids)
    assert ("".join(pieces), stop) == ("one END", "END")


def test_a_stop_string_before_min_tokens_is_no_stop(tokenizer):
    ids = tokenizer.encode("xaxbx", add_special_tokens=False)
    pieces, stop, taken = run(stream(tokenizer, stops=["x"], min_tokens=3), ids)
    assert ("".join(pieces), stop, taken) == ("xaxb", "x", 5)


def test_a_stop_string_of_a_wide_character_is_found(tokenizer):
    ids = tokenizer.encode("a\u4f60b", add_special_tokens=False)
    pieces, stop, taken = run(stream(tokenizer, stops=["\u4f60"]), ids)
    assert ("".join(pieces), stop, taken) == ("a", "\u4f60", 4)


@pytest.fixture(scope="module")
def byte_fallback():
    """A vocabulary like that of sentencepiece: words with a mark for their space, and bytes for the rest."""
    words = ["<unk>", "\u2581", "\u2581hello", "\u2581world", "!"]
    vocab = {word: index for index, word in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    core.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return TextTokenizer(PreTrainedTokenizerFast(tokenizer_object=core))


def test_other_vocabularies_keep_the_space_between_prompt_and_completion(byte_fallback):
    assert not byte_fallback.is_byte_level
    pieces, _, _ = run(stream(byte_fallback, prompt_ids=[2]), [3, 4, 2])
    assert pieces == [" world", "!", " hello", ""]


def test_other_vocabularies_hold_back_half_characters(byte_fallback):
    ids = [5 + byte for byte in "\u4f60".encode()]
    pieces, _, _ = run(stream(byte_fallback, prompt_ids=[2]), [4, *ids, 4])
    assert pieces == ["!", "", "", "\u4f60", "!", ""]


def test_other_vocabularies_let_bytes_through_that_are_no_character(byte_fallback):
    pieces, _, _ = run(stream(byte_fallback, prompt_ids=[2]), [5 + 0xFF] * 20)
    assert "".join(pieces) == "\ufffd" * 20
    assert max(len(piece) for piece in pieces) < 20
