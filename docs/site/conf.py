"""Sphinx for one language of the site, which SITE_LANGUAGE names; `.ci/website.py` writes the pages and runs it."""

from __future__ import annotations

import os
import re
from itertools import pairwise

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.search.en import SearchEnglish

CHINESE = os.environ["SITE_LANGUAGE"] == "zh"
BREAK = re.compile(r"(?<=[\u3001-\u9fff\uff01-\uff5e])\n(?=[\u3001-\u9fff\uff01-\uff5e])")
PIECES = re.compile(r"[\u3400-\u9fff]+|[^\W\u3400-\u9fff]+")  # Chinese characters, or a word

project = "微调 Qwen 和 GLM" if CHINESE else "Fine-tune Qwen and GLM"
language = "zh_CN" if CHINESE else "en"
extensions = ["myst_nb"]
exclude_patterns = ["figures"]
myst_heading_anchors = 4
nb_execution_mode = "off"
nb_merge_streams = True
nb_ipywidgets_js: dict[str, str] = {}  # the outputs hold none, and these would come from the network

html_theme = "furo"
pygments_dark_style = "github-dark"
html_title = project
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = [("site.js", {"defer": "defer"})]
templates_path = ["templates"]
html_theme_options = {"top_of_page_buttons": []}
html_copy_source = False
html_show_copyright = False
html_use_index = False
html_domain_indices = False
html_show_search_summary = False  # it would fetch pages, which a browser refuses from a folder


class ChineseSearch(SearchEnglish):
    """Chinese is indexed by its characters and pairs of characters, so that a search finds any words, also new ones."""

    lang = "zh"
    language_name = "English"  # of the stemmer, for the words in Latin letters
    js_splitter_code = r"""
function splitQuery(query) {
  const pairs = (piece) => Array.from({length: piece.length - 1}, (_, start) => piece.slice(start, start + 2));
  const pieces = query.match(/[\u3400-\u9fff]+|(?:(?![\u3400-\u9fff])[\p{L}\p{N}_])+/gu) || [];
  return pieces.flatMap((piece) => /[\u3400-\u9fff]{2}/.test(piece) ? pairs(piece) : [piece]);
}
"""

    def split(self, input: str) -> list[str]:
        """The words of a text; of Chinese, each character and each pair of neighbours."""
        words = []
        for piece in PIECES.findall(input):
            if "\u3400" <= piece[0] <= "\u9fff":
                words += [*piece, *map("".join, pairwise(piece))]
            else:
                words.append(piece)
        return words


def join_lines(app: Sphinx, page: nodes.document) -> None:
    """A line break between Chinese characters is no space."""
    for text in list(page.findall(nodes.Text)):
        around = text.parent[max(text.parent.index(text) - 1, 0) :][:3]
        if text == "\n" and len(around) == 3 and BREAK.search("".join(part.astext() for part in around)):
            text.parent.remove(text)


def setup(app: Sphinx) -> None:
    """Let the Chinese edition be searched, and its lines be joined."""
    app.add_search_language(ChineseSearch)
    app.connect("doctree-read", join_lines)
