"""`kvboost run`: one prompt, its answer streamed to standard output, what it cost to standard error."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvboost.cli.options import ModelArgument, open_model, with_model_options
from kvboost.errors import InvalidRequest

if TYPE_CHECKING:
    from kvboost.api.results import GenerationResult
    from kvboost.api.stream import TokenStream

INTERRUPTED = 130
"""Exit code of a program ended by Ctrl-C (128 + SIGINT)."""


@with_model_options(sampling=True)
def run(
    model: ModelArgument,
    prompt: Annotated[str | None, typer.Argument(help="Default: read from standard input.", show_default=False)] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Send the prompt as a user's message, or as bare text. Default: chat when the model has a chat template.",
            show_default=False,
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message, in chat form.", show_default=False)] = None,
    *,
    model_options: dict[str, Any],
    sampling_options: dict[str, Any],
) -> None:
    """Answer one prompt: kvboost run smollm2 "Why is the sky blue?" """
    text = _read_stdin() if prompt is None else prompt
    if system is not None and chat is False:
        raise typer.BadParameter("needs the chat form; leave out --raw.", param_hint="--system")
    with open_model(model, model_options) as llm:
        if chat is None:
            chat = system is not None or bool(getattr(llm.tokenizer, "chat_template", None))
        if chat:
            messages = [{"role": "system", "content": system}] if system is not None else []
            stream = llm.chat([*messages, {"role": "user", "content": text}], stream=True, **sampling_options)
        else:
            stream = llm.stream(text, **sampling_options)
        _print_stream(stream)  # type: ignore[arg-type]


def _read_stdin() -> str:
    """Raises `BadParameter` on a terminal, `InvalidRequest` when there is nothing or the bytes are not UTF-8."""
    if sys.stdin is None or sys.stdin.isatty():
        raise typer.BadParameter("give a prompt, or pipe one in: echo Hello | kvboost run MODEL", param_hint="PROMPT")
    data = sys.stdin.buffer.read()
    try:
        text = data.decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            "prompt",
            f"standard input is not UTF-8 (byte {error.start} is 0x{data[error.start]:02x}). Convert it first.",
        ) from error
    if not text:
        raise InvalidRequest("prompt", "standard input is empty. Give a prompt, or pipe one in.")
    return text


def _print_stream(stream: TokenStream) -> None:
    """Exits with 130 after Ctrl-C, which ends the generation."""
    result = None
    try:
        with stream:
            for piece in stream:
                sys.stdout.write(piece.text)
                sys.stdout.flush()
                result = piece.result
    except KeyboardInterrupt:
        typer.echo()
        typer.secho("stopped", dim=True, err=True)
        raise typer.Exit(INTERRUPTED) from None
    typer.echo()
    if result is not None:
        typer.secho(usage_line(result), dim=True, err=True)


def usage_line(result: GenerationResult) -> str:
    """Reuse, time to first token and speed of one answer, for people."""
    usage, output = result.usage, result.usage.output_tokens
    speed = f" at {1e3 / result.tpot_ms:.1f} tok/s" if result.tpot_ms > 0 else ""
    cut = ", cut at the length limit" if result.finish_reason == "length" else ""
    return (
        f"{usage.cached_tokens:,} of {usage.prompt_tokens:,} prompt tokens reused ({result.kv_reuse_ratio:.0%}), "
        f"first token after {result.ttft_ms:,.0f} ms, {output:,} tokens{speed}{cut}"
    )
