"""Text that goes on from a prompt."""

import pytest

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.generation.stream import until
from mlx_transformer.generation.verbs import TextVerbs
from mlx_transformer.system.errors import UserError
from mlx_transformer.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.train([], 260)
SIZES = {"vocab_size": 260, "d_model": 16, "heads": 2, "d_ff": 16}
DECODER = TransformerConfig(architecture="decoder", encoder_layers=0, tie_embeddings="none", **SIZES)


class Same(TextVerbs):
    """A model that has the same to say to everybody."""

    def __init__(self, config=DECODER, tokenizer=TOKENIZER, text="and so on. The end"):
        self.config, self.own, self.where = config, tokenizer, "here"
        self.new, self.asked = TOKENIZER.encode(text)[:-1], []

    @property
    def tokenizer(self):
        return self.own

    def generate(self, ids, **options):
        self.asked.append((ids, options))
        return [self.new] * len(ids)

    def stream_ids(self, ids, **options):
        return iter(self.new)


def test_prompts_begin_with_the_start_token_and_do_not_end():
    made = Same()
    assert made.complete(["a", ""], beam=2) == ["and so on. The end"] * 2
    assert made.asked == [([[1, *TOKENIZER.encode("a")[:-1]], [1]], {"beam": 2})]


@pytest.mark.parametrize("stop", [(), (".",), ("end", ". T"), ("and",), ("nowhere", "o"), ("d",), ("The end!",)])
def test_stop_words_end_the_text_also_of_a_stream(stop):
    made = Same()
    text = "and so on. The end"
    ends = [text.index(word) for word in stop if word in text]
    assert made.complete(["x"], stop=stop) == [text[: min(ends, default=None) if ends else None]]
    assert "".join(made.stream("x", stop=stop)) == made.complete(["x"], stop=stop)[0]


def test_what_may_become_a_stop_word_is_held_back():
    assert list(until(["a", "b", "ab", "c"], ["abc"])) == ["", "", "ab"]
    assert list(until(["x\n", "\n", "y"], ["\n\n"])) == ["x"]
    assert list(until(["a", "", "b"], ["abc"])) == ["", "", "", "ab"]
    assert list(until(["a", "", "b"], [])) == ["a", "", "b"]


def test_refused():
    made = Same()
    for stop, why in {
        "word": "give a list of words",
        (3,): "give a list of words",
        ("",): "an empty word ends",
    }.items():
        with pytest.raises(UserError, match=f"^stop(='')?: {why}"):
            made.complete(["x"], stop=stop)
    with pytest.raises(UserError, match="n_best=2"):
        made.complete(["x"], n_best=2)
    with pytest.raises(UserError, match="expected text, or a list of lines, not int"):
        made.complete(3)
    with pytest.raises(
        UserError, match=r"here: generate needs a decoder; architecture='encoder-decoder' is for transl"
    ):
        Same(TransformerConfig(**SIZES)).complete(["x"])
    with pytest.raises(UserError, match=r"here: has no tokenizer\.json"):
        Same(tokenizer=None).complete(["x"])
