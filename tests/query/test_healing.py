from __future__ import annotations

import random
from itertools import product
from pathlib import Path

import pytest
from fuzz import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from acgpt.errors import InputError, ModelError
from acgpt.query import healing
from acgpt.query.gaps import encode_gaps
from acgpt.query.healing import encode_inside, stable_end, stable_start
from acgpt.query.template import Gap, Given, Slot
from acgpt.query.text import encode_text
from acgpt.query.vocabulary import ByteVocabulary

SAMPLES = [
    "The capital of France is Paris. They're sure, aren't they? I've heard it's so; WE'LL see.",
    "def f(x, y=10):\n    if x:\n        return x + y  # a comment\n\n\n    return [x, y][0]\n",
    "class A(Base):\r\n\tdef __init__(self):\r\n\t\tself.value = {'a': 1}\r\n\r\n",
    "自然言語処理は、人間が日常的に使っている自然言語をコンピュータに処理させる技術である。今天天气很好，我们去公园。",
    "👩‍👩‍👧‍👦 family 🏳️‍🌈🇫🇷👍🏽 !!! 🎉🎉🎉\n",
    "3.14159265358979, 1234567890 and 2024-01-31; 10,000,000.00",
    "=======\n-----> ...... !!!??? (((([[[{{{}}}]]]))));;;\n\n",
    "https://www.example.org/some/path?query=1234&other=a_b-c#fragment",
    "naïve café, Zürich, Москва, عربى, ก็, हिन्दी, 한국어",
    "a  b   c    d\t\te \n f\n\n  g   \n",
]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

pieces_of_samples = st.builds(
    lambda text, a, n: text[a : a + n], st.sampled_from(SAMPLES), st.integers(0, 50), st.integers(0, 50)
)
ordinary = st.characters(exclude_categories=["Cs", "Cc", "Cn"], exclude_characters="▁")
texts = st.lists(pieces_of_samples | st.text(ordinary, max_size=4), max_size=3).map("".join)


@st.composite
def gapped(draw: st.DrawFn) -> tuple[str, str, str]:
    """A text before a gap, in the gap, and after it: parts of one text, because most merges are inside words."""
    text = draw(texts.filter(bool))
    a, b = sorted(draw(st.tuples(*[st.integers(0, len(text))] * 2)))
    return text[:a], draw(st.just(text[a:b]) | texts), text[b:]


thorough = settings(deadline=None, max_examples=examples(40), suppress_health_check=[HealthCheck.too_slow])


def byte_level(pattern: str, normalizer: normalizers.Normalizer | None = None) -> PreTrainedTokenizerBase:
    """A byte-level BPE that is trained on the samples, with this pattern; its offsets leave out spaces."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SAMPLES * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


@pytest.fixture(scope="session")
def like_llama3() -> PreTrainedTokenizerBase:
    return byte_level(LLAMA3)


@pytest.fixture(scope="session")
def like_qwen() -> PreTrainedTokenizerBase:
    return byte_level(LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"), normalizers.NFC())


@pytest.fixture(scope="session")
def sentencepiece() -> PreTrainedTokenizerBase:
    """A SentencePiece-like BPE without pre-tokens, so that tokens can be joined over the whole text."""
    trained = Tokenizer(models.BPE(byte_fallback=True))
    trained.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        initial_alphabet=["▁"],
        limit_alphabet=80,
        show_progress=False,
    )
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trained.train_from_iterator([text for sample in SAMPLES for text in sample.splitlines()] * 3, trainer)
    return from_model(trained.model)


def from_model(model: models.Model) -> PreTrainedTokenizerBase:
    """A tokenizer that puts a space before the text and has no pre-tokens."""
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


KINDS = ["gpt2", "smollm2", "like_llama3", "like_qwen", "sentencepiece", "llama", "llama_legacy"]


@pytest.fixture(scope="session", params=KINDS)
def any_kind(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    """Each of the tokenizers in turn."""
    return request.getfixturevalue(request.param)


def normalised(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text as the tokenizer reads it: some compose characters."""
    normalizer = tokenizer.backend_tokenizer.normalizer
    return normalizer.normalize_str(text) if isinstance(normalizer, normalizers.NFC) else text


@thorough
@given(text=texts)
def test_joined_bytes_of_the_tokens_are_the_text(text: str, any_kind: PreTrainedTokenizerBase) -> None:
    vocabulary, text = ByteVocabulary.of(any_kind), normalised(text, any_kind)
    # The newer Llama tokenizer puts no space before one.
    doubled = vocabulary.begin and encode_text(" a", any_kind) == encode_text("a", any_kind) and text.startswith(" ")
    begin = b"" if doubled or not text else vocabulary.begin
    assert vocabulary.decode(encode_text(text, any_kind)) == begin + text.encode()


@thorough
@given(text=gapped())
def test_kept_tokens_are_those_of_the_whole_text_whatever_is_in_the_gap(
    text: tuple[str, str, str], any_kind: PreTrainedTokenizerBase
) -> None:
    before, gap, after = text
    first = encode_text(before[: stable_end(before, any_kind)], any_kind)
    last = encode_inside(after[stable_start(after, any_kind) :], any_kind)
    whole = encode_text(before + gap + after, any_kind)
    assert whole[: len(first)] == first
    assert whole[len(whole) - len(last) :] == last
    assert len(first) + len(last) <= len(whole)


@thorough
@given(text=gapped())
def test_kept_tokens_between_two_gaps_are_in_the_whole_text(
    text: tuple[str, str, str], any_kind: PreTrainedTokenizerBase
) -> None:
    before, middle, after = text
    gap = Slot((), None, 0, gap=Gap())
    gapped = encode_gaps([gap, *([Given(middle)] if middle else []), gap], any_kind)
    vocabulary = ByteVocabulary.of(any_kind)
    kept = list(gapped.tokens)
    whole = encode_text(before + middle + after, any_kind)
    offsets = [len(vocabulary.decode(whole[:i])) for i in range(len(whole) + 1)]
    following = len(normalised(gapped.regions[-1].literals[0].decode() + after, any_kind).encode())
    if kept:
        index = offsets.index(offsets[-1] - following)
        assert whole[index - len(kept) : index] == kept


@pytest.mark.parametrize(
    ("text", "before", "after"),
    [
        ("The capital of ", "The capital of", None),
        ("The capital of", "The capital", None),
        ("def f(x):\n", "def f(x):", None),
        ("un", "", None),
        ("x = 12345", "x =", None),
        ("A family: 👩‍👩‍👧", "A family: 👩‍👩‍👧", None),
        ("He'l", "He", None),
        ("", "", ""),
        (" is Paris.", None, " is Paris."),
        ("ly is Paris.", None, " is Paris."),
        ("s a dog", None, " a dog"),
        ("\nx", None, "\nx"),
        ("ll see", None, " see"),
    ],
)
def test_as_little_as_possible_is_given_back_at_a_gap(
    text: str, before: str | None, after: str | None, gpt2: PreTrainedTokenizerBase
) -> None:
    assert before is None or text[: stable_end(text, gpt2)] == before
    assert after is None or text[stable_start(text, gpt2) :] == after


def test_digits_in_groups_of_three_are_given_back_after_a_gap(like_llama3: PreTrainedTokenizerBase) -> None:
    assert stable_start("123456 is", like_llama3) == 6
    assert stable_end("is 123456", like_llama3) in (6, 9)  # the groups are counted from the left


@pytest.mark.parametrize("text", [".=a", ">=a-", "-=athe"])
def test_the_kept_part_has_the_same_tokens_alone(text: str, like_llama3: PreTrainedTokenizerBase) -> None:
    # The pattern joins "=" to "a", unless a symbol precedes it: "=a" must not be kept.
    kept = encode_inside(text[stable_start(text, like_llama3) :], like_llama3)
    assert kept and encode_text(text, like_llama3)[-len(kept) :] == kept


@pytest.mark.parametrize("seed", range(3))
def test_exactly_the_stable_tokens_are_kept(seed: int) -> None:
    """Against enumeration, over two letters, with random merges."""
    generator = random.Random(seed)
    tokens, merges = ["a", "b"], []
    while len(tokens) < 9:
        first, second = generator.choice(tokens), generator.choice(tokens)
        if first + second not in tokens and len(first + second) < 5:
            tokens.append(first + second)
            merges.append((first, second))
    ids = {token: i for i, token in enumerate(["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *tokens])}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    bpe = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    every = ["".join(letters) for n in range(7) for letters in product("ab", repeat=n)]

    def borders(text: str) -> set[int]:
        return {end for _, end in tokenizer.encode(text).offsets} | {0}

    for text in ("".join(letters) for letters in product("ab", repeat=6)):
        ends = borders(text).intersection(*(borders(text + other) for other in every))
        assert stable_end(text, bpe) == max(ends)
        starts = [{at - len(other) for at in borders(other + text)} for other in every]
        assert stable_start(text, bpe) == min(at for at in set.intersection(*starts) if at >= 0)


@pytest.mark.parametrize("sample", [0, 3])  # prose, and a text without spaces
def test_a_long_text_is_healed_as_its_end_is(
    sample: int, any_kind: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(SAMPLES) + SAMPLES[sample][:-3]
    ends = stable_end(text, any_kind), stable_start(text[::-1], any_kind)
    monkeypatch.setattr(healing, "EXAMINED", 10**6)
    assert ends == (stable_end(text, any_kind), stable_start(text[::-1], any_kind))


def test_a_run_of_one_character_beside_a_cut_is_healed_as_the_whole_text_is(
    gpt2: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens depend on where the run begins, so more text is examined."""
    found = []
    for examined in (16, 10**6):
        monkeypatch.setattr(healing, "EXAMINED", examined)
        for run in ("-", "=", "\n", " "):
            for size in range(34, 60, 4):
                found.append(stable_end(3 * "The cat. " + "\n\n" + run * size, gpt2))
                found.append(stable_start(run * size + 3 * "The cat. ", gpt2))
    assert found[: len(found) // 2] == found[len(found) // 2 :]


def test_half_an_added_token_is_given_back(gpt2: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    gpt2.save_pretrained(tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False)])
    assert stable_end("Then  <tool", tokenizer) == 5  # the second space and "<" were one token
    assert stable_start("call> it", tokenizer) == 5
    assert ByteVocabulary.of(tokenizer).tokens[encode_text("<tool_call>", tokenizer)[0]] == b"<tool_call>"


def test_tokens_that_are_not_text_have_no_bytes(any_kind: PreTrainedTokenizerBase) -> None:
    vocabulary = ByteVocabulary.of(any_kind)
    assert all(vocabulary.tokens[i] is None for i in any_kind.all_special_ids)
    assert len(vocabulary.tokens) == 1 + max(any_kind.get_vocab().values())


def test_a_byte_and_a_character_may_be_the_same_bytes(llama: PreTrainedTokenizerBase) -> None:
    vocabulary = ByteVocabulary.of(llama)
    same = [i for i, token in enumerate(vocabulary.tokens) if token == b"a"]
    assert same == sorted(llama.convert_tokens_to_ids(["<0x61>", "a"]))
    assert vocabulary.ids[b"a"] == same[0]
    assert vocabulary.begin == b" "


def test_a_vocabulary_is_built_once_and_again_when_tokens_are_added() -> None:
    tokenizer = byte_level(LLAMA3)
    vocabulary = ByteVocabulary.of(tokenizer)
    assert ByteVocabulary.of(tokenizer) is vocabulary
    tokenizer.add_tokens(["<more>"])
    assert b"<more>" in ByteVocabulary.of(tokenizer).ids


def test_tokenizers_that_are_not_made_of_bytes_are_refused() -> None:
    unigram = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0))
    word_piece = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    word_piece.decoder = decoders.WordPiece()
    for tokenizer in (unigram, word_piece):
        with pytest.raises(ModelError, match=r"\{\{_4\}\}"):
            stable_end("a", PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    with pytest.raises(ModelError, match="slow"):
        stable_start("a", ByT5Tokenizer())


def test_half_a_character_is_refused(gpt2: PreTrainedTokenizerBase) -> None:
    with pytest.raises(InputError, match="surrogate"):
        stable_end("a\ud800", gpt2)
    with pytest.raises(InputError, match="surrogate"):
        stable_start("\ud800a", gpt2)
