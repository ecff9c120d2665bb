"""Sphinx for one language of the site, which SITE_LANGUAGE names; `.ci/site.py` writes the pages and runs it."""

from __future__ import annotations

import os
import re

from sphinx.application import Sphinx
from sphinx.search.en import SearchEnglish

CHINESE = os.environ["SITE_LANGUAGE"] == "zh"
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
html_title = project
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = [("site.js", {"defer": "defer"})]
templates_path = ["templates"]
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "language.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
html_theme_options = {"top_of_page_buttons": []}
html_copy_source = False
html_show_copyright = False
html_use_index = False
html_domain_indices = False
html_show_search_summary = False  # it would fetch pages, which a browser refuses from a folder


class ChineseSearch(SearchEnglish):
    """Chinese is indexed by its characters and pairs of characters, so that a search finds any words, also new ones."""

    lang = "zh"
    language_name = "Chinese"
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
                words += [*piece, *map("".join, zip(piece, piece[1:], strict=False))]
            else:
                words.append(piece)
        return words


def setup(app: Sphinx) -> None:
    """Let the Chinese edition be searched."""
    app.add_search_language(ChineseSearch)
