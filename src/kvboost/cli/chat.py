"""`kvboost chat`: a conversation in the terminal. Shows after each answer how much of its KV was found again."""

from __future__ import annotations

import json
import sys
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvboost.cli.options import ModelArgument, open_model, with_model_options
from kvboost.cli.run import usage_line
from kvboost.errors import InvalidRequest, KVBoostError, PromptTooLong

if TYPE_CHECKING:
    from rich.console import Console

    from kvboost.api.kvboost import KVBoost
    from kvboost.api.results import GenerationResult

COMMANDS = {
    "/help": "this list",
    "/reset": "forget the conversation, keep the system message",
    "/system TEXT": "set the system message and start over; without TEXT, remove it",
    "/stats": "what the engine counted",
    "/save FILE": "write the conversation as JSON messages",
    "/exit": "leave (or Ctrl-D)",
}

CONTINUED = "\\"
"""A line that ends with this goes on in the next one."""


class Conversation:
    """The messages so far. Invariant: after the system message, user and assistant take turns."""

    def __init__(self, llm: KVBoost, system: str | None, sampling: dict[str, Any]) -> None:
        self._llm = llm
        self._sampling = sampling
        self.system = system
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def ask(self, text: str) -> Generator[str | GenerationResult]:
        """The answer's pieces, then its result. What was shown becomes history, also when it is cut short.

        A refused question leaves the history as it was. Raises `KVBoostError`.
        """
        question = {"role": "user", "content": text}
        answer: list[str] = []
        try:
            stream: Any = self._llm.chat([*self.messages, question], stream=True, **self._sampling)
            with stream:
                for piece in stream:
                    answer.append(piece.text)
                    yield piece.text
                    if piece.result is not None:
                        yield piece.result
        finally:
            if answer:
                self.messages += [question, {"role": "assistant", "content": "".join(answer)}]

    def save(self, file: Path) -> None:
        file.write_text(json.dumps(self.messages, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@with_model_options(sampling=True)
def chat(
    model: ModelArgument,
    system: Annotated[str | None, typer.Option(help="System message.", show_default=False)] = None,
    *,
    model_options: dict[str, Any],
    sampling_options: dict[str, Any],
) -> None:
    """Talk with a model. Ctrl-C stops an answer, Ctrl-D leaves; /help lists the commands."""
    from rich.console import Console

    aside = Console(stderr=True, highlight=False)
    with open_model(model, model_options) as llm:
        if not getattr(llm.tokenizer, "chat_template", None):
            raise InvalidRequest("model", f"{model} has no chat template. Use: kvboost run {model} --raw PROMPT")
        conversation = Conversation(llm, system, sampling_options)
        if sys.stdin.isatty():
            caps = llm.capabilities
            aside.print(
                f"[bold]{model}[/] on the {caps.path} path, up to {llm.max_model_len:,} tokens. /help for help."
            )
        for line in _lines(aside):
            if line.startswith("/"):
                if not _command(line, conversation, llm, aside):
                    break
            else:
                _turn(line, conversation, aside)


def _lines(aside: Console) -> Iterator[str]:
    """What the user enters, without blank lines, until the end of input. On a terminal Ctrl-C clears the line."""
    terminal = sys.stdin.isatty()
    if terminal:
        import readline  # noqa: F401  # gives input() line editing and history
    parts: list[str] = []
    while True:
        try:
            part = input(("... " if parts else "> ") if terminal else "")
        except KeyboardInterrupt:
            parts.clear()
            aside.print("\n[dim]Ctrl-D or /exit leaves.[/]")
            continue
        except EOFError:
            if terminal:
                aside.print()
            part, ended = "", True
        else:
            ended = False
        if part.endswith(CONTINUED) and not ended:
            parts.append(part.removesuffix(CONTINUED))
            continue
        line = "\n".join([*parts, part]).strip()
        parts.clear()
        if line:
            yield line
        if ended:
            return


def _turn(line: str, conversation: Conversation, aside: Console) -> None:
    """One question and its answer. Errors are told and leave the conversation usable."""
    note = None
    try:
        with closing(conversation.ask(line)) as pieces:
            for piece in pieces:
                if isinstance(piece, str):
                    sys.stdout.write(piece)
                    sys.stdout.flush()
                else:
                    note = usage_line(piece)
    except KeyboardInterrupt:
        note = "stopped"
    except PromptTooLong as error:
        aside.print(f"The conversation is full: {error} /reset starts anew.", style="red", markup=False)
        return
    except KVBoostError as error:
        aside.print(str(error), style="red", markup=False)
        return
    sys.stdout.write("\n")
    sys.stdout.flush()
    aside.print(note, style="dim", markup=False)


def _command(line: str, conversation: Conversation, llm: KVBoost, aside: Console) -> bool:
    """Carry out a line that starts with a slash. False: leave."""
    name, _, argument = line.partition(" ")
    argument = argument.strip()
    if name in ("/exit", "/quit"):
        return False
    if name == "/reset":
        conversation.reset()
        aside.print("The conversation is forgotten; its KV is kept.", style="dim")
    elif name == "/system":
        conversation.system = argument or None
        conversation.reset()
        aside.print("New system message." if argument else "No system message.", style="dim")
    elif name == "/stats":
        _print_stats(llm, aside)
    elif name == "/save" and argument:
        try:
            conversation.save(Path(argument).expanduser())
            aside.print(f"Saved {len(conversation.messages)} messages to {argument}.", style="dim", markup=False)
        except OSError as error:
            aside.print(f"Not saved: {error}", style="red", markup=False)
    else:
        if name != "/help":
            aside.print(f"Unknown or incomplete command: {line}", style="red", markup=False)
        for command, meaning in COMMANDS.items():
            aside.print(f"  {command:<14} {meaning}", markup=False)
        aside.print(f"  A line ending in {CONTINUED} goes on in the next.", markup=False)
    return True


def _print_stats(llm: KVBoost, aside: Console) -> None:
    stats = llm.stats()
    rows = {
        "prompt tokens": f"{stats.prompt_tokens:,}, of which {stats.prefix_hits_tokens:,} reused ({stats.hit_rate:.0%})",
        "output tokens": f"{stats.output_tokens:,}",
        "KV pool": f"{stats.blocks_cached:,} of {stats.blocks_total:,} blocks hold KV that can be found again",
        "requests": f"{stats.num_requests_finished:,} finished in {stats.num_steps:,} steps",
    }
    for name, value in rows.items():
        aside.print(f"  {name:<14} {value}", markup=False)
