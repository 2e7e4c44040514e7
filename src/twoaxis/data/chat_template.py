"""Chat templates of published models: Jinja2 templates that run in a sandbox.

Variables, sandbox and tokens are those of `apply_chat_template` in transformers 5.24 with `sanitize_control_tokens`: a special
token that a message spells stays text, so that no message ends its turn early.
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from twoaxis.core.errors import CheckpointError, DataError
from twoaxis.data.tokenizer import Tokenizer

PRIVATE_USE = range(0xF0000, 0xFFFFE)
"""Characters without meaning, two of which mark special tokens that a message spells."""


class ChatTemplate:
    r"""A chat template of a published model.

    Args:
        source: the template.
        variables: further variables, such as `bos_token`.
        where: names the template in errors.

    Raises:
        CheckpointError: the source is no template.

    Example:
        >>> template = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:")
        >>> template.render([{"role": "user", "content": "Hello"}])
        'user: Hello\nassistant:'
    """

    def __init__(self, source: str, variables: Mapping[str, Any] | None = None, where: str = "chat template") -> None:
        self.source, self._variables, self._where = source, dict(variables or {}), where
        self._template = _compiled(source, where)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text of a conversation up to the answer; messages have `role` and `content`.

        Raises:
            DataError: the template refuses the conversation, or fails on it.
        """
        given = {**self._variables, "tools": None, "documents": None, "add_generation_prompt": True}
        try:
            return self._template.render(messages=[dict(message) for message in messages], **given)
        # A template may raise anything.
        except Exception as error:
            reason = str(error) or type(error).__name__
            raise DataError(f"{self._where}: refuses the conversation ({reason}); send other messages") from None

    def prompt(self, messages: Sequence[Mapping[str, str]], tokenizer: Tokenizer) -> list[int]:
        """The tokens of a conversation up to the answer.

        Raises:
            DataError: the template refuses the conversation, or a message is not Unicode text.
        """
        spelled = tokenizer.special_names_in("\n".join(text for message in messages for text in message.values()))
        if not spelled:
            return tokenizer.encode_special(self.render(messages))
        begin, end = _unused("".join([self.source, *(text for message in messages for text in message.values())]))
        names = "|".join(re.escape(name) for name in sorted(spelled, key=len, reverse=True))
        marked = [{key: re.sub(names, rf"{begin}\g<0>{end}", text) for key, text in one.items()} for one in messages]
        # A template that truncates messages may leave one mark of two.
        pieces = re.split(f"{begin}({names}){end}|[{begin}{end}]", self.render(marked))
        tokens = tokenizer.encode_special(pieces[0])
        for index, piece in enumerate(pieces[1:], start=1):
            if piece:
                tokens += _continued(tokenizer, piece, as_text=index % 2 == 1)
        return tokens


def _continued(tokenizer: Tokenizer, piece: str, *, as_text: bool) -> list[int]:
    """Encodes a piece within a text; some tokenizers encode the beginning of a text differently."""
    encode = tokenizer.encode if as_text else tokenizer.encode_special
    before, tokens = tokenizer.encode("\n"), encode(f"\n{piece}")
    return tokens[len(before) :] if tokens[: len(before)] == before else encode(piece)


def _unused(text: str) -> list[str]:
    used = set(text)
    return [chr(code) for code in PRIVATE_USE if chr(code) not in used][:2]


class _Generation(Extension):
    """The tag around generated text, which has no effect on a prompt."""

    tags = {"generation"}  # noqa: RUF012, as Jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Namespace(Namespace):
    """Refuses names with a leading underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # `self` may be a name in the template.
        namespace, *rest = args
        Namespace.__init__(namespace)
        for name, value in dict(*rest, **kwargs).items():
            namespace[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"namespace: {name!r} begins with an underscore")
        super().__setitem__(name, value)


class _Dict:
    """Builds dictionaries without access to the class `dict`."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _as_json(data: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    # The filter of Jinja2 escapes HTML, and escapes of other characters would hide the marks.
    return json.dumps(data, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _compiled(source: str, where: str) -> Template:
    sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    sandbox.filters["tojson"] = _as_json
    sandbox.globals |= {"raise_exception": _refuse, "strftime_now": _now, "dict": _Dict(), "namespace": _Namespace}
    try:
        return sandbox.from_string(source)
    except (TemplateError, SyntaxError, RecursionError) as error:
        line = f"line {error.lineno}: " if isinstance(error, TemplateSyntaxError) else ""
        raise CheckpointError(f"{where}: is not a Jinja2 template ({line}{error}); correct the file of the model") from None
