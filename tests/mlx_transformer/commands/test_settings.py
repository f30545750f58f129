"""Settings objects as options: what each field gives its option, and what each command makes of its options."""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import pytest

from export.precision.table import ACTIVATIONS, PRECISIONS
from export.settings import (
    ActivationsName,
    ExplainSettings,
    ExportSettings,
    PrecisionName,
    ServeSettings,
    TargetName,
    ValidateSettings,
    WebSettings,
)
from export.targets.table import TARGETS
from mlx_transformer.commands.app import ALL, command_of, function_of
from mlx_transformer.commands.converting import DistilSettings, QuantizeSettings
from mlx_transformer.commands.exporting import FormSettings
from mlx_transformer.commands.looking import CompareSettings
from mlx_transformer.commands.parameters import Argument, Command, Option
from mlx_transformer.commands.settings import (
    NOT,
    ContinuingSettings,
    LineFiles,
    RecipeKeys,
    RuntimeSettings,
    Shown,
    TranslatingSettings,
    with_settings,
)
from mlx_transformer.commands.text import ChatSettings, OtherText, ParallelFiles, TokenScores, VectorFiles
from mlx_transformer.commands.training import MachineSettings
from mlx_transformer.core.config import PRESETS, TransformerConfig
from mlx_transformer.decoding.options import PENALTY_OFFSETS, Options, PenaltyForm
from mlx_transformer.generation.text_options import (
    AnswerOptions,
    ClassifyOptions,
    EmbedOptions,
    PairSettings,
    RerankOptions,
    TextSettings,
)
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.fields import ADVANCED, field_docs, field_types
from mlx_transformer.training.options import FROM_TOKENIZER, DataOptions, ModelOptions, PresetName, TrainingOptions

OBJECTS = (
    *(ExportSettings, FormSettings, ExplainSettings, WebSettings, ServeSettings, ValidateSettings),
    *(Options, TextSettings, RuntimeSettings, CompareSettings, TranslatingSettings, ContinuingSettings, EmbedOptions),
    *(MachineSettings, DistilSettings, ClassifyOptions, RerankOptions, AnswerOptions, OtherText, ParallelFiles),
    *(LineFiles, VectorFiles, ChatSettings, PairSettings, QuantizeSettings, TokenScores),
)


def params_of(name: str) -> dict[str, Any]:
    return {each.name: each for each in command_of("mlx-transformer").commands[name].params}


def choices_of(name: str, option: str) -> tuple[Any, ...]:
    """The names of which the option takes one."""
    hint = get_args(inspect.signature(with_settings(function_of(name))).parameters[option].annotation)[0]
    parts = [*get_args(hint), *(inner for part in get_args(hint) for inner in get_args(part))]
    literals = [part for part in (hint, *parts) if get_origin(part) is Literal]
    return get_args(literals[0]) if literals else ()


def objects_of(name: str) -> list[tuple[type, Shown]]:
    """The settings objects of a command, and which of their fields it shows."""
    hints = get_type_hints(function_of(name), include_extras=True).values()
    found = [(get_args(hint) or (hint,)) for hint in hints]
    return [
        (of, next((mark for mark in marks if isinstance(mark, Shown)), Shown()))
        for of, *marks in found
        if isinstance(of, type) and dataclasses.is_dataclass(of)
    ]


@dataclass(frozen=True, kw_only=True)
class Settings:
    how_many: int | None = None
    """How many; unset: all."""
    loud: bool = False
    """Say more."""
    check: bool = True
    """Check it first."""
    beside: str | None = dataclasses.field(default=None, metadata={"option": ("--with", "-w")})
    """Another [one]."""
    rare: int = dataclasses.field(default=2, metadata=ADVANCED)
    """Seldom changed."""


def command(
    what: Annotated[str, Argument(help="What to do.")],
    *,
    settings: Settings,
    last: Annotated[int, Option(help="The last.")] = 3,
) -> list[object]:
    """Do it."""
    return [what, settings, last]


def test_fields_become_options():
    typed = with_settings(command)
    assert typed(what="x", how_many=2, loud=True, no_check=True, beside="y", rare=1, last=4) == [
        "x",
        Settings(how_many=2, loud=True, check=False, beside="y", rare=1),
        4,
    ]
    parameters = inspect.signature(typed).parameters
    assert list(parameters) == ["what", "how_many", "loud", "no_check", "beside", "rare", "last"]
    assert (parameters["how_many"].default, parameters["no_check"].default) == (None, False)
    assert get_args(parameters["how_many"].annotation)[0] == int | None


def test_options_on_the_command_line():
    shown = {each.name: each for each in Command("command", with_settings(command)).params}
    assert {name: each.opts for name, each in shown.items() if name != "what"} == {
        "how_many": ["--how-many"],
        "loud": ["--loud"],
        "no_check": ["--no-check"],
        "beside": ["--with", "-w"],
        "rare": ["--rare"],
        "last": ["--last"],
        "help_all": ["--help-all"],
    }
    assert not [each.secondary_opts for each in shown.values() if each.secondary_opts]  # such as --no-loud
    assert shown["no_check"].help == "Do not check it first."
    assert shown["how_many"].show_default == "all"  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ALL)
def test_every_field_of_a_settings_object_is_an_option(name):
    """With its help, its choices, and what it stands for if it isn't given: the default of Python's."""
    params = params_of(name)
    given = {each.name: each.default for each in params.values()}
    for of, mark in objects_of(name):
        assert of in OBJECTS
        meanings, kinds = field_docs(of), field_types(of)
        chosen = mark.fields.split() or [field.name for field in dataclasses.fields(of)]
        for field in dataclasses.fields(of):
            spelled = NOT + field.name if field.default is True else field.name
            if field.name not in chosen:
                continue
            option = params[spelled]
            assert option.opts[0].startswith("--")
            assert not option.hidden
            meaning = meanings[field.name].split("; unset: ")[0].removesuffix(".")
            assert meaning[1:] in option.help
            if "; unset: " in meanings[field.name]:
                assert option.show_default == meanings[field.name].split("; unset: ")[1].removesuffix(".")
            if field.name in kinds and kinds[field.name].type is str and kinds[field.name].choices:
                assert choices_of(name, spelled) == kinds[field.name].choices
            default = given[spelled]
            if field.default is True:
                assert default is False
            elif isinstance(field.default, tuple):
                assert default == ()  # for which the field's own stands
            else:
                assert default == field.default or str(default) == str(field.default), (name, field.name)


def test_a_list_of_names_is_an_option_that_is_given_again():
    def told(*, settings: ExportSettings) -> ExportSettings:
        return settings

    told.__annotations__["settings"] = ExportSettings
    typed = with_settings(told)
    usual = {name: each.default for name, each in inspect.signature(typed).parameters.items()}
    assert typed(**usual) == ExportSettings()
    assert typed(**{**usual, "precision": ("int8", "float32")}).precision == ["int8", "float32"]


def test_help_stands_under_every_field():
    for of in OBJECTS:
        assert list(field_docs(of)) == [field.name for field in dataclasses.fields(of)]
        assert all(text.endswith(".") for text in field_docs(of).values()), of


def test_what_help_shows_is_what_the_library_takes():
    """They are written down twice so that help needs neither NumPy nor onnx."""
    assert get_args(PenaltyForm) == tuple(PENALTY_OFFSETS)
    assert tuple(TARGETS) == get_args(TargetName)
    assert get_args(PrecisionName) == tuple(PRECISIONS)
    assert get_args(ActivationsName) == tuple(ACTIVATIONS)
    assert get_args(PresetName) == tuple(PRESETS)


BOUNDED = [
    (of, name, wrong)
    for of in (*OBJECTS, Options)
    for name, kind in field_types(of).items()
    for wrong in (kind.bounds.at_least - 1, kind.bounds.at_most + 1)
    if kind.type in (int, float) and abs(wrong) < float("inf")
]


@pytest.mark.parametrize(("of", "name", "wrong"), BOUNDED, ids=lambda value: getattr(value, "__name__", str(value)))
def test_settings_out_of_bounds(of, name, wrong):
    with pytest.raises(UserError, match=f"{name}="):
        of(**{name: int(wrong)})


def test_every_key_of_a_recipe_is_an_option_of_train():
    params = params_of("train")
    tables = {"data": DataOptions, "model": TransformerConfig, "training": TrainingOptions}
    names = [(table, name) for table, of in tables.items() for name in field_types(of)] + [("model", "preset")]
    keys = {(key.table, key.name): key for key in RecipeKeys.declared()}
    left_out = {("model", name) for name in ("architecture", *FROM_TOKENIZER)}
    assert keys.keys() == set(names) - left_out
    assert len({name for _, name in keys}) == len(keys), "a name stands in two tables"
    shown = {name for names in RecipeKeys.PANELS.values() for name in " ".join(names).split()}
    assert shown <= {name for _, name in keys}
    for (table, name), key in keys.items():
        option = params[name]
        assert option.hidden == (name not in shown)
        assert option.default in (None, False)
        of = ModelOptions if name == "preset" else tables[table]
        assert field_docs(of)[name].startswith(key.help.removesuffix("."))
        if key.kind.type is str and key.kind.choices:
            assert choices_of("train", name) == key.kind.choices


@pytest.mark.parametrize(
    ("key", "typed", "value"),
    [
        ("data.corpus", "cldr:en-de", "cldr:en-de"),
        ("data.vocab_size", "300", 300),
        ("data.separate_vocabularies", None, True),
        ("model.preset", "tiny", "tiny"),
        ("model.gated", None, True),
        ("model.scale_embeddings", False, False),
        ("model.rotary_base", "500", 500.0),
        ("training.start_from", "x", "x"),
        ("training.warmup_steps", "3", 3),
        ("training.memory", "16GB", 16.0),
        ("training.memory", " 0.5 ", 0.5),
    ],
)
def test_keys_come_to_their_tables(monkeypatch, key, typed, value):
    given = []
    import_module("mlx_transformer.training.trainer")  # if it came later, it would keep the replaced function
    monkeypatch.setattr("mlx_transformer.training.recipe.load_recipe", lambda path, tables, run: given.append(tables))
    name = key.split(".")[1]
    spelled = RecipeKeys.RENAMED.get(name, f"--{name.replace('_', '-')}")
    flags = [spelled.replace("--", "--no-", 1)] if typed is False else [spelled] if typed is None else [spelled, typed]
    from mlx_transformer.commands.app import invoke

    with pytest.raises(AttributeError):  # no recipe came back
        invoke("mlx-transformer", ["train", "--dry-run", *flags])
    (tables,) = given
    assert {f"{t}.{n}": v for t, keys in tables.items() for n, v in keys.items() if v is not None} == {key: value}


def test_an_output_is_given_once(tmp_path: Path):
    from mlx_transformer.commands.app import invoke

    with pytest.raises(UserError, match="OUT is given twice: a, and --out b"):
        invoke("mlx-transformer", ["export", "model", "a", "--out", "b"])
    with pytest.raises(UserError, match="Missing argument 'OUT', or option '--out'"):
        invoke("mlx-transformer", ["export", "model"])
    for given in (["nowhere", str(tmp_path / "a")], ["nowhere", "-o", str(tmp_path / "a")]):
        with pytest.raises(UserError, match="nowhere: no such folder"):
            invoke("mlx-transformer", ["export", *given])
