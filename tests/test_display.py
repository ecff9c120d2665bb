"""Tables, plots and live numbers, plain without a frontend; the chat: streamed, stoppable, printed without one."""

import json
import math
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import wcwidth
from support import ESCAPES, steers, wait_for
from transformers import AutoModelForCausalLM, AutoTokenizer

from nbutils import chat, chat_widget, display, evaluation, figures, files
from nbutils.hardware import Choice


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a kernel with someone at its frontend displays."""
    import IPython.display

    shown: list[Any] = []
    monkeypatch.setattr(display, "in_kernel", lambda: True)
    monkeypatch.setattr(display, "watched", lambda: True)
    monkeypatch.setattr(IPython.display, "display", lambda page, **_: shown.append(page))
    return shown


def test_a_table_is_text_outside_a_notebook(capsys: Any) -> None:
    display.show_table([{"question": "三个苹果", "base": "✗ x"}, {"question": "b", "base": "c"}], "Before")
    assert capsys.readouterr().out == "Before\nquestion  base\n三个苹果  ✗ x\nb         c\n"
    long_answer = "x" * display.TABLE_WIDTH
    display.show_table([{"question": "a", "base": long_answer}, {"question": "b", "base": "c"}], "Before")
    assert capsys.readouterr().out == f"Before\n  question: a\n  base: {long_answer}\n\n  question: b\n  base: c\n\n"
    display.show_table([{"question": "果" * 70}])  # 140 wide, with 70 characters
    assert "question: 果" in capsys.readouterr().out
    display.show_facts({"steps": 150, "loss": 0.002})
    assert capsys.readouterr().out.split() == ["what", "value", "steps", "150", "loss", "0.002"]
    assert display.aligned([{"a": 1, "long": "x"}, {"a": 222, "long": ""}]) == "a    long\n1    x\n222"
    assert display.aligned([{"显存": 1, "b": "x"}, {"显存": "秩 8", "b": ""}]) == "显存  b\n1     x\n秩 8"
    text = "显存 24 GB，用 QLoRA 训练。 " * 3 + "a_very_long_name_without_any_space"
    lines = display.wrap(text, 20)
    assert max(map(wcwidth.width, lines)) == 20
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    assert display.wrap("选 Run All，或改", 9) == ["选 Run", "All，或改"], "a mark stays with a Latin word too"


def test_chinese_prose_is_not_broken_at_its_few_spaces(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "120 题里完全答对的，微调前 0 题，微调后 120 题。" * 9
    monkeypatch.setenv("NBUTILS_LANG", "zh")
    assert display.prose(text) == text
    monkeypatch.setenv("NBUTILS_LANG", "en")
    assert max(map(len, display.prose("word " * 99).splitlines())) <= display.WRAPPED_WIDTH


def test_answers_stand_beside_the_question_and_the_expected_one(capsys: Any, notebook: list[Any]) -> None:
    row = [{"role": "system", "content": "s"}, {"role": "user", "content": "q?"}, {"role": "assistant", "content": "e"}]
    display.show_answers([{"messages": row}], before=["b"], after=["<a>"])
    assert notebook[0]["text/plain"] == "\nquestion  expected  before  after\nq?        e         b       <a>"
    assert "<td" in notebook[0]["text/html"] and "&lt;a&gt;" in notebook[0]["text/html"]


def test_choices_are_escaped_html_in_a_notebook(notebook: list[Any]) -> None:
    choices = {
        "lora.r": Choice(16, "room <enough>"),
        "course.rows": Choice(2, "one"),
        "sft.num_train_epochs": Choice(1, ""),
    }
    resolved = SimpleNamespace(name="tiny", choices=choices, set_values={})
    display.show_choices(resolved, only=("lora", "course.rows"))
    page, text = notebook[0]["text/html"], notebook[0]["text/plain"]
    assert "room &lt;enough&gt;" in page and page.count("<tr>") == 3 and "epochs" not in page + text
    assert text.splitlines()[1:] == ["lora.r       16     room <enough>", "course.rows  2      one"]
    resolved.set_values = {"sft.num_train_epochs": 1}
    display.show_choices(resolved, only=("lora",))
    assert "sft.num_train_epochs" in notebook[1]["text/plain"], "what SET names is always shown"


def test_a_plot_is_saved_and_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "logs/loss.png").symlink_to(tmp_path / "mine")
    display.plot_losses({"train": [(1, 3.0), (2, 1.0)], "validation": [(1, 3.0)]}, tmp_path / "logs/loss.png")
    display.plot_loss_examples(tmp_path / "logs/examples.png")
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (tmp_path / "logs").iterdir())
    assert (tmp_path / "mine").read_text() == "mine"
    assert [*json.loads(display.CURVES.read_text())] == ["healthy", "too_slow", "diverging", "overfitting"]


def test_figures_write_chinese_with_the_font_of_the_course(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib

    monkeypatch.setenv("NBUTILS_LANG", "zh")
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib warns of characters that no font has
        display.plot_loss_examples(tmp_path / "examples.png")
        display.plot_losses({"train": [(1, 3.0)]}, tmp_path / "loss.png", title="预训练损失：“验证集”→ 100 %")
        with pytest.raises(UserWarning, match="missing"):
            display.plot_losses({"train": [(1, 3.0)]}, tmp_path / "loss.png", title="\U0001fae0")


def test_a_figure_is_described_in_words_for_who_cannot_see_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import IPython.display
    import matplotlib.pyplot as plt

    shown: list[Any] = []
    monkeypatch.setattr(display, "in_kernel", lambda: True)
    monkeypatch.setattr(plt, "get_backend", lambda: "inline")
    monkeypatch.setattr(IPython.display, "display", lambda figure, metadata: shown.append(metadata["image/png"]["alt"]))
    figures.bars({"QLoRA": {"weights": 5.0}, "LoRA": {"weights": 14.2}}, "Memory of a 7B", "GiB", limit=15)
    display.plot_losses({"train": [(1, 3.0), (2, 1.0)], "validation": [(1, 3.0), (2, 0.5)]}, kept=2)
    bars, losses = shown
    assert bars == "Memory of a 7B, GiB, limit 15, weights, QLoRA, LoRA"
    for part in ("Loss", "step", "training", "validation", "kept: step 2", "best 0.5, step 2"):
        assert part in losses
    display.plot_losses({"train": [(1, 3.0)]}, title="a long word " * 60)
    assert len(shown[-1]) <= display.ALT_LENGTH


def test_headings_of_tables_are_translated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBUTILS_LANG", "zh")
    assert display.aligned([{"hours": 2, "GiB": 7}]).split() == ["小时", "GiB", "2", "7"]


def test_the_live_numbers_as_a_line_and_as_a_page() -> None:
    assert [display.clock(seconds) for seconds in (7, 59.6, 3723)] == ["0:00:07", "0:01:00", "1:02:03"]
    numbers = {"loss": "<1.5", "tokens/s": "2,000", "peak": "3.00 GiB", "time left": "0:00:42"}
    assert display.live_line(numbers) == "loss <1.5 · tokens/s 2,000 · peak 3.00 GiB · time left 0:00:42"
    losses = [(step, 1 / step) for step in range(1, 5001)] + [(5001, math.nan), (5002, math.inf)]
    page = display.live_page({"": "step 7", **numbers}, 3000, 6000, losses, [(10, 0.5)], ["[WARN] step 1 skipped"])
    assert "width:50.0%" in page and "&lt;1.5" in page and "[WARN] step 1 skipped" in page and "nan" not in page
    points = page.split('points="')[1].split('"')[0].split()
    assert 100 < len(points) <= display.POINTS + 1 and len(page) < 8000
    assert "<svg" not in display.live_page({}, 1, 9, [(1, 2.0)])


def test_of_all_a_lesson_prints_the_lines_of_a_training_reach_the_terminal(capsys: Any) -> None:
    lines, passed = display.LiveLines(), ["training · steps 1 to 30", "step 1 of 30 · loss 2.0", "[WARN] nan"]
    passed += ["trained 30 of 30 steps · peak 1 GiB", "第 1 / 30 步 · 损失 2.0"]
    text = "\n".join(["profile   tiny", *passed, "step by step", "q_proj: W + 2 · B · A", "safe: checkpoint 30\n"])
    lines.write(text[:50])
    lines.write(text[50:])
    lines.flush()
    assert capsys.readouterr().out.splitlines() == [f"  {line}" for line in passed]


def test_the_indented_lines_of_a_warning_reach_the_terminal_with_it(capsys: Any) -> None:
    lines = display.LiveLines()
    lines.write(
        "[WARN] model hub   does not answer. To do: check\n                   the network\n  {}\n   of a table\n"
    )
    shown = capsys.readouterr().out.splitlines()
    assert [line.strip() for line in shown] == ["[WARN] model hub   does not answer. To do: check", "the network"]


@pytest.mark.parametrize("watched", [True, False])
def test_bars_of_libraries_are_calm_where_no_one_watches(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, watched: bool
) -> None:
    import tqdm.auto

    monkeypatch.setattr(tqdm.auto, "tqdm", tqdm.auto.tqdm)  # put back afterwards
    monkeypatch.setattr(display, "in_kernel", lambda: True)
    monkeypatch.setattr(display, "watched", lambda: watched)
    display.calm_bars()
    list(tqdm.auto.tqdm(range(3), desc="short work"))
    assert ("short work" in capsys.readouterr().err) is watched


class Client:
    """An OpenAI client whose server streams words."""

    def __init__(self, words: str = "one two three", thoughts: str = "", name: str = "reasoning") -> None:
        self.words = words.split(" ")
        self.thoughts = {name: thoughts}
        self.requests: list[dict[str, Any]] = []
        self.fails = False
        self.chat = SimpleNamespace(completions=self)

    @contextmanager
    def create(self, **request: Any) -> Iterator[Any]:
        self.requests.append(request)
        if self.fails:
            raise ConnectionError("refused")
        yield self.chunks()

    def chunks(self) -> Iterator[Any]:
        yield SimpleNamespace(choices=[SimpleNamespace(delta=SimpleNamespace(content=None, **self.thoughts))])
        for place, word in enumerate(self.words):
            yield SimpleNamespace(choices=[SimpleNamespace(delta=SimpleNamespace(content=" " * (place > 0) + word))])
        yield SimpleNamespace(choices=[])  # the chunk that has only the usage


def talk(client: Any, name: str = "tuned", **settings: Any) -> chat_widget.Talk:
    return chat_widget.Talk(client, name, **settings)


def finished(box: chat_widget.Box) -> str:
    """What the box shows, once the answer is there."""
    wait_for(lambda: box.stop.disabled, 5)
    return str(box.dialogue.value)


def test_the_next_question_knows_the_last_answer() -> None:
    client = Client()
    said = talk(client, opening=[{"role": "system", "content": "be brief"}], max_tokens=9)
    assert list(said.stream("你好"))[-1] == "one two three"
    list(said.stream("and?"))
    assert [message["role"] for message in client.requests[1]["messages"]] == ["system", "user", "assistant", "user"]
    assert {"model": "tuned", "max_tokens": 9, "stream": True}.items() <= client.requests[0].items()


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_thoughts_are_shown_as_they_come_and_are_no_part_of_the_dialogue(name: str) -> None:
    said = talk(Client("so: 4", thoughts="two and two", name=name))
    first, *_, last, _ = said.stream("2 + 2?")
    assert first == "<think>two and two"
    assert last == "<think>two and two</think>so: 4"
    assert said.history[-1]["content"] == "so: 4"


def test_a_model_in_this_process_answers_token_by_token_what_generate_does_and_stops() -> None:
    tokenizer = AutoTokenizer.from_pretrained(files.TINY_MODEL)
    model = AutoModelForCausalLM.from_pretrained(files.TINY_MODEL, dtype=torch.float32)
    renderer = chat.Renderer(tokenizer, "prompt_completion", stop_ids=chat.find_stop_ids(tokenizer, files.TINY_MODEL))
    said = chat_widget.LocalTalk(model, renderer, "Momo")
    question = {"role": "user", "content": "请送两箱苹果到杭州。"}
    *growing, answer = said.stream(question["content"])
    [generated] = evaluation.answer_rows(
        model, tokenizer, [{"messages": [question, {"role": "assistant", "content": "."}]}]
    )
    assert answer == generated
    assert len(growing) > 3
    assert said.history == [question, {"role": "assistant", "content": answer}]

    stream = said.stream("And to Berlin?")
    first = next(stream)
    said.stop()
    assert list(stream) == []
    assert said.history[-1]["content"] == first


def test_where_nobody_can_type_the_dialogue_is_printed(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for language, printed in (("en", "you: 您好\ntuned: new words\n"), ("zh", "你：您好\ntuned：new words\n")):
        monkeypatch.setenv("NBUTILS_LANG", language)
        assert chat_widget.chat(talk(Client("new words")), "您好") is None
        assert capsys.readouterr().out == printed
    chat_widget.chat(talk(Client(f"words{ESCAPES}")), "hello")
    assert not steers(capsys.readouterr().out), "a model may have learned anything"


def test_in_a_terminal_one_chats_until_an_empty_line(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    typed = iter(["hello", "again", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    client = Client("new words")
    assert chat_widget.chat(talk(client), "您好") is None
    assert len(client.requests) == 1, "nobody types here"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert chat_widget.chat(talk(client), "您好", live=False) is None
    assert len(client.requests) == 2
    capsys.readouterr()
    assert chat_widget.chat(talk(client), "您好") is None
    assert len(client.requests) == 5
    assert capsys.readouterr().out.splitlines()[-2:] == ["tuned: new words"] * 2, "each piece is printed once"
    assert next(typed, None) is None


def test_a_box_is_shown_where_somebody_watches(notebook: list[Any]) -> None:
    box = chat_widget.chat(talk(Client()), "hello")
    assert box and notebook == [box.whole] and not box.talk.history
    assert chat_widget.chat(talk(Client()), "hello", live=False) is None


def test_a_box_asks_and_escapes_what_it_shows() -> None:
    client = Client("old <b> 话")
    box = chat_widget.Box(talk(client))
    box.question.value = " 订单 "
    box.question._handle_string_msg(box.question, {"event": "submit"}, [])  # what the browser sends on Enter
    assert "old &lt;b&gt; 话" in finished(box) and box.question.value == ""
    assert client.requests[0]["messages"][-1]["content"] == "订单"


class SilentServer(BaseHTTPRequestHandler):
    """Streams one word as vLLM does, then says nothing until the connection is closed."""

    protocol_version = "HTTP/1.1"
    left: ClassVar[list[bytes]] = []  # what was read in the end: nothing, of a closed connection

    def do_POST(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        piece = b'data: {"choices": [{"index": 0, "delta": {"content": "word"}}]}\n\n'
        self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        self.rfile.read(int(self.headers["Content-Length"]))
        self.left.append(self.rfile.read(1))
        self.close_connection = True


def test_stop_ends_an_answer_also_while_the_server_is_silent() -> None:
    from openai import OpenAI

    with ThreadingHTTPServer(("127.0.0.1", 0), SilentServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        client = OpenAI(base_url=f"http://127.0.0.1:{server.server_port}", api_key="x", max_retries=0)
        box = chat_widget.Box(talk(client))
        box.ask("tell me")
        wait_for(lambda: "word" in box.lines[-1][1], 5)
        box.ask("me too")  # not while it answers
        box.stop.click()
        assert "word [stopped]" in finished(box) and box.talk.history[-1]["content"] == "word"
        wait_for(lambda: SilentServer.left == [b""], 5)  # the server sees that nobody listens
        server.shutdown()


def test_a_problem_is_shown_in_the_column_and_the_box_lives() -> None:
    client = Client()
    client.fails = True
    box = chat_widget.Box(talk(client))
    box.ask("hello")
    assert "ConnectionError: refused" in finished(box)
    client.fails = False
    box.ask("again")
    assert "one two three" in finished(box) and len(client.requests[1]["messages"]) == 1
