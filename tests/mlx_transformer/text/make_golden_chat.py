"""What `transformers` makes of conversations: texts, ids, and ids where messages spell control tokens.

PYTHONPATH=tests/helpers python tests/mlx_transformer/text/make_golden_chat.py     # transformers 5.24.0
"""

from __future__ import annotations

import datetime
import json
import tempfile
from pathlib import Path

import jinja2
import transformers
import transformers.utils.chat_template_utils as rendering
from chat_templates import CONVERSATIONS, INJECTED, TEMPLATES, TOKENS
from makers_tokenizers import makers_json


class Fixed(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2026, 1, 31)


def main() -> None:
    rendering.datetime = Fixed
    golden = {}
    for kind, template in TEMPLATES.items():
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "tokenizer.json"
            file.write_text(makers_json(kind))
            theirs = transformers.PreTrainedTokenizerFast(
                tokenizer_file=str(file), clean_up_tokenization_spaces=False, chat_template=template, **TOKENS[kind]
            )

        def made(each, begin=True, theirs=theirs, **options):
            """Return the text, its ids and, where the template refuses, null."""
            given = {"tools": each.tools, "add_generation_prompt": begin, **each.variables}
            try:
                return theirs.apply_chat_template(each.messages, **given, **options)
            except (jinja2.TemplateError, TypeError):
                return None

        golden[kind] = {
            name: [made(each, tokenize=False), made(each, begin=False, tokenize=False), made(each, return_dict=False)]
            for name, each in CONVERSATIONS.items()
        }
        golden[kind]["injected"] = [
            made(INJECTED, tokenize=False),
            made(INJECTED, sanitize_control_tokens=True, return_dict=False),
        ]
    lines = (f"{json.dumps(kind)}: {json.dumps(rows, separators=(',', ':'))}" for kind, rows in golden.items())
    (Path(__file__).parent / "golden_chat.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
