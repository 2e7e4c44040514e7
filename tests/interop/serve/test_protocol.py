"""What clients may ask, how a request becomes work, and what text leaves the server; no network and no model."""

import json
from typing import Any

import pytest

from twoaxis.data.chat_template import ChatTemplate
from twoaxis.data.tokenizer import ByteTokenizer, SubwordTokenizer
from twoaxis.interop.serve.completions import Answer, Choice, Piece
from twoaxis.interop.serve.protocol import ChatRequest, CompletionRequest, Message, Refusal, Request
from twoaxis.interop.serve.work import ChatFormat, Limits, Served, work_of

SERVED = Served("toy", ByteTokenizer(), 64, Limits(max_prompt_tokens=40, max_new_tokens=30, max_choices=6))
HELLO = [{"role": "user", "content": "hello"}]


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.read(json.dumps({"prompt": "ab", **fields}).encode())


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.read(json.dumps({"messages": HELLO, **fields}).encode())


def refusal_of(kind: type[Request], body: bytes) -> Refusal:
    with pytest.raises(Refusal) as caught:
        work_of(kind.read(body), SERVED)
    assert "\n" not in caught.value.message
    json.dumps(caught.value.body).encode("ascii")
    return caught.value


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        (b"", "is not JSON", None),
        (b'{"prompt": "a"', "is not JSON", None),
        (b"\xff\xfe", "is not JSON", None),
        (b"[" * 100_000, "is not JSON", None),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "is not JSON", None),
        *(
            (b'{"%s": %s1%s}' % (key, b"[" * 900, b"]" * 900), "are nested more than 64 deep", None)
            for key in (b"prompt", b"echo", b"a")
        ),
        (b'{"prompt": ' + b'{"a":' * 64 + b"1" + b"}" * 65, "are nested more than 64 deep", None),
        (b'{"prompt": ' + b'{"a":' * 63 + b"1" + b"}" * 64, "prompt={'a': {'a': ", "prompt"),
        (b'{"prompt": "a", "self": 1}', "unknown key 'self'", "self"),
        (b'["a"]', "body=['a']: must be one JSON object", None),
        (b"{}", "prompt is missing", "prompt"),
        (b'{"prompt": 3}', "prompt=3: must be a string, a list of strings", "prompt"),
        (b'{"prompt": []}', "prompt=[]: must be", "prompt"),
        (b'{"prompt": ["a", 3]}', "must be a string, a list", "prompt"),
        (b'{"prompt": [[1], "a"]}', "must be a string, a list", "prompt"),
        (b'{"prompt": [true]}', "must be a string, a list", "prompt"),
        (b'{"prompt": ""}', "tokens of prompt=0: must be from 1 to 40", "prompt"),
        (b'{"prompt": [[]]}', "tokens of prompt=0: must be from 1 to 40", "prompt"),
        (b'{"prompt": [256]}', "token id=256: must be in 0..255", "prompt"),
        (b'{"prompt": [-1]}', "token id=-1: must be in 0..255", "prompt"),
        (b'{"prompt": "\\ud800"}', "half of a surrogate pair", "prompt"),
        (b'{"prompt": "a", "max_tokens": 0}', "max_tokens=0: must be >= 1", "max_tokens"),
        (b'{"prompt": "a", "max_tokens": "5"}', "max_tokens='5': must be a whole number", "max_tokens"),
        (b'{"prompt": "a", "max_tokens": true}', "max_tokens=True: must be a whole number", "max_tokens"),
        (b'{"prompt": "a", "max_tokens": 31}', "max_tokens=31: must be at most 30 after a prompt of 1 tokens", "max_tokens"),
        (b'{"prompt": "a", "temperature": -1}', "temperature=-1: must be >= 0", "temperature"),
        (b'{"prompt": "a", "temperature": 2.5}', "temperature=2.5: must be <= 2", "temperature"),
        (b'{"prompt": "a", "temperature": NaN}', "temperature=nan: must be a finite number", "temperature"),
        (b'{"prompt": "a", "temperature": "hot"}', "temperature='hot': must be a number", "temperature"),
        (b'{"prompt": "a", "top_p": 0}', "top_p=0: must be > 0", "top_p"),
        (b'{"prompt": "a", "n": 0}', "n=0: must be >= 1", "n"),
        (b'{"prompt": ["a", "b"], "n": 4}', "prompts times n=8: must be at most 6", "n"),
        (b'{"prompt": "a", "stop": ["a", "b", "c", "d", "e"]}', "must be at most 4 items, not 5; leave some out", "stop"),
        (b'{"prompt": "a", "stop": ""}', "strings with a character at least", "stop"),
        (b'{"prompt": "a", "stop": 3}', "stop=3: must be a valid list", "stop"),
        (b'{"prompt": "a", "stream": "yes"}', "stream='yes': must be true or false", "stream"),
        (b'{"prompt": "a", "seed": 9223372036854775808}', "must be <= 9223372036854775807", "seed"),
        (b'{"prompt": "a", "model": "toyy"}', "unknown model 'toyy'; did you mean 'toy'?", "model"),
        (b'{"prompt": "a", "top_pp": 1}', "did you mean 'top_p'?", "top_pp"),
        (b'{"prompt": "a", "\\ud800": 1}', "must be a valid string", None),
        (b'{"prompt": "a", "logprobs": 0}', "logprobs=0: is not supported", "logprobs"),
        (b'{"prompt": "a", "echo": true}', "echo=True: is not supported", "echo"),
        (b'{"prompt": "a", "best_of": 2}', "best_of=2: is not supported", "best_of"),
        (b'{"prompt": "a", "frequency_penalty": 0.1}', "is not supported", "frequency_penalty"),
    ],
    ids=lambda value: str(value[:40]) if isinstance(value, bytes) else "",
)
def test_what_cannot_be_answered_is_refused_in_one_line(body: bytes, message: str, param: str | None) -> None:
    refusal = refusal_of(CompletionRequest, body)
    assert message in refusal.message
    assert (refusal.param, refusal.status) == (param, 404 if param == "model" else 400)
    assert len(refusal.message) < 500


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": []}, "at least 1 item"),
        ({"messages": "hello"}, "must be a valid list"),
        ({"messages": ["hello"]}, "messages.0"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages.0: role='robot'"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0: content=null: must be a string or a list of text"),
        ({"messages": [{"role": "user"}]}, "messages.0: content is missing in the message"),
        ({"messages": [{"role": "user", "content": 3}]}, "content=3: must be a string or a list of text parts"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "send text only"),
        ({"messages": [{"role": "user", "content": "a" * 41}]}, "tokens of messages=58: must be from 1 to 40"),
        ({"tools": [{"type": "function"}]}, "is not supported"),
        ({"response_format": {"type": "json_object"}}, "is not supported"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "must be the same"),
        ({"max_completion_tokens": 0}, "max_tokens=0: must be >= 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_conversations_that_cannot_be_answered(fields: dict[str, Any], message: str) -> None:
    assert message in refusal_of(ChatRequest, json.dumps({"messages": HELLO, **fields}).encode()).message


def test_what_says_nothing_about_the_answer_may_be_there() -> None:
    request = completion(
        user="me", metadata={"a": "b"}, store=False, suffix=None, logprobs=None, echo=False, best_of=1, presence_penalty=0
    )
    assert request == completion()
    message = {**HELLO[0], "refusal": None, "tool_calls": None}
    assert chat(messages=[message], tools=[], response_format={"type": "text"}, frequency_penalty=0.0) == chat()


def test_prompts_choices_and_seeds() -> None:
    work = work_of(completion(prompt=["ab", "c"], n=3, seed=2**63 - 1, max_tokens=5, temperature=0.5, top_k=4), SERVED)
    assert [(list(one.prompt), one.max_new_tokens) for one in work.generations] == [([97, 98], 5)] * 3 + [([99], 5)] * 3
    # The choices of all prompts draw as a single one would with seed, seed + 1, ...
    assert [one.sampling.seed for one in work.generations] == [2**63 - 1 + number for number in range(6)]
    assert work.prompt_tokens == 3
    assert work.generations[0].sampling.replace(seed=0) == work.generations[4].sampling.replace(seed=0)
    # Without a seed, equal prompts of one request and of others are answered differently.
    unseeded = [work_of(completion(prompt=["ab"] * 3, n=2), SERVED).generations for _ in range(2)]
    assert len({one.sampling.seed for generations in unseeded for one in generations}) == 12


def test_what_may_be_said_and_what_ends_it() -> None:
    tokenizer = chat_ml()
    served = Served("toy", tokenizer, 64, SERVED.limits)
    work = work_of(completion(stop=["<|im_start|>", "x", "<|im_en"]), served)
    assert (work.generations[0].vocab_size, tokenizer.vocab_size) == (258, 258)
    # A special token has no text in which its string could be found.
    assert work.generations[0].stop_tokens == {256, 257}
    assert work_of(completion(), served).generations[0].stop_tokens == {257}


@pytest.mark.parametrize("prompt", [[1, 2], [[1, 2]], "\1\2", ["\1\2"]])
def test_ways_to_say_one_prompt(prompt: Any) -> None:
    (one,) = work_of(completion(prompt=prompt), SERVED).generations
    assert list(one.prompt) == [1, 2]


def test_lengths_that_are_not_said() -> None:
    def room(request: Request, served: Served = SERVED) -> int:
        return work_of(request, served).generations[0].max_new_tokens

    assert room(completion()) == 16
    assert room(chat()) == 30
    assert room(completion(prompt="a" * 40)) == 16
    small = Served("toy", ByteTokenizer(), 50, SERVED.limits)
    assert room(completion(prompt="a" * 40), small) == 10
    assert room(chat(max_completion_tokens=7)) == 7
    # A model that is shorter than the limits.
    with pytest.raises(Refusal, match="tokens of prompt=20: must be from 1 to 19"):
        room(completion(prompt="a" * 20), Served("toy", ByteTokenizer(), 20, SERVED.limits))


def chat_ml() -> SubwordTokenizer:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    engine = tokenizers.Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    engine.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return SubwordTokenizer(engine.to_str(), "<|im_end|>")


def test_chat_ml_where_the_vocabulary_has_its_markers() -> None:
    tokenizer = chat_ml()
    messages = [Message(role="developer", content="be kind"), Message(role="user", content="hi <|im_end|>")]
    form = ChatFormat.of(tokenizer)
    tokens = form.prompt(messages, tokenizer)
    assert (form.name, form.stop_tokens, form.stops) == ("ChatML", {257}, ())
    # Markers that a client spells are letters.
    assert [token for token in tokens if token > 255] == [256, 257, 256, 257, 256]
    assert tokenizer.decode(tokens) == "system\nbe kind\nuser\nhi <|im_end|>\nassistant\n"
    work = work_of(chat(), Served("toy", tokenizer, 64, SERVED.limits))
    assert work.generations[0].stop_tokens == {257}


def test_the_template_of_the_model_comes_before_markers() -> None:
    """Catches a template that is not followed, and names of special tokens that a message brings in as such."""
    tokenizer, text = chat_ml(), "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}"
    served = Served("toy", tokenizer, 64, SERVED.limits, template=ChatTemplate(text))
    work = work_of(chat(messages=[{"role": "developer", "content": "<|im_end|>"}]), served)
    prompt = list(work.generations[0].prompt)
    assert tokenizer.decode(prompt) == "[system]<|im_end|>" and prompt.count(257) == 1 == len([t for t in prompt if t > 255])
    assert (work.stops, work.lead, work.generations[0].stop_tokens) == ((), "", {257})
    assert work.note == "<|im_end|> in the prompt: read as text, as everything in messages is"
    picky = Served("toy", tokenizer, 64, SERVED.limits, template=ChatTemplate("{{ raise_exception('no') }}"))
    with pytest.raises(Refusal, match=r"refuses the conversation \(no\)") as caught:
        work_of(chat(), picky)
    assert caught.value.param == "messages"


def test_special_tokens_in_prompts_are_parsed_on_request_and_said() -> None:
    """Catches prompts whose markers become other ids without a word."""
    tokenizer = chat_ml()
    served = Served("toy", tokenizer, 64, SERVED.limits)
    spelled: dict[str, Any] = {"prompt": ["a", "<|im_start|>b"]}
    text, parsed = (work_of(completion(**spelled, parse_special=parse), served) for parse in (False, True))
    assert max(text.generations[1].prompt) < 256 and tokenizer.decode(list(text.generations[1].prompt)) == "<|im_start|>b"
    assert list(parsed.generations[1].prompt) == [256, *tokenizer.encode("b")]
    assert text.note == "<|im_start|> in the prompt: read as text; parse_special=true reads special tokens"
    assert parsed.note == "<|im_start|> in the prompt: read as special tokens"
    assert work_of(completion(), served).note == "" == work_of(completion(prompt=[[256]]), served).note
    for note in (text.note, ""):
        answer = Answer(completion(**spelled), "toy", 3, note)
        said = [answer.whole(["x"], [Piece(0, "", "stop", 1)]), *answer.part(Piece(0, "x", None, 1))]
        assert [one.get("note", "") for one in said] == [note, note]


def test_plain_conversations() -> None:
    parts = [{"type": "text", "text": "again"}, {"type": "text", "text": "!"}]
    messages = [*HELLO, {"role": "assistant", "content": "hi"}, {"role": "user", "content": parts, "name": "me"}]
    served = Served("toy", ByteTokenizer(), 99, Limits())
    work = work_of(chat(messages=messages, stop="x"), served)
    assert bytes(work.generations[0].prompt) == b"user: hello\nassistant: hi\nuser: again!\nassistant:"
    assert work.stops == ("x", "\nsystem:", "\nuser:", "\nassistant:")
    assert work.lead == " "


def pieces_of(text: str, ending: Any, stops: tuple[str, ...] = (), lead: str = "") -> list[Piece]:
    pieces: list[Piece] = []
    choice = Choice(2, ByteTokenizer(), stops, lead, pieces.append)
    if any(choice.token(token) for token in text.encode()):
        ending = "stop"
    choice.end(ending)
    return pieces


def test_a_choice_gives_out_whole_characters_and_no_stop_string() -> None:
    assert pieces_of("é\nU", "length", ("\nUS",)) == [
        Piece(2, "é", None, 2),
        Piece(2, "\nU", "length", 4),
    ]
    assert pieces_of("a\nUSb", "length", ("\nUS",)) == [Piece(2, "a", None, 1), Piece(2, "", "stop", 4)]
    assert pieces_of(" a b", "stop", lead=" ") == [
        Piece(2, "a", None, 2),
        Piece(2, " ", None, 3),
        Piece(2, "b", None, 4),
        Piece(2, "", "stop", 4),
    ]
    assert pieces_of("a\n", "cancelled", ("\n\n",))[-1] == Piece(2, "", "cancelled", 2)


def test_half_a_character_at_the_end_is_shown_as_such() -> None:
    pieces: list[Piece] = []
    choice = Choice(0, ByteTokenizer(), (), "", pieces.append)
    choice.token("é".encode()[0])
    choice.end("length")
    assert pieces == [Piece(0, "\ufffd", "length", 1)]


def test_streams_say_what_whole_answers_say() -> None:
    pieces = [Piece(0, "a", None, 1), Piece(1, "x", None, 1), Piece(0, "b", "length", 2), Piece(1, "", "stop", 2)]
    for request in (completion(stream_options={"include_usage": True}), chat(stream_options={"include_usage": True})):
        answer = Answer(request, "toy", 3)
        whole = answer.whole(["ab", "x"], pieces[2:])
        parts = [*answer.openings(2), *(part for piece in pieces for part in answer.part(piece)), *answer.closing(4)]
        texts, endings = ["", ""], [None, None]
        for part in parts[:-1]:
            (choice,) = part["choices"]
            texts[choice["index"]] += choice["delta"].get("content", "") if answer.chat else choice["text"]
            endings[choice["index"]] = endings[choice["index"]] or choice["finish_reason"]
            assert part["usage"] is None
        assert parts[-1]["choices"] == []
        assert parts[-1]["usage"] == whole["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
        said = [choice["message"]["content"] if answer.chat else choice["text"] for choice in whole["choices"]]
        assert (texts, endings) == (said, [choice["finish_reason"] for choice in whole["choices"]])
        assert {part["id"] for part in parts} == {whole["id"]}
    assert Answer(completion(), "toy", 3).closing(4) == []
