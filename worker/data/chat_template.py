"""Renders conversations with a Jinja chat template, for chat_template.cc.

Reads JSON, a line each: first {"template", "bos_token", "eos_token"} and perhaps
"tool_use", the template of conversations with tools, then
{"conversation": an object with "messages" and perhaps "tools"}. Answers each with
a line: {"pieces": [[text, whether an answer], ...]}, or {"error": text}. With
"prompt": true beside the conversation the text ends with the beginning of an
answer, and is one piece.

The environment is that of Hugging Face's transformers: sandboxed, with loop
controls, raise_exception, tojson and strftime_now. Answers are the text
between {% generation %} and {% endgeneration %} or, in a template without
them, what an assistant's message adds to the text that ends with the prompt for
it. Some templates write a message in another way once others follow, as Qwen 3
does with the thoughts before an answer: then it is what stands between the
prompt and the end of the turn in the text of the whole conversation.

The first argument is the most seconds that a line may take: after that SIGALRM
ends the process, also in the middle of a function written in C. The second is the
date that strftime_now writes, 2024-07-26; "": that of now.
"""
import datetime
import json
import resource
import secrets
import signal
import sys

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Texts that no conversation has.
BEGIN = secrets.token_hex(16)
END = secrets.token_hex(16)

MOST_TEXT = 64 << 20  # characters
MOST_MEMORY_GIB = 4
MOST_ERROR = 1000  # characters


class Generation(Extension):
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        call = self.call_method("mark")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def mark(self, caller):
        return BEGIN + caller() + END


def raise_exception(text):
    raise jinja2.TemplateError(text)


def strftime_now(form):
    date = sys.argv[2]
    now = datetime.datetime
    return (now.fromisoformat(date) if date else now.now()).strftime(form)


def to_json(value, ensure_ascii=False, indent=None, separators=None,
            sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent,
                      separators=separators, sort_keys=sort_keys)


class Renderer:
    def __init__(self, settings):
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True,
            extensions=[Generation, "jinja2.ext.loopcontrols"])
        environment.filters["tojson"] = to_json
        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = strftime_now
        self.tokens = {k: settings[k] for k in ("bos_token", "eos_token")}
        default = settings["template"]
        self.templates = {
            tools: (environment.from_string(text), "endgeneration" in text)
            for tools, text in ((False, default),
                                (True, settings.get("tool_use", default)))}

    def template(self, conversation):
        """The template, and whether it marks answers."""
        return self.templates[conversation.get("tools") is not None]

    def render(self, conversation, messages, prompt=False):
        parts, size = [], 0
        for part in self.template(conversation)[0].generate(
                messages=messages, tools=conversation.get("tools"),
                documents=None, add_generation_prompt=prompt, **self.tokens):
            size += len(part)
            if size > MOST_TEXT:
                raise_exception(f"the text has over {MOST_TEXT} characters")
            parts.append(part)
        return "".join(parts)

    def pieces(self, conversation, prompt=False):
        messages = conversation["messages"]
        if prompt:
            text = self.render(conversation, messages, prompt=True)
            return [[text.replace(BEGIN, "").replace(END, ""), False]]
        if self.template(conversation)[1]:
            return self.between_marks(self.render(conversation, messages))
        text = self.render(conversation, messages)
        out, at = [], 0
        for i, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            before = self.render(conversation, messages[:i], prompt=True)
            upto = self.render(conversation, messages[:i + 1])
            if not (text.startswith(upto) and upto.startswith(before)):
                return self.between_prompts(conversation, messages, text)
            out += [[text[at:len(before)], False],
                    [text[len(before):len(upto)], True]]
            at = len(upto)
        return out + [[text[at:], False]]

    def with_marks(self, conversation, messages):
        """The text with marks around the contents of the assistant, inside of
        the white space that a template may remove."""
        marked = []
        for m in messages:
            content = m.get("content")
            if m.get("role") == "assistant" and isinstance(content, str):
                core = content.strip()
                head, tail = content.split(core, 1) if core else (content, "")
                m = {**m, "content": head + BEGIN + core + END + tail}
            marked.append(m)
        return self.render(conversation, marked)

    def between_prompts(self, conversation, messages, text):
        rest = self.with_marks(conversation, messages)
        if rest.replace(BEGIN, "").replace(END, "") != text:
            self.cannot_tell()
        out, at, place = [], 0, 0  # of what was taken, and of `rest`, in text
        for i, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            until, mark, rest = rest.partition(END)
            whole = self.with_marks(conversation, messages[:i + 1])
            start = self.render(conversation, messages[:i])
            prompt = self.render(conversation, messages[:i], prompt=True)
            if not mark or END not in whole or not prompt.startswith(start):
                self.cannot_tell()
            prompt = prompt[len(start):]
            # A mark before thoughts is lost with them.
            head = until.partition(BEGIN)[0] if BEGIN in until else until
            begin = text.rfind(prompt, at, place + len(head))
            if not prompt or begin < 0:
                self.cannot_tell()
            begin += len(prompt)
            place += len(until.replace(BEGIN, ""))
            end = place
            for a, b in zip(whole.rpartition(END)[2], text[place:]):
                if a != b:
                    break
                end += 1
            out += [[text[at:begin], False], [text[begin:end], True]]
            at = end
        return out + [[text[at:], False]]

    @staticmethod
    def cannot_tell():
        raise_exception(
            "answers cannot be told from the rest of the text; mark them in the "
            "template with {% generation %} and {% endgeneration %}")

    @staticmethod
    def between_marks(text):
        out = []
        for part in text.split(BEGIN):
            answer, mark, rest = part.partition(END)
            out += [[answer, True], [rest, False]] if mark else [[part, False]]
        return out


def limit_memory():
    limits = resource.getrlimit(resource.RLIMIT_AS)
    most = [n for n in limits if n != resource.RLIM_INFINITY]
    most.append(MOST_MEMORY_GIB << 30)
    resource.setrlimit(resource.RLIMIT_AS, (min(most), limits[1]))


def in_one_line(error):
    text = str(error)
    if isinstance(error, MemoryError):
        text = f"needs over {MOST_MEMORY_GIB} GiB of memory"
    return " ".join(f"{type(error).__name__}: {text}"[:MOST_ERROR].split())


def main():
    limit_memory()
    renderer = None
    for line in sys.stdin:
        signal.alarm(int(sys.argv[1]))
        try:
            request = json.loads(line)
            if renderer is None:
                renderer = Renderer(request)
                answer = {"pieces": []}
            else:
                pieces = renderer.pieces(**request)
                answer = {"pieces": [p for p in pieces if p[0]]}
            answer = json.dumps(answer)
        except Exception as e:
            answer = json.dumps({"error": in_one_line(e)})
        signal.alarm(0)
        print(answer, flush=True)


main()
