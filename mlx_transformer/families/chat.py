"""Chat templates of published folders.

chat_template.jinja                       the template; beside it additional_chat_templates/NAME.jinja
tokenizer_config.json                     chat_template: the text, or [{"name": ..., "template": ...}]
chat_template.json                        {"chat_template": ...}, of processors

The first file that has one counts, as in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_transformer.core.tokenizer_files import CHAT_TEMPLATE
from mlx_transformer.generation.settings import CHAT_TEMPLATES, DEFAULT, SPECIAL_TOKENS, Settings
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import optional_object, read_text

from .languages import content_of

ADDITIONAL, OF_PROCESSORS, KEY = "additional_chat_templates", "chat_template.json", "chat_template"


def read_chat(path: Path, settings: Mapping[str, Any]) -> Settings:
    """Return a folder's templates and the tokens that they read, as settings of generation; {} if it has no template.
    settings: tokenizer_config.json and special_tokens_map.json. `UserError` for a template that is none."""
    files = {DEFAULT: path / CHAT_TEMPLATE} if (path / CHAT_TEMPLATE).is_file() else {}
    files |= {file.stem: file for file in sorted((path / ADDITIONAL).glob("*.jinja"))}
    templates = {name: read_text(file) for name, file in files.items()}
    if not templates:
        found = settings.get(KEY) or optional_object(path / OF_PROCESSORS).get(KEY)
        templates = _named(found, path) if found else {}
    if not templates:
        return {}
    tokens = {name: content_of(value) for name, value in settings.items() if name.endswith("_token") and value}
    more = settings.get("extra_special_tokens")
    tokens |= {name: content_of(value) for name, value in more.items()} if isinstance(more, dict) else {}
    tokens = {name: text for name, text in tokens.items() if isinstance(text, str) and text}
    return {CHAT_TEMPLATES: templates, **({SPECIAL_TOKENS: tokens} if tokens else {})}


def _named(found: Any, path: Path) -> dict[str, str]:
    """Return the templates of one text, of [{"name": ..., "template": ...}], or of {name: text}."""
    if isinstance(found, list) and all(isinstance(each, dict) for each in found):
        found = {each.get("name"): each.get("template") for each in found}
    templates: Any = {DEFAULT: found} if isinstance(found, str) else found
    texts = [*templates, *templates.values()] if isinstance(templates, dict) else [None]
    if not all(isinstance(text, str) for text in texts):
        raise UserError(f"{path}: its {KEY} is no text, and no list of names and templates")
    return templates
