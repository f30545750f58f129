"""Hidden words, found by an encoder."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from head_folders import published
from head_models import head_model

from mlx_transformer import Transformer
from mlx_transformer.convert import import_huggingface
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.families.encoder_text import adopted
from mlx_transformer.generation.heads import fill, ids_with_masks
from mlx_transformer.system.errors import UserError
from mlx_transformer.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.train(["the cat sat on the mat"] * 5, 290, mask=True)
SIZES = {"vocab_size": TOKENIZER.vocab_size, "d_model": 16, "heads": 2, "d_ff": 16, "max_positions": 16}
ENCODER = TransformerConfig(architecture="encoder", decoder_layers=0, **SIZES)
CAT, MAT = (TOKENIZER.encode(f"a {word}")[1] for word in ("cat", "mat"))


def filler():
    """The first <mask> is " cat" with 3/4, " mat" with 1/4; any other the other way round."""
    seen = []

    def logits(ids):
        seen.append(ids[0])
        found = np.full((1, len(ids[0]), TOKENIZER.vocab_size), -50.0)
        found[0, :, [0, 1, 2, 3, TOKENIZER.mask_id]] = 10  # never a guess
        places = [i for i, id in enumerate(ids[0]) if id == TOKENIZER.mask_id]
        for n, place in enumerate(places):
            found[0, place, [CAT, MAT]] = np.log([3, 1] if n == 0 else [1, 3])
        return found

    return partial(fill, ENCODER, TOKENIZER, logits), seen


def test_guesses_of_each_mask():
    made, seen = filler()
    [[first, second], [only]] = made(["the <mask> on the <mask>", "<mask> sat"], top_k=2)
    assert [(g.token, round(g.probability, 6)) for g in first] == [(" cat", 0.75), (" mat", 0.25)]
    assert [g.text for g in first] == ["the cat on the mat", "the mat on the mat"]
    assert [g.text for g in second] == ["the cat on the mat", "the cat on the cat"]
    assert [g.text for g in only] == [" cat sat", " mat sat"]
    # As in training: the text with one token in the place of " cat", and the end token.
    expected = TOKENIZER.encode("the cat on the mat")
    assert seen[0] == [TOKENIZER.mask_id if id in (CAT, MAT) else id for id in expected]


def test_refused():
    made, _ = filler()
    with pytest.raises(UserError, match="line 2: holds no <mask>; put it where"):
        made(["<mask>", "x"])
    with pytest.raises(UserError, match="line 1: 20 tokens, the model takes at most 16"):
        made(["<mask>" + "z" * 18])
    for top_k in (0, 10_000):
        with pytest.raises(UserError, match=rf"top_k={top_k}: give 1 to"):
            made(["<mask>"], top_k)
    decoder = TransformerConfig(architecture="decoder", encoder_layers=0, tie_embeddings="none", **SIZES)
    with pytest.raises(UserError, match=r"here: fill needs an encoder; architecture='decoder' is for generate"):
        fill(decoder, TOKENIZER, np.array, ["<mask>"], where="here")
    plain = Tokenizer.train([], 260)
    with pytest.raises(UserError, match="here: its vocabulary has no <mask>"):
        fill(ENCODER, plain, np.array, ["<mask>"], where="here")
    with pytest.raises(UserError, match="logits are not finite"):
        fill(ENCODER, TOKENIZER, lambda ids: np.full((1, 16, TOKENIZER.vocab_size), np.nan), ["<mask>"])


def test_a_published_encoders_text_begins_once(tmp_path):
    """[CLS] stands before the text, and not behind each mask too."""
    tokenizer = Tokenizer.load(head_model("bert-words", tmp_path) / "tokenizer.json")
    assert ids_with_masks(tokenizer, "a <mask> film <mask> .") == [2, 5, 4, 7, 4, 18, 3]


@pytest.mark.parametrize("takes_space", [False, True])
def test_a_space_before_a_mask_is_what_the_vocabulary_says(takes_space, tmp_path):
    """As the library itself reads a published file."""
    theirs = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    theirs.train_from_iterator([], tokenizers.trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet))
    theirs.add_special_tokens([tokenizers.AddedToken("<mask>", lstrip=takes_space)])
    theirs.post_processor = tokenizers.processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    theirs.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(adopted(tmp_path, {}))
    for line in ("a <mask> b", "<mask>", "a<mask>b <mask>"):
        assert ids_with_masks(tokenizer, line) == theirs.encode(line).ids


@pytest.mark.parametrize("name", ["bert-untied", "roberta-words", "distilbert-untied", "modernbert-words"])
def test_guesses_of_a_published_encoder_are_its_words(name: str, tmp_path: Path) -> None:
    """All but its special tokens, wherever their ids are, by either spelling of what is hidden; and none of the rows
    that its table has beyond its vocabulary."""
    folder = published(name, tmp_path / "theirs")
    spare = folder / "vocab.txt"
    if spare.is_file():
        spare.write_text("".join(spare.read_text().splitlines(keepends=True)[:-3]))
    import_huggingface(folder, tmp_path / "model")
    model = Transformer.load(tmp_path / "model")
    tokenizer = model.tokenizer
    assert tokenizer is not None
    special = {tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id, tokenizer.mask_id}
    words = {tokenizer.decode([id]) for id in range(tokenizer.vocab_size) if id not in special}
    [found] = model.fill("a [MASK] film", top_k=len(words))
    assert {guess.token for guess in found} == words
    assert sum(guess.probability for guess in found) == pytest.approx(1)
    assert model.fill("a <mask> film", top_k=len(words)) == [found]
    with pytest.raises(UserError, match=f"give 1 to {len(words)}"):
        model.fill("a [MASK] film", top_k=len(words) + 1)
