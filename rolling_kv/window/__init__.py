"""What is in the prompt: documents, hashes, eviction, token-level layout, conditioning."""

from rolling_kv.window.conditioning import Conditioning, parse_conditioning
from rolling_kv.window.conversation import ConversationLayout, layout_from
from rolling_kv.window.document import Document, content_hash, require_text
from rolling_kv.window.layout import Layout, LayoutSource, Prompt, PromptLayout, Segment, Tokenizer
from rolling_kv.window.streamed import StreamedWindow
from rolling_kv.window.window import Window, parse_eviction

__all__ = [
    "Conditioning",
    "ConversationLayout",
    "Document",
    "Layout",
    "LayoutSource",
    "Prompt",
    "PromptLayout",
    "Segment",
    "StreamedWindow",
    "Tokenizer",
    "Window",
    "content_hash",
    "layout_from",
    "parse_conditioning",
    "parse_eviction",
    "require_text",
]
