"""One turn of a conversation: what an API asked for -> a GenerateRequest, and its outputs -> the parts of an answer.

Every chat-like API (OpenAI's chat and responses, Anthropic's messages) makes a `Turn`, and shapes what comes back.

Where thinking begins and ends has one source, the rendered prompt: a prompt that ends with an open thinking tag is
followed by thinking; where the model thinks on its own (its vocabulary has the tags) the answer may begin with the
tag. Under a constraint the thinking comes first and free, then the grammar.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglite.errors import InvalidRequest, PromptTooLong
from sglite.grammar.tools import CallSyntax
from sglite.protocol import FinishReason, GrammarSpec, RequestOutput, SamplingParams, Usage
from sglite.runtime.server.chat.answer_grammar import answer_grammar
from sglite.runtime.server.chat.parts import (
    THINK_BEGIN,
    THINK_END,
    AnswerParser,
    Part,
    PlainParser,
    Reasoning,
    ReasoningSplitter,
    Text,
    ToolArguments,
    ToolParser,
    ToolStart,
)
from sglite.runtime.server.chat.tools import Tool, ToolChoice, ToolFormat, check_choice
from sglite.runtime.server.tokenise import encode_prompt
from sglite.text.types import TextTokenizer


@dataclass(frozen=True, kw_only=True)
class Turn:
    messages: Sequence[Mapping[str, Any]]
    sampling: SamplingParams = SamplingParams()
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = ToolChoice()
    answer: GrammarSpec | None = None  # what the answer must obey where it is no tool call
    thinking: bool | None = None  # None: as the template does by itself
    think_budget: int | None = None
    split_reasoning: bool = True
    close_on_budget: bool = False
    jump_forward: bool = True
    truncate_prompt: bool = False  # of a prompt that is too long, keep the last tokens
    drop_oldest: bool = False  # of a conversation that is too long, drop the oldest messages first
    template_args: Mapping[str, Any] = field(default_factory=dict)
    continue_last: bool = False  # the last message is an assistant's beginning, to be continued


@dataclass(frozen=True, slots=True)
class PreparedTurn:
    """A turn as tokens and grammar, and how to read its answers."""

    turn: Turn
    prompt: tuple[int, ...]
    grammar: GrammarSpec | None
    grammar_after: tuple[int, ...]
    _syntax: CallSyntax
    _thinks: bool  # the answer may begin with thinking
    _inside: bool  # the prompt ended inside it
    _think_end: int | None

    def answer(self, index: int) -> Answer:
        """One for each completion."""
        return Answer(self._parser(), index, think_end=self._think_end if self._thinks else None)

    def _parser(self) -> AnswerParser:
        names = frozenset(tool.name for tool in self.turn.tools)
        uses_tools = names and self.turn.tool_choice.mode != "none"
        answer: AnswerParser = PlainParser()
        if uses_tools:
            answer = ToolParser(self._syntax, names, exact=self.grammar is not None)
        if self._thinks and self.turn.split_reasoning:
            return ReasoningSplitter(answer, inside=self._inside)
        return answer


class TurnPreparer:
    """Knows one model's way of writing."""

    def __init__(
        self, tokenizer: TextTokenizer, form: ToolFormat, *, strictness: str, reasoning: bool, max_model_len: int
    ) -> None:
        self._max_model_len = max_model_len
        self._tokenizer = tokenizer
        self._form = form
        self._strictness = strictness
        ids = tokenizer.encode(THINK_END)
        # A model whose vocabulary has the tag as one token was trained with it.
        self._think_end = ids[0] if reasoning and len(ids) == 1 else None

    def prepare(self, turn: Turn) -> PreparedTurn:
        """Raises InvalidRequest or a GrammarError before a token is spent. Takes milliseconds: call it in a thread."""
        check_choice(turn.tools, turn.tool_choice)
        turn = self._shortened(turn) if turn.drop_oldest else turn
        text = self._render(turn)
        inside = self._think_end is not None and text.rstrip().endswith(THINK_BEGIN)
        closed = self._think_end is not None and text.rstrip().endswith(THINK_END)
        built = answer_grammar(
            turn.tools,
            turn.tool_choice,
            syntax=self._form.syntax,
            strictness=self._strictness,
            answer=turn.answer,
        )
        thinks = self._think_end is not None and not closed
        if thinks and built.spec is not None and not inside:
            # The grammar waits for the end of thinking, so thinking must begin: the prompt opens it.
            text, inside = f"{text}{THINK_BEGIN}\n", True
        longest = len(text) if turn.truncate_prompt else self._max_model_len
        # a chat template writes the begin token itself where one belongs
        prompt = tuple(encode_prompt(self._tokenizer, text, longest=longest))
        return PreparedTurn(
            turn=turn,
            prompt=prompt,
            grammar=built.spec,
            grammar_after=(self._think_end,) if thinks and built.spec is not None and self._think_end else (),
            _syntax=built.syntax,
            _thinks=thinks,
            _inside=inside,
            _think_end=self._think_end,
        )

    def _shortened(self, turn: Turn) -> Turn:
        """Without as many of the oldest exchanges as it takes to leave room for the answer. What the system says stays,
        and what is left begins with a user's message, so that no tool's result is parted from its call."""
        answer = max(1, min(turn.sampling.max_tokens or 1, self._max_model_len // 2))
        head = list(itertools.takewhile(lambda message: message["role"] == "system", turn.messages))
        rest = turn.messages[len(head) :]

        def without(start: int) -> Turn:
            return dataclasses.replace(turn, messages=[*head, *rest[start:]])

        def fits(start: int) -> bool:
            try:
                tokens = encode_prompt(self._tokenizer, self._render(without(start)), longest=self._max_model_len)
            except PromptTooLong:
                return False
            return len(tokens) + answer <= self._max_model_len

        if fits(0):
            return turn
        starts = [i for i, message in enumerate(rest) if message["role"] == "user" and i]
        found = bisect.bisect_left(starts, True, key=fits)
        return without(starts[min(found, len(starts) - 1)]) if starts else turn

    def _render(self, turn: Turn) -> str:
        active = [] if turn.tool_choice.mode == "none" else turn.tools
        messages = self._form.messages(turn.messages, active)
        declared = [t.declaration() for t in active] if active and self._form.rendered_by_template else None
        arguments = dict(turn.template_args)
        if turn.thinking is not None:
            arguments["enable_thinking"] = turn.thinking
        if not turn.continue_last:
            return self._tokenizer.render_chat(messages, tools=declared, **arguments)
        last = messages.pop()
        if last["role"] != "assistant":
            raise InvalidRequest("continue_final_message needs an assistant message at the end", param="messages")
        return self._tokenizer.render_chat(messages, tools=declared, **arguments) + str(last["content"])


class Answer:
    """One completion while it grows: its parts so far, for answers that are given as a whole."""

    def __init__(self, parser: AnswerParser, index: int, *, think_end: int | None) -> None:
        """`think_end`: the token that ends thinking; None where there is none."""
        self.index = index
        self.text = ""
        self.reasoning = ""
        self.calls: list[list[str]] = []  # [name, arguments]
        self.usage = Usage()
        self.finish_reason: FinishReason | None = None
        self.matched_stop: str | int | None = None
        self.reason = ""
        self._parser = parser
        self._think_end = think_end
        self._before_end = 0  # tokens up to the end of thinking, that token included

    @property
    def reasoning_tokens(self) -> int:
        return self._before_end if self.reasoning else 0

    def take(self, output: RequestOutput) -> list[Part]:
        """The parts that this output adds."""
        parts = self._parser.feed(output.text) if output.text else []
        if output.finished:
            parts += self._parser.close()
            self.finish_reason = output.finish_reason
            self.matched_stop = output.matched_stop
            self.reason = output.reason
        self.usage = output.usage
        for token_id in output.token_ids if self._think_end is not None else ():
            self._before_end += 1
            if token_id == self._think_end:
                self._think_end = None
                break
        for part in parts:
            match part:
                case Text(text):
                    self.text += text
                case Reasoning(text):
                    self.reasoning += text
                case ToolStart(_, name):
                    self.calls.append([name, ""])
                case ToolArguments(index, text):
                    self.calls[index][1] += text
        return parts
