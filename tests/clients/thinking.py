"""A server whose engine is scripted, for what clients make of reasoning: the embedded model might never end its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.protocol import Submit
from tests.clients.features import ANSWER, SEEN, THOUGHT
from tests.support.server_thread import EOS, TOKENIZER, Site

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}\n{% endfor %}"
)


def reply(submit: Submit) -> list[int]:
    """Reasoning and an answer; another one to a conversation that has the reasoning of an earlier turn."""
    seen = f"<think>{THOUGHT}</think>" in TOKENIZER.decode(submit.prompt_ids)
    text = SEEN if seen else f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"
    return [*TOKENIZER.encode(text, add_special_tokens=False), EOS]


@contextmanager
def thinking_server(folder: Path) -> Iterator[str]:
    """Yield its address."""
    (folder / "template.jinja").write_text(TEMPLATE)
    # it reports nothing
    site = Site(folder, chat_template=str(folder / "template.jinja"), idle_timeout=300.0, hang_seconds=0.0)
    site.engine.reply = reply
    site.start()
    try:
        yield site.url
    finally:
        site.http.close()
        site.close()
