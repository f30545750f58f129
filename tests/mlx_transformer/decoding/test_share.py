"""What a server needs of a search: inputs of several lists at once, and an end as soon as nobody waits for it."""

from __future__ import annotations

import numpy as np
import pytest
from toy_model import Toy

from mlx_transformer.decoding.search import SharedSearch, generate, search
from mlx_transformer.decoding.steps import Stopped

ROWS = [[3, 2], [4, 5, 2], [3, 2], [6, 2], [3, 4, 5, 2]]


@pytest.mark.parametrize("batch_tokens", [8192, 30])
def test_drawn_tokens_depend_on_the_place_that_is_given(batch_tokens):
    toy = Toy(vocab_size=20, spread=0.5, eos_bias=-2.0)
    settings = {"sample": True, "seed": 1, "max_new_tokens": 20, "batch_tokens": batch_tokens}
    whole = generate(toy, ROWS, **settings)
    order = [3, 0, 4, 1, 2]
    assert generate(toy, [ROWS[i] for i in order], share=SharedSearch(row_numbers=order), **settings) == [
        whole[i] for i in order
    ]
    assert generate(toy, ROWS[2:3], share=SharedSearch(row_numbers=[0]), **settings) == whole[:1]
    assert whole[0] != whole[2], "the same text in another place"
    two = generate(toy, [ROWS[0]] * 2, share=SharedSearch(row_numbers=[7, 7]), **settings)
    assert two[0] == two[1]


@pytest.mark.parametrize("beam", [1, 3])
def test_a_search_ends_once_it_is_stopped(beam):
    toy = Toy(vocab_size=20, spread=0.5, eos_bias=-99.0)
    wanted = 5
    with pytest.raises(Stopped):
        search(toy, ROWS, beam=beam, max_new_tokens=50, share=SharedSearch(stopped=lambda: toy.steps >= wanted))
    assert toy.steps == wanted
    toy.batches.clear()
    with pytest.raises(Stopped):
        generate(toy, ROWS, beam=beam, share=SharedSearch(stopped=lambda: True))
    assert toy.batches == [], "nothing was begun"
    assert len(np.unique([len(ids) for ids in generate(toy, ROWS, beam=beam, max_new_tokens=50)])) == 1
