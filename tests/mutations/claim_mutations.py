"""Bugs that the rows of docs/claims must see: a mechanism taken out, and the row whose tests have to fail."""

from dataclasses import dataclass

NN, CORE, DECODING, CLAIMS, GUIDE = (
    "mlx_transformer/nn/",
    "mlx_transformer/core/",
    "mlx_transformer/decoding/",
    "docs/claims/",
    "docs/guide/",
)


@dataclass(frozen=True)
class Change:
    """`old` becomes `new`, where it stands first in the file; `tests`, or those of `row`, have to fail."""

    row: int
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = ()


LAYERS, ATTENTION, TABLES = NN + "layers.py", NN + "attention.py", CORE + "positions.py"
POSITIONS, FORWARD, NORMS, MASKS = NN + "positions.py", NN + "feedforward.py", NN + "norms.py", NN + "masks.py"
MODEL, CACHE, GREEDY, PARAMETERS = NN + "model.py", NN + "cache.py", DECODING + "greedy.py", CORE + "parameters.py"

ADDS = "x = x + self.dropout(y)"
SINUSOIDS = "angle = position * 10000.0**exponent"
FUSED = "return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)"
SOFTMAX = "return mx.softmax(scores, axis=-1, precise=True)"
SCALE = "scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale\n    scores"
SUM = "return x + table[position_ids.index].astype(x.dtype)"
EMBEDS = 'x = self[name.removesuffix(".weight")](ids)'
NORMED = 'return mx.fast.layer_norm(x, self.weight, self.get("bias"), self.epsilon)'
INNER = "inner = self.activation(self.up_proj(x))  # (B, L, F)\n"

SOFTMAX_TERM = 'its share.", "e^s / Σ e^s", "attention"]'

CHANGES: dict[str, Change] = {
    # Embeddings and positions.
    "the embedding is of the next word": Change(1, MODEL, EMBEDS, EMBEDS.replace("ids)", "(ids + 1) % 24)")),
    "the embedding is rounded to half": Change(1, MODEL, EMBEDS, EMBEDS + ".astype(mx.float16).astype(mx.float32)"),
    "a base of 9999": Change(2, TABLES, SINUSOIDS, SINUSOIDS.replace("10000.0", "9999.0")),
    "sines and cosines exchanged": Change(
        2,
        TABLES,
        "np.stack([np.sin(angle), np.cos(angle)], axis=2)",
        "np.stack([np.cos(angle), np.sin(angle)], axis=2)",
    ),
    "positions count from 1": Change(
        2, TABLES, "np.arange(first, first + length,", "np.arange(first + 1, first + 1 + length,"
    ),
    "the paper's frequencies in tensor2tensor's layout": Change(
        3, TABLES, "-half / (d_model // 2 - 1) if", "-2 * half / d_model if"
    ),
    "a learned table without an end": Change(4, POSITIONS, "if position_ids.limit > table.shape[0]:", "if False:"),
    "a learned table that is not read": Change(4, POSITIONS, SUM, SUM.replace("table[", "0 * table[")),
    "appended positions that do not grow": Change(
        5,
        CLAIMS + "rejected.py",
        "np.arange(first, first + len(x), dtype=np.float64)[:, None]",
        "np.full((len(x), 1), first, dtype=np.float64)",
    ),
    "positions scaled by a length of all sentences": Change(
        6, CLAIMS + "rejected.py", "np.arange(n) / max(n - 1, 1)", "np.arange(n) / 512"
    ),
    "a cosine for the one sine": Change(
        7,
        CLAIMS + "rejected.py",
        "return np.sin(np.asarray(positions, dtype=np.float64))[..., None]",
        "return np.cos(np.asarray(positions, dtype=np.float64))[..., None]",
    ),
    "another frequency of the one pair": Change(
        8,
        CLAIMS + "positions.py",
        "angle = np.asarray(positions, dtype=np.float64)[..., None] *",
        "angle = 1.001 * np.asarray(positions, dtype=np.float64)[..., None] *",
    ),
    "distances of a wrong base": Change(
        9,
        CLAIMS + "positions.py",
        "2 - 2 * np.cos(offset * frequencies(d_model))",
        "2 - 2 * np.cos(offset * frequencies(d_model, 100.0))",
    ),
    "positions that depend on their neighbours": Change(
        10, TABLES, SINUSOIDS, SINUSOIDS + "\n    angle = angle + 0.01 * position**1.5"
    ),
    "the rotation of one step more": Change(
        11,
        CLAIMS + "positions.py",
        "enumerate(offset * frequencies(d_model))",
        "enumerate((offset + 1) * frequencies(d_model))",
    ),
    "a rotation the other way": Change(
        11, CLAIMS + "positions.py", "[[cosine, sine], [-sine, cosine]]", "[[cosine, -sine], [sine, cosine]]"
    ),
    "frequencies that rise": Change(12, TABLES, "-2 * half / d_model", "-2 * (d_model // 2 - 1 - half) / d_model"),
    "tables that are made for their length": Change(
        13, POSITIONS, "return _sinusoids(_chunks(length), config", "return _sinusoids(length, config"
    ),
    "positions subtracted": Change(14, POSITIONS, SUM, SUM.replace("x + table", "x - table")),
    "embeddings without their scale": Change(14, MODEL, "return x * self.config.embedding_factor if", "return x if"),
    # Attention.
    "scores divided by d_k": Change(
        15,
        ATTENTION,
        "scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale\n    return",
        "scale = 1 / q.shape[-1] if scale is None else scale\n    return",
    ),
    "a softmax over the queries": Change(15, ATTENTION, SOFTMAX, SOFTMAX.replace("axis=-1", "axis=-2")),
    "scores of the wrong sign": Change(
        16, ATTENTION, "matmul_shared_heads(q * scale,", "matmul_shared_heads(q * -scale,"
    ),
    "scores that are not symmetric": Change(
        16, ATTENTION, "matmul_shared_heads(q * scale,", "matmul_shared_heads(mx.roll(q, 1, axis=-1) * scale,"
    ),
    "a parameter in attention itself": Change(
        17,
        ATTENTION,
        "self.key_value_heads = config.key_value_heads\n",
        "self.key_value_heads = config.key_value_heads\n        self.temperature = mx.ones((1,))\n",
    ),
    "scores divided by the fourth root": Change(
        18, ATTENTION, SCALE, SCALE.replace("math.sqrt(q.shape[-1])", "q.shape[-1] ** 0.25")
    ),
    "scores that know their place": Change(
        19,
        ATTENTION,
        "q = self.queries(x, rotation, rows)  ",
        "q = self.queries(x, rotation, rows) * (1 + mx.arange(x.shape[1])[:, None])  ",
    ),
    "heads that read each other's features": Change(
        20,
        ATTENTION,
        "return x.reshape(rows or b, -1, heads, width // heads).swapaxes(1, 2)",
        "return x.reshape(rows or b, -1, width // heads, heads).transpose(0, 3, 1, 2)",
    ),
    "the output projection left out": Change(
        20,
        ATTENTION,
        "return self.output_proj(self.merge(y, None if rows is None else x))",
        "return self.merge(y, None if rows is None else x)",
    ),
    "the causal mask one place off": Change(21, MASKS, "<= query\n", "<= query + 1\n"),
    "a mask of a large number, not of infinity": Change(21, MASKS, "mx.array(-mx.inf, dtype)", "mx.array(-5, dtype)"),
    "padding that is seen": Change(
        21, MASKS, "return tokens[:, None, None, :]", "return mx.ones_like(tokens)[:, None, None, :]"
    ),
    # Residual connections, norms, feed-forward nets.
    "the residual deleted": Change(22, LAYERS, ADDS, "x = self.dropout(y)"),
    "the residual of feed-forward nets halved": Change(
        22, LAYERS, ADDS, 'x = (0.5 if name == "feed_forward" else 1) * x + self.dropout(y)'
    ),
    "the residual around cross-attention deleted": Change(
        22, LAYERS, ADDS, 'x = (0 if name == "cross_attention" else x) + self.dropout(y)'
    ),
    "the norm in front, in a post-norm layer": Change(
        22, LAYERS, 'self.pre_norm = config.norm_placement in ("pre", "sandwich")', "self.pre_norm = True"
    ),
    "layer norm without the mean": Change(
        23, NORMS, NORMED, "return mx.fast.rms_norm(x, self.weight, self.epsilon) + self.bias"
    ),
    "layer norm with 1 / (d - 1)": Change(23, NORMS, NORMED, NORMED + " * (1 - 1 / x.shape[-1]) ** 0.5"),
    "layer norm over the batch": Change(
        24, NORMS, NORMED, "return (x - mx.mean(x, axis=(0, 1))) / mx.sqrt(mx.var(x, axis=(0, 1)) + self.epsilon)"
    ),
    "ReLU an identity": Change(25, FORWARD, "return mx.maximum(x, 0)", "return x"),
    "ReLU the absolute value": Change(25, FORWARD, "return mx.maximum(x, 0)", "return mx.abs(x)"),
    "feed-forward nets that look at the word before": Change(
        25, FORWARD, INNER, INNER + "        inner = inner + mx.roll(inner, 1, axis=1)\n"
    ),
    "layer norm's epsilon of 1": Change(40, NORMS, "self.epsilon = epsilon\n", "self.epsilon = 1.0\n"),
    "layer norm without its shift": Change(40, NORMS, NORMED, NORMED.replace("self.get", "0 * self.get")),
    # Stacks, the classifier, decoding.
    "cross-attention silent": Change(
        26, LAYERS, 'tap("cross_attention", y)\n        return y', 'tap("cross_attention", y)\n        return 0 * y'
    ),
    "padding that takes a position": Change(
        26, MASKS, "return tokens[:, None, None, :]", "return (tokens | True)[:, None, None, :]"
    ),
    "the classifier another table": Change(
        27,
        NN + "classifier.py",
        "cast(nn.Embedding, self.layer).as_linear(x)",
        "cast(nn.Embedding, self.layer).as_linear(mx.roll(x, 1, axis=-1))",
    ),
    "the least likely word": Change(
        28, GREEDY, "token = xp.argmax(allowed, axis=1)", "token = xp.argmax(-allowed, axis=1)"
    ),
    "a cache one place off": Change(28, MODEL, "cache.offset += length", "cache.offset += length + 1"),
    "a cache that forgets its first key": Change(
        28,
        CACHE,
        "buffer[:, :, start:end, :] = x\n",
        "buffer[:, :, start:end, :] = x\n            buffer[:, :, 0] = 0\n",
    ),
    # Costs, recurrent nets, the rest.
    "weights of half precision": Change(29, ATTENTION, SOFTMAX, SOFTMAX + ".astype(mx.float16)"),
    "products that are not counted twice": Change(
        39, CLAIMS + "cost.py", "weights.size * (q.shape[-1] + v.shape[-1])", "weights.size * q.shape[-1]"
    ),
    "heads of one width, however many": Change(
        20, CLAIMS + "cost.py", "weights.size * (q.shape[-1] + v.shape[-1])", "weights.size * 2 * 64"
    ),
    "a hard look-up that is an average": Change(
        32, ATTENTION, FUSED, "return mx.broadcast_to(mx.mean(v, axis=-2, keepdims=True), (*q.shape[:-1], v.shape[-1]))"
    ),
    "a recurrent net that forgets nothing": Change(
        33, CLAIMS + "recurrent.py", "    return nn.RNN(WIDTH, WIDTH)\n", "    return lambda x: mx.cumsum(x, axis=1)\n"
    ),
    "self-attention that sees its own place alone": Change(
        34,
        LAYERS,
        "y = self.self_attention.attend(x, k, v, mask, rotation)\n",
        "y = self.self_attention.attend(x, k, v, mx.eye(x.shape[1]) > 0, rotation)\n",
    ),
    "an encoder that looks at one word": Change(
        35, LAYERS, 'tap("self_attention", y)\n        return y', 'tap("self_attention", y)\n        return 0 * y'
    ),
    "gradients of raw positions that stay": Change(
        38,
        CLAIMS + "rejected.py",
        "np.arange(first, first + len(x), dtype=np.float64)[:, None]",
        "np.full((len(x), 1), first, dtype=np.float64)",
    ),
    "a layer of double width": Change(39, CLAIMS + "cost.py", "d_ff=4 * d_model)", "d_ff=2 * d_model)"),
    "a sum of the wrong CAT": Change(43, CLAIMS + "worked.py", "5: (1281.458,", "4: (1281.458,"),
    "a sum in float32": Change(
        43, CLAIMS + "worked.py", "def sums(dtype: mx.Dtype = mx.float64)", "def sums(dtype: mx.Dtype = mx.float32)"
    ),
    "orders without positions": Change(44, POSITIONS, SUM, "return x"),
    "an RNN that averages": Change(
        46, CLAIMS + "recurrent.py", "        y = layer(x)\n", "        y = x + mx.mean(x, axis=1, keepdims=True)\n"
    ),
    "rotary positions that turn queries alone": Change(
        47, ATTENTION, 'return self.turned("key_norm", k, rotation), v', "return k, v"
    ),
    "relative numbers by the place, not the distance": Change(
        47,
        POSITIONS,
        "rows, array = table[distances + table.shape[0] // 2]",
        "rows, array = table[distances * 0 + mx.arange(keys) + table.shape[0] // 2]",
    ),
    "U never larger": Change(
        48, CLAIMS + "recurrent.py", "layer.Whh = factor * layer.Whh", "layer.Whh = min(factor, 1) * layer.Whh"
    ),
    "Thinking Machines without the division by 8": Change(
        50, ATTENTION, SCALE, SCALE.replace("1 / math.sqrt(q.shape[-1])", "1.0")
    ),
    "tensor2tensor's frequencies, one too many": Change(
        51, TABLES, "-half / (d_model // 2 - 1)", "-half / (d_model // 2)"
    ),
    "tensor2tensor's first position 1": Change(
        51, TABLES, "np.arange(first, first + length,", "np.arange(first + 1, first + 1 + length,"
    ),
    "cross-attention that reads its queries": Change(
        52,
        LAYERS,
        "k, v = cross\n",
        "k, v = self.cross_attention.keys_values(x)\n",
    ),
    "self-attention with a bias of its own": Change(
        52,
        LAYERS,
        "y = self.self_attention.attend(x, k, v, mask, rotation, cast(LayerCache | None, past))",
        "y = self.self_attention.attend(x, k, v, mask, rotation, cast(LayerCache | None, past)) + 1e-3",
    ),
    "a recurrent cell in the network": Change(
        55, PARAMETERS, "_ssru if cross and c.recurrent else", "_ssru if cross else"
    ),
    "heads that stay on": Change(56, CLAIMS + "sentences.py", "head * width : (head + 1) * width] = 0", "0:0] = 0"),
    # What figures say.
    "encoder and decoder exchanged in the figure of heads that are off": Change(
        56,
        CLAIMS + "sentences.py",
        '"encoder": ("encoder", "self_attention"),\n    "decoder": ("decoder", "self_attention"),',
        '"encoder": ("decoder", "self_attention"),\n    "decoder": ("encoder", "self_attention"),',
    ),
    "the table before its one-hot rows": Change(
        1,
        CLAIMS + "embedding.py",
        '"one-hot rows": rows, "x the table W": table',
        '"x the table W": rows, "one-hot rows": table',
    ),
    "heads counted from the right": Change(20, CLAIMS + "attention.py", 'f"head {h + 1}"', 'f"head {8 - h}"'),
    "keys and queries exchanged in the figure of boxes": Change(
        15,
        CLAIMS + "attention.py",
        '"Q = X W_Q": q,\n        "K = X W_K": k,',
        '"K = X W_K": q,\n        "Q = X W_Q": k,',
    ),
    "an arrow from the first encoder layer to the decoder": Change(
        26, CLAIMS + "stacks.py", "memory = below\n", "memory = list(boxes)[4]\n"
    ),
    "positions of the bars exchanged": Change(
        27, CLAIMS + "stacks.py", '{f"position {n}": row for n, row', '{f"position {2 - n}": row for n, row'
    ),
    "this machine's time under the server's name": Change(
        31, CLAIMS + "cost.py", '("this machine, now", f"{here:.2f}")', '(next(iter(MACHINES)), f"{here:.2f}")'
    ),
    "steps that have read what they write": Change(
        28, CLAIMS + "stacks.py", 'f"has read {id}" for id in chosen[:-1]', 'f"has read {id}" for id in chosen[1:]'
    ),
    "two titles of the heat maps exchanged": Change(
        2,
        CLAIMS + "positions.py",
        '{"sinusoidal": "pairs side by side (paper)", "sinusoidal_concat": "halves (tensor2tensor)"}',
        '{"sinusoidal": "halves (tensor2tensor)", "sinusoidal_concat": "pairs side by side (paper)"}',
    ),
    "two curves of the residuals exchanged": Change(
        22,
        CLAIMS + "residual.py",
        "curves(apart, DEPTHS, told_apart(), (0.42, 0.1))",
        "curves(apart, DEPTHS, dict(zip(told_apart(), reversed(told_apart().values()), strict=True)), (0.42, 0.1))",
    ),
    "a sum and its norm exchanged in the strips of residuals": Change(
        22,
        CLAIMS + "residual.py",
        '"X + Z": x + z, "its norm": norm(x + z)}',
        '"X + Z": norm(x + z), "its norm": x + z}',
    ),
    "recurrent and attention exchanged in their figure": Change(
        33,
        CLAIMS + "recurrent.py",
        '{"self-attention": kept, "recurrent": forgotten}',
        '{"self-attention": forgotten, "recurrent": kept}',
    ),
    "bytes and activations exchanged in their figure": Change(
        29,
        CLAIMS + "cost.py",
        '{"weights of a head, slope 2": weight_bytes(), "activations, slope 1": n * 512 * 4}',
        '{"activations, slope 1": weight_bytes(), "weights of a head, slope 2": n * 512 * 4}',
    ),
}

FORMULAS: list[tuple[int, str, str, str]] = [
    (2, CLAIMS + "positions.py", "sin(pos / 10000^(2i/d)), PE", "sin(pos / 10000^(i/d)), PE"),
    (2, CLAIMS + "positions.py", "PE(pos, 2i+1) = cos", "PE(pos, 2i+1) = sin"),
    (3, CLAIMS + "positions.py", "PE(pos, j + d/2) = cos(pos w_j)", "PE(pos, j + d/2) = sin(pos w_j)"),
    (10, CLAIMS + "positions.py", "Σ_j (2 - 2 cos(k w_j))", "Σ_j (1 - 2 cos(k w_j))"),
    (11, CLAIMS + "positions.py", "sin(k w); -sin(k w)", "-sin(k w); sin(k w)"),
    (14, CLAIMS + "worked.py", "x = √d · E_word", "x = d · E_word"),
    (15, CLAIMS + "attention.py", "softmax(Q K^T / √d_k) V", "softmax(Q K^T / d_k) V"),
    (17, CLAIMS + "attention.py", "x_i · x_i ≥ x_i · x_j", "x_i · x_j ≥ x_i · x_i"),
    (19, CLAIMS + "order.py", "Attn(P x) = P Attn(x)", "Attn(P x) = Attn(x)"),
    (20, CLAIMS + "attention.py", "d_k = d_v = d/h", "d_k = d_v = d h"),
    (21, CLAIMS + "masks.py", "/ √d_k + M)", "/ √d_k - M)"),
    (23, CLAIMS + "norms.py", "√(σ^2 + ε)", "√(σ + ε)"),
    (25, CLAIMS + "feedforward.py", "FFN(x) = max(0, x W_1 + b_1)", "FFN(x) = max(0, x W_1)"),
    (33, CLAIMS + "recurrent.py", 'U h_(t-1) + b)",', 'U h_t + b)",'),
    (36, CLAIMS + "trained.py", "a · b / (|a| |b|)", "a · b / |a|"),
    (37, CLAIMS + "trained.py", "PE W_Q W_K^T PE^T / √d_k", "PE W_K W_Q^T PE^T / √d_k"),
    (39, CLAIMS + "cost.py", "12 d^2 + 9 d for", "12 d^2 + 8 d for"),
    (40, CLAIMS + "norms.py", "LN(x) = BN(x^T)^T", "LN(x) = BN(x)"),
    (42, CLAIMS + "trained.py", "½ Σ_j |w_a", "Σ_j |w_a"),
    (43, CLAIMS + "worked.py", "E_CAT + P_1 and", "E_CAT + P_5 and"),
    (50, CLAIMS + "worked.py", "k / √64)", "k / 64)"),
    (15, GUIDE + "attention.md", "K^T / sqrt(d_k))", "K^T / d_k)"),
    (28, GUIDE + "decoding.md", "((5 + n) / 6)", "((6 + n) / 5)"),
    (25, GUIDE + "feedforward.md", "max(0, x W_1 + b_1)", "max(1, x W_1 + b_1)"),
    (20, GUIDE + "heads.md", "head_h = Attention(x W^Q_h, x W^K_h", "head_h = Attention(x W^K_h, x W^Q_h"),
    (22, GUIDE + "optimizer.md", "warmup^-1.5)", "warmup^-0.5)"),
    (2, GUIDE + "positions.md", "10000^(2i/D))        PE", "10000^(i/D))        PE"),
    (11, GUIDE + "positions.md", "[sin(t w); cos(t w)]", "[cos(t w); sin(t w)]"),
    (22, GUIDE + "residual.md", "y = LayerNorm(x + Sublayer(x))", "y = LayerNorm(Sublayer(x))"),
]
CHANGES |= {f"the formula {old!r} as {new!r}, {file}": Change(row, file, old, new) for row, file, old, new in FORMULAS}
CHANGES |= {
    "captions of two orders and of path lengths exchanged": Change(
        19, GUIDE + "attention.md", "The outputs of three words in two orders", "Layers until the first word is heard"
    ),
    "the caption of the six differences over what is normalised together": Change(
        24, GUIDE + "residual.md", "What layer norm and batch norm take together", "Six differences of both norms"
    ),
    "softmax is explained on the page of scores": Change(
        15, "export/explain/walk/words.toml", SOFTMAX_TERM, SOFTMAX_TERM.replace('"attention"]', '"scores"]')
    ),
}


def _pressed(test: str, file: str, old: str, new: str) -> Change:
    """A change of the page of `explain`, and which test that presses its controls has to see it."""
    folder = "" if file.startswith("mlx_transformer/") else "export/explain/"
    return Change(0, f"{folder}{file}", old, new, (f"tests/export/explain/test_pressed.py::test_{test}",))


WALK, LINK, TWIN, CELL = "walk/walk.js", "walk/link.js", "live/twin.js", "walk/attention_stations.js"
TYPED, LOOKED = "what_is_typed_is_read_after_a_rest_and_in_parts", "what_one_looks_at"
SLID, SWITCHED = (
    "temperature_divides_logits_and_the_penalty_is_a_power_of_the_length",
    "switches_take_a_part_out_and_put_it_back",
)
RANDOM, MASKED = "random_queries_and_keys_of_any_width", "the_mask_is_a_triangle_and_is_switched_beside_it"
LINKED, TOURED = "a_link_opens_the_page_as_it_was", "other_models_words_and_the_tour"
DRAWN = "the_picture_is_drawn_from_the_config_and_lights_the_chosen_words_path"
SPREAD = "spreads_are_bits_and_rows_add_up_to_one"

CHANGES |= {
    # Controls and words of the page of `explain`.
    "an empty text is read": _pressed(TYPED, WALK, "if (text.trim()) later", "if (text !== null) later"),
    "a text of any length": _pressed(TYPED, "walk/models.js", "ids.slice(0, MOST_TOKENS - 1)", "ids"),
    "strange words go unmarked": _pressed(TYPED, "walk/pieces.js", "!known.size || known.has(word)", "known.size"),
    "a word that is offered isn't written": _pressed(
        TYPED, WALK, "(word === button.dataset.old ? button.dataset.new : word)", "word"
    ),
    "the button of a layer leads to the next": _pressed(
        LOOKED, WALK, "layer: Number(n), key", "layer: Number(n) + 1, key"
    ),
    "arrows exchanged": _pressed(LOOKED, WALK, "ArrowLeft: -1, ArrowRight: 1", "ArrowLeft: 1, ArrowRight: -1"),
    "a column beside the next": _pressed(LOOKED, WALK, "',': -1, '.': 1 }", "',': -1, '.': 0 }"),
    "a word is chosen by its key": _pressed(LOOKED, WALK, "choose({ word: Number(n)", "choose({ key: Number(n)"),
    "the slider of temperature does nothing": _pressed(
        SLID, WALK, "state[target.id] = Number(target.value)", "state[target.id] = state[target.id]"
    ),
    "temperature multiplied": _pressed(SLID, "walk/output_stations.js", "-Infinity : x / T)", "-Infinity : x * T)"),
    "top-k keeps one more": _pressed(SLID, "walk/output_stations.js", "v.topK || SHOWN", "v.topK + 1 || SHOWN"),
    "a beam more than chosen": _pressed(
        SLID, WALK, "state.beam = Number(target.value)", "state.beam = Number(target.value) + 1"
    ),
    "the penalty of four": _pressed(
        SLID, WALK, "switchesOf(state.off), state, stopped", "switchesOf(state.off), START, stopped"
    ),
    "bits that are nats": _pressed(SPREAD, "walk/pass.js", "Math.log2(w)", "Math.log(w)"),
    "norms off does nothing": _pressed(SWITCHED, TWIN, "if (this.off.norm) return x;", ""),
    "residuals off does nothing": _pressed(SWITCHED, TWIN, "off.residual ? y : sum(x, y)", "sum(x, y)"),
    "positions off does nothing": _pressed(SWITCHED, TWIN, "if (!off.positions && ", "if ("),
    "mask off does nothing": _pressed(SWITCHED, TWIN, "!this.off.mask", "true"),
    "scale off does nothing": _pressed(SWITCHED, TWIN, "this.off.scale ? 1 : given", "given"),
    "the head beside is off": _pressed(SWITCHED, TWIN, "each[3] === head)", "each[3] === head + 1)"),
    "all on again leaves it off": _pressed(
        SWITCHED, WALK, "state.off = {}; return read(false); }", "return read(false); }"
    ),
    "log p of the whole model beside a broken one": _pressed(SWITCHED, WALK, "= now ?? whole;", "= whole;"),
    "the slider of d_k does nothing": _pressed(
        RANDOM, WALK, "state.width = 2 ** Number(target.value)", "state.width = 16"
    ),
    "divided by d_k": _pressed(RANDOM, CELL, "[Math.sqrt(width), 1]", "[width, 1]"),
    "a gradient that is a square": _pressed(RANDOM, CELL, "w * (1 - w)", "w * w"),
    "the mask turned over": _pressed(MASKED, CELL, "a.allowed(j, i)) === may", "a.allowed(i, j)) === may"),
    "the switch beside the mask does nothing": _pressed(MASKED, WALK, "box.checked = !box.checked;", ""),
    "another head becomes larger": _pressed(MASKED, WALK, "null : Number(large.dataset.of)", "null : 0"),
    "words of a map turned round": _pressed(
        MASKED, "mlx_transformer/page/kit.js", "const named = columns.map(", "const named = columns.toReversed().map("
    ),
    "a link forgets the head": _pressed(LINKED, LINK, "'layer', 'head', 'column'", "'layer', 'column'"),
    "a link forgets what is off": _pressed(LINKED, LINK, "state.off = offOf(found.get('off') ?? '');", ""),
    "an example forgets its word": _pressed(LINKED, WALK, "wanted = named ?? {};", "wanted = {};"),
    "a station that the address names isn't shown": _pressed(LINKED, WALK, "goal = named.get('at');", ""),
    "a softmax that adds up to 2": _pressed(
        TOURED,
        "walk/words.toml",
        "Turns any numbers into shares that add up to 1",
        "Turns any numbers into shares that add up to 2",
    ),
    "a tour of every second caption": _pressed(TOURED, "walk/tour.js", "this.at += 1;", "this.at += 2;"),
    "a box that opens another station": _pressed(
        DRAWN, "walk/picture.js", "position: 'position', self", "position: 'row', self"
    ),
    "shapes turned round": _pressed(
        DRAWN, "walk/picture.js", "× ${n} × ${tokens.source.length}", "× ${tokens.source.length} × ${n}"
    ),
    "no memory into cross-attention": _pressed(DRAWN, "walk/picture.js", "of to.cross)", "of [])"),
    "the path of both stacks lit": _pressed(
        DRAWN, "walk/picture.js", "const lit = stack === v.stack;", "const lit = true;"
    ),
}

READ = "the_page_is_the_one_that_was_looked_at"
KIT, WORDS = "mlx_transformer/page/kit.js", "walk/words.toml"

CHANGES |= {
    # Words, captions and pictures of the page that no rule of its own holds.
    "a mask of what may not be seen": _pressed(READ, CELL, "mask: blue may be", "mask: blue may not be"),
    "memory into self-attention": _pressed(
        READ, "walk/picture.js", "=> kind === 'cross_attention');", "=> kind === 'self_attention');"
    ),
    "signs of a strip exchanged": _pressed(READ, KIT, "/ most : 0, v < 0]", "/ most : 0, v > 0]"),
    "bars of half their length": _pressed(READ, KIT, "(100 * share).toFixed(1)", "(50 * share).toFixed(1)"),
    "shades of a map that its key doesn't have": _pressed(READ, KIT, "[Math.sqrt(w), false]", "[w, false]"),
    "a slider that ends early": _pressed(READ, "walk/output_stations.js", 'max="4" step', 'max="2" step'),
    "a switch that says another": _pressed(READ, WORDS, "scores aren't divided by √d_k", "sums go on as they are"),
    "a question without its answer": _pressed(READ, WORDS, "What is a token?", "Why this word?"),
    "something to try that shows nothing": _pressed(READ, WORDS, "Set K to 4 and", "Set K to 1 and"),
    "the net before the norm": _pressed(READ, WALK, "heads, norm, feedForward", "heads, feedForward, norm"),
    "cosines called sines": _pressed(READ, "walk/first_stations.js", "'cos' : 'sin'}(pos", "'sin' : 'cos'}(pos"),
    "a station of another claim": _pressed(READ, WORDS, "claim = 15", "claim = 16"),
    "a look that takes no softmax": _pressed(READ, WORDS, "divided, then a softmax", "divided, then a mean"),
    "a word chosen in the wrong row": _pressed(READ, WALK, "n === v.step &&", "n === v.step + 1 &&"),
}
