r"""How a conversation becomes one prompt.

* the model's own chat template, where it comes with one, in a sandbox (`data/chat_template.py`).
* ChatML, where the vocabulary has `<|im_start|>` and `<|im_end|>`: each message is
  `<|im_start|>ROLE\nCONTENT<|im_end|>\n`, and the answer follows `<|im_start|>assistant\n`. No system message is made up.
* plain, for every other model: each message is a line `ROLE: CONTENT`, and the answer follows `assistant:`; it ends where a
  line begins with the name of a role, and a space before its first word is left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from twoaxis.data import Tokenizer
from twoaxis.data.chat_template import ChatTemplate
from twoaxis.interop.serving.protocol import Message

START, END = "<|im_start|>", "<|im_end|>"
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class ChatMarkers:
    """The ids of ChatML's markers.

    Attributes:
        start: begins a message.
        end: ends it.
    """

    start: int
    end: int


@dataclass(frozen=True)
class ChatFormat:
    """One of the formats.

    Attributes:
        markers: of ChatML; None where the vocabulary has none.
        template: of the model; it comes first.
    """

    markers: ChatMarkers | None
    template: ChatTemplate | None = None

    @staticmethod
    def of(tokenizer: Tokenizer, template: ChatTemplate | None = None) -> "ChatFormat":
        """The format for the models that this tokenizer serves, and that come with this template.

        Example:
            >>> from twoaxis.data.tokenizer import ByteTokenizer
            >>> ChatFormat.of(ByteTokenizer()).name
            'plain'
        """
        ids = tokenizer.special_tokens
        return ChatFormat(ChatMarkers(ids[START], ids[END]) if START in ids and END in ids else None, template)

    @property
    def name(self) -> str:
        """For people."""
        return "its template says" if self.template else "plain" if self.markers is None else "ChatML"

    @property
    def stop_tokens(self) -> frozenset[int]:
        """Tokens that end an answer, besides those that the model's own files name."""
        return frozenset() if self.markers is None else frozenset({self.markers.end})

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end an answer."""
        return tuple(f"\n{role}:" for role in ROLES) if self._plain else ()

    @property
    def lead(self) -> str:
        """What an answer begins with and clients do not see."""
        return " " if self._plain else ""

    @property
    def _plain(self) -> bool:
        return self.template is None and self.markers is None

    def prompt(self, messages: Sequence[Message], tokenizer: Tokenizer) -> list[int]:
        """The tokens of a conversation; markers that are spelled inside a message stay text.

        Raises:
            DataError: something that is not Unicode text, or that the template refuses.
        """
        turns = [("system" if message.role == "developer" else message.role, message.content) for message in messages]
        if self.template is not None:
            return self.template.prompt([{"role": role, "content": content} for role, content in turns], tokenizer)
        if self.markers is None:
            return tokenizer.prompt("".join(f"{role}: {content}\n" for role, content in turns) + "assistant:")
        start, end, line_end = self.markers.start, self.markers.end, tokenizer.encode("\n")
        tokens = list(tokenizer.begin_of_document)
        for role, content in turns:
            tokens += [start, *tokenizer.encode(f"{role}\n{content}"), end, *line_end]
        return [*tokens, start, *tokenizer.encode("assistant\n")]
