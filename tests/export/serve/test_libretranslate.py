"""LibreTranslate's forms: what its clients send is answered as they read it, or refused."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from html import escape, unescape
from pathlib import Path
from urllib.parse import urlencode

import pytest
from serving import LINES, STREAM, client, pairs
from starlette.testclient import TestClient

from export.serve.app import App
from export.serve.batching import Batcher
from export.serve.markup import Frame
from export.serve.models import Named
from export.settings import ServeSettings
from mlx_transformer.generation.alignment import Alignment
from mlx_transformer.generation.translate import Translation
from mlx_transformer.system.errors import UserError

TAGS = re.compile(r"<!--.*?-->|<script.*?</script>|<style.*?</style>|<[!/a-z](?:[^<>\"']|\"[^\"]*\"|'[^']*')*>")
TO = {"source": "en", "target": "de"}


@pytest.fixture(scope="module")
def shared(text_model):
    """en-de and de-en by one model, fr-en by another whose translations begin with a mark."""

    class Marked:
        config, tokenizer, translator = text_model.config, text_model.tokenizer, text_model.translator
        has_steps, depends_on_batch, generation = True, False, text_model.generation

        def generate(self, ids, **options):
            return [[20, *row[:3]] for row in text_model.generate(ids, **options)]

    with client(pairs(en_de=text_model, de_en=text_model, fr_en=Marked())) as (http_, _):
        yield http_


def lines_of(model, text, **options):
    return "\n".join(model.translate(text.split("\n"), overlong="split", **options))


def test_a_text_and_a_list(shared, text_model):
    for q in ("one two", LINES, "one two\n\nthree. four", ["x\ny", ""], "one two three. " * 40):
        answer = shared.post("/translate", json={"q": q, **TO, "format": "text"})
        wanted = lines_of(text_model, q) if isinstance(q, str) else [lines_of(text_model, text) for text in q]
        assert (answer.status_code, answer.json()) == (200, {"translatedText": wanted})


def test_a_form_is_read_as_json_is(shared, text_model):
    head = {"Content-Type": "application/x-www-form-urlencoded; charset=UTF-8"}
    body = urlencode({"q": "größer & 東京", **TO, "beam": 3, "early_stopping": "true", "max_new_tokens": 9})
    answer = shared.post("/translate", content=body, headers=head).json()
    wanted = text_model.translate(["größer & 東京"], beam=3, early_stopping=True, max_new_tokens=9)
    assert answer == {"translatedText": wanted[0]}
    answer = shared.post("/translate", content=f"q=x&q=one&{urlencode(TO)}", headers=head).json()
    assert answer == {"translatedText": text_model.translate(["x", "one"])}
    one = shared.post("/translate", content='{"text": "x", "source": "en"}', headers=head).json()
    assert one == {"translations": text_model.translate(["x"])}  # curl -d says so of JSON
    assert shared.post("/translate", content="text=x&source=en", headers=head).json() == one
    for body, message in (("q=x&source=en&source=de", "given twice"), ("q=%ff", "no form"), ("", "is needed")):
        answer = shared.post("/translate", content=body, headers=head)
        assert (answer.status_code, message in answer.json()["error"]) == (400, True), answer.text


def test_a_form_in_parts(shared, text_model):
    """As `curl -F` and pages send it."""
    fields = {"q": "größer & 東京", **TO, "format": "text", "beam": "3", "max_new_tokens": "9", "api_key": ""}
    answer = shared.post("/translate", files={name: (None, value) for name, value in fields.items()}).json()
    assert answer == {"translatedText": text_model.translate("größer & 東京", beam=3, max_new_tokens=9)}
    several = [("q", (None, "x")), ("q", (None, "one\r\ntwo")), *((name, (None, value)) for name, value in TO.items())]
    found = shared.post("/translate", files=several).json()["translatedText"]
    assert found == [text_model.translate("x"), "\n".join(text_model.translate(["one\r", "two"]))]
    part = '--b\r\nContent-Disposition: form-data; name="q"\r\n\r\nx\r\n'
    for kind, body, message in (
        ("multipart/form-data", part + "--b--", "names no boundary"),
        ("multipart/form-data; boundary=b", part, "no form of at most 1000 parts"),
        ("multipart/form-data; boundary=b", "", "no form of at most"),
        ("multipart/form-data; boundary=b", "x" + part + "--b--", "no form of at most"),
        ("multipart/form-data; boundary=b", part * 1001 + "--b--", "no form of at most"),
        ("multipart/form-data; boundary=b", part.replace("name", "no") + "--b--", "a part has no name"),
        ("multipart/form-data; boundary=b", part.replace('"q"', '"q"; filename="q"') + "--b--", "or is a file"),
        ('multipart/form-data; boundary="b"', part.encode().replace(b"x", b"\xff") + b"--b--", "is not UTF-8"),
        ("multipart/form-data; boundary=b", part + "--b--\r\nwhat follows is nothing", "source: is needed"),
    ):
        answer = shared.post("/translate", content=body, headers={"Content-Type": kind})
        assert (answer.status_code, message in answer.json()["error"]) == (400, True), (kind, answer.text)


HTML = """<!DOCTYPE html><!-- one > two --><style>p > b { x: "<i>" }</style>
<p class="a > b">one two</p> &copy; <a href='x'>three &amp;
  four&nbsp;five</a>. <br/>1 &lt; 2<script>if (a < b) one()</script>"""


def test_markup_stays_and_what_stands_between_is_translated(shared, text_model):
    """As LibreTranslate's page has it, Mastodon and Discourse ask, and many browsers' add-ons."""
    lines = ["one two", "\xa9 three & four five .", "1 < 2"]
    answer = shared.post("/translate", json={"q": HTML, **TO, "format": "html"}).json()["translatedText"]
    texts = text_model.translate(lines, overlong="split")
    assert f'<p class="a > b">{escape(texts[0], quote=False)}</p>' in answer
    assert TAGS.findall(answer) == TAGS.findall(HTML)
    assert unescape(TAGS.sub("", answer)).split() == " ".join(texts).split()
    q = ["", "<br>", '<p class="green">Hello!</p>']
    answer = shared.post("/translate", json={"q": q, **TO, "format": "html", "alternatives": 2}).json()
    best = list(dict.fromkeys(t.text for t in text_model.n_best(["Hello!"], beam=3, n_best=3)[0]))
    written = [f'<p class="green">{escape(text, quote=False)}</p>' for text in best]
    assert answer == {"translatedText": ["", "<br>", written[0]], "alternatives": [[], [], written[1:]]}


def filled(html: str, translate: Callable[[str], str] = str.upper, links: list[tuple[int, int]] | None = None) -> str:
    frame = Frame.of_html(html)
    translations = []
    for line in frame.lines:
        text = translate(line)
        alignment = None if links is None else Alignment(links, len(line.split()), len(text.split()))
        translations.append(Translation(text, 0.0, alignment))
    return frame.filled(translations)


@pytest.mark.parametrize(
    ("html", "expected"),
    [
        ("<p>Hello <b>big</b> world</p>", "<p>HELLO <b>BIG</b> WORLD</p>"),
        ("w<b>or</b>d &lt;<i> a </i> b", "<b>WORD</b> &lt; <i>A</i> B"),
        (" <b> one </b> ", " <b>ONE</b> "),
        # kept as they are
        ("Run <code>x = 1</code> now", "RUN <code>x = 1</code> NOW"),
        ("<kbd>a</kbd> or <samp>b</samp> or <var>c</var>", "<kbd>a</kbd> OR <samp>b</samp> OR <var>c</var>"),
        ("<pre>a <b>b</b></pre> c <textarea>d <b></textarea>", "<pre>a <b>b</b></pre> C <textarea>d <b></textarea>"),
        ("<p translate=no>a <i>b</i></p><p>c", "<p translate=no>a <i>b</i></p><p>C"),
        ('a <span class="x notranslate">b <span>c</span></span> d', None),
        ("a<!-- b --> c <script>1 < 2</script>", "A<!-- b --> C <script>1 < 2</script>"),
        # blocks end sentences, within inline elements too
        ('<a href="u"><div>one</div></a> two<br>three', '<a href="u"><div>ONE</div></a> TWO<br>THREE'),
        # unclosed, and closed without being open
        ("<p>one <b>two</p><p>three</b>", "<p>ONE <b>TWO</b></p><p>THREE<b></b>"),
        ("<div><section>x</div> y</div>", "<div><section>X</section></div> Y<div></div>"),
        ("<p>a <code>x</p><p>b", "<p>A <code>x</code></p><p>B"),
        ("<ul><li>a<li>b</ul>c</br>", "<ul><li>A<li>B</ul>C</br>"),
        ("a <b><i>b", "A <b><i>B</i></b>"),
        ("1 < 2 <b", "1 &lt; 2 &lt;B"),
        # what would hide the end tags behind it
        ("<p>a <i>b<!-- c", "<p>A <i>B<!-- c--></i>"),
        ("<i>a<textarea>b", "<i>A<textarea>b</textarea></i>"),
        ("<b>a <svg>x <y", "<b>A <svg>x &lt;y</svg></b>"),
        ("a</textarea>", "A<textarea></textarea>"),
    ],
)
def test_elements_of_html(html, expected):
    """In upper case, to see what was translated."""
    expected = expected or html.replace("a <", "A <").replace("> d", "> D")
    assert " ".join(filled(html).split()) == " ".join(expected.split())


def test_tags_follow_the_alignment():
    reverse = lambda line: " ".join(reversed(line.split()))  # noqa: E731
    links = [(0, 3), (1, 2), (2, 1), (3, 0)]
    assert filled("one <b>two <i>three</i></b> four", reverse, links) == "four <b><i>three</i> two</b> one"
    assert filled("<b>one</b> two <a>three</a> four", reverse, links) == "four <a>three</a> two <b>one</b>"
    assert filled("one <code>x</code> two three four", reverse, links) == "four three two one <code>x</code>"
    # words of one element that lie apart take those between them in, and never cross another element
    assert filled("<b>one two</b> <i>three</i>", lambda _: "a b c", [(0, 0), (1, 2), (2, 1)]) == "<b>a b c</b> <i></i>"


NESTED = ["<a>", "<a>x", "<b><p>", "<i>x</b>", "<code>", "<code>x</b>", "<div><b>x", "</p>"]


@pytest.mark.parametrize("piece", ["<a ", "<a x='", "<a x=\"'", "<script", "<!--", "</script ", "&amp", "<", *NESTED])
def test_no_markup_takes_long_and_all_of_it_stays(piece):
    """Each of these was read quadratically by one program or another, which would be minutes here."""
    text = piece * (50_000 // len(piece))
    answer = filled(text, str)
    tags = Counter(re.findall("</?[a-z]+>", answer))
    assert all(tags[tag] >= count for tag, count in Counter(re.findall("</?[a-z]+>", text)).items())


def test_alternatives(shared, text_model):
    for q in ("one two", ["x", "one two"]):
        answer = shared.post("/translate", json={"q": q, **TO, "alternatives": 3}).json()
        best = text_model.n_best([q] if isinstance(q, str) else q, beam=4, n_best=4)
        unlike = [list(dict.fromkeys(t.text for t in each)) for each in best]
        wanted = unlike[0] if isinstance(q, str) else unlike
        if isinstance(q, str):
            assert answer == {"translatedText": wanted[0], "alternatives": wanted[1:]}
            assert wanted[1:]
        else:
            assert answer == {"translatedText": [w[0] for w in wanted], "alternatives": [w[1:] for w in wanted]}


def test_the_pair_chooses_the_model(shared, text_model):
    here, other = [
        shared.post("/translate", json={"q": "one two", "source": source, "target": "en"}).json()
        for source in ("de", "fr")
    ]
    assert here["translatedText"] == text_model.translate(["one two"])[0] != other["translatedText"]
    ours = shared.post("/translate", json={"text": "one two", "source": "fr"}).json()
    assert ours == {"translations": [other["translatedText"]]}
    assert "event: done" in shared.post(STREAM, json={"text": "x", "target": "de"}).text
    found = shared.post("/translate", json={"q": "one two", "source": "auto", "target": "de"}).json()
    assert found["detectedLanguage"] == {"confidence": 0, "language": "en"}
    assert shared.get("/languages").json() == [
        {"code": "de", "name": "de", "targets": ["en"]},
        {"code": "en", "name": "en", "targets": ["de"]},
        {"code": "fr", "name": "fr", "targets": ["en"]},
    ]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"q": "x"}, "source: is needed"),
        ({"q": "x", "source": "en"}, "target: is needed"),
        ({"q": "x", "source": "en", "target": "fr"}, "this server translates en-de, de-en, fr-en"),
        ({"q": "x", "source": "auto", "target": "en"}, "this server detects no languages"),
        ({"q": "x", "source": 1, "target": "en"}, "source: must be the code"),
        ({"q": 1, **TO}, "q: must be a string or a list"),
        ({"q": "x", **TO, "format": "odt"}, "format: must be text or html"),
        ({"q": "x", **TO, "format": ["html"]}, "format: must be text or html"),
        ({"q": "x", **TO, "alternatives": 64}, "alternatives: must be a whole number of at least 0, at most 63"),
        ({"q": "x", **TO, "alternatives": True}, "alternatives: must be"),
        ({"q": "x", **TO, "alternatives": 3, "beam": 2}, "n_best=4 is more than beam=2"),
        ({"q": "x", **TO, "text": "x"}, "text: does not go with q"),
        ({"q": "x", **TO, "n_best": 2}, "n_best: does not go with q"),
        ({"q": "x", **TO, "glossary": 2}, "'glossary': no such setting"),
        ({"text": "x"}, "source: several fit"),
        ({"text": "x", "target": "en"}, "source: several fit"),
    ],
)
def test_what_is_refused(shared, body, message):
    answer = shared.post("/translate", json=body)
    assert (answer.status_code, message in answer.json()["error"]) == (400, True), answer.text


def test_detect(text_model, shared):
    assert shared.post("/detect", json={"q": "x"}).json()["error"].endswith("give source: de, en, fr")
    assert shared.post(STREAM, json={"q": "x", **TO}).status_code == 400
    with client(pairs(en_de=text_model, en_fr=text_model)) as (http_, _):
        assert http_.post("/detect", data={"q": "x"}).json() == [{"confidence": 0, "language": "en"}]
        assert http_.post("/detect", json={"q": ["x"]}).status_code == 400
    with client(text_model) as (http_, _):
        answer = http_.post("/translate", json={"q": "x", **TO})
        assert (answer.status_code, "start it with: serve en-de=DIR" in answer.json()["error"]) == (400, True)
        assert http_.get("/languages").json() == []


def test_a_key_may_be_in_the_body(text_model, tmp_path):
    (tmp_path / "keys").write_text("secret\n")
    with client(pairs(en_de=text_model), ServeSettings(api_key_file=tmp_path / "keys")) as (http_, _):
        for key, status in (("secret", 200), ("other", 401), ("\ud800", 401), (None, 401), (["secret"], 401)):
            given = {} if key is None else {"api_key": key}
            assert http_.post("/translate", content=json.dumps({"q": "x", **TO, **given})).status_code == status, key
            assert http_.post("/detect", content=json.dumps({"q": "x", **given})).status_code == status
        refused = http_.post("/translate", json={"q": "x", **TO, "api_key": "secret"}, headers={"X-API-Key": "wrong"})
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
        assert http_.post(STREAM, json={"text": "x", "api_key": "secret"}).status_code == 401
        assert http_.get("/languages").status_code == 200
        error = http_.get("/v1/models").json()["error"]
        assert (error["code"], error["type"]) == ("invalid_api_key", "invalid_request_error")


def test_names(tmp_path):
    assert Named.of(["en-de=a", "zh-Hans:en=b", "stories=c"]) == [
        Named("en-de", Path("a"), ("en", "de")),
        Named("zh-Hans:en", Path("b"), ("zh-Hans", "en")),
        Named("stories", Path("c")),
    ]
    (tmp_path / "a=b").mkdir()
    assert Named.of([tmp_path / "a=b"])[0].name == "a=b"
    for arguments, message in (
        ([], "at least one"),
        (["en-de=a", "en-de=b"], "another model is called en-de"),
        (["x/a", "y/a"], "give each its own name"),
        (["=a"], "give a name and a model"),
    ):
        with pytest.raises(UserError, match=message):
            Named.of(arguments)


@pytest.mark.parametrize(
    ("names", "message"),
    [(["a=x", "b=y"], "give each its languages"), (["en-de=x", "en:de=y"], "another model translates en-de already")],
)
def test_translators_that_no_request_could_name(text_model, names, message):
    failures = []
    loaded = dict.fromkeys(Named.of(names), text_model)
    with TestClient(App(lambda: loaded, Batcher(8, 0, 8), failed=failures.append).asgi):
        pass
    assert message in str(failures[0])
