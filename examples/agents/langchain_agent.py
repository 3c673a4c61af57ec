"""A LangChain agent with a tool, a checkpointer and a memory that survives a restart.

    python examples/agents/langchain_agent.py

It starts itself twice: the second process finds the conversation in SQLite and its KV in a folder, and goes
on where the first one stopped. It runs on a demo model of 135M parameters, on a CPU, without a network. So
small a model does not call tools by itself: a middleware has it look something up before it answers.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, ModelResponse, wrap_model_call
from langchain_core.messages import AIMessage, HumanMessage
from langchain_rolling_kv import ChatRollingKV, RollingKVMiddleware
from langgraph.checkpoint.sqlite import SqliteSaver

Company = Literal["Ferrant Steel", "Mondara Bank", "Kestrel Motors", "Lumiard Optics"]
PRICES = {"Ferrant Steel": 518.55, "Mondara Bank": 84.10, "Kestrel Motors": 948.20, "Lumiard Optics": 419.75}
BEFORE_THE_RESTART = ["What did Ferrant Steel close at?", "What did Mondara Bank close at?"]
AFTER_IT = ["What did Kestrel Motors close at?"]


def closing_price(company: Company) -> str:
    """Looks up the closing price of a company."""
    return f"{company} closed at {PRICES[company]:.2f} dollars on 4 March 2024."


@wrap_model_call
def look_up_first(
    request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
) -> ModelResponse[Any]:
    """A call for every question, and an answer for every result."""
    asked = isinstance(request.messages[-1], HumanMessage)
    return handler(request.override(tool_choice="any" if asked else "none"))


def run(questions: list[str], *, folder: Path, model: str) -> None:
    """Asks in one thread of conversation, whose messages and KV are kept in `folder`."""
    with SqliteSaver.from_conn_string(str(folder / "conversation.sqlite")) as saver:
        agent = create_agent(
            ChatRollingKV(model=model, store_path=str(folder / "kv"), max_tokens=96),
            [closing_price],
            system_prompt="You are a market analyst. Say in one sentence what the record says.",
            middleware=[look_up_first, RollingKVMiddleware(window=6)],
            checkpointer=saver,
        )
        for question in questions:
            print(question)
            state = agent.invoke(
                {"messages": [HumanMessage(question)]}, {"configurable": {"thread_id": "prices"}}
            )
            asked = max(n for n, one in enumerate(state["messages"]) if isinstance(one, HumanMessage))
            for message in state["messages"][asked:]:
                if isinstance(message, AIMessage):
                    show(message)


def show(message: AIMessage) -> None:
    called = [f"{call['name']}({call['args']})" for call in message.tool_calls]
    usage = message.usage_metadata
    assert usage is not None
    details = usage["input_token_details"]
    print(f"  {message.text or ', '.join(called)}")
    print(
        f"  {usage['input_tokens']} prompt tokens: KV of {details['cache_read']} was there and kept, "
        f"of {details['cache_creation']} was stored"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("questions", nargs="*", help="asked in one process; none: the restart is shown")
    parser.add_argument("--folder", type=Path, help="keeps conversation and KV; by default a temporary one")
    parser.add_argument("--model", default="smollm2", help="a folder, a hub id or a demo model")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if given.questions:
            run(given.questions, folder=folder, model=given.model)
            return
        for questions in (BEFORE_THE_RESTART, AFTER_IT):
            print("A new process.", flush=True)
            command = [sys.executable, __file__, "--folder", str(folder), "--model", given.model, *questions]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
