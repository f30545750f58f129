"""Controls of what the shipped translator looks at: other weights look elsewhere, and a head that is off is seen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from claims import sentences, trained
from claims.table import claimed

from mlx_transformer.runtime.transformer import Transformer

pytestmark = pytest.mark.usefixtures("on_cpu")


def test_a_head_that_is_off_hands_over_nothing() -> None:
    """Its columns of W^O alone are 0; none off is the same model."""
    shipped = sentences.translator()
    whole = shipped.model.weights()
    head = ("decoder", "cross_attention", 1, 2)
    less = sentences.without(shipped.model, [head]).weights()
    name = "decoder.layers.1.cross_attention.output_proj.weight"
    width = shipped.model.config.d_k
    assert [each for each in whole if not np.array_equal(np.array(whole[each]), np.array(less[each]))] == [name]
    changed = np.argwhere((np.array(whole[name]) != np.array(less[name])).any(axis=0)).ravel()
    assert {*changed.tolist()} <= {*range(2 * width, 3 * width)}
    assert not np.array(less[name])[:, 2 * width : 3 * width].any()
    assert sentences.lost(shipped, []) == 0


EVERYWHERE, AT_IT, ELSEWHERE = "all", "it", "others"
WRITTEN = {  # where two heads are off: the article and the pronoun of too tired, of too wide
    EVERYWHERE: [("den", "es"), ("den", "es")],
    AT_IT: [("die", "es"), ("die", "es")],
    ELSEWHERE: [("die", "es"), ("den", "sie")],
}


def test_two_heads_off_at_every_row_spoil_the_article_at_it_the_pronoun() -> None:
    """Off nowhere, the model is the same; off at all rows, it is the one without them."""
    shipped = sentences.translator()
    heads = [("encoder", "self_attention", 0, 2), ("encoder", "self_attention", 1, 3)]
    for where, expected in WRITTEN.items():
        found = []
        for text in sentences.WHY.values():
            less = sentences.without_at(shipped.model, heads, sentences.rows(shipped, text, where))
            [ids] = less.generate([shipped.tokenizer.encode(text)])
            words = shipped.tokenizer.decode(ids).split()
            found.append((words[3], words[7]))
        assert found == expected, where
    text = sentences.WHY["wide"]
    assert sentences.log_p(sentences.without_at(shipped.model, heads, []), shipped, text) == sentences.log_p(
        shipped.model, shipped, text
    )
    everywhere = sentences.without_at(shipped.model, heads, sentences.rows(shipped, text, EVERYWHERE))
    gone = sentences.log_p(sentences.without(shipped.model, heads), shipped, text)
    assert sentences.log_p(everywhere, shipped, text) == pytest.approx(gone, abs=1e-4)


def test_fresh_weights_show_none_of_it() -> None:
    """Nor that a head of cross-attention is needed."""
    shipped = sentences.translator()
    fresh = replace(shipped, model=shipped.fresh)
    most = sentences.looks(fresh, sentences.WHY["wide"], "it", "street").max()
    assert not claimed(56, "too wide, most of any head: it to street").holds([most])
    crossing = sentences.parts(fresh, "decoder", "cross_attention")
    lost = max(sentences.lost(fresh, [head]) for head in crossing)
    assert not claimed(56, "the worst head of cross-attention off").holds([lost])
    assert not claimed(56, "sentences of the notes translated right").holds([sentences.right(fresh)])


def test_all_heads_of_cross_attention_off_is_seen() -> None:
    shipped = sentences.translator()
    less = sentences.without(shipped.model, sentences.parts(shipped, "decoder", "cross_attention"))
    assert isinstance(less, Transformer)
    assert sentences.right(trained.Trained(shipped.folder, less, shipped.tokenizer, shipped.sentences)) < 15
