"""A published model, run in float64 by `transformers` or `mlx_lm` itself.

`torch`, `transformers` and `mlx_lm` aren't dependencies: users of this comparison have them. Code of `transformers`
sometimes casts to float32, e.g. in T5's norm or a softmax; here these casts are to float64.

A folder that mlx-lm reads is run by `mlx_lm` itself, on the CPU in float64, its integers dequantised. It computes some
models otherwise than transformers (`families/mlx_lm.py`), which the report says.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from export.validate.cases import Case
from export.validate.checks.free_running import own_options
from export.validate.engines.protocol import Unavailable
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.folders import MODULES, Place
from mlx_transformer.core.positions import borders
from mlx_transformer.decoding.options import Options
from mlx_transformer.decoding.steps import banned_ids
from mlx_transformer.families.mlx_lm import unlike_mlx_lm
from mlx_transformer.families.sentence_folder import read_sentence_folder
from mlx_transformer.system.errors import UserError, one_line
from mlx_transformer.system.files import read_json

from . import Array, Origin

BEAM = 4
PUBLISHED = "as published"
KINDS = {"encoder-decoder": "AutoModelForSeq2SeqLM", "encoder": "AutoModel", "decoder": "AutoModelForCausalLM"}
"""The class if the folder's config.json names none."""


class HuggingFace(Origin):
    """A model folder of `transformers`. Raises Unavailable if torch or transformers is missing."""

    name = "transformers"

    def __init__(self, folder: Path, config: TransformerConfig):
        missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
        if missing:
            raise Unavailable(f"--against transformers: not installed here: pip install {' '.join(missing)}")
        # In a sentence-transformers folder the encoder may be in an inner folder.
        self.folder = read_sentence_folder(folder).network if Place.of(folder).holds(MODULES) else folder
        self.config = config
        try:
            self.torch, self.transformers = import_module("torch"), import_module("transformers")
        except ImportError as error:  # transformers checks its dependencies' versions
            raise Unavailable(f"--against transformers: {' '.join(str(error).split())[:200]}") from error
        if not (self.folder / "config.json").is_file():
            raise UserError(f"{self.folder}: holds no config.json: give the folder that was imported")
        self.values, root = read_json(self.folder / "config.json"), config.d_model**0.5
        kind = str(self.values.get("dtype") or self.values.get("torch_dtype")).rpartition(".")[2]
        halves = {"bfloat16", "float16"} & {kind}
        self.factor = self.torch.tensor(root, dtype=getattr(self.torch, kind)).item() if halves else root
        """sqrt(d_model) as Gemma computes it, in the folder's type."""
        self.model = self._opened()
        self.published: Any = vars(self.model).get("generation_config")

    def _opened(self) -> Any:
        t = self.transformers
        t.logging.set_verbosity_error()
        if "disable_progress_bar" in vars(t.logging):
            t.logging.disable_progress_bar()
        base = KINDS[self.config.architecture]
        name = (self.values.get("architectures") or [base])[0]
        if self.config.architecture == "encoder" and name.endswith("ForCausalLM"):  # a decoder that makes vectors
            name = base
        kind = getattr(t, name, None)
        if kind is None:
            raise UserError(f"{self.folder}: transformers {t.__version__} has no class {name}")
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        # Version 5 would round stored weights to the type in config.json; its word for it is newer than version 4.
        wide = {"torch_dtype" if t.__version__.startswith("4.") else "dtype": self.torch.float64}
        try:
            model, report = kind.from_pretrained(
                str(self.folder),
                **wide,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,  # never open a pickle
                attn_implementation="eager",
                output_loading_info=True,
            )
        except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
            raise UserError(
                f"{self.folder}: transformers can't open it ({' '.join(str(error).split())[:200]})"
            ) from error
        for name in report["missing_keys"]:
            # A file may have a single shared table; transformers then draws the encoder's and decoder's at random.
            module, _, last = name.rpartition(".")
            if module.endswith("embed_tokens") and "shared" in dict(model.base_model.named_children()):
                setattr(model.get_submodule(module), last, model.base_model.shared.weight)
        tensors = dict(model.named_parameters(remove_duplicate=False))
        read = {tensor.data_ptr() for name, tensor in tensors.items() if name not in report["missing_keys"]}
        missing = [name for name in report["missing_keys"] if name in tensors and tensors[name].data_ptr() not in read]
        if self.config.head.kind == "hidden":  # the class has a pooler even if the folder has no weights for it
            missing = [name for name in missing if not name.startswith("pooler.")]
        if missing:
            raise UserError(f"{self.folder}: transformers misses {', '.join(sorted(missing)[:3])}")
        return self._exact(model.double().eval())

    def _exact(self, model: Any) -> Any:
        """Compute a decoder's float32 buffers again: rotary frequencies, a factor of embeddings."""
        if self.config.architecture != "decoder":
            return model
        for name, module in list(model.named_modules()):
            buffers = dict(module.named_buffers(recurse=False))
            if any(buffer.endswith("inv_freq") for buffer in buffers):
                with self._wide():
                    model.set_submodule(name, type(module)(module.config))
            if "embed_scale" in buffers:
                module.embed_scale = self.torch.tensor(self.factor, dtype=self.torch.float64)
        return model

    def described(self) -> str:
        versions = f"transformers {self.transformers.__version__}, torch {self.torch.__version__}"
        reasons = unlike_mlx_lm(self.values) if self.config.architecture == "decoder" else []
        unlike = "".join(f"; other than in mlx-lm: {reason}" for reason in reasons)
        return f"{versions}: {type(self.model).__name__} in float64, {self.folder}{unlike}"

    def fitted(self, case: Case) -> Case | None:
        if case.mask is None or self.config.architecture == "decoder":
            return case
        on_the_right = bool((np.diff(case.mask.astype(int), axis=1) <= 0).all())
        return case if on_the_right else None

    def outputs(self, case: Case) -> dict[str, Array]:
        torch, ids = self.torch, self.torch.from_numpy
        inputs = {"input_ids": ids(case.ids), "attention_mask": ids(case.source_real.astype(np.int64))}
        if case.target_ids is not None:
            inputs["decoder_input_ids"] = ids(case.target_ids)
        if self.config.architecture == "decoder":  # as its `generate` counts them
            inputs["position_ids"] = ids(np.maximum(np.cumsum(case.source_mask, axis=1) - 1, 0))
        if "token_types" in case.others:
            inputs["token_type_ids"] = ids(case.others["token_types"])
        with torch.no_grad(), self._wide():
            outputs = self.model(**inputs, return_dict=True)
        kind = self.config.head.kind
        if kind == "spans":
            return {"logits": torch.stack([outputs.start_logits, outputs.end_logits], dim=-1).numpy()}
        name = {"hidden": "last_hidden_state", "pooled": "pooler_output"}.get(kind, "logits")
        return {"logits": getattr(outputs, name).numpy()}

    @contextmanager
    def _wide(self) -> Any:
        """In this context casts to float32 become casts to float64."""
        torch, root, factor = self.torch, self.config.d_model**0.5, self.factor
        mode = import_module("torch.overrides").TorchFunctionMode

        class Wide(mode):  # type: ignore[misc, valid-type]
            def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                def wider(value: Any) -> Any:
                    return torch.float64 if value is torch.float32 else value

                if function is torch.Tensor.float:
                    function = torch.Tensor.double
                if function is torch.tensor and args[:1] == (root,):
                    args = (factor, *args[1:])
                return function(*map(wider, args), **{name: wider(each) for name, each in (kwargs or {}).items()})

        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)  # for tensors made from Python numbers
        try:
            with Wide():
                yield
        finally:
            torch.set_default_dtype(before)

    def searches(self, limit: int, settings: Mapping[str, Any]) -> dict[str, Options]:
        beam = min(BEAM, self.config.vocab_size)
        like_theirs = {"penalty_form": "length", "length_penalty": 1.0, "heuristic_stop": True}
        by_name = {
            "greedy": Options(max_new_tokens=limit),
            f"beam {beam}": Options(beam=beam, max_new_tokens=limit, **like_theirs),
        }
        own = own_options(limit, settings)
        return by_name if own is None else {**by_name, PUBLISHED: own}

    def search(self, sources: Sequence[list[int]], name: str, options: Options) -> list[list[int]]:
        """See `Origin`. Each source is searched separately, without padding."""
        c, theirs = self.config, self.transformers.GenerationConfig
        if name == PUBLISHED:
            chosen = theirs.from_dict(self.published.to_dict())
            chosen.update(max_new_tokens=options.max_new_tokens, max_length=None, do_sample=False)
            if options.min_new_tokens:
                chosen.update(min_new_tokens=options.min_new_tokens, min_length=0)
        else:
            chosen = theirs(
                max_new_tokens=options.max_new_tokens,
                num_beams=options.beam,
                length_penalty=options.length_penalty,
                suppress_tokens=banned_ids(c) or None,
                pad_token_id=c.pad_id,
                eos_token_id=c.eos_id,
                decoder_start_token_id=c.bos_id,
            )
        torch, outputs = self.torch, []
        # Past the border of longrope it reads earlier tokens again under the wrong mask; without a cache it doesn't.
        chosen.use_cache = not borders(c)
        self.model.generation_config = chosen  # transformers would fill missing settings from the model's own config
        for source in sources:
            ids = torch.tensor([source])
            with torch.no_grad(), self._wide():
                row = self.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=chosen)[0]
            written = row.tolist()[1 if c.has_encoder else len(source) :]
            outputs.append(self.ended(written, options))
        return outputs


class MlxLm(Origin):
    """A model folder of mlx-lm. Raises Unavailable if mlx-lm is missing."""

    name = "mlx-lm"

    def __init__(self, folder: Path, config: TransformerConfig):
        if find_spec("mlx_lm") is None:
            raise Unavailable("--against mlx-lm: not installed here: pip install mlx-lm")
        self.folder, self.config = folder, config
        self.mx, utils = import_module("mlx.core"), import_module("mlx_lm.utils")
        self.make_cache = import_module("mlx_lm.models.cache").make_prompt_cache
        with self._on_cpu():
            try:
                self.model, self.values = utils.load_model(folder)
                np.array(self.model(self.mx.array([[config.bos_id]])).astype(self.mx.float32))
            except (OSError, ValueError, LookupError, TypeError, AssertionError) as error:
                raise UserError(f"{folder}: mlx-lm can't run it ({one_line(str(error))[:200]})") from error
            if "quantization" in self.values:
                self.model.set_dtype(self.mx.float32)  # else scale * integer + bias is rounded to the scales' 16 bits
                self.model = utils.dequantize_model(self.model)
            self.model.set_dtype(self.mx.float64)

    def _on_cpu(self) -> Any:
        return self.mx.stream(self.mx.cpu)

    def described(self) -> str:
        versions = " ".join(f"{name} {version(name)}," for name in ("mlx-lm", "mlx"))
        unlike = "".join(f"; other than in transformers, {reason}" for reason in unlike_mlx_lm(self.values))
        return f"{versions} {self.values.get('model_type')} in float64, {self.folder}{unlike}"

    def fitted(self, case: Case) -> Case | None:
        return case if case.mask is None or bool(case.mask.all()) else None

    def outputs(self, case: Case) -> dict[str, Array]:
        with self._on_cpu():
            return {"logits": np.array(self.model(self.mx.array(case.ids)))}

    def search(self, sources: Sequence[list[int]], name: str, options: Options) -> list[list[int]]:
        """See `Origin`. Each prompt by itself, greedily, with mlx-lm's caches."""
        with self._on_cpu():
            return [self.ended(self._continued(source, options), options) for source in sources]

    def _continued(self, prompt: list[int], options: Options) -> list[int]:
        written, cache, read = list[int](), self.make_cache(self.model), prompt
        ends = {self.config.eos_id, *options.end_ids}
        while len(written) < (options.max_new_tokens or 0) and not ends & set(written):
            logits = np.array(self.model(self.mx.array([read]), cache=cache))[0, -1]
            logits[list(banned_ids(self.config))] = -np.inf
            read = [int(logits.argmax())]
            written += read
        return written
