"""Decoding with a cache gives what decoding without one gives, however rows are repeated, reordered and dropped."""

import mlx.core as mx
import numpy as np
import pytest
from combined import combined
from options import OPTIONS

from mlx_transformer import Transformer
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.nn import cache as cache_module
from mlx_transformer.nn.cache import Cache, LayerCache, check_cache, group_of, room_for
from mlx_transformer.system.errors import UserError

pytestmark = pytest.mark.gpu_path

TOLERANCE = dict(rtol=0, atol=2e-5)


def model_of(**changes) -> Transformer:
    mx.random.seed(0)
    values = dict(vocab_size=31, d_model=16, heads=4, key_value_heads=2, d_ff=24, encoder_layers=1, decoder_layers=2)
    return Transformer(TransformerConfig(**{**values, **changes})).eval()


def decoder_only(**changes) -> Transformer:
    return model_of(architecture="decoder", encoder_layers=0, tie_embeddings="target-output", **changes)


def random_ids(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(3, 31, shape)


@pytest.mark.parametrize(("positions", "placement"), combined(OPTIONS["positions"], ["post", "pre"]))
def test_steps_of_any_length_equal_the_full_pass(positions: str, placement: str) -> None:
    model = model_of(positions=positions, norm_placement=placement)
    source, target = random_ids(3, 6), random_ids(3, 12)
    mask = np.arange(6) >= np.array([[0], [2], [0]])
    mask[2, 4:] = False
    memory = model.encode(source, mask)
    full = np.array(model.decode(target, memory, mask))
    np.testing.assert_array_equal(full, np.array(model(source, target, mask)))
    for lengths in ([1] * 12, [12], [5, 1, 1, 4, 1]):
        cache, parts, start = model.start(memory, mask), [], 0
        for length in lengths:
            parts.append(model.step(target[:, start : start + length], cache))
            start += length
        assert cache.offset == 12
        np.testing.assert_allclose(np.array(mx.concatenate(parts, axis=1)), full, **TOLERANCE)


def test_growth_across_chunk_borders() -> None:
    assert [room_for(n) for n in (1, 32, 33, 64, 129, 256, 257, 512, 513)] == [32, 32, 64, 64, 256, 256, 512, 512, 768]
    model = decoder_only(decoder_layers=1)
    ids = random_ids(2, 530)
    full = np.array(model(ids))
    cache, parts = model.start(), []
    for a, b in ((0, 31), (31, 32), (32, 33), (33, 255), (255, 256), (256, 257), (257, 511), (511, 513), (513, 530)):
        parts.append(model.step(ids[:, a:b], cache))
        mx.eval(parts[-1])
        assert cache.layers[0].buffers[0].shape[2] == room_for(b)
    np.testing.assert_allclose(np.array(mx.concatenate(parts, axis=1)), full, **TOLERANCE)


@pytest.mark.fast("3.0")
@pytest.mark.parametrize("cap", [None, 3.0])
def test_layers_with_windows_hold_no_more_than_their_window(cap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The window is 5: at most 4 + 2 chunks of 4 positions and a part of a prompt, however long a text is."""
    monkeypatch.setattr(cache_module, "CHUNK", 4)
    monkeypatch.setattr(cache_module, "SMALLEST", 4)
    model = decoder_only(positions="rotary", score_cap=cap, layer_pattern=[{"window": 5}, {}])
    ids = random_ids(2, 60)
    full = np.array(model(ids))

    def step(cache: Cache, at: list[int], length: int = 1) -> None:
        """A step of rows at these positions; the logits are those of the full pass."""
        new = np.stack([ids[row % 2, i : i + length] for row, i in enumerate(at)])
        for row, (i, logits) in enumerate(zip(at, np.array(model.step(new, cache)), strict=True)):
            np.testing.assert_allclose(logits, full[row % 2, i : i + length], **TOLERANCE)
        assert cache.layers[0].used <= 4 + 2 * 4 + length

    caches = [model.start(), model.start()]
    for cache, row, end in ((caches[0], 0, 41), (caches[1], 1, 7)):
        for at in range(0, end, 6):
            np.testing.assert_allclose(
                np.array(model.step(ids[[row], at : min(at + 6, end)], cache)),
                full[[row], at : min(at + 6, end)],
                **TOLERANCE,
            )
    whole, windowed = caches[0].layers[1], caches[0].layers[0]
    assert (whole.used, windowed.used + windowed.dropped) == (41, 41)
    assert windowed.used < 20
    assert caches[0].part(0, 30, 41) is None
    early, late = caches[1].part(0, 3, 7), caches[0].part(0, 38, 41)
    assert early is not None
    assert late is not None
    step(late, [38], 3)
    caches[0].join(caches[1])
    for _ in range(2):
        step(caches[0], [caches[0].offset, caches[0].offset - 34], 2)
        caches[0].take_back(1)
    for _ in range(9):
        step(caches[0], [caches[0].offset, caches[0].offset - 34])
    caches[0].reorder(mx.array([0, 0]))
    caches[0].reorder(mx.array([1, 0]))
    caches[0].keep(mx.array([0]))
    caches[0].shrink([caches[0].offset])
    step(caches[0], [caches[0].offset], 3)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("cap", [None, 3.0])
def test_integers_are_read_as_the_numbers_they_stand_for(
    bits: int, cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits are those of floats rounded to the same integers, over prompts, windows and whatever rows do."""
    monkeypatch.setattr(cache_module, "CHUNK", 4)
    monkeypatch.setattr(cache_module, "SMALLEST", 4)
    layers = [{"window": 5}, {"d_k": 64, "d_v": 32, "key_value_heads": 1}]
    model = decoder_only(positions="rotary", score_cap=cap, layer_pattern=layers, d_k=32, d_v=96)
    check_cache(model.config, bits, "model")
    ids, caches = random_ids(3, 60), []
    for of in (bits, None):
        model.cache_bits = of
        caches.append([model.start(prompt_mask=np.arange(9) >= np.array([[0], [3]])), model.start()])

    class Rounded(LayerCache):
        def _stored(self, x: mx.array) -> list[mx.array]:
            group = group_of(x.shape[-1])
            return [mx.dequantize(*mx.quantize(x, group_size=group, bits=bits), group_size=group, bits=bits)]

    for cache in caches[1]:
        cache.layers = [Rounded(layer.window) for layer in cache.layers]
    found = []
    for several, alone in caches:
        logits = [model.step(ids[:2, :9], several), model.step(ids[2:, :30], alone)]
        several.join(alone)
        logits += [model.step(ids[:, 30:33], several)]
        several.take_back(2)
        several.reorder(mx.array([1, 0, 2]))
        logits += [model.step(ids[:, 31 + i : 32 + i], several) for i in range(12)]
        part = several.part(2, 40, several.offset)
        assert part is None or part.layers[0].bits == several.layers[0].bits
        found.append([np.array(each) for each in logits])
        used = [sum(x.nbytes for x in layer.arrays()) / layer.used for layer in several.layers]
    for ours, rounded in zip(*found, strict=True):
        np.testing.assert_allclose(ours, rounded, **TOLERANCE)
    floats = np.array(model(ids[2:, :30]))
    error = np.abs(found[0][1] - floats).max() / np.abs(floats).max()
    assert 1e-5 < error < {8: 0.02, 4: 0.4}[bits], "rounded, and not by more than so many bits do"
    kept = [sum(x.nbytes for x in layer.arrays()) / layer.used for layer in caches[0][0].layers]
    assert max(a / b for a, b in zip(kept, used, strict=True)) < (bits + 3) / 32, "of float32"


def test_heads_that_integers_can_not_hold() -> None:
    with pytest.raises(UserError, match="cache_bits=5: choose 4 or 8"):
        decoder_only().use_cache_bits(5)
    with pytest.raises(UserError, match="its heads are 4 wide"):
        check_cache(decoder_only().config, 8, "model")


def test_a_step_writes_in_place() -> None:
    """The buffers stay where they are in memory, step after step: nothing is copied but the new positions."""
    model, source = model_of(), random_ids(2, 5)
    cache = model.start(model.encode(source))

    def buffers() -> list[np.ndarray]:
        return [np.asarray(array) for layer in cache.layers for array in layer.buffers]

    def addresses() -> list[int]:
        return [buffer.ctypes.data for buffer in buffers()]

    mx.eval(model.step([[1], [1]], cache), cache.arrays())
    before = addresses()
    for _ in range(31):
        mx.eval(model.step([[5], [6]], cache), cache.arrays())
        assert addresses() == before
    old = buffers()  # alive, or a new one could get an old one's place
    mx.eval(model.step([[5, 5], [6, 6]], cache), cache.arrays())  # past the first 32
    assert not set(addresses()) & {buffer.ctypes.data for buffer in old}


@pytest.mark.parametrize("positions", OPTIONS["positions"])
def test_left_padded_prompts(positions: str) -> None:
    """Prefill and steps of a ragged batch equal each prompt decoded alone, without padding and without a cache."""
    model = decoder_only(positions=positions, max_positions=32)
    prompts, extra = [random_ids(n) for n in (5, 2, 7)], random_ids(3, 4)
    padded, mask = np.zeros((3, 7), dtype=int), np.zeros((3, 7), dtype=bool)
    for i, prompt in enumerate(prompts):
        padded[i, 7 - len(prompt) :], mask[i, 7 - len(prompt) :] = prompt, True
    for given_mask in (mask, mx.array(mask)):
        cache = model.start(prompt_mask=given_mask)
        last = model.step(padded, cache, last=True)
        assert last.shape == (3, 1, 31)
        parts = [
            last,
            model.step(extra[:, :1], cache),
            model.step(extra[:, 1:3], cache),
            model.step(extra[:, 3:], cache),
        ]
        stepped = np.array(mx.concatenate(parts, axis=1))
        for i, prompt in enumerate(prompts):
            unbatched = np.array(model([[*prompt, *extra[i]]]))[0, len(prompt) - 1 :]
            np.testing.assert_allclose(stepped[i], unbatched, **TOLERANCE)
    full = decoder_only(positions=positions, max_positions=32)(padded, mask)
    np.testing.assert_allclose(np.array(full[:, -1:]), np.array(last), **TOLERANCE)


def test_prompts_padded_elsewhere_are_refused() -> None:
    for mask in ([[True, False]], [[False, False]], [[True, False, True]]):
        with pytest.raises(UserError, match="padded on the left"):
            decoder_only().start(prompt_mask=mask)


@pytest.mark.parametrize("positions", ["sinusoidal", "rotary"])
def test_beams_share_a_sentence(positions: str) -> None:
    """Repeat, reorder within sentences, drop a sentence: each hypothesis' logits are those of its own full pass."""
    model = model_of(positions=positions)
    source, beams = random_ids(3, 6), 4
    mask = np.arange(6) < np.array([[6], [3], [5]])
    memory = model.encode(source, mask)
    rng = np.random.default_rng(0)
    cache = model.start(memory, mask)
    hypotheses, sentences = np.ones((3, 1), dtype=int), np.arange(3)
    model.step(hypotheses, cache)
    cache.repeat(beams)
    hypotheses, sentences = np.repeat(hypotheses, beams, axis=0), np.repeat(sentences, beams)
    for step in range(40):  # past a border of the cache's buckets
        rows = np.arange(len(hypotheses)) // beams * beams + rng.integers(0, beams, len(hypotheses))
        cache.reorder(mx.array(rows))
        hypotheses = hypotheses[rows]
        if step == 5:
            rows = np.flatnonzero(sentences != 1)  # sentence 1 is finished
            cache.keep(mx.array(rows))
            hypotheses, sentences = hypotheses[rows], sentences[rows]
        new = rng.integers(3, 31, (len(hypotheses), 1))
        hypotheses = np.concatenate([hypotheses, new], axis=1)
        logits = model.step(new, cache)
        assert cache.cross[0][0].shape[0] == len(hypotheses) // beams  # never repeated
        if step % 13 == 0 or step == 6:
            sentence = mx.array(sentences)
            unbatched = model.decode(hypotheses, memory[sentence], mask[sentences])[:, -1:]
            np.testing.assert_allclose(np.array(logits), np.array(unbatched), **TOLERANCE)
    assert cache.layers[0].buffers[0].shape[2] <= 64


def test_beams_after_a_left_padded_prompt() -> None:
    model = decoder_only()
    ids, mask = random_ids(2, 5), np.array([[True] * 5, [False, False, True, True, True]])
    cache = model.start(prompt_mask=mask)
    model.step(ids, cache)
    cache.repeat(3)
    new = random_ids(6, 1)
    logits = np.array(model.step(new, cache))
    cache.keep(mx.array([3, 4, 5]))
    after = np.array(model.step(new[3:], cache))
    for row in range(6):
        prompt = ids[row // 3][mask[row // 3]]
        unbatched = np.array(model([[*prompt, *new[row], *new[row]]]))[0]
        np.testing.assert_allclose(logits[row, 0], unbatched[-2], **TOLERANCE)
        if row >= 3:
            np.testing.assert_allclose(after[row - 3, 0], unbatched[-1], **TOLERANCE)
