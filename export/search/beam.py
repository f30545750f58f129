"""Greedy and beam search with GNMT length penalty (Wu et al. 2016, section 7). Twin of `decoding/beam.py`.

Greedy search is a beam of 1 with one candidate per step that stops at its first end: the tokens and scores of
`decoding/greedy.py`, from the same operations.

Shapes: B sentences, K = beam, h hypotheses before the step (1, then K), V vocabulary, c tokens taken per hypothesis, C
candidates per step: 2K, and K more for each additional token that ends (greedy: 1).
"""

from __future__ import annotations

from copy import copy

import onnx_ir as ir

from export.interface import BATCH
from export.nn.primitives import END, Op, scope, size
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.decoding.steps import BANNED, DEAD, EXCLUDED

from .options import OptionInputs, Rules, Vocabulary, as_they_are, either
from .sampling import Sampling, Weighed
from .steps import Carried, State


class Beam:
    """`steps.Strategy`. Everything constant during the search is computed here, outside the loop."""

    result_names: tuple[str, ...] = ("scores", "ends")

    def __init__(
        self,
        op: Op,
        options: OptionInputs,
        config: TransformerConfig,
        lengths: ir.Value,
        vocabulary: Vocabulary,
        prompts: ir.Value | None = None,
    ):
        """lengths: tokens of each source (B,). prompts, of a decoder-only model: (B, S), -1 before shorter ones."""
        self.options, self.config, self.vocabulary, self.prompts = options, config, vocabulary, prompts
        self.beam = op.Where(options["sample"], 1, options["beam"])
        self.size = op.Shape(lengths)
        self.width = op.Reshape(self.beam, [1])
        self.rules, self.greedy = Rules(op, options, config, vocabulary), op.Equal(self.beam, 1)
        self.candidates = op.Where(self.greedy, [1], op.Mul(self.width, op.Add(self.rules.more_ends, 2)))
        excluded = op.Add(self.rules.excluded, EXCLUDED)
        self.tokens_per_hypothesis = op.Min(op.Add(self.candidates, excluded), op.Reshape(vocabulary.size, [1]))
        self.early_stopping = op.Or(options["early_stopping"], self.greedy)
        limits = op.Expand(options.length_limits(op, lengths, config), self.size)
        self.limits = op.Unsqueeze(limits, [1])  # (B, 1)
        self.steps = op.ReduceMax(limits, keepdims=0)
        self.penalties = options.penalty(op, op.Range(0, op.Add(self.steps, 2), 1))  # by length
        self.limit_penalty = options.penalty(op, limits)
        self.rising = op.GreaterOrEqual(options["length_penalty"], 0.0)
        self.sampling = Sampling(op, options, self.size, vocabulary)
        prefix = op.Expand(vocabulary.places(op, options["prefix"]), op.Concat(self.size, [1], axis=0))
        widths = op.Concat([0], op.Reshape(self.rules.first_count, [1]), [0, 1], axis=0)
        self.forced = op.Pad(prefix, widths, -1)  # (B, F + P + 1): the prefix comes after `forced_first`
        self.last_forced = op.Sub(size(op, self.forced, 1), 1)

    def at(self, op: Op, index: ir.Value) -> Beam:
        chosen = copy(self)
        chosen.limits, chosen.limit_penalty = op.Gather(self.limits, index), op.Gather(self.limit_penalty, index)
        chosen.sampling, chosen.forced = self.sampling.at(op, index), op.Gather(self.forced, index)
        return chosen

    def initial(self, op: Op) -> dict[str, Carried]:
        one, all_slots = op.Concat(self.size, [1], axis=0), op.Concat(self.size, self.width, axis=0)
        integer, real, boolean = ir.DataType.INT64, ir.DataType.FLOAT, ir.DataType.BOOL
        if self.prompts is None:
            start = op.Expand(self.vocabulary.places(op, self.options.start(op, self.config)), one)
            history = self.rules.begun(op, start)
        else:
            start = op.Slice(self.prompts, [-1], [END], [1])
            history = self.rules.begun_by(op, self.prompts)
        return {
            "ids": Carried(start, integer, (BATCH, "hypotheses")),
            "history": Carried(history, integer, (BATCH, "hypotheses", "written")),
            "live": Carried(op.Expand(0.0, one), real, (BATCH, "hypotheses")),
            "scores": Carried(op.Expand(BANNED, all_slots), real, (BATCH, "beam")),
            "ends": Carried(op.Expand(0, all_slots), integer, (BATCH, "beam")),
            "open": Carried(op.Expand(True, self.size), boolean, (BATCH,)),
        }

    def choose(self, op: Op, logits: ir.Value, state: State, t: ir.Value) -> tuple[State, ir.Value, ir.Value]:
        """
        logits (B, h, V) --> TopK (B, h, c) --> log p of hypothesis and token --> TopK (B, C): parent, token, or forced
                                                                                     |
                  scores, ends: K best finished (B, K) <-- candidates that end ------+--> K best others: ids, live

        A candidate is the number parent * V + token. The end of a finished hypothesis is step * K * V + candidate.
        """
        v, length = self.vocabulary.size, op.Add(t, 1)
        bans = self.rules.bans(op, t)
        tokens, scores, log_p = self._extensions(op, logits, bans, state["history"], t)  # (B, h, c)
        live = op.Unsqueeze(state["live"], [2])
        scores = op.Add(op.Add(scores, live), self._banned(op, bans, tokens, t))
        scores = op.Flatten(scores)  # (B, h*c)
        count = op.Min(self.candidates, op.Shape(scores, start=1))
        values, place = op.TopK(scores, count, _outputs=2)  # (B, C)
        token = op.GatherElements(op.Flatten(tokens), place, axis=1)
        parent = op.Div(place, self.tokens_per_hypothesis)
        # Greedy search chooses by the scores with rules, but adds up the model's own log p.
        own = op.GatherElements(op.Flatten(op.Add(log_p, live)), place, axis=1)
        values = op.Where(op.And(self.greedy, self.rules.reads_history), own, values)
        values, parent, token = self._forced(op, state["live"], values, parent, token, t)
        candidate = op.Add(op.Mul(parent, v), token)

        eos = op.Gather(self.rules.ends, token)
        at_limit = op.LessOrEqual(self.limits, length)  # (B, 1)
        finished = self._finish(op, state, values, candidate, op.Or(eos, at_limit), t)
        live, pick = op.TopK(op.Where(eos, 4 * BANNED, values), self.width, _outputs=2)
        chosen = op.GatherElements(candidate, pick, axis=1)
        parents = op.Div(chosen, v)
        ended = op.Or(op.Squeeze(at_limit, [1]), self._decided(op, finished["scores"], live, length))
        still = op.And(state["open"], op.Not(ended))
        ids = op.Mod(chosen, v)
        after = {"ids": ids, "history": self.rules.written(op, state["history"], parents, ids), "live": live}
        return {**after, **finished, "open": still}, parents, chosen

    def _extensions(
        self, op: Op, logits: ir.Value, bans: ir.Value, history: ir.Value, t: ir.Value
    ) -> tuple[ir.Value, ...]:
        """For each hypothesis its candidate tokens (B, h, c), the scores to choose them by, and their log p. A prefix's
        token replaces the first."""

        every = op.LogSoftmax(logits, axis=-1)

        def penalised(op: Op) -> ir.Value:
            return self.rules.penalised(op, op.Where(self.greedy, logits, every), history)

        def ruled(op: Op) -> ir.Value:
            return self.rules.by_history(op, penalised(op), history)

        by = Weighed(self.rules.reads_history, ruled)
        tokens = self._force(op, self.sampling.or_likeliest(op, logits, by, bans, t, self.tokens_per_hypothesis), t)
        log_p = op.GatherElements(every, tokens, axis=2)

        def own(op: Op) -> list[ir.Value]:
            free = penalised(op)
            of_rules = op.GatherElements(self.rules.by_history(op, free, history), tokens, axis=2)
            of_prefix = op.GreaterOrEqual(self._prefix(op, t), 0)
            return [op.Where(of_prefix, op.GatherElements(free, tokens, axis=2), of_rules)]

        (scores,) = either(op, self.rules.reads_history, "ruled", own, as_they_are(log_p), (ir.DataType.FLOAT,))
        return tokens, scores, log_p

    def _prefix(self, op: Op, t: ir.Value) -> ir.Value:
        """Each sentence's prefix token number t (B, 1, 1); -1: none."""
        return op.Unsqueeze(op.Gather(self.forced, op.Min(t, self.last_forced), axis=1), [1, 2])

    def _force(self, op: Op, tokens: ir.Value, t: ir.Value) -> ir.Value:
        """Candidates (B, h, c) with a prefix's token in place of the first."""
        forced, first = self._prefix(op, t), op.Equal(op.Range(0, size(op, tokens, 2), 1), 0)
        return op.Where(op.And(op.GreaterOrEqual(forced, 0), first), forced, tokens)

    def _banned(self, op: Op, bans: ir.Value, tokens: ir.Value, t: ir.Value) -> ir.Value:
        """Bans to add to candidates (B, h, c). If a prefix gives the token, all candidates but the first are banned."""
        others = op.Where(op.Greater(op.Range(0, size(op, tokens, 2), 1), 0), BANNED, 0.0)  # (c,)
        return op.Where(op.GreaterOrEqual(self._prefix(op, t), 0), others, op.Gather(bans, tokens))

    def _forced(
        self, op: Op, live: ir.Value, values: ir.Value, parent: ir.Value, token: ir.Value, t: ir.Value
    ) -> tuple[ir.Value, ...]:
        """Candidates (B, C) with forced tokens: where a token is forced, the candidates are the live hypotheses, each
        followed by it."""

        def with_it(op: Op) -> list[ir.Value]:
            forced = self.rules.forced(op, self.limits, t)  # (B, 1)
            is_forced, hypotheses = op.GreaterOrEqual(forced, 0), size(op, live, 1)
            slots = op.Range(0, size(op, values, 1), 1)
            missing = op.Reshape(op.Sub(size(op, values, 1), hypotheses), [1])
            own = op.Pad(live, op.Concat([0, 0, 0], missing, axis=0), 2 * BANNED)
            alive = op.Where(op.Less(slots, hypotheses), slots, 0)
            return [
                op.Where(is_forced, own, values),
                op.Where(is_forced, alive, parent),
                op.Where(is_forced, forced, token),
            ]

        types = (ir.DataType.FLOAT, ir.DataType.INT64, ir.DataType.INT64)
        return either(op, self.rules.forces(op, t), "forced", with_it, as_they_are(values, parent, token), types)

    def _finish(
        self, op: Op, state: State, values: ir.Value, candidate: ir.Value, ends: ir.Value, t: ir.Value
    ) -> State:
        """Merge the K best candidates, if they end, into the set of finished hypotheses."""
        k, v = self.width, self.vocabulary.size
        best = op.Slice(values, [0], k, [1])
        fits = op.And(op.And(op.Slice(ends, [0], k, [1]), op.Greater(best, DEAD)), op.Unsqueeze(state["open"], [1]))
        new = op.Where(fits, op.Div(best, op.Gather(self.penalties, op.Add(t, 1))), BANNED)
        scores, pick = op.TopK(op.Concat(state["scores"], new, axis=1), self.width, _outputs=2)
        ended = op.Add(op.Slice(candidate, [0], k, [1]), op.Mul(op.Mul(self.beam, v), t))
        return {"scores": scores, "ends": op.GatherElements(op.Concat(state["ends"], ended, axis=1), pick, axis=1)}

    def _decided(self, op: Op, scores: ir.Value, live: ir.Value, length: ir.Value) -> ir.Value:
        """(B,): whether K hypotheses are finished, and no extension of a live hypothesis can score higher.

        With `early_stopping` K finished hypotheses are enough. log p only falls, so the best score within reach of a
        live hypothesis is its own log p over the largest penalty ahead: the penalty at the length limit, or, for a
        negative alpha, where lp falls, at the very next length. With `heuristic_stop` the penalty at the current length
        is used.
        """
        worst = op.ReduceMin(scores, [1], keepdims=0)
        ahead = op.Where(self.rising, self.limit_penalty, op.Gather(self.penalties, op.Add(length, 1)))
        ahead = op.Where(self.options["heuristic_stop"], op.Gather(self.penalties, length), ahead)
        beaten = op.GreaterOrEqual(worst, op.Div(op.ReduceMax(live, [1], keepdims=0), ahead))
        return op.And(op.Greater(worst, DEAD), op.Or(self.early_stopping, beaten))

    def results(
        self, op: Op, state: State, history: ir.Value, read: ir.Value | None = None
    ) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value | None]:
        """The n best of each sentence: ids (B, n, T) without start token and eos, pad after the end; lengths (B, n);
        scores (B, n); and each token's attention to the source (B, n, T, S), 0 after the end.

        history: chosen candidates of each step (T, B, K). read: attention of each hypothesis at that step (T, B, K, S),
        or None.
        """
        v, per_step = self.vocabulary.size, op.Mul(self.beam, self.vocabulary.size)
        n = op.Reshape(op.Min(self.options["n_best"], self.beam), [1])
        scores, ends = (op.Slice(state[name], [0], n, [1]) for name in ("scores", "ends"))  # (B, n)
        step, end = op.Div(ends, per_step), op.Mod(ends, per_step)
        last = op.Mod(end, v)
        slots, tokens = _paths(op, history, step, op.Div(end, v), last, v, read is not None)
        paths = op.Transpose(tokens, perm=[1, 2, 0])
        # A hypothesis that ended at step s has s tokens and a last token, which may be eos.
        lengths = op.Add(step, op.Where(op.Gather(self.rules.ends, last), 0, 1))
        lengths = op.Where(op.Greater(scores, DEAD), lengths, 0)  # there are fewer than n hypotheses
        is_token = op.Less(op.Range(0, size(op, history, 0), 1), op.Unsqueeze(lengths, [2]))
        ids = op.Where(is_token, op.Gather(self.vocabulary.ids, paths), self.config.pad_id)
        longest = op.Reshape(op.ReduceMax(lengths, keepdims=0), [1])
        rows = None
        if read is not None:
            rows = op.GatherND(read, op.Unsqueeze(slots, [3]), batch_dims=2)  # (T, B, n, S)
            rows = op.Where(op.Unsqueeze(is_token, [3]), op.Transpose(rows, perm=[1, 2, 0, 3]), 0.0)
            rows = op.Slice(rows, [0], longest, [2])
        return op.Slice(ids, [0], longest, [2]), lengths, scores, rows


def _paths(
    op: Op, history: ir.Value, step: ir.Value, slot: ir.Value, last: ir.Value, v: ir.Value, with_slots: bool
) -> tuple[ir.Value | None, ir.Value]:
    """Trace hypotheses back from their ends, one parent per step: tokens (T, B, n).

    The hypotheses ended at `step` with token `last`, after slot `slot` (all B, n). With `with_slots` also returns the
    slot before each step (T, B, n), otherwise None.
    """

    def body(op: Op, slot: ir.Value, chosen: ir.Value, t: ir.Value) -> list[ir.Value]:
        with scope(op, "paths", "Paths"):
            before, candidate = op.Less(t, step), op.GatherElements(chosen, slot, axis=1)
            parent, token = op.Where(before, op.Div(candidate, v), slot), op.Where(before, op.Mod(candidate, v), last)
            return [parent, token, *([op.Identity(parent)] if with_slots else [])]

    integer = ir.TensorType(ir.DataType.INT64)
    axes = {"slot": (BATCH, "n_best"), "chosen": (BATCH, "beam"), "t": ()}
    inputs = [ir.Value(name=f"paths.{name}", type=integer, shape=ir.Shape(shape)) for name, shape in axes.items()]
    names = ("parent", "token", *(["slot before"] if with_slots else []))
    outputs = [ir.Value(name=f"paths.{name}", type=integer, shape=ir.Shape(axes["slot"])) for name in names]
    graph = op.builder.subgraph(body, inputs, outputs, name="back")
    steps = op.Range(0, size(op, history, 0), 1)
    _, tokens, *slots = op.Scan(
        slot,
        history,
        steps,
        body=graph,
        num_scan_inputs=2,
        scan_input_directions=[1, 1],
        scan_output_directions=[1] * (len(names) - 1),
        _outputs=len(names),
    )
    return (slots[0] if slots else None), tokens
