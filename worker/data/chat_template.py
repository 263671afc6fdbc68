"""Renders conversations with a Jinja chat template, for chat_template.cc.

Reads JSON, a line each: first {"template", "bos_token", "eos_token"}, then
objects with "messages" and perhaps "tools". Answers each with a line: {"pieces":
[[text, whether an answer], ...]}, or {"error": text}. With "prompt": true the
text ends with the beginning of an answer, and is one piece.

The environment is that of Hugging Face's transformers: sandboxed, with loop
controls, raise_exception and tojson, but without the time of day, so that the
same conversations give the same text. Answers are the text
between {% generation %} and {% endgeneration %} or, in a template without
them, what an assistant's message adds to the text that ends with the prompt for
it.
"""
import json
import secrets
import sys

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Texts that no conversation has.
BEGIN = secrets.token_hex(16)
END = secrets.token_hex(16)


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
        self.template = environment.from_string(settings["template"])
        self.tokens = {k: settings[k] for k in ("bos_token", "eos_token")}
        self.marked = "endgeneration" in settings["template"]

    def render(self, conversation, messages, prompt=False):
        return self.template.render(
            messages=messages, tools=conversation.get("tools"), documents=None,
            add_generation_prompt=prompt, **self.tokens)

    def pieces(self, conversation):
        messages = conversation["messages"]
        if conversation.get("prompt"):
            text = self.render(conversation, messages, prompt=True)
            return [[text.replace(BEGIN, "").replace(END, ""), False]]
        if self.marked:
            return self.between_marks(self.render(conversation, messages))
        text = self.render(conversation, messages)
        out, at = [], 0
        for i, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            before = self.render(conversation, messages[:i], prompt=True)
            upto = self.render(conversation, messages[:i + 1])
            if not (text.startswith(upto) and upto.startswith(before)):
                raise_exception(
                    "the text of a conversation does not begin with that of its "
                    "first messages, so that answers cannot be told from the "
                    "rest; mark them in the template with {% generation %} and "
                    "{% endgeneration %}")
            out += [[text[at:len(before)], False],
                    [text[len(before):len(upto)], True]]
            at = len(upto)
        return out + [[text[at:], False]]

    @staticmethod
    def between_marks(text):
        out = []
        for part in text.split(BEGIN):
            answer, mark, rest = part.partition(END)
            out += [[answer, True], [rest, False]] if mark else [[part, False]]
        return out


def main():
    renderer = None
    for line in sys.stdin:
        try:
            request = json.loads(line)
            if renderer is None:
                renderer = Renderer(request)
                answer = {"pieces": []}
            else:
                answer = {"pieces": [p for p in renderer.pieces(request) if p[0]]}
        except (jinja2.TemplateError, KeyError, TypeError, ValueError,
                AttributeError) as e:
            answer = {"error": f"{type(e).__name__}: {e}"}
        print(json.dumps(answer), flush=True)


main()
