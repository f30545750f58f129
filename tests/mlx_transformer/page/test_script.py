"""Scripts of a page: modules become one script that computes the same, shorter."""

from __future__ import annotations

from mlx_transformer.page.script import compact, compact_style, joined

SOURCE = """// a comment
const a = (x) => x + +1 - -x; // another
/* and /* one */
const b = 'a // b  c' + "d  /* e */";
const c = `t  ${a({ x: `in  ${b}` })} // t`;
const d = b.replace(/ +[/'"]/g, '').length / 2 / 1;
return typeof d;
"""


def test_spaces_and_comments_go_and_texts_stay():
    assert compact(SOURCE) == (
        "const a=(x)=>x+ +1- -x;const b='a // b  c'+\"d  /* e */\";const c=`t  ${a({x:`in  ${b}`})} // t`;"
        "const d=b.replace(/ +[/'\"]/g,'').length/2/1;return typeof d;"
    )
    assert compact("const f = () => { a(); b(); };\nfor (;;) { c; }\n") == "const f=()=>{a();b()};for(;;){c}"
    assert compact("if (a)\n  b = c\n++d\n") == "if(a)\nb=c\n++d"


def test_modules_are_joined_in_the_order_of_their_needs(tmp_path):
    (tmp_path / "a.js").write_text("import { b as c } from './b.js';\n\nexport const a = c + 1;\n")
    (tmp_path / "b.js").write_text("export const b = 1;\nexport class D {}\n")
    (tmp_path / "main.js").write_text("import { a } from './a.js';\nimport { b } from './b.js';\n\nuse(a, b);\n")
    text = joined(tmp_path / "main.js")
    assert text.index("const b=1;") < text.index("const{b:c}=m0;") < text.index("use(a,b);")
    assert "return{b,D}})()" in text
    assert text.count("class D") == 1


def test_a_style_sheet_keeps_what_selects():
    assert compact_style("a b { c: d e;\n  f: g; }\n  h > i { j: k; }\n") == "a b{c:d e;f:g}h > i{j:k}"
