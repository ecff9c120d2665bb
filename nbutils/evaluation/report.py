"""The report of an evaluation as one HTML file that opens by itself: no network, no script, light and dark.

Everything a learner or a model wrote is escaped, and private data in it masked: pages are sent around.
Not here: any number that was not measured elsewhere.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbutils import record
from nbutils.data.text import shown
from nbutils.evaluation.comparing import SHOWN, Outcome
from nbutils.evaluation.drawing import as_svg
from nbutils.evaluation.exam import Exam
from nbutils.evaluation.scores import is_exact, spoken
from nbutils.paths import write_text

if TYPE_CHECKING:
    from nbutils.lessons import Lesson

SAMPLES, WORST = 6, 6
LONGEST = 1200  # characters of a text that are shown
STYLE = """
:root { color-scheme: light dark; --ink: #1c2330; --soft: #5d6675; --line: #d9dee6; --card: #f5f7fa; --page: #fff;
  --good: #13733a; --bad: #b3261e; --calm: #8a6100; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --soft: #9aa4b2; --line: #39414d; --card: #1f252d;
  --page: #15191f; --good: #5fd08a; --bad: #ff8a80; --calm: #f0c060; } }
body { margin: 0 auto; max-width: 960px; padding: 24px 20px 60px; color: var(--ink); background: var(--page);
  font: 15px/1.6 system-ui, "PingFang SC", "Microsoft YaHei", "Noto Sans CJK SC", sans-serif; }
h1 { font-size: 22px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 36px 0 8px; } p { margin: 6px 0; }
.soft { color: var(--soft); }
.verdict { border-left: 6px solid var(--tone); background: var(--card); padding: 14px 18px; margin: 18px 0;
  border-radius: 4px; } .verdict b { font-size: 20px; color: var(--tone); }
.helped, .kept { --tone: var(--good); } .harmed, .forgot { --tone: var(--bad); } .no, .unclear { --tone: var(--calm); }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: 5px 14px 5px 0; border-bottom: 1px solid var(--line); }
td.n { white-space: nowrap; } small { color: var(--soft); font-size: 12px; }
th { font-weight: 600; color: var(--soft); } svg { width: 100%; min-width: 600px; height: auto; }
.sample { border: 1px solid var(--line); border-radius: 6px; padding: 10px 14px; margin: 12px 0; }
.sample div { display: grid; grid-template-columns: 96px 1fr; gap: 10px; padding: 2px 0; }
.sample pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; font: inherit; }
.right::before { content: "✓ "; color: var(--good); } .wrong::before { content: "✗ "; color: var(--bad); }
@media (max-width: 560px) { .sample div { grid-template-columns: 1fr; gap: 0; } .sample span { font-size: 13px; } }
"""


def write_report(path: Path, run: str, exam: Exam, outcome: Outcome, about: Mapping[str, Any]) -> Path:
    """Write the report; `about` says how it was measured (card, versions, dtype)."""
    parts = [
        f"<h1>Did the tuning help? Run {_safe(run)}</h1>",
        f"<p class=soft>{datetime.now():%Y-%m-%d %H:%M}, {len(exam.rows)} held-back rows</p>",
        _verdict(outcome), "<h2>The numbers</h2>", _table(outcome), f"<div class=wide>{as_svg(outcome)}</div>",
        "<h2>General knowledge</h2>" if outcome.forgetting else "", _general(outcome),
        "<h2>Side by side</h2>", _samples(exam, outcome, range(min(SAMPLES, len(exam.rows)))),
        "<h2>The worst answers after the tuning</h2>", _samples(exam, outcome, worst(outcome)),
        "<h2>How it was measured</h2>", _method(exam, outcome, about),
    ]  # fmt: skip
    title = f"<title>Evaluation of {_safe(run)}</title>"
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">{title}'
    page = (
        f'<!doctype html><html lang="en"><head>{head}<style>{STYLE}</style></head><body>{"".join(parts)}</body></html>'
    )
    write_text(path, page.encode("utf-8", "replace").decode("utf-8") + "\n")
    return path


def about(lesson: Lesson) -> dict[str, Any]:
    """The machine and the packages a lesson ran with."""
    versions = ", ".join(f"{name} {number}" for name, number in record.versions().items())
    card = str(lesson.card) if lesson.card else "CPU only"
    return {"model": lesson.model_name, "machine": f"{lesson.platform.name}, {card}", "versions": versions}


def worst(outcome: Outcome, count: int = WORST) -> list[int]:
    """The rows the tuned model gets most wrong, those first that were right before."""
    tuned, base = outcome.tuned.scores, outcome.base.scores["exact_match"]
    wrong = [row for row, right in enumerate(tuned["exact_match"]) if not right]
    return sorted(wrong, key=lambda row: (-base[row], tuned["rouge_l"][row]))[:count]


def _safe(value: Any) -> str:
    return html.escape(str(value))


def _verdict(outcome: Outcome) -> str:
    verdict = outcome.verdict
    flags = "".join(f"<p>⚠ {_safe(flag)}</p>" for flag in verdict.flags)
    todo = f"<p><i>To do:</i> {_safe(verdict.todo)}</p>" if verdict.todo else ""
    kind = verdict.word.split()[0]
    return f"<div class='verdict {kind}'><b>{_safe(verdict.headline)}</b><p>{_safe(verdict.why)}</p>{todo}{flags}</div>"


def _general(outcome: Outcome) -> str:
    kept = outcome.forgetting
    if kept is None:
        return ""
    asked = f"{len(outcome.general[0].answers)} everyday questions in Chinese and English"
    told = f"<p>{_safe(kept.told)}</p><p class=soft>{asked}</p>"
    return f"<div class='verdict {kept.word}'><b>{kept.word}</b>{told}</div>"


def _table(outcome: Outcome) -> str:
    """Means with their intervals below them, so that the table also fits a phone turned sideways."""
    rows, body = outcome.table(), ""
    head = "".join(f"<th>{_safe(name)}</th>" for name in rows[0])
    for score, row in zip(SHOWN, rows, strict=True):
        name, *cells = row.values()
        numbers = "".join(f"<td class=n>{_two_lines(cell)}</td>" for cell in cells)
        body += f"<tr><td>{_safe(name)}<br><small>{_safe(SHOWN[score][2])}</small></td>{numbers}</tr>"
    return f"<div class=wide><table><tr>{head}</tr>{body}</table></div>"


def _two_lines(cell: str) -> str:
    mean, bracket, interval = cell.partition(" [")
    return f"{_safe(mean)}<br><small>[{_safe(interval)}</small>" if bracket else _safe(mean)


def _samples(exam: Exam, outcome: Outcome, rows: Sequence[int]) -> str:
    return "".join(_sample(exam, outcome, row) for row in rows) or "<p>None: every answer is right.</p>"


def _sample(exam: Exam, outcome: Outcome, row: int) -> str:
    wanted = exam.references[row]
    lines = [_line("question", _text(exam.questions[row][-1]["content"])), _line("wanted", _text(wanted))]
    for result in outcome.results:
        text = result.texts[row]
        mark = "right" if is_exact(text, wanted) else "wrong"
        lines.append(_line(result.name, _text(spoken(text) or "(nothing)"), mark))
    return f"<div class=sample>{''.join(lines)}</div>"


def _line(name: str, text: str, mark: str = "") -> str:
    return f"<div><span class=soft>{_safe(name)}</span><pre class='{mark}'>{_safe(text)}</pre></div>"


def _text(value: Any) -> str:
    text = "\n".join(map(shown, str(value or "").split("\n")))
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} … ({len(text)} characters)"


def _method(exam: Exam, outcome: Outcome, about: Mapping[str, Any]) -> str:
    left_out = f"; {exam.left_out} more were too long for the model" if exam.left_out else ""
    told = {
        "rows": f"{len(exam.rows)}, the same for every model, held back from training{left_out}",
        "decoding": f"greedy, at most {exam.max_new_tokens} new tokens, {exam.dtype}; thinking: {exam.mode}",
        "answers by": ", ".join(f"{one.name}: {one.by}" for one in outcome.results),
        "intervals": "95 %: Wilson's for shares of rows (exact match, stopped), bootstrap over rows for the rest; "
        "differences are paired, row by row",
        "tests": "exact McNemar for right or wrong, sign-flip permutation for the rest",
        "content": "the score of an answer minus its mean score against the references of five other rows",
        "verdict": "helped only if content (exact match or ROUGE-L) rises: 97.5 % interval above 0, p < 0.025",
        **about,
    }  # fmt: skip
    body = "".join(f"<tr><td class=soft>{_safe(name)}</td><td>{_safe(value)}</td></tr>" for name, value in told.items())
    return f"<div class=wide><table>{body}</table></div>"
