"""What is in the prompt: documents, hashes, eviction, token-level layout, conditioning."""

from rolling_kv.window.conditioning import Conditioning, parse_conditioning
from rolling_kv.window.conversation import ConversationLayout
from rolling_kv.window.document import Document, content_hash, require_text
from rolling_kv.window.layout import Layout, Prompt, PromptLayout, Segment, Tokenizer
from rolling_kv.window.window import Window, parse_eviction

__all__ = [
    "Conditioning",
    "ConversationLayout",
    "Document",
    "Layout",
    "Prompt",
    "PromptLayout",
    "Segment",
    "Tokenizer",
    "Window",
    "content_hash",
    "parse_conditioning",
    "parse_eviction",
    "require_text",
]
