"""The tokenizer as prompts use it: no blank before a segment, and no day in a template."""

from __future__ import annotations

import json
from datetime import datetime

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rolling_kv.engine.tokenizer import ModelTokenizer
from rolling_kv.window import PromptLayout
from tests.tiny_models import CHATML, tiny_tokenizer

TEXTS = ("Ferrant Steel closed at 518 dollars.", "Mondara Bank closed at 84.", "and a small letter first")
INSTRUCTION = "Answer from the records."
QUERY = "What was the close of Ferrant Steel?"
LLAMA2 = (
    "{% if messages[0].role == 'system' %}"
    "{% set first = '<<SYS>>\\n' + messages[0].content + '\\n<</SYS>>\\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{{ bos_token + '[INST]\\n' + first + m.content + '\\n[/INST]' }}{% endfor %}"
)
ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + eos_token + '\\n' }}{% endfor %}"
    "{{ '<|assistant|>\\n' }}"
)
BLANKS = {
    "first": (None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
    "always": (None, pre_tokenizers.Metaspace(prepend_scheme="always", split=False)),
    "prepend": (normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), None),
}


def spaced(blank: str, template: str | None) -> ModelTokenizer:
    """A small tokenizer like Llama 2's: BPE over words that begin with a blank, other characters as bytes."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    words = " ".join([*TEXTS, INSTRUCTION, QUERY]).split(" ")
    trained.train_from_iterator(
        [" ".join(words)] * 3, trainers.BpeTrainer(vocab_size=300, show_progress=False)
    )
    definition = json.loads(trained.to_str())
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary += sorted(definition["model"]["vocab"], key=definition["model"]["vocab"].get)
    backend = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(vocabulary)},
            merges=[tuple(merge) for merge in definition["model"]["merges"]],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    normalizer, pre_tokenizer = BLANKS[blank]
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    wrapped.chat_template = template
    return ModelTokenizer(wrapped, name=blank)


@pytest.mark.parametrize("blank", BLANKS)
@pytest.mark.parametrize("template", [LLAMA2, ZEPHYR, None], ids=["llama2", "zephyr", "none"])
@pytest.mark.parametrize("instruction", [INSTRUCTION, ""], ids=["instructed", "bare"])
def test_the_segments_are_the_whole_text_tokenised_at_once(
    blank: str, template: str | None, instruction: str
) -> None:
    """But a prompt that begins with a document begins without a blank: it cannot know where it is."""
    model = spaced(blank, template)
    layout = PromptLayout(model, instruction=instruction)
    documents = [layout.document(text, document_id=str(number)) for number, text in enumerate(TEXTS)]
    ids = layout.prompt(documents, QUERY).token_ids
    user = "".join(f"{text}\n" for text in TEXTS) + QUERY
    messages = [{"role": "system", "content": instruction}] if instruction else []
    text = model.render([*messages, {"role": "user", "content": user}])
    if text is None:
        text = f"{instruction}\n\n{user}" if instruction else user
    whole = tuple(model._tokenizer(text, add_special_tokens=False)["input_ids"])
    if template is None and not instruction:
        assert model.decode(ids) == model.decode(whole)
        assert len({document.token_ids for document in documents}) == 3
    else:
        assert ids == whole


@pytest.mark.parametrize("blank", BLANKS)
def test_a_document_that_spells_a_special_token_stays_text(blank: str) -> None:
    model = spaced(blank, ZEPHYR)
    ids = PromptLayout(model, instruction="").document("End</s> here", document_id="x").token_ids
    assert 2 not in ids
    assert model.decode(ids) == "End</s> here\n"


def test_a_byte_level_tokenizer_that_adds_a_blank_adds_it_once() -> None:
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tiny_tokenizer().backend_tokenizer.to_str())
    )
    wrapped.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)
    model = ModelTokenizer(wrapped, name="byte-level")
    layout = PromptLayout(model, instruction="Be brief.")
    ids = layout.prompt([layout.document("one", document_id="1")], "two?").token_ids
    assert model.decode(ids) == " Be brief.\n\none\ntwo?"


def test_a_template_that_asks_for_the_day_is_told_the_same_one_always(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As Llama 3.1's asks."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer().backend_tokenizer)
    tokenizer.chat_template = "{{ 'Today Date: ' + strftime_now('%d %b %Y') + '\\n' }}" + CHATML
    message = {"role": "user", "content": "Well?"}
    asked = tokenizer.apply_chat_template([message], tokenize=False)
    assert f"Today Date: {datetime.now():%d %b %Y}" in asked, "on its own it depends on the day"
    rendered = ModelTokenizer(tokenizer, name="dated").render([message])
    assert (
        rendered == f"Today Date: 26 Jul 2024\n{ModelTokenizer(tiny_tokenizer(), name='x').render([message])}"
    )


@pytest.mark.parametrize("start", ["", "\n", "  \n", "  {% if true %}x{% endif %}\n", "{# note #}\n "])
@pytest.mark.parametrize("form", ["%d %B %Y", "%A, %-d %b %y", "%Y-%m-%d %H:%M:%S %p", "%j%%", "no date"])
def test_freezing_the_day_changes_nothing_else(start: str, form: str) -> None:
    """Compared with the same template that has the date written in it."""
    template = (
        "{% macro day() %}{% if strftime_now is defined %}{{ strftime_now('FORM') }}{% endif %}{% endmacro %}"
        "{% for m in messages %}{{ day() + m.content }}{% endfor %}"
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer().backend_tokenizer)
    tokenizer.chat_template = start + template.replace("FORM", form)
    rendered = ModelTokenizer(tokenizer, name="dated").render([{"role": "user", "content": "Well?"}])
    written = datetime(2024, 7, 26).strftime(form.replace("%%", "")) + "%%" * form.count("%%")
    plain = start + template.replace("{{ strftime_now('FORM') }}", written)
    expected = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Well?"}], tokenize=False, chat_template=plain
    )
    assert rendered == expected
